// XLA FFI handler that launches the kernels of a purepage Program on XLA's stream, with neither Python nor torch at run time.
//
// The handler takes the program's buffers (arguments, then results) and these attributes:
//   program   the program's name, for error messages
//   arch      the architecture that the kernels were compiled for, for error messages
//   digest    hash of everything else; loaded modules are kept by (context, digest)
//   symbols   kernel names, separated by '\n', one for each launch
//   modules   code objects (cubin or hsaco) in base64, separated by '\n', one for each launch
//   launches  for each launch: grid x, y, z, threads of a block, bytes of shared memory, number of arguments, and the arguments:
//               0 buffer               pointer to buffers[buffer]
//               1 value                32-bit integer        2 value   64-bit integer       3 bits   32-bit float
//               4                      null pointer
//               5 buffer type swizzle item rows columns block_rows block_columns    tensor map of a matrix, passed by value
//
// The driver is the one that JAX itself has mapped (RTLD_NOLOAD): a second GPU runtime is never loaded. The handler is compatible with
// command buffers: it neither allocates nor waits, and XLA's initialization stage loads the modules before anything is recorded.
#include <dlfcn.h>
#include <link.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

#ifdef PUREPAGE_PORTABLE  // the library of a wheel: it must load where glibc and libstdc++ are older than those that it is built with
#if defined(__x86_64__)
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");  // glibc 2.34 moved both from libdl to libc, under a new version
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#endif
namespace std {
__attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw bad_array_new_length(); }  // GCC 11's library has it
template class basic_stringstream<char>;  // XLA's headers construct one; GCC 9's library has the constructor
}  // namespace std
#endif

namespace ffi = xla::ffi;

namespace {

constexpr int kDynamicSharedDefault = 48 * 1024;  // bytes; a CUDA kernel that uses more must say so when it is loaded
constexpr int kMaxDynamicSharedAttribute = 8;     // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kL2Promotion128B = 2;               // CU_TENSOR_MAP_L2_PROMOTION_L2_128B
constexpr uint64_t kAlignment = 16;               // bytes; kernels are compiled for it, and XLA aligns its buffers to more

enum ArgumentKind : int64_t { kBuffer = 0, kInt32 = 1, kInt64 = 2, kFloat32 = 3, kNull = 4, kTensorMap = 5 };

constexpr int64_t kHeader = 6;  // numbers of a launch before its arguments

// Numbers of an argument of this kind, the kind included.
int64_t Width(int64_t kind) { return kind == kNull ? 1 : kind == kTensorMap ? 9 : 2; }

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// The functions of libcuda or libamdhip64 that are needed; those of the other vendor stay null.
struct Driver {
  using Handle = void*;
  int (*load)(Handle* module, const void* image) = nullptr;
  int (*find)(Handle* function, Handle module, const char* name) = nullptr;
  int (*launch)(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                void* stream, void** params, void** extra) = nullptr;
  int (*current)(Handle* context) = nullptr;                                  // CUDA
  int (*set_attribute)(Handle function, int attribute, int value) = nullptr;  // CUDA
  int (*encode)(TensorMap* map, int type, uint32_t rank, void* address, const uint64_t* shape, const uint64_t* strides,
                const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) = nullptr;  // CUDA
  int (*device)(int* ordinal) = nullptr;  // ROCm
  std::string missing;

  bool is_cuda() const { return current != nullptr; }

  // What loaded modules belong to: the context on CUDA, the device on ROCm.
  ffi::ErrorOr<uint64_t> place() const {
    if (is_cuda()) {
      Handle context = nullptr;
      if (int status = current(&context); status || !context) {
        return ffi::Unexpected(ffi::Error::Internal("no current CUDA context (driver status " + std::to_string(status) + ")"));
      }
      return reinterpret_cast<uint64_t>(context);
    }
    int ordinal = 0;
    if (int status = device(&ordinal)) {
      return ffi::Unexpected(ffi::Error::Internal("hipGetDevice failed with status " + std::to_string(status)));
    }
    return static_cast<uint64_t>(ordinal);
  }
};

template <typename Function>
void Resolve(void* library, const char* name, Function* function, Driver* driver) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr) driver->missing = std::string("the mapped GPU driver has no ") + name;
}

// JAX's plugin for ROCm where it is mapped, else null. Of several HIP runtimes in a process it has the functions of the one that it was
// linked to.
void* RocmPlugin() {
  std::vector<std::string> plugins;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        if (path.find("xla_rocm_plugin") != std::string::npos) static_cast<std::vector<std::string>*>(found)->push_back(path);
        return 0;
      },
      &plugins);
  for (const std::string& path : plugins) {
    void* plugin = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (plugin != nullptr && dlsym(plugin, "hipModuleLaunchKernel") != nullptr) return plugin;
  }
  return nullptr;
}

Driver FindDriver() {
  Driver driver;
  if (void* cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD)) {
    Resolve(cuda, "cuModuleLoadData", &driver.load, &driver);
    Resolve(cuda, "cuModuleGetFunction", &driver.find, &driver);
    Resolve(cuda, "cuLaunchKernel", &driver.launch, &driver);
    Resolve(cuda, "cuCtxGetCurrent", &driver.current, &driver);
    Resolve(cuda, "cuFuncSetAttribute", &driver.set_attribute, &driver);
    driver.encode = reinterpret_cast<decltype(driver.encode)>(dlsym(cuda, "cuTensorMapEncodeTiled"));
    return driver;
  }
  void* hip = RocmPlugin();
  for (const char* name : {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}) {
    if (hip == nullptr) hip = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
  }
  if (hip != nullptr) {
    Resolve(hip, "hipModuleLoadData", &driver.load, &driver);
    Resolve(hip, "hipModuleGetFunction", &driver.find, &driver);
    Resolve(hip, "hipModuleLaunchKernel", &driver.launch, &driver);
    Resolve(hip, "hipGetDevice", &driver.device, &driver);
    return driver;
  }
  driver.missing = "neither libcuda.so.1 nor libamdhip64.so is mapped into this process";
  return driver;
}

const Driver& TheDriver() {
  static const Driver* driver = new Driver(FindDriver());
  return *driver;
}

std::vector<std::string_view> Lines(std::string_view text) {
  std::vector<std::string_view> lines;
  while (true) {
    size_t end = text.find('\n');
    lines.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return lines;
    text.remove_prefix(end + 1);
  }
}

std::string Decoded(std::string_view base64) {
  static const auto* values = [] {
    auto* table = new std::vector<int>(256, -1);
    const char* alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (int i = 0; i < 64; ++i) (*table)[static_cast<unsigned char>(alphabet[i])] = i;
    return table;
  }();
  std::string bytes;
  bytes.reserve(base64.size() / 4 * 3);
  uint32_t bits = 0;
  int count = 0;
  for (unsigned char c : base64) {
    if ((*values)[c] < 0) continue;  // padding
    bits = bits << 6 | static_cast<uint32_t>((*values)[c]);
    count += 6;
    if (count >= 8) bytes.push_back(static_cast<char>(bits >> (count -= 8) & 0xFF));
  }
  return bytes;
}

struct Attributes {
  std::string_view program, arch, symbols, modules;
  int64_t digest;
  ffi::Span<const int64_t> launches;
};

using Functions = std::vector<Driver::Handle>;

ffi::Error Failed(const Attributes& given, std::string_view symbol, const char* what, int status) {
  return ffi::Error::Internal(std::string(given.program) + ": " + std::string(symbol) + ": " + what + " failed with driver status " +
                              std::to_string(status));
}

// The kernels of a program in the current context, loaded once. Modules stay loaded as long as the process lives.
ffi::Error Load(const Attributes& given, const Functions** found) {
  static auto* mutex = new std::mutex;
  static auto* loaded = new std::map<std::pair<uint64_t, int64_t>, std::unique_ptr<Functions>>;
  const Driver& driver = TheDriver();
  if (!driver.missing.empty()) return ffi::Error::Internal(std::string(given.program) + ": " + driver.missing);
  ffi::ErrorOr<uint64_t> place = driver.place();
  if (place.has_error()) return place.error();
  std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<Functions>& functions = (*loaded)[{*place, given.digest}];
  if (!functions) {
    auto fresh = std::make_unique<Functions>();
    std::vector<std::string_view> symbols = Lines(given.symbols), images = Lines(given.modules);
    const int64_t* launch = given.launches.begin();
    for (size_t i = 0; i < symbols.size(); ++i) {
      std::string image = Decoded(images[i]), symbol(symbols[i]);
      Driver::Handle module = nullptr, function = nullptr;
      if (int status = driver.load(&module, image.data())) {
        std::string what = "loading its code object, which is for " + std::string(given.arch) + ",";
        return Failed(given, symbol, what.c_str(), status);
      }
      if (int status = driver.find(&function, module, symbol.c_str())) {
        return Failed(given, symbol, "finding it in its code object", status);
      }
      if (driver.is_cuda() && launch[4] > kDynamicSharedDefault) {
        if (int status = driver.set_attribute(function, kMaxDynamicSharedAttribute, static_cast<int>(launch[4]))) {
          return Failed(given, symbol, "asking for its shared memory", status);
        }
      }
      fresh->push_back(function);
      const int64_t* argument = launch + kHeader;
      for (int64_t n = 0; n < launch[5]; ++n) argument += Width(*argument);
      launch = argument;
    }
    functions = std::move(fresh);
  }
  *found = functions.get();
  return ffi::Error::Success();
}

ffi::Error Initialize(std::string_view program, std::string_view arch, int64_t digest, std::string_view symbols, std::string_view modules,
                      ffi::Span<const int64_t> launches) {
  const Functions* functions = nullptr;
  return Load({program, arch, symbols, modules, digest, launches}, &functions);
}

ffi::Error Execute(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view program, std::string_view arch,
                   int64_t digest, std::string_view symbols, std::string_view modules, ffi::Span<const int64_t> launches) {
  const Driver& driver = TheDriver();
  Attributes given{program, arch, symbols, modules, digest, launches};
  const Functions* functions = nullptr;
  if (ffi::Error error = Load(given, &functions); error.failure()) return error;

  std::vector<void*> buffers;
  buffers.reserve(args.size() + rets.size());
  for (size_t i = 0; i < args.size(); ++i) buffers.push_back(args.get<ffi::AnyBuffer>(i)->untyped_data());
  for (size_t i = 0; i < rets.size(); ++i) buffers.push_back((*rets.get<ffi::AnyBuffer>(i))->untyped_data());

  const int64_t* at = launches.begin();
  std::vector<uint64_t> values;
  std::vector<TensorMap> maps;
  std::vector<void*> params;
  for (size_t k = 0; k < functions->size(); ++k) {
    const int64_t* launch = at;
    const size_t count = static_cast<size_t>(launch[5]);
    auto failed = [&](const char* what, int status) { return Failed(given, Lines(symbols)[k], what, status); };
    // Sized before addresses are taken: the vectors must not move.
    values.assign(count, 0);
    maps.resize(count);
    params.assign(count, nullptr);
    at = launch + kHeader;
    for (size_t n = 0; n < count; at += Width(*at), ++n) {
      params[n] = &values[n];
      switch (*at) {
        case kBuffer:
          values[n] = reinterpret_cast<uint64_t>(buffers[at[1]]);
          if (values[n] % kAlignment) return failed("passing a buffer that is not aligned to 16 bytes", 0);
          break;
        case kInt32:
        case kInt64:
        case kFloat32:
          std::memcpy(&values[n], &at[1], sizeof(uint64_t));  // little endian: the low half is the 32-bit value
          break;
        case kNull:
          break;
        case kTensorMap: {
          if (driver.encode == nullptr) return failed("making a tensor map (this driver has no such function)", -1);
          const uint64_t item = at[4], rows = at[5], columns = at[6];
          const uint64_t shape[2] = {columns, rows};
          const uint64_t strides[2] = {columns * item, rows * columns * item};
          const uint32_t box[2] = {static_cast<uint32_t>(at[8]), static_cast<uint32_t>(at[7])};
          const uint32_t steps[2] = {1, 1};
          if (int status = driver.encode(&maps[n], static_cast<int>(at[2]), 2, buffers[at[1]], shape, strides, box, steps, 0,
                                         static_cast<int>(at[3]), kL2Promotion128B, 0)) {
            return failed("making a tensor map", status);
          }
          params[n] = &maps[n];
          break;
        }
        default:
          return failed("reading an argument of an unknown kind", static_cast<int>(*at));
      }
    }
    if (int status = driver.launch((*functions)[k], static_cast<unsigned>(launch[0]), static_cast<unsigned>(launch[1]),
                                   static_cast<unsigned>(launch[2]), static_cast<unsigned>(launch[3]), 1, 1,
                                   static_cast<unsigned>(launch[4]), stream, params.data(), nullptr)) {
      return failed("its launch", status);
    }
  }
  return ffi::Error::Success();
}

// A binding with the attributes of a call.
template <typename Binding>
auto WithAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<std::string_view>("program")
      .template Attr<std::string_view>("arch")
      .template Attr<int64_t>("digest")
      .template Attr<std::string_view>("symbols")
      .template Attr<std::string_view>("modules")
      .template Attr<ffi::Span<const int64_t>>("launches");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(purepage_initialize, Initialize, WithAttributes(ffi::Ffi::BindInitialize()));

static auto Execution() {
  return WithAttributes(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().RemainingArgs().RemainingRets());
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(purepage_execute, Execute, Execution(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(purepage_execute_unrecorded, Execute, Execution());

// The version of XLA's interface that this was built for: 1000 * major + minor.
extern "C" int purepage_ffi_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }
