// Block amax -> stored scale and the multiplier of the block's elements (specification, section 4).
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
  // Scales go to the workspace, for turn.cu, as words: one FP32, or four blocks of a line. Words of
  // a line are this far apart; those of neighbouring lines are adjacent. 0: scales do not go there.
  int aside_pitch;
  // Whether 16 bytes of a line's FP4 codes, and four of its one-byte scales, lie aligned together.
  int code_pairs, scale_words;
  int aiter_words;  // whether words of aiter_scale are aligned, without groups
  int rows_behind;  // of padding, after the scales of mn_major without groups
  TransformSigns transform;

  void set_transform(const Hadamard& h) {
    out.spec.hadamard = h;
    for (int i = 0; i < kRun; ++i) {
      transform.whole[i] = h.negates(i) ? -1.0f : 1.0f;
      transform.quarter[i] = 0.25f * transform.whole[i];
    }
  }
};

// The outer scale of one matrix, in the form its blocks need.
struct Outer {
  float sixth;  // fl(S_enc * fl(1 / kE2m1Max))
  float dec;
  uint32_t limit;  // amaxes from here on give NaN blocks; 0 when `dec` is NaN
  float unusual;   // 0, or NaN where 1 / (scale * dec) may not be a normal number
};
BLOCKSCALE_DEVICE Outer no_outer() { return {1.0f / kE2m1Max, 1, kInfBits, 0}; }
BLOCKSCALE_DEVICE Outer outer_from(const Side& s, float a) {
  if (!is_finite(a)) return {0, bit_cast<float>(kNanBits), 0, bit_cast<float>(kNanBits)};
  const OuterScale outer = s.out.spec.scale == Format::e4m3 ? outer_scale(Format::e4m3, a)
                                                            : outer_scale(Format::ue5m3, a);
  const bool ordinary = outer.dec > exp2i(-90) && outer.dec < exp2i(90);
  return {__fmul_rn(outer.enc, 1.0f / kE2m1Max), outer.dec, kInfBits,
          ordinary ? 0.0f : bit_cast<float>(kNanBits)};
}
BLOCKSCALE_DEVICE Outer outer_of(const Side& s, int64_t batch) {
  return s.out.spec.outer ? outer_from(s, s.amax[batch]) : no_outer();
}
// The same by a whole warp, for an amax that may come in parts. Bits are ordered as magnitudes are,
// with NaN above all.
BLOCKSCALE_DEVICE Outer outer_by_warp(const Side& s, int64_t batch) {
  if (s.amax_parts == 0) return outer_of(s, batch);
  uint32_t largest = 0;
  for (int i = static_cast<int>(threadIdx.x % 32); i < s.amax_parts; i += 32)
    largest = max(largest, bit_cast<uint32_t>(s.amax[i]));
  return outer_from(s, bit_cast<float>(warp_max(largest)));
}

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

struct Block {
  float inv;
  uint32_t stored;  // of a one-byte scale, the low eight bits
  int far = false;  // elements must be saturated before stochastic rounding
};

template <Format kScale>
BLOCKSCALE_DEVICE Block nan_block() {
  return {0.0f, kScale == Format::fp32 ? kNanBits : traits(kScale).nan_code()};
}

// As two_level_scale(). Rounds to the scale format by an addition: with P the power of two at or
// below the value, but at least the smallest normal, the last place of v + P 2^(23-m) is the
// format's spacing. 1 / scale is computed as for the usual scale, which is not always right.
template <Format kScale>
BLOCKSCALE_DEVICE Block two_level_block(bool up, float amax, const Outer& outer, float& decoded) {
  constexpr FormatTraits t = traits(kScale);
  constexpr float kLargest = max_value(kScale), kNormal = exp2i(t.min_exponent());
  // Codes below the smallest normal's binade are subtracted here, but for whole multiples of 256.
  constexpr int kBelow = (127 + t.min_exponent()) % (256 >> t.mantissa_bits) << t.mantissa_bits;
  constexpr float kUnit = exp2i(23 - t.mantissa_bits) + (256 - kBelow) / exp2i(t.mantissa_bits);
  const float v = fminf(__fmul_rn(amax, outer.sixth), kLargest);
  const float p = bit_cast<float>(bit_cast<uint32_t>(fmaxf(v, kNormal)) & 0x7F800000);
  const float w = up ? fma_up(p, kUnit, v) : __fmaf_rn(p, kUnit, v);
  const float value = __fmaf_rn(p, -kUnit, w);
  // The low bits of w count units; each binade has 2^m of them.
  const uint32_t stored = bit_cast<uint32_t>(w) + (bit_cast<uint32_t>(p) >> (23 - t.mantissa_bits));
  decoded = __fmul_rn(value, outer.dec);
  return {fminf(reciprocal_of_normal(decoded), kFloatMax), stored};
}
BLOCKSCALE_DEVICE float inverse_scale(float decoded) {
  return fminf(__frcp_rn(decoded), kFloatMax);
}

BLOCKSCALE_DEVICE Block e8m0_block(ScaleRule rule, const ElementFacts& e, float amax) {
  const uint32_t byte = e8m0_byte(rule, e.traits, e.largest, amax);
  // 2^(127 - byte), a normal number: the byte of a finite block is at most 255 - p, and p >= 2.
  return {bit_cast<float>((254 - byte) << 23), byte};
}

// The block of this amax. Calls cut(block) where elements are beyond `safe` or not finite; if not
// finite, 1 / scale is 0, which no finite block has.
template <Format kScale, class Cut>
BLOCKSCALE_DEVICE Block block_with(const Side& s, const Outer& outer, uint32_t amax_bits,
                                   float safe, const Cut& cut) {
  const QuantSpec& spec = s.out.spec;
  const float amax = bit_cast<float>(amax_bits);
  Block b;
  if constexpr (kScale == Format::fp32) {
    const FloatScale f = spec.rule == ScaleRule::pow2 ? pow2_scale(amax, s.element.largest)
                                                      : amax_scale(amax, s.element.largest);
    b = {f.inv, bit_cast<uint32_t>(f.scale)};
    return amax_bits < outer.limit ? b : nan_block<kScale>();
  } else {
    // One comparison identifies the usual block; NaN fails it.
    float decoded = 0;
    if constexpr (kScale == Format::e8m0)
      b = e8m0_block(spec.rule, s.element, amax);
    else
      b = two_level_block<kScale>(s.scales_up, amax, outer, decoded);
    if (!(__fmaf_rn(amax, b.inv, outer.unusual) <= safe)) {
      if (kScale != Format::e8m0) b.inv = inverse_scale(decoded);
      if (amax_bits >= outer.limit) b = nan_block<kScale>();
      b.far = !(b.inv >= kStochasticLeast && __fmul_rn(amax, b.inv) <= kStochasticSafe);
      cut(b);
    }
    return b;
  }
}

template <Pass kPass, class Cut>
BLOCKSCALE_DEVICE Block block_of(const Side& s, const Outer& outer, uint32_t amax_bits,
                                 const Cut& cut) {
  constexpr float kSafe = kPass.encoder == Encoder::fp4_nearest      ? kNearestSafe
                          : kPass.encoder == Encoder::fp4_stochastic ? kStochasticSafe
                                                                     : -1.0f;
  if constexpr (!kPass.any()) return block_with<kPass.scale>(s, outer, amax_bits, kSafe, cut);
  switch (s.out.spec.scale) {
    case Format::e8m0:
      return block_with<Format::e8m0>(s, outer, amax_bits, kSafe, cut);
    case Format::e4m3:
      return block_with<Format::e4m3>(s, outer, amax_bits, kSafe, cut);
    case Format::ue5m3:
      return block_with<Format::ue5m3>(s, outer, amax_bits, kSafe, cut);
    default:
      return block_with<Format::fp32>(s, outer, amax_bits, kSafe, cut);
  }
}
template <Pass kPass>
BLOCKSCALE_DEVICE Block block_of(const Side& s, const Outer& outer, uint32_t amax_bits) {
  return block_of<kPass>(s, outer, amax_bits, [](Block&) {});
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
