// Block amax -> stored scale and the multiplier of the block's elements (specification, section 4).
#pragma once

#include "gpu/quantize/side.h"

namespace blockscale::gpu {

BLOCKSCALE_DEVICE Outer no_outer() { return {1.0f / kE2m1Max, 1, kInfBits, 0}; }
BLOCKSCALE_DEVICE Outer outer_from(const Side& s, float a) {
  if (!is_finite(a)) return {0, bit_cast<float>(kNanBits), 0, bit_cast<float>(kNanBits)};
  const OuterScale outer = s.out.spec.scale == Format::e4m3 ? outer_scale(Format::e4m3, a)
                                                            : outer_scale(Format::ue5m3, a);
  const bool ordinary = outer.dec > exp2i(-90) && outer.dec < exp2i(90);
  return {__fmul_rn(outer.enc, 1.0f / kE2m1Max), outer.dec, kInfBits,
          ordinary ? 0.0f : bit_cast<float>(kNanBits)};
}
BLOCKSCALE_DEVICE Outer outer_of(const Side& s, int64_t batch) {
  return s.out.spec.outer ? outer_from(s, s.amax[batch]) : no_outer();
}
// The same by a whole warp, for an amax that may come in parts. Bits are ordered as magnitudes are,
// with NaN above all.
BLOCKSCALE_DEVICE Outer outer_by_warp(const Side& s, int64_t batch) {
  if (s.amax_parts == 0) return outer_of(s, batch);
  uint32_t largest = 0;
  for (int i = static_cast<int>(threadIdx.x % 32); i < s.amax_parts; i += 32)
    largest = max(largest, bit_cast<uint32_t>(s.amax[i]));
  return outer_from(s, bit_cast<float>(warp_max(largest)));
}

struct Block {
  float inv;
  uint32_t stored;  // of a one-byte scale, the low eight bits
  int far = false;  // elements must be saturated before stochastic rounding
};

template <Format kScale>
BLOCKSCALE_DEVICE Block nan_block() {
  return {0.0f, kScale == Format::fp32 ? kNanBits : traits(kScale).nan_code()};
}

// As two_level_scale(). Rounds to the scale format by an addition: with P the power of two at or
// below the value, but at least the smallest normal, the last place of v + P 2^(23-m) is the
// format's spacing. 1 / scale is computed as for the usual scale, which is not always right.
template <Format kScale>
BLOCKSCALE_DEVICE Block two_level_block(bool up, float amax, const Outer& outer, float& decoded) {
  constexpr FormatTraits t = traits(kScale);
  constexpr float kLargest = max_value(kScale), kNormal = exp2i(t.min_exponent());
  // Codes below the smallest normal's binade are subtracted here, but for whole multiples of 256.
  constexpr int kBelow = (127 + t.min_exponent()) % (256 >> t.mantissa_bits) << t.mantissa_bits;
  constexpr float kUnit = exp2i(23 - t.mantissa_bits) + (256 - kBelow) / exp2i(t.mantissa_bits);
  const float v = fminf(__fmul_rn(amax, outer.sixth), kLargest);
  const float p = bit_cast<float>(bit_cast<uint32_t>(fmaxf(v, kNormal)) & 0x7F800000);
  const float w = up ? fma_up(p, kUnit, v) : __fmaf_rn(p, kUnit, v);
  const float value = __fmaf_rn(p, -kUnit, w);
  // The low bits of w count units; each binade has 2^m of them.
  const uint32_t stored = bit_cast<uint32_t>(w) + (bit_cast<uint32_t>(p) >> (23 - t.mantissa_bits));
  decoded = __fmul_rn(value, outer.dec);
  return {fminf(reciprocal_of_normal(decoded), kFloatMax), stored};
}
BLOCKSCALE_DEVICE float inverse_scale(float decoded) {
  return fminf(__frcp_rn(decoded), kFloatMax);
}

BLOCKSCALE_DEVICE Block e8m0_block(ScaleRule rule, const ElementFacts& e, float amax) {
  const uint32_t byte = e8m0_byte(rule, e.traits, e.largest, amax);
  // 2^(127 - byte), a normal number: the byte of a finite block is at most 255 - p, and p >= 2.
  return {bit_cast<float>((254 - byte) << 23), byte};
}

// The block of this amax. Calls cut(block) where elements are beyond `safe` or not finite; if not
// finite, 1 / scale is 0, which no finite block has.
template <Format kScale, class Cut>
BLOCKSCALE_DEVICE Block block_with(const Side& s, const Outer& outer, uint32_t amax_bits,
                                   float safe, const Cut& cut) {
  const QuantSpec& spec = s.out.spec;
  const float amax = bit_cast<float>(amax_bits);
  Block b;
  if constexpr (kScale == Format::fp32) {
    const FloatScale f = spec.rule == ScaleRule::pow2 ? pow2_scale(amax, s.element.largest)
                                                      : amax_scale(amax, s.element.largest);
    b = {f.inv, bit_cast<uint32_t>(f.scale)};
    return amax_bits < outer.limit ? b : nan_block<kScale>();
  } else {
    // One comparison identifies the usual block; NaN fails it.
    float decoded = 0;
    if constexpr (kScale == Format::e8m0)
      b = e8m0_block(spec.rule, s.element, amax);
    else
      b = two_level_block<kScale>(s.scales_up, amax, outer, decoded);
    if (!(__fmaf_rn(amax, b.inv, outer.unusual) <= safe)) {
      if (kScale != Format::e8m0) b.inv = inverse_scale(decoded);
      if (amax_bits >= outer.limit) b = nan_block<kScale>();
      b.far = !(b.inv >= kStochasticLeast && __fmul_rn(amax, b.inv) <= kStochasticSafe);
      cut(b);
    }
    return b;
  }
}

template <Pass kPass, class Cut>
BLOCKSCALE_DEVICE Block block_of(const Side& s, const Outer& outer, uint32_t amax_bits,
                                 const Cut& cut) {
  constexpr float kSafe = kPass.encoder == Encoder::fp4_nearest      ? kNearestSafe
                          : kPass.encoder == Encoder::fp4_stochastic ? kStochasticSafe
                                                                     : -1.0f;
  if constexpr (!kPass.any()) return block_with<kPass.scale>(s, outer, amax_bits, kSafe, cut);
  switch (s.out.spec.scale) {
    case Format::e8m0:
      return block_with<Format::e8m0>(s, outer, amax_bits, kSafe, cut);
    case Format::e4m3:
      return block_with<Format::e4m3>(s, outer, amax_bits, kSafe, cut);
    case Format::ue5m3:
      return block_with<Format::ue5m3>(s, outer, amax_bits, kSafe, cut);
    default:
      return block_with<Format::fp32>(s, outer, amax_bits, kSafe, cut);
  }
}
template <Pass kPass>
BLOCKSCALE_DEVICE Block block_of(const Side& s, const Outer& outer, uint32_t amax_bits) {
  return block_of<kPass>(s, outer, amax_bits, [](Block&) {});
}

}  // namespace blockscale::gpu
