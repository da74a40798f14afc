// A thread's part of a tile down its columns: straight from global memory, or out of shared memory.
#pragma once

#include "gpu/quantize/direct.h"
#include "gpu/quantize/tile_around.h"

namespace blockscale::gpu {

// Loads kColumns BF16 at p as pairs; `count` of them exist. p is aligned to their size.
template <int kColumns>
BLOCKSCALE_DEVICE void load_pairs(const uint16_t* p, int count, uint32_t* pair) {
  if (count < kColumns) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) pair[i] = 0;
#pragma unroll
    for (int i = 0; i < kColumns - 1; ++i)
      if (i < count) pair[i / 2] |= static_cast<uint32_t>(p[i]) << (16 * (i % 2));
  } else if (kColumns == 4) {
    const uint2 four = *reinterpret_cast<const uint2*>(p);
    pair[0] = four.x;
    pair[1] = four.y;
  } else {
    pair[0] = *reinterpret_cast<const uint32_t*>(p);
  }
}

// A thread's part of a tile down its columns: four columns of 16 rows or, with blocks of 32, two
// columns of 32 rows, so that no block is shared between threads. A warp has 128 or 64 columns.
template <Pass kPass>
struct ColumnPart {
  static constexpr int kColumns = kPass.block() == 2 * kRun ? 2 : 4;
  static constexpr int kRuns = 4 / kColumns, kAcross = kTile / (32 * kColumns);
  int first, run;  // the first column, and the first run of rows, in the tile

  BLOCKSCALE_DEVICE ColumnPart() {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    first = (warp % kAcross * 32 + lane) * kColumns;
    run = warp / kAcross * kRuns;
  }
  // Loads both pairs of columns, or both runs of one pair; `missing` where none of it exists.
  BLOCKSCALE_DEVICE void load(Bf16In<true>, const Source& x, const TileAt& at, PairColumns* in,
                              uint32_t missing = 0) const {
    const auto* row =
        static_cast<const uint8_t*>(x.data) +
        2 * (at.batch * x.batch_stride + (at.row + run * kRun) * x.row_stride + at.column + first);
    const auto pitch = static_cast<uint32_t>(2 * x.row_stride);
    const int rows = x.rows - at.row - run * kRun, count = x.columns - at.column - first;
    auto load_rows = [&](bool whole) {
#pragma unroll
      for (int i = 0; i < kRuns * kRun; ++i, row += pitch) {
        uint32_t pair[kColumns / 2] = {};
        const auto* p = reinterpret_cast<const uint16_t*>(row);
        if (whole || i < rows) load_pairs<kColumns>(p, whole ? kColumns : count, pair);
#pragma unroll
        for (int j = 0; j < kColumns / 2; ++j) in[j + i / kRun].pair[i % kRun] = pair[j];
      }
    };
    if (rows >= kRuns * kRun && count >= kColumns)
      load_rows(true);
    else if (rows > 0 && count > 0)
      load_rows(false);
    else
#pragma unroll
      for (int i = 0; i < kRun; ++i) in[0].pair[i] = in[1].pair[i] = missing;
  }
  BLOCKSCALE_DEVICE void load(FloatsIn, const Source& x, const TileAt& at, FloatColumns* in,
                              uint32_t = 0) const {
    const FloatMemory memory(x);
    constexpr int kRows = kRuns * kRun;
    const int row = at.row + run * kRun, column = at.column + first;
    load_columns<kColumns, kRows>(memory, memory.at(x, at.batch, row, column), x.rows - row,
                                  x.columns - column,
                                  [&](int i, int c) -> float& { return element(in, i, c); });
  }
  // Row i of column c.
  BLOCKSCALE_DEVICE static float& element(FloatColumns* in, int i, int c) {
    return kColumns == 4 ? in[c / 2].run[c % 2].value[i] : in[i / kRun].run[c].value[i % kRun];
  }
  // The same from a tile in shared memory.
  BLOCKSCALE_DEVICE void read(const Bf16Tile& tile, PairColumns* in) const {
    const uint32_t* words = words_of(tile);
#pragma unroll
    for (int i = 0; i < kRuns * kRun; ++i, words += kTile / 2) {
      if constexpr (kColumns == 4) {
        const uint2 four = *reinterpret_cast<const uint2*>(words);
        in[0].pair[i] = four.x;
        in[1].pair[i] = four.y;
      } else {
        in[i / kRun].pair[i % kRun] = *words;
      }
    }
  }
  // The first columns of this part, in its first row.
  BLOCKSCALE_DEVICE const uint32_t* words_of(const Bf16Tile& tile) const {
    return reinterpret_cast<const uint32_t*>(tile.chunk) + (run * kRun * kTile + first) / 2;
  }
  // The same from a tile whose rows start anywhere: zeros outside the matrix.
  BLOCKSCALE_DEVICE void read(const TileAround& tile, const Source& x, const TileAt& at,
                              PairColumns* in) const {
    const auto* row =
        reinterpret_cast<const uint8_t*>(tile.chunk) + run * kRun * TileAround::kPitch + 2 * first;
    const auto stride = static_cast<uint32_t>(x.row_stride);
    uint32_t skew = TileAround::skew(x, at, run * kRun);
    constexpr int kSame = 8;  // skews of rows this many apart differ by 16, or not at all
#pragma unroll
    for (int i = 0; i < kSame; ++i, skew = (skew + 2 * stride) % 32) {
      uint32_t before = skew;
#pragma unroll
      for (int r = i; r < kRuns * kRun; r += kSame, before ^= stride % 2 * 16) {
        const auto* word =
            reinterpret_cast<const uint32_t*>(row + r * TileAround::kPitch + before / 4 * 4);
#pragma unroll
        for (int j = 0; j < kColumns / 2; ++j)
          in[j + r / kRun].pair[r % kRun] =
              shift_right_in(word[j + 1], word[j], static_cast<int>(skew % 4 * 8));
      }
    }
    const int rows = x.rows - at.row - run * kRun, count = x.columns - at.column - first;
    if (rows >= kRuns * kRun && count >= kColumns) return;
    const uint32_t left[] = {pair_mask(count), pair_mask(count - 2)};
#pragma unroll
    for (int i = 0; i < kRuns * kRun; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j)
        in[j + i / kRun].pair[i % kRun] &= i < rows ? left[j] : 0;
    }
  }
  // The mask of a pair of which `count` elements exist.
  BLOCKSCALE_DEVICE static uint32_t pair_mask(int count) {
    return count >= 2 ? ~0u : count == 1 ? 0xFFFF : 0;
  }
  BLOCKSCALE_DEVICE void keep(const PairColumns* in, KeptTile& tile) const {
    uint8_t* to = tile.at(run * kRun, first);
#pragma unroll
    for (int i = 0; i < kRuns * kRun; ++i, to += 2 * kTile) {
      const PairColumns& pairs = in[i / kRun];
      if constexpr (kColumns == 4)
        *reinterpret_cast<uint2*>(to) = {pairs.pair[i], in[1].pair[i]};
      else
        *reinterpret_cast<uint32_t*>(to) = pairs.pair[i % kRun];
    }
  }
  BLOCKSCALE_DEVICE void keep(FloatColumns* in, KeptFloats& tile) const {
    float* to = tile.at(run * kRun, first);
#pragma unroll
    for (int i = 0; i < kRuns * kRun; ++i, to += kTile) {
      if constexpr (kColumns == 4)
        *reinterpret_cast<float4*>(to) = {element(in, i, 0), element(in, i, 1), element(in, i, 2),
                                          element(in, i, 3)};
      else
        *reinterpret_cast<uint2*>(to) = {bit_cast<uint32_t>(element(in, i, 0)),
                                         bit_cast<uint32_t>(element(in, i, 1))};
    }
  }
};

}  // namespace blockscale::gpu
