// Moves the codes and scales of a tile from scratch to their places in the requested layout.

#if defined(BLOCKSCALE_STORE_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_STORE_INL
#undef BLOCKSCALE_STORE_INL
#else
#define BLOCKSCALE_STORE_INL
#endif

#include <algorithm>
#include <cstring>

#include "cpu/direction.h"
#include "cpu/pack-inl.h"
#include "cpu/walk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// Stores `count` bytes of one line's codes, from byte `at` on: multiples of 8 and 16 respectively.
HWY_INLINE void store_codes(const Direction& d, int64_t batch, int64_t line, int64_t at,
                            int64_t count, const uint8_t* codes) {
  const StoredShape& s = d.shape;
  uint8_t* base = d.out.codes + batch * s.code_bytes;
  if (d.out.layout.codes == Layout::linear) {
    copy_run(codes, count, d.stream, base + line * s.code_columns + at);
    return;
  }
  // mfma_16x16 keeps 16 bytes of a line together.
  for (int64_t i = 0; i < count; i += 16)
    std::memcpy(base + layout_offset(d.out.layout.codes, s.code_rows, s.code_columns, line, at + i),
                codes + i, std::min<int64_t>(16, count - i));
}

// Stores `count` scales of one row of the scale matrix from `block` on; `stored` is readable up to
// a multiple of 16.
HWY_INLINE void store_scales(const Direction& d, int64_t batch, int64_t row, int64_t block,
                             int64_t count, const uint32_t* stored) {
  const StoredShape& s = d.shape;
  const bool fp32 = d.out.spec.scale == Format::fp32;
  uint8_t* base = d.out.scales + batch * s.scale_count * (fp32 ? 4 : 1);
  if (d.out.layout.scales == Layout::linear) {
    const int64_t start = row * s.scale_columns + block;
    int64_t b = 0;
    if (fp32) {
      for (; b < count; ++b) std::memcpy(base + 4 * (start + b), stored + b, 4);
      return;
    }
    for (; b + static_cast<int64_t>(lanes()) <= count; b += lanes())
      hn::StoreU(hn::TruncateTo(DU8(), hn::LoadU(DU(), stored + b)), DU8(), base + start + b);
    for (; b < count; ++b) base[start + b] = static_cast<uint8_t>(stored[b]);
    return;
  }
  for (int64_t b = 0; b < count; ++b) {
    const int64_t at =
        layout_offset(d.out.layout.scales, s.scale_rows, s.scale_columns, row, block + b);
    if (fp32)
      std::memcpy(base + 4 * at, stored + b, 4);
    else
      base[at] = static_cast<uint8_t>(stored[b]);
  }
}

// The same for scales that are already bytes, as stored.
HWY_INLINE void store_scales(const Direction& d, int64_t batch, int64_t row, int64_t block,
                             int64_t count, const uint8_t* stored) {
  const StoredShape& s = d.shape;
  uint8_t* base = d.out.scales + batch * s.scale_count;
  if (d.out.layout.scales == Layout::linear) {
    std::memcpy(base + row * s.scale_columns + block, stored, count);
    return;
  }
  for (int64_t b = 0; b < count; ++b)
    base[layout_offset(d.out.layout.scales, s.scale_rows, s.scale_columns, row, block + b)] =
        stored[b];
}

// The output of a pass: codes of a few lines, `pitch` bytes each, and in scratch the scale of
// (line group, block) at stored[group * group_step + block * block_step], or as bytes, with those
// of a group contiguous.
struct Encoded {
  int64_t batch, line, lines, pos, positions;  // the area in lines and positions
  int64_t pitch;                               // bytes of codes per line
  int64_t group_step, block_step;
  const uint8_t* scale_bytes = nullptr;
  int64_t scale_pitch = 0;  // from one group to the next
};

// Stores lines [first, last) of the area, right away, while their codes are still in the L1 cache.
HWY_INLINE void store(const Direction& d, const Encoded& e, int64_t first, int64_t last,
                      bool has_bad, uint8_t* line_codes, const Scratch& scratch) {
  const QuantSpec& spec = d.out.spec;
  const StoredShape& s = d.shape;
  const int per_byte = codes_per_byte(spec.element);
  const int64_t group_lines = spec.block_lines();
  const int64_t first_block = e.pos / spec.block;
  const int64_t blocks = std::min(e.positions / spec.block, s.blocks - first_block);
  const int64_t block_bytes = spec.block / per_byte;
  const bool per_group = s.scale_lines == group_lines;
  for (int64_t line = first; line < std::min(last, e.lines); ++line) {
    const int64_t group = line / group_lines;
    uint8_t* codes = line_codes + (line - first) * e.pitch;
    if (HWY_UNLIKELY(has_bad))
      for (int64_t b = 0; b < blocks; ++b)
        if (scratch.inv[group * e.group_step + b * e.block_step] == 0.0f)
          std::memset(codes + b * block_bytes, 0, block_bytes);
    store_codes(d, e.batch, e.line + line, e.pos / per_byte, blocks * block_bytes, codes);
    if (per_group && line % group_lines != 0) continue;
    const int64_t row = per_group ? (e.line + line) / group_lines : e.line + line;
    if (e.scale_bytes) {
      store_scales(d, e.batch, row, first_block, blocks, e.scale_bytes + group * e.scale_pitch);
      continue;
    }
    const uint32_t* stored = scratch.stored + group * e.group_step;
    HWY_ALIGN uint32_t gathered[kTileSide / 16];
    if (e.block_step != 1) {
      for (int64_t b = 0; b < blocks; ++b) gathered[b] = stored[b * e.block_step];
      stored = gathered;
    }
    store_scales(d, e.batch, row, first_block, blocks, stored);
  }
}

// store() with the values common to all lines computed once, for lines that scratch already holds
// in stored form.
struct LineStore {
  LineStore(const Direction& direction, const Encoded& encoded, bool bad)
      : d(direction), e(encoded), has_bad(bad), stream(d.stream) {
    const QuantSpec& spec = d.out.spec;
    const StoredShape& s = d.shape;
    plain = !has_bad && e.scale_bytes && !spec.square && d.out.layout.codes == Layout::linear &&
            d.out.layout.scales == Layout::linear;
    const int64_t block = e.pos / spec.block, byte = e.pos / codes_per_byte(spec.element);
    blocks = std::min(e.positions / spec.block, s.blocks - block);
    bytes = blocks * spec.block / codes_per_byte(spec.element);
    code_step = s.code_columns;
    scale_step = s.scale_columns;
    codes = d.out.codes + e.batch * s.code_bytes + e.line * code_step + byte;
    scales = d.out.scales + e.batch * s.scale_count + e.line * scale_step + block;
  }
  HWY_INLINE void operator()(int64_t first, int64_t last, uint8_t* line_codes,
                             const Scratch& scratch) const {
    if (HWY_UNLIKELY(!plain)) return store(d, e, first, last, has_bad, line_codes, scratch);
    for (int64_t line = first; line < std::min(last, e.lines); ++line) {
      copy_run(line_codes + (line - first) * e.pitch, bytes, stream, codes + line * code_step);
      const uint8_t* from = e.scale_bytes + line * e.scale_pitch;
      uint8_t* to = scales + line * scale_step;
      int64_t b = 0;
      for (; b + 8 <= blocks; b += 8) std::memcpy(to + b, from + b, 8);  // usually one or two times
      if (HWY_UNLIKELY(b < blocks)) std::memcpy(to + b, from + b, blocks - b);
    }
  }

  const Direction& d;
  Encoded e;
  bool has_bad, stream, plain;
  int64_t blocks, bytes, code_step, scale_step;
  uint8_t *codes, *scales;
};

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
