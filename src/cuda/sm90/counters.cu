#include "cuda/sm90/counters.h"

namespace blockscale::sm90 {

int CounterNumbers::of_stream(uint64_t id) {
  const std::lock_guard lock(mutex_);
  if (const auto known = streams_.find(id); known != streams_.end()) return known->second;
  const int number = static_cast<int>(streams_.size());
  if (number == of_streams_) return -1;
  streams_.emplace(id, number);
  return number;
}

int CounterNumbers::of_captured() {
  const std::lock_guard lock(mutex_);
  return of_streams_ + captured_ < count_ ? of_streams_ + captured_++ : -1;
}

int counter_of(cudaStream_t stream) {
  // Each device has its own counters, and takes of these numbers what it needs.
  static CounterNumbers numbers(1024, kCounters);
  cudaStreamCaptureStatus capture{};
  unsigned long long id = 0;
  cudaError_t e = cudaStreamIsCapturing(stream, &capture);
  if (e == cudaSuccess && capture != cudaStreamCaptureStatusNone) return numbers.of_captured();
  if (e == cudaSuccess) e = cudaStreamGetId(stream, &id);
  if (e == cudaSuccess) return numbers.of_stream(id);
  (void)cudaGetLastError();  // a failed question is no error of the launch
  return -1;
}

}  // namespace blockscale::sm90
