// Groups on a GPU: only the device knows the offsets, so kernels are launched for the most that
// there can be. The quantizers with one tile per thread block read the offsets themselves
// (GroupTile). For the general kernels a small kernel reads them and leaves a plan in the
// workspace: which group every row of tiles belongs to, and where each group lies.
#pragma once

#include "blockscale/tensor.h"
#include "gpu/quantize/tile.h"

namespace blockscale::gpu {

struct PlanHead {
  int tile_rows;  // rows of tiles of all groups
  int wrong;      // offsets decrease or pass the end: there are no groups, and results are NaN
};
// kTile rows of one group. `begin` and `rows` are the group's rows in what the kernel reads: x, or
// x after a transform in a pass of its own, where groups start at their positions.
struct TileRow {
  int group, row, begin, rows;
};
// Where one group of an operand lies, and its own extents (groups.h). One past the last group:
// `codes` and `scales` as in GroupStart, of the part in use.
struct GroupAt {
  int64_t codes, scales;  // offsets into the operand's buffers, in bytes and in elements
  int64_t line, position;
  int row, rows;  // in x
  int lines, padded, blocks, code_columns, scale_columns;
};
struct Plan {
  const PlanHead* head;
  const TileRow* tile_rows;
  const GroupAt* side[2];  // for one or two operands, or null
  int count;               // groups
  int most_tile_rows;
};

// A plan for the groups of x [rows, columns] and the operands `a` and `b` (or null) that hold them.
// `positions`: the kernel reads x after a transform along axis -2.
Plan make_plan(const Groups& groups, int64_t rows, int64_t columns, const ConstQuantized* a,
               const ConstQuantized* b, bool positions, const Stream& stream);

// The most rows of tiles that `count` groups of `rows` rows can have.
inline int most_tile_rows(int64_t rows, int64_t count) {
  return static_cast<int>(rounded_parts(rows, count, kTile) / kTile);
}

// Where the groups of an operand lie, computed from their rows alone: sums of rows, each rounded up
// to multiples (powers of two, held as masks), in steps of the layouts' buffers.
struct GroupRule {
  int position, codes, scales;  // multiples less 1
  int code_shift, scale_shift;  // log2 of the rows per step
  int code_pitch, scale_pitch;  // bytes, or elements, per step
  bool pads_across;             // layouts have padding that does not depend on the rows
  BLOCKSCALE_DEVICE int64_t codes_at(int rows) const {
    return static_cast<int64_t>(rows >> code_shift) * code_pitch;
  }
  BLOCKSCALE_DEVICE int64_t scales_at(int rows) const {
    return static_cast<int64_t>(rows >> scale_shift) * scale_pitch;
  }
  // Whether the layouts of a group have padding beyond that of its blocks.
  BLOCKSCALE_DEVICE bool pads(int rows) const {
    return pads_across || (((rows + position) & ~position) & (codes | scales)) != 0;
  }
};
BLOCKSCALE_DEVICE int round_up_by(int rows, int mask) { return (rows + mask) & ~mask; }

// Rows of groups, rounded up as an operand requires, and summed.
struct GroupRows {
  int position = 0, codes = 0, scales = 0;
  BLOCKSCALE_DEVICE void add(const GroupRule& r, int rows) {
    position += round_up_by(rows, r.position);
    codes += round_up_by(rows, r.codes);
    scales += round_up_by(rows, r.scales);
  }
};

// The groups of x [rows, ...] as a grid of tiles sees them. The rows of tiles of group g start at
// (where it begins) / kTile + g, which can be computed without looking at the groups before it.
// They are enough: rows [begin, end) need at most end / kTile - begin / kTile + 1. The remaining
// rows of tiles write what lies behind the last group, and at least one is behind all groups.
struct GroupGrid {
  Groups groups;
  int rows;        // of x
  bool positions;  // the kernel reads x after a transform in a pass of its own; groups start at
                   // positions

  // The first row of tiles of group g.
  BLOCKSCALE_DEVICE static int first_tile_row(int g, int begin) {
    return static_cast<int>(static_cast<uint32_t>(begin) / kTile) + g;
  }
  // The number for all groups; 0 without any.
  BLOCKSCALE_HD int tile_rows() const {
    return groups ? rows / kTile + static_cast<int>(groups.count) + 1 : 0;
  }
};

// Where a tile's group lies in one operand, and its own extents.
struct GroupSide {
  uint8_t *codes, *scales;
  int64_t origin_pos;
  uint32_t line;
  int padded, blocks, line_bytes, scale_columns, code_pairs, scale_words;
};
// A row of tiles: kTile rows of one group, whose first row in x is `begin`; or of no group.
struct GroupTile {
  int group;  // -1: none
  int row, begin, rows;
  bool wrong;  // offsets decrease or pass the end: no row of tiles has a group, all is NaN
};

// The rows of 32 groups from `first` on, one group per lane; lanes past the last group have none.
// `wrong` means what Groups::is_wrong() says, for which this makes only one load per lane.
struct WarpEnds {
  int begin, end;
  bool wrong;  // true in some lane if offsets decrease or pass the end, else in none

  BLOCKSCALE_DEVICE WarpEnds(const Groups& groups, int first, int rows) {
    const auto end_of = [&](int g) {
      const int64_t at = groups.end(min(g, static_cast<int>(groups.count) - 1));
      return static_cast<uint64_t>(at) <= static_cast<uint64_t>(rows) ? static_cast<int>(at) : -1;
    };
    const int lane = static_cast<int>(threadIdx.x) % 32;
    end = end_of(first + lane);
    begin = static_cast<int>(shuffle_up(static_cast<uint32_t>(end)));
    if (lane == 0) begin = 0;
    if (first != 0 && lane == 0) begin = end_of(first - 1);
    wrong = end < begin;
  }
};

// Finds out what row `tile_row` of tiles is, in every warp separately: no thread can load anything
// before, so this is kept short and does not wait for other warps.
BLOCKSCALE_DEVICE GroupTile find_tile(const GroupGrid& grid, int tile_row) {
  const int lane = static_cast<int>(threadIdx.x) % 32, count = static_cast<int>(grid.groups.count);
  // Among the groups whose rows of tiles begin at or before this one: how many, and the last one's
  // rows.
  uint32_t groups = 0, begin = 0, end = 0;
#pragma unroll 1
  for (int base = 0; base < count; base += 32) {
    const WarpEnds ends(grid.groups, base, grid.rows);
    const int g = base + lane;
    if (g < count && GroupGrid::first_tile_row(g, ends.begin) <= tile_row) {
      ++groups;
      begin = static_cast<uint32_t>(ends.begin), end = max(end, static_cast<uint32_t>(ends.end));
    }
    if (ends.wrong) end = ~0u;
  }
  groups = warp_sum(groups), begin = warp_max(begin), end = warp_max(end);
  if (end == ~0u) return {-1, 0, 0, 0, true};
  const int g = static_cast<int>(groups) - 1, first = static_cast<int>(begin);
  const int rows = static_cast<int>(end - begin);
  const int row = (tile_row - GroupGrid::first_tile_row(g, first)) * kTile;
  return {row < rows ? g : -1, row, first, rows, false};
}
// Rows of the groups before `group`. Called by one warp; every lane gets the result.
BLOCKSCALE_DEVICE GroupRows rows_before(const GroupGrid& grid, const GroupRule& rule, int group) {
  GroupRows rows;
#pragma unroll 1
  for (int base = 0; base < group; base += 32) {
    const WarpEnds ends(grid.groups, base, grid.rows);
    if (base + static_cast<int>(threadIdx.x) % 32 < group) rows.add(rule, ends.end - ends.begin);
  }
  const auto sum = [](int n) { return static_cast<int>(warp_sum(static_cast<uint32_t>(n))); };
  return {sum(rows.position), sum(rows.codes), sum(rows.scales)};
}

// The share of some work that falls to one of `of` thread blocks, or rows of them.
struct Share {
  int at, of;
};
// The share of row `tile_row` of tiles, which is of no group, among all such rows. Called by one
// warp; every lane gets the result.
BLOCKSCALE_DEVICE Share share_of_none(const GroupGrid& grid, bool wrong, int tile_row) {
  int before = 0, all = 0;  // rows of tiles that belong to groups
#pragma unroll 1
  for (int base = 0; !wrong && base < static_cast<int>(grid.groups.count); base += 32) {
    const WarpEnds ends(grid.groups, base, grid.rows);
    const int first =
        GroupGrid::first_tile_row(base + static_cast<int>(threadIdx.x) % 32, ends.begin);
    const int own =
        static_cast<int>(static_cast<uint32_t>(ends.end - ends.begin + kTile - 1) / kTile);
    before += min(max(tile_row - first, 0), own), all += own;
  }
  const auto sum = [](int n) { return static_cast<int>(warp_sum(static_cast<uint32_t>(n))); };
  return {tile_row - sum(before), grid.tile_rows() - sum(all)};
}

// Clears the rows of a tile from `rows` on, which belong to the next group.
BLOCKSCALE_DEVICE void cut(Bf16Tile& tile, int rows) {
  if (rows >= kTile) return;
  for (int i = rows * Bf16Tile::kChunks + static_cast<int>(threadIdx.x);
       i < kTile * Bf16Tile::kChunks; i += kThreads)
    tile.chunk[i] = {};
  fence_copies();
  __syncthreads();
}
BLOCKSCALE_DEVICE void cut(FloatTile& tile, int rows) {
  if (rows >= kTile) return;
  for (int i = rows * FloatTile::kPitch + static_cast<int>(threadIdx.x);
       i < kTile * FloatTile::kPitch; i += kThreads)
    tile.value[i] = 0.0f;
  __syncthreads();
}

}  // namespace blockscale::gpu
