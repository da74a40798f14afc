// direct_tiles.h for both inputs of a linear layer's product in one launch, where there is so
// little work that the device waits for the host.
#pragma once

#include <algorithm>
#include <span>

#include "gpu/dequantize/piece.h"
#include "gpu/launch.h"
#include "gpu/quantize/direct_tiles.h"

namespace blockscale::gpu {

// Where the values of a row operand go: rows `stride` elements apart; nowhere if `to` is null.
struct ValuesAt {
  uint16_t* to;
  int64_t stride;
  Decoder scale;
};

struct PairParams {
  TilesParams of[2];
  ValuesAt values[2];
  WordCopy word;
};

// Whether it writes values, for codes that no GEMM reads: FP32 scales leave BF16.
BLOCKSCALE_HD constexpr bool writes_values(const Pass& row) {
  return row.stored_scale() != Format::fp32;
}

// Decodes the values of a tile whose codes this thread block has just written.
template <Pass kPass>
BLOCKSCALE_DEVICE void decode_tile(const Source& x, const Side& s, const TileAt& at,
                                   const ValuesAt& values) {
  static_assert((kPass.fp4() || kPass.encoder == Encoder::e4m3fn) && !kPass.hadamard);
  constexpr Codec kCodec = kPass.fp4() ? Codec::fp4 : Codec::e4m3fn;
  using Codes = std::conditional_t<kPass.fp4(), uint32_t, uint2>;
  constexpr int kAcross = kTile / kPiece, kBlock = kPass.block();
  const int c = at.column + static_cast<int>(threadIdx.x) % kAcross * kPiece;
  if (c >= x.columns) return;
  const int end = min(at.row + kTile, x.rows);
#pragma unroll 4
  for (int line = at.row + static_cast<int>(threadIdx.x) / kAcross; line < end;
       line += kDirectThreads / kAcross) {
    const uint8_t* codes = s.out.codes + int64_t{line} * s.line_bytes;
    const int row = kPass.square ? line / kBlock : line;
    const uint8_t stored = s.out.scales[int64_t{row} * s.scale_columns + c / kBlock];
    uint32_t largest = 0;
    uint4 piece = decode_bf16x8<kCodec>(
        Decoder(), *reinterpret_cast<const Codes*>(codes + (kPass.fp4() ? c / 2 : c)),
        values.scale.scale(stored), largest);
    if (has_nan(largest)) piece = define_nan(piece);
    uint16_t* const to = values.to + line * values.stride + c;
    if (x.columns - c >= kPiece)
      *reinterpret_cast<uint4*>(to) = piece;
    else
      store_some(to, piece, 0, x.columns - c);
  }
}

template <class Row, class Column>
BLOCKSCALE_DEVICE void tile_of_pair(const TilesParams& p, const ValuesAt& values, uint8_t* bytes) {
  auto& memory = in_place(*reinterpret_cast<TileMemory<Row, Column, Bf16In<true>>*>(bytes));
  TileAt at = direct_tile(p.sideways);
  at.batch = 0;
  if (at.row >= p.x.rows || at.column >= p.x.columns) return;
  quantize_tile(p.x, at, memory, InMatrix{p});
  if constexpr (writes_values(Row::kPass)) {
    if (!values.to) return;
    __syncthreads();  // makes the codes visible to the whole thread block
    decode_tile<Row::kPass>(p.x, p.row, at, values);
  }
}

// Grid: x and y are the tiles of either input; z selects the input.
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
    tile_of_pair<RowA, ColumnA>(p.of[0], p.values[0], bytes);
  else
    tile_of_pair<RowB, ColumnB>(p.of[1], p.values[1], bytes);
}

template <class RowA, class ColumnA, class RowB, class ColumnB>
void launch_pair(const PairParams& p, const dim3& grid, NativeStream stream) {
  constexpr auto kKernel = pair_kernel<RowA, ColumnA, RowB, ColumnB>;
  constexpr int kBytes =
      static_cast<int>(std::max(sizeof(TileMemory<RowA, ColumnA, Bf16In<true>>),
                                sizeof(TileMemory<RowB, ColumnB, Bf16In<true>>)));
  start_with_shared<kKernel>(grid, kDirectThreads, kBytes, stream, p);
}

// The compiled pairs: x and W as the named recipes quantize them, with and without the operands of
// the backward pass.
struct PairEntry {
  Pass row[2], column[2];
  void (*launch)(const PairParams&, const dim3&, NativeStream);
};
std::span<const PairEntry> pair_kernels();

}  // namespace blockscale::gpu
