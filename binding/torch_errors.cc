#include "torch_errors.h"

#include <cstdio>
#include <string>

#include "gpu/gpu.h"

// Of PyTorch from 2.13 on: weak, so that one binary loads under those before, too.
extern "C" __attribute__((weak, visibility("default"))) const char*
torch_exception_get_what_without_backtrace();

namespace blockscale::binding {
namespace {

// As PyTorch writes it.
std::string size_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB"};
  auto size = static_cast<double>(bytes);
  int unit = 0;
  for (; size >= 1024 && unit < 3; ++unit) size /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit ? "%.2f %s" : "%.0f %s", size, kUnits[unit]);
  return text;
}

// Before 2.13 PyTorch prints its message, and hands it to nobody.
constexpr const char* kPrinted = "; PyTorch has printed more";

}  // namespace

void fail_allocation(int64_t bytes, const Device& device) {
  if (torch_exception_get_what_without_backtrace)
    throw std::runtime_error(torch_exception_get_what_without_backtrace());
  if (device.type() == DeviceType::CPU)
    throw std::runtime_error("DefaultCPUAllocator: can't allocate memory: you tried to allocate " +
                             std::to_string(bytes) + " bytes" + kPrinted);
  if (const std::string error = gpu::failure(); !error.empty())
    throw std::runtime_error("CUDA error: " + error + kPrinted);
  throw std::runtime_error("CUDA out of memory. Tried to allocate " + size_text(bytes) +
                           " on cuda:" + std::to_string(device.index()) + kPrinted);
}

void rethrow_as_torch(const std::runtime_error& failure) {
  const std::string text = failure.what();
  const size_t call = text.find(" API call failed");
  if (call == std::string::npos) throw;
  if (torch_exception_get_what_without_backtrace)
    throw std::runtime_error(torch_exception_get_what_without_backtrace());
  throw std::runtime_error("PyTorch failed in " + text.substr(0, call) + kPrinted);
}

}  // namespace blockscale::binding
