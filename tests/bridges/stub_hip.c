/* The part of a HIP runtime that the native bridge calls: it launches nothing and reports each launch to a hook. */
#include <string.h>

typedef struct {
  char name[256];
} Function;

typedef void (*Hook)(const char* name, const unsigned* dimensions, void* stream, void** params);

static Hook hook;
static unsigned device_flags; /* e_flags of the code objects that this device takes; 0: of every one */
static int loads;
static int launch_status;

void stub_set(Hook wanted_hook, unsigned flags) {
  hook = wanted_hook;
  device_flags = flags;
}

void stub_fail_launches(int status) { launch_status = status; }

int stub_loads(void) { return loads; }

int hipGetDevice(int* ordinal) {
  *ordinal = 0;
  return 0;
}

int hipModuleLoadData(void** module, const void* image) {
  unsigned flags;
  const unsigned char* bytes = image;
  if (memcmp(bytes, "\177ELF", 4)) return 200; /* hipErrorInvalidImage */
  memcpy(&flags, bytes + 48, sizeof flags);
  if (device_flags && flags != device_flags) return 209; /* hipErrorNoBinaryForGpu */
  *module = (void*)(size_t)++loads;
  return 0;
}

int hipModuleGetFunction(void** function, void* module, const char* name) {
  static Function functions[4096];
  static int count;
  if (module == 0 || count == 4096) return 500; /* hipErrorNotFound */
  strncpy(functions[count].name, name, sizeof functions[count].name - 1);
  *function = &functions[count++];
  return 0;
}

int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                          void* stream, void** params, void** extra) {
  const unsigned dimensions[7] = {gx, gy, gz, bx, by, bz, shared};
  if (extra != 0) return 1; /* hipErrorInvalidValue */
  if (hook) hook(((Function*)function)->name, dimensions, stream, params);
  return launch_status;
}
