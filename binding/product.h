// Products of operands that are quantized, made ahead or in high precision.
#pragma once

#include <optional>

#include "matmul.h"
#include "operands.h"

namespace blockscale::binding {

// A·Bᵀ + bias; with groups by group, along the contraction axis where they divide that of a, else
// with a matrix of b for each. In PyTorch's own GEMM of `compute` unless both are quantized. Groups
// are those of a. `decoded`: what matmul would decode, where it has been.
Tensor product(const Context& at, const GemmOperand& a, const GemmOperand& b,
               const std::optional<Tensor>& bias, ScalarType compute, const Target& target,
               const Groups& groups, int64_t rows, const Decoded* decoded = nullptr);
// Whether the core's GEMM reads codes of both, so that its kernel is the last that the core
// launches, if any is.
bool multiplies_codes(const GemmOperand& a, const GemmOperand& b);

}  // namespace blockscale::binding
