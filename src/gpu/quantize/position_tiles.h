// direct_tiles.h for groups whose columns are in linear layouts: a line of those holds the groups
// one after another, each from a multiple of a block on, so a tile is 128 positions of the lines,
// whichever groups they belong to. Every warp has one block of positions, hence rows of one group.
// So tiles are whole, store aligned pieces of lines, and are as many as those of one matrix.
#pragma once

#include "gpu/quantize/direct_tiles.h"

namespace blockscale::gpu {

// Whether no block of the columns is shared between warps. Rows, if any, are not in squares, whose
// scales lie by positions and whose codes do not.
BLOCKSCALE_HD constexpr bool goes_by_positions(const Pass& row, const Pass& column) {
  return column.present() && column.stored_block() < kTile && !row.square;
}

// The rows of x at a block of positions: row (position + shift), up to `end`. Rows of no group lie
// behind those of the groups, as if they were one more.
struct RowsAt {
  int group;         // or, if `none`, as many as there are groups
  int shift, end;    // `end` is a position
  bool none, wrong;  // wrong: offsets decrease or pass the end; then no row is in a group
};

// Finds the rows at `position`, in every warp separately, as find_tile() does. Groups begin at
// multiples of `mask` + 1.
BLOCKSCALE_DEVICE RowsAt find_rows(const GroupGrid& grid, int mask, int position) {
  const int lane = static_cast<int>(threadIdx.x) % 32, count = static_cast<int>(grid.groups.count);
  // Of the groups that begin at or before the position: how many, how far the last one lies behind
  // its rows, and the position where it ends. None of these falls from group to group.
  uint32_t groups = 0, shift = 0, end = 0;
  uint32_t before = 0;  // positions of the groups of earlier rounds
  bool wrong = false;
#pragma unroll 1
  for (int base = 0; base < count; base += 32) {
    const WarpEnds ends(grid.groups, base, grid.rows);
    const auto rows = static_cast<uint32_t>(ends.end - ends.begin);
    const auto size = static_cast<uint32_t>(round_up_by(static_cast<int>(rows), mask));
    uint32_t sum = size;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const uint32_t other = shuffle_up(sum, by);
      if (lane >= by) sum += other;
    }
    const uint32_t first = before + sum - size;
    if (base + lane < count && first <= static_cast<uint32_t>(position)) {
      ++groups;
      shift = first - static_cast<uint32_t>(ends.begin), end = first + rows;
    }
    wrong |= ends.wrong;
    if (base + 32 < count) before += warp_sum(size);
  }
  groups = warp_sum(groups), shift = warp_max(shift), end = warp_max(wrong ? ~0u : end);
  if (end == ~0u) return {count, 0, grid.rows, true, true};
  const int own = -static_cast<int>(shift), rows_end = static_cast<int>(end);
  const int behind = round_up_by(rows_end, mask);
  if (position < behind) return {static_cast<int>(groups) - 1, own, rows_end, false, false};
  const int none = rows_end + own - behind;  // from `behind` to the row after the last group's
  return {count, none, grid.rows - none, true, false};
}

template <class Row, class Column>
struct PositionMemory {
  TileMemory<Row, Column, Bf16In<true>> tile;
  RowsAt rows[kDirectWarps];  // of every warp
  int group[2];               // that the outer scales in `tile` belong to
};

// One output for the rows of a warp, in coordinates of positions. Along the rows, a line of codes
// or scales lies where its row of x does.
template <int kOperand>
struct OutputAtRows {
  Side side;
  int group, shift;
  const int& shared_group;

  BLOCKSCALE_DEVICE OutputAtRows(const Side& whole, const RowsAt& rows, const int& shared_group)
      : side(whole), group(rows.group), shift(rows.shift), shared_group(shared_group) {
    if (kOperand == 0) side.lines = rows.end;
  }
  template <Pass kPass>
  BLOCKSCALE_DEVICE MatrixAt matrix(const TileAt&, const Outer& shared) const {
    Outer outer = no_outer();
    if (kPass.two_level()) {
      if (group == shared_group)
        outer = shared;
      else if (group < static_cast<int>(side.out.groups.count))
        outer = outer_of(side, group);
    }
    MatrixAt m = matrix_at(side, 0, outer);
    if (kOperand == 0) {
      // Widened scales are mn_major: those of neighbouring lines are adjacent.
      const int scale_step = kPass.widened ? static_cast<int>(sizeof(float)) : side.scale_step;
      m.codes += int64_t{1} * shift * side.line_bytes;
      m.scales += int64_t{1} * shift * scale_step;
      m.line += static_cast<uint32_t>(shift);
    }
    return m;
  }
};

// What quantize_tile() asks, answered for each warp.
struct AtPositions {
  static constexpr bool kFinds = false, kOneGroup = false;
  const TilesParams& p;
  const RowsAt& rows;    // of this warp
  const RowsAt& stored;  // the same in shared memory, read where registers are scarce
  int* shared_group;

  BLOCKSCALE_DEVICE void find(int) const {}
  BLOCKSCALE_DEVICE Outer outer_by_warp(int operand, const TileAt&) const {
    shared_group[operand] = rows.none ? -1 : rows.group;
    return outer_of(operand == 0 ? p.row : p.column, rows.none ? 0 : rows.group);
  }
  // What is not there is 0, or NaN where all is.
  BLOCKSCALE_DEVICE uint32_t missing() const { return rows.wrong ? 0x7FC07FC0 : 0; }
  BLOCKSCALE_DEVICE OutputAtRows<0> row() const { return {p.row, stored, shared_group[0]}; }
  BLOCKSCALE_DEVICE OutputAtRows<1> column() const { return {p.column, rows, shared_group[1]}; }
};

// Stores the outer scales of all groups; called by one thread block.
BLOCKSCALE_DEVICE void store_outer_scales(const Side& s, bool wrong) {
  if (!s.out.spec.outer) return;
  for (int g = static_cast<int>(threadIdx.x); g < static_cast<int>(s.out.groups.count);
       g += kDirectThreads)
    s.out.outer[g] = wrong ? bit_cast<float>(kNanBits) : outer_of(s, g).dec;
}

template <class Row, class Column>
__global__ void __launch_bounds__(kDirectThreads,
                                  (kTileBlocks<Row::kPass, Column::kPass, Bf16In<true>>))
    positions_kernel(const __grid_constant__ TilesParams p) {
  after_previous(p);
  BLOCKSCALE_DYNAMIC_SHARED(bytes);
  auto& memory = in_place(*reinterpret_cast<PositionMemory<Row, Column>*>(bytes));
  TileAt at = direct_tile(p.sideways);
  if (at.column >= p.x.columns) return;
  const ColumnPart<Column::kPass> part;
  const RowsAt rows = find_rows(p.groups, p.column.groups.position, at.row + part.run * kRun);
  RowsAt& stored = memory.rows[threadIdx.x / 32];
  if (threadIdx.x % 32 == 0) stored = rows;
  Source x = p.x;
  Bf16In<true>::skip(x, rows.shift);
  x.rows = rows.none ? 0 : rows.end;
  quantize_tile(x, at, memory.tile, AtPositions{p, rows, stored, memory.group});
  if (at.row == 0 && at.column == 0) {
    if constexpr (Row::kPass.two_level()) store_outer_scales(p.row, rows.wrong);
    if constexpr (Column::kPass.two_level()) store_outer_scales(p.column, rows.wrong);
  }
}

}  // namespace blockscale::gpu
