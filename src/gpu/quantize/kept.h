// A tile of BF16 that threads read by columns and keep in shared memory for its rows.
#pragma once

#include "gpu/quantize/load.h"

namespace blockscale::gpu {

// Rows of 16 chunks of 16 bytes. The last eight chunks of a row trade places with their neighbours,
// so that eight threads reading every other chunk have no bank conflicts.
struct KeptTile {
  uint4 chunk[kTile * kTile / 8];

  BLOCKSCALE_DEVICE static int place(int chunk) { return chunk ^ chunk >> 3; }
  // The element at (row, column), and those after it in its chunk.
  BLOCKSCALE_DEVICE uint8_t* at(int row, int column) {
    return reinterpret_cast<uint8_t*>(&chunk[row * (kTile / 8) + place(column / 8)]) +
           column % 8 * 2;
  }
};
// The counterpart of LineReader, which reads global memory, for at most kKeptLines lines.
inline constexpr int kKeptLines = 4;
struct KeptReader {
  using Tile = Bf16Tile;
  using Run = RunAligned;
  const uint4 *first, *second;
  int left = kKeptLines;

  BLOCKSCALE_DEVICE KeptReader(const KeptTile& tile, int line, int run)
      : first(&tile.chunk[line * (kTile / 8) + KeptTile::place(2 * run)]),
        second(&tile.chunk[line * (kTile / 8) + KeptTile::place(2 * run + 1)]) {}
  BLOCKSCALE_DEVICE Run next() {
    const Run run{{*first, *second}};
    if (--left > 0) first += kTile / 8, second += kTile / 8;
    return run;
  }
};

}  // namespace blockscale::gpu
