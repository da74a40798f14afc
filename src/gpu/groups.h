// Groups on a GPU: the offsets are known to the device alone, so that one small kernel looks at
// them and leaves a plan in the workspace: which group every row of tiles belongs to, and where
// each group lies. Kernels are launched for the most that there can be.
#pragma once

#include "blockscale/tensor.h"
#include "gpu/tile.h"

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
