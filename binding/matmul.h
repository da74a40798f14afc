// D = A·Bᵀ + bias on the devices that can.
#pragma once

#include <optional>
#include <string>

#include "boundary.h"
#include "gpu/gpu.h"

namespace blockscale::binding {

// The operands' contraction axes are equally long, and their memory has been checked; they may be
// in groups as for the core's gemm. `bias` is [lines of b], with groups [groups, lines of b], of
// any dtype. `sizes` is the shape of D: the lines of a, perhaps in several dimensions, and the
// lines of b; or [groups, lines of a, lines of b]. out_dtype is float32, bfloat16 or float16.
//
// With `into`, a contiguous float32 tensor of as many elements, the product is added to it, and it
// is the result.
Tensor matmul(const Place& at, const ConstQuantized& a, const ConstQuantized& b,
              const std::optional<Tensor>& bias, ScalarType out_dtype,
              const std::vector<int64_t>& sizes, const std::optional<Tensor>& into = std::nullopt);

// A·Bᵀ by group of matrices in BF16 on a GPU: a [T, K] by rows and b [groups, N, K], or a [M, S]
// and b [N, S] along S, in storage where each group starts at a multiple of `unit` (of 8). BF16, by
// PyTorch's grouped GEMM; rows of no group and empty groups hold anything. `ends` receives what
// gpu::finish needs to know of them.
struct Ends {
  Tensor ends, wrong;
  gpu::GroupEnds view(bool contraction) const;
};
Ends group_ends(const Place& at, const Groups& groups, int64_t rows, int64_t unit,
                const Stream& stream);
Tensor grouped_mm(const Tensor& a, const Tensor& b, const Ends& ends);

// What a GEMM of operands of this spec still needs on a kind of device ("cpu", "cuda"); empty when
// it can run.
std::string matmul_needs(const QuantSpec& spec, std::string_view device);

// How `op`, matmul or grouped_matmul, multiplies operands of this spec on a kind of device, or its
// refusal. On a GPU it looks at the current one.
std::string matmul_path(const std::string& op, const QuantSpec& spec, std::string_view device);

}  // namespace blockscale::binding
