// Stochastic rounding, the scale rules (specification, sections 4 and 6), and conversions to and
// from BF16 and FP16. constexpr, for host and device.
#pragma once

#include "blockscale/formats.h"

namespace blockscale {

// Section 6. `y` is |x * enc|, finite or +Inf; `random` is the element's 8 bits. Clamps y to the
// largest value, then returns the magnitude code of one of its two neighbours.
//
// t + random >= 256 with t = (F + 2^(14-m)) >> (15-m) is the same as a carry out of the low 23-m
// bits of F + 2^(14-m) + random * 2^(15-m), so one integer addition rounds.
// e2m1, y = 2.75, between 2 and 3: F = 0b11 << 20 of 2^22, t = 192: up for random >= 64, P = 3/4.
BLOCKSCALE_HD constexpr uint32_t encode_magnitude_stochastic(const FormatTraits& t, float largest,
                                                             float y, uint32_t random) {
  const float clamped = y < largest ? y : largest;
  const float normal = exp2i(t.min_exponent());
  const bool subnormal = clamped < normal;
  const float w = subnormal ? clamped + normal : clamped;
  const int m = t.mantissa_bits;
  const uint32_t rounded =
      (bit_cast<uint32_t>(w) + (random << (15 - m)) + (1u << (14 - m))) >> (23 - m);
  const uint32_t base = static_cast<uint32_t>(127 + t.min_exponent() - 1) << m;
  return rounded - base - (subnormal ? 1u << m : 0);
}

enum class ScaleRule : uint8_t { amax, pow2, floor, ceil, even, rceil, two_level };
enum class ScaleRounding : uint8_t { nearest, up };

inline constexpr float kAmaxFloor = 1e-12f;  // for the `amax` and `pow2` rules

// The factors of a block: the stored decode scale and the multiplier that encodes its elements.
struct FloatScale {
  float scale;
  float inv;
};

// FP32 scales, rule `amax`: inv = fl(FMAX/a'), scale = fl(1/inv).
BLOCKSCALE_HD constexpr FloatScale amax_scale(float amax, float fmax) {
  const float a = amax > kAmaxFloor ? amax : kAmaxFloor;
  const float inv = fmax / a;
  return {1.0f / inv, inv};
}

// FP32 scales, rule `pow2`: the smallest power of two >= the exact quotient a'/FMAX. Comparing a'
// with FMAX * 2^e decides without rounding: the product is exact in FP32 (FMAX has at most 4
// significant bits) unless it overflows, and then it is larger than any a'.
BLOCKSCALE_HD constexpr FloatScale pow2_scale(float amax, float fmax) {
  const float a = amax > kAmaxFloor ? amax : kAmaxFloor;
  // floor(log2 a) - floor(log2 fmax) is the answer or one below it.
  const int e = static_cast<int>(bit_cast<uint32_t>(a) >> 23) -
                static_cast<int>(bit_cast<uint32_t>(fmax) >> 23);
  const int up = fmax * exp2i(e) < a ? 1 : 0;
  return {exp2i(e + up), exp2i(-(e + up))};
}

// E8M0 rules: the biased byte for a finite block amax, in [0, 254]; `t` and `fmax` are the traits
// and the largest value of the element format.
BLOCKSCALE_HD constexpr uint8_t e8m0_byte(ScaleRule rule, const FormatTraits& t, float fmax,
                                          float amax) {
  const int p = static_cast<int>(bit_cast<uint32_t>(fmax) >> 23) - 127;
  uint32_t bits = bit_cast<uint32_t>(amax);
  int byte = 0;
  if (rule == ScaleRule::rceil) {
    bits = bit_cast<uint32_t>(amax * (1.0f / fmax));
    const int e = static_cast<int>(bits >> 23);
    const uint32_t fraction = bits & 0x7FFFFF;
    byte = e + (e > 0 ? fraction != 0 : fraction > 0x400000);
  } else {
    if (rule == ScaleRule::even) bits += 1u << (23 - t.mantissa_bits - 1);
    byte = static_cast<int>(bits >> 23) - p;
    if (rule == ScaleRule::ceil) byte += (bits & 0x7FFFFF) != 0;
  }
  return static_cast<uint8_t>(byte < 0 ? 0 : byte > 254 ? 254 : byte);
}

BLOCKSCALE_HD constexpr uint8_t e8m0_byte(ScaleRule rule, Format element, float amax) {
  return e8m0_byte(rule, traits(element), max_value(element), amax);
}

// The exact multiplier 2^(127 - byte) of an E8M0 block.
BLOCKSCALE_HD constexpr float e8m0_inv(uint8_t byte) { return exp2i(127 - byte); }

// Only E2M1 elements have two-level scaling.
inline constexpr float kE2m1Max = max_value(Format::e2m1);

// Two-level scaling, tensor level: S_enc from the tensor's amax (finite, >= 0).
struct OuterScale {
  float enc;
  float dec;
};
BLOCKSCALE_HD constexpr OuterScale outer_scale(Format scale, float tensor_amax) {
  if (tensor_amax == 0.0f) return {1.0f, 1.0f};
  float enc = kE2m1Max * max_value(scale) / tensor_amax;
  if (enc > kFloatMax) enc = kFloatMax;  // an overflowed quotient is +Inf
  if (enc == 0.0f) enc = 1.0f;
  return {enc, 1.0f / enc};
}

// Two-level scaling, block level.
struct BlockScale {
  uint8_t code;
  float enc;
};
BLOCKSCALE_HD constexpr BlockScale two_level_scale(Format scale, ScaleRounding rounding, float amax,
                                                   OuterScale outer) {
  const float largest = max_value(scale);
  const float wanted = amax * (outer.enc * (1.0f / kE2m1Max));
  const float clamped = wanted < largest ? wanted : largest;
  const RoundingDirection direction =
      rounding == ScaleRounding::up ? RoundingDirection::up : RoundingDirection::nearest_even;
  const uint32_t code = encode_magnitude(traits(scale), clamped, direction);
  const float decoded = decode(scale, code) * outer.dec;
  // A constexpr division by zero is ill-formed; at run time it would give the same +Inf.
  const float enc = decoded == 0.0f ? kFloatMax : 1.0f / decoded;
  return {static_cast<uint8_t>(code), enc < kFloatMax ? enc : kFloatMax};
}

// FP32 to BF16 and back, round to nearest even; NaN stays NaN.
BLOCKSCALE_HD constexpr uint16_t to_bf16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if ((bits & kAbsMask) > kInfBits) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
BLOCKSCALE_HD constexpr float from_bf16(uint16_t bits) {
  return bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}
BLOCKSCALE_HD constexpr float nearest_bf16(float x) { return from_bf16(to_bf16(x)); }

// IEEE binary16 to FP32 (exact) and back (round to nearest even, overflow to Inf).
BLOCKSCALE_HD constexpr float from_fp16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
  const uint32_t magnitude = exponent == 31 ? kInfBits | fraction << 13
                             : exponent == 0
                                 ? bit_cast<uint32_t>(static_cast<float>(fraction) * exp2i(-24))
                                 : (exponent + 112) << 23 | fraction << 13;
  return bit_cast<float>(sign | magnitude);
}
BLOCKSCALE_HD constexpr uint16_t to_fp16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & kAbsMask;
  if (magnitude > kInfBits) return static_cast<uint16_t>(sign | 0x7E00);
  if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7C00);  // >= 2^16
  // The encoder takes every code for a number: a value that rounds up to 2^16 gets the next code,
  // which is Inf.
  constexpr FormatTraits half{"fp16", 5, 10, 15, Special::none, true, false};
  const uint32_t code =
      encode_magnitude(half, bit_cast<float>(magnitude), RoundingDirection::nearest_even);
  return static_cast<uint16_t>(sign | code);
}

}  // namespace blockscale
