// Where a call runs: PyTorch's threads for tensors in host memory, PyTorch's current stream for
// tensors of a GPU.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <vector>

#include "blockscale/ops.h"

namespace blockscale::binding {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;

// PyTorch's current stream of a device, which is the current one while this lives. Workspaces are
// freed before the kernels that use them have run: PyTorch's allocator hands memory on in stream
// order.
class TorchStream final : public Stream {
 public:
  explicit TorchStream(const Device& device);
  void* handle() const override { return handle_; }
  void* workspace(int64_t bytes) const override;
  void release() const { workspaces_.clear(); }

 private:
  Device device_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  void* handle_ = nullptr;
  mutable std::vector<Tensor> workspaces_;
};

// The one device of a call: that of its first tensor, which this build must have a backend for.
class Place {
 public:
  Place(const char* op, const char* argument, const Tensor& first);
  // Refuses a tensor that lies elsewhere.
  void check(const char* argument, const Tensor& tensor) const;

  const char* op() const { return op_; }
  const Device& device() const { return device_; }
  bool cuda() const { return device_.type() == DeviceType::CUDA; }
  // Of a GPU; asked for once a call.
  const TorchStream& stream() const {
    if (!stream_) stream_.emplace(device_);
    return *stream_;
  }

 private:
  const char* op_;
  const char* first_;
  Device device_;
  mutable std::optional<TorchStream> stream_;
};

// A fresh tensor, contiguous or with the strides given. Straight through the C shim: a call of
// aten::empty through the dispatcher costs the host several times as much.
Tensor empty(const std::vector<int64_t>& sizes, ScalarType dtype, const Device& device);
Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                     ScalarType dtype, const Device& device);
// The memory of a fresh contiguous tensor under another shape; to autograd it is no view.
Tensor with_shape(const Tensor& fresh, const std::vector<int64_t>& sizes);

// The first result of one of PyTorch's operators.
template <class... Args>
Tensor call(const char* op, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// PyTorch's own threads.
class TorchExecutor final : public Executor {
 public:
  void parallel_for(int64_t count, const Body& body) const override {
    torch::stable::parallel_for(0, count, 1, body);
  }
};

// The threads for work on about so many elements.
const Executor& executor_for(int64_t elements);

// call(executor) or call(stream), for operators that have an overload for each.
template <class Call>
void run(const Place& at, int64_t elements, const Call& call) {
  if (!at.cuda()) return call(executor_for(elements));
  call(at.stream());
  at.stream().release();
}

}  // namespace blockscale::binding
