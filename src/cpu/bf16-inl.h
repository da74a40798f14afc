// Encoding straight from BF16 bits, with as many elements per vector as it has 16-bit lanes: the
// parts common to E2M1 (e2m1-inl.h) and one-byte elements (byte-inl.h).

#if defined(BLOCKSCALE_BF16_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_BF16_INL
#undef BLOCKSCALE_BF16_INL
#else
#define BLOCKSCALE_BF16_INL
#endif

#include <cstring>

#include "cpu/pack-inl.h"
#include "cpu/scales-inl.h"
#include "cpu/walk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// narrow_scales() with `rule`, amax -> BlockScales.
template <class Rule>
HWY_INLINE bool apply_narrow_rule(const Rule& rule, const ScaleValues& value, const uint16_t* amax,
                                  int64_t count, uint8_t* codes, uint16_t* values) {
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

// Codes and values of the scales of `count` blocks, from their amaxes as BF16 bits. Returns whether
// all elements may be encoded from BF16 bits. Arrays may be overrun by one vector.
HWY_INLINE bool narrow_scales(const QuantSpec& spec, OuterScale outer, uint16_t* amax,
                              int64_t count, uint8_t* codes, uint16_t* values) {
  std::memset(amax + count, 0, sizeof(VH));
  const ScaleValues value(spec.scale);
  if (spec.two_level())
    return apply_narrow_rule(TwoLevelScales(spec, outer), value, amax, count, codes, values);
  const auto rule = [&](VF a) HWY_ATTR { return e8m0_scales(spec, a); };
  return apply_narrow_rule(rule, value, amax, count, codes, values);
}

// Rows are encoded 128 elements at a time: 8 blocks of 16, or fewer longer ones.
inline constexpr int64_t kNarrowRun = 128;

// Spreads the values of consecutive blocks of a row over the elements of a run.
class BlockSpread {
 public:
  explicit BlockSpread(int block) : shift_(log_block(block)) {
    for (int i = 0; i < kNarrowRun; ++i)
      bytes_[i] = static_cast<uint16_t>((i >> shift_) * 0x0202 + 0x0100);
  }
  // The values for the run that starts at element i of a row.
  HWY_INLINE VH load(const uint16_t* values, int64_t i) const {
    return hn::LoadDup128(DH(), values + (i >> shift_));
  }
  // For the vector of elements that starts at element i of the run.
  HWY_INLINE VH operator()(VH values, int64_t i) const {
    return hn::TableLookupBytes(values, hn::Load(DH(), bytes_ + i));
  }

 private:
  int shift_;
  alignas(64) uint16_t bytes_[kNarrowRun];
};

// Encodes a tile down columns; `values` are those of the scales, one for each column and block.
// Calls done(column) after each kPair columns, whose codes are then in scratch. encoder(values)
// returns an object that encodes rows of their blocks.
template <class Encoder, class Done>
HWY_INLINE void encode_narrow_columns(const Encoder& encoder, int block,
                                      const TileView<uint16_t>& x, const uint16_t* values,
                                      int64_t pitch, Scratch& scratch, const Done& done) {
  constexpr int kRows = 16 * Encoder::kPerByte;  // four words: 16 bytes of codes per column
  const int shift = log_block(block);
  const auto scaled = [&](int64_t r, int64_t c) HWY_ATTR {
    return encoder(hn::LoadU(DH(), values + (r >> shift) * x.columns + c));
  };
  for (int64_t c = 0; c < x.columns; c += kPair) {
    for (int64_t r = 0; r < x.rows; r += kRows) {
      VU even[4], odd[4];
      const uint16_t* p = x.data + r * x.stride + c;
      auto rows = scaled(r, c);
      rows.encode_16(p, x.stride, even, odd, scratch.ahead);
      if constexpr (kRows == 32) {
        if (block == 16) rows = scaled(r + 16, c);
        rows.encode_16(p + 16 * x.stride, x.stride, even + 2, odd + 2, scratch.ahead);
      }
      uint8_t* out = scratch.codes + r / Encoder::kPerByte;
      store_words(even, pitch, out);
      store_words(odd, pitch, out + pitch);
    }
    done(c);
  }
}

// Joins the lower and upper halves of words, four bytes for each of kPair columns.
HWY_INLINE void join_halves(VH low, VH high, VU& even, VU& odd) {
  const DU du;
  const DH dh;
  const VU l = hn::BitCast(du, low), h = hn::BitCast(du, high);
  even = hn::BitCast(du, hn::OddEven(hn::BitCast(dh, hn::ShiftLeft<16>(h)), low));
  odd = hn::BitCast(du, hn::OddEven(high, hn::BitCast(dh, hn::ShiftRight<16>(l))));
}

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
