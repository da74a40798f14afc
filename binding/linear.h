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
// [y, what the backward reads]: with dx the gradient of x will be asked for, with dw that of w.
// With dw the wgrad operand of x, with dx the dgrad operand of w, and, where that backward draws
// random bits, a copy of offset: all in one tensor of bytes (SavedOperands), none where there is
// nothing to keep. High-precision operands are not returned: they are x and w themselves. Without a
// dtype y has x's.
//
// With offsets x is [T, K] in groups of rows and w [E, N, K] holds a matrix for each; no bias.
// `quantized_w`: what quantize_weight has made of w, which is not read then, nor is its dgrad
// operand returned again; or, of a w in square blocks, codes, scales and outer scale as quantize
// returns them along its rows, which the backward transposes. `quantized_x` likewise what
// quantize_input has made of x.
std::vector<Tensor> linear_op(Tensor x, Tensor w, std::optional<Tensor> bias, Text recipe, bool dx,
                              bool dw, std::optional<Tensor> seed, std::optional<Tensor> offset,
                              std::optional<Tensor> offsets, std::optional<ScalarType> dtype,
                              std::optional<std::vector<Tensor>> quantized_w,
                              std::optional<std::vector<Tensor>> quantized_x);

// The same of pieces of a layer whose x, w and dy are parts of larger matrices: `origins` has the
// row and the column where x and w start in those. What the outer scales of the whole x and w are
// made from, where the pieces are not the whole, are x_amax and w_amax: float32 [2], of the operand
// along the rows and of that down the columns.
std::vector<Tensor> linear_piece_op(Tensor x, Tensor w, std::optional<Tensor> bias, Text recipe,
                                    bool dx, bool dw, std::optional<Tensor> seed,
                                    std::optional<Tensor> offset, std::optional<ScalarType> dtype,
                                    Ints origins, std::optional<Tensor> x_amax,
                                    std::optional<Tensor> w_amax);

// The operands of w [N, K] or [E, N, K], of [fprop, dgrad] those that the recipe quantizes, each a
// tensor of its own; that of dgrad only if asked for.
std::vector<Tensor> quantize_weight_op(Tensor w, Text recipe, bool dgrad,
                                       std::optional<Tensor> seed, std::optional<Tensor> offset);

// The operands of x [..., K], of [fprop, wgrad] those that the recipe quantizes, each a tensor of
// its own; that of wgrad only with dw. For layers that read the same x.
std::vector<Tensor> quantize_input_op(Tensor x, Text recipe, bool dw,
                                      std::optional<Tensor> offsets);

// The gradients asked for, of [dx, dw, db], in the dtype given or else that of dy. `saved`: what
// the forward with these dx and dw has made; with dw, x's wgrad operand if that forward has not
// made it (x_apart), or x itself, which is quantized here where the recipe says so; with dx
// likewise w's dgrad operand (w_apart), or the three tensors along its rows, or w itself; and where
// bits are drawn the seed. With skip_dx or skip_dw that gradient is left out all the same. With
// w_transposed dw lies as [K, N] does, or [E, K, N], where w does.
std::vector<Tensor> linear_backward_op(Tensor dy, std::vector<Tensor> saved, Text recipe, int64_t k,
                                       bool dx, bool dw, bool db, std::optional<Tensor> offsets,
                                       std::optional<ScalarType> x_dtype,
                                       std::optional<ScalarType> w_dtype,
                                       std::optional<ScalarType> bias_dtype, bool skip_dx,
                                       bool skip_dw, bool w_transposed, bool x_apart, bool w_apart);

// The same of a piece of dy, as for linear_piece_op.
std::vector<Tensor> linear_piece_backward_op(Tensor dy, std::vector<Tensor> saved, Text recipe,
                                             int64_t k, bool dx, bool dw, bool db,
                                             std::optional<ScalarType> x_dtype,
                                             std::optional<ScalarType> w_dtype,
                                             std::optional<ScalarType> bias_dtype, bool skip_dx,
                                             bool skip_dw, Ints origin, std::optional<Tensor> amax);

// linear_backward_op with dw, which is added to `into`, contiguous float32 of w's shape. [dx, db],
// empty where not asked for: PyTorch's compiler takes no lists from operators that change an
// argument.
std::tuple<Tensor, Tensor> linear_backward_into_op(Tensor dy, std::vector<Tensor> saved,
                                                   Text recipe, int64_t k, bool dx, bool db,
                                                   std::optional<Tensor> offsets, Tensor into,
                                                   std::optional<ScalarType> x_dtype,
                                                   std::optional<ScalarType> bias_dtype,
                                                   bool skip_dx, bool x_apart, bool w_apart);

}  // namespace blockscale::binding
