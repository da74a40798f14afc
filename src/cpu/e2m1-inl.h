// E2M1 to nearest, from BF16 bits: no product for each element, and as many elements in a vector as
// it has 16-bit lanes (thresholds.h).
//
// A threshold doubles with its product, which adds 128 to its bits: steps of 128 beyond a threshold
// count those of 1.25, 2.5 and 5 at once, and those of 1.75 and 3.5.

#if defined(BLOCKSCALE_E2M1_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_E2M1_INL
#undef BLOCKSCALE_E2M1_INL
#else
#define BLOCKSCALE_E2M1_INL
#endif

#include "cpu/pack-inl.h"
#include "cpu/scales-inl.h"
#include "cpu/thresholds.h"
#include "cpu/walk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// ---- scales ----

// threshold_scales() with `rule`, amax -> BlockScales.
template <class Rule>
HWY_INLINE bool apply_threshold_rule(const Rule& rule, const ScaleValues& value,
                                     const uint16_t* amax, int64_t count, uint8_t* codes,
                                     uint16_t* values) {
  const DH dh;
  const hn::Rebind<uint8_t, DH> d8;
  const VH least = hn::Set(dh, value.least());
  VH most = hn::Zero(dh), furthest = hn::Zero(dh);
  for (int64_t i = 0; i < count; i += kPair) {
    const VH bits = hn::LoadU(dh, amax + i);
    const VU low = rule(load_values(amax + i)).stored;
    const VU high = rule(load_values(amax + i + kPair / 2)).stored;
    const VH code = hn::ConcatEven(dh, hn::BitCast(dh, high), hn::BitCast(dh, low));
    hn::StoreU(value(code), dh, values + i);
    hn::StoreU(hn::TruncateTo(d8, code), d8, codes + i);
    const auto none = hn::Eq(bits, hn::Zero(dh));
    most = hn::Max(most, bits);
    furthest = hn::Max(furthest, hn::IfThenZeroElse(none, hn::Sub(code, least)));
  }
  const VH finite = hn::Set(dh, 0x7F7F);
  const VH span = hn::Set(dh, static_cast<uint16_t>(value.most() - value.least()));
  return hn::AllFalse(dh, hn::Or(hn::Gt(most, finite), hn::Gt(furthest, span)));
}

// Codes and values of the scales of `count` blocks from the bits of their amaxes, BF16. Returns
// whether thresholds find the codes of all their elements. Arrays may be overrun by a vector.
HWY_INLINE bool threshold_scales(const QuantSpec& spec, OuterScale outer, uint16_t* amax,
                                 int64_t count, uint8_t* codes, uint16_t* values) {
  std::memset(amax + count, 0, sizeof(VH));
  const ScaleValues value(spec.scale);
  if (spec.two_level())
    return apply_threshold_rule(TwoLevelScales(spec, outer), value, amax, count, codes, values);
  const auto rule = [&](VF a) HWY_ATTR { return e8m0_scales(spec, a); };
  return apply_threshold_rule(rule, value, amax, count, codes, values);
}

// ---- codes ----

// Of one block a lane.
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

  VH first, second;  // one less than those of .25 and .75
  VH odd, even;      // one binade below those of 1.25 and 1.75
};

// Thresholds of scales.
struct ThresholdLookup {
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

// ---- along rows ----

// 128 elements, of 8 blocks of 16 or fewer longer ones.
inline constexpr int64_t kThresholdRun = 128;

// The thresholds of all blocks of a tile, and how they spread over the elements of a run.
class RowThresholds {
 public:
  RowThresholds(const ThresholdLookup& lookup, const uint16_t* values, int64_t count, int block,
                Scratch& scratch)
      : shift_(log_block(block)), scratch_(scratch) {
    const DH dh;
    for (int64_t i = 0; i < count; i += kPair) {
      const Thresholds t = lookup(hn::LoadU(dh, values + i));
      hn::StoreU(t.first, dh, scratch.thresholds[0] + i);
      hn::StoreU(t.second, dh, scratch.thresholds[1] + i);
      hn::StoreU(t.odd, dh, scratch.thresholds[2] + i);
      hn::StoreU(t.even, dh, scratch.thresholds[3] + i);
    }
    for (int i = 0; i < kThresholdRun; ++i)
      bytes_[i] = static_cast<uint16_t>((i >> shift_) * 0x0202 + 0x0100);
  }

  // Codes of `count` consecutive elements, whose first block is `at`.
  HWY_INLINE void encode(const uint16_t* x, int64_t count, int64_t at, uint8_t* codes,
                         Ahead& ahead) const {
    const DH dh;
    for (int64_t i = 0; i < count; i += kThresholdRun) {
      ahead.fetch(kThresholdRun * sizeof(uint16_t));
      VH of[4];
      for (int k = 0; k < 4; ++k)
        of[k] = hn::LoadDup128(dh, scratch_.thresholds[k] + at + (i >> shift_));
#pragma GCC unroll 8
      for (int64_t j = 0; j < kThresholdRun; j += 4 * kPair) {
        const auto pair = [&](int64_t k) HWY_ATTR {
          return pairs(of, x + i + j + k * kPair, bytes_ + j + k * kPair);
        };
        // Even lanes, which hold a byte each.
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
  static HWY_INLINE VH pairs(const VH* of, const uint16_t* x, const uint16_t* bytes) {
    const DH dh;
    const DU du;
    const VH v = hn::LoadU(dh, x), at = hn::Load(dh, bytes);
    const auto spread = [&](VH t) HWY_ATTR { return hn::TableLookupBytes(t, at); };
    const Thresholds t{spread(of[0]), spread(of[1]), spread(of[2]), spread(of[3])};
    const VH n = t(hn::And(v, hn::Set(dh, 0x7FFF)));
    const VH code = hn::OrAnd(n, hn::ShiftRight<5>(v), hn::Set(dh, 8 << 7));
    const VU wide = hn::BitCast(du, code);
    return hn::BitCast(dh, hn::OrAnd(wide, hn::ShiftRight<12>(wide), hn::Set(du, 0xF0 << 7)));
  }

  int shift_;
  Scratch& scratch_;
  alignas(64) uint16_t bytes_[kThresholdRun];
};

// ---- down columns ----

// `word` with the code of x as its nibble kNibble.
template <int kNibble>
HWY_INLINE VH add_nibble(VH word, VH x, const Thresholds& thresholds) {
  const DH dh;
  const VH n = thresholds(hn::And(x, hn::Set(dh, 0x7FFF)));
  VH code;
  if constexpr (kNibble < 2)
    code = hn::ShiftRight<7 - 4 * kNibble>(n);
  else
    code = hn::ShiftLeft<4 * kNibble - 7>(n);
  word = hn::OrAnd(word, code, hn::Set(dh, static_cast<uint16_t>(7 << (4 * kNibble))));
  return hn::OrAnd(word, hn::ShiftRight<12 - 4 * kNibble>(x),
                   hn::Set(dh, static_cast<uint16_t>(8 << (4 * kNibble))));
}

// 16 rows of kPair columns, eight to a word: even[w] and odd[w] are rows 8 * w to 8 * w + 7.
HWY_INLINE void encode_16_rows(const Thresholds& thresholds, const uint16_t* x, int64_t stride,
                               VU* even, VU* odd, Ahead& ahead) {
  const DU du;
  const DH dh;
#pragma GCC unroll 2
  for (int w = 0; w < 2; ++w) {
    VH four[2];
    ahead.fetch(8 * kPair * static_cast<int64_t>(sizeof(uint16_t)));
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const uint16_t* p = x + (8 * w + 4 * i) * stride;
      VH word = add_nibble<0>(hn::Zero(dh), hn::LoadU(dh, p), thresholds);
      word = add_nibble<1>(word, hn::LoadU(dh, p + stride), thresholds);
      word = add_nibble<2>(word, hn::LoadU(dh, p + 2 * stride), thresholds);
      four[i] = add_nibble<3>(word, hn::LoadU(dh, p + 3 * stride), thresholds);
    }
    const VU low = hn::BitCast(du, four[0]), high = hn::BitCast(du, four[1]);
    even[w] = hn::BitCast(
        du, hn::OddEven(hn::BitCast(dh, hn::ShiftLeft<16>(high)), hn::BitCast(dh, low)));
    odd[w] = hn::BitCast(
        du, hn::OddEven(hn::BitCast(dh, high), hn::BitCast(dh, hn::ShiftRight<16>(low))));
  }
}

// The codes of a tile down columns; `values` of the scales, one for each column and block. Calls
// done(column) after each kPair columns, whose codes are then in scratch.
template <class Done>
HWY_INLINE void encode_columns_by_thresholds(const ThresholdLookup& lookup, int block,
                                             const TileView<uint16_t>& x, const uint16_t* values,
                                             int64_t pitch, Scratch& scratch, const Done& done) {
  const int shift = log_block(block);
  const auto thresholds_at = [&](int64_t r, int64_t c) HWY_ATTR {
    return lookup(hn::LoadU(DH(), values + (r >> shift) * x.columns + c));
  };
  for (int64_t c = 0; c < x.columns; c += kPair) {
    for (int64_t r = 0; r < x.rows; r += 32) {
      VU even[4], odd[4];
      const uint16_t* p = x.data + r * x.stride + c;
      Thresholds thresholds = thresholds_at(r, c);
      encode_16_rows(thresholds, p, x.stride, even, odd, scratch.ahead);
      if (block == 16) thresholds = thresholds_at(r + 16, c);
      encode_16_rows(thresholds, p + 16 * x.stride, x.stride, even + 2, odd + 2, scratch.ahead);
      uint8_t* out = scratch.codes + r / 2;
      store_words(even, pitch, out);
      store_words(odd, pitch, out + pitch);
    }
    done(c);
  }
}

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
