// y = x·Wᵀ + bias and its gradients, each as one operator.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "boundary.h"

namespace blockscale::binding {

// A recipe arrives as the texts of its six specs, in the order of recipe.py's OPERANDS, with "none"
// for high precision, one space apart.
//
// [y, what the backward reads]: with dw the wgrad operand of x, with dx the dgrad operand of w,
// and, where that backward draws random bits, a copy of offset. An operand is one tensor of bytes:
// codes, the outer scale if there is one, block scales, all linear. High-precision operands are not
// returned: they are x and w themselves.
//
// With offsets x is [T, K] in groups of rows and w [E, N, K] holds a matrix for each; no bias.
std::vector<Tensor> linear_op(Tensor x, Tensor w, std::optional<Tensor> bias, Text recipe, bool dx,
                              bool dw, ScalarType dtype, std::optional<Tensor> seed_x,
                              std::optional<Tensor> seed_w, std::optional<Tensor> offset,
                              std::optional<Tensor> offsets);

// The gradients asked for, of [dx, dw, db]; db where bias_dtype is given. `saved`: x's operand (or
// x) with dw, w's (or w) with dx, then, where bits are drawn, the offset's copy and dy's seed.
std::vector<Tensor> linear_backward_op(Tensor dy, std::vector<Tensor> saved, Text recipe, int64_t k,
                                       bool dx, bool dw, ScalarType dtype, ScalarType x_dtype,
                                       ScalarType w_dtype, std::optional<ScalarType> bias_dtype,
                                       std::optional<Tensor> offsets);

// The same with dw, which is added to `into`, contiguous float32 of w's shape. [dx, db], empty
// where not asked for: PyTorch's compiler takes no lists from operators that change an argument.
std::tuple<Tensor, Tensor> linear_backward_into_op(Tensor dy, std::vector<Tensor> saved,
                                                   Text recipe, int64_t k, bool dx,
                                                   ScalarType dtype, ScalarType x_dtype,
                                                   std::optional<ScalarType> bias_dtype,
                                                   std::optional<Tensor> offsets, Tensor into);

}  // namespace blockscale::binding
