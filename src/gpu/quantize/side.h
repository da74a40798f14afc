// One output of a quantizer: where its codes and scales go, in whichever matrix or group.
#pragma once

#include "gpu/groups/groups.h"
#include "gpu/quantize/encode.h"

namespace blockscale::gpu {

// One output: where it goes, and everything that a kernel needs to know about it.
struct Side {
  Quantized out;
  StoredShape shape;
  ElementFacts element;
  const float* amax;  // of every matrix of the batch; for specs with an outer scale
  int amax_parts;     // not 0: one matrix's amax is the largest of this many
  const int64_t* seed;
  const int64_t* offset;  // device memory; if null, `rng` is used
  Rng rng;                // otherwise its seed is added
  int64_t origin_line, origin_pos;
  // Those of `shape`, or of the current group; layouts ask for line_bytes and scale_columns.
  int lines, padded, blocks, line_bytes, scale_columns;
  GroupRule groups;  // if any
  // Words, as kernels read them for every run: a one-byte parameter takes two more instructions.
  int scales_up, linear_codes, linear_scales, plain;  // plain: both linear
  // From one line's scales to the next: bytes in linear layouts, else 0; and other layouts' steps.
  int scale_step;
  RowSteps scale_steps;
  // Scales go to the workspace, for transpose_scales.cu, as words: one FP32, or four blocks of a
  // line. Words of a line are this far apart; those of neighbouring lines are adjacent. 0: scales
  // do not go there.
  int aside_pitch;
  // Whether 16 bytes of a line's FP4 codes, and four of its one-byte scales, lie aligned together.
  int code_pairs, scale_words;
  int aiter_words;  // whether words of aiter_scale are aligned, without groups
  int rows_behind;  // of padding, after the scales of mn_major without groups
  TransformSigns transform;
};

// The outer scale of one matrix, in the form its blocks need.
struct Outer {
  float sixth;  // fl(S_enc * fl(1 / kE2m1Max))
  float dec;
  uint32_t limit;  // amaxes from here on give NaN blocks; 0 when `dec` is NaN
  float unusual;   // 0, or NaN where 1 / (scale * dec) may not be a normal number
};

// The current matrix: what changes with the batch.
struct MatrixAt {
  Outer outer;
  uint8_t* codes;
  uint8_t* scales;
  uint32_t line;  // its first line, counted through the batch and from the origin
  Rng rng;
};
BLOCKSCALE_DEVICE Rng rng_of(const Side& s) {
  if (!s.seed) return s.rng;
  return {static_cast<uint64_t>(*s.seed) + s.rng.seed, static_cast<uint64_t>(*s.offset)};
}
BLOCKSCALE_DEVICE MatrixAt matrix_at(const Side& s, int batch, const Outer& outer) {
  const int bytes = scale_bytes(s.out.spec.scale);
  return {outer, s.out.codes + batch * s.shape.code_bytes,
          s.out.scales + batch * s.shape.scale_count * bytes,
          static_cast<uint32_t>(s.origin_line + batch * s.shape.lines), rng_of(s)};
}

// The same for group `group`: its extents go to `s`, a copy of `whole`.
BLOCKSCALE_DEVICE MatrixAt group_at(Side& s, const Side& whole, const Plan& plan, int side,
                                    int group, const Outer& outer) {
  const GroupAt at = plan.side[side][group];
  s.lines = at.lines;
  s.padded = at.padded;
  s.blocks = at.blocks;
  s.line_bytes = at.code_columns;
  s.scale_columns = at.scale_columns;
  s.origin_pos = whole.origin_pos + at.position;
  s.code_pairs = whole.code_pairs && (at.codes | at.code_columns | at.padded / 2) % 16 == 0;
  s.scale_words = whole.scale_words && (at.blocks | at.scale_columns | at.scales) % 4 == 0;
  const int bytes = scale_bytes(whole.out.spec.scale);
  return {outer, whole.out.codes + at.codes, whole.out.scales + at.scales * bytes,
          static_cast<uint32_t>(whole.origin_line + at.line), rng_of(whole)};
}

// Where a tile's group lies in operand kOperand; operand 1 has groups along the contraction axis.
template <int kOperand>
BLOCKSCALE_DEVICE GroupSide group_side(const Side& whole, const GroupRows& before, int begin,
                                       int rows) {
  const GroupRule& rule = whole.groups;
  const int64_t codes = rule.codes_at(before.codes), scales = rule.scales_at(before.scales);
  GroupSide s{};
  s.line = static_cast<uint32_t>(whole.origin_line);
  s.origin_pos = whole.origin_pos;
  s.padded = whole.padded, s.blocks = whole.blocks;
  s.line_bytes = whole.line_bytes, s.scale_columns = whole.scale_columns;
  if constexpr (kOperand == 0) {
    s.line += static_cast<uint32_t>(begin);
  } else {
    s.padded = round_up_by(rows, rule.position);
    s.blocks = s.padded >> rule.scale_shift;
    if (!whole.linear_codes) s.line_bytes = s.padded >> rule.code_shift;
    if (!whole.linear_scales) s.scale_columns = s.blocks;
    s.origin_pos += before.position;
  }
  s.code_pairs = whole.code_pairs && (codes | s.line_bytes | s.padded / 2) % 16 == 0;
  s.scale_words = whole.scale_words && (s.blocks | s.scale_columns | scales) % 4 == 0;
  s.codes = whole.out.codes + codes;
  s.scales = whole.out.scales + scales * scale_bytes(whole.out.spec.scale);
  return s;
}

template <Pass kPass>
BLOCKSCALE_DEVICE int block_length(const Side& s) {
  return kPass.any() ? s.out.spec.block : kPass.block();
}
template <Pass kPass>
BLOCKSCALE_DEVICE int stored_block_length(const Side& s) {
  return kPass.any() ? s.out.spec.block : kPass.stored_block();
}
template <Pass kPass>
BLOCKSCALE_DEVICE bool is_square(const Side& s) {
  return kPass.any() ? s.out.spec.square : kPass.square;
}
// Whether codes are stored two in a byte.
template <Pass kPass>
BLOCKSCALE_DEVICE bool packs(const Side& s) {
  return kPass.any() ? s.element.four_bits : kPass.packs();
}
template <Pass kPass>
BLOCKSCALE_DEVICE bool transforms(const Side& s) {
  return kPass.any() ? s.out.spec.hadamard.dim != 0 : kPass.hadamard;
}

template <Pass kPass>
BLOCKSCALE_DEVICE bool has_fp32_scales(const Side& s) {
  return (kPass.any() ? s.out.spec.scale : kPass.stored_scale()) == Format::fp32;
}

// Whether scales go to the workspace. Those of FP4 never do, so nothing is read for them.
template <Pass kPass>
BLOCKSCALE_DEVICE bool goes_aside(const Side& s) {
  return !kPass.square && !kPass.fp4() && s.aside_pitch != 0;
}
// Where a scale lies in a linear layout; a matrix may have 2^32 of them.
BLOCKSCALE_DEVICE uint32_t linear_offset(int line, int columns, int block) {
  return static_cast<uint32_t>(line) * static_cast<uint32_t>(columns) +
         static_cast<uint32_t>(block);
}
// Where word `which` of a line's scales lies in the workspace.
BLOCKSCALE_DEVICE uint32_t aside_offset(const Side& s, int line, int which) {
  return static_cast<uint32_t>(which * s.aside_pitch + line);
}
BLOCKSCALE_DEVICE void store_aside(const Side& s, const MatrixAt& m, int line, int which,
                                   uint32_t word) {
  store_to_stay(reinterpret_cast<uint32_t*>(m.scales) + aside_offset(s, line, which), word);
}

// Stores the scale of (line, block) of a matrix.
template <Pass kPass>
BLOCKSCALE_DEVICE void store_scale(const Side& s, const MatrixAt& m, int line, int block,
                                   uint32_t stored) {
  const StoredShape& shape = s.shape;
  if (goes_aside<kPass>(s)) {
    // Of inputs as large as kernels are compiled for there are fewer than 2^28 words.
    using Index = std::conditional_t<kPass.any(), int64_t, uint32_t>;
    if (has_fp32_scales<kPass>(s))
      store_aside(s, m, line, block, stored);
    else
      m.scales[Index{4} * aside_offset(s, line, block / 4) + block % 4] =
          static_cast<uint8_t>(stored);
    return;
  }
  int row = line;
  if (is_square<kPass>(s) && shape.scale_lines != 1) {
    // A grid of square blocks has one row of scales per block of lines.
    if (line % block_length<kPass>(s) != 0) return;
    row = line / block_length<kPass>(s);
  }
  const uint32_t at = s.linear_scales
                          ? linear_offset(row, s.scale_columns, block)
                          : layout_offset_as<uint32_t>(s.out.layout.scales, shape.scale_rows,
                                                       s.scale_columns, row, block);
  if (has_fp32_scales<kPass>(s)) {
    uint32_t* to = reinterpret_cast<uint32_t*>(m.scales) + at;
    *to = stored;
    if (s.rows_behind > 0 && row == shape.scale_rows - 1)
      for (int i = 1; i <= s.rows_behind; ++i) to[i] = 0;
  } else {
    m.scales[at] = static_cast<uint8_t>(stored);
  }
}

// Where the codes of `line` from `pos` on lie.
template <Pass kPass>
BLOCKSCALE_DEVICE uint8_t* codes_at(const Side& s, const MatrixAt& m, int line, int pos) {
  const int byte = packs<kPass>(s) ? pos / 2 : pos;
  if (s.linear_codes) return m.codes + static_cast<int64_t>(line) * s.line_bytes + byte;
  return m.codes + layout_offset(s.out.layout.codes, s.lines, s.line_bytes, line, byte);
}

}  // namespace blockscale::gpu
