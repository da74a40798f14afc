// Products of operands that are quantized, made ahead or in high precision.
#pragma once

#include <optional>
#include <vector>

#include "matmul.h"
#include "operands.h"

namespace blockscale::binding {

// A·Bᵀ + bias, `sizes` in all, or added to `into`; with groups by group, along the contraction axis
// where they divide that of a, else with a matrix of b for each. In PyTorch's own GEMM of `compute`
// unless both are quantized. Groups are those of a. `decoded`: what matmul would decode, where it
// has been.
Tensor product(const Place& at, const Side& a, const Side& b, const std::optional<Tensor>& bias,
               ScalarType compute, ScalarType out_dtype, const std::vector<int64_t>& sizes,
               const Groups& groups, int64_t rows, const std::optional<Tensor>& into = std::nullopt,
               const Decoded* decoded = nullptr);

}  // namespace blockscale::binding
