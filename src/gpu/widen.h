// MXFP4 operands as FP8 ones, for GPUs whose tensor cores read FP8 but not FP4.
//
// An E2M1 code has two significant bits; E5M2 has three, and enough powers of two for a factor of
// 2^28 between the scales of two blocks. So blocks of 32 with a scale each become, exactly, a line
// (or 128 codes of it) with one scale, with E5M2 codes that absorb the differences between the
// blocks' scales.
#pragma once

#include "gpu/gpu.h"
#include "gpu/port.h"

namespace blockscale::gpu {

inline constexpr uint32_t kWidenNanScale = traits(Format::e8m0).magnitude_mask();
// Codes of a block with the largest scale are multiplied by 2^13: 6 * 2^13 fits in E5M2, 6 * 2^14
// does not.
inline constexpr int kWidenTop = 13;

// 2^e, or 0 where it is too small for FP32.
BLOCKSCALE_DEVICE float power_of_two(int e) { return e < -149 ? 0.0f : exp2i(e); }
// The FP32 scale of codes whose blocks have E8M0 scales of up to `top`.
BLOCKSCALE_DEVICE float widened_scale(uint32_t top) {
  return power_of_two(static_cast<int>(top) - traits(Format::e8m0).bias - kWidenTop);
}
// What a block's scale contributes to `top`: NaN nothing.
BLOCKSCALE_DEVICE uint32_t top_of(uint32_t scale) { return scale == kWidenNanScale ? 0 : scale; }

// A block's E5M2 codes of the eight E2M1 magnitudes, one per byte.
class WidenedBlock {
 public:
  BLOCKSCALE_DEVICE WidenedBlock(uint32_t scale, uint32_t top) {
    const uint32_t less = top - scale;
    if (less <= kMostNormal) {
      low_ = kLow - less * (kBinade & ~0xFFu), high_ = kHigh - less * kBinade;
      return;
    }
    const float f = scale == kWidenNanScale ? bit_cast<float>(kNanBits)
                                            : power_of_two(kWidenTop - static_cast<int>(less));
    low_ =
        to_fp8x4<true>(kMagnitude<0> * f, kMagnitude<1> * f, kMagnitude<2> * f, kMagnitude<3> * f);
    high_ =
        to_fp8x4<true>(kMagnitude<4> * f, kMagnitude<5> * f, kMagnitude<6> * f, kMagnitude<7> * f);
  }
  // Eight four-bit codes become two words of four bytes.
  BLOCKSCALE_DEVICE void of_8(uint32_t codes, uint32_t* to) const {
    const uint32_t which = codes & 0x77777777;
    // Signs of even codes are in place after shifting them up by four bits.
    const uint32_t even = codes << 4;
    to[0] = permute_bytes(low_, high_, which & 0xFFFF) |
            (permute_bytes(even, codes, 0x5140) & 0x80808080);
    to[1] =
        permute_bytes(low_, high_, which >> 16) | (permute_bytes(even, codes, 0x7362) & 0x80808080);
  }

 private:
  template <uint32_t kCode>
  static constexpr float kMagnitude = decode(Format::e2m1, kCode);
  // Below the largest scale by a power of two: all codes but 0 are smaller by a binade, which has
  // four codes, as long as they are normal.
  static constexpr uint32_t kBinade = 0x04040404;
  template <uint32_t kCode>
  static constexpr uint32_t kTopCode = encode(Format::e5m2, kMagnitude<kCode>* exp2i(kWidenTop));
  static constexpr uint32_t kLow =
      kTopCode<0> | kTopCode<1> << 8 | kTopCode<2> << 16 | kTopCode<3> << 24;
  static constexpr uint32_t kHigh =
      kTopCode<4> | kTopCode<5> << 8 | kTopCode<6> << 16 | kTopCode<7> << 24;
  static constexpr uint32_t kMostNormal = (kTopCode<1> >> 2) - 1;

  uint32_t low_, high_;
};

}  // namespace blockscale::gpu
