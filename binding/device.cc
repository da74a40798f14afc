#include "device.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

// PyTorch has it in its builds for GPUs only: weak, so that one binary loads under every build.
extern "C" __attribute__((weak, visibility("default"))) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

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
  constexpr int kDevices = 64;
  static std::atomic<bool> known[kDevices];
  const auto index = static_cast<size_t>(device.index());
  if (index < kDevices && known[index]) return true;
  if (!refusal(device).empty()) return false;
  if (index < kDevices) known[index] = true;
  return true;
}

// torch's own: a dimension without elements counts as one.
std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t next = 1;
  for (size_t d = sizes.size(); d-- > 0; next *= std::max<int64_t>(sizes[d], 1)) strides[d] = next;
  return strides;
}

}  // namespace

Place::Place(const char* op, const char* argument, const Tensor& first)
    : op_(op), first_(argument), device_(first.device()), memory_(device_) {
  if (device_.type() == DeviceType::CPU) return;
  if (cuda() && runs_kernels(device_)) return;
  fail(op, std::string(argument) + ".device", device_text(device_), "cpu",
       "move it with .cpu(): " + refusal(device_));
}

void Place::check(const char* argument, const Tensor& tensor) const {
  const Device device = tensor.device();
  // CPU tensors are all in one memory, whatever index they carry.
  if (device.type() == device_.type() && (!cuda() || device.index() == device_.index())) return;
  fail(op_, std::string(argument) + ".device", device_text(device),
       device_text(device_) + ", where " + first_ + " is",
       "move it with .to(\"" + device_text(device_) + "\")");
}

Tensor empty(const std::vector<int64_t>& sizes, ScalarType dtype, const Device& device) {
  return empty_strided(sizes, contiguous_strides(sizes), dtype, device);
}

Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                     ScalarType dtype, const Device& device) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), to<int32_t>(from(dtype)),
      to<int32_t>(from(device.type())), device.index(), &made));
  return Tensor(made);
}

Tensor with_shape(const Tensor& fresh, const std::vector<int64_t>& sizes) {
  if (fresh.dim() == static_cast<int64_t>(sizes.size())) return fresh;
  return part(fresh, sizes, contiguous_strides(sizes), 0);
}

Tensor part(const Tensor& fresh, const std::vector<int64_t>& sizes,
            const std::vector<int64_t>& strides, int64_t from) {
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      fresh.get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), from, &made));
  return Tensor(made);
}

Tensor contiguous_of(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

void* Memory::take(int64_t bytes) {
  if (void* const small = take_small(bytes)) return small;
  tensors_.push_back(empty({bytes}, ScalarType::Byte, device_));
  return tensors_.back().mutable_data_ptr();
}

void* Memory::take_small(int64_t bytes) {
  constexpr int64_t kShared = 1 << 19, kMost = 1 << 17, kAlign = 256;
  if (device_.type() == DeviceType::CPU || bytes > kMost) return nullptr;
  if (!shared_ || used_ + bytes > kShared) {
    if (shared_) tensors_.push_back(*shared_);
    shared_ = empty({kShared / 2}, ScalarType::BFloat16, device_);
    base_ = static_cast<uint8_t*>(shared_->mutable_data_ptr());
    used_ = 0;
  }
  return base_ + std::exchange(used_, round_up(used_ + bytes, kAlign));
}

Memory::Values Memory::take_values(int64_t count) {
  if (void* const small = take_small(2 * count))
    return {*shared_, (static_cast<uint8_t*>(small) - base_) / 2};
  return {empty({count}, ScalarType::BFloat16, device_), 0};
}

TorchStream::TorchStream(const Device& device, Memory& memory) : device_(device), memory_(memory) {
  using namespace torch::stable::accelerator;
  if (getCurrentDeviceIndex() != device.index()) guard_.emplace(device.index());
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index(), &handle_));
}

void* TorchStream::workspace(int64_t bytes) const {
  if (void* const small = memory_.take_small(bytes)) return small;
  workspaces_.push_back(empty({bytes}, ScalarType::Byte, device_));
  return workspaces_.back().mutable_data_ptr();
}

const Executor& executor_for(int64_t elements) {
  // Below this, waking other threads costs more than it saves (torch's own grain).
  constexpr int64_t kSerialElements = 32768;
  static const TorchExecutor executor;
  if (elements < kSerialElements) return serial_executor();
  return executor;
}

}  // namespace blockscale::binding
