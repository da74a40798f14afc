#include "device.h"

#include <algorithm>
#include <string>
#include <utility>

#include "per_device.h"
#include "torch_errors.h"

// PyTorch has these in its builds for GPUs only: weak, so that one binary loads under every build.
#define BLOCKSCALE_OF_GPUS extern "C" __attribute__((weak, visibility("default"))) AOTITorchError
BLOCKSCALE_OF_GPUS aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
BLOCKSCALE_OF_GPUS aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t nbytes, void** ret_ptr);
BLOCKSCALE_OF_GPUS aoti_torch_cuda_caching_allocator_raw_delete(void* ptr);

namespace blockscale::binding {
namespace {

std::string device_text(const Device& device) {
  switch (device.type()) {
    case DeviceType::CPU:
      return "cpu";
    case DeviceType::CUDA:
      return "cuda:" + std::to_string(device.index());
    case DeviceType::XPU:
      return "xpu";
    case DeviceType::MPS:
      return "mps";
    default:
      return "another device";
  }
}

// Why tensors of this device cannot be worked on; empty when they can.
std::string refusal(const Device& device) {
  if (device.type() != DeviceType::CUDA) return "this build has no backend for it";
  if (!aoti_torch_get_current_cuda_stream) return "this PyTorch is built without CUDA";
  const torch::stable::accelerator::DeviceGuard guard(device.index());
  for (const Backend& backend : backends())
    if (backend.name == "cuda" && !backend.available) return backend.reason;
  return "";
}
// Whether this GPU runs the kernels. Asked once for each: the answer takes a look at the driver and
// loads a kernel.
bool runs_kernels(const Device& device) {
  static PerDevice known;
  return known.get(device.index(), [&] { return refusal(device).empty(); }) != 0;
}

int64_t bytes_of(const Ints& sizes, ScalarType dtype) {
  const bool eight = dtype == ScalarType::Long,
             narrow = dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
  const bool four = dtype == ScalarType::Float || dtype == ScalarType::Int;
  int64_t bytes = eight ? 8 : four ? 4 : narrow ? 2 : 1;  // of what operators make
  for (const int64_t size : sizes) bytes *= size;
  return bytes;
}

// PyTorch's own: a dimension without elements counts as one.
Ints contiguous_strides(const Ints& sizes) {
  Ints strides(sizes.size());
  int64_t next = 1;
  for (size_t d = sizes.size(); d-- > 0; next *= std::max<int64_t>(sizes[d], 1)) strides[d] = next;
  return strides;
}

// PyTorch's own threads.
class TorchExecutor final : public Executor {
 public:
  void parallel_for(int64_t count, const Body& body) const override {
    torch::stable::parallel_for(0, count, 1, body);
  }
};

}  // namespace

Context::Context(const char* op, const char* argument, const Tensor& first)
    : op_(op), first_(argument), device_(first.device()), memory_(device_) {
  if (device_.type() == DeviceType::CPU) return;
  if (cuda() && runs_kernels(device_)) {
    using torch::stable::accelerator::getCurrentDeviceIndex;
    if (getCurrentDeviceIndex() != device_.index()) guard_.emplace(device_.index());
    return;
  }
  fail(op, std::string(argument) + ".device", device_text(device_), "cpu",
       "move it with .cpu(): " + refusal(device_));
}

void Context::check(const char* argument, const Tensor& tensor) const {
  const Device device = tensor.device();
  // CPU tensors are all in one memory, whatever index they carry.
  if (device.type() == device_.type() && (!cuda() || device.index() == device_.index())) return;
  fail(op_, std::string(argument) + ".device", device_text(device),
       device_text(device_) + ", where " + first_ + " is",
       "move it with .to(\"" + device_text(device_) + "\")");
}

Tensor empty(const Ints& sizes, ScalarType dtype, const Device& device) {
  return empty_strided(sizes, contiguous_strides(sizes), dtype, device);
}

Tensor empty_strided(const Ints& sizes, const Ints& strides, ScalarType dtype,
                     const Device& device) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  AtenTensorHandle made = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               to<int32_t>(from(dtype)), to<int32_t>(from(device.type())),
                               device.index(), &made) != TORCH_SUCCESS)
    fail_allocation(bytes_of(sizes, dtype), device);
  return Tensor(made);
}

Tensor with_shape(const Tensor& fresh, const Ints& sizes) {
  if (fresh.dim() == static_cast<int64_t>(sizes.size())) return fresh;
  return part(fresh, sizes, contiguous_strides(sizes), 0);
}

Tensor part(const Tensor& fresh, const Ints& sizes, const Ints& strides, int64_t from) {
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      fresh.get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), from, &made));
  return Tensor(made);
}

Tensor contiguous_of(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

Tensor borrowed(void* data, const Ints& sizes, const Ints& strides, ScalarType dtype,
                const Device& device) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      data, static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0,
      to<int32_t>(from(dtype)), to<int32_t>(from(device.type())), device.index(), &made));
  return Tensor(made);
}

Allocation::Allocation(const Device& device, int64_t bytes) {
  if (device.type() == DeviceType::CPU) {
    tensor_ = empty({bytes}, ScalarType::Byte, device);
    data_ = static_cast<uint8_t*>(tensor_->mutable_data_ptr());
    return;
  }
  void* data = nullptr;
  if (aoti_torch_cuda_caching_allocator_raw_alloc(static_cast<uint64_t>(bytes), &data) !=
      TORCH_SUCCESS)
    fail_allocation(bytes, device);
  data_ = static_cast<uint8_t*>(data);
}
Allocation::~Allocation() {
  if (data_ && !tensor_) (void)aoti_torch_cuda_caching_allocator_raw_delete(data_);
}

uint8_t* Arena::take(int64_t bytes) {
  if (uint8_t* const small = take_small(bytes)) return small;
  return pieces_.emplace_back(device_, bytes).data();
}

uint8_t* Arena::take_small(int64_t bytes) {
  constexpr int64_t kShared = 1 << 19, kMost = 1 << 17, kAlign = 256;
  if (device_.type() == DeviceType::CPU || bytes > kMost) return nullptr;
  if (!base_ || used_ + bytes > kShared) {
    base_ = pieces_.emplace_back(device_, kShared).data();
    used_ = 0;
  }
  return base_ + std::exchange(used_, round_up(used_ + bytes, kAlign));
}

TorchStream::TorchStream(const Device& device, Arena& memory) : device_(device), memory_(memory) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index(), &handle_));
}

void* TorchStream::workspace(int64_t bytes) const {
  if (uint8_t* const small = memory_.take_small(bytes)) return small;
  return workspaces_.emplace_back(device_, bytes).data();
}

const Executor& executor_for(int64_t elements) {
  // Below this, waking other threads costs more than it saves (torch's own grain).
  constexpr int64_t kSerialElements = 32768;
  static const TorchExecutor executor;
  if (elements < kSerialElements) return serial_executor();
  return executor;
}

}  // namespace blockscale::binding
