// From values to codes, 16 at a time. The arithmetic is that of
// rounding.h and formats.h; what is written differently here is shown equal by the tests.
#pragma once

#include "blockscale/hadamard.h"
#include "blockscale/philox.h"
#include "gpu/tile.h"

namespace blockscale::gpu {

// How a run is encoded. `any` reads everything from the spec at run time: right for every spec,
// and slower; the others are the ones that training uses.
enum class Encoder : uint8_t { none, any, e4m3fn, e5m2, fp4_nearest, fp4_stochastic };

// What a kernel knows of a spec when it is compiled, along one axis. The scale format fixes the
// length of the block; rules, signs and layouts are read at run time: they cost little a block.
struct Pass {
  Encoder encoder = Encoder::none;
  Format scale = Format::fp32;
  bool square = false;
  bool hadamard = false;
  constexpr bool operator==(const Pass&) const = default;
  BLOCKSCALE_HD constexpr bool any() const { return encoder == Encoder::any; }
  BLOCKSCALE_HD constexpr bool present() const { return encoder != Encoder::none; }
  BLOCKSCALE_HD constexpr bool fp4() const {
    return encoder == Encoder::fp4_nearest || encoder == Encoder::fp4_stochastic;
  }
  BLOCKSCALE_HD constexpr int block() const {
    return scale == Format::fp32   ? kFp8_1x128.block
           : scale == Format::e8m0 ? kMxfp8.block
                                   : kNvfp4.block;
  }
};
// As an argument of a kernel: nvcc's host stubs do not take values of class type.
template <Encoder kEncoder, Format kScale = Format::fp32, bool kSquare = false,
          bool kHadamard = false>
struct PassType {
  static constexpr Pass kPass{kEncoder, kScale, kSquare, kHadamard};
};

struct Codes {
  uint32_t word[4];  // 16 bytes, or 8 for FP4
};

// Signs of v[0..7] at bits 3, 7, ..., 31; other bits hold other things.
BLOCKSCALE_DEVICE uint32_t signs_of_8(const float* v) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) word = shift_left_in(word, bit_cast<uint32_t>(v[i]), 4);
  return word;
}
inline constexpr uint32_t kSignBits = 0x88888888;

// The two encoders of E2M1 below do not saturate; saturate() does, for the few blocks that need it.
// Up to these magnitudes they give the code of 6 for everything above 6. Scales rounded to nearest
// leave |y| below 6.4 and scales rounded up below 6.00001, but where they underflow.
inline constexpr float kNearestSafe = 6.9f, kStochasticSafe = 6.003f;
// Replaces v by what it is encoded as, and inv by 1.
BLOCKSCALE_DEVICE void saturate(float* v, float& inv) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) v[i] = fmaxf(fminf(__fmul_rn(v[i], inv), 6.0f), -6.0f);
  inv = 1.0f;
}

// E2M1, nearest even. With P the power of two at or below max(|y|, 1), the sum
// w = |y| + P (2^22 + 3) has a unit in the last place of P/2, the spacing of E2M1 there: the FP32
// addition rounds. Its bits end in |y|/(P/2) + 6, and bits >> 22 ends in 2 log2(P) + 10 (mod 16);
// both together are the code. y = 2.75: P = 2, w = 3 + 2 (2^22 + 3), units 3 + 6, exponent part
// 12: 21 mod 16 = 5, the code of 3. (P as a product keeps half of the work off the integer unit,
// which has half the rate.)
BLOCKSCALE_DEVICE uint32_t fp4_nearest_of_8(const float* v, float inv) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float y = __fmul_rn(v[i], inv);
    const float p = bit_cast<float>(bit_cast<uint32_t>(fmaxf(fabsf(y), 1.0f)) & 0x7F800000);
    const uint32_t w = bit_cast<uint32_t>(__fadd_rn(fabsf(y), __fmul_rn(p, 4194307.0f)));
    word = shift_right_in(w + (w >> 22), word, 4);
  }
  return (word & ~kSignBits) | (signs_of_8(v) & kSignBits);
}

// E2M1, stochastic: numerics section 6 in its integer form, moved up by 6 bits so that the code
// is the top nibble: + 4 there takes the 252 off.
BLOCKSCALE_DEVICE uint32_t fp4_stochastic_of_8(const float* v, float inv, const uint32_t* random) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    const float y = __fmul_rn(v[i], inv), half = __fmul_rn(y, 0.5f);
    const float z = fmaxf(fabsf(y), __fadd_rn(fabsf(half), 0.5f));
    const uint32_t bytes = random[i / 4];
    const int byte = i % 4;  // to bits 20..27
    const uint32_t r = byte == 0   ? bytes << 20
                       : byte == 1 ? bytes << 12
                       : byte == 2 ? bytes << 4
                                   : bytes >> 4;
    const uint32_t t = bit_cast<uint32_t>(z) * 64u + ((r & 0x0FF00000) | 0x40080000);
    word = shift_left_in(word, t, 4);
  }
  return (word & ~kSignBits) | (signs_of_8(v) & kSignBits);
}

// What is known of an element format before the kernel starts.
struct ElementFacts {
  FormatTraits traits;
  float largest;
  bool four_bits;
};

// Any element, any rounding.
BLOCKSCALE_DEVICE Codes encode_any(const ElementFacts& e, bool stochastic, const float* v,
                                   float inv, const uint32_t* random) {
  Codes out{};
  const int width = e.four_bits ? 4 : 8;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const float y = __fmul_rn(v[i], inv);
    const float magnitude = fminf(abs(y), e.largest);
    const uint32_t code =
        with_sign(e.traits,
                  stochastic ? encode_magnitude_stochastic(e.traits, e.largest, magnitude,
                                                           random[i / 4] >> (8 * (i % 4)) & 0xFF)
                             : encode_magnitude(e.traits, magnitude, Direction::nearest_even),
                  y);
    if (e.four_bits)
      out.word[i / 8] |= code << (i % 8 * width);
    else
      out.word[i / 4] |= code << (i % 4 * width);
  }
  return out;
}

// H_16 diag(+-1) x / 4 after the signs have been flipped, rounded to BF16 (numerics section 8).
// Multiplying by 1/4 is exact for every sum of BF16 or FP16 values, so that one fused operation
// equals multiply, then + 0.0; FP32 inputs (`kExact` false) may underflow and take both.
template <bool kExact>
BLOCKSCALE_DEVICE PairRun hadamard16(float* v) {
#pragma unroll
  for (int step = 1; step < kRun; step *= 2) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (i & step) continue;
      const float a = v[i], b = v[i + step];
      v[i] = __fadd_rn(a, b);
      v[i + step] = __fsub_rn(a, b);
    }
  }
  PairRun out;
#pragma unroll
  for (int i = 0; i < kRun / 2; ++i) {
    float y[2];
    for (int j = 0; j < 2; ++j)
      y[j] = kExact ? __fmaf_rn(v[2 * i + j], 0.25f, 0.0f)
                    : __fadd_rn(__fmul_rn(v[2 * i + j], 0.25f), 0.0f);
    out.pair[i] = to_bf16x2(y[0], y[1]);
  }
  return out;
}

}  // namespace blockscale::gpu
