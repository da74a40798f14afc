// Reading stored codes back as values: along a line, or 16 positions of one vector of lines.

#if defined(BLOCKSCALE_DECODE_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_DECODE_INL
#undef BLOCKSCALE_DECODE_INL
#else
#define BLOCKSCALE_DECODE_INL
#endif

#include <cstring>

#include "blockscale/tensor.h"
#include "cpu/codec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// Codes of one batch element and the scales that go with them, whatever their layout.
struct Reader {
  Reader(const ConstQuantized& operand, int64_t b)
      : q(operand),
        s(operand.shape()),
        codes(operand.codes + b * s.code_bytes),
        scales(operand.scales + b * s.scale_count * scale_bytes(operand.spec.scale)),
        outer(operand.spec.outer ? operand.outer[b] : 1.0f),
        scale_lines(s.scale_rows == s.lines ? 1 : operand.spec.block) {}

  HWY_INLINE int64_t scale_at(int64_t line, int64_t block) const {
    if (HWY_LIKELY(q.layout.scales == Layout::linear && scale_lines == 1))
      return line * s.blocks + block;
    return layout_offset(q.layout.scales, s.scale_rows, s.blocks, line / scale_lines, block);
  }
  HWY_INLINE uint32_t raw_scale(int64_t at) const {
    if (q.spec.scale != Format::fp32) return scales[at];
    uint32_t bits;
    std::memcpy(&bits, scales + 4 * at, 4);
    return bits;
  }
  // Scales of consecutive blocks of one line; of one block of consecutive lines. Past the end the
  // last one is repeated.
  HWY_INLINE VF block_scales(int64_t line, int64_t block) const {
    HWY_ALIGN uint32_t raw[16];
    for (size_t i = 0; i < lanes(); ++i)
      raw[i] = raw_scale(
          scale_at(line, HWY_MIN(block + static_cast<int64_t>(i), s.blocks - 1)));
    return decode_scales(hn::LoadU(DU(), raw));
  }
  HWY_INLINE VF line_scales(int64_t line, int64_t block) const {
    HWY_ALIGN uint32_t raw[16];
    block = HWY_MIN(block, s.blocks - 1);
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
        return hn::BitCast(
            DF(), hn::IfThenElse(hn::Eq(raw, hn::Set(du, 255)), hn::Set(du, kNanBits), low));
      }
      case Format::fp32:
        return hn::BitCast(DF(), raw);
      default:
        return Decoder<3>(q.spec.scale)(raw);
    }
  }
  // The 16 bytes of codes of a line that start at byte `at`, a multiple of 16; zeros past the end.
  HWY_INLINE void bytes16(int64_t line, int64_t at, uint8_t* out) const {
    const uint8_t* p = codes + (HWY_LIKELY(q.layout.codes == Layout::linear)
                                    ? line * s.line_bytes + at
                                    : layout_offset(q.layout.codes, s.lines, s.line_bytes, line, at));
    const int64_t count = s.line_bytes - at;
    if (HWY_LIKELY(count >= 16)) {
      std::memcpy(out, p, 16);
    } else {
      std::memset(out, 0, 16);
      std::memcpy(out, p, count);
    }
  }
  // Whether `count` bytes of codes of a line from byte `at` on are codes of +0.
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
  int64_t scale_lines;
};

// Codes of consecutive positions of one line, one to a lane.
template <int kM>
HWY_INLINE VU load_codes(const uint8_t* codes, int64_t pos) {
  const DU du;
  if constexpr (kM == 1) {
    // A byte's two nibbles become neighbouring lanes.
    const hn::Repartition<uint64_t, DU> du64;
    const hn::Rebind<uint32_t, decltype(du64)> half;
    const hn::Rebind<uint8_t, decltype(du64)> du8;
    const auto bytes = hn::PromoteTo(du64, hn::PromoteTo(half, hn::LoadU(du8, codes + pos / 2)));
    const auto spread = hn::Or(bytes, hn::ShiftLeft<28>(bytes));
    return hn::And(hn::BitCast(du, spread), hn::Set(du, 15));
  } else {
    return hn::PromoteTo(du, hn::LoadU(DU8(), codes + pos));
  }
}

// Positions [pos, pos + 16 * rounds) of `lanes()` lines from `line` on, one line to a lane: calls
// body(position offset, codes). Lines past the end repeat the last one.
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

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
