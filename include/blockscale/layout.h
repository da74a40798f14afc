// Index maps and sizes of every storage layout (specification, section 12).
//
// A layout maps (row, column) in a matrix of scales or of code bytes to an offset. Every layout is
// a bijection between the padded matrix and the buffer.
#pragma once

#include <bit>
#include <string>
#include <string_view>

#include "blockscale/formats.h"
#include "blockscale/spec.h"

namespace blockscale {

enum class Layout : uint8_t { linear, mn_major, nv_128x4, aiter_scale, mfma_16x16 };

struct LayoutTraits {
  const char* name;
  bool for_codes;
  bool for_scales;
  int scale_bytes;  // size of the scales it can hold; 0 = any
  int row_multiple;
  int column_multiple;
  int run_rows;   // rows whose elements are one constant step apart
  int tile_rows;  // rows after which the pattern repeats: one or more runs
};

inline constexpr LayoutTraits kLayouts[] = {
    //  name         codes  scales bytes rows columns run tile
    {"linear", true, true, 0, 1, 1, 1, 1},          {"mn_major", false, true, 4, 4, 1, 1, 1},
    {"nv_128x4", false, true, 1, 128, 4, 32, 128},  {"aiter_scale", false, true, 1, 256, 8, 16, 32},
    {"mfma_16x16", true, false, 1, 16, 32, 16, 16},
};
inline constexpr int kLayoutCount = sizeof(kLayouts) / sizeof(kLayouts[0]);

BLOCKSCALE_HD constexpr LayoutTraits traits(Layout l) {
  return look_up<kLayouts, kLayoutCount>(static_cast<int>(l));
}

// All multiples are powers of two, which spares GPUs a 64-bit division.
static_assert([] {
  for (const LayoutTraits& t : kLayouts)
    if ((t.row_multiple & (t.row_multiple - 1)) || (t.column_multiple & (t.column_multiple - 1)))
      return false;
  return true;
}());
template <class Int>
BLOCKSCALE_HD constexpr Int padded_as(Int n, int multiple) {
  return (n + static_cast<Int>(multiple) - 1) & -static_cast<Int>(multiple);
}
BLOCKSCALE_HD constexpr int64_t padded_rows(Layout l, int64_t rows) {
  return padded_as(rows, traits(l).row_multiple);
}
BLOCKSCALE_HD constexpr int64_t padded_columns(Layout l, int64_t columns) {
  return padded_as(columns, traits(l).column_multiple);
}
BLOCKSCALE_HD constexpr int64_t layout_size(Layout l, int64_t rows, int64_t columns) {
  return padded_rows(l, rows) * padded_columns(l, columns);
}

// Offset of element (r, s) of a rows x columns matrix, in elements. In every layout it is the sum
// of a part that depends on r alone and one that depends on s alone. Every case names its layout,
// so that its multiples are constants even where `l` is not. `Int` must hold the size of the
// layout: a GPU uses uint32_t where it can, at a quarter of the cost.
template <class Int>
BLOCKSCALE_HD constexpr Int layout_row_as(Layout l, Int columns, Int r) {
  switch (l) {
    case Layout::mn_major:
      return r;
    case Layout::nv_128x4:
      return r / 128 * 128 * padded_as(columns, traits(Layout::nv_128x4).column_multiple) +
             r % 32 * 16 + r % 128 / 32 * 4;
    case Layout::aiter_scale:
      return r / 32 * 32 * padded_as(columns, traits(Layout::aiter_scale).column_multiple) +
             r % 16 * 4 + r / 16 % 2;
    case Layout::mfma_16x16:
      return r / 16 * 16 * padded_as(columns, traits(Layout::mfma_16x16).column_multiple) +
             r % 16 * 16;
    case Layout::linear:
      break;
  }
  return r * columns;
}
template <class Int>
BLOCKSCALE_HD constexpr Int layout_column_as(Layout l, Int rows, Int s) {
  switch (l) {
    case Layout::mn_major:
      return s * padded_as(rows, traits(Layout::mn_major).row_multiple);
    case Layout::nv_128x4:
      return s / 4 * 512 + s % 4;
    case Layout::aiter_scale:
      return s / 8 * 256 + s % 4 * 64 + s / 4 % 2 * 2;
    case Layout::mfma_16x16:
      return s / 16 * 256 + s % 16;
    case Layout::linear:
      break;
  }
  return s;
}
template <class Int>
BLOCKSCALE_HD constexpr Int layout_offset_as(Layout l, Int rows, Int columns, Int r, Int s) {
  return layout_row_as(l, columns, r) + layout_column_as(l, rows, s);
}
BLOCKSCALE_HD constexpr int64_t layout_offset(Layout l, int64_t rows, int64_t columns, int64_t r,
                                              int64_t s) {
  return layout_offset_as<int64_t>(l, rows, columns, r, s);
}

// The row part of the offset as precomputed numbers, for a kernel that needs it row after row. The
// pitch, from tile to tile, must fit in 32 bits.
struct RowSteps {
  uint32_t run_mask, step;                // within a run
  uint32_t run_shift, runs_mask, stride;  // from run to run of a tile
  uint32_t tile_shift, pitch;             // from tile to tile

  BLOCKSCALE_HD constexpr uint64_t at(uint32_t r) const {
    return uint64_t{r >> tile_shift} * pitch +
           ((r & run_mask) * step + (r >> run_shift & runs_mask) * stride);
  }
};
constexpr RowSteps row_steps(Layout l, int64_t columns) {
  const auto run = static_cast<uint32_t>(traits(l).run_rows);
  const auto tile = static_cast<uint32_t>(traits(l).tile_rows);
  const auto at = [&](uint32_t r) {
    return static_cast<uint32_t>(layout_row_as<int64_t>(l, columns, r));
  };
  const auto log2 = [](uint32_t n) { return static_cast<uint32_t>(std::countr_zero(n)); };
  return {run - 1,        run > 1 ? at(1) : 0,      log2(run),
          tile / run - 1, tile > run ? at(run) : 0, log2(tile),
          at(tile)};
}
static_assert([] {
  for (int l = 0; l < kLayoutCount; ++l)
    for (int r = 0; r < 300; ++r)
      if (row_steps(Layout{static_cast<uint8_t>(l)}, 5).at(static_cast<uint32_t>(r)) !=
          static_cast<uint64_t>(layout_row_as<int64_t>(Layout{static_cast<uint8_t>(l)}, 5, r)))
        return false;
  return true;
}());

// The byte that padding holds: 1.0 for E8M0 in AITER's layout, 0 elsewhere.
BLOCKSCALE_HD constexpr uint8_t padding_fill(Layout l, Format scale) {
  return l == Layout::aiter_scale && scale == Format::e8m0 ? 127 : 0;
}

// How one operand is stored: a layout for its codes and one for its scales. The text form is one
// name ("nv_128x4": codes are linear), or both joined by '+' ("mfma_16x16+aiter_scale").
struct StorageLayout {
  Layout codes = Layout::linear;
  Layout scales = Layout::linear;
  constexpr bool operator==(const StorageLayout&) const = default;
};
StorageLayout parse_layout(std::string_view text);
std::string to_string(const StorageLayout& layout);
// Throws Error when `spec` cannot be stored in `layout`.
void validate(const QuantSpec& spec, const StorageLayout& layout);

// Extents of a stored operand. A line is a row of the stored codes: a row of x for axis -1, a
// column of x for axis -2; the extent is the contraction length.
struct StoredShape {
  int64_t lines;        // number of lines
  int64_t extent;       // contraction length, extended to a multiple of the Hadamard size
  int64_t padded;       // extent rounded up to whole blocks: codes per line
  int64_t blocks;       // blocks per line
  int64_t line_bytes;   // bytes of codes per line before any layout padding
  int64_t scale_lines;  // lines per row of scales: 1, or those of a block in a grid of squares
  // The matrices that the layouts hold: bytes of codes, and scales. A group (groups.h) may be part
  // of wider matrices.
  int64_t code_rows, code_columns;
  int64_t scale_rows, scale_columns;
  int64_t code_bytes;   // size of the codes buffer
  int64_t scale_count;  // elements of the scales buffer
};
// Sets the buffer sizes from the matrices that the buffers hold.
BLOCKSCALE_HD constexpr StoredShape with_sizes(StoredShape s, const StorageLayout& layout) {
  s.code_bytes = layout_size(layout.codes, s.code_rows, s.code_columns);
  s.scale_count = layout_size(layout.scales, s.scale_rows, s.scale_columns);
  return s;
}
BLOCKSCALE_HD constexpr StoredShape stored_shape(const QuantSpec& spec, const StorageLayout& layout,
                                                 int axis, int64_t rows, int64_t columns) {
  StoredShape s{};
  s.lines = axis == -1 ? rows : columns;
  const int64_t contraction = axis == -1 ? columns : rows;
  s.extent = spec.hadamard.dim ? round_up(contraction, spec.hadamard.dim) : contraction;
  s.blocks = ceil_div(s.extent, spec.block);
  s.padded = s.blocks * spec.block;
  s.line_bytes = s.padded / codes_per_byte(spec.element);
  // The byte layouts hold one row of scales per line: square blocks are replicated in them.
  s.scale_lines = spec.square && traits(layout.scales).scale_bytes != 1 ? spec.block : 1;
  s.code_rows = s.lines;
  s.code_columns = s.line_bytes;
  s.scale_rows = ceil_div(s.lines, s.scale_lines);
  s.scale_columns = s.blocks;
  return with_sizes(s, layout);
}

}  // namespace blockscale
