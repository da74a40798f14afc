// How blocks of threads walk over the tiles of their input, and the buffers they use by turns.
#pragma once

#include "gpu/scale.h"

namespace blockscale::gpu {

struct QuantizeParams {
  Source x;
  Side row, column;
  int tiles_down, tiles_across;
  int tiles;  // of all matrices
  int batch;  // matrices
  // gridDim.x tiles further on, in tiles of Walk's two directions and in matrices.
  int step_first, step_second, step_batch;
  bool copies;   // whether x.map describes x
  bool aligned;  // whether rows start at multiples of 16 bytes
};

// Walks over tiles, gridDim.x at a time. Down first when columns leave: neighbours in time then
// write neighbouring pieces of a line.
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
};

// Which of several buffers a tile uses.
template <int kStages>
struct Turn {
  int stage = 0, two = 0, three = 0;
  BLOCKSCALE_DEVICE void advance() {
    stage = stage == kStages - 1 ? 0 : stage + 1;
    two ^= 1;
    three = three == 2 ? 0 : three + 1;
  }
};

}  // namespace blockscale::gpu
