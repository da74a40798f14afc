// Quantizing a tile along its rows: codes and scales are stored from registers.
#pragma once

#include "gpu/quantize/block.h"

namespace blockscale::gpu {

// The run at (r, c) of the tile after the transform, and its amax.
template <Pass kPass, class Tile>
struct RowValues {
  typename Tile::Run plain;
  Transformed<Tile::kBf16, kPass.two_level()> transformed;
  uint32_t amax;

  BLOCKSCALE_DEVICE void take(const typename Tile::Run& run, const Side& s) {
    plain = run;
    amax = transforms<kPass>(s) ? transformed.take(s.transform, unpack_plain(), unpack_plain())
                                : plain.amax_bits();
  }
  BLOCKSCALE_DEVICE auto unpack_plain() const {
    return [this](float* v) { plain.unpack(v); };
  }
  // block_of()'s `cut`: clamps pairs for rounding to nearest; stochastic rounding clamps floats
  // later.
  BLOCKSCALE_DEVICE void cut(const Side& s, Block& b) {
    if constexpr (kPass.fp4()) {
      const auto cut_run = [&](auto& run) {
        if (kPass.encoder == Encoder::fp4_nearest) run.limit(nearest_limit(b.inv));
        run.keep_if(b.inv != 0.0f);
      };
      if constexpr (kPass.hadamard) {
        if constexpr (kPass.two_level()) {
          if (transformed.settled(s.transform, unpack_plain(), amax) >= kInfBits)
            b = nan_block<kPass.scale>();
        }
        cut_run(transformed);
      } else {
        cut_run(plain);
      }
    }
  }
  BLOCKSCALE_DEVICE void unpack(const Side& s, float* v) const {
    if (transforms<kPass>(s))
      transformed.unpack(v);
    else
      plain.unpack(v);
  }
  BLOCKSCALE_DEVICE RunSigns signs(const Side& s) const {
    return transforms<kPass>(s) ? transformed.signs() : plain.signs();
  }
};

// The amax of a block along the row, from those of its runs, which neighbouring threads hold.
template <Pass kPass>
BLOCKSCALE_DEVICE uint32_t row_block_amax(const Side& s, uint32_t amax) {
  const int block = block_length<kPass>(s);
#pragma unroll
  for (int step = 1; step < kRunsPerLine; step *= 2)
    if (step * kRun < block) amax = max(amax, shuffle_xor(amax, step));
  return amax;
}

// Widens the codes of a run of block `b`, and makes `b` their block: eight neighbouring threads
// hold the runs that share its scale.
template <Pass kPass>
BLOCKSCALE_DEVICE void widen_row(Codes& codes, Block& b) {
  static_assert(kPass.widened && kPass.stored_block() == kRunsPerLine * kRun);
  uint32_t top = top_of(b.stored);
#pragma unroll
  for (int step = kPass.block() / kRun; step < kRunsPerLine; step *= 2)
    top = max(top, shuffle_xor(top, step));
  codes = widen_run(codes, b.stored, top);
  b.stored = bit_cast<uint32_t>(widened_scale(top));
}

// Where a run's codes and scale go. In linear layouts, they are found from one line to the next by
// addition. In others, the scale's place is the sum of the position's part, found once, and the
// line's, by steps; the codes' place is found for every run.
template <Pass kPass>
struct RowTarget {
  uint8_t *codes, *scale;  // FP32 scales of widened codes are mn_major

  BLOCKSCALE_DEVICE RowTarget(const Side& s, const MatrixAt& m, int line, int pos) {
    constexpr int kBytes = scale_bytes(kPass.stored_scale());
    const int block = pos / kPass.stored_block();
    codes = m.codes + static_cast<int64_t>(line) * s.line_bytes + (kPass.packs() ? pos / 2 : pos);
    if (kPass.widened)
      scale = m.scales + layout_offset_as<uint32_t>(Layout::mn_major, s.shape.scale_rows,
                                                    s.scale_columns, line, block) *
                             uint64_t{kBytes};
    else if (s.linear_scales)
      scale = m.scales + (static_cast<int64_t>(line) * s.scale_columns + block) * kBytes;
    else
      scale = m.scales + layout_column_as<uint32_t>(s.out.layout.scales, 0, block) * kBytes;
    keep(codes);
    keep(scale);
  }
  // Moves to the next line.
  BLOCKSCALE_DEVICE void advance(const Side& s) {
    codes += s.line_bytes;
    scale += kPass.widened ? sizeof(float) : s.scale_step;
  }
  BLOCKSCALE_DEVICE uint8_t* codes_of(const Side& s, const MatrixAt& m, int line, int pos) const {
    // One-byte codes are always linear, which the compiler cannot see.
    return !kPass.packs() || s.linear_codes ? codes : codes_at<kPass>(s, m, line, pos);
  }
  // For one-byte scales.
  BLOCKSCALE_DEVICE uint8_t* scale_of(const Side& s, int line) const {
    return s.linear_scales ? scale : scale + static_cast<uint32_t>(s.scale_steps.at(line));
  }
};

template <Pass kPass>
BLOCKSCALE_DEVICE void store_codes(uint8_t* to, const Side& s, const Codes& codes) {
  in_global_memory(to);
  if (packs<kPass>(s))
    *reinterpret_cast<uint2*>(to) = {codes.word[0], codes.word[1]};
  else
    *reinterpret_cast<uint4*>(to) = {codes.word[0], codes.word[1], codes.word[2], codes.word[3]};
}
template <Pass kPass, class Values>
BLOCKSCALE_DEVICE Codes encode_row_run(const Side& s, const MatrixAt& m, const RandomRuns& random,
                                       Values& values, const Block& b, int line) {
  float v[kRun];
  const float inv = unpack_for<kPass>(
      b, [&](float* to) { values.unpack(s, to); }, v);
  return encode_run<kPass>(s, v, values.signs(s), inv, random, m.line + line);
}
template <Pass kPass, class Values>
BLOCKSCALE_DEVICE void store_row_codes(const Side& s, const MatrixAt& m, const RandomRuns& random,
                                       Values& values, const Block& b, int line, int pos,
                                       const RowTarget<kPass>& to) {
  store_codes<kPass>(to.codes_of(s, m, line, pos), s,
                     encode_row_run<kPass>(s, m, random, values, b, line));
}
// Stores codes and scale of the run at (line, pos), if it exists.
template <Pass kPass>
BLOCKSCALE_DEVICE void store_row(const Side& s, const MatrixAt& m, const Codes& codes,
                                 const Block& b, bool there, int line, int pos,
                                 const RowTarget<kPass>& to) {
  const bool first = pos % kPass.stored_block() == 0;
  if constexpr (kPass.widened) {
    if (there && first) *reinterpret_cast<uint32_t*>(to.scale) = b.stored;
    if (there) store_codes<kPass>(to.codes, s, codes);
    return;
  }
  if (s.plain && !kPass.square) {
    static_assert(kPass.square || scale_bytes(kPass.scale) == 1);
    if (there && first) *to.scale = static_cast<uint8_t>(b.stored);
    if (there) store_codes<kPass>(to.codes, s, codes);
  } else if (there) {
    keep_here(pos);
    if (first && kPass.square && (s.linear_scales || kPass.scale == Format::fp32))
      store_scale<kPass>(s, m, line, pos / kPass.block(), b.stored);
    else if (first)
      *to.scale_of(s, line) = static_cast<uint8_t>(b.stored);
    store_codes<kPass>(to.codes_of(s, m, line, pos), s, codes);
  }
}
// Writes the padding of widened scales, if the last line is among a thread's `lines` from `line`
// on.
BLOCKSCALE_DEVICE void pad_widened(const Side& s, const MatrixAt& m, int line, int lines, int pos) {
  if (s.rows_behind == 0 || line + lines != s.lines || lines <= 0 || pos % kTile != 0) return;
  auto* to = reinterpret_cast<float*>(m.scales) +
             layout_offset_as<uint32_t>(Layout::mn_major, s.shape.scale_rows, s.scale_columns,
                                        s.lines, pos / kTile);
  for (int i = 0; i < s.rows_behind; ++i) to[i] = 0;
}
template <Pass kPass, class Values>
BLOCKSCALE_DEVICE void store_row_run(const Side& s, const MatrixAt& m, const RandomRuns& random,
                                     Values& values, const Block& b, int line, int pos,
                                     const RowTarget<kPass>& to) {
  store_row<kPass>(s, m, encode_row_run<kPass>(s, m, random, values, b, line), b, true, line, pos,
                   to);
}

}  // namespace blockscale::gpu
