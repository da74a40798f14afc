// Groups on a GPU: the offsets are known to the device alone, and kernels are launched for the most
// that there can be. The quantizers with a tile for each block of threads look at the offsets
// themselves (GroupTile). For the general kernels a small one does, and leaves a plan in the
// workspace: which group every row of tiles belongs to, and where each group lies.
#pragma once

#include "blockscale/tensor.h"
#include "gpu/quantize/tile.h"

namespace blockscale::gpu {

struct PlanHead {
  int tile_rows;  // rows of tiles of all groups
  int bad;        // offsets decrease or pass the end: there are no groups, and results are NaN
};
// kTile rows of one group. `begin` and `rows` are the group's rows in what the kernel reads: x, or
// x after a wide transform, where groups start at their positions.
struct TileRow {
  int group, row, begin, rows;
};
// Where one group of an operand lies, and its own extents (groups.h). One past the last group:
// `codes` and `scales` as in GroupStart, of what is used.
struct GroupAt {
  int64_t codes, scales;  // from the operand's buffers on, in bytes and in elements
  int64_t line, position;
  int row, rows;  // in x
  int lines, padded, blocks, code_columns, scale_columns;
};
struct Plan {
  const PlanHead* head;
  const TileRow* tile_rows;
  const GroupAt* side[2];  // of one or two operands, or null
  int count;               // groups
  int most_tile_rows;
};

// The most rows of tiles that `count` groups of `rows` rows can have.
inline int most_tile_rows(int64_t rows, int64_t count) {
  return static_cast<int>(rounded_parts(rows, count, kTile) / kTile);
}

// Where the groups of an operand lie, from their rows alone: sums of rows, each rounded up to
// multiples (powers of two, held as masks), in steps of the layouts' buffers.
struct GroupRule {
  int position, codes, scales;  // multiples less 1
  int code_shift, scale_shift;  // rows of a step
  int code_pitch, scale_pitch;  // bytes, or elements, of a step
  bool pads_across;             // layouts have padding that does not depend on the rows
  BLOCKSCALE_DEVICE int64_t codes_at(int rows) const {
    return static_cast<int64_t>(rows >> code_shift) * code_pitch;
  }
  BLOCKSCALE_DEVICE int64_t scales_at(int rows) const {
    return static_cast<int64_t>(rows >> scale_shift) * scale_pitch;
  }
  // Whether the layouts of a group have padding besides that of its blocks.
  BLOCKSCALE_DEVICE bool pads(int rows) const {
    return pads_across || (((rows + position) & ~position) & (codes | scales)) != 0;
  }
};
BLOCKSCALE_DEVICE int round_up_by(int rows, int mask) { return (rows + mask) & ~mask; }

// Rows of groups, rounded up as an operand asks, and added up.
struct GroupRows {
  int position = 0, codes = 0, scales = 0;
  BLOCKSCALE_DEVICE void add(const GroupRule& r, int rows) {
    position += round_up_by(rows, r.position);
    codes += round_up_by(rows, r.codes);
    scales += round_up_by(rows, r.scales);
  }
};

// The groups of x [rows, ...] as a grid of tiles sees them.
struct GroupGrid {
  Groups groups;
  int rows;        // of x
  int tile_rows;   // the most that there can be, and one more
  bool positions;  // what is read is x after a wide transform, where groups start at positions
};

// A row of tiles: kTile rows of one group, or what lies behind the last group.
struct GroupTile {
  int group;            // -1: behind
  int row;              // of the group; behind: which of the rows of tiles there
  int begin, rows;      // the group in x; behind: the end of the last one, and how many rows of
                        // tiles there are
  GroupRows before[2];  // of the row and the column operand
  bool bad;             // offsets decrease or pass the end: all is behind, and NaN
};

// The rows of 32 groups, from `first` on, one a lane; lanes behind the last group have none. What
// is wrong is what Groups::is_wrong() says, of which this makes one load a lane.
struct WarpEnds {
  int begin, end;
  bool wrong;  // of some lane where offsets decrease or pass the end; of none where they do not

  BLOCKSCALE_DEVICE WarpEnds(const Groups& groups, int first, int rows) {
    const auto end_of = [&](int g) {
      const int64_t at = groups.end(min(g, static_cast<int>(groups.count) - 1));
      return at >= 0 && at <= rows ? static_cast<int>(at) : -1;
    };
    const int lane = static_cast<int>(threadIdx.x) % 32;
    end = end_of(first + lane);
    begin = static_cast<int>(shuffle_up(static_cast<uint32_t>(end)));
    if (lane == 0) begin = first == 0 ? 0 : end_of(first - 1);
    wrong = end < begin;
  }
};

// Finds row `tile_row` of tiles in the offsets, by one warp; for the operands that there are. All
// threads of a tile wait for it: what depends on what is kept short.
template <bool kRow, bool kColumn>
BLOCKSCALE_DEVICE void find_tile(const GroupGrid& grid, const GroupRule& row,
                                 const GroupRule& column, int tile_row, GroupTile& found) {
  const int lane = static_cast<int>(threadIdx.x) % 32, count = static_cast<int>(grid.groups.count);
  GroupRows before[2];  // of the lane's groups that end before this row of tiles
  int group = -1, begin = 0, rows = 0, first = 0;  // the one that has it
  int upto = 0;                                    // rows of tiles of this lane's group and before
  bool wrong = false;
  for (int base = 0;;) {
    const WarpEnds ends(grid.groups, base, grid.rows);
    wrong |= ends.wrong;
    const int here = ends.wrong ? 0 : ends.end - ends.begin;
    const int own =
        ((grid.positions ? round_up_by(here, column.position) : here) + kTile - 1) / kTile;
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = static_cast<int>(shuffle_up(static_cast<uint32_t>(sum), step));
      if (lane >= step) sum += other;
    }
    upto += sum;
    if (upto <= tile_row) {
      if (kRow) before[0].add(row, here);
      if (kColumn) before[1].add(column, here);
    } else if (upto - own <= tile_row) {
      group = base + lane, begin = ends.begin, rows = here, first = upto - own;
    }
    base += 32;
    if (base >= count) break;
    upto = static_cast<int>(warp_max(static_cast<uint32_t>(upto)));
  }
  const auto sum = [](int& n) { n = static_cast<int>(warp_sum(static_cast<uint32_t>(n))); };
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (i == 0 ? kRow : kColumn)
      sum(before[i].position), sum(before[i].codes), sum(before[i].scales);
  const bool bad = warp_max(wrong) != 0;
  if (bad) before[0] = before[1] = {}, group = -1, upto = 0;
  if (group >= 0) {
    found = {group, (tile_row - first) * kTile, begin, rows, {before[0], before[1]}, false};
  } else if (lane == 31 && upto <= tile_row) {
    const int end = bad ? 0 : static_cast<int>(grid.groups.end(count - 1));
    found = {-1, tile_row - upto, end, grid.tile_rows - upto, {before[0], before[1]}, bad};
  }
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
