// Packs codes, one per 32-bit lane, into stored bytes, along a line or down columns.

#if defined(BLOCKSCALE_PACK_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_PACK_INL
#undef BLOCKSCALE_PACK_INL
#else
#define BLOCKSCALE_PACK_INL
#endif

#include <cstring>

#include "cpu/codec-inl.h"
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// ---- along a line ----

// A line is packed kPackRun elements at a time.
inline constexpr int64_t kPackRun = 64;
inline constexpr int64_t kPackWords = kPackRun / static_cast<int64_t>(hn::MaxLanes(DU()));
inline constexpr int64_t kPackBytes = kPackWords / 4;  // vectors of bytes

// Byte 3 (kHigh) or byte 0 of every lane, in order.
template <bool kHigh>
HWY_INLINE VB gather_bytes(VU a, VU b, VU c, VU d) {
  const DB db;
  const DH dh;
  const auto h = [&](VU v) { return hn::BitCast(dh, v); };
  if constexpr (kHigh)
    return hn::ConcatOdd(db, hn::BitCast(db, hn::ConcatOdd(dh, h(d), h(c))),
                         hn::BitCast(db, hn::ConcatOdd(dh, h(b), h(a))));
  else
    return hn::ConcatEven(db, hn::BitCast(db, hn::ConcatEven(dh, h(d), h(c))),
                          hn::BitCast(db, hn::ConcatEven(dh, h(b), h(a))));
}

// The top byte (sign and 7 bits of exponent) of consecutive values.
HWY_INLINE VB top_bytes(const float* x) {
  const DU du;
  const auto* p = reinterpret_cast<const uint32_t*>(x);
  const size_t n = lanes();
  return gather_bytes<true>(hn::LoadU(du, p), hn::LoadU(du, p + n), hn::LoadU(du, p + 2 * n),
                            hn::LoadU(du, p + 3 * n));
}
HWY_INLINE VB top_bytes(const uint16_t* x) {
  const DB db;
  const auto* p = reinterpret_cast<const uint8_t*>(x);
  return hn::ConcatOdd(db, hn::LoadU(db, p + hn::MaxLanes(db)), hn::LoadU(db, p));
}

// Masks and signs of one element format, for bytes.
struct Signs {
  explicit Signs(Format element)
      : t(traits(element)),
        magnitude(hn::Set(DB(), static_cast<uint8_t>(t.magnitude_mask()))),
        sign(hn::Set(DB(), static_cast<uint8_t>(t.sign_bit()))),
        shift(8 - t.bits()) {}
  // Codes from raw magnitudes and the top bytes of the values encoded.
  HWY_INLINE VB operator()(VB raw, VB top) const {
    const DB db;
    const VB code = hn::And(raw, magnitude);
    const VB moved = hn::BitCast(db, hn::ShiftRightSame(hn::BitCast(DH(), top), shift));
    const VB signed_code = hn::OrAnd(code, moved, sign);
    if (HWY_UNLIKELY(t.special == Special::negative_zero))
      return hn::IfThenZeroElse(hn::Eq(code, hn::Zero(db)), signed_code);
    return signed_code;
  }
  FormatTraits t;
  VB magnitude, sign;
  int shift;
};

// Packs kPackRun raw codes of consecutive elements x into bytes or (kM = 1) into pairs of nibbles,
// element 2i in the low one.
template <int kM, class T>
HWY_INLINE void pack_line(const Signs& signs, const VU* raw, const T* x, uint8_t* out) {
  const DB db;
  VB bytes[kPackBytes];
  for (int64_t i = 0; i < kPackBytes; ++i) {
    const VU* v = raw + 4 * i;
    bytes[i] = signs(gather_bytes<false>(v[0], v[1], v[2], v[3]),
                     top_bytes(x + i * static_cast<int64_t>(hn::MaxLanes(db))));
  }
  if constexpr (kM != 1) {
    for (int64_t i = 0; i < kPackBytes; ++i) hn::StoreU(bytes[i], db, out + i * hn::MaxLanes(db));
  } else {
    for (int64_t i = 0; i < kPackBytes; i += 2) {
      const auto pair = [&](VB v) {
        const auto both = hn::BitCast(DH(), v);
        return hn::BitCast(db, hn::Or(both, hn::ShiftRight<4>(both)));
      };
      // With 64-byte vectors there is only one vector; its upper half is not stored.
      const VB next = bytes[HWY_MIN(i + 1, kPackBytes - 1)];
      const VB packed = hn::ConcatEven(db, pair(next), pair(bytes[i]));
      if constexpr (kPackBytes == 1)
        hn::StoreU(hn::LowerHalf(packed), hn::Half<DB>(), out);
      else
        hn::StoreU(packed, db, out + i / 2 * hn::MaxLanes(db));
    }
  }
}

// ---- down columns ----

// One vector for the even and one for the odd of kPair columns (or elements of a row).
struct Columns {
  VF even, odd;
};
HWY_INLINE Columns load_columns(const uint16_t* x) {
  const DU du;
  const VU both = hn::BitCast(du, hn::LoadU(DH(), x));
  return {hn::BitCast(DF(), hn::ShiftLeft<16>(both)),
          hn::BitCast(DF(), hn::And(both, hn::Set(du, 0xFFFF0000u)))};
}
HWY_INLINE Columns magnitudes(VH x) {
  const DU du;
  const VU both = hn::And(hn::BitCast(du, x), hn::Set(du, 0x7FFF7FFFu));
  return {hn::BitCast(DF(), hn::ShiftLeft<16>(both)),
          hn::BitCast(DF(), hn::And(both, hn::Set(du, 0xFFFF0000u)))};
}
HWY_INLINE Columns load_columns(const float* x) {
  VF even, odd;
  hn::LoadInterleaved2(DF(), x, even, odd);
  return {even, odd};
}

// Packs the codes of consecutive rows of one vector of columns into 32-bit words, the last row
// first.
template <int kM, bool kStochastic>
struct ColumnEncoder {
  static constexpr int kBits = kM == 1 ? 4 : 8;

  explicit ColumnEncoder(Format element)
      : encoder(element),
        sign(hn::Set(DU(), traits(element).sign_bit())),
        mask(hn::Set(DU(), 2 * traits(element).sign_bit() - 1)),
        sign_shift(32 - traits(element).bits()),
        negative_zero_is_nan(traits(element).special == Special::negative_zero) {}

  // `word` shifted up, with the code of x * scale in its low bits. `random` has a byte in the low 8
  // bits.
  HWY_INLINE VU append(VU word, VF x, VF scale, VU random) const {
    const VF y = hn::Mul(x, scale);
    VU raw;
    if constexpr (kStochastic)
      raw = encoder.stochastic(y, random);
    else
      raw = encoder.nearest(y);
    return append_code(word, raw, hn::ShiftRightSame(hn::BitCast(DU(), y), sign_shift));
  }
  // The same for kPair columns whose products are within the format's range, except for rounding.
  HWY_INLINE void append_within(VU& even_word, VU& odd_word, const uint16_t* x,
                                const Columns& scale) const {
    const VH v = hn::LoadU(DH(), x);
    const VU both = hn::BitCast(DU(), v);
    const Columns m = magnitudes(v);
    even_word = append_code(even_word, encoder.nearest_within(hn::Mul(m.even, scale.even)),
                            hn::ShiftRightSame(both, sign_shift - 16));
    odd_word = append_code(odd_word, encoder.nearest_within(hn::Mul(m.odd, scale.odd)),
                           hn::ShiftRightSame(both, sign_shift));
  }
  // A full word in the form that is stored.
  HWY_INLINE VU finish(VU word) const {
    if (!negative_zero_is_nan) return word;
    const DB db;
    const VB v = hn::BitCast(db, word);
    return hn::BitCast(DU(), hn::IfThenZeroElse(hn::Eq(v, hn::Set(db, 0x80)), v));
  }

  // `signs` holds the sign at the code's sign position; its other bits are undefined.
  HWY_INLINE VU append_code(VU word, VU raw, VU signs) const {
    return hn::OrAnd(hn::ShiftLeft<kBits>(word), hn::OrAnd(raw, signs, sign), mask);
  }

  Encoder<kM> encoder;
  VU sign, mask;
  int sign_shift;
  bool negative_zero_is_nan;
};

// Stores four words for each of lanes() columns, to every other line of codes.
HWY_INLINE void store_words(const VU* words, int64_t pitch, uint8_t* out) {
  HWY_ALIGN uint32_t bytes[4 * 16];
  hn::StoreInterleaved4(words[0], words[1], words[2], words[3], DU(), bytes);
  for (size_t i = 0; i < lanes(); ++i) std::memcpy(out + 2 * i * pitch, bytes + 4 * i, 16);
}

// Transposes stored codes, one vector of bytes from each of 16 lines (FP4: 32 lines), into 16 bytes
// for each of as many lines of `out` as the vector holds codes.
template <int kM>
HWY_INLINE void transpose_codes(const uint8_t* codes, int64_t pitch, int64_t out_pitch,
                                uint8_t* out) {
  constexpr int kPerByte = kM == 1 ? 2 : 1;
  const DB db;
  HWY_ALIGN uint8_t bytes[hn::MaxLanes(DB())];
  for (int part = 0; part < kPerByte; ++part) {
    VB v[2][16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const VB a = hn::LoadU(db, codes + kPerByte * i * pitch);
      v[0][i] = a;
      if constexpr (kPerByte == 1) continue;
      // Combines the low or the high nibbles of two lines.
      const VH first = hn::BitCast(DH(), a);
      const VH second = hn::BitCast(DH(), hn::LoadU(db, codes + (2 * i + 1) * pitch));
      const VH low = hn::Set(DH(), 0x0F0F), high = hn::Set(DH(), 0xF0F0);
      v[0][i] = hn::BitCast(
          db, part == 0 ? hn::OrAnd(hn::And(first, low), hn::ShiftLeft<4>(second), high)
                        : hn::OrAnd(hn::And(second, high), hn::ShiftRight<4>(first), low));
    }
    // Each step rotates the 8 bits of an index (line and byte) by one: after four steps, line and
    // byte have changed places.
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step) {
      const VB* from = v[step % 2];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        v[1 - step % 2][2 * i] = hn::InterleaveLower(db, from[i], from[i + 8]);
        v[1 - step % 2][2 * i + 1] = hn::InterleaveUpper(db, from[i], from[i + 8]);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      hn::Store(v[0][i], db, bytes);
      for (size_t at = 0; at < hn::MaxLanes(db); at += 16)
        std::memcpy(out + ((at + i) * kPerByte + part) * out_pitch, bytes + at, 16);
    }
  }
}

// ---- either way ----

// Copies a run. With `stream`, whole cache lines bypass the caches, for outputs larger than the
// caches; this saves reading the lines first.
template <class T>
HWY_INLINE void copy_run(const T* from, int64_t count, bool stream, T* to) {
  const hn::Repartition<T, DU> d;
  constexpr int64_t kStep = static_cast<int64_t>(hn::MaxLanes(d));
  int64_t i = 0;
  if (stream) {
    const uintptr_t unaligned = (0 - reinterpret_cast<uintptr_t>(to)) % 64 / sizeof(T);
    i = HWY_MIN(static_cast<int64_t>(unaligned), count);
    if (HWY_UNLIKELY(i > 0)) std::memcpy(to, from, i * sizeof(T));
    for (; i + kStep <= count; i += kStep) hn::Stream(hn::LoadU(d, from + i), d, to + i);
  }
  if (i < count) std::memcpy(to + i, from + i, (count - i) * sizeof(T));
}

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
