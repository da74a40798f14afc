// The operands of a linear layer: what is made of its tensors, and what was made before.
#pragma once

#include <optional>
#include <vector>

#include "boundary.h"

namespace blockscale::binding {

using Spec = std::optional<QuantSpec>;  // none: high precision

// The matrices of a tensor: one, a batch, or groups of the rows of one.
struct Extent {
  int64_t rows, columns;
  int64_t batch = 1;
  Groups groups{};
};

// One operand of a GEMM, quantized or a high-precision matrix, which runs along the contraction
// axis or, with axis -2, down it.
struct Side {
  Tensor memory;  // what `view` was handed in or out with, or the matrix
  int axis;
  std::optional<ConstQuantized> view;
};

// What an earlier call has made, from its memory; without a spec, the matrix itself.
Side kept(const Place& at, const char* name, const Tensor& saved, const Spec& spec, int axis,
          const Extent& e);

// x [..., K] as one matrix.
int64_t rows_of(const Tensor& x);
Tensor matrix(const Tensor& x);

// Whether an operand is made, and whether it is read by this call alone or handed out.
enum class Wanted { no, here, outside };
inline Wanted here_if(bool wanted) { return wanted ? Wanted::here : Wanted::no; }
inline Wanted outside_if(bool wanted) { return wanted ? Wanted::outside : Wanted::no; }

// What the random bits of one operand are keyed by: the layer's seed, from which each operand
// derives its own (docs/rng.md), and the offset.
enum class Role : uint64_t { x = 1, w, dy };
struct Key {
  Role role;
  const std::optional<Tensor>&seed, &offset;
};

// Where a quantizer writes.
struct Made {
  Made(const Place& at, const QuantSpec& spec, int axis, const Extent& e, Wanted wanted);
  Side side() const { return {memory, view.axis, as_const(view)}; }

  Tensor memory;  // none of its own where it is read here
  Quantized view;
};

// The operands of x along its rows and down its columns; one that is not wanted is left out.
struct Operands {
  std::optional<Side> row, column;
};
// The same with all that make() needs to make them. x is one matrix, with `batched` [E, R, C], or
// in groups.
struct Making : Operands {
  Making(const Place& at, const Tensor& x, bool batched, const Groups& groups, const Spec& row_spec,
         const Spec& column_spec, Wanted want_row, Wanted want_column, const Key& key);
  Quantization quantization() const {
    return {in.view, made_row ? &made_row->view : nullptr,
            made_column ? &made_column->view : nullptr, row_options, column_options};
  }

  Input in;
  std::optional<Made> made_row, made_column;
  QuantizeOptions row_options, column_options;
};
// Those of one tensor, in one pass where both are quantized, or of two.
void make(const Place& at, const Making& first, const Making* second = nullptr);

}  // namespace blockscale::binding
