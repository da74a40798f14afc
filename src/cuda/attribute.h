// Attributes of devices, which the driver is asked for once: its answer costs the host of a small
// layer as much as the rest of what a launch computes.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

namespace blockscale::cuda {

// `none` where the driver does not say.
template <cudaDeviceAttr kWhat>
int attribute(int device, int none = 0) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // what it is, and one more
  const bool kept = device >= 0 && device < kDevices;
  if (const int found = kept ? known[device].load() : 0; found != 0) return found - 1;
  int value = 0;
  if (cudaDeviceGetAttribute(&value, kWhat, device) != cudaSuccess) {
    (void)cudaGetLastError();  // a failed question is no error of the next launch
    return none;
  }
  if (kept) known[device] = value + 1;
  return value;
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
