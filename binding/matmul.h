// D = A·Bᵀ + bias on the devices that can.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "boundary.h"

namespace blockscale::binding {

// The first result of one of PyTorch's operators.
template <class... Args>
Tensor call(const char* op, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The operands' contraction axes are equally long, and their memory has been checked; bias is
// [lines of b] of any dtype. `sizes` is the shape of D: the lines of a, perhaps in several
// dimensions, and the lines of b. out_dtype is float32, bfloat16 or float16.
Tensor matmul(const Place& at, const ConstQuantized& a, const ConstQuantized& b,
              const std::optional<Tensor>& bias, ScalarType out_dtype,
              const std::vector<int64_t>& sizes);

// What a GEMM of operands of this spec still needs on a kind of device ("cpu", "cuda"); empty when
// it can run.
std::string matmul_needs(const QuantSpec& spec, std::string_view device);

}  // namespace blockscale::binding
