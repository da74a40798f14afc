// E2M1 to nearest, from BF16 bits: no product for each element, and as many elements in a vector as
// it has 16-bit lanes.
//
// As the product of a magnitude and its block's inverse scale grows with the magnitude, its code is
// the number of thresholds that the magnitude has passed: the least BF16 values whose products are
// above .25, 1.25, 2.5 and 5 or at least .75, 1.75 and 3.5 (ties go to even codes). A threshold
// doubles with its product, which adds 128 to its bits: steps of 128 beyond a threshold count
// those of 1.25, 2.5 and 5 at once, and those of 1.75 and 3.5.

#if defined(BLOCKSCALE_E2M1_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_E2M1_INL
#undef BLOCKSCALE_E2M1_INL
#else
#define BLOCKSCALE_E2M1_INL
#endif

#include "cpu/pack-inl.h"
#include "cpu/walk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// Inverse scales for which every threshold is a normal number and none is infinite.
inline constexpr float kLeastInv = 0x1p-100f, kMostInv = 0x1p100f;

HWY_INLINE VF in_range(VF inv) {
  return hn::Min(hn::Max(inv, hn::Set(DF(), kLeastInv)), hn::Set(DF(), kMostInv));
}

// Whether thresholds find the codes of all these finite blocks. Any do where there is but 0.
HWY_INLINE bool thresholds_hold(const uint32_t* amax, const float* inv, int64_t count) {
  const DF df;
  const DU du;
  const VU least = hn::BitCast(du, hn::Set(df, kLeastInv));
  VU most = hn::Zero(du);
  for (int64_t i = 0; i < count; i += static_cast<int64_t>(lanes())) {
    const VU above = hn::Sub(hn::BitCast(du, hn::LoadU(df, inv + i)), least);
    const auto none = hn::Eq(hn::LoadU(du, amax + i), hn::Zero(du));
    most = hn::Max(most, hn::IfThenZeroElse(none, above));
  }
  const VU limit = hn::Sub(hn::BitCast(du, hn::Set(df, kMostInv)), least);
  return hn::AllFalse(du, hn::Gt(most, limit));
}

// Thresholds of one block a lane.
struct Thresholds {
  using DI = hn::RebindToSigned<DH>;
  using VI = hn::Vec<DI>;

  // The least BF16 whose FP32 product with inv is above or (kEqual) not below t, as bits in the
  // high half. `over` is 1 / inv to within 2^-11: t / inv less that much fails, and so does what it
  // is rounded down to in BF16; of the next two values one is the least that passes.
  template <bool kEqual>
  static HWY_INLINE VU least(VF inv, VF over, float t) {
    const DF df;
    const DU du;
    const VU ulp = hn::Set(du, 0x10000);
    const VU below = hn::BitCast(du, hn::Mul(over, hn::Set(df, t * (1 - 0x1p-11f))));
    const VU bits = hn::Add(hn::And(below, hn::Set(du, 0xFFFF0000u)), ulp);
    const VF y = hn::Mul(hn::BitCast(df, bits), inv);
    const auto fails = kEqual ? hn::Lt(y, hn::Set(df, t)) : hn::Le(y, hn::Set(df, t));
    return hn::IfThenElse(hn::RebindMask(du, fails), hn::Add(bits, ulp), bits);
  }

  static HWY_INLINE VF reciprocal(VF x) {
#if HWY_ARCH_X86
    return hn::ApproximateReciprocal(x);  // to 1.5 * 2^-12
#else
    return hn::Div(hn::Set(DF(), 1.0f), x);
#endif
  }

  // Of inverse scales: a those of the lower half of the lanes.
  Thresholds(VF a, VF b) {
    const DH dh;
    const DI di;
    a = in_range(a), b = in_range(b);
    const VF over_a = reciprocal(a), over_b = reciprocal(b);
    const auto both = [&](auto equal, float t) HWY_ATTR {
      return hn::ConcatOdd(dh, hn::BitCast(dh, least<equal>(b, over_b, t)),
                           hn::BitCast(dh, least<equal>(a, over_a, t)));
    };
    const std::false_type above;
    const std::true_type equal;
    const auto less = [&](VH v) HWY_ATTR { return hn::BitCast(di, hn::Sub(v, hn::Set(dh, 1))); };
    first = less(both(above, 0.25f));
    second = less(both(equal, 0.75f));
    odd = hn::Sub(both(above, 1.25f), hn::Set(dh, 128));
    even = hn::Sub(both(equal, 1.75f), hn::Set(dh, 128));
  }

  // Codes of the magnitudes, at bit 7; bits below are undefined.
  HWY_INLINE VH operator()(VH magnitude) const {
    const DH dh;
    const DI di;
    const VH one = hn::Set(dh, 128);
    const VH more = hn::And(hn::SaturatedSub(magnitude, even), hn::Set(dh, 0xFF80));
    VH n = hn::Add(hn::SaturatedSub(magnitude, odd), more);
    const VI m = hn::BitCast(di, magnitude);
    n = hn::IfThenElse(hn::RebindMask(dh, hn::Gt(m, first)), hn::Add(n, one), n);
    n = hn::IfThenElse(hn::RebindMask(dh, hn::Gt(m, second)), hn::Add(n, one), n);
    return hn::Min(n, hn::Set(dh, 7 * 128 + 127));
  }

  VI first, second;  // one less than those of .25 and .75
  VH odd, even;      // one binade below those of 1.25 and 1.75
};

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

// The codes of a tile down columns, where thresholds hold. Calls done(column) after each kPair
// columns, whose codes are then in scratch.
template <class Done>
HWY_INLINE void encode_columns_by_thresholds(int block, const TileView<uint16_t>& x,
                                             const float* inv, int64_t pitch, Scratch& scratch,
                                             const Done& done) {
  const DF df;
  const int shift = log_block(block);
  const auto thresholds_at = [&](int64_t r, int64_t c) HWY_ATTR {
    const float* scale = inv + (r >> shift) * x.columns + c;
    return Thresholds(hn::LoadU(df, scale), hn::LoadU(df, scale + lanes()));
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
