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

// Finds row `tile_row` of tiles in the offsets, by one warp: every lane adds up some consecutive
// groups.
BLOCKSCALE_DEVICE void find_tile(const GroupGrid& grid, const GroupRule& row,
                                 const GroupRule& column, int tile_row, GroupTile& found) {
  struct Sums {
    GroupRows operand[2];
    int tiles = 0;
  };
  const auto source_rows = [&](int rows) {
    return grid.positions ? round_up_by(rows, column.position) : rows;
  };
  const auto add = [&](Sums& sums, int rows) {
    sums.operand[0].add(row, rows);
    sums.operand[1].add(column, rows);
    sums.tiles += (source_rows(rows) + kTile - 1) / kTile;
  };
  const int lane = static_cast<int>(threadIdx.x) % 32, count = static_cast<int>(grid.groups.count);
  const int each = (count + 31) / 32;
  const int first = min(lane * each, count), last = min(first + each, count);
  Sums own;
  bool wrong = false;
  for (int g = first; g < last; ++g) {
    const int64_t begin = grid.groups.begin(g), end = grid.groups.end(g);
    wrong |= end < begin || end > grid.rows;
    add(own, static_cast<int>(end - begin));
  }
  const bool bad = warp_max(wrong) != 0;
  if (bad) own = {};
  int upto = own.tiles;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = static_cast<int>(shuffle_up(static_cast<uint32_t>(upto), step));
    if (lane >= step) upto += other;
  }
  const int tiles = static_cast<int>(warp_max(static_cast<uint32_t>(upto)));
  // The groups of all lanes that end before this row of tiles.
  const bool is_before = upto <= tile_row;
  Sums before;
  const auto sum = [&](int n) {
    return static_cast<int>(warp_sum(static_cast<uint32_t>(is_before ? n : 0)));
  };
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    before.operand[i].position = sum(own.operand[i].position);
    before.operand[i].codes = sum(own.operand[i].codes);
    before.operand[i].scales = sum(own.operand[i].scales);
  }
  if (tile_row >= tiles) {
    if (lane == 0) {
      const int end = bad || count == 0 ? 0 : static_cast<int>(grid.groups.end(count - 1));
      found = {
          -1, tile_row - tiles, end, grid.tile_rows - tiles, {before.operand[0], before.operand[1]},
          bad};
    }
  } else if (!is_before && upto - own.tiles <= tile_row) {
    before.tiles = upto - own.tiles;
    for (int g = first; g < last; ++g) {
      const int begin = static_cast<int>(grid.groups.begin(g));
      const int rows = static_cast<int>(grid.groups.end(g)) - begin;
      Sums after = before;
      add(after, rows);
      if (after.tiles > tile_row) {
        found = {g,    (tile_row - before.tiles) * kTile,      begin,
                 rows, {before.operand[0], before.operand[1]}, false};
        break;
      }
      before = after;
    }
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
