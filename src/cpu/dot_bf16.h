// The BF16 dot product of AVX-512, which Highway 1.0.3 does not offer.
#pragma once

#include <cstdint>

namespace blockscale::cpu {

// Extents of its tile: 24 accumulators of 16 lanes, two vectors of B, one broadcast of A.
inline constexpr int64_t kDotRows = 12, kDotColumns = 32;

// Whether this processor has it, and rounds FP32 to BF16 by itself.
bool has_bf16();

// c[kDotRows][kDotColumns] = or += (a^T b) * row_scales * column_scales, where a[pairs][kDotRows]
// and b[pairs][kDotColumns] hold two consecutive BF16 values of k a word, the first one low.
//
// The instruction takes subnormals for zeros and gives none: operands whose products or sums could
// be subnormal must not come here.
void multiply_pairs(const uint32_t* a, const uint32_t* b, int64_t pairs, const float* row_scales,
                    const float* column_scales, bool accumulate, float* c, int64_t c_stride);

}  // namespace blockscale::cpu
