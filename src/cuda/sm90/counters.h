// Counters that a dynamic schedule draws from lie in device memory and are 0 between launches.
// Which one a launch may use:
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "blockscale/ops.h"

namespace blockscale::sm90 {

inline constexpr int kCounters = 1 << 16;  // of a device

// Hands out numbers below `count` that nobody uses at the same time, or -1 when there are no more.
class CounterNumbers {
 public:
  CounterNumbers(int of_streams, int count) : of_streams_(of_streams), count_(count) {}

  // A stream's own, as its kernels follow each other. `id`: unlike its handle, no later one's.
  // Kernels of one `kind` never run beside each other.
  int of_stream(uint64_t id, uint64_t kind = 0);
  // For one captured launch, until its graph is gone.
  int take();
  void give_back(int number);

 private:
  const int of_streams_, count_;
  std::mutex mutex_;
  std::map<std::pair<uint64_t, uint64_t>, int> streams_;
  int taken_ = 0;  // at most at once
  std::vector<int> free_;
};

// For a launch on this stream of the current device, or -1. A captured launch keeps its own as long
// as there is its graph or what was instantiated from it: these may run beside anything but each
// other, as they write to the same memory. What draws before it waits has a counter of its thread's
// and of its promise: between two such launches comes a kernel that has waited for the first.
int counter_of(cudaStream_t stream, Previous previous);

}  // namespace blockscale::sm90
