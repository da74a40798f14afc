// CUDA's half of port.h: the runtime, launches and the copy engine of sm_90.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cuda/attribute.h"
#include "cuda/barrier.h"
#include "cuda/tensor_map.h"

namespace blockscale::gpu {

using Error_t = cudaError_t;
using NativeStream = cudaStream_t;
inline Error_t last_error() { return cudaGetLastError(); }
inline const char* error_text(Error_t e) { return cudaGetErrorString(e); }
inline Error_t set_zero(void* p, size_t bytes, NativeStream s) {
  return cudaMemsetAsync(p, 0, bytes, s);
}
inline constexpr Error_t kSuccess = cudaSuccess;
inline int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}
inline int multiprocessors(int device) { return cuda::multiprocessors(device); }
inline int shared_limit(int device) {  // per thread block, in bytes, once allowed
  return cuda::attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(device);
}
inline Error_t allow_shared(const void* kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
inline Error_t device_count(int* count) { return cudaGetDeviceCount(count); }
// Fails if an earlier kernel has failed.
inline Error_t ask_for_memory() {
  size_t free = 0, total = 0;
  return cudaMemGetInfo(&free, &total);
}
inline bool has_kernel(void (*kernel)()) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) == cudaSuccess;
}
inline std::string device_text() {
  cudaDeviceProp p;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&p, device) != cudaSuccess)
    return "GPU";
  return "sm_" + std::to_string(10 * p.major + p.minor);
}

// Launches a kernel. Its thread blocks may start while the last ones of the preceding kernel still
// run, so that the start of one hides behind the end of the other: see after_previous().
template <class... Params, class... Args>
Error_t launch_kernel(void (*kernel)(Params...), const dim3& grid, const dim3& threads,
                      size_t shared_bytes, NativeStream stream, const Args&... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// ---- the copy engine (TMA): loads boxes of a matrix into shared memory asynchronously ----
inline constexpr bool kCopyEngine = true;  // described, but not used, below sm_90
using CopyMap = CUtensorMap;
struct CopyBarrier {
  uint64_t state;
};
BLOCKSCALE_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// A phase of the barrier completes after `arrivals` arrivals and all announced bytes.
BLOCKSCALE_DEVICE void init([[maybe_unused]] CopyBarrier& b, [[maybe_unused]] int arrivals) {
#if __CUDA_ARCH__ >= 900
  cuda::barrier_init(shared_address(&b), arrivals);
  cuda::barrier_init_done();
#endif
}
BLOCKSCALE_DEVICE void arrive([[maybe_unused]] CopyBarrier& b) {
#if __CUDA_ARCH__ >= 900
  cuda::barrier_arrive(shared_address(&b));
#endif
}
// Copies the box at (column, row) of matrix `batch`, `bytes` in all, to `to`; `done` completes with
// it.
BLOCKSCALE_DEVICE void copy_tile([[maybe_unused]] void* to, [[maybe_unused]] int bytes,
                                 [[maybe_unused]] const CopyMap& map, [[maybe_unused]] int column,
                                 [[maybe_unused]] int row, [[maybe_unused]] int batch,
                                 [[maybe_unused]] CopyBarrier& done) {
#if __CUDA_ARCH__ >= 900
  cuda::barrier_expect(shared_address(&done), static_cast<uint32_t>(bytes));
  cuda::copy_box<false>(shared_address(to), map, shared_address(&done), column, row, batch);
#endif
}
BLOCKSCALE_DEVICE void wait([[maybe_unused]] CopyBarrier& b, [[maybe_unused]] uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  cuda::barrier_wait(shared_address(&b), parity);
#endif
}
inline bool has_copy_engine() { return cuda::compute_capability(current_device()) >= 90; }
// Describes a batch of BF16 matrices with contiguous columns, in boxes of `box` x `box`. False
// where there is no copy engine or it cannot read them: rows have to start at multiples of 16
// bytes.
inline bool describe(CopyMap& map, const void* data, int64_t rows, int64_t columns, int64_t batch,
                     int64_t row_stride, int64_t batch_stride, int box) {
  if (batch == 1) batch_stride = row_stride * rows;  // irrelevant, but checked nonetheless
  if (!has_copy_engine() || reinterpret_cast<uintptr_t>(data) % 16 != 0 || row_stride % 8 != 0 ||
      batch_stride % 8 != 0 || row_stride < columns || batch_stride < 8)
    return false;
  return cuda::make_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data,
                               {{columns, rows, batch}, {row_stride * 2, batch_stride * 2}}, box,
                               box, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

}  // namespace blockscale::gpu
