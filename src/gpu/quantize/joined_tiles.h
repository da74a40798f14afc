// direct_tiles.h down columns, with two tiles per thread block, one below the other: each column
// has one word of scales per tile, and the two words are stored together.
#pragma once

#include "gpu/quantize/direct_tiles.h"

namespace blockscale::gpu {

inline constexpr int kJoined = 2;

// Each row of threads (threadIdx.y) has one tile.
template <class Column>
struct JoinedMemory {
  struct Part {
    Stage<Column::kPass> stage;
    DirectMemory direct;
  };
  Part part[kJoined];
};

// Stores the scales of both tiles; false where a line's two words are not an aligned pair.
template <class Column>
BLOCKSCALE_DEVICE bool store_joined_scales(const Side& s, const MatrixAt& m, const TileAt& at,
                                           const JoinedMemory<Column>& memory) {
  constexpr bool kFp32 = Column::kPass.scale == Format::fp32;
  const int words = kFp32 ? s.scale_columns : s.scale_columns / 4;  // per line
  if (!s.linear_scales || !(kFp32 || s.scale_words) || words % kJoined != 0 ||
      reinterpret_cast<uintptr_t>(m.scales) % sizeof(uint2) != 0)
    return false;
  const int line = static_cast<int>(threadIdx.y * kDirectThreads + threadIdx.x);
  if (line >= min(kTile, s.lines - at.column)) return true;
  const auto pair = static_cast<uint32_t>(at.row / (kJoined * kTile));
  const auto pairs = static_cast<uint32_t>(words / kJoined);
  reinterpret_cast<uint2*>(m.scales)[static_cast<uint32_t>(at.column + line) * pairs + pair] = {
      memory.part[0].stage.scales[line], memory.part[1].stage.scales[line]};
  return true;
}

template <class Column>
inline constexpr int kJoinedBlocks = kTileBlocks<Pass{}, Column::kPass, Bf16In<true>> / kJoined;

template <class Column>
__global__ void __launch_bounds__(kDirectThreads* kJoined, kJoinedBlocks<Column>)
    joined_kernel(const __grid_constant__ TilesParams p) {
  after_previous(p);
  constexpr Pass kPass = Column::kPass;
  constexpr int kColumns = ColumnPart<kPass>::kColumns;
  BLOCKSCALE_DYNAMIC_SHARED(bytes);
  auto& memory = *reinterpret_cast<JoinedMemory<Column>*>(bytes);
  auto& part = in_place(memory.part[threadIdx.y]);
  TileAt at = direct_tile(p.sideways);
  if (at.column >= p.x.columns) return;
  at.row = at.row * kJoined + static_cast<int>(threadIdx.y) * kTile;
  const OutputAt<false, 1> out(p.column);
  const auto out_at = [&] { return out; };
  columns_of_tile<kPass, Bf16Tile>(out_at, at, part.direct, part.stage, [&](const auto& columns) {
    LoadedColumns<PairColumns> loaded;
    columns.load(Bf16In<true>{}, p.x, at, loaded.in);
    return loaded;
  });
  __syncthreads();
  const Side& s = p.column;
  const MatrixAt m = out.template matrix<kPass>(at, {});
  store_staged_codes<kPass, kColumns, kDirectThreads>(s, m, at.column, at.row, part.stage);
  if (!store_joined_scales(s, m, at, memory))
    store_staged_scales<kPass, kDirectThreads>(s, m, at.column, at.row,
                                               min(kTile, s.lines - at.column), part.stage);
}

}  // namespace blockscale::gpu
