// The driver's encoder of tensor maps, which the copy engine of sm_90 reads. Asked for by name, so
// that nothing links the driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

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

}  // namespace blockscale::cuda
