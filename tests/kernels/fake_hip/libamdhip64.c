/* A HIP runtime without a GPU. It answers for the device that FAKE_HIP_DEVICE describes, "gfx942:sramecc+:xnack- 64 65536 304" (the target's
 * name, threads of a wave, bytes of LDS, compute units), runs nothing, and reports every call to an observer. While a stream is being
 * captured it refuses what a runtime refuses then: loading and unloading modules, allocations, waits.
 *
 * It is compiled against the headers that Triton's wheel has, so structures have the layout which that Triton's driver expects.
 */
#define __HIP_PLATFORM_AMD__
#include <hip/hip_runtime.h>
#include <hip/hip_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  const char* call;
  int captured;        /* whether a stream was being captured; of a launch, whether its own was */
  void* handle;        /* module or function */
  const void* image;   /* code object of a module, or of the module of a function */
  size_t image_bytes;
  const char* kernel;  /* name of a function */
  unsigned dimensions[6];
  unsigned lds_bytes;
  int cooperative;
  void* stream;
  void** params;
} Event;

typedef void (*Observer)(const Event*);

typedef struct {
  const void* image;
  size_t bytes;
} Module;

typedef struct {
  Module* module;
  char name[512];
} Function;

static Observer observer;
static int capturing;
static hipStream_t captured_stream;

void fake_hip_observe(Observer wanted) { observer = wanted; }

static Event event_of(const char* call) {
  Event event;
  memset(&event, 0, sizeof event);
  event.call = call;
  event.captured = capturing;
  return event;
}

static void report(const Event* event) {
  if (observer) observer(event);
}

/* Reports a call, and says whether a runtime refuses it now. */
static hipError_t outside_captures(const char* call, void* handle) {
  Event event = event_of(call);
  event.handle = handle;
  report(&event);
  return capturing ? hipErrorStreamCaptureUnsupported : hipSuccess;
}

static void described(char* target, int* wave, int* lds, int* units) {
  const char* text = getenv("FAKE_HIP_DEVICE");
  if (!text || sscanf(text, "%63s %d %d %d", target, wave, lds, units) != 4) {
    fprintf(stderr, "FAKE_HIP_DEVICE must be \"TARGET WAVE LDS UNITS\"\n");
    abort();
  }
}

hipError_t hipDriverGetVersion(int* version) {
  *version = 70200000;
  return hipSuccess;
}

hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int ordinal) {
  char target[64];
  int wave, lds, units;
  Event event = event_of("hipGetDeviceProperties");
  report(&event);
  if (ordinal != 0) return hipErrorInvalidDevice;
  described(target, &wave, &lds, &units);
  memset(properties, 0, sizeof *properties);
  strcpy(properties->gcnArchName, target);
  properties->warpSize = wave;
  properties->sharedMemPerBlock = lds;
  properties->multiProcessorCount = units;
  properties->regsPerBlock = 65536;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->cooperativeLaunch = 1;
  return hipSuccess;
}

/* Bytes of an ELF file: its section headers come last. */
static size_t elf_bytes(const unsigned char* image) {
  uint64_t at;
  uint16_t size, count;
  memcpy(&at, image + 40, sizeof at);
  memcpy(&size, image + 58, sizeof size);
  memcpy(&count, image + 60, sizeof count);
  return at + (size_t)size * count;
}

/* The caller may free the image afterwards. */
static hipError_t load(const char* call, hipModule_t* result, const void* image) {
  Event event = event_of(call);
  Module* module;
  void* copy;
  if (memcmp(image, "\177ELF", 4)) return hipErrorInvalidImage;
  module = malloc(sizeof *module);
  module->bytes = elf_bytes(image);
  copy = malloc(module->bytes);
  memcpy(copy, image, module->bytes);
  module->image = copy;
  event.handle = module;
  event.image = module->image;
  event.image_bytes = module->bytes;
  report(&event);
  if (capturing) return hipErrorStreamCaptureUnsupported;
  *result = (hipModule_t)module;
  return hipSuccess;
}

hipError_t hipModuleLoadData(hipModule_t* module, const void* image) { return load("hipModuleLoadData", module, image); }

hipError_t hipModuleLoadDataEx(hipModule_t* module, const void* image, unsigned count, hipJitOption* options, void** values) {
  (void)count, (void)options, (void)values;
  return load("hipModuleLoadDataEx", module, image);
}

/* Handles are never used again, so that a launch through one of an unloaded module would show. */
hipError_t hipModuleUnload(hipModule_t module) { return outside_captures("hipModuleUnload", module); }

hipError_t hipModuleGetFunction(hipFunction_t* result, hipModule_t module, const char* name) {
  Event event = event_of("hipModuleGetFunction");
  Function* function = malloc(sizeof *function);
  function->module = (Module*)module;
  snprintf(function->name, sizeof function->name, "%s", name);
  event.handle = function;
  event.image = function->module->image;
  event.image_bytes = function->module->bytes;
  event.kernel = function->name;
  report(&event);
  *result = (hipFunction_t)function;
  return hipSuccess;
}

hipError_t hipFuncGetAttribute(int* value, hipFunction_attribute attribute, hipFunction_t function) {
  Event event = event_of("hipFuncGetAttribute");
  event.handle = function;
  report(&event);
  *value = attribute == HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return hipSuccess;
}

hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int ordinal) {
  hipDeviceProp_t properties;
  hipError_t status = hipGetDeviceProperties(&properties, ordinal);
  if (status != hipSuccess) return status;
  switch (attribute) {
    case hipDeviceAttributeWarpSize:
      *value = properties.warpSize;
      return hipSuccess;
    case hipDeviceAttributeMaxSharedMemoryPerBlock:
      *value = (int)properties.sharedMemPerBlock;
      return hipSuccess;
    case hipDeviceAttributeMultiprocessorCount:
      *value = properties.multiProcessorCount;
      return hipSuccess;
    default:
      return hipErrorInvalidValue;
  }
}

static hipError_t launch(const char* call, hipFunction_t handle, const unsigned dimensions[6], unsigned lds_bytes, int cooperative,
                         hipStream_t stream, void** params, void** extra) {
  char target[64];
  int wave, lds, units, i;
  Function* function = (Function*)handle;
  Event event = event_of(call);
  described(target, &wave, &lds, &units);
  event.captured = capturing && stream == captured_stream;
  event.handle = function;
  event.image = function->module->image;
  event.image_bytes = function->module->bytes;
  event.kernel = function->name;
  memcpy(event.dimensions, dimensions, sizeof event.dimensions);
  event.lds_bytes = lds_bytes;
  event.cooperative = cooperative;
  event.stream = stream;
  event.params = params;
  report(&event);
  for (i = 0; i < 6; i++)
    if (dimensions[i] == 0) return hipErrorInvalidConfiguration;
  if (dimensions[3] * dimensions[4] * dimensions[5] > 1024 || lds_bytes > (unsigned)lds) return hipErrorInvalidConfiguration;
  return params == NULL || extra != NULL ? hipErrorInvalidValue : hipSuccess;
}

hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                 unsigned lds_bytes, hipStream_t stream, void** params, void** extra) {
  const unsigned dimensions[6] = {gx, gy, gz, bx, by, bz};
  return launch("hipModuleLaunchKernel", function, dimensions, lds_bytes, 0, stream, params, extra);
}

hipError_t hipModuleLaunchCooperativeKernel(hipFunction_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                            unsigned bz, unsigned lds_bytes, hipStream_t stream, void** params) {
  const unsigned dimensions[6] = {gx, gy, gz, bx, by, bz};
  return launch("hipModuleLaunchCooperativeKernel", function, dimensions, lds_bytes, 1, stream, params, NULL);
}

hipError_t hipDrvLaunchKernelEx(const HIP_LAUNCH_CONFIG* config, hipFunction_t function, void** params, void** extra) {
  const unsigned dimensions[6] = {config->gridDimX,  config->gridDimY,  config->gridDimZ,
                                  config->blockDimX, config->blockDimY, config->blockDimZ};
  int cooperative = 0;
  unsigned i;
  for (i = 0; i < config->numAttrs; i++)
    if (config->attrs[i].id == hipLaunchAttributeCooperative) cooperative = config->attrs[i].val.cooperative;
  return launch("hipDrvLaunchKernelEx", function, dimensions, config->sharedMemBytes, cooperative, config->hStream, params, extra);
}

hipError_t hipPointerGetAttribute(void* data, hipPointer_attribute attribute, hipDeviceptr_t pointer) {
  Event event = event_of("hipPointerGetAttribute");
  report(&event);
  if (attribute != HIP_POINTER_ATTRIBUTE_DEVICE_POINTER) return hipErrorInvalidValue;
  *(hipDeviceptr_t*)data = pointer;
  return hipSuccess;
}

hipError_t hipGetLastError(void) { return hipSuccess; }

const char* hipGetErrorString(hipError_t status) {
  return status == hipErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing" : "an error of the fake runtime";
}

hipError_t hipMalloc(void** pointer, size_t bytes) {
  hipError_t status = outside_captures("hipMalloc", NULL);
  if (status == hipSuccess) *pointer = malloc(bytes);
  return status;
}

hipError_t hipFree(void* pointer) {
  hipError_t status = outside_captures("hipFree", NULL);
  if (status == hipSuccess) free(pointer);
  return status;
}

hipError_t hipStreamSynchronize(hipStream_t stream) {
  (void)stream;
  return outside_captures("hipStreamSynchronize", NULL);
}

hipError_t hipDeviceSynchronize(void) { return outside_captures("hipDeviceSynchronize", NULL); }

hipError_t hipStreamBeginCapture(hipStream_t stream, hipStreamCaptureMode mode) {
  (void)mode;
  if (capturing) return hipErrorIllegalState;
  capturing = 1;
  captured_stream = stream;
  return hipSuccess;
}

/* There is no graph to return: the observer has seen what one would hold. */
hipError_t hipStreamEndCapture(hipStream_t stream, hipGraph_t* graph) {
  if (!capturing || stream != captured_stream) return hipErrorIllegalState;
  capturing = 0;
  *graph = NULL;
  return hipSuccess;
}

hipError_t hipGetProcAddress(const char* symbol, void** address, int version, uint64_t flags, hipDriverProcAddressQueryResult* result) {
  static const struct {
    const char* name;
    void* address;
  } table[] = {
#define NAMED(name) {#name, (void*)name}
      {"hipGetDeviceProperties", (void*)hipGetDeviceProperties},
      NAMED(hipDriverGetVersion),
      {"hipGetDevicePropertiesR0600", (void*)hipGetDeviceProperties},
      NAMED(hipModuleLoadData),
      NAMED(hipModuleLoadDataEx),
      NAMED(hipModuleUnload),
      NAMED(hipModuleGetFunction),
      NAMED(hipFuncGetAttribute),
      NAMED(hipDeviceGetAttribute),
      NAMED(hipModuleLaunchKernel),
      NAMED(hipModuleLaunchCooperativeKernel),
      NAMED(hipDrvLaunchKernelEx),
      NAMED(hipPointerGetAttribute),
      NAMED(hipGetLastError),
      NAMED(hipGetErrorString),
      NAMED(hipMalloc),
      NAMED(hipFree),
      NAMED(hipStreamSynchronize),
      NAMED(hipDeviceSynchronize),
      NAMED(hipStreamBeginCapture),
      NAMED(hipStreamEndCapture),
  };
  size_t i;
  (void)version, (void)flags, (void)result;
  for (i = 0; i < sizeof table / sizeof *table; i++)
    if (!strcmp(symbol, table[i].name)) {
      *address = table[i].address;
      return hipSuccess;
    }
  *address = NULL;
  return hipErrorNotFound;
}
