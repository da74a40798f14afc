// A tile of BF16 kept in shared memory by threads that have read it by columns, for its rows.
#pragma once

#include "gpu/quantize/load.h"

namespace blockscale::gpu {

// Rows of 16 chunks of 16 bytes. The last eight of a row change places with their neighbours, so
// that eight threads that read every other one meet no bank twice.
struct KeptTile {
  uint4 chunk[kTile * kTile / 8];

  BLOCKSCALE_DEVICE static int place(int chunk) { return chunk ^ chunk >> 3; }
  // The element at (row, column), and those behind it in its chunk.
  BLOCKSCALE_DEVICE uint8_t* at(int row, int column) {
    return reinterpret_cast<uint8_t*>(&chunk[row * (kTile / 8) + place(column / 8)]) +
           column % 8 * 2;
  }
};
// What LineReader is for global memory, of at most kKeptLines lines.
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
