// The counters that a dynamic schedule draws from lie in device memory and are 0 between launches.
// This decides which one a launch may use.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "blockscale/ops.h"

namespace blockscale::sm90 {

inline constexpr int kCounters = 1 << 16;        // per device
inline constexpr int kStreamCounters = 1 << 14;  // of them for streams; the rest is for graphs

// Hands out numbers below `count`, none of them to two users at once, or -1 when there are no more.
class CounterNumbers {
 public:
  CounterNumbers(int of_streams, int count) : of_streams_(of_streams), count_(count) {
    free_.reserve(static_cast<size_t>(count - of_streams));  // CUDA calls give_back()
  }

  // A stream's own number, since its kernels follow each other. `id`: unlike its handle, never
  // reused by a later stream. A stream's kernels of one `kind` never run concurrently.
  int of_stream(uint64_t id, uint64_t kind = 0);
  // For one captured launch, until its graph is gone.
  int take();
  void give_back(int number) noexcept;

 private:
  const int of_streams_, count_;
  std::mutex mutex_;
  std::map<std::pair<uint64_t, uint64_t>, int> streams_;
  int taken_ = 0;  // the most taken at once
  std::vector<int> free_;
};

// The counter for a launch on this stream of the current device, or -1. A captured launch keeps its
// own for as long as its graph or anything instantiated from it exists: these may run concurrently
// with anything but each other, since they write to the same memory. A launch that draws before it
// waits uses a counter of its host thread and of its promise: between two such launches runs a
// kernel that has waited for the first.
int counter_of(cudaStream_t stream, Previous previous);

}  // namespace blockscale::sm90
