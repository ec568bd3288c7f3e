// A Vulkan layer that takes the device away in the middle of its work, as a cable does that is pulled out. The driver below it works as long
// as there is no file of the name that LOST_LAYER_FILE has. While there is one, submits and waits end with VK_ERROR_DEVICE_LOST, no device can
// be made, and none is listed; devices that were lost stay so, and have ended all work by then. crates/kiln/tests/lost.rs builds it and runs Kiln with it.
//
//     cc -O1 -fPIC -shared -fvisibility=hidden -pthread -Wl,-z,nodelete -o liblost_layer.so layer.c
//
// It needs no header: the few types it uses stand here. Static state must last longer than one instance, therefore `nodelete`.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

typedef int32_t Result;
typedef void (*Function)(void);
typedef Function (*GetProcAddr)(void *, const char *);

enum { SUCCESS = 0, INITIALIZATION_FAILED = -3, DEVICE_LOST = -4, INSTANCE_INFO = 47, DEVICE_INFO = 48, LINK = 0 };

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

static Result submit(void *queue, uint32_t n, const void *infos, uint64_t fence) {
  if (is_lost(queue)) return DEVICE_LOST;
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
      {"vkDeviceWaitIdle", (Function)wait_idle},
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
