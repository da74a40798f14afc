// Encodes E2M1 to nearest, from BF16 bits: without a product per element, and with as many elements
// per vector as it has 16-bit lanes (thresholds.h).
//
// When a product doubles, so does its threshold, which adds 128 to its bits: steps of 128 beyond a
// threshold count those of 1.25, 2.5 and 5 at once, and likewise those of 1.75 and 3.5.

#if defined(BLOCKSCALE_E2M1_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_E2M1_INL
#undef BLOCKSCALE_E2M1_INL
#else
#define BLOCKSCALE_E2M1_INL
#endif

#include "cpu/bf16-inl.h"
#include "cpu/thresholds.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// The thresholds of one block per lane.
struct Thresholds {
  using DI = hn::RebindToSigned<DH>;

  // Codes of the magnitudes, at bit 7; bits below are undefined, those above are 0.
  HWY_INLINE VH operator()(VH magnitude) const {
    const DH dh;
    const DI di;
    const VH one = hn::Set(dh, 128);
    const VH more = hn::And(hn::SaturatedSub(magnitude, even), hn::Set(dh, 0xFF80));
    VH n = hn::Add(hn::SaturatedSub(magnitude, odd), more);
    const auto m = hn::BitCast(di, magnitude);
    const auto above = [&](VH t)
                           HWY_ATTR { return hn::RebindMask(dh, hn::Gt(m, hn::BitCast(di, t))); };
    n = hn::IfThenElse(above(first), hn::Add(n, one), n);
    n = hn::IfThenElse(above(second), hn::Add(n, one), n);
    return hn::Min(n, hn::Set(dh, 7 * 128 + 127));
  }

  // `word` with the code of x placed in nibble kNibble.
  template <int kNibble>
  HWY_INLINE VH add_nibble(VH word, VH x) const {
    const DH dh;
    const VH n = (*this)(hn::And(x, hn::Set(dh, 0x7FFF)));
    VH code;
    if constexpr (kNibble < 2)
      code = hn::ShiftRight<7 - 4 * kNibble>(n);
    else
      code = hn::ShiftLeft<4 * kNibble - 7>(n);
    word = hn::OrAnd(word, code, hn::Set(dh, static_cast<uint16_t>(7 << (4 * kNibble))));
    return hn::OrAnd(word, hn::ShiftRight<12 - 4 * kNibble>(x),
                     hn::Set(dh, static_cast<uint16_t>(8 << (4 * kNibble))));
  }

  // 16 rows of kPair columns, eight per word: even[w] and odd[w] are rows 8 * w to 8 * w + 7.
  HWY_INLINE void encode_16(const uint16_t* x, int64_t stride, VU* even, VU* odd,
                            Ahead& ahead) const {
    const DH dh;
#pragma GCC unroll 2
    for (int w = 0; w < 2; ++w) {
      VH four[2];
      ahead.fetch(8 * kPair * static_cast<int64_t>(sizeof(uint16_t)));
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const uint16_t* p = x + (8 * w + 4 * i) * stride;
        VH word = add_nibble<0>(hn::Zero(dh), hn::LoadU(dh, p));
        word = add_nibble<1>(word, hn::LoadU(dh, p + stride));
        word = add_nibble<2>(word, hn::LoadU(dh, p + 2 * stride));
        four[i] = add_nibble<3>(word, hn::LoadU(dh, p + 3 * stride));
      }
      join_halves(four[0], four[1], even[w], odd[w]);
    }
  }

  VH first, second;  // one less than the thresholds of .25 and .75
  VH odd, even;      // one binade below the thresholds of 1.25 and 1.75
};

// Looks up the thresholds for scales.
struct ThresholdLookup {
  static constexpr int kPerByte = 2;

  explicit ThresholdLookup(const ThresholdTable& t) {
    const auto less = [](const uint16_t* of, uint16_t by)
                          HWY_ATTR { return hn::Sub(hn::LoadDup128(DH(), of), hn::Set(DH(), by)); };
    first = less(t.above_quarter, 1);
    second = less(t.from_three_quarters, 1);
    odd = less(t.above_5_quarters, 128);
    even = less(t.from_7_quarters, 128);
  }
  HWY_INLINE Thresholds operator()(VH scale) const {
    const DH dh;
    const VH at = scale_fractions(scale), exponent = hn::And(scale, hn::Set(dh, 0x7F80));
    const auto of = [&](VH table)
                        HWY_ATTR { return hn::Add(hn::TableLookupBytes(table, at), exponent); };
    return {of(first), of(second), of(odd), of(even)};
  }
  VH first, second, odd, even;
};

// The thresholds of all blocks of a tile.
class RowThresholds {
 public:
  RowThresholds(const ThresholdLookup& lookup, const uint16_t* values, int64_t count, int block,
                Scratch& scratch)
      : spread_(block), scratch_(scratch) {
    const DH dh;
    for (int64_t i = 0; i < count; i += kPair) {
      const Thresholds t = lookup(hn::LoadU(dh, values + i));
      hn::StoreU(t.first, dh, scratch.thresholds[0] + i);
      hn::StoreU(t.second, dh, scratch.thresholds[1] + i);
      hn::StoreU(t.odd, dh, scratch.thresholds[2] + i);
      hn::StoreU(t.even, dh, scratch.thresholds[3] + i);
    }
  }

  // Codes of `count` consecutive elements, whose first block is `at`.
  HWY_INLINE void encode(const uint16_t* x, int64_t count, int64_t at, uint8_t* codes,
                         Ahead& ahead) const {
    const DH dh;
    for (int64_t i = 0; i < count; i += kNarrowRun) {
      ahead.fetch(kNarrowRun * sizeof(uint16_t));
      VH of[4];
      for (int k = 0; k < 4; ++k) of[k] = spread_.load(scratch_.thresholds[k] + at, i);
#pragma GCC unroll 8
      for (int64_t j = 0; j < kNarrowRun; j += 4 * kPair) {
        const auto pair = [&](int64_t k)
                              HWY_ATTR { return pairs(of, x + i + j + k * kPair, j + k * kPair); };
        // Takes the even lanes, which hold one byte each.
        const auto bytes = [&](VH a, VH b) HWY_ATTR {
          return hn::BitCast(DB(), hn::ShiftRight<7>(hn::ConcatEven(dh, b, a)));
        };
        hn::StoreU(hn::ConcatEven(DB(), bytes(pair(2), pair(3)), bytes(pair(0), pair(1))), DB(),
                   codes + (i + j) / 2);
      }
    }
  }

 private:
  // The codes of two elements in the lane of the first, at bit 7; other bits are undefined.
  HWY_INLINE VH pairs(const VH* of, const uint16_t* x, int64_t at) const {
    const DH dh;
    const DU du;
    const VH v = hn::LoadU(dh, x);
    const Thresholds t{spread_(of[0], at), spread_(of[1], at), spread_(of[2], at),
                       spread_(of[3], at)};
    const VH n = t(hn::And(v, hn::Set(dh, 0x7FFF)));
    const VH code = hn::OrAnd(n, hn::ShiftRight<5>(v), hn::Set(dh, 8 << 7));
    const VU wide = hn::BitCast(du, code);
    return hn::BitCast(dh, hn::OrAnd(wide, hn::ShiftRight<12>(wide), hn::Set(du, 0xF0 << 7)));
  }

  BlockSpread spread_;
  Scratch& scratch_;
};

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
