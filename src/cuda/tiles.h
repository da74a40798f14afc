// The tiles of the Hopper GEMM, and which one a product gets. Plain C++: the choice is tested
// without a GPU.
#pragma once

#include <cstdint>

namespace blockscale::cuda {

// Shared memory that a thread block may ask for, in bytes.
inline constexpr int kMostSharedBytes = 227 * 1024;
// BF16 values of a line in a stage of 128 bytes.
inline constexpr int kStageValues = 64;

struct TileShape {
  int groups;         // math warpgroups
  bool side_by_side;  // along N; else one below the other
  int waves;          // wgmmas per warpgroup, 64 rows each
  int n;              // columns per wgmma
  int stages;         // in the ring
  int cluster;        // CTAs that work together
  bool split;         // they split K of one tile; else they share an operand
  // Of FP8 operands:
  int line_stages = 0;  // stages where every column has a scale
  bool e5m2 = false;    // also compiled for any E5M2 operands
  // Of BF16 operands: B is decoded in the kernel.
  bool decodes = false;

  // With two E5M2 operands and 128x128 scales, which is what MXFP4 becomes, every tile is compiled.
  constexpr bool compiled(bool square, bool a_e5m2, bool b_e5m2) const {
    return e5m2 || !(a_e5m2 || b_e5m2) || (square && a_e5m2 && b_e5m2);
  }
  // The shape for FP8 operands, B with 128x128 scales (`square`) or a scale per column. With these,
  // two waves of a warpgroup become four with half the columns each: two of them fit in registers
  // beside the sums, and all four share their scales.
  constexpr TileShape with_scales(bool square) const {
    TileShape t = *this;
    if (square) return t;
    t.stages = line_stages;
    if (waves == 2) t.side_by_side = true, t.waves = 4, t.n = n / 2;
    return t;
  }
  constexpr TileShape that_decodes() const {
    TileShape t = *this;
    t.decodes = true;
    return t;
  }
  constexpr int rows() const { return 64 * waves * (side_by_side ? 1 : groups); }
  constexpr int columns() const { return n * (side_by_side ? groups : 1); }
  // CTAs that share an operand take neighbouring tiles along N, sharing A, or along M, sharing B.
  constexpr bool pairs_columns() const { return rows() >= columns(); }
  constexpr int sharing() const { return split ? 1 : cluster; }
  constexpr int parts() const { return split ? cluster : 1; }
  constexpr int unit_rows() const { return rows() * (pairs_columns() ? 1 : sharing()); }
  constexpr int unit_columns() const { return columns() * (pairs_columns() ? sharing() : 1); }

  // Chunks of output, 64 rows x 128 bytes, that a warpgroup stages in shared memory at once: as
  // many as fit beside the table of 1024 groups and the stages, each of which has barriers and, for
  // each of its lines, codes and an FP32 scale.
  constexpr int chunks() const {
    constexpr int kLineBytes = 128 + 4, kBarrierSpace = 256, kGroupBytes = 10 * 1024;
    if (split || n % 64 != 0) return 0;
    const int stage = (rows() + columns()) * kLineBytes + kBarrierSpace;
    const int left = kMostSharedBytes - kGroupBytes - stages * stage;
    const int fit = left / (groups * 64 * 128), all = waves * n / 64;
    return fit < all ? fit : all;
  }
};

inline constexpr TileShape kTiles[] = {
    // groups, beside, waves, n, stages, cluster, split, line_stages, e5m2
    {2, false, 2, 128, 3, 2, false, 4, true},  // 256 x 128
    {3, false, 1, 128, 4, 2, false, 4},        // 192 x 128
    {2, false, 1, 128, 5, 1, false, 5, true},  // 128 x 128
    {2, true, 1, 64, 8, 1, false, 8, true},    // 64 x 128
    {2, true, 1, 32, 12, 1, false, 12},        // 64 x 64
    {2, true, 1, 16, 16, 1, false, 16},        // 64 x 32
    {2, true, 1, 64, 8, 4, true, 8},           // 64 x 128, K in 4
    {2, true, 1, 32, 12, 2, true, 12},         // 64 x 64, K in 2
};
inline constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);
// For BF16 operands, which have no scales. Pairs of large tiles that share an operand were slower.
inline constexpr TileShape kBf16Tiles[] = {
    // groups, beside, waves, n, stages, cluster, split
    {2, false, 2, 128, 4, 1, false},  // 256 x 128
    {2, false, 1, 128, 6, 1, false},  // 128 x 128
    {2, true, 1, 64, 8, 2, false},    // 64 x 128, in pairs
    {2, true, 1, 64, 8, 1, false},    // 64 x 128
    {2, true, 1, 32, 12, 1, false},   // 64 x 64
    {2, true, 1, 16, 16, 1, false},   // 64 x 32
};
inline constexpr int kBf16TileCount = sizeof(kBf16Tiles) / sizeof(kBf16Tiles[0]);

// The same where B is decoded in the kernel (that_decodes()): two tiles for many rows, two for few.
inline constexpr TileShape kCodedTiles[] = {
    {2, false, 2, 128, 4, 1, false},  // 256 x 128
    {2, false, 1, 128, 6, 1, false},  // 128 x 128
    {2, true, 1, 32, 12, 1, false},   // 64 x 64
    {2, true, 1, 16, 16, 1, false},   // 64 x 32
};
inline constexpr int kCodedTileCount = sizeof(kCodedTiles) / sizeof(kCodedTiles[0]);

// The input of the choice. Groups count as equal parts.
struct GemmSize {
  int64_t rows = 0, columns = 0, blocks = 0;  // of one group; blocks of 128 bytes along K
  int64_t groups = 1;
  bool scaled = true;  // FP8; else BF16
  // BF16, of which B is decoded in the kernel: bytes per code; else 0.
  double code_bytes = 0;
  bool square = true;  // scales of B: 128x128, else 1x128
  bool a_e5m2 = false, b_e5m2 = false;
  bool f32 = false;      // the output
  bool grouped = false;  // group sizes are known only on the device
  int multiprocessors = 132;
};

// Estimated cycles of the whole product.
double tile_cost(const TileShape& tile, const GemmSize& size);
// Index into kTiles, kBf16Tiles or kCodedTiles of the cheapest tile compiled for these formats.
int choose_tile(const GemmSize& size);
// Whether a dense BF16 product with these tiles is likely to take no longer than another library's
// plus a pass over its sums. For few tiles with a long K that library splits K.
bool pays(const GemmSize& size);
// Whether the product takes the device less time than the host needs to find and launch a library's
// kernel.
bool is_brief(const GemmSize& size);
// Whether a product that decodes B itself is clearly faster than a pass that decodes B and what
// would multiply its values then: these tiles or, of dense products, another library, whichever
// pays; if not `needs_pass`, these tiles where the product is brief. (Over groups a library that
// needs no pass is as fast as these tiles.)
bool pays_to_decode(const GemmSize& size, bool needs_pass);
// How many units along M are walked together, so that units that run at the same time share both
// operands in L2.
int choose_band(const TileShape& tile, const GemmSize& size);
// Whether clusters draw their tiles one by one. With fixed shares a BF16 product takes up to a
// third longer, likely because clusters drift apart and no longer share operands in L2, and up to
// twice as long beside another kernel that occupies some of the multiprocessors.
bool wants_dynamic(const TileShape& tile, const GemmSize& size);

}  // namespace blockscale::cuda
