// Tensor maps, which tell the copy engine of sm_90 where an array lies. The driver encodes them;
// its functions are looked up by name, so that nothing links against it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace blockscale::cuda {

// A driver function, or null where it has none. `since`: the version whose signature is wanted.
inline void* driver_function(const char* name, unsigned since) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t e =
      cudaGetDriverEntryPointByVersion(name, &found, since, cudaEnableDefault, &result);
  if (e == cudaSuccess) return found;
  (void)cudaGetLastError();  // a failed query is no error of the next launch
  return nullptr;
}
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
inline EncodeTiled tensor_map_encoder() {
  static const auto encode =
      reinterpret_cast<EncodeTiled>(driver_function("cuTensorMapEncodeTiled", 12000));
  return encode;
}

// The driver encodes nothing in a thread that has not used a device yet.
inline bool has_context() {
  using GetCurrent = decltype(&cuCtxGetCurrent);
  static const auto get = reinterpret_cast<GetCurrent>(driver_function("cuCtxGetCurrent", 4000));
  thread_local bool has = false;
  if (has) return true;
  CUcontext current = nullptr;
  int device = 0;
  has = get && get(&current) == CUDA_SUCCESS && current;
  if (!has) has = cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
  if (!has) (void)cudaGetLastError();  // likewise
  return has;
}

// The sizes of a three-dimensional array, innermost first; strides in bytes.
struct Extents {
  int64_t size[3];
  int64_t stride[2];
};

// Makes the map of an array that is copied in boxes of `across` x `down`, with 0 for what lies
// outside it. False where there is no driver, or the copy engine cannot take the array.
inline bool make_tensor_map(CUtensorMap& map, CUtensorMapDataType type, const void* data,
                            const Extents& extents, int across, int down,
                            CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion) {
  const EncodeTiled encode = tensor_map_encoder();
  if (!encode || !has_context()) return false;
  const auto& [size, stride] = extents;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(size[0]), static_cast<cuuint64_t>(size[1]),
                              static_cast<cuuint64_t>(size[2])};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride[0]),
                                static_cast<cuuint64_t>(stride[1])};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(across), static_cast<cuuint32_t>(down), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  return encode(&map, type, 3, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace blockscale::cuda
