// Device attributes. The driver is asked for each only once: for a small layer its answer costs the
// host as much as everything else that a launch computes.
#pragma once

#include <cuda_runtime_api.h>

#include "per_device.h"

namespace blockscale::cuda {

// Returns `none` where the driver does not say.
template <cudaDeviceAttr kWhat>
int attribute(int device, int none = 0) {
  static PerDevice known;  // the value plus one; 0: unknown
  const int found = known.get(device, [&] {
    int value = 0;
    if (cudaDeviceGetAttribute(&value, kWhat, device) == cudaSuccess) return value + 1;
    (void)cudaGetLastError();  // a failed query is no error of the next launch
    return 0;
  });
  return found == 0 ? none : found - 1;
}

// Major and minor version as one number: 90 is 9.0, and 120 is 12.0.
inline int compute_capability(int device) {
  return 10 * attribute<cudaDevAttrComputeCapabilityMajor>(device) +
         attribute<cudaDevAttrComputeCapabilityMinor>(device);
}
inline int multiprocessors(int device) {
  return attribute<cudaDevAttrMultiProcessorCount>(device, 1);
}

}  // namespace blockscale::cuda
