// A Vulkan layer for drivers without hardware (scripts/null-gpu): programs that want to run something find memory, fences and
// queues that do nothing, and go on to make their pipelines, which the driver compiles for real. For every compute
// pipeline a line goes to the file that NULL_LAYER_LOG names: workgroup, specialisation constants, subgroup size asked for,
// and the driver's statistics. scripts/bench/compare-kernels builds it and runs other programs with it.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <vulkan/vk_layer.h>
#include <vulkan/vulkan.h>

#define EXPORT __attribute__((visibility("default")))
#define HEAP (64ull << 30)

static PFN_vkGetInstanceProcAddr next_instance;
static PFN_vkGetDeviceProcAddr next_device;
static VkInstance the_instance;
static VkDevice the_device;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// A handle that is not null and not met again.
static uint64_t fresh(void) {
  static uint64_t count = 0x1000;
  return __atomic_add_fetch(&count, 16, __ATOMIC_RELAXED);
}

// --- memory: host memory that nobody touches costs nothing ---

typedef struct Memory {
  VkDeviceSize size;
  void *at;
} Memory;

static void fill_memory(VkPhysicalDeviceMemoryProperties *out) {
  memset(out, 0, sizeof *out);
  out->memoryHeapCount = 1;
  out->memoryHeaps[0] = (VkMemoryHeap){HEAP, VK_MEMORY_HEAP_DEVICE_LOCAL_BIT};
  VkMemoryPropertyFlags host = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
  VkMemoryPropertyFlags kinds[] = {VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, host | VK_MEMORY_PROPERTY_HOST_CACHED_BIT,
                                   host | VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT};
  out->memoryTypeCount = 3;
  for (int i = 0; i < 3; i++) out->memoryTypes[i] = (VkMemoryType){kinds[i], 0};
}

static void memory_properties(VkPhysicalDevice d, VkPhysicalDeviceMemoryProperties *out) {
  (void)d;
  fill_memory(out);
}

static void memory_properties2(VkPhysicalDevice d, VkPhysicalDeviceMemoryProperties2 *out) {
  (void)d;
  fill_memory(&out->memoryProperties);
  for (VkBaseOutStructure *s = out->pNext; s; s = s->pNext)
    if (s->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT)
      ((VkPhysicalDeviceMemoryBudgetPropertiesEXT *)s)->heapBudget[0] = HEAP;
}

static VkResult allocate(VkDevice d, const VkMemoryAllocateInfo *info, const void *a, VkDeviceMemory *out) {
  (void)d, (void)a;
  Memory *m = malloc(sizeof *m);
  m->size = info->allocationSize;
  m->at = mmap(NULL, m->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *out = (VkDeviceMemory)m;
  return m->at == MAP_FAILED ? VK_ERROR_OUT_OF_DEVICE_MEMORY : VK_SUCCESS;
}

static void release(VkDevice d, VkDeviceMemory memory, const void *a) {
  (void)d, (void)a;
  Memory *m = (Memory *)memory;
  if (!m) return;
  munmap(m->at, m->size);
  free(m);
}

static VkResult map(VkDevice d, VkDeviceMemory memory, VkDeviceSize at, VkDeviceSize size, VkMemoryMapFlags f, void **out) {
  (void)d, (void)size, (void)f;
  *out = (char *)((Memory *)memory)->at + at;
  return VK_SUCCESS;
}

static VkResult create_buffer(VkDevice d, const VkBufferCreateInfo *info, const void *a, VkBuffer *out) {
  (void)d, (void)a;
  VkDeviceSize *size = malloc(sizeof *size);
  *size = info->size;
  *out = (VkBuffer)size;
  return VK_SUCCESS;
}

static void destroy_buffer(VkDevice d, VkBuffer b, const void *a) {
  (void)d, (void)a;
  free((void *)b);
}

static void needs(VkDevice d, VkBuffer b, VkMemoryRequirements *out) {
  (void)d;
  *out = (VkMemoryRequirements){(*(VkDeviceSize *)b + 255) & ~255ull, 256, 7};
}

static void needs2(VkDevice d, const VkBufferMemoryRequirementsInfo2 *info, VkMemoryRequirements2 *out) {
  needs(d, info->buffer, &out->memoryRequirements);
}

static VkDeviceAddress address(VkDevice d, const VkBufferDeviceAddressInfo *info) {
  (void)d, (void)info;
  return 1 << 20;
}

// --- things that only have to exist ---

static VkResult create_any(VkDevice d, const void *info, const void *a, uint64_t *out) {
  (void)d, (void)info, (void)a;
  *out = fresh();
  return VK_SUCCESS;
}

static VkResult descriptor_sets(VkDevice d, const VkDescriptorSetAllocateInfo *info, VkDescriptorSet *out) {
  (void)d;
  for (uint32_t i = 0; i < info->descriptorSetCount; i++) out[i] = (VkDescriptorSet)fresh();
  return VK_SUCCESS;
}

static VkResult counter(VkDevice d, VkSemaphore s, uint64_t *out) {
  (void)d, (void)s;
  *out = ~0ull;
  return VK_SUCCESS;
}

static VkResult event_status(VkDevice d, VkEvent e) {
  (void)d, (void)e;
  return VK_EVENT_SET;
}

static VkResult nothing(void) { return VK_SUCCESS; }

// --- pipelines: the driver's own work, and what it tells of it ---

static void tell(VkPipeline pipeline, const VkComputePipelineCreateInfo *info) {
  const char *path = getenv("NULL_LAYER_LOG");
  PFN_vkGetPipelineExecutableStatisticsKHR statistics =
      (PFN_vkGetPipelineExecutableStatisticsKHR)next_device(the_device, "vkGetPipelineExecutableStatisticsKHR");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file || !statistics) return;
  uint32_t size = 0;
  for (const VkBaseInStructure *s = info->stage.pNext; s; s = s->pNext)
    if (s->sType == VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO)
      size = ((const VkPipelineShaderStageRequiredSubgroupSizeCreateInfo *)s)->requiredSubgroupSize;
  fprintf(file, "subgroup %u; constants", size);
  const VkSpecializationInfo *constants = info->stage.pSpecializationInfo;
  for (uint32_t i = 0; constants && i < constants->mapEntryCount; i++) {
    VkSpecializationMapEntry entry = constants->pMapEntries[i];
    uint32_t value = 0;
    memcpy(&value, (const char *)constants->pData + entry.offset, entry.size < 4 ? entry.size : 4);
    fprintf(file, " %u=%u", entry.constantID, value);
  }
  VkPipelineExecutableInfoKHR which = {VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_INFO_KHR, NULL, pipeline, 0};
  VkPipelineExecutableStatisticKHR rows[64];
  uint32_t count = 64;
  for (uint32_t i = 0; i < count; i++) rows[i] = (VkPipelineExecutableStatisticKHR){VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_STATISTIC_KHR};
  statistics(the_device, &which, &count, rows);
  for (uint32_t i = 0; i < count; i++) fprintf(file, "; %s %llu", rows[i].name, (unsigned long long)rows[i].value.u64);
  fprintf(file, "\n");
  fclose(file);
}

static VkResult create_pipelines(VkDevice d, VkPipelineCache cache, uint32_t n, const VkComputePipelineCreateInfo *infos,
                                 const VkAllocationCallbacks *a, VkPipeline *out) {
  PFN_vkCreateComputePipelines next = (PFN_vkCreateComputePipelines)next_device(d, "vkCreateComputePipelines");
  for (uint32_t i = 0; i < n; i++) {
    VkComputePipelineCreateInfo info = infos[i];
    info.flags |= VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR;
    VkResult result = next(d, cache, 1, &info, a, &out[i]);
    if (result != VK_SUCCESS) return result;
    pthread_mutex_lock(&lock);
    tell(out[i], &info);
    pthread_mutex_unlock(&lock);
  }
  return VK_SUCCESS;
}

// --- the layer itself ---

static void *chain_link(const void *next, VkStructureType type) {
  for (const VkBaseInStructure *s = next; s; s = s->pNext)
    // Both kinds of link begin alike.
    if (s->sType == type && ((const VkLayerInstanceCreateInfo *)s)->function == VK_LAYER_LINK_INFO) return (void *)s;
  return NULL;
}

static VkResult create_instance(const VkInstanceCreateInfo *info, const VkAllocationCallbacks *a, VkInstance *out) {
  VkLayerInstanceCreateInfo *chain = chain_link(info->pNext, VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO);
  next_instance = chain->u.pLayerInfo->pfnNextGetInstanceProcAddr;
  chain->u.pLayerInfo = chain->u.pLayerInfo->pNext;
  VkResult result = ((PFN_vkCreateInstance)next_instance(NULL, "vkCreateInstance"))(info, a, out);
  the_instance = *out;
  return result;
}

static VkResult create_device(VkPhysicalDevice p, const VkDeviceCreateInfo *info, const VkAllocationCallbacks *a, VkDevice *out) {
  VkLayerDeviceCreateInfo *chain = chain_link(info->pNext, VK_STRUCTURE_TYPE_LOADER_DEVICE_CREATE_INFO);
  PFN_vkGetInstanceProcAddr instance = chain->u.pLayerInfo->pfnNextGetInstanceProcAddr;
  next_device = chain->u.pLayerInfo->pfnNextGetDeviceProcAddr;
  chain->u.pLayerInfo = chain->u.pLayerInfo->pNext;
  VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR tells = {
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PIPELINE_EXECUTABLE_PROPERTIES_FEATURES_KHR, (void *)info->pNext, VK_TRUE};
  uint32_t count = info->enabledExtensionCount;
  const char **names = malloc((count + 1) * sizeof *names);
  int there = 0;
  for (uint32_t i = 0; i < count; i++) {
    names[i] = info->ppEnabledExtensionNames[i];
    there |= !strcmp(names[i], VK_KHR_PIPELINE_EXECUTABLE_PROPERTIES_EXTENSION_NAME);
  }
  names[count] = VK_KHR_PIPELINE_EXECUTABLE_PROPERTIES_EXTENSION_NAME;
  VkDeviceCreateInfo more = *info;
  if (!there) {
    more.pNext = &tells;
    more.enabledExtensionCount = count + 1;
    more.ppEnabledExtensionNames = names;
  }
  VkResult result = ((PFN_vkCreateDevice)instance(the_instance, "vkCreateDevice"))(p, &more, a, out);
  the_device = *out;
  free(names);
  return result;
}

static PFN_vkVoidFunction device_function(VkDevice device, const char *name);
static PFN_vkVoidFunction instance_function(VkInstance instance, const char *name);

#define ROW(name, function) {name, (PFN_vkVoidFunction)function}
static const struct Row {
  const char *name;
  PFN_vkVoidFunction function;
} ours[] = {
    ROW("vkGetInstanceProcAddr", instance_function), ROW("vkGetDeviceProcAddr", device_function),
    ROW("vkCreateInstance", create_instance), ROW("vkCreateDevice", create_device),
    ROW("vkGetPhysicalDeviceMemoryProperties", memory_properties),
    ROW("vkGetPhysicalDeviceMemoryProperties2", memory_properties2),
    ROW("vkGetPhysicalDeviceMemoryProperties2KHR", memory_properties2), ROW("vkAllocateMemory", allocate),
    ROW("vkFreeMemory", release), ROW("vkMapMemory", map), ROW("vkCreateBuffer", create_buffer),
    ROW("vkDestroyBuffer", destroy_buffer), ROW("vkGetBufferMemoryRequirements", needs),
    ROW("vkGetBufferMemoryRequirements2", needs2), ROW("vkGetBufferMemoryRequirements2KHR", needs2),
    ROW("vkGetBufferDeviceAddress", address), ROW("vkGetBufferDeviceAddressKHR", address), ROW("vkCreateFence", create_any),
    ROW("vkCreateSemaphore", create_any), ROW("vkCreateEvent", create_any), ROW("vkCreateQueryPool", create_any),
    ROW("vkCreateDescriptorPool", create_any), ROW("vkAllocateDescriptorSets", descriptor_sets),
    ROW("vkGetSemaphoreCounterValue", counter), ROW("vkGetEventStatus", event_status),
    ROW("vkCreateComputePipelines", create_pipelines),
};

// What only the driver can do, and needs no hardware.
static const char *const theirs[] = {
    "vkDestroyDevice", "vkGetDeviceQueue", "vkGetDeviceQueue2", "vkCreateShaderModule", "vkDestroyShaderModule",
    "vkDestroyPipeline", "vkCreatePipelineLayout", "vkDestroyPipelineLayout", "vkCreateDescriptorSetLayout",
    "vkDestroyDescriptorSetLayout", "vkCreatePipelineCache", "vkDestroyPipelineCache", "vkGetPipelineCacheData",
    "vkMergePipelineCaches", "vkCreateCommandPool", "vkDestroyCommandPool", "vkAllocateCommandBuffers",
    "vkFreeCommandBuffers", "vkGetPipelineExecutablePropertiesKHR", "vkGetPipelineExecutableStatisticsKHR",
};

static PFN_vkVoidFunction device_function(VkDevice device, const char *name) {
  for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
    if (!strcmp(ours[i].name, name)) return ours[i].function;
  PFN_vkVoidFunction next = next_device ? next_device(device, name) : NULL;
  if (!next) return NULL;
  for (size_t i = 0; i < sizeof theirs / sizeof *theirs; i++)
    if (!strcmp(theirs[i], name)) return next;
  return (PFN_vkVoidFunction)nothing;
}

static PFN_vkVoidFunction instance_function(VkInstance instance, const char *name) {
  for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
    if (!strcmp(ours[i].name, name)) return ours[i].function;
  return next_instance ? next_instance(instance, name) : NULL;
}

EXPORT VkResult vkNegotiateLoaderLayerInterfaceVersion(VkNegotiateLayerInterface *interface) {
  interface->loaderLayerInterfaceVersion = 2;
  interface->pfnGetInstanceProcAddr = instance_function;
  interface->pfnGetDeviceProcAddr = device_function;
  interface->pfnGetPhysicalDeviceProcAddr = NULL;
  return VK_SUCCESS;
}
