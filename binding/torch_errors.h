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
[[noreturn]] void tell(const std::runtime_error& failure);

// An operator whose failures in PyTorch carry PyTorch's message.
template <auto kOp>
struct Told;
template <class Result, class... Arguments, Result (*kOp)(Arguments...)>
struct Told<kOp> {
  static Result call(Arguments... arguments) {
    try {
      return kOp(std::move(arguments)...);
    } catch (const std::runtime_error& failure) {
      tell(failure);
    }
  }
};

}  // namespace blockscale::binding
