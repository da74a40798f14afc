// What a linear layer's forward and backward share: the recipe, and what the operators' arguments
// say.
#pragma once

#include <span>

#include "operands.h"

namespace blockscale::binding {

struct Recipe {
  Spec fprop_x, fprop_w, dgrad_dy, dgrad_w, wgrad_dy, wgrad_x;
  // Whether the operands made in a backward that gives these gradients draw random bits.
  bool backward_draws(bool dx, bool dw) const {
    return (dx && dgrad_dy && dgrad_dy->stochastic()) || (dw && wgrad_dy && wgrad_dy->stochastic());
  }
};
// Of the texts of its six specs, in this order, "none" for high precision, one space apart.
const Recipe& recipe_of(const Text& text);

inline const char* name_of(bool grouped) { return grouped ? "grouped_linear" : "linear"; }

// x's sizes with another last one.
Ints with_last(const Tensor& x, int64_t last);

// `amax`: what the outer scales of the operands along the rows and down the columns come from.
Shard shard_of(const Context& at, const char* name, const std::optional<Tensor>& amax, int64_t row,
               int64_t column);

// A weight's operand along its rows as FSDP2 gathers it: codes, scales and outer scale, each as
// quantize_piece returns it. Codes have two dimensions, or three of [E, N, K]; what is not gathered
// is bytes in one, or values.
inline constexpr size_t kGatheredParts = 3;
bool is_gathered(const Tensor& first);
Operand gathered(const Context& at, const char* name, std::span<const Tensor> parts,
                 const Spec& spec, const Extent& e);

}  // namespace blockscale::binding
