// Where a call runs: PyTorch's threads for tensors in host memory, PyTorch's current stream for
// tensors of a GPU.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "blockscale/ops.h"

namespace blockscale::binding {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;
using Ints = std::vector<int64_t>;  // sizes and strides

// Memory from PyTorch's allocator. On a GPU it is not a tensor, which would cost the host twice as
// much; it is on the current device, and may be freed before the kernels that use it have run, as
// memory is handed on in stream order.
class Allocation {
 public:
  Allocation(const Device& device, int64_t bytes);
  Allocation(Allocation&& other) noexcept
      : tensor_(std::move(other.tensor_)), data_(std::exchange(other.data_, nullptr)) {}
  Allocation& operator=(Allocation&&) = delete;
  ~Allocation();
  uint8_t* data() const { return data_; }

 private:
  std::optional<Tensor> tensor_;  // in host memory
  uint8_t* data_ = nullptr;
};

// Memory of a call, until it returns. Small pieces on a GPU are parts of one: to the host of a
// small layer an allocation is a good part of a kernel's launch.
class Arena {
 public:
  explicit Arena(const Device& device) : device_(device) {}
  uint8_t* take(int64_t bytes);
  // Null for what is large, or lies in host memory.
  uint8_t* take_small(int64_t bytes);

 private:
  Device device_;
  std::vector<Allocation> pieces_;
  uint8_t* base_ = nullptr;  // of the last one for small parts
  int64_t used_ = 0;
};

// PyTorch's current stream of a device.
class TorchStream final : public Stream {
 public:
  TorchStream(const Device& device, Arena& memory);
  void* handle() const override { return handle_; }
  void* workspace(int64_t bytes) const override;
  void release() const { workspaces_.clear(); }

 private:
  Device device_;
  Arena& memory_;
  void* handle_ = nullptr;
  mutable std::vector<Allocation> workspaces_;
};

// The one device of a call: that of its first tensor, which this build must have a backend for, and
// which is the current one while this lives.
class Context {
 public:
  Context(const char* op, const char* argument, const Tensor& first);
  // Refuses a tensor that lies elsewhere.
  void check(const char* argument, const Tensor& tensor) const;

  const char* op() const { return op_; }
  const Device& device() const { return device_; }
  bool cuda() const { return device_.type() == DeviceType::CUDA; }
  // Of a GPU; asked for once a call.
  const TorchStream& stream() const {
    if (!stream_) stream_.emplace(device_, memory_);
    return *stream_;
  }
  Arena& memory() const { return memory_; }

 private:
  const char* op_;
  const char* first_;
  Device device_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  mutable Arena memory_;
  mutable std::optional<TorchStream> stream_;
};

// A fresh tensor, contiguous or with the strides given. Straight through the C shim: a call of
// aten::empty through the dispatcher costs the host several times as much.
Tensor empty(const Ints& sizes, ScalarType dtype, const Device& device);
Tensor empty_strided(const Ints& sizes, const Ints& strides, ScalarType dtype,
                     const Device& device);
// The memory of a fresh contiguous tensor under another shape, or a part of it from an element on;
// to autograd it is no view.
Tensor with_shape(const Tensor& fresh, const Ints& sizes);
Tensor part(const Tensor& fresh, const Ints& sizes, const Ints& strides, int64_t from);
// Memory of a GPU as a tensor that does not own it.
Tensor borrowed(void* data, const Ints& sizes, const Ints& strides, ScalarType dtype,
                const Device& device);
// The tensor itself where it is contiguous already: asking PyTorch costs its dispatcher.
Tensor contiguous_of(const Tensor& tensor);

// The first result of one of PyTorch's operators.
template <class... Args>
Tensor call(const char* op, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The threads for work on about so many elements.
const Executor& executor_for(int64_t elements);

// call(executor) or call(stream), for operators that have an overload for each.
template <class Call>
void run(const Context& at, int64_t elements, const Call& call) {
  if (!at.cuda()) return call(executor_for(elements));
  call(at.stream());
  at.stream().release();
}

}  // namespace blockscale::binding
