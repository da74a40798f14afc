// From codes back to values, shared by rows and columns: where pieces of work lie, their scales,
// and how rows of values are stored.
#pragma once

#include "divisor.h"
#include "gpu/dequantize/piece.h"
#include "gpu/groups/groups.h"
#include "gpu/launch.h"

namespace blockscale::gpu {

inline constexpr int kDecodeThreads = 256;

// What a piece of work belongs to: a matrix of the batch, or a row of tiles of a group.
struct Place {
  const uint8_t *codes, *scales;
  const float* outer;  // its outer scale, or null
  int64_t x;           // offset of its first element from x.data
  int row;             // the first row
  int rows, padded, code_columns, scale_columns;
  int scale_shift;  // log2 of the lines that share a row of scales
};

// What differs for a second operand with lines of the same form.
struct SecondPlace {
  const uint8_t *codes, *scales;
  int64_t x;
  int rows, scale_shift;
};

struct DequantizeParams {
  ConstQuantized q;
  StoredShape shape;
  Decoder element, scale;
  Matrix x;
  int rows, columns;
  int linear, fp32_scales;  // both layouts are linear; scales are FP32
  int block_shift;          // log2 of a block
  Plan plan;                // of groups
  Divisor parts;            // pieces of work per matrix, or per row of tiles of a group
  Divisor runs;             // along rows: pieces per line
  Divisor across;           // down columns: tiles side by side
  uint32_t all;             // along rows: threads with work
  int ahead;                // down columns: positions from a tile to what it prefetches; 0: none
  Place first;              // the first matrix of a batch
  SecondPlace second;       // the other of two operands, or no rows
};

BLOCKSCALE_DEVICE bool find(const DequantizeParams& p, uint32_t part, Place& at) {
  int batch = static_cast<int>(part);
  const StoredShape& s = p.shape;
  const int bytes = scale_bytes(p.q.spec.scale);
  if (!p.plan.head) {
    at = p.first;
    if (p.second.rows > 0 && batch == 1) {
      at.codes = p.second.codes, at.scales = p.second.scales, at.x = p.second.x;
      at.rows = p.second.rows, at.scale_shift = p.second.scale_shift;
    } else if (p.x.batch > 1) {
      at.codes += batch * s.code_bytes;
      at.scales += batch * s.scale_count * bytes;
      at.x = batch * p.x.batch_stride;
    }
  } else {
    if (batch >= p.plan.head->tile_rows) return false;
    const TileRow row = p.plan.tile_rows[batch];
    const GroupAt g = p.plan.side[0][row.group];
    batch = row.group;
    at = {p.q.codes + g.codes,
          p.q.scales + g.scales * bytes,
          nullptr,
          g.row * p.x.row_stride,
          row.row,
          g.rows,
          g.padded,
          g.code_columns,
          g.scale_columns,
          p.first.scale_shift};
  }
  if (p.q.spec.outer) at.outer = p.q.outer + batch;
  return true;
}

// The scale of a block as stored, and as a factor for its codes.
template <bool kLinear>
BLOCKSCALE_DEVICE uint32_t stored_scale(const DequantizeParams& p, const Place& at, int line,
                                        int block) {
  const int row = line >> at.scale_shift;
  const int64_t i = kLinear ? static_cast<int64_t>(row) * at.scale_columns + block
                            : layout_offset_as<uint32_t>(p.q.layout.scales,
                                                         static_cast<uint32_t>(p.shape.scale_rows),
                                                         at.scale_columns, row, block);
  return p.fp32_scales ? load_once_and_more(reinterpret_cast<const uint32_t*>(at.scales) + i)
                       : load_once(at.scales + i);
}
// To be loaded once the codes are on their way: the compiler waits for data that all threads share.
BLOCKSCALE_DEVICE float outer_of(const Place& at) { return at.outer ? load_once(at.outer) : 1.0f; }
BLOCKSCALE_DEVICE float factor_of(const DequantizeParams& p, float outer, uint32_t stored) {
  return __fmul_rn(outer, p.fp32_scales ? bit_cast<float>(stored) : p.scale.scale(stored));
}

// Where byte `byte` of a line of codes lies.
template <bool kLinear>
BLOCKSCALE_DEVICE const uint8_t* code_at(const DequantizeParams& p, const Place& at, int line,
                                         int byte) {
  if (kLinear) return at.codes + static_cast<int64_t>(line) * at.code_columns + byte;
  return at.codes + layout_offset(p.q.layout.codes, p.shape.code_rows, at.code_columns, line, byte);
}

// Stores a piece from column c on of a row that begins at element `row`. All lanes of a warp must
// come here when rows start anywhere; those without a piece have a count of 0.
template <Rows kRows>
BLOCKSCALE_DEVICE void store_piece(const DequantizeParams& p, int64_t row, int c, const PieceAt& at,
                                   const uint4& piece) {
  auto* to = static_cast<uint16_t*>(p.x.data) + row + c;
  if constexpr (kRows == Rows::anywhere)
    store_shifted(to, piece, at);
  else if (at.count >= kPiece)
    *reinterpret_cast<uint4*>(to) = piece;
  else
    store_some(to, piece, 0, at.count);
}
template <Rows kRows>
BLOCKSCALE_DEVICE void store_piece(const DequantizeParams& p, int64_t row, int c, const PieceAt& at,
                                   const float* v) {
  if constexpr (kRows != Rows::any) {
    store_piece<kRows>(p, row, c, at, to_bf16x8(v));
  } else {
#pragma unroll
    for (int j = 0; j < kPiece; ++j)
      if (j < at.count) store_value(p.x, row + (c + j) * p.x.column_stride, v[j]);
  }
}

// Where rows start anywhere, the first piece of a warp, or of a row of a tile, repeats the last
// piece of the one before: a lane also stores what the previous lane holds.
template <Rows kRows>
inline constexpr int kHalo = kRows == Rows::anywhere ? 1 : 0;  // pieces

// Gives pieces that were stored with the conversion's NaN, one below the other, the definition's
// NaN.
BLOCKSCALE_DEVICE void define_nans(uint16_t* to, int64_t stride, int count) {
#pragma unroll 1
  for (int i = 0; i < count; ++i, to += stride) {
    auto* piece = reinterpret_cast<uint4*>(to);
    *piece = define_nan(*piece);
  }
}

}  // namespace blockscale::gpu
