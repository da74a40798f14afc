// The Hadamard transform of one block (specification, section 8), in place, FP32.
#pragma once

#include "blockscale/rounding.h"

namespace blockscale {

// The transform applied along the contraction axis; dim 0 = none. If bit i of the 128-bit mask (lo,
// then hi) is set, the sign of element i of every block is flipped.
struct Hadamard {
  uint16_t dim = 0;
  uint64_t mask_lo = 0;
  uint64_t mask_hi = 0;

  BLOCKSCALE_HD constexpr bool negates(int i) const {
    return ((i < 64 ? mask_lo >> i : mask_hi >> (i - 64)) & 1) != 0;
  }
  constexpr bool operator==(const Hadamard&) const = default;
};

inline constexpr int kHadamardSizes[] = {16, 32, 64, 128};
inline constexpr uint64_t kDefaultSigns16 = 0xD7E8;

// fl(1/sqrt(d)) for the sizes listed above.
BLOCKSCALE_HD constexpr float hadamard_norm(int dim) {
  return dim == 16   ? 0.25f
         : dim == 32 ? 0.1767766952966368811f
         : dim == 64 ? 0.125f
                     : 0.08838834764831844055f;
}

// y = H_d diag(+-1) x / sqrt(d), rounded to BF16. Butterflies in stage order 1, 2, 4, ..., then one
// multiply, then + 0.0 (so that an exact zero is +0). Every output sums every input, so any
// non-finite input makes the whole block non-finite without a check.
BLOCKSCALE_HD constexpr void hadamard_block(const Hadamard& h, float* x) {
  for (int i = 0; i < h.dim; ++i) {
    if (h.negates(i)) x[i] = -x[i];
  }
  for (int step = 1; step < h.dim; step *= 2) {
    for (int i = 0; i < h.dim; ++i) {
      if (i & step) continue;
      const float a = x[i], b = x[i + step];
      x[i] = a + b;
      x[i + step] = a - b;
    }
  }
  for (int i = 0; i < h.dim; ++i) {
    const float scaled = x[i] * hadamard_norm(h.dim);
    x[i] = from_bf16(to_bf16(scaled + 0.0f));
  }
}

}  // namespace blockscale
