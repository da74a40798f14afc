// Memory and a stream of the device that tests run kernels on: CUDA's, or the host's where kernels
// are emulated.
#pragma once

#include <gtest/gtest.h>

#if defined(BLOCKSCALE_CUDA)
#include <cuda_runtime_api.h>

#include <stdexcept>
#elif defined(BLOCKSCALE_EMULATE)
#include <cstring>
#include <new>

#include "gpu/port.h"
#endif

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "blockscale/ops.h"
#include "buffers.h"

namespace blockscale::testing {

#if defined(BLOCKSCALE_CUDA)
inline void check(cudaError_t e) {
  if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
}
inline void* device_new(int64_t size) {
  void* p = nullptr;
  check(cudaMalloc(&p, static_cast<size_t>(std::max<int64_t>(size, 1))));
  return p;
}
inline void device_delete(void* p) { cudaFree(p); }
inline void to_device(void* to, const void* from, int64_t size) {
  check(cudaMemcpy(to, from, static_cast<size_t>(size), cudaMemcpyHostToDevice));
  check(cudaDeviceSynchronize());  // small copies may return before they arrive
}
inline void to_host(void* to, const void* from, int64_t size) {
  check(cudaMemcpy(to, from, static_cast<size_t>(size), cudaMemcpyDeviceToHost));
}
inline cudaStream_t new_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}
inline void delete_stream(void* stream) { cudaStreamDestroy(static_cast<cudaStream_t>(stream)); }
inline void wait_for(void* stream) {
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}
#elif defined(BLOCKSCALE_EMULATE)
inline constexpr std::align_val_t kAlignment{256};  // as of cudaMalloc
inline void* device_new(int64_t size) {
  return ::operator new(static_cast<size_t>(size), kAlignment);
}
inline void device_delete(void* p) { ::operator delete(p, kAlignment); }
inline void to_device(void* to, const void* from, int64_t size) {
  if (size > 0) std::memcpy(to, from, static_cast<size_t>(size));
}
inline void to_host(void* to, const void* from, int64_t size) { to_device(to, from, size); }
inline void* new_stream() { return nullptr; }
inline void delete_stream(void*) {}
inline void wait_for(void*) {}
#endif

#if defined(BLOCKSCALE_CUDA) || defined(BLOCKSCALE_EMULATE)
class Memory {
 public:
  explicit Memory(int64_t size) : data_(device_new(size)) {}
  Memory(const void* from, int64_t size) : Memory(size) { to_device(data_, from, size); }
  template <class T>
  explicit Memory(const std::vector<T>& v)
      : Memory(v.data(), static_cast<int64_t>(v.size() * sizeof(T))) {}
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  ~Memory() { device_delete(data_); }
  uint8_t* at(int64_t offset = 0) const { return as<uint8_t>() + offset; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  void read(void* to, int64_t size) const { to_host(to, data_, size); }

 private:
  void* data_ = nullptr;
};

class TestStream final : public Stream {
 public:
  ~TestStream() override { delete_stream(stream_); }
  void* handle() const override { return stream_; }
  void* workspace(int64_t bytes) const override {
    pieces_.emplace_back(bytes);
    return pieces_.back().at();
  }
  // What is in `from`, on the device for as long as the stream lives.
  void* copy(const void* from, int64_t bytes) const {
    pieces_.emplace_back(from, bytes);
    return pieces_.back().at();
  }
  void wait() const { wait_for(stream_); }

 private:
  void* stream_ = new_stream();
  mutable std::vector<Memory> pieces_;
};

// Tests of what runs on a GPU, or emulated: skipped where a build for GPUs finds none. `Base` is
// one of GoogleTest's classes.
template <class Base>
class DeviceTest : public Base {
 protected:
  void SetUp() override {
    for (const Backend& b : backends())
      if (b.name == "cuda" && !b.available) GTEST_SKIP() << b.reason;
  }
};

inline int64_t bytes_of(const Groups& groups) {
  return groups.count * (groups.int64_offsets ? 8 : 4);
}

// An Output's buffers on the device, guards and poison included; copied back when it goes.
class DeviceOutput {
 public:
  explicit DeviceOutput(const Output& out)
      : codes_(out.codes.all(), out.codes.all_size()),
        scales_(out.scales.all(), out.scales.all_size()),
        outer_(out.outer.all(), out.outer.all_size()),
        offsets_(out.view.groups.offsets, bytes_of(out.view.groups)),
        view(out.view) {
    if (view.groups) view.groups.offsets = offsets_.at();
    view.codes = codes_.at(Guarded::kGuard);
    view.scales = scales_.at(Guarded::kGuard);
    if (view.outer) view.outer = reinterpret_cast<float*>(outer_.at(Guarded::kGuard));
  }
  void read(Output& out) const {
    codes_.read(out.codes.all(), out.codes.all_size());
    scales_.read(out.scales.all(), out.scales.all_size());
    outer_.read(out.outer.all(), out.outer.all_size());
  }

 private:
  Memory codes_, scales_, outer_, offsets_;

 public:
  Quantized view;
};

class DeviceInput {
 public:
  DeviceInput(const Input& frame, const ConstMatrix& x)
      : storage_(frame.storage().data(), static_cast<int64_t>(frame.storage().size())), view(x) {
    view.data = storage_.at(static_cast<const uint8_t*>(x.data) - frame.storage().data());
  }

 private:
  Memory storage_;

 public:
  ConstMatrix view;
};
#endif

}  // namespace blockscale::testing
