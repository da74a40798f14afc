// Tiles of the Hopper GEMM: which there are, and which one a product gets. Plain C++: the choice is
// tested without a GPU.
#pragma once

#include <cstdint>

namespace blockscale::cuda {

// Math warpgroups side by side along N or one below the other, wgmmas of 64 x n in each, stages of
// the ring, CTAs of a cluster, 8 KB pieces of output a warpgroup stages.
struct TileShape {
  int groups;
  bool side_by_side;
  int waves;
  int n;
  int stages;
  int cluster;
  int chunks;

  constexpr int rows() const { return 64 * waves * (side_by_side ? 1 : groups); }
  constexpr int columns() const { return n * (side_by_side ? groups : 1); }
  constexpr bool pairs_columns() const { return rows() >= columns(); }
};

inline constexpr TileShape kTiles[] = {
    {2, false, 2, 128, 3, 2, 4},  // 256 x 128
    {2, false, 2, 128, 3, 1, 4},  //
    {2, false, 2, 128, 4, 2, 1},  //
    {2, false, 1, 192, 4, 2, 3},  // 128 x 192
    {2, false, 1, 128, 5, 2, 2},  // 128 x 128
    {2, false, 1, 128, 5, 1, 2},  //
    {3, false, 1, 128, 4, 2, 2},  // 192 x 128
    {2, true, 1, 64, 8, 1, 1},    // 64 x 128
    {2, true, 1, 32, 12, 1, 0},   // 64 x 64
    {2, true, 1, 16, 16, 1, 0},   // 64 x 32
    {2, true, 1, 8, 20, 1, 0},    // 64 x 16
};
inline constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

}  // namespace blockscale::cuda
