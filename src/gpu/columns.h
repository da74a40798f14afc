// Quantizing a tile down its columns, which leave transposed: codes and scales are collected in
// shared memory, so that each line of codes is written in pieces of 64 or 128 bytes.
#pragma once

#include "gpu/block.h"

namespace blockscale::gpu {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Codes and scales of a tile's columns on their way out.
template <Pass kPass>
struct Stage {
  static constexpr int kCodeBytes = kTile * kTile / (kPass.fp4() ? 2 : 1);
  uint4 codes[kCodeBytes / 16];
  uint32_t scales[kTile * kRunsPerLine / 4];  // of scale_bytes each

  template <class Scale>
  BLOCKSCALE_DEVICE Scale& scale(int line, int blocks, int block) {
    return reinterpret_cast<Scale*>(scales)[line * blocks + block];
  }
};

// Where run `g` of a line lies in the stage: 16 bytes (8 for FP4) apart within a line, permuted so
// that neither the writers (32 pairs of lines at one g) nor the readers (one line) share banks.
template <bool kFp4>
BLOCKSCALE_DEVICE int stage_offset(int line, int g) {
  if (kFp4) return (line ^ (line >> 4 & 1)) * (kTile / 2) + (g ^ (line >> 1 & 7)) * 8;
  return line * kTile + (g ^ (line >> 1 & 7)) * 16;
}

// Whether threads of several warps see parts of one block.
template <Pass kPass>
BLOCKSCALE_DEVICE bool shares_blocks(const Side& s) {
  return is_square<kPass>(s) || block_length<kPass>(s) != kRun;
}

// Columns c and c + 1 of the tile down one run of rows, and their amaxes.
template <Pass kPass, class Tile>
struct ColumnValues {
  typename Tile::Columns plain;
  PairRun transformed[2];
  uint32_t amax[2];

  BLOCKSCALE_DEVICE void load(const Tile& tile, const Side& s, int r, int c) {
    plain = tile.columns(r, c);
    if (!transforms<kPass>(s)) {
      plain.amax_bits(amax);
      return;
    }
    plain.flip(static_cast<uint32_t>(s.out.spec.hadamard.mask_lo));
    float v[kRun];
    plain.template unpack<0>(v);
    transformed[0] = hadamard16<Tile::kExactQuarter>(v);
    plain.template unpack<1>(v);
    transformed[1] = hadamard16<Tile::kExactQuarter>(v);
    amax[0] = transformed[0].amax_bits();
    amax[1] = transformed[1].amax_bits();
  }
  template <int kWhich>
  BLOCKSCALE_DEVICE void unpack(const Side& s, float* v) const {
    if (transforms<kPass>(s))
      transformed[kWhich].unpack(v);
    else
      plain.template unpack<kWhich>(v);
  }
};

// Scales from the stage to memory. Where four of a line lie together, as they do in `linear` and
// `nv_128x4`, they go as one word.
template <Pass kPass>
BLOCKSCALE_DEVICE void store_staged_scales(const Side& s, const MatrixAt& m, int tile_line,
                                           int tile_pos, int lines, Stage<kPass>& stage) {
  const int block = block_length<kPass>(s), blocks = kTile / block;
  const int first_block = tile_pos / block;
  const Layout layout = s.out.layout.scales;
  const bool words = !has_wide_scales<kPass>(s) && s.shape.scale_lines == 1 &&
                     (layout == Layout::linear || layout == Layout::nv_128x4) &&
                     (s.blocks | s.scale_columns) % 4 == 0 &&
                     reinterpret_cast<uintptr_t>(m.scales) % 4 == 0;
  if (words) {
    const int per_line = blocks / 4;
    for (int i = threadIdx.x; i < kTile * per_line; i += kThreads) {
      const int line = i / per_line, b = first_block + i % per_line * 4;
      if (line >= lines || b >= s.blocks) continue;
      const int64_t at = layout == Layout::linear
                             ? static_cast<int64_t>(tile_line + line) * s.scale_columns + b
                             : layout_offset(layout, s.lines, s.scale_columns, tile_line + line, b);
      *reinterpret_cast<uint32_t*>(m.scales + at) = stage.scales[i];
    }
    return;
  }
  for (int i = threadIdx.x; i < kTile * blocks; i += kThreads) {
    const int line = i / blocks, b = i % blocks;
    if (line >= lines || first_block + b >= s.blocks) continue;
    store_scale<kPass>(s, m, tile_line + line, first_block + b,
                       has_wide_scales<kPass>(s) ? stage.template scale<uint32_t>(line, blocks, b)
                                                 : stage.template scale<uint8_t>(line, blocks, b));
  }
}

// Codes and scales from the stage to memory; `line` and `pos` are those of the tile.
template <Pass kPass>
BLOCKSCALE_DEVICE void store_stage(const Side& s, const MatrixAt& m, int tile_line, int tile_pos,
                                   Stage<kPass>& stage) {
  const auto* staged = reinterpret_cast<const uint8_t*>(stage.codes);
  const bool fp4 = is_fp4<kPass>(s);
  const int runs = min(kRunsPerLine, (s.padded - tile_pos) / kRun);
  const int lines = min(kTile, s.lines - tile_line);
  // FP4 goes in pairs of runs, 16 bytes, where lines are whole multiples of that.
  const bool pairs = fp4 && s.line_bytes % 16 == 0 && s.padded % (2 * kRun) == 0 &&
                     reinterpret_cast<uintptr_t>(m.codes) % 16 == 0;
  const int step = pairs ? 2 : 1, per_line = kRunsPerLine / step;
  for (int i = threadIdx.x; i < kTile * per_line; i += kThreads) {
    const int line = i / per_line, g = i % per_line * step;
    if (line >= lines || g >= runs) continue;
    uint8_t* to = codes_at<kPass>(s, m, tile_line + line, tile_pos + g * kRun);
    if (!fp4) {
      *reinterpret_cast<uint4*>(to) =
          *reinterpret_cast<const uint4*>(staged + stage_offset<false>(line, g));
      continue;
    }
    const uint2 low = *reinterpret_cast<const uint2*>(staged + stage_offset<true>(line, g));
    if (pairs) {
      const uint2 high = *reinterpret_cast<const uint2*>(staged + stage_offset<true>(line, g + 1));
      *reinterpret_cast<uint4*>(to) = {low.x, low.y, high.x, high.y};
    } else {
      *reinterpret_cast<uint2*>(to) = low;
    }
  }
  store_staged_scales<kPass>(s, m, tile_line, tile_pos, lines, stage);
}

template <Pass kPass, class Loader, class Turn>
BLOCKSCALE_DEVICE void quantize_columns(Loader& loader, const typename Loader::Tile& tile,
                                        const Side& s, const MatrixAt& m, const Rng& rng,
                                        const TileAt& at, BlockTables* tables, Stage<kPass>& stage,
                                        const Turn& turn) {
  const bool square = is_square<kPass>(s);
  const int block = block_length<kPass>(s);
  // A warp: 32 pairs of columns, half of the tile, by one run of rows.
  const int warp = static_cast<int>(threadIdx.x) / 32, g = warp % kRunsPerLine;
  const int first = warp / kRunsPerLine * (kTile / 2) + static_cast<int>(threadIdx.x) % 32 * 2;
  const bool shared_blocks = shares_blocks<kPass>(s);
  ColumnValues<kPass, typename Loader::Tile> values;
  values.load(tile, s, g * kRun, first);
  loader.release(turn.stage);
  uint32_t* table = tables->amax[turn.three];
  if (shared_blocks) {
    if (square && block == kTile) {
      const uint32_t a = warp_max(max(values.amax[0], values.amax[1]));
      if (threadIdx.x % 32 == 0) atomicMax(&table[0], a);
    } else {
      atomicMax(&table[table_index<kPass>(s, first, g * kRun)], values.amax[0]);
      atomicMax(&table[table_index<kPass>(s, first + 1, g * kRun)], values.amax[1]);
    }
    __syncthreads();
    tables->clear(turn.three == 0 ? 2 : turn.three - 1);
  }
  const bool fp4 = is_fp4<kPass>(s);
  auto* staged = reinterpret_cast<uint8_t*>(stage.codes);
  auto column = [&](auto which) {
    constexpr int kWhich = decltype(which)::value;
    const int line = first + kWhich;
    const uint32_t a =
        shared_blocks ? table[table_index<kPass>(s, line, g * kRun)] : values.amax[kWhich];
    const Block b = block_of<kPass>(s, m.outer, a);
    float v[kRun];
    values.template unpack<kWhich>(s, v);
    const Codes codes =
        encode_run<kPass>(s, v, b.inv, bit_cast<float>(a), rng, 1, m.line + at.column + line,
                          s.origin_pos + at.row + g * kRun);
    if (g * kRun % block == 0) {
      if (has_wide_scales<kPass>(s))
        stage.template scale<uint32_t>(line, kTile / block, g * kRun / block) = b.stored;
      else
        stage.template scale<uint8_t>(line, kTile / block, g * kRun / block) =
            static_cast<uint8_t>(b.stored);
    }
    if (fp4)
      *reinterpret_cast<uint2*>(staged + stage_offset<true>(line, g)) = {codes.word[0],
                                                                         codes.word[1]};
    else
      *reinterpret_cast<uint4*>(staged + stage_offset<false>(line, g)) = {
          codes.word[0], codes.word[1], codes.word[2], codes.word[3]};
  };
  column(Constant<0>{});
  column(Constant<1>{});
  __syncthreads();
  store_stage<kPass>(s, m, at.column, at.row, stage);
}

}  // namespace blockscale::gpu
