// The AVX-512 BF16 dot product, which Highway 1.0.3 does not offer.
#pragma once

#include <cstdint>

namespace blockscale::cpu {

// The extents of its tile: 24 accumulators of 16 lanes, two vectors of B, one broadcast of A.
inline constexpr int64_t kDotRows = 12, kDotColumns = 32;

// Whether this processor has it, and an instruction that rounds FP32 to BF16.
bool has_bf16();

// c[kDotRows][kDotColumns] = or += (a^T b) * row_scales * column_scales, where a[pairs][kDotRows]
// and b[pairs][kDotColumns] hold two consecutive BF16 values of k per word, the first in the low
// half.
//
// The instruction treats subnormals as zero and never returns one: do not pass operands whose
// products or sums could be subnormal.
void multiply_pairs(const uint32_t* a, const uint32_t* b, int64_t pairs, const float* row_scales,
                    const float* column_scales, bool accumulate, float* c, int64_t c_stride);

}  // namespace blockscale::cpu
