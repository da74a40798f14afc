#include <atomic>

#include "cuda/sm90/counters.h"

namespace blockscale::sm90 {
namespace {

// Each device has its own counters, but these numbers serve all devices. Never destroyed: graphs
// may outlive anything else.
CounterNumbers& numbers() {
  static CounterNumbers& all = *new CounterNumbers(kStreamCounters, kCounters);
  return all;
}

void CUDART_CB give_back(void* number) noexcept {
  numbers().give_back(static_cast<int>(reinterpret_cast<intptr_t>(number)));
}

// The graph gives the number back when it is destroyed: CUDA calls give_back(), which may not call
// CUDA.
int of_graph(cudaGraph_t graph) {
  const int number = numbers().take();
  if (number < 0) return -1;
  cudaUserObject_t held{};
  void* const name = reinterpret_cast<void*>(static_cast<intptr_t>(number));
  cudaError_t e = cudaUserObjectCreate(&held, name, give_back, 1, cudaUserObjectNoDestructorSync);
  if (e != cudaSuccess) {
    numbers().give_back(number);
  } else {
    e = cudaGraphRetainUserObject(graph, held, 1, cudaGraphUserObjectMove);
    if (e != cudaSuccess) (void)cudaUserObjectRelease(held);
  }
  if (e == cudaSuccess) return number;
  (void)cudaGetLastError();  // a failed query is no error of the launch
  return -1;
}

uint64_t kind_of(Previous previous) {
  if (previous == Previous::any) return 0;
  static std::atomic<uint64_t> threads;
  thread_local const uint64_t thread = threads++;  // never reused by a later thread
  return 2 * thread + (previous == Previous::operands ? 1 : 2);
}

}  // namespace

int CounterNumbers::of_stream(uint64_t id, uint64_t kind) {
  const std::lock_guard lock(mutex_);
  if (const auto known = streams_.find({id, kind}); known != streams_.end()) return known->second;
  const int number = static_cast<int>(streams_.size());
  // Threads that come and go, each with its own promises, leave half of the numbers to streams.
  if (number >= (kind == 0 ? of_streams_ : of_streams_ / 2)) return -1;
  streams_.emplace(std::pair(id, kind), number);
  return number;
}

int CounterNumbers::take() {
  const std::lock_guard lock(mutex_);
  if (!free_.empty()) {
    const int number = free_.back();
    free_.pop_back();
    return number;
  }
  return of_streams_ + taken_ < count_ ? of_streams_ + taken_++ : -1;
}

void CounterNumbers::give_back(int number) noexcept {
  const std::lock_guard lock(mutex_);
  free_.push_back(number);
}

int counter_of(cudaStream_t stream, Previous previous) {
  cudaStreamCaptureStatus capture{};
  cudaGraph_t graph{};
  unsigned long long id = 0;
  // In this order: asking a stream for its ID ends its capture.
  cudaError_t e = cudaStreamIsCapturing(stream, &capture);
  if (e == cudaSuccess && capture == cudaStreamCaptureStatusActive) {
    e = cudaStreamGetCaptureInfo(stream, &capture, nullptr, &graph);
    if (e == cudaSuccess) return of_graph(graph);
  } else if (e == cudaSuccess && capture == cudaStreamCaptureStatusNone) {
    e = cudaStreamGetId(stream, &id);
    if (e == cudaSuccess) return numbers().of_stream(id, kind_of(previous));
  }
  (void)cudaGetLastError();  // as above
  return -1;
}

}  // namespace blockscale::sm90
