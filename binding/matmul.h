// D = A·Bᵀ + bias on the devices that can.
#pragma once

#include <optional>
#include <string>

#include "boundary.h"

namespace blockscale::binding {

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
