// D = A·Bᵀ + bias on the devices that can.
#pragma once

#include <optional>
#include <string>

#include "boundary.h"
#include "gpu/gpu.h"

namespace blockscale::binding {

// Two operands as values in BF16 without their outer scales, [lines, extent]; no `right` where the
// product decodes it.
struct Decoded {
  std::optional<Allocation> memory;  // of large ones; small ones are the call's
  Matrix left, right;
};
// Memory for the values of operands along rows that are about to be made
// (Quantization::row_values), where matmul would decode them before it multiplies.
std::optional<Decoded> room_for_values(const Context& at, const ConstQuantized& a,
                                       const ConstQuantized& b);

// Where a product goes.
struct Target {
  ScalarType dtype;  // float32, bfloat16 or float16
  // The lines of a, perhaps in several dimensions, and the lines of b; or [groups, lines of a,
  // lines of b].
  Ints sizes;
  // A contiguous float32 tensor of as many elements, to which it is added, and which is the result.
  std::optional<Tensor> into{};
  Previous previous = Previous::any;
};

// The operands' contraction axes are equally long, and their memory has been checked; they may be
// in groups as for the core's gemm. `bias` is [lines of b], with groups [groups, lines of b],
// float32, bfloat16 or float16. With `values` the operands have been decoded.
Tensor matmul(const Context& at, const ConstQuantized& a, const ConstQuantized& b,
              const std::optional<Tensor>& bias, const Target& target,
              const Decoded* values = nullptr);
// The same of two MXFP4 operands that were widened before.
Tensor matmul(const Context& at, const ConstQuantized& a, const gpu::WidenedOperand& b,
              const std::optional<Tensor>& bias, const Target& target);
// Whether the core's GEMM reads codes, those of the operands or wider ones; else both are decoded.
bool multiplies_codes(const ConstQuantized& a, const ConstQuantized& b);

// Where groups of `rows` rows end on a GPU, in storage where each starts at a multiple of `unit`;
// looked at, so that nothing is read outside whatever the offsets are.
struct Ends {
  Tensor ends, wrong;
  gpu::GroupEnds view(bool contraction) const;
};
Ends group_ends(const Context& at, const Groups& groups, int64_t rows, int64_t unit,
                const Stream& stream);

// A·B by group in PyTorch's grouped GEMM: a [T, K] by rows with b [groups, K, N], or a [M, S] with
// b [S, N] along S. BF16 in and out, rows or columns and groups along S at multiples of 16 bytes;
// rows of no group and the products of empty groups are left undefined.
Tensor grouped_mm(const Tensor& a, const Tensor& b, const Ends& ends);

// What a GEMM of operands of this spec still needs on a kind of device ("cpu", "cuda"); empty when
// it can run.
std::string matmul_needs(const QuantSpec& spec, std::string_view device);

// How `op`, matmul or grouped_matmul, multiplies operands of this spec on a kind of device, or its
// refusal. On a GPU it looks at the current one.
std::string matmul_path(const std::string& op, const QuantSpec& spec, std::string_view device);

}  // namespace blockscale::binding
