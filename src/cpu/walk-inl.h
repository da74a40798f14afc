// The walk over tiles: cuts matrices into tiles and presents each to a pass.

#if defined(BLOCKSCALE_WALK_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_WALK_INL
#undef BLOCKSCALE_WALK_INL
#else
#define BLOCKSCALE_WALK_INL
#endif

#include <algorithm>
#include <memory>

#include "cpu/pack-inl.h"
#include "cpu/tile-inl.h"
#include "hwy/cache_control.h"
#include "parts.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// The only buffer that a thread needs. Its arrays may be overrun by one vector.
struct Scratch {
  static constexpr int64_t kSlack = 64;
  alignas(64) float tile[kTileElements + kSlack];            // the copy of x, FP32 or BF16
  alignas(64) uint16_t transformed[kTileElements + kSlack];  // after a Hadamard transform, BF16
  alignas(64) uint32_t work[kTileElements + kSlack];
  alignas(64) uint32_t amax[kTileElements / 16 + kSlack];
  alignas(64) uint32_t stored[kTileElements / 16 + kSlack];
  alignas(64) float inv[kTileElements / 16 + kSlack];
  alignas(64) float lane_inv[kTileElements / 16 + kSlack];
  // For blocks whose elements are encoded from BF16 bits.
  alignas(64) uint8_t scale_codes[kTileElements / 16 + kSlack];
  alignas(64) uint16_t scale_values[kTileElements / 16 + kSlack];  // BF16
  alignas(64) uint16_t thresholds[4][kTileElements / 16 + kSlack];
  alignas(64) uint8_t random[kTileElements / 16 + kSlack];  // for one row
  // For one row, or for the columns that are stored at once.
  alignas(64) uint8_t codes[HWY_MAX(kTileElements / 16, 2 * kPair * kTileSide) + kSlack];
  Ahead ahead;
};

// Calls body with a view of the tile: x itself where its rows can be used as they are, else a copy
// zero-padded to whole blocks. `copies`: whether body begins with maxima, which make the copy.
template <class Body>
HWY_INLINE void with_tile(const ConstMatrix& x, const TileArea& area, bool rows_only, bool copies,
                          Scratch& scratch, const Body& body) {
  const bool in_place = rows_only && x.column_stride == 1 && area.columns % kTile == 0;
  const int64_t at = origin(x, area);
  const int64_t rows = rows_only ? area.rows : round_up(area.rows, kTile);
  const int64_t columns = round_up(area.columns, kTile);
  if (x.dtype == DType::bf16) {
    auto* buffer = reinterpret_cast<uint16_t*>(scratch.tile);
    if (copies && x.column_stride == 1 && rows == area.rows && columns == area.columns)
      return body(TileView<uint16_t>{buffer, columns, rows, columns,
                                     static_cast<const uint16_t*>(x.data) + at, x.row_stride});
    body(in_place ? TileView<uint16_t>{static_cast<const uint16_t*>(x.data) + at, x.row_stride,
                                       rows, columns}
                  : load_tile(x, area, rows, columns, buffer));
  } else if (in_place && x.dtype == DType::f32) {
    body(TileView<float>{static_cast<const float*>(x.data) + at, x.row_stride, rows, columns});
  } else {
    body(load_tile(x, area, rows, columns, scratch.tile));
  }
}

// Calls body with the tile transformed as the spec requires, along or across its rows.
template <class T, class Body>
HWY_INLINE void with_transform(const Hadamard& h, bool along_rows, const TileView<T>& tile,
                               Scratch& scratch, const Body& body) {
  if (h.dim == 0) return body(tile);
  if (along_rows)
    hadamard_rows(h, tile, scratch.transformed);
  else if (h.dim == 16)
    hadamard_columns<16>(h, tile, scratch.transformed);
  else
    hadamard_columns<0>(h, tile, scratch.transformed);
  body(TileView<uint16_t>{scratch.transformed, tile.columns, tile.rows, tile.columns});
}

// Cuts every matrix of every part into tiles and calls body(part, area, scratch) on each, in
// parallel. `passes`: how often body reads its tile.
template <class Body>
HWY_INLINE void for_tiles(const std::vector<ConstMatrix>& parts, int64_t tile_rows,
                          int64_t tile_columns, int passes, const Executor& executor,
                          const Body& body) {
  Pieces pieces;
  for (const ConstMatrix& x : parts)
    pieces.add(x.batch * ceil_div(x.rows, tile_rows) * ceil_div(x.columns, tile_columns));
  struct Tile {
    size_t part;
    TileArea area;
  };
  const auto tile = [&](int64_t i) {
    const size_t part = pieces.part(i);
    const ConstMatrix& x = parts[part];
    const int64_t down = ceil_div(x.rows, tile_rows), across = ceil_div(x.columns, tile_columns);
    const int64_t row = i / across % down * tile_rows, column = i % across * tile_columns;
    return Tile{part, TileArea{.batch = i / across / down,
                               .row = row,
                               .column = column,
                               .rows = std::min(tile_rows, x.rows - row),
                               .columns = std::min(tile_columns, x.columns - column)}};
  };
  executor.parallel_for(pieces.total(), [&](int64_t begin, int64_t end) HWY_ATTR {
    const auto scratch = std::make_unique_for_overwrite<Scratch>();
    Tile next = tile(begin);
    for (int64_t i = begin; i < end; ++i) {
      const Tile now = next;
      if (i + 1 < end) next = tile(i + 1);
      scratch->ahead = i + 1 < end ? ahead_of(parts[next.part], next.area, passes) : Ahead();
      body(now.part, now.area, *scratch);
    }
    hwy::FlushStream();
  });
}

// If only rows are needed, they are read in one long stretch, which the hardware prefetches best;
// passes down columns use square tiles.
HWY_INLINE void tile_extents(const std::vector<ConstMatrix>& parts, bool rows_only, int lines,
                             int64_t& rows, int64_t& columns) {
  rows = columns = kTileSide;
  if (!rows_only) return;
  int64_t widest = 1;
  for (const ConstMatrix& x : parts) widest = std::max(widest, x.columns);
  // Square blocks are read `lines` rows at a time, in a wide tile for long runs of each row. Single
  // rows stay in the L1 cache from finding the amaxes until encoding.
  const int64_t width = lines > 1 ? kTileElements / lines : kTileElements / 16;
  columns = std::min(width, round_up(widest, kTile));
  rows = lines > 1 ? lines : kTileElements / 16 / columns;
}

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
