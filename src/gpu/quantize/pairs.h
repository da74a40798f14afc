// direct_tiles.h for the two inputs of a linear layer's product in one launch, where there is so
// little to do that the device waits for the host.
#pragma once

#include <algorithm>
#include <span>

#include "gpu/launch.h"
#include "gpu/quantize/direct_tiles.h"

namespace blockscale::gpu {

struct PairParams {
  TilesParams of[2];
  WordCopy word;
};

template <class Row, class Column>
BLOCKSCALE_DEVICE void tile_of_pair(const TilesParams& p, uint8_t* bytes) {
  auto& memory = in_place(*reinterpret_cast<TileMemory<Row, Column, Bf16In<true>>*>(bytes));
  TileAt at = direct_tile(p.sideways);
  at.batch = 0;
  if (at.row >= p.x.rows || at.column >= p.x.columns) return;
  quantize_tile<Row, Column, Bf16In<true>, false>(p, p.x, at, memory, [](int) {});
}

// Grid: the tiles of either; which of the two.
template <class RowA, class ColumnA, class RowB, class ColumnB>
__global__ void __launch_bounds__(
    kDirectThreads, (std::min(kTileBlocks<RowA::kPass, ColumnA::kPass, Bf16In<true>>,
                              kTileBlocks<RowB::kPass, ColumnB::kPass, Bf16In<true>>)))
    pair_kernel(const __grid_constant__ PairParams p) {
  after_previous();
  if (p.word.to && (blockIdx.x | blockIdx.y | blockIdx.z | threadIdx.x) == 0)
    *p.word.to = *p.word.from;
  BLOCKSCALE_DYNAMIC_SHARED(bytes);
  if (blockIdx.z == 0)
    tile_of_pair<RowA, ColumnA>(p.of[0], bytes);
  else
    tile_of_pair<RowB, ColumnB>(p.of[1], bytes);
}

template <class RowA, class ColumnA, class RowB, class ColumnB>
void launch_pair(const PairParams& p, const dim3& grid, NativeStream stream) {
  constexpr auto kKernel = pair_kernel<RowA, ColumnA, RowB, ColumnB>;
  constexpr int kBytes =
      static_cast<int>(std::max(sizeof(TileMemory<RowA, ColumnA, Bf16In<true>>),
                                sizeof(TileMemory<RowB, ColumnB, Bf16In<true>>)));
  prepare<kKernel>(kBytes);
  start(kKernel, grid, kDirectThreads, kBytes, stream, p);
}

// The pairs that are compiled: x and W as the named recipes quantize them, with the operands of the
// backward and without.
struct PairEntry {
  Pass row[2], column[2];
  void (*launch)(const PairParams&, const dim3&, NativeStream);
};
std::span<const PairEntry> pair_kernels();

}  // namespace blockscale::gpu
