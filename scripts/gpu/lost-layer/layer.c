// A Vulkan layer that takes the device away in the middle of its work, as a cable does that is pulled out. The driver below it works as long
// as there is no file of the name that LOST_LAYER_FILE has. While there is one, submits and waits end with VK_ERROR_DEVICE_LOST, no device can
// be made, and none is listed; devices that were lost stay so, and have ended all work by then. crates/kiln/tests/lost.rs builds it and runs Kiln with it.
//
// Files whose names go on behind that one inject single faults. Each holds a number n, and is taken away when it is seen:
//     -alloc      the n-th allocation from then on finds no memory
//     -pipeline   the n-th pipeline from then on cannot be made
//     -submit     at the n-th submit from then on the device is lost; it can be opened again at once
// With the file -slow each submit waits for so many milliseconds first. What was injected is appended to the file -log, one letter each.
//
//     cc -O1 -fPIC -shared -fvisibility=hidden -pthread -Wl,-z,nodelete -o liblost_layer.so layer.c
//
// It needs no header: the few types it uses stand here. Static state must last longer than one instance, therefore `nodelete`.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

typedef int32_t Result;
typedef void (*Function)(void);
typedef Function (*GetProcAddr)(void *, const char *);

enum { SUCCESS = 0, OUT_OF_DEVICE_MEMORY = -2, INITIALIZATION_FAILED = -3, DEVICE_LOST = -4, INSTANCE_INFO = 47, DEVICE_INFO = 48, LINK = 0 };

typedef struct Link {
  struct Link *next;
  GetProcAddr instance_proc;
  GetProcAddr device_proc;
} Link;

typedef struct Info {
  int32_t type;
  struct Info *next;
  int32_t function;
  Link *link;
} Info;

typedef struct {
  int32_t type;
  void *next;
  uint32_t version;
  GetProcAddr instance_proc;
  GetProcAddr device_proc;
  GetProcAddr physical_proc;
} Negotiate;

// What comes behind this layer, by the first word of a handle, which instances and devices share with all that belongs to them.
static struct {
  void *key;
  void *handle;
  GetProcAddr proc;
  int lost;
} known[256];
static int count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int is_gone(void) {
  const char *file = getenv("LOST_LAYER_FILE");
  return file && !access(file, F_OK);
}

// The number in the file of a fault; 0 where there is none.
static int number_in(const char *fault, int take) {
  const char *file = getenv("LOST_LAYER_FILE");
  char name[4096];
  if (!file || snprintf(name, sizeof name, "%s-%s", file, fault) >= (int)sizeof name || access(name, F_OK)) return 0;
  int n = 0;
  FILE *from = fopen(name, "r");
  if (from && fscanf(from, "%d", &n) != 1) n = 0;
  if (from) fclose(from);
  if (take && n) unlink(name);
  return n;
}

// Whether this call is the one that fails.
static int is_due(const char *fault, int *left) {
  pthread_mutex_lock(&lock);
  int n = number_in(fault, 1);
  if (n) *left = n;
  int due = *left > 0 && --*left == 0;
  pthread_mutex_unlock(&lock);
  const char *file = getenv("LOST_LAYER_FILE");
  char name[4096];
  if (due && file && snprintf(name, sizeof name, "%s-log", file) < (int)sizeof name) {
    FILE *log = fopen(name, "a");
    if (log) fputc(*fault, log), fclose(log);
  }
  return due;
}

static void remember(void *handle, GetProcAddr proc) {
  pthread_mutex_lock(&lock);
  int at = 0;
  while (at < count && known[at].key != *(void **)handle) at++;
  if (at == 256) abort();
  if (at == count) count++;
  known[at].key = *(void **)handle, known[at].handle = handle, known[at].proc = proc, known[at].lost = 0;
  pthread_mutex_unlock(&lock);
}

static Function next(void *handle, const char *name) {
  for (int at = count - 1; at >= 0; at--)
    if (known[at].key == *(void **)handle) return known[at].proc(known[at].handle, name);
  abort();
}

// Whether the device that a handle belongs to is lost; it is from the first time on that it is gone. A lost device runs nothing any more, and a
// program may free what it used at once. The driver below is well: what was submitted ends before the program learns of the loss.
static int is_lost(void *handle) {
  int lost = 0;
  pthread_mutex_lock(&lock);
  for (int at = count - 1; at >= 0; at--)
    if (known[at].key == *(void **)handle) {
      if (!known[at].lost && is_gone()) {
        ((Result(*)(void *))known[at].proc(known[at].handle, "vkDeviceWaitIdle"))(known[at].handle);
        known[at].lost = 1;
      }
      lost = known[at].lost;
      break;
    }
  pthread_mutex_unlock(&lock);
  return lost;
}

// From now on the device that a handle belongs to is lost, if that is due.
static void lose(void *handle, int due) {
  pthread_mutex_lock(&lock);
  for (int at = count - 1; due && at >= 0; at--)
    if (known[at].key == *(void **)handle) {
      ((Result(*)(void *))known[at].proc(known[at].handle, "vkDeviceWaitIdle"))(known[at].handle);
      known[at].lost = 1;
      break;
    }
  pthread_mutex_unlock(&lock);
}

static Info *link_info(const Info *info, int32_t type) {
  Info *at = info->next;
  while (at && !(at->type == type && at->function == LINK)) at = at->next;
  if (!at) abort();
  return at;
}

static Result create_instance(const Info *info, const void *allocator, void **out) {
  Info *chain = link_info(info, INSTANCE_INFO);
  GetProcAddr proc = chain->link->instance_proc;
  chain->link = chain->link->next;
  Result made = ((Result(*)(const Info *, const void *, void **))proc(NULL, "vkCreateInstance"))(info, allocator, out);
  if (made == SUCCESS) remember(*out, proc);
  return made;
}

static Result create_device(void *physical, const Info *info, const void *allocator, void **out) {
  if (is_gone()) return INITIALIZATION_FAILED;
  Info *chain = link_info(info, DEVICE_INFO);
  GetProcAddr proc = chain->link->device_proc;
  Function create = next(physical, "vkCreateDevice");
  chain->link = chain->link->next;
  Result made = ((Result(*)(void *, const Info *, const void *, void **))create)(physical, info, allocator, out);
  if (made == SUCCESS) remember(*out, proc);
  return made;
}

static Result enumerate(void *instance, uint32_t *devices, void **out) {
  if (is_gone()) {
    *devices = 0;
    return SUCCESS;
  }
  return ((Result(*)(void *, uint32_t *, void **))next(instance, "vkEnumeratePhysicalDevices"))(instance, devices, out);
}

static Result allocate_memory(void *device, const void *info, const void *allocator, uint64_t *memory) {
  static int left;
  if (is_due("alloc", &left)) return OUT_OF_DEVICE_MEMORY;
  return ((Result(*)(void *, const void *, const void *, uint64_t *))next(device, "vkAllocateMemory"))(device, info, allocator,
                                                                                                       memory);
}

static Result create_pipelines(void *device, uint64_t cache, uint32_t n, const void *infos, const void *allocator, uint64_t *out) {
  static int left;
  if (is_due("pipeline", &left)) {
    memset(out, 0, n * sizeof *out);
    return OUT_OF_DEVICE_MEMORY;
  }
  return ((Result(*)(void *, uint64_t, uint32_t, const void *, const void *, uint64_t *))next(device, "vkCreateComputePipelines"))(
      device, cache, n, infos, allocator, out);
}

static Result submit(void *queue, uint32_t n, const void *infos, uint64_t fence) {
  static int left;
  lose(queue, is_due("submit", &left));
  if (is_lost(queue)) return DEVICE_LOST;
  int milliseconds = number_in("slow", 0);
  if (milliseconds) usleep(1000 * milliseconds);
  return ((Result(*)(void *, uint32_t, const void *, uint64_t))next(queue, "vkQueueSubmit"))(queue, n, infos, fence);
}

static Result wait_semaphores(void *device, const void *info, uint64_t timeout) {
  if (is_lost(device)) return DEVICE_LOST;
  return ((Result(*)(void *, const void *, uint64_t))next(device, "vkWaitSemaphores"))(device, info, timeout);
}

static Result semaphore_value(void *device, uint64_t semaphore, uint64_t *value) {
  if (is_lost(device)) return DEVICE_LOST;
  return ((Result(*)(void *, uint64_t, uint64_t *))next(device, "vkGetSemaphoreCounterValue"))(device, semaphore, value);
}

static Result wait_idle(void *device) {
  if (is_lost(device)) return DEVICE_LOST;
  return ((Result(*)(void *))next(device, "vkDeviceWaitIdle"))(device);
}

static Function own(const char *name);

static Function instance_proc(void *instance, const char *name) {
  Function found = own(name);
  if (found || !instance) return found;
  return next(instance, name);
}

static Function device_proc(void *device, const char *name) {
  Function found = own(name);
  return found ? found : next(device, name);
}

static Function own(const char *name) {
  static const struct {
    const char *name;
    Function function;
  } all[] = {
      {"vkGetInstanceProcAddr", (Function)instance_proc}, {"vkGetDeviceProcAddr", (Function)device_proc},
      {"vkCreateInstance", (Function)create_instance},    {"vkCreateDevice", (Function)create_device},
      {"vkEnumeratePhysicalDevices", (Function)enumerate}, {"vkQueueSubmit", (Function)submit},
      {"vkWaitSemaphores", (Function)wait_semaphores},    {"vkGetSemaphoreCounterValue", (Function)semaphore_value},
      {"vkDeviceWaitIdle", (Function)wait_idle},          {"vkAllocateMemory", (Function)allocate_memory},
      {"vkCreateComputePipelines", (Function)create_pipelines},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (!strcmp(all[i].name, name)) return all[i].function;
  return NULL;
}

EXPORT Result vkNegotiateLoaderLayerInterfaceVersion(Negotiate *with) {
  with->version = 2;
  with->instance_proc = instance_proc, with->device_proc = device_proc, with->physical_proc = NULL;
  return SUCCESS;
}
