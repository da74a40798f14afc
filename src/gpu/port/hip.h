// HIP's half of port.h, which is compiled (`make hip`) but has not been run: the runtime, launches,
// and stand-ins for the copy engine.
#pragma once

#include <hip/hip_runtime.h>

#include <cstdint>
#include <string>

#define __grid_constant__  // kernel parameters are in constant memory anyway

namespace blockscale::gpu {

using Error_t = hipError_t;
using NativeStream = hipStream_t;
inline Error_t last_error() { return hipGetLastError(); }
inline const char* error_text(Error_t e) { return hipGetErrorString(e); }
inline Error_t set_zero(void* p, size_t bytes, NativeStream s) {
  return hipMemsetAsync(p, 0, bytes, s);
}
inline constexpr Error_t kSuccess = hipSuccess;
inline int current_device() {
  int device = 0;
  (void)hipGetDevice(&device);
  return device;
}
inline int multiprocessors(int device) {
  int count = 1;
  (void)hipDeviceGetAttribute(&count, hipDeviceAttributeMultiprocessorCount, device);
  return count;
}
inline int shared_limit(int device) {  // per thread block, in bytes
  int bytes = 0;
  (void)hipDeviceGetAttribute(&bytes, hipDeviceAttributeMaxSharedMemoryPerBlock, device);
  return bytes;
}
inline Error_t allow_shared(const void* kernel, int bytes) {
  return hipFuncSetAttribute(kernel, hipFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
inline Error_t device_count(int* count) { return hipGetDeviceCount(count); }
inline Error_t ask_for_memory() {
  size_t free = 0, total = 0;
  return hipMemGetInfo(&free, &total);
}
inline bool has_kernel(void (*kernel)()) {
  hipFuncAttributes attributes;
  return hipFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) == hipSuccess;
}
inline std::string device_text() {
  hipDeviceProp_t p;
  int device = 0;
  if (hipGetDevice(&device) != hipSuccess || hipGetDeviceProperties(&p, device) != hipSuccess)
    return "GPU";
  return p.gcnArchName;
}

template <class... Params, class... Args>
Error_t launch_kernel(void (*kernel)(Params...), const dim3& grid, const dim3& threads,
                      size_t shared_bytes, NativeStream stream, const Args&... args) {
  // clang-format off
  kernel<<<grid, threads, shared_bytes, stream>>>(args...);
  // clang-format on
  return hipGetLastError();  // this syntax returns no status
}

// There is no copy engine: nothing is described, so nothing below is called.
inline constexpr bool kCopyEngine = false;
struct CopyMap {};
struct CopyBarrier {};
BLOCKSCALE_DEVICE void init(CopyBarrier&, int) {}
BLOCKSCALE_DEVICE void arrive(CopyBarrier&) {}
BLOCKSCALE_DEVICE void copy_tile(void*, int, const CopyMap&, int, int, int, CopyBarrier&) {}
BLOCKSCALE_DEVICE void wait(CopyBarrier&, uint32_t) {}
inline bool describe(CopyMap&, const void*, int64_t, int64_t, int64_t, int64_t, int64_t, int) {
  return false;
}

}  // namespace blockscale::gpu
