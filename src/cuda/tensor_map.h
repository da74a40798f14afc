// Tensor maps, which tell the copy engine of sm_90 where an array lies. The driver encodes them; it
// is asked for by name, so that nothing links it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace blockscale::cuda {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
// Null where the driver has none.
inline EncodeTiled tensor_map_encoder() {
  static const EncodeTiled encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &result) != cudaSuccess)
      found = nullptr;
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return encode;
}

// The sizes of an array of three dimensions, the innermost first; strides in bytes.
struct Extents {
  int64_t size[3];
  int64_t stride[2];
};

// A map of an array that moves in boxes of `across` x `down`, and what lies outside of it as 0;
// false where there is no driver, or the copy engine cannot take the array.
inline bool make_tensor_map(CUtensorMap& map, CUtensorMapDataType type, const void* data,
                            const Extents& extents, int across, int down,
                            CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion) {
  const EncodeTiled encode = tensor_map_encoder();
  if (!encode) return false;
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
