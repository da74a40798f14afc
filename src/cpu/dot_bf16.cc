#include "cpu/dot_bf16.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace blockscale::cpu {

bool has_bf16() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16");
}

__attribute__((target("avx512f,avx512bf16"))) void multiply_pairs(
    const uint32_t* a, const uint32_t* b, int64_t pairs, const float* row_scales,
    const float* column_scales, bool accumulate, float* c, int64_t c_stride) {
  constexpr int kRows = kDotRows;
  __m512 sum[kRows][2];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; ++k, a += kDotRows, b += kDotColumns) {
    const __m512bh b0 = (__m512bh)_mm512_loadu_si512(b);
    const __m512bh b1 = (__m512bh)_mm512_loadu_si512(b + 16);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[i]));
      sum[i][0] = _mm512_dpbf16_ps(sum[i][0], pair, b0);
      sum[i][1] = _mm512_dpbf16_ps(sum[i][1], pair, b1);
    }
  }
  const __m512 scale0 = _mm512_loadu_ps(column_scales);
  const __m512 scale1 = _mm512_loadu_ps(column_scales + 16);
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    float* row = c + i * c_stride;
    const __m512 scale = _mm512_set1_ps(row_scales[i]);
    const __m512 zero = _mm512_setzero_ps();
    // Multiply the scales first: either one alone may take the sum out of range.
    const __m512 before0 = accumulate ? _mm512_loadu_ps(row) : zero;
    const __m512 before1 = accumulate ? _mm512_loadu_ps(row + 16) : zero;
    const __m512 both0 = _mm512_mul_ps(scale, scale0), both1 = _mm512_mul_ps(scale, scale1);
    _mm512_storeu_ps(row, _mm512_fmadd_ps(sum[i][0], both0, before0));
    _mm512_storeu_ps(row + 16, _mm512_fmadd_ps(sum[i][1], both1, before1));
  }
}

}  // namespace blockscale::cpu

#else

namespace blockscale::cpu {

bool has_bf16() { return false; }
void multiply_pairs(const uint32_t*, const uint32_t*, int64_t, const float*, const float*, bool,
                    float*, int64_t) {}

}  // namespace blockscale::cpu

#endif
