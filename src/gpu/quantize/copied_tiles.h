// direct_tiles.h with the copy engine reading the input. A multiprocessor has one thread block,
// whose rows (threadIdx.y) act as thread blocks do there: each takes one of the block's tiles after
// another, and while it works on the columns of one, the next is being copied into shared memory.
#pragma once

#include "gpu/quantize/direct_tiles.h"

namespace blockscale::gpu {

struct CopiedParams {
  Source x;
  Side row, column;
  // Tiles are taken down bands of kSideways tiles across; the last band may have fewer.
  Divisor matrix, band, last;  // tiles per matrix, and per band; tiles across the last band
  uint32_t bands, tiles;       // bands per matrix; tiles in all

  BLOCKSCALE_DEVICE TileAt at(uint32_t n) const {
    const uint32_t batch = matrix.divide(n), b = band.divide(n);
    uint32_t row = n / kSideways;
    if (b == bands - 1)
      row = last.divide(n);
    else
      n %= kSideways;
    return {static_cast<int>(batch), static_cast<int>(row) * kTile,
            static_cast<int>(b * kSideways + n) * kTile};
  }
};

// State of a row of threads, besides the tile and the stage.
struct RowOfThreads : DirectMemory {
  MatrixAt row, column;
  int batch;     // of both
  TileAt at[2];  // of tiles in turn; batch -1: none
  CopyBarrier full;

  BLOCKSCALE_DEVICE static void sync() { sync_row<kDirectThreads>(); }
};
template <class Column>
struct CopiedMemory {
  struct alignas(128) Part {
    Bf16Tile tile;
    Stage<Column::kPass> stage;
    RowOfThreads here;
  };
  static constexpr int kRows = 3;  // four are no faster, with the registers that leaves
  static constexpr int kOuters = 64;
  Part part[kRows];
  uint32_t taken;           // how many of the block's tiles
  Outer outer[2][kOuters];  // of the first matrices, for rows and for columns
};

// The counterpart of OutputAt, found once per matrix.
struct OutputHere {
  const Side& side;
  const MatrixAt& here;

  template <Pass>
  BLOCKSCALE_DEVICE const MatrixAt& matrix(const TileAt&, const Outer&) const {
    return here;
  }
};
// Finds the outer scales of the first matrices, one per thread: a row of threads that goes from one
// matrix to the next would otherwise wait for memory.
template <Pass kPass, int kCount>
BLOCKSCALE_DEVICE void find_outers(const Side& s, Outer (&to)[kCount]) {
  const int batch = static_cast<int>(threadIdx.x);
  if (kPass.two_level() && batch < min(kCount, static_cast<int>(s.out.batch)))
    to[batch] = outer_of(s, batch);
}
template <Pass kPass, int kCount>
BLOCKSCALE_DEVICE void find_matrix(const Side& s, const TileAt& at, const Outer (&known)[kCount],
                                   MatrixAt& to) {
  if constexpr (kPass.present()) {
    const Outer outer = !kPass.two_level()  ? no_outer()
                        : at.batch < kCount ? known[at.batch]
                                            : outer_of(s, at.batch);
    to = matrix_at(s, at.batch, outer);
    if (s.out.spec.outer && at.row == 0 && at.column == 0) s.out.outer[at.batch] = outer.dec;
  }
}

// The counterpart of LineReader, which reads global memory.
struct TileReader {
  using Tile = Bf16Tile;
  using Run = RunAligned;
  const uint4* at;

  BLOCKSCALE_DEVICE TileReader(const Bf16Tile& tile, int line, int run)
      : at(&tile.chunk[line * Bf16Tile::kChunks + 2 * run]) {}
  BLOCKSCALE_DEVICE Run next() {
    const Run run{{at[0], at[1]}};
    at += Bf16Tile::kChunks;
    return run;
  }
};

// The counterpart of LoadedColumns: columns are read when they are needed, and once all threads
// have read the last ones, the next tile is asked for.
template <class Part, class Ask>
struct TileColumns {
  static constexpr bool kInRegisters = false;
  const Bf16Tile& tile;
  const Part& part;
  const Ask& ask;
  const uint32_t* words = &in_place(*part.words_of(tile));

  // The two of four columns from `column` on. After the first two, all threads have finished with
  // the previous tile's stage.
  BLOCKSCALE_DEVICE PairColumns next(int column) {
    PairColumns columns;
#pragma unroll
    for (int i = 0; i < kRun; ++i) columns.pair[i] = words[i * kTile / 2];
    ++words;
    RowOfThreads::sync();
    if (column != 0) ask();
    return columns;
  }
  BLOCKSCALE_DEVICE void both(PairColumns* to) const {
    part.read(tile, to);
    RowOfThreads::sync();
    ask();
  }
};

template <class Row, class Column>
__global__ void __launch_bounds__((kDirectThreads * CopiedMemory<Column>::kRows), 1)
    copied_kernel(const __grid_constant__ CopiedParams p) {
  after_previous(p);
  constexpr Pass kRow = Row::kPass, kColumn = Column::kPass;
  BLOCKSCALE_DYNAMIC_SHARED(bytes);
  auto& all = *reinterpret_cast<CopiedMemory<Column>*>(bytes);
  auto& memory = in_place(all.part[threadIdx.y]);
  RowOfThreads& here = memory.here;
  if (threadIdx.x == 0) {
    here.batch = -1;
    init(here.full, 1);
    if (threadIdx.y == 0) all.taken = 0;
  }
  if (threadIdx.y == 0) find_outers<kRow>(p.row, all.outer[0]);
  if (threadIdx.y == 1) find_outers<kColumn>(p.column, all.outer[1]);
  __syncthreads();
  // A thread block's tiles are gridDim.x apart; whichever row of threads is free takes the next.
  auto ask = [&](uint32_t turn) {
    if (threadIdx.x != 0) return;
    const uint32_t n = blockIdx.x + atomicAdd(&all.taken, 1) * gridDim.x;
    here.at[turn] = {-1, 0, 0};
    if (n >= p.tiles) return;
    const TileAt at = p.at(n);
    here.at[turn] = at;
    copy_tile(&memory.tile, sizeof memory.tile, p.x.map, at.column, at.row, at.batch, here.full);
  };
  ask(0);
  here.sync();
#pragma unroll 1
  for (uint32_t turn = 0;; turn ^= 1) {
    const TileAt at = here.at[turn];
    if (at.batch < 0) break;
    if (at.batch != here.batch) {
      here.sync();
      here.batch = at.batch;
      if (threadIdx.x == 32) find_matrix<kRow>(p.row, at, all.outer[0], here.row);
      if (threadIdx.x == 64) find_matrix<kColumn>(p.column, at, all.outer[1], here.column);
      here.sync();
    }
    wait(here.full, turn);
    if constexpr (kRow.present()) {
      const auto reader_at = [&](int line, int run, int) {
        return TileReader(memory.tile, line, run);
      };
      rows_of_tile<kRow>(OutputHere{p.row, here.row}, at, here, reader_at, [] {});
    }
    const auto column = [&] { return OutputHere{p.column, here.column}; };
    const auto ask_next = [&] { ask(turn ^ 1); };
    columns_of_tile<kColumn, Bf16Tile>(column, at, here, memory.stage, [&](const auto& part) {
      return TileColumns<std::decay_t<decltype(part)>, decltype(ask_next)>{memory.tile, part,
                                                                           ask_next};
    });
    here.sync();
    const TileAt same = here.at[turn];  // read again, not kept in registers
    store_stage<kColumn, ColumnPart<kColumn>::kColumns, kDirectThreads>(
        p.column, here.column, same.column, same.row, memory.stage);
  }
}

}  // namespace blockscale::gpu
