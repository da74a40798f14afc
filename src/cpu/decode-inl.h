// Reads stored codes back as values: along a line, or down one or two vectors of lines.

#if defined(BLOCKSCALE_DECODE_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_DECODE_INL
#undef BLOCKSCALE_DECODE_INL
#else
#define BLOCKSCALE_DECODE_INL
#endif

#include <cstring>

#include "blockscale/tensor.h"
#include "cpu/ahead.h"
#include "cpu/codec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// The codes of one batch element and their scales, in any layout.
struct Reader {
  Reader(const ConstQuantized& operand, const StoredShape& shape, int64_t b)
      : q(operand),
        s(shape),
        codes(operand.codes + b * s.code_bytes),
        scales(operand.scales + b * s.scale_count * scale_bytes(operand.spec.scale)),
        outer(operand.spec.outer ? operand.outer[b] : 1.0f) {}

  HWY_INLINE int64_t scale_at(int64_t line, int64_t block) const {
    if (HWY_LIKELY(q.layout.scales == Layout::linear && s.scale_lines == 1))
      return line * s.scale_columns + block;
    return layout_offset(q.layout.scales, s.scale_rows, s.scale_columns, line / s.scale_lines,
                         block);
  }
  HWY_INLINE uint32_t raw_scale(int64_t at) const {
    if (q.spec.scale != Format::fp32) return scales[at];
    uint32_t bits;
    std::memcpy(&bits, scales + 4 * at, 4);
    return bits;
  }
  // block_scales(): scales of consecutive blocks of one line; line_scales(): of one block of
  // consecutive lines. Past the end, both repeat the last one.
  HWY_INLINE VF block_scales(int64_t line, int64_t block) const {
    if (q.layout.scales == Layout::linear && block + static_cast<int64_t>(lanes()) <= s.blocks) {
      const int64_t at = scale_at(line, block);
      if (q.spec.scale != Format::fp32)
        return decode_scales(hn::PromoteTo(DU(), hn::LoadU(DU8(), scales + at)));
      return hn::BitCast(DF(), hn::LoadU(DB(), scales + 4 * at));
    }
    HWY_ALIGN uint32_t raw[16];
    for (size_t i = 0; i < lanes(); ++i)
      raw[i] = raw_scale(scale_at(line, HWY_MIN(block + static_cast<int64_t>(i), s.blocks - 1)));
    return decode_scales(hn::LoadU(DU(), raw));
  }
  HWY_INLINE VF line_scales(int64_t line, int64_t block) const {
    HWY_ALIGN uint32_t raw[16];
    block = HWY_MIN(block, s.blocks - 1);
    if (q.layout.scales == Layout::linear && s.scale_lines == 1 &&
        line + static_cast<int64_t>(lanes()) <= s.lines) {
      const int64_t at = scale_at(line, block);
#pragma GCC unroll 16
      for (size_t i = 0; i < lanes(); ++i) raw[i] = raw_scale(at + i * s.scale_columns);
      return decode_scales(hn::LoadU(DU(), raw));
    }
    const int64_t last = HWY_MIN(line + static_cast<int64_t>(lanes()), s.lines) - 1;
    if (line / s.scale_lines == last / s.scale_lines)
      return decode_scales(hn::Set(DU(), raw_scale(scale_at(last, block))));
    for (size_t i = 0; i < lanes(); ++i)
      raw[i] = raw_scale(scale_at(HWY_MIN(line + static_cast<int64_t>(i), s.lines - 1), block));
    return decode_scales(hn::LoadU(DU(), raw));
  }
  HWY_INLINE VF decode_scales(VU raw) const {
    const DU du;
    switch (q.spec.scale) {
      case Format::e8m0: {
        const VU normal = hn::ShiftLeft<23>(raw);
        const VU low = hn::IfThenElse(hn::Eq(raw, hn::Zero(du)), hn::Set(du, 1u << 22), normal);
        return hn::BitCast(DF(),
                           hn::IfThenElse(hn::Eq(raw, hn::Set(du, traits(Format::e8m0).nan_code())),
                                          hn::Set(du, kNanBits), low));
      }
      case Format::fp32:
        return hn::BitCast(DF(), raw);
      default:
        return Decoder<3>(q.spec.scale)(raw);
    }
  }
  // The 16 bytes of a line's codes that start at byte `at`, a multiple of 16; zeros past the end.
  HWY_INLINE void bytes16(int64_t line, int64_t at, uint8_t* out) const {
    const uint8_t* p =
        codes + (HWY_LIKELY(q.layout.codes == Layout::linear)
                     ? line * s.code_columns + at
                     : layout_offset(q.layout.codes, s.code_rows, s.code_columns, line, at));
    const int64_t count = s.line_bytes - at;
    if (HWY_LIKELY(count >= 16)) {
      std::memcpy(out, p, 16);
    } else {
      std::memset(out, 0, 16);
      std::memcpy(out, p, count);
    }
  }
  // Whether the `count` bytes of a line's codes from byte `at` on are all codes of +0.
  bool is_zero(int64_t line, int64_t at, int64_t count) const {
    uint8_t bytes[16], any = 0;
    for (int64_t i = 0; i < count; i += 16) {
      bytes16(line, at + i, bytes);
      for (int64_t j = 0; j < HWY_MIN(16, count - i); ++j) any |= bytes[j];
    }
    return any == 0;
  }

  const ConstQuantized& q;
  StoredShape s;
  const uint8_t* codes;
  const uint8_t* scales;
  float outer;
};

// Decodes by way of binary16: a code moved to the sign, low exponent and high mantissa bits of a
// half gives a half of the same value, subnormals included, up to a power of two, which can be
// folded into the scales. Codes are at the top of each 16-bit lane: a byte, or a nibble for FP4;
// the bits below may be anything.
template <int kM>
class HalfDecoder {
 public:
  explicit HalfDecoder(Format element)
      : exact_(element),
        t_(traits(element)),
        up_((kM == 1 ? 4 : 8) - t_.bits()),
        down_(5 - t_.exponent_bits),
        mask_(hn::Set(DH(), static_cast<uint16_t>(0x8000 | t_.magnitude_mask() << (10 - kM)))),
        factor(exp2i(15 - t_.bias)) {}

  // Whether any code may be a special value, which only exact() decodes. Reads whole vectors.
  HWY_INLINE bool has_special(const uint8_t* codes, int64_t count) const {
    if (t_.special == Special::none) return false;
    if (t_.special == Special::negative_zero) return true;
    const DB db;
    const VB mask = hn::Set(db, static_cast<uint8_t>(t_.magnitude_mask()));
    VB most = hn::Zero(db);
    for (int64_t i = 0; i < count; i += hn::MaxLanes(db))
      most = hn::Max(most, hn::And(hn::LoadU(db, codes + i), mask));
    const VB finite = hn::Set(db, static_cast<uint8_t>(t_.max_code()));
    return !hn::AllTrue(db, hn::Eq(most, hn::Min(most, finite)));
  }
  // Values without `factor`.
  HWY_INLINE void fast(VH top, VF& a, VF& b) const {
    const hn::Repartition<int16_t, DU> di16;
    const hn::Rebind<hwy::float16_t, DF> df16;
    const auto high = hn::BitCast(di16, hn::ShiftLeftSame(top, up_));
    const VH half = hn::And(hn::BitCast(DH(), hn::ShiftRightSame(high, down_)), mask_);
    const hn::Half<DH> d;
    a = hn::PromoteTo(DF(), hn::BitCast(df16, hn::LowerHalf(d, half)));
    b = hn::PromoteTo(DF(), hn::BitCast(df16, hn::UpperHalf(d, half)));
  }
  HWY_INLINE void exact(VH top, VF& a, VF& b) const {
    const DU du;
    const VH codes = hn::ShiftRightSame(hn::ShiftLeftSame(top, up_), 16 - t_.bits());
    const hn::Half<DH> d;
    a = exact_(hn::PromoteTo(du, hn::LowerHalf(d, codes)));
    b = exact_(hn::PromoteTo(du, hn::UpperHalf(d, codes)));
  }

 private:
  Decoder<kM> exact_;
  FormatTraits t_;
  int up_, down_;
  VH mask_;

 public:
  const float factor;
};

// E2M1 to BF16 without widening, where the processor has look-ups in tables of 32 16-bit lanes
// (AVX-512). Every value in a block is the scale s or 1.5 s, each rounded to BF16 once, times a
// power of two, which is added to the exponent: code 5, 3 s, is the bits of 1.5 s plus 128. This
// holds as long as nothing is subnormal or overflows.
class NarrowDecoder {
 public:
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  static constexpr bool kFits = true;
#else
  static constexpr bool kFits = false;
#endif
  // For 2 * lanes() elements: the bits of s, and how much larger those of 1.5 s are.
  struct Scales {
    VH one, more;
  };

  NarrowDecoder(const QuantSpec& spec, float outer)
      : value_(spec.scale), holds_(outer >= exp2i(-90) && outer <= exp2i(90)) {
    HWY_ALIGN uint16_t add[32], pick[32];
    for (int i = 0; i < 32; ++i) {  // repeated: a lane's fifth bit may be anything
      const int magnitude = i & 7;
      const int up = magnitude == 0 ? 0 : 128 * (magnitude / 2 - 1);
      add[i] = static_cast<uint16_t>(up + (i & 8 ? 0x8000 : 0));
      pick[i] = magnitude % 2 != 0 && magnitude != 1 ? 0xFFFF : 0;
    }
    add_ = hn::LoadU(DH(), add);
    pick_ = hn::LoadU(DH(), pick);
    HWY_ALIGN uint16_t one[8], more[8];
    for (int i = 0; i < 8; ++i) {
      const float s = outer * (1 + static_cast<float>(i) / 8);
      one[i] = static_cast<uint16_t>(to_bf16(s) - 0x3F80);
      more[i] = static_cast<uint16_t>(to_bf16(1.5f * s) - to_bf16(s));
    }
    one_ = hn::LoadDup128(DH(), one);
    more_ = hn::LoadDup128(DH(), more);
  }
  // Whether this decoder can handle scales with these codes.
  HWY_INLINE bool takes(VH codes) const {
    const DH dh;
    const VH least = hn::Set(dh, value_.least());
    const VH span = hn::Set(dh, static_cast<uint16_t>(value_.most() - value_.least()));
    return holds_ && hn::AllFalse(dh, hn::Gt(hn::Sub(codes, least), span));
  }
  HWY_INLINE Scales scales(VH codes) const {
    const DH dh;
    const VH value = value_(codes), at = scale_fractions(value);
    return {hn::Add(hn::TableLookupBytes(one_, at), hn::And(value, hn::Set(dh, 0x7F80))),
            hn::TableLookupBytes(more_, at)};
  }
  // Codes are the low four bits of each lane; the bits above may be anything.
  HWY_INLINE VH operator()(VH codes, const Scales& s) const {
    const DH dh;
    const VH up = look_up(add_, codes);
    const VH value = hn::Add(hn::Add(up, s.one), hn::And(look_up(pick_, codes), s.more));
    const auto zero = hn::Eq(hn::And(codes, hn::Set(dh, uint16_t{7})), hn::Zero(dh));
    return hn::IfThenElse(zero, up, value);
  }

 private:
  // Highway's own look-up has 32-bit lanes.
  static HWY_INLINE VH look_up(VH table, [[maybe_unused]] VH at) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
    return VH{_mm512_permutexvar_epi16(at.raw, table.raw)};
#else
    return table;
#endif
  }

  ScaleValues value_;
  bool holds_;
  VH add_, pick_, one_, more_;
};

// Codes of the scales, one byte each, of up to 8 blocks of 2 * lanes() lines: out[i] holds those of
// block i, one line per lane. Past the end, the last ones are repeated.
HWY_INLINE void scale_codes_of_lines(const Reader& reader, int64_t line, int64_t block,
                                     int64_t blocks, VH* out) {
  const DU du;
  const DH dh;
  constexpr int64_t kStep = static_cast<int64_t>(lanes());
  HWY_ALIGN uint8_t bytes[kPair * 8] = {};
  const StoredShape& s = reader.s;
  const bool whole = reader.q.layout.scales == Layout::linear && s.scale_lines == 1 &&
                     line + kPair <= s.lines && block + blocks <= s.blocks;
  for (int64_t i = 0; i < kPair; ++i) {
    const uint8_t* from = reader.scales + (line + i) * s.scale_columns + block;
    if (HWY_LIKELY(whole && blocks == 8)) {
      std::memcpy(bytes + 8 * i, from, 8);
    } else if (whole && blocks == 4) {
      std::memcpy(bytes + 8 * i, from, 4);
    } else {
      for (int64_t b = 0; b < blocks; ++b)
        bytes[8 * i + b] = static_cast<uint8_t>(reader.raw_scale(
            reader.scale_at(HWY_MIN(line + i, s.lines - 1), HWY_MIN(block + b, s.blocks - 1))));
    }
  }
  const auto* words = reinterpret_cast<const uint32_t*>(bytes);
  const VU a = hn::Load(du, words), b = hn::Load(du, words + kStep);
  const VU c = hn::Load(du, words + 2 * kStep), d = hn::Load(du, words + 3 * kStep);
  const auto halves = [&](VU low, VU high, VH* to) HWY_ATTR {
    const VH l = hn::BitCast(dh, low), h = hn::BitCast(dh, high);
    const VH even = hn::ConcatEven(dh, h, l), odd = hn::ConcatOdd(dh, h, l);
    to[0] = hn::And(even, hn::Set(dh, 0xFF));
    to[1] = hn::ShiftRight<8>(even);
    to[2] = hn::And(odd, hn::Set(dh, 0xFF));
    to[3] = hn::ShiftRight<8>(odd);
  };
  halves(hn::ConcatEven(du, b, a), hn::ConcatEven(du, d, c), out);
  halves(hn::ConcatOdd(du, b, a), hn::ConcatOdd(du, d, c), out + 4);
}

// 2 * lanes() consecutive codes, in the form that HalfDecoder takes.
template <int kM>
HWY_INLINE VH load_tops(const uint8_t* codes) {
  const DH dh;
  const DU du;
  if constexpr (kM == 1) {
    const VU bytes = hn::PromoteTo(du, hn::LoadU(DU8(), codes));
    return hn::BitCast(dh, hn::Or(hn::ShiftLeft<12>(bytes), hn::ShiftLeft<24>(bytes)));
  } else {
    const hn::Rebind<uint8_t, DH> d8;
    return hn::ShiftLeft<8>(hn::PromoteTo(dh, hn::LoadU(d8, codes)));
  }
}

// Calls body(position offset, codes) for the codes in 16 bytes from position `pos` on, of `lanes()`
// lines from `line` on, one line per lane. Lines past the end repeat the last one.
template <int kM, class Body>
HWY_INLINE void for_line_codes(const Reader& reader, int64_t line, int64_t pos, const Body& body) {
  constexpr int kBits = kM == 1 ? 4 : 8;
  const DU du;
  HWY_ALIGN uint8_t bytes[16 * 16];
  for (size_t i = 0; i < lanes(); ++i)
    reader.bytes16(HWY_MIN(line + static_cast<int64_t>(i), reader.s.lines - 1), pos * kBits / 8,
                   bytes + 16 * i);
  VU words[4];
  hn::LoadInterleaved4(du, reinterpret_cast<const uint32_t*>(bytes), words[0], words[1], words[2],
                       words[3]);
  const VU mask = hn::Set(du, (1u << kBits) - 1);
  for (int i = 0; i < 128 / kBits; ++i)
    body(i, hn::And(hn::ShiftRightSame(words[i * kBits / 32], i * kBits % 32), mask));
}

// 64 bytes of codes, one cache line, from each of kPair lines.
struct LineBytes {
  static constexpr int64_t kBytes = 64;

  // Loads from byte `at`, a multiple of kBytes, of line `line` on. Past the end of a line it fills
  // in zeros; past the last line it repeats that line.
  HWY_INLINE void load(const Reader& reader, int64_t line, int64_t at) {
    const bool whole = reader.q.layout.codes == Layout::linear && line + kPair <= reader.s.lines &&
                       at + kBytes <= reader.s.line_bytes;
    for (int64_t i = 0; i < kPair; ++i) {
      const uint8_t* p = reader.codes + (line + i) * reader.s.code_columns + at;
      for (int64_t part = 0; part < kBytes / 16; ++part) {
        uint8_t* to = bytes + 16 * (part * kPair + i % 2 * (kPair / 2) + i / 2);
        if (HWY_LIKELY(whole))
          std::memcpy(to, p + 16 * part, 16);
        else if (at + 16 * part < reader.s.line_bytes)
          reader.bytes16(HWY_MIN(line + i, reader.s.lines - 1), at + 16 * part, to);
        else
          std::memset(to, 0, 16);
      }
    }
  }

  // 16 bytes of every line as words: word w of the even lines and of the odd ones.
  HWY_INLINE void words(int part, VU* even, VU* odd) const {
    const DU du;
    const auto* from = reinterpret_cast<const uint32_t*>(bytes) + 4 * part * kPair;
    hn::LoadInterleaved4(du, from, even[0], even[1], even[2], even[3]);
    hn::LoadInterleaved4(du, from + 4 * lanes(), odd[0], odd[1], odd[2], odd[3]);
  }

  // Even lines, then odd ones, 16 bytes each; then the next 16.
  HWY_ALIGN uint8_t bytes[kPair * kBytes];
};

// Prefetches `width` bytes from each of `lines` lines.
inline Ahead ahead_of(const Reader& reader, int64_t line, int64_t lines, int64_t at,
                      int64_t width) {
  if (reader.q.layout.codes != Layout::linear || at >= reader.s.line_bytes) return {};
  return {reader.codes + line * reader.s.code_columns + at, reader.s.code_columns, width, lines};
}

// Prefetches the scales of `lines` lines, 64 bytes from each, from block `block` on.
inline Ahead scales_ahead_of(const Reader& reader, int64_t line, int64_t lines, int64_t block) {
  if (reader.q.layout.scales != Layout::linear || reader.s.scale_lines != 1 ||
      block >= reader.s.blocks)
    return {};
  const int64_t bytes = scale_bytes(reader.q.spec.scale);
  return {reader.scales + bytes * (line * reader.s.scale_columns + block),
          bytes * reader.s.scale_columns, 64, lines};
}

// For 16 of the bytes, calls body(position, its FP4 codes in the form that NarrowDecoder takes).
template <class Body>
HWY_INLINE void for_line_nibbles(const LineBytes& lines, int part, const Body& body) {
  const DH dh;
  VU even[4], odd[4];  // the low and high halves of 32-bit lanes
  lines.words(part, even, odd);
#pragma GCC unroll 4
  for (int w = 0; w < 4; ++w) {
    const VH low =
        hn::OddEven(hn::BitCast(dh, hn::ShiftLeft<16>(odd[w])), hn::BitCast(dh, even[w]));
    const VH high =
        hn::OddEven(hn::BitCast(dh, odd[w]), hn::BitCast(dh, hn::ShiftRight<16>(even[w])));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      body((part * 4 + w) * 8 + i, hn::ShiftRightSame(low, 4 * i));
      body((part * 4 + w) * 8 + 4 + i, hn::ShiftRightSame(high, 4 * i));
    }
  }
}

// For 16 of the bytes, calls body(position, its codes in the form that HalfDecoder takes).
template <int kM, class Body>
HWY_INLINE void for_line_tops(const LineBytes& lines, int part, const Body& body) {
  constexpr int kBits = kM == 1 ? 4 : 8;
  VU even[4], odd[4];  // the low and high halves of 32-bit lanes
  lines.words(part, even, odd);
#pragma GCC unroll 4
  for (int w = 0; w < 4; ++w) {
#pragma GCC unroll 8
    for (int i = 0; i < 32 / kBits; ++i) {
      const int up = 16 - kBits * (i + 1);
      const VU low = up >= 0 ? hn::ShiftLeftSame(even[w], up) : hn::ShiftRightSame(even[w], -up);
      const VU high = hn::ShiftLeftSame(odd[w], up + 16);
      body((part * 4 + w) * (32 / kBits) + i,
           hn::OddEven(hn::BitCast(DH(), high), hn::BitCast(DH(), low)));
    }
  }
}

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
