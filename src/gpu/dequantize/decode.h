// From codes to values. Decoding is exact; only the products with scales round.
#pragma once

#include "gpu/port.h"

namespace blockscale::gpu {

// How codes of a format become FP32: the magnitude bits, moved to the top of the fraction, are the
// value times 2^(bias - 127), subnormals included; one exact multiplication corrects that.
struct Decoder {
  uint32_t magnitude_mask, sign_bit;
  int shift;
  float factor;
  uint32_t least;      // bits of the value of code 0: E8M0 has no zero
  uint32_t nan_from;   // magnitudes from here on are NaN
  uint32_t inf;        // the magnitude of Inf, or none (~0)
  bool negative_zero;  // NaN is the code of -0

  static BLOCKSCALE_HD constexpr Decoder of(Format f) {
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
  // For an unsigned format.
  BLOCKSCALE_DEVICE float scale(uint32_t code) const {
    const uint32_t magnitude = code & magnitude_mask;
    const float value = __fmul_rn(bit_cast<float>(max(magnitude << shift, least)), factor);
    return magnitude >= nan_from ? bit_cast<float>(kNanBits) : value;
  }
  BLOCKSCALE_DEVICE float operator()(uint32_t code) const {
    const uint32_t magnitude = code & magnitude_mask;
    const uint32_t sign = code & sign_bit ? 0x80000000u : 0;
    float value = __fmul_rn(bit_cast<float>(magnitude << shift), factor);
    if (magnitude == inf) value = bit_cast<float>(kInfBits);
    if (magnitude >= nan_from || (negative_zero && magnitude == 0 && sign))
      return bit_cast<float>(kNanBits);
    return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
  }
};

// What a kernel knows about its codes at compile time.
enum class Codec : uint8_t { fp4, e2m3, e3m2, e4m3fn, e5m2, any };
BLOCKSCALE_HD constexpr int codes_per_word(Codec c) { return c == Codec::fp4 ? 8 : 4; }

BLOCKSCALE_DEVICE uint32_t word_of(uint32_t words, int) { return words; }
BLOCKSCALE_DEVICE uint32_t word_of(const uint2& words, int which) {
  return which == 0 ? words.x : words.y;
}

// Codes are decoded two at a time, pair by pair: the index in a word of the i-th code of a pair.
BLOCKSCALE_HD constexpr int code_of(Codec c, int pair, int i) {
  return c == Codec::fp4 ? pair % 2 * 4 + i * 2 + pair / 2 : 2 * pair + i;
}

// With its bits moved, a narrower code becomes a code of E4M3 or E5M2, for a value smaller by a
// power of two. FP4: the even codes of a word, or the odd ones.
template <Codec kCodec>
BLOCKSCALE_DEVICE uint32_t as_fp8(uint32_t word, int odd) {
  if constexpr (kCodec == Codec::fp4) {
    word >>= 4 * odd;
    return (word << 2 & 0x1C1C1C1C) | (word << 4 & 0x80808080);
  }
  if constexpr (kCodec == Codec::e2m3 || kCodec == Codec::e3m2)
    return (word & 0x1F1F1F1F) | (word << 2 & 0x80808080);
  return word;
}
// Decodes pair `pair` of a word whose bits as_fp8() has moved.
template <Codec kCodec>
BLOCKSCALE_DEVICE void decode_pair(const Decoder& decoder, uint32_t moved, int pair, float* v) {
  if constexpr (kCodec == Codec::any) {
#pragma unroll
    for (int i = 0; i < 2; ++i) v[i] = decoder(moved >> (16 * pair + 8 * i) & 0xFF);
  } else {
    constexpr bool kE5m2 = kCodec == Codec::e5m2 || kCodec == Codec::e3m2;
    constexpr int kFactor = kCodec == Codec::e3m2                           ? 1 << (15 - 3)
                            : kCodec == Codec::fp4 || kCodec == Codec::e2m3 ? 1 << (7 - 1)
                                                                            : 1;
    from_fp8x2<kE5m2, kFactor>(moved >> (pair % 2 * 16), v);
  }
}

// The eight E2M1 magnitudes times a factor, as BF16: every value that a block can have. Codes look
// them up by permuting bytes.
class Fp4Products {
 public:
  BLOCKSCALE_DEVICE explicit Fp4Products(float factor) {
    constexpr float kValue[] = {decode(Format::e2m1, 0), decode(Format::e2m1, 1),
                                decode(Format::e2m1, 2), decode(Format::e2m1, 3),
                                decode(Format::e2m1, 4), decode(Format::e2m1, 5),
                                decode(Format::e2m1, 6), decode(Format::e2m1, 7)};
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pair[i] = to_bf16x2(__fmul_rn(factor, kValue[2 * i]), __fmul_rn(factor, kValue[2 * i + 1]));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      low_[i] = permute_bytes(pair[2 * i], pair[2 * i + 1], 0x6420);
      high_[i] = permute_bytes(pair[2 * i], pair[2 * i + 1], 0x7531);
    }
    first_ = pair[0];
  }
  // The products of 0 and 0.5: where any product is NaN, that of 0 is.
  BLOCKSCALE_DEVICE uint32_t first() const { return first_; }
  // The products of four codes, those in the low half of `codes`.
  BLOCKSCALE_DEVICE uint2 operator()(uint32_t codes) const {
    const uint32_t which = codes & 0x7777;
    // Signs of even codes are in place after shifting them up by four bits.
    const uint32_t signs = permute_bytes(codes << 4, codes, 0x5140) & 0x80808080;
    const uint32_t low = permute_bytes(low_[0], low_[1], which);
    const uint32_t high = permute_bytes(high_[0], high_[1], which) ^ signs;
    return {permute_bytes(low, high, 0x5140), permute_bytes(low, high, 0x7362)};
  }

 private:
  uint32_t low_[2], high_[2], first_;
};

}  // namespace blockscale::gpu
