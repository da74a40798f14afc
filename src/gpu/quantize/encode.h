// Encodes values, 16 at a time. The arithmetic is that of rounding.h and formats.h; where the code
// here differs, the tests show that results are equal.
#pragma once

#include "blockscale/hadamard.h"
#include "blockscale/philox.h"
#include "gpu/quantize/tile.h"
#include "gpu/widen.h"

namespace blockscale::gpu {

// How a run is encoded. `any` reads everything from the spec at run time: correct for every spec,
// but slower. `byte` knows only that a code takes one byte; the others are those that training
// uses.
enum class Encoder : uint8_t { none, any, byte, e4m3fn, e5m2, fp4_nearest, fp4_stochastic };

// What a kernel knows of a spec at compile time, for one axis. The scale format fixes the block
// length; rules, signs and layouts are read at run time, which costs little per block.
struct Pass {
  Encoder encoder = Encoder::none;
  Format scale = Format::fp32;
  bool square = false;
  bool hadamard = false;
  bool widened = false;  // MXFP4 that leaves as FP8 (widen.h)
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
  // What is stored, which differs from what is computed where codes are widened.
  BLOCKSCALE_HD constexpr bool packs() const { return fp4() && !widened; }
  BLOCKSCALE_HD constexpr Format stored_scale() const { return widened ? Format::fp32 : scale; }
  BLOCKSCALE_HD constexpr int stored_block() const { return widened ? kWidened.block : block(); }
  // Whether there may be an outer scale. Not for `any`.
  BLOCKSCALE_HD constexpr bool two_level() const {
    return present() && scale != Format::fp32 && scale != Format::e8m0;
  }
};
// A Pass as a template argument of a kernel: nvcc's host stubs do not take values of class type.
template <Encoder kEncoder, Format kScale = Format::fp32, bool kSquare = false,
          bool kHadamard = false, bool kWidens = false>
struct PassType {
  static constexpr Pass kPass{kEncoder, kScale, kSquare, kHadamard, kWidens};
};

struct Codes {
  uint32_t word[4];  // 16 bytes, or 8 for FP4
};
// A run of FP4 from a block with scale `scale`, widened to codes whose scale is that of `top`.
BLOCKSCALE_DEVICE Codes widen_run(const Codes& fp4, uint32_t scale, uint32_t top) {
  const WidenedBlock block(scale, top);
  Codes out;
  block.of_8(fp4.word[0], out.word);
  block.of_8(fp4.word[1], out.word + 2);
  return out;
}

// The two E2M1 encoders below do not saturate. Up to these magnitudes they encode everything above
// 6 as 6. Scales rounded to nearest leave |y| below 6.4, and scales rounded up leave it below
// 6.00001, except where they underflow.
inline constexpr float kNearestSafe = 0x1.bffffep+2f, kStochasticSafe = 6.003f;
// Beyond these magnitudes, elements are clamped first: for rounding to nearest, to a BF16 within
// 2^-8 of 6 / inv, which is encoded as 6 like all above it ...
BLOCKSCALE_DEVICE uint32_t nearest_limit(float inv) {
  const float largest = __fmul_rn(kE2m1Max, __frcp_rn(inv));
  return to_bf16x2(largest, largest);
}
// ... and otherwise v is replaced by the values to encode, and inv by 1; likewise where inv is so
// small that it would lose bits in FP16's units.
inline constexpr float kStochasticLeast = exp2i(-108);
BLOCKSCALE_DEVICE void saturate(float* v, float& inv) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) v[i] = fmaxf(fminf(__fmul_rn(v[i], inv), kE2m1Max), -kE2m1Max);
  inv = 1.0f;
}

// E2M1, nearest even, for magnitudes below 7. With P = 2^k = 1, 2 or 4 the power of two at or below
// max(y, 1), adding y to M = P (2^22 + k) rounds it in the FP32 addition itself: the last place of
// M is P/2, the spacing of E2M1 there, and M's low bits already count the 2k codes below P. At y =
// 2.75, M is 2 (2^22 + 1) and the sum's low bits are 2 + 3 = 5, the code of 3. The bit patterns of
// the three M are 2^23 + 2 apart. k comes from another addition: to 2^25 - 4, where the last place
// is 2, rounded towards zero. The sum goes up by one last place at 2, at 4 and, as the last place
// is 4 from then on, at 8.
BLOCKSCALE_DEVICE uint32_t fp4_nearest(float v, float inv) {
  constexpr float kEdge = 33554428.0f;  // 2^25 - 4
  constexpr uint32_t kStep = 0x00800002, kFirst = 0x4A800000 - 0x4BFFFFFE * kStep;
  const float y = __fmul_rn(fabsf(v), inv);
  const uint32_t m = bit_cast<uint32_t>(add_to_zero(y, kEdge)) * kStep + kFirst;
  return bit_cast<uint32_t>(__fadd_rn(y, bit_cast<float>(m)));
}
// The low nibbles of w[0..3] in the low half of a word; bits 4 to 11 of each w are 0.
BLOCKSCALE_DEVICE uint32_t join_nibbles(const uint32_t* w) {
  return ((w[3] * 16 + w[2]) * 16 + w[1]) * 16 + w[0];
}
BLOCKSCALE_DEVICE uint32_t fp4_nearest_of_8(const float* v, float inv, const Signs& signs) {
  uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = fp4_nearest(v[i], inv);
  return signs.with(permute_bytes(join_nibbles(w), join_nibbles(w + 4), 0x5410));
}

// E2M1, stochastic (specification, section 6). Scaled by 2^-14, E2M1's subnormals are FP16's
// subnormals, so that FP16's bits count units of 2^-9 between neighbours in every binade. Truncated
// there, FP32 gives F to ten bits, and further bits do not matter: the last is the half that t
// rounds by. FP32's rounding of y + 1 moves F up where y < 1 is within 2^-24 of the next unit.
// Adding half an FP32 unit first, and truncating again, does the same and leaves y >= 1 unchanged.
//
// A random byte goes above the 0x80 of `beside` (kBesideRandom, in a register), which is the half.
inline constexpr uint32_t kBesideRandom = 0x80;
inline constexpr float kFp16Units = exp2i(-14);  // E2M1's units in FP16's
// Two elements, in the halves of a word: bits 9 to 11 of each become codes. `which` selects bytes.
BLOCKSCALE_DEVICE uint32_t fp4_stochastic(float v, float w, float inv, uint32_t random,
                                          uint32_t beside, uint32_t which) {
  constexpr float kHalf = exp2i(-24) * kFp16Units;
  const auto cut = [&](float x) { return add_to_zero(__fmul_rn(fabsf(x), inv), kHalf); };
  return to_fp16x2_to_zero(cut(v), cut(w)) + (permute_bytes(random, beside, which) >> 7);
}
BLOCKSCALE_DEVICE uint32_t fp4_stochastic_of_8(const float* v, float inv, const Signs& signs,
                                               const uint32_t* random, uint32_t beside) {
  const float units = __fmul_rn(inv, kFp16Units);
  uint32_t two[2][2];  // elements 0 and 2, 1 and 3; 4 and 6, 5 and 7
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
      two[i][j] = fp4_stochastic(v[4 * i + j], v[4 * i + j + 2], units, random[i], beside,
                                 0x2404 + 0x1010 * j);
  }
  const uint32_t even = permute_bytes(two[0][0], two[1][0], 0x7531);
  const uint32_t odd = permute_bytes(two[0][1], two[1][1], 0x7531);
  return signs.with((even >> 1) + odd * 8);
}

// What is known of an element format before the kernel starts: constants that instructions read
// directly from the kernel's parameters.
struct ElementFacts {
  FormatTraits traits;
  float largest;
  bool four_bits;
  int signless_zero;
  uint32_t sign_bit;
  int sign_shift;  // from the FP32 sign down to it
  // Units in the last place, of which a binade has 2^m.
  float normal, unit;      // the smallest normal, and 2^(23-m)
  int shift;               // 23 - m
  uint32_t below, binade;  // units from the FP32 exponent 0 to the smallest normal's, and 2^m
  int random_shift;        // from eight random bits to the bits below a unit
  uint32_t random_half;    // half of the last of these bits

  explicit ElementFacts(Format f)
      : traits(blockscale::traits(f)),
        largest(max_value(f)),
        four_bits(codes_per_byte(f) == 2),
        signless_zero(traits.special == Special::negative_zero),
        sign_bit(traits.sign_bit()),
        sign_shift(31 - traits.exponent_bits - traits.mantissa_bits),
        normal(exp2i(traits.min_exponent())),
        unit(exp2i(23 - traits.mantissa_bits)),
        shift(23 - traits.mantissa_bits),
        below(static_cast<uint32_t>(127 + traits.min_exponent()) << traits.mantissa_bits),
        binade(uint32_t{1} << traits.mantissa_bits),
        random_shift(15 - traits.mantissa_bits),
        random_half(uint32_t{1} << (14 - traits.mantissa_bits)) {}
  ElementFacts() = default;
};

// As encode_magnitude() to nearest even, for magnitudes up to the largest, in the low eight bits:
// with P the power of two at or below y, but at least the smallest normal, the last place of y + P
// 2^(23-m) is the format's spacing, and the low bits count units.
BLOCKSCALE_DEVICE uint32_t encode_nearest(const ElementFacts& e, float y) {
  const float power = bit_cast<float>(bit_cast<uint32_t>(y) & 0x7F800000);
  const float p = fmaxf(power, e.normal);
  return bit_cast<uint32_t>(__fmaf_rn(p, e.unit, y)) + (bit_cast<uint32_t>(p) >> e.shift) - e.below;
}
// As encode_magnitude_stochastic(), for magnitudes up to the largest.
BLOCKSCALE_DEVICE uint32_t encode_stochastic(const ElementFacts& e, float y, uint32_t random) {
  const bool subnormal = y < e.normal;
  const float w = subnormal ? __fadd_rn(y, e.normal) : y;
  const uint32_t rounded =
      (bit_cast<uint32_t>(w) + (random << e.random_shift) + e.random_half) >> e.shift;
  return rounded + e.binade - e.below - (subnormal ? e.binade : 0);
}
// Any element, any rounding.
template <bool kByte>
BLOCKSCALE_DEVICE Codes encode_any(const ElementFacts& e, bool stochastic, const float* v,
                                   float inv, const uint32_t* random) {
  const bool four_bits = !kByte && e.four_bits;
  const auto encode = [&](const auto& rounded) {
    Codes out{};
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float y = __fmul_rn(v[i], inv);
      const uint32_t magnitude = rounded(fminf(fabsf(y), e.largest), i) & 0xFF;
      uint32_t code = magnitude | (bit_cast<uint32_t>(y) >> e.sign_shift & e.sign_bit);
      if (e.signless_zero && magnitude == 0) code = 0;
      if (four_bits)
        out.word[i / 8] |= code << (i % 8 * 4);
      else
        out.word[i / 4] |= code << (i % 4 * 8);
    }
    return out;
  };
  if (stochastic)
    return encode([&](float y, int i) {
      return encode_stochastic(e, y, random[i / 4] >> (8 * (i % 4)) & 0xFF);
    });
  return encode([&](float y, int) { return encode_nearest(e, y); });
}

// ---- the Hadamard transform of a run (specification, section 8) ----

// The signs as factors: alone, and times the 1/4 that follows the sums.
struct TransformSigns {
  float whole[kRun], quarter[kRun];
};
inline TransformSigns signs_of(const Hadamard& h) {
  TransformSigns signs;
  for (int i = 0; i < kRun; ++i) {
    signs.whole[i] = h.negates(i) ? -1.0f : 1.0f;
    signs.quarter[i] = 0.25f * signs.whole[i];
  }
  return signs;
}

// H_16 diag(signs) x. The signs and + 0.0 cost eight operations: if no first element of a pair is
// -0, no result is, because a sum is -0 only if its first operand is.
BLOCKSCALE_DEVICE void butterflies(const float* signs, float* v) {
#pragma unroll
  for (int i = 0; i < kRun; i += 2) {
    const float a = __fmaf_rn(v[i], signs[i], 0.0f), b = v[i + 1];
    v[i] = __fmaf_rn(b, signs[i + 1], a);
    v[i + 1] = __fmaf_rn(-b, signs[i + 1], a);
  }
#pragma unroll
  for (int step = 2; step < kRun; step *= 2) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (i & step) continue;
      const float a = v[i], b = v[i + step];
      v[i] = __fadd_rn(a, b);
      v[i + step] = __fsub_rn(a, b);
    }
  }
}

// The amax after the transform of the run that unpack(v) gives.
template <class Unpack>
BLOCKSCALE_DEVICE uint32_t transformed_amax(const TransformSigns& signs, const Unpack& unpack) {
  FloatRun sums;
  unpack(sums.value);
  butterflies(signs.whole, sums.value);
  return to_bf16x2(0.0f, __fmul_rn(bit_cast<float>(sums.amax_bits()), 0.25f));
}
// A run after the transform.
//
// Multiplying BF16 by 1/4 before the sums is exact too, unless a sum exceeds FP32's range. What
// follows such a sum is as large, so the amax shows when to check for one: at once or, with kLater,
// when the block is found to be unusual. With two levels it always is: no scale is that large.
template <bool kBf16, bool kLater>
struct Transformed : SplitRun {
  // Returns the amax. again(v) unpacks the same values, for rare cases.
  template <class Unpack, class Again>
  BLOCKSCALE_DEVICE uint32_t take(const TransformSigns& signs, const Unpack& unpack,
                                  const Again& again) {
    float v[kRun];
    unpack(v);
    butterflies(kBf16 ? signs.quarter : signs.whole, v);
    if (!kBf16) {
#pragma unroll
      for (int i = 0; i < kRun; ++i) v[i] = __fadd_rn(__fmul_rn(v[i], 0.25f), 0.0f);
    }
    pack(v);
    const uint32_t amax = amax_bits();
    return kLater ? amax : settled(signs, again, amax);
  }
  template <class Unpack>
  BLOCKSCALE_DEVICE static uint32_t settled([[maybe_unused]] const TransformSigns& signs,
                                            [[maybe_unused]] const Unpack& unpack, uint32_t amax) {
    // 2^126: a sum beyond FP32's range has quarters of at least that.
    constexpr uint32_t kHuge = (127 + 126) << 23;
    if constexpr (kBf16)
      if (amax >= kHuge) return transformed_amax(signs, unpack);
    return amax;
  }
};

}  // namespace blockscale::gpu
