// The quantizer: one kernel for every spec, axis and pair of axes.
//
// A block of threads walks over tiles of 128 x 128 elements; while it works on one, the next is on
// its way into shared memory. A thread works on runs of 16 elements along the axis. With both axes
// wanted each tile is read once for both.
#pragma once

#include <type_traits>

#include "gpu/quantize/columns.h"
#include "gpu/quantize/rows.h"

namespace blockscale::gpu {

// Shared memory of one direction. Only along columns, and where blocks are squares, does a block
// meet several warps.
template <Pass kPass, bool kColumns>
inline constexpr bool kHasTables = kPass.any() || kPass.square ||
                                   (kColumns && kPass.block() != kRun);
template <Pass kPass>
struct RowMemory {
  BlockSpace<kHasTables<kPass, false>> tables;
};
template <Pass kPass>
struct ColumnMemory {
  BlockSpace<kHasTables<kPass, true>> tables;
  Stage<kPass> stage[2];  // one is filled while the other may still be read
};
struct NoMemory {
  BlockSpace<false> tables;
};

template <Pass kRow, Pass kColumn, class Loader>
struct Shared {
  static constexpr int kStages = kColumn.present() ? 2 : Loader::kStages;
  typename Loader::Tile tile[kStages];
  [[no_unique_address]] std::conditional_t<kRow.present(), RowMemory<kRow>, NoMemory> row;
  [[no_unique_address]] std::conditional_t<kColumn.present(), ColumnMemory<kColumn>, NoMemory>
      column;
  typename Loader::Shared loader;
};

// The first tile of a matrix stores its outer scale.
BLOCKSCALE_DEVICE void store_outer(const Side& s, const TileAt& at, const MatrixAt& m) {
  if (s.out.spec.outer && at.row == 0 && at.column == 0 && threadIdx.x == 0)
    s.out.outer[at.batch] = m.outer.dec;
}

// What a kernel knows of one output: as it was given, or with the extents of the group at hand.
template <bool kGrouped>
struct Current {
  const Side& side;
  MatrixAt matrix;

  BLOCKSCALE_DEVICE explicit Current(const Side& s) : side(s) {}
  // To the matrix of a tile, if it is another than `before`.
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
template <class Row, class Column, class Loader, bool kGrouped>
__global__ void __launch_bounds__(kThreads, Loader::kBlocks)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
  after_previous(p);
  constexpr Pass kRow = Row::kPass, kColumn = Column::kPass;
  constexpr bool kRows = kRow.present(), kColumns = kColumn.present();
  using Memory = Shared<kRow, kColumn, Loader>;
  BLOCKSCALE_DYNAMIC_SHARED(memory);
  auto& shared = *reinterpret_cast<Memory*>(memory);
  constexpr int kAhead = Memory::kStages - 1;

  Loader loader(shared.loader);
  WalkOver<kColumns, kGrouped> walk(p), ahead(p);
  int left = walk.count(p);  // tiles
  for (int i = 0; i < kAhead; ++i, ahead.advance(p))
    if (left > i) loader.begin(p.x, ahead.source(), shared.tile[i], i);
  shared.row.tables.clear();
  shared.column.tables.clear();
  __syncthreads();

  Current<kGrouped && kRows> row(p.row);
  Current<kGrouped && kColumns> column(p.column);
  int before = -1;
  Turn<kAhead + 1> turn;
#pragma unroll 1
  for (; left > 0; --left, turn.advance(), walk.advance(p)) {
    auto& tile = shared.tile[turn.stage];
    const TileAt at = walk.at();
    loader.finish(tile, turn.stage);
    if (loader.asks()) {
      const int stage = turn.stage == 0 ? kAhead : turn.stage - 1;
      if (left > kAhead) loader.begin(p.x, ahead.source(), shared.tile[stage], stage);
      ahead.advance(p);
    }
    if constexpr (kGrouped) cut(tile, walk.rows_left());
    if constexpr (kRows) {
      row.move(p.plan, 0, at, before);
      quantize_rows<kRow>(loader, tile, !kColumns, row.side, row.matrix, at,
                          shared.row.tables.get(), turn);
    }
    if constexpr (kColumns) {
      column.move(p.plan, 1, at, before);
      quantize_columns<kColumn>(loader, tile, column.side, column.matrix, at,
                                shared.column.tables.get(), shared.column.stage[turn.two], turn);
    }
    before = at.batch;
  }
}

}  // namespace blockscale::gpu
