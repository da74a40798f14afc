// Reports PyTorch's failures in PyTorch's own words: its C interface returns a code, which its
// headers turn into a place in a source file.
#pragma once

#include <stdexcept>

#include "device.h"

namespace blockscale::binding {

// PyTorch's allocator had no memory for so many bytes.
[[noreturn]] void fail_allocation(int64_t bytes, const Device& device);

// Throws the message of a failed call into PyTorch, if `failure` is one, else rethrows it. Called
// from a handler.
[[noreturn]] void rethrow_as_torch(const std::runtime_error& failure);

// An operator whose failures in PyTorch carry PyTorch's message.
template <auto kOp>
struct WithTorchErrors;
template <class Result, class... Arguments, Result (*kOp)(Arguments...)>
struct WithTorchErrors<kOp> {
  static Result call(Arguments... arguments) {
    try {
      return kOp(std::move(arguments)...);
    } catch (const std::runtime_error& failure) {
      rethrow_as_torch(failure);
    }
  }
};

}  // namespace blockscale::binding
