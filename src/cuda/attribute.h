// Attributes of devices, which the driver is asked for once: its answer costs the host of a small
// layer as much as the rest of what a launch computes.
#pragma once

#include <cuda_runtime_api.h>

#include "per_device.h"

namespace blockscale::cuda {

// `none` where the driver does not say.
template <cudaDeviceAttr kWhat>
int attribute(int device, int none = 0) {
  static PerDevice known;  // what it is, and one more
  const int found = known.get(device, [&] {
    int value = 0;
    if (cudaDeviceGetAttribute(&value, kWhat, device) == cudaSuccess) return value + 1;
    (void)cudaGetLastError();  // a failed question is no error of the next launch
    return 0;
  });
  return found == 0 ? none : found - 1;
}

// Major and minor, as one number of two digits.
inline int compute_capability(int device) {
  return 10 * attribute<cudaDevAttrComputeCapabilityMajor>(device) +
         attribute<cudaDevAttrComputeCapabilityMinor>(device);
}
inline int multiprocessors(int device) {
  return attribute<cudaDevAttrMultiProcessorCount>(device, 1);
}

}  // namespace blockscale::cuda
