// How thread blocks walk over the tiles of their input, and the buffers they use in turn.
#pragma once

#include <type_traits>

#include "gpu/groups/groups.h"
#include "gpu/quantize/scale.h"

namespace blockscale::gpu {

struct QuantizeParams {
  Source x;
  Side row, column;
  int tiles_down, tiles_across;
  int tiles;  // of all matrices
  int batch;  // matrices
  // A step of gridDim.x tiles, in tiles of Walk's two directions and in matrices.
  int step_first, step_second, step_batch;
  bool copies;   // whether x.map describes x
  bool aligned;  // whether rows start at multiples of 16 bytes
  // With groups, tiles_down is not known, and `tiles` is the most there can be.
  GroupGrid groups;
  Plan plan;
};

// Walks over tiles, gridDim.x at a time. Goes down first when columns are stored, so that tiles
// close in time write neighbouring pieces of a line.
template <bool kDown>
struct Walk {
  int first, second;  // tile within the matrix, `first` moving faster
  int batch;

  BLOCKSCALE_DEVICE explicit Walk(const QuantizeParams& p) {
    const int firsts = kDown ? p.tiles_down : p.tiles_across;
    const int seconds = kDown ? p.tiles_across : p.tiles_down;
    first = static_cast<int>(blockIdx.x % firsts);
    second = static_cast<int>(blockIdx.x / firsts % seconds);
    batch = blockIdx.x / firsts / seconds;
  }
  BLOCKSCALE_DEVICE void advance(const QuantizeParams& p) {
    const int firsts = kDown ? p.tiles_down : p.tiles_across;
    const int seconds = kDown ? p.tiles_across : p.tiles_down;
    first += p.step_first;
    second += p.step_second + (first >= firsts);
    batch += p.step_batch + (second >= seconds);
    if (first >= firsts) first -= firsts;
    if (second >= seconds) second -= seconds;
  }
  BLOCKSCALE_DEVICE TileAt at() const {
    return {batch, (kDown ? first : second) * kTile, (kDown ? second : first) * kTile};
  }
  BLOCKSCALE_DEVICE TileAt source() const { return at(); }
  // Number of tiles for this thread block.
  BLOCKSCALE_DEVICE static int count(const QuantizeParams& p) {
    const int grid = static_cast<int>(gridDim.x);
    return (p.tiles - static_cast<int>(blockIdx.x) + grid - 1) / grid;
  }
};

// The same over the tiles of groups; those of each group start at its first row. A thread block
// takes every gridDim.x-th tile, or consecutive ones, so that it rarely moves to another group.
template <bool kDown, bool kConsecutive>
struct GroupWalk {
  int first, second;  // `first` moving faster; one of them counts rows of tiles through all groups
  int firsts, step_first, step_second;
  TileRow row{};

  BLOCKSCALE_DEVICE explicit GroupWalk(const QuantizeParams& p) {
    firsts = max(kDown ? p.plan.head->tile_rows : p.tiles_across, 1);
    const int step = kConsecutive ? 1 : static_cast<int>(gridDim.x);
    first = start(p) % firsts;
    second = start(p) / firsts;
    step_first = step % firsts;
    step_second = step / firsts;
    look(p);
  }
  BLOCKSCALE_DEVICE void advance(const QuantizeParams& p) {
    first += step_first;
    second += step_second + (first >= firsts);
    if (first >= firsts) first -= firsts;
    look(p);
  }
  // Past the end there is no row, and none is asked for.
  BLOCKSCALE_DEVICE void look(const QuantizeParams& p) {
    const int tile_row = kDown ? first : second;
    if (tile_row < p.plan.most_tile_rows) row = p.plan.tile_rows[tile_row];
  }
  // at(): within the group, whose number is `batch`; source(): within the input.
  BLOCKSCALE_DEVICE TileAt at() const {
    return {row.group, row.row, (kDown ? second : first) * kTile};
  }
  BLOCKSCALE_DEVICE TileAt source() const {
    return {0, row.begin + row.row, (kDown ? second : first) * kTile};
  }
  BLOCKSCALE_DEVICE int rows_left() const { return row.rows - row.row; }

  BLOCKSCALE_DEVICE static int tiles(const QuantizeParams& p) {
    return p.plan.head->tile_rows * p.tiles_across;
  }
  BLOCKSCALE_DEVICE static int each(const QuantizeParams& p) {
    return (tiles(p) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  }
  BLOCKSCALE_DEVICE static int start(const QuantizeParams& p) {
    return static_cast<int>(blockIdx.x) * (kConsecutive ? each(p) : 1);
  }
  BLOCKSCALE_DEVICE static int count(const QuantizeParams& p) {
    if (kConsecutive) return min(each(p), tiles(p) - start(p));
    const int grid = static_cast<int>(gridDim.x);
    return (tiles(p) - start(p) + grid - 1) / grid;
  }
};

template <bool kDown, bool kGrouped, bool kConsecutive = false>
using WalkOver = std::conditional_t<kGrouped, GroupWalk<kDown, kConsecutive>, Walk<kDown>>;

// Which of several buffers a tile uses.
template <int kStages>
struct Ring {
  int stage = 0, three = 0;
  BLOCKSCALE_DEVICE void advance() {
    stage = stage == kStages - 1 ? 0 : stage + 1;
    three = three == 2 ? 0 : three + 1;
  }
};

}  // namespace blockscale::gpu
