// Quantizing a tile along its rows: codes and scales are stored from registers.
#pragma once

#include "gpu/block.h"

namespace blockscale::gpu {

// The run at (r, c) of the tile after the transform, and its amax.
template <Pass kPass, class Tile>
struct RowValues {
  typename Tile::Run plain;
  PairRun transformed;
  uint32_t amax;

  BLOCKSCALE_DEVICE void load(const Tile& tile, const Side& s, int r, int c) {
    plain = tile.row(r, c);
    if (!transforms<kPass>(s)) {
      amax = plain.amax_bits();
      return;
    }
    plain.flip(static_cast<uint32_t>(s.out.spec.hadamard.mask_lo));
    float v[kRun];
    plain.unpack(v);
    transformed = hadamard16<Tile::kExactQuarter>(v);
    amax = transformed.amax_bits();
  }
  BLOCKSCALE_DEVICE void unpack(const Side& s, float* v) const {
    if (transforms<kPass>(s))
      transformed.unpack(v);
    else
      plain.unpack(v);
  }
};

// Runs of a thread: two of a tile, kRowStep rows apart.
inline constexpr int kRowStep = kThreads / kRunsPerLine;
inline constexpr int kRowRuns = kTile / kRowStep;

template <Pass kPass, class Loader, class Turn>
BLOCKSCALE_DEVICE void quantize_rows(Loader& loader, const typename Loader::Tile& tile,
                                     bool last_reader, const Side& s, const MatrixAt& m,
                                     const Rng& rng, const TileAt& at, BlockTables* tables,
                                     const Turn& turn) {
  using Tile = typename Loader::Tile;
  const bool square = is_square<kPass>(s);
  const int block = block_length<kPass>(s);
  const int pos = static_cast<int>(threadIdx.x) % kRunsPerLine * kRun;
  const int first = static_cast<int>(threadIdx.x) / kRunsPerLine;
  RowValues<kPass, Tile> values[kRowRuns];
#pragma unroll
  for (int i = 0; i < kRowRuns; ++i) values[i].load(tile, s, first + i * kRowStep, pos);
  if (last_reader) loader.release(turn.stage);
  uint32_t* table = tables->amax[turn.three];
  if (square) {
#pragma unroll
    for (int i = 0; i < kRowRuns; ++i) {
      if (block == kTile) {
        const uint32_t largest = warp_max(values[i].amax);
        if (threadIdx.x % 32 == 0) atomicMax(&table[0], largest);
      } else {
        atomicMax(&table[table_index<kPass>(s, first + i * kRowStep, pos)], values[i].amax);
      }
    }
    __syncthreads();
    tables->clear(turn.three == 0 ? 2 : turn.three - 1);
  }
  const int c = at.column + pos;
#pragma unroll
  for (int i = 0; i < kRowRuns; ++i) {
    const int line = first + i * kRowStep, r = at.row + line;
    uint32_t a = values[i].amax;
    if (square) {
      a = table[table_index<kPass>(s, line, pos)];
    } else {
#pragma unroll
      for (int step = 1; step < kRunsPerLine; step *= 2)
        if (step * kRun < block) a = max(a, shuffle_xor(a, step));
    }
    if (r >= s.lines || c >= s.padded) continue;
    const Block b = block_of<kPass>(s, m.outer, a);
    if (pos % block == 0) store_scale<kPass>(s, m, r, c / block, b.stored);
    float v[kRun];
    values[i].unpack(s, v);
    const Codes codes =
        encode_run<kPass>(s, v, b.inv, bit_cast<float>(a), rng, 0, m.line + r, s.origin_pos + c);
    uint8_t* to = codes_at<kPass>(s, m, r, c);
    if (is_fp4<kPass>(s))
      *reinterpret_cast<uint2*>(to) = {codes.word[0], codes.word[1]};
    else
      *reinterpret_cast<uint4*>(to) = {codes.word[0], codes.word[1], codes.word[2], codes.word[3]};
  }
}

}  // namespace blockscale::gpu
