// Writes what quantizers leave out: the padding of layouts and, with groups, what lies behind the
// last group.
#pragma once

#include "gpu/quantize/scale.h"

namespace blockscale::gpu {

inline constexpr int kFillThreads = 256;  // of a thread block

// A buffer viewed as a matrix in memory in which groups follow one another from left to right.
struct Memory {
  int64_t rows, pitch;  // in elements
  int64_t used;         // columns
};
BLOCKSCALE_DEVICE Memory memory_of(Layout l, int axis, int64_t rows, int64_t columns,
                                   int64_t used) {
  const int64_t all_rows = padded_rows(l, rows), all_columns = padded_columns(l, columns);
  if (l == Layout::linear && axis == -2) return {rows, columns, used};
  if (l == Layout::mn_major && axis == -1) return {columns, all_rows, used};
  return {1, all_rows * all_columns, used * (axis == -1 ? all_columns : all_rows)};
}

// Fills what lies behind the last group, one T at a time; `ratio` elements of the layout make one
// T. A warp takes a row, or all threads do if there is only one.
template <class T>
BLOCKSCALE_DEVICE void fill_behind(T* to, const Memory& m, int ratio, T value, const Share& share) {
  const int64_t pitch = m.pitch / ratio, used = m.used / ratio;
  const int thread = share.at * kFillThreads + static_cast<int>(threadIdx.x);
  const int threads = share.of * kFillThreads, together = m.rows == 1 ? threads : 32;
  for (int64_t row = thread / together; row < m.rows; row += threads / together)
    for (int64_t c = used + thread % together; c < pitch; c += together)
      to[row * pitch + c] = value;
}

// Fills what the layout of one group holds besides its rows x columns.
template <class T>
BLOCKSCALE_DEVICE void fill_around(T* to, Layout l, int64_t all_rows, int64_t all_columns,
                                   int64_t rows, int64_t columns, T value, const Share& share) {
  const int64_t end_row = padded_rows(l, rows), end_column = padded_columns(l, columns);
  const int64_t below = (end_row - rows) * end_column, right = rows * (end_column - columns);
  for (int64_t i = share.at * kFillThreads + threadIdx.x; i < below + right;
       i += share.of * kFillThreads) {
    const int64_t row = i < below ? rows + i / end_column : (i - below) / (end_column - columns);
    const int64_t column =
        i < below ? i % end_column : columns + (i - below) % (end_column - columns);
    to[layout_offset(l, all_rows, all_columns, row, column)] = value;
  }
}

// Calls fill(scales from `at` on, their padding value, their NaN).
template <class Fill>
BLOCKSCALE_DEVICE void with_scales(const Quantized& out, uint8_t* at, const Fill& fill) {
  if (out.spec.scale == Format::fp32)
    fill(reinterpret_cast<uint32_t*>(at), 0u, kNanBits);
  else
    fill(at, padding_fill(out.layout.scales, out.spec.scale),
         static_cast<uint8_t>(traits(out.spec.scale).nan_code()));
}

// Fills what lies behind the last group, from these steps of the layouts on, and all outer scales.
// With wrong offsets that is everything.
BLOCKSCALE_DEVICE void fill_behind_groups(const Side& side, int64_t codes, int64_t scales,
                                          int count, bool wrong, const Share& share) {
  const Quantized& out = side.out;
  const StoredShape& s = side.shape;
  // Lines of codes, and where groups start in them, are multiples of 8 bytes.
  fill_behind(reinterpret_cast<uint2*>(out.codes),
              memory_of(out.layout.codes, out.axis, s.code_rows, s.code_columns, codes), 8, uint2{},
              share);
  with_scales(out, out.scales, [&](auto* to, auto padding, auto nan) {
    fill_behind(to, memory_of(out.layout.scales, out.axis, s.scale_rows, s.scale_columns, scales),
                1, wrong ? nan : padding, share);
  });
  if (out.spec.outer && (wrong || side.amax))
    for (int g = share.at * kFillThreads + static_cast<int>(threadIdx.x); g < count;
         g += share.of * kFillThreads)
      out.outer[g] = wrong ? bit_cast<float>(kNanBits) : outer_of(side, g).dec;
}

// Fills the padding of the layouts of one group, whose extents `s` has.
BLOCKSCALE_DEVICE void fill_around_group(const Side& s, const MatrixAt& m, const Share& share) {
  const Layout codes = s.out.layout.codes, scales = s.out.layout.scales;
  if (codes != Layout::linear)
    fill_around(m.codes, codes, s.shape.code_rows, s.line_bytes, s.lines,
                s.padded / codes_per_byte(s.out.spec.element), uint8_t{0}, share);
  if (scales != Layout::linear)
    with_scales(s.out, m.scales, [&](auto* to, auto padding, auto) {
      fill_around(to, scales, s.shape.scale_rows, s.scale_columns,
                  ceil_div(s.lines, s.shape.scale_lines), s.blocks, padding, share);
    });
}

}  // namespace blockscale::gpu
