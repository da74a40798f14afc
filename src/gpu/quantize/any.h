// The quantizer for whatever no other kernel is compiled for: any spec, dtype and strides, along
// either axis or both.
//
// A thread block walks over tiles of 128 x 128 elements; while it works on one, the next is being
// loaded into registers. A thread works on runs of 16 elements along the axis. If both axes are
// wanted, each tile is read once for both.
#pragma once

#include "gpu/quantize/columns.h"
#include "gpu/quantize/loaders.h"
#include "gpu/quantize/rows.h"

namespace blockscale::gpu {

inline constexpr Pass kAny{Encoder::any};

// Amaxes of blocks that several threads share. Three tables take turns, with one barrier per tile
// between filling and reading: after it, all threads have read the previous tile's table, which is
// cleared for the tile after next.
struct BlockTables {
  static constexpr int kSize = kTile * kTile / 32;
  static_assert(kSize == kThreads);
  uint32_t amax[3][kSize];

  BLOCKSCALE_DEVICE void clear(int which) { amax[which][threadIdx.x] = 0; }
  // Entry of the block of (line, pos), both within the tile.
  BLOCKSCALE_DEVICE static int index(const QuantSpec& spec, int line, int pos) {
    const int block = spec.block;
    return spec.square ? line / block * (kTile / block) + pos / block : pos / block * kTile + line;
  }
};

struct AnyMemory {
  FloatTile tile[2];
  BlockTables rows, columns;
  Stage<kAny> stage[2];  // of columns: one is filled while the other may still be read
  AnyLoader::Shared loader;
};

BLOCKSCALE_DEVICE void quantize_rows(const FloatTile& tile, const Side& s, const MatrixAt& m,
                                     const TileAt& at, BlockTables& tables, int third) {
  const QuantSpec& spec = s.out.spec;
  const int pos = static_cast<int>(threadIdx.x) % kRunsPerLine * kRun;
  const int first = static_cast<int>(threadIdx.x) / kRunsPerLine;
  RowValues<kAny, FloatTile> values[kRowRuns];
#pragma unroll
  for (int i = 0; i < kRowRuns; ++i) values[i].take(tile.row(first + i * kRowStep, pos), s);
  uint32_t* table = tables.amax[third];
  if (spec.square) {
#pragma unroll
    for (int i = 0; i < kRowRuns; ++i) {
      if (spec.block == kTile) {
        const uint32_t largest = warp_max(values[i].amax);
        if (threadIdx.x % 32 == 0) atomicMax(&table[0], largest);
      } else {
        atomicMax(&table[tables.index(spec, first + i * kRowStep, pos)], values[i].amax);
      }
    }
    __syncthreads();
    tables.clear(third == 0 ? 2 : third - 1);
  }
  const int c = at.column + pos;
  const RandomRuns random = random_runs<kAny>(s, m, 0, c);
#pragma unroll
  for (int i = 0; i < kRowRuns; ++i) {
    const int line = first + i * kRowStep, r = at.row + line;
    const uint32_t amax = spec.square ? table[tables.index(spec, line, pos)]
                                      : row_block_amax<kAny>(s, values[i].amax);
    if (r >= s.lines || c >= s.padded) continue;
    const Block b = block_of<kAny>(s, m.outer, amax, [&](Block& b) { values[i].cut(s, b); });
    if (c % spec.block == 0) store_scale<kAny>(s, m, r, c / spec.block, b.stored);
    store_codes<kAny>(codes_at<kAny>(s, m, r, c), s,
                      encode_row_run<kAny>(s, m, random, values[i], b, r));
  }
}

BLOCKSCALE_DEVICE void quantize_columns(const FloatTile& tile, const Side& s, const MatrixAt& m,
                                        const TileAt& at, BlockTables& tables, Stage<kAny>& stage,
                                        int third) {
  const QuantSpec& spec = s.out.spec;
  // A warp has 32 pairs of columns, half of the tile, by one run of rows.
  const int warp = static_cast<int>(threadIdx.x) / 32, g = warp % kRunsPerLine;
  const int first = warp / kRunsPerLine * (kTile / 2) + static_cast<int>(threadIdx.x) % 32 * 2;
  // Whether threads of several warps hold parts of one block.
  const bool shares_blocks = spec.square || spec.block != kRun;
  ColumnValues<kAny, FloatTile> values;
  values.take(tile.columns(g * kRun, first), s);
  uint32_t* table = tables.amax[third];
  if (shares_blocks) {
    if (spec.square && spec.block == kTile) {
      const uint32_t a = warp_max(max(values.amax[0], values.amax[1]));
      if (threadIdx.x % 32 == 0) atomicMax(&table[0], a);
    } else {
      atomicMax(&table[tables.index(spec, first, g * kRun)], values.amax[0]);
      atomicMax(&table[tables.index(spec, first + 1, g * kRun)], values.amax[1]);
    }
    __syncthreads();
    tables.clear(third == 0 ? 2 : third - 1);
  }
  const RandomRuns random = random_runs<kAny>(s, m, 1, at.row + g * kRun);
  auto column = [&](auto which) {
    constexpr int kWhich = decltype(which)::value;
    const int line = first + kWhich;
    const uint32_t a =
        shares_blocks ? table[tables.index(spec, line, g * kRun)] : values.amax[kWhich];
    const Block b =
        block_of<kAny>(s, m.outer, a, [&](Block& b) { values.template cut<kWhich>(s, b); });
    float v[kRun];
    const float inv = unpack_for<kAny>(
        b, [&](float* to) { values.template unpack<kWhich>(s, to); }, v);
    const Codes codes = encode_run<kAny>(s, v, values.template signs<kWhich>(s), inv, random,
                                         m.line + at.column + line);
    stage_codes<kAny, 2>(s, stage, codes, line, g);
    if (g * kRun % spec.block == 0) stage_scale<kAny>(s, stage, b.stored, line, g);
  };
  column(Constant<0>{});
  column(Constant<1>{});
  __syncthreads();
  store_stage<kAny, 2, kThreads>(s, m, at.column, at.row, stage);
}

// The first tile of a matrix stores its outer scale.
BLOCKSCALE_DEVICE void store_outer(const Side& s, const TileAt& at, const MatrixAt& m) {
  if (s.out.spec.outer && at.row == 0 && at.column == 0 && threadIdx.x == 0)
    s.out.outer[at.batch] = m.outer.dec;
}

// One output: as it was given, or with the extents of the current group.
template <bool kGrouped>
struct Current {
  const Side& side;
  MatrixAt matrix;

  BLOCKSCALE_DEVICE explicit Current(const Side& s) : side(s) {}
  // Moves to the matrix of a tile, if it differs from `before`.
  BLOCKSCALE_DEVICE void move(const Plan&, int, const TileAt& at, int before) {
    if (at.batch != before) matrix = matrix_at(side, at.batch, outer_of(side, at.batch));
    store_outer(side, at, matrix);
  }
};
template <>
struct Current<true> {
  const Side& whole;
  Side side;
  MatrixAt matrix{};

  BLOCKSCALE_DEVICE explicit Current(const Side& s) : whole(s), side(s) {}
  BLOCKSCALE_DEVICE void move(const Plan& plan, int which, const TileAt& at, int before) {
    if (at.batch != before)
      matrix = group_at(side, whole, plan, which, at.batch, outer_of(whole, at.batch));
  }
};

template <bool kRows, bool kColumns, bool kGrouped>
__global__ void __launch_bounds__(kThreads, AnyLoader::kBlocks)
    any_kernel(const __grid_constant__ QuantizeParams p) {
  after_previous(p);
  BLOCKSCALE_DYNAMIC_SHARED(bytes);
  auto& memory = *reinterpret_cast<AnyMemory*>(bytes);
  AnyLoader loader(memory.loader);
  WalkOver<kColumns, kGrouped> walk(p), ahead(p);
  int left = walk.count(p);  // tiles
  if (left > 0) loader.begin(p.x, ahead.source(), memory.tile[0], 0);
  ahead.advance(p);
  for (int i = 0; i < 2; ++i) memory.rows.clear(i), memory.columns.clear(i);
  __syncthreads();

  Current<kGrouped && kRows> row(p.row);
  Current<kGrouped && kColumns> column(p.column);
  int before = -1;
  Ring<2> ring;
#pragma unroll 1
  for (; left > 0; --left, ring.advance(), walk.advance(p)) {
    auto& tile = memory.tile[ring.stage];
    const TileAt at = walk.at();
    loader.finish(tile, ring.stage);
    if (left > 1) loader.begin(p.x, ahead.source(), tile, ring.stage);
    ahead.advance(p);
    if constexpr (kGrouped) cut(tile, walk.rows_left());
    if constexpr (kRows) {
      row.move(p.plan, 0, at, before);
      quantize_rows(tile, row.side, row.matrix, at, memory.rows, ring.three);
    }
    if constexpr (kColumns) {
      column.move(p.plan, 1, at, before);
      quantize_columns(tile, column.side, column.matrix, at, memory.columns,
                       memory.stage[ring.stage], ring.three);
    }
    before = at.batch;
  }
}

}  // namespace blockscale::gpu
