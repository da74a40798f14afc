// Encodes one-byte elements to nearest, from BF16 bits: an E8M0 scale shifts only exponents, so a
// code is the shifted bits rounded to fewer bits. (6-bit elements, mostly subnormal, are faster
// through FP32.)

#if defined(BLOCKSCALE_BYTE_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_BYTE_INL
#undef BLOCKSCALE_BYTE_INL
#else
#define BLOCKSCALE_BYTE_INL
#endif

#include "cpu/bf16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// kM: the element's mantissa bits.
template <int kM>
class ByteEncoder {
 public:
  static constexpr int kPerByte = 1;

  explicit ByteEncoder(Format element)
      : t_(traits(element)),
        less_(static_cast<uint16_t>((t_.bias + kSpare) << 7)),
        most_(static_cast<uint16_t>((t_.max_code() << kDrop) + (kSpare << 7))) {}

  // Encodes elements of blocks with these scales, one element per lane.
  struct Scaled {
    // 16 rows of kPair columns, four per word: even[w] and odd[w] are rows 4 * w to 4 * w + 3.
    HWY_INLINE void encode_16(const uint16_t* x, int64_t stride, VU* even, VU* odd,
                              Ahead& ahead) const {
#pragma GCC unroll 4
      for (int w = 0; w < 4; ++w) {
        const VH of[4] = {down, down, down, down};
        VH code[4];
        ahead.fetch(4 * kPair * static_cast<int64_t>(sizeof(uint16_t)));
        encoder.encode(of, x + 4 * w * stride, stride, code);
        join_halves(hn::Or(code[0], hn::ShiftLeft<8>(code[1])),
                    hn::Or(code[2], hn::ShiftLeft<8>(code[3])), even[w], odd[w]);
      }
    }
    const ByteEncoder& encoder;
    VH down;
  };
  // `scales` are BF16 values.
  HWY_INLINE Scaled operator()(VH scales) const { return {*this, down(scales)}; }
  // The amount to subtract from the bits of a scale's elements.
  HWY_INLINE VH down(VH scales) const { return hn::Sub(scales, hn::Set(DH(), less_)); }

  // Codes of four vectors of elements, `stride` apart.
  HWY_INLINE void encode(const VH* down, const uint16_t* x, int64_t stride, VH* code) const {
    const DH dh;
    VH bits[4], moved[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      bits[i] = hn::LoadU(dh, x + i * stride);
      moved[i] = hn::Min(hn::SaturatedSub(hn::And(bits[i], hn::Set(dh, 0x7FFF)), down[i]),
                         hn::Set(dh, most_));
    }
    const VH least = hn::Min(hn::Min(moved[0], moved[1]), hn::Min(moved[2], moved[3]));
    if (HWY_UNLIKELY(!hn::AllFalse(dh, hn::Lt(least, hn::Set(dh, (kSpare + 1) << 7))))) {
      round_all(moved);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) moved[i] = rounded(moved[i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) code[i] = with_sign(moved[i], bits[i]);
  }

 private:
  // Exponents are kSpare above the code's, so that those of subnormals are not negative. Values
  // that still become 0 are less than half the smallest subnormal.
  static constexpr int kSpare = 8, kDrop = 7 - kM;

  static HWY_INLINE VH rounded(VH moved) {
    const DH dh;
    const VH odd = hn::And(hn::ShiftRight<kDrop>(moved), hn::Set(dh, 1));
    // The addition also removes the spare exponents.
    const VH bump = hn::Set(dh, static_cast<uint16_t>((1 << (kDrop - 1)) - 1 - (kSpare << 7)));
    return hn::ShiftRight<kDrop>(hn::Add(moved, hn::Add(odd, bump)));
  }
  // rounded() for four vectors with elements that are zero or subnormal: a significand loses one
  // more bit for each step its exponent is below the normal range.
  static HWY_NOINLINE void round_all(VH* moved) {
    const DH dh;
    const VH one = hn::Set(dh, 1), spare = hn::Set(dh, kSpare + 1);
    VH least = hn::Sub(moved[0], one);  // zero wraps around and is ignored
#pragma GCC unroll 4
    for (int i = 1; i < 4; ++i) least = hn::Min(least, hn::Sub(moved[i], one));
    if (hn::AllFalse(dh, hn::Lt(least, hn::Set(dh, ((kSpare + 1) << 7) - 1)))) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        moved[i] = hn::IfThenZeroElse(hn::Eq(moved[i], hn::Zero(dh)), rounded(moved[i]));
      return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const VH exponent = hn::ShiftRight<7>(moved[i]);
      const VH significand = hn::Or(hn::And(moved[i], hn::Set(dh, 127)), hn::Set(dh, 128));
      const VH lacks = hn::SaturatedSub(spare, exponent);
      const VH drop = hn::Add(lacks, hn::Set(dh, kDrop));
      const VH odd = hn::And(hn::Shr(significand, drop), one);
      const VH half = hn::Shl(hn::Set(dh, 1 << (kDrop - 1)), lacks);
      const VH code = hn::Shr(hn::Add(hn::Add(significand, odd), hn::Sub(half, one)), drop);
      moved[i] = hn::Add(code, hn::ShiftLeft<kM>(hn::SaturatedSub(exponent, spare)));
    }
  }
  HWY_INLINE VH with_sign(VH code, VH bits) const {
    const DH dh;
    const VH both = hn::OrAnd(code, hn::ShiftRight<8>(bits), hn::Set(dh, 0x80));
    if (HWY_UNLIKELY(t_.special == Special::negative_zero))
      return hn::IfThenZeroElse(hn::Eq(code, hn::Zero(dh)), both);
    return both;
  }

  FormatTraits t_;
  uint16_t less_, most_;
};

// Encodes rows of a tile, given the scales of its blocks as BF16 values.
template <int kM>
class ByteRows {
 public:
  ByteRows(const ByteEncoder<kM>& encoder, const uint16_t* values, int block)
      : encoder_(encoder), values_(values), spread_(block) {}

  // Codes of `count` consecutive elements, whose first block is `at`.
  HWY_INLINE void encode(const uint16_t* x, int64_t count, int64_t at, uint8_t* codes,
                         Ahead& ahead) const {
    const DB db;
    for (int64_t i = 0; i < count; i += kNarrowRun) {
      ahead.fetch(kNarrowRun * sizeof(uint16_t));
      const VH down = encoder_.down(spread_.load(values_ + at, i));
#pragma GCC unroll 8
      for (int64_t j = 0; j < kNarrowRun; j += 4 * kPair) {
        VH of[4], code[4];
#pragma GCC unroll 4
        for (int64_t k = 0; k < 4; ++k) of[k] = spread_(down, j + k * kPair);
        encoder_.encode(of, x + i + j, kPair, code);
        for (int64_t k = 0; k < 4; k += 2)
          hn::StoreU(hn::ConcatEven(db, hn::BitCast(db, code[k + 1]), hn::BitCast(db, code[k])), db,
                     codes + i + j + k * kPair);
      }
    }
  }

 private:
  ByteEncoder<kM> encoder_;
  const uint16_t* values_;
  BlockSpread spread_;
};

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
