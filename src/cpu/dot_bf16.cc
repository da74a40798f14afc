#include "cpu/dot_bf16.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace blockscale::cpu {

bool has_bf16() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16");
}

namespace {

#define BLOCKSCALE_AVX512 __attribute__((target("avx512f"), always_inline)) inline

// Rows of 32 sums, which are scaled and stored to c or added to it.
class ScaledRows {
 public:
  BLOCKSCALE_AVX512 ScaledRows(const float* row_scales, const float* column_scales, bool accumulate,
                               float* c, int64_t c_stride)
      : row_scales_(row_scales),
        scale0_(_mm512_loadu_ps(column_scales)),
        scale1_(_mm512_loadu_ps(column_scales + 16)),
        accumulate_(accumulate),
        c_(c),
        c_stride_(c_stride) {}
  BLOCKSCALE_AVX512 void store(int64_t i, __m512 sum0, __m512 sum1) const {
    float* row = c_ + i * c_stride_;
    // Multiply the scales first: either one alone may take the sum out of range.
    const __m512 scale = _mm512_set1_ps(row_scales_[i]), zero = _mm512_setzero_ps();
    const __m512 before0 = accumulate_ ? _mm512_loadu_ps(row) : zero;
    const __m512 before1 = accumulate_ ? _mm512_loadu_ps(row + 16) : zero;
    const __m512 both0 = _mm512_mul_ps(scale, scale0_), both1 = _mm512_mul_ps(scale, scale1_);
    _mm512_storeu_ps(row, _mm512_fmadd_ps(sum0, both0, before0));
    _mm512_storeu_ps(row + 16, _mm512_fmadd_ps(sum1, both1, before1));
  }

 private:
  const float* row_scales_;
  __m512 scale0_, scale1_;
  bool accumulate_;
  float* c_;
  int64_t c_stride_;
};

}  // namespace

// ---- AVX-512 ----

__attribute__((target("avx512f,avx512bf16"))) void Avx512Dot::multiply(
    const uint32_t* a, const uint32_t* b, int64_t pairs, const float* row_scales,
    const float* column_scales, bool accumulate, float* c, int64_t c_stride) {
  __m512 sum[kRows][2];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; ++k, a += kRows, b += kColumns) {
    const __m512bh b0 = (__m512bh)_mm512_loadu_si512(b);
    const __m512bh b1 = (__m512bh)_mm512_loadu_si512(b + 16);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[i]));
      sum[i][0] = _mm512_dpbf16_ps(sum[i][0], pair, b0);
      sum[i][1] = _mm512_dpbf16_ps(sum[i][1], pair, b1);
    }
  }
  const ScaledRows out(row_scales, column_scales, accumulate, c, c_stride);
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) out.store(i, sum[i][0], sum[i][1]);
}

// ---- AMX ----
namespace {

constexpr int kTileRows = 16, kTileBytes = 64;  // of every tile

bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl()
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// The compiler does not take the attribute on a constructor.
__attribute__((target("amx-tile"))) void configure_tiles() {
  struct alignas(64) {  // as the instruction reads it
    uint8_t palette = 1, start_row = 0, reserved[14]{};
    uint16_t bytes[16]{};
    uint8_t rows[16]{};
  } config;
  for (int i = 0; i < 8; ++i) config.bytes[i] = kTileBytes, config.rows[i] = kTileRows;
  // GCC's intrinsic declares only the first 8 bytes as read: the rest would not be stored.
  asm volatile("ldtilecfg %0" ::"m"(config));
}
__attribute__((target("amx-tile"))) void release_tiles() { _tile_release(); }

}  // namespace

bool AmxDot::available() {
  static const bool yes = has_bf16() && __builtin_cpu_supports("amx-tile") &&
                          __builtin_cpu_supports("amx-bf16") && may_use_tiles();
  return yes;
}

AmxDot::Session::Session() { configure_tiles(); }
AmxDot::Session::~Session() { release_tiles(); }

__attribute__((target("amx-tile,amx-bf16,avx512f"))) void AmxDot::multiply(
    const uint32_t* a, const uint32_t* b, int64_t pairs, const float* row_scales,
    const float* column_scales, bool accumulate, float* c, int64_t c_stride) {
  constexpr int kPitch = kColumns * 4;  // of b and of `sums`, in bytes
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < pairs;
       k += kTogether, a += kRows * kTogether, b += kTogether * kColumns) {
    _tile_loadd(4, a, kTileBytes);
    _tile_loadd(6, b, kPitch);
    _tile_loadd(7, b + 16, kPitch);
    _tile_loadd(5, a + kTileRows * kTogether, kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  alignas(64) float sums[kRows][kColumns];
  _tile_stored(0, sums[0], kPitch);
  _tile_stored(1, sums[0] + 16, kPitch);
  _tile_stored(2, sums[kTileRows], kPitch);
  _tile_stored(3, sums[kTileRows] + 16, kPitch);
  const ScaledRows out(row_scales, column_scales, accumulate, c, c_stride);
  for (int i = 0; i < kRows; ++i)
    out.store(i, _mm512_load_ps(sums[i]), _mm512_load_ps(sums[i] + 16));
}

}  // namespace blockscale::cpu

#else

namespace blockscale::cpu {

bool has_bf16() { return false; }
void Avx512Dot::multiply(const uint32_t*, const uint32_t*, int64_t, const float*, const float*,
                         bool, float*, int64_t) {}
AmxDot::Session::Session() = default;
AmxDot::Session::~Session() = default;
bool AmxDot::available() { return false; }
void AmxDot::multiply(const uint32_t*, const uint32_t*, int64_t, const float*, const float*, bool,
                      float*, int64_t) {}

}  // namespace blockscale::cpu

#endif
