// The native bridge's handler as a custom call of a CPU, which gives it no stream: what it passes to the driver can be looked at.
#include "launch.cc"

namespace {

ffi::Error OnCpu(ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view program, std::string_view arch, int64_t digest,
                 std::string_view symbols, std::string_view modules, ffi::Span<const int64_t> launches) {
  return Execute(reinterpret_cast<void*>(0x1234abcd), args, rets, program, arch, digest, symbols, modules, launches);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(native_on_cpu, OnCpu, WithAttributes(ffi::Ffi::Bind().RemainingArgs().RemainingRets()));
