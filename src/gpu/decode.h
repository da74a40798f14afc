// From codes to values. Decoding is exact; the products with scales are the ones that round.
#pragma once

#include "gpu/port.h"

namespace blockscale::gpu {

// How codes of a format become FP32: the magnitude bits, moved to the top of the fraction, are the
// value times 2^(bias - 127), subnormals included; one exact multiplication puts it right.
struct Decoder {
  uint32_t magnitude_mask, sign_bit;
  int shift;
  float factor;
  uint32_t least;      // bits of the value of code 0: E8M0 has no zero
  uint32_t nan_from;   // magnitudes from here on are NaN
  uint32_t inf;        // the magnitude of Inf, or none (~0)
  bool negative_zero;  // NaN is the code of -0

  static Decoder of(Format f) {
    const FormatTraits t = traits(f);
    Decoder d{t.magnitude_mask(),
              t.sign_bit(),
              23 - t.mantissa_bits,
              exp2i(127 - t.bias),
              t.has_zero() ? 0 : bit_cast<uint32_t>(exp2i(-t.bias)),
              ~0u,
              ~0u,
              t.special == Special::negative_zero};
    if (t.special == Special::all_ones) d.nan_from = t.magnitude_mask();
    if (t.special == Special::ieee) {
      d.inf = t.max_code() + 1;
      d.nan_from = t.max_code() + 2;
    }
    return d;
  }
  // Where every code is a number.
  BLOCKSCALE_DEVICE float number(uint32_t code) const {
    const float value = __fmul_rn(bit_cast<float>((code & magnitude_mask) << shift), factor);
    return bit_cast<float>(bit_cast<uint32_t>(value) | (code & sign_bit ? 0x80000000u : 0));
  }
  BLOCKSCALE_DEVICE float operator()(uint32_t code) const {
    const uint32_t magnitude = code & magnitude_mask;
    const uint32_t sign = code & sign_bit ? 0x80000000u : 0;
    float value = __fmul_rn(bit_cast<float>(max(magnitude << shift, least)), factor);
    if (magnitude == inf) value = bit_cast<float>(kInfBits);
    if (magnitude >= nan_from || (negative_zero && magnitude == 0 && sign))
      return bit_cast<float>(kNanBits);
    return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
  }
};

// What a kernel knows of its codes when it is compiled.
enum class Codec : uint8_t { fp4, e4m3fn, e5m2, numbers, any };
BLOCKSCALE_HD constexpr int codes_per_word(Codec c) { return c == Codec::fp4 ? 8 : 4; }

BLOCKSCALE_DEVICE uint32_t word_of(uint32_t words, int) { return words; }
BLOCKSCALE_DEVICE uint32_t word_of(const uint2& words, int which) {
  return which == 0 ? words.x : words.y;
}

// Codes 2 * which and 2 * which + 1 of a word.
template <Codec kCodec>
BLOCKSCALE_DEVICE void decode_pair(const Decoder& decoder, uint32_t word, int which, float* v) {
  if constexpr (kCodec == Codec::fp4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // E2M1 has no special codes; its magnitude goes to bits 22..24.
      const int at = 8 * which + 4 * i;
      const uint32_t magnitude = (at < 22 ? word << (22 - at) : word >> (at - 22)) & 0x01C00000;
      const uint32_t sign = word << (28 - at) & 0x80000000;
      v[i] = __fmul_rn(bit_cast<float>(magnitude | sign), exp2i(126));
    }
  } else if constexpr (kHardwareFp8 && (kCodec == Codec::e4m3fn || kCodec == Codec::e5m2)) {
    from_fp8x2<kCodec == Codec::e5m2>(word >> (16 * which), v);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t code = word >> (16 * which + 8 * i) & 0xFF;
      v[i] = kCodec == Codec::numbers ? decoder.number(code) : decoder(code);
    }
  }
}

// Eight values as BF16. The conversion's NaN is 0x7FFF, the definition's 0x7FC0; one maximum tells
// whether there is any.
BLOCKSCALE_DEVICE uint4 to_bf16x8(const float* v) {
  uint32_t pair[4], largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pair[i] = to_bf16x2(v[2 * i], v[2 * i + 1]);
    largest = max_magnitude_bf16x2(largest, pair[i]);
  }
  if ((largest & 0x7FFF) > 0x7F80 || (largest >> 16 & 0x7FFF) > 0x7F80) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((pair[i] & 0x7FFF) > 0x7F80) pair[i] = (pair[i] & 0xFFFF0000) | 0x7FC0;
      if ((pair[i] >> 16 & 0x7FFF) > 0x7F80) pair[i] = (pair[i] & 0xFFFF) | 0x7FC00000;
    }
  }
  return {pair[0], pair[1], pair[2], pair[3]};
}

}  // namespace blockscale::gpu
