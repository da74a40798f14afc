// What PyTorch refuses, told in its words. Its C interface gives a code, and what its headers make
// of that is a place in a source file.
#pragma once

#include <stdexcept>

#include "device.h"

namespace blockscale::binding {

// PyTorch's allocator had no memory for so many bytes.
[[noreturn]] void fail_allocation(int64_t bytes, const Device& device);

// Throws what a call of PyTorch's said that failed, if that is what this is about; else this again.
// To be called while it is handled.
[[noreturn]] void tell(const std::runtime_error& failure);

// An operator so told.
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
