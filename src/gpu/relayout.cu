// Codes and scales from one storage layout to another, and the padding of layouts.
#include "gpu/launch.h"
#include "gpu/quantize.h"

namespace blockscale::gpu {
namespace {

constexpr int kBlock = 256;  // threads

struct RelayoutParams {
  ConstQuantized from;
  Quantized to;
  StoredShape f, t;
};

__global__ void __launch_bounds__(kBlock)
    relayout_codes_kernel(const __grid_constant__ RelayoutParams p) {
  // 8 bytes at a time: every layout keeps 16 together, and lines of packed codes are multiples
  // of 8 (a block of 16).
  const int64_t per_line = p.t.line_bytes / 8, all = p.t.lines * per_line * p.to.batch;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kBlock) + threadIdx.x; i < all; i += step) {
    const int64_t at = i % per_line * 8, line = i / per_line % p.t.lines;
    const int64_t batch = i / per_line / p.t.lines;
    *reinterpret_cast<uint2*>(
        p.to.codes + batch * p.t.code_bytes +
        layout_offset(p.to.layout.codes, p.t.lines, p.t.line_bytes, line, at)) =
        *reinterpret_cast<const uint2*>(
            p.from.codes + batch * p.f.code_bytes +
            layout_offset(p.from.layout.codes, p.f.lines, p.f.line_bytes, line, at));
  }
}

template <class Scale>
__global__ void __launch_bounds__(kBlock)
    relayout_scales_kernel(const __grid_constant__ RelayoutParams p) {
  const int64_t block = p.to.spec.block;
  const int64_t all = p.t.scale_rows * p.t.blocks * p.to.batch;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kBlock) + threadIdx.x; i < all; i += step) {
    const int64_t s = i % p.t.blocks, row = i / p.t.blocks % p.t.scale_rows;
    const int64_t batch = i / p.t.blocks / p.t.scale_rows;
    // The row of the source that covers the same lines: grids of square blocks have fewer rows.
    const int64_t line = p.t.scale_rows == p.t.lines ? row : row * block;
    const int64_t from_row = p.f.scale_rows == p.f.lines ? line : line / block;
    reinterpret_cast<Scale*>(
        p.to.scales)[batch * p.t.scale_count +
                     layout_offset(p.to.layout.scales, p.t.scale_rows, p.t.blocks, row, s)] =
        reinterpret_cast<const Scale*>(
            p.from.scales)[batch * p.f.scale_count + layout_offset(p.from.layout.scales,
                                                                   p.f.scale_rows, p.f.blocks,
                                                                   from_row, s)];
  }
}

// What lies outside rows x columns of every matrix in a layout: the rows below first, then what is
// to the right of the matrix.
template <class T>
__global__ void __launch_bounds__(kBlock)
    fill_kernel(T* to, Layout layout, int64_t batch, int64_t rows, int64_t columns,
                int64_t all_rows, int64_t all_columns, T value) {
  const int64_t below = (all_rows - rows) * all_columns;
  const int64_t right = rows * (all_columns - columns), each = below + right;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kBlock) + threadIdx.x; i < each * batch;
       i += step) {
    const int64_t b = i / each, j = i % each;
    const int64_t row = j < below ? rows + j / all_columns : (j - below) / (all_columns - columns);
    const int64_t column =
        j < below ? j % all_columns : columns + (j - below) % (all_columns - columns);
    to[b * all_rows * all_columns + layout_offset(layout, rows, columns, row, column)] = value;
  }
}

template <class T>
void fill(T* to, Layout layout, int64_t batch, int64_t rows, int64_t columns, T value,
          NativeStream stream) {
  const int64_t all_rows = padded_rows(layout, rows), all_columns = padded_columns(layout, columns);
  const int64_t count = (all_rows * all_columns - rows * columns) * batch;
  if (count == 0) return;
  start(fill_kernel<T>, grid_for(count), kBlock, 0, stream, to, layout, batch, rows, columns,
        all_rows, all_columns, value);
  check_launch("quantize");
}

}  // namespace

void fill_padding(const Quantized& out, const Stream& stream) {
  const StoredShape s = out.shape();
  fill<uint8_t>(out.codes, out.layout.codes, out.batch, s.lines, s.line_bytes, 0, native(stream));
  if (out.spec.scale == Format::fp32)
    fill<uint32_t>(reinterpret_cast<uint32_t*>(out.scales), out.layout.scales, out.batch,
                   s.scale_rows, s.blocks, 0, native(stream));
  else
    fill<uint8_t>(out.scales, out.layout.scales, out.batch, s.scale_rows, s.blocks,
                  padding_fill(out.layout.scales, out.spec.scale), native(stream));
}

void relayout(const ConstQuantized& from, const Quantized& to, const Stream& stream) {
  const RelayoutParams p{from, to, from.shape(), to.shape()};
  if (to.spec.outer)
    copy_async(to.outer, from.outer, static_cast<size_t>(to.batch) * sizeof(float), native(stream));
  if (from.layout.codes == to.layout.codes)
    copy_async(to.codes, from.codes, static_cast<size_t>(to.batch * p.t.code_bytes),
               native(stream));
  else if (const int64_t count = to.batch * p.t.lines * p.t.line_bytes / 8)
    start(relayout_codes_kernel, grid_for(count), kBlock, 0, native(stream), p);
  if (const int64_t count = to.batch * p.t.scale_rows * p.t.blocks) {
    if (to.spec.scale == Format::fp32)
      start(relayout_scales_kernel<uint32_t>, grid_for(count), kBlock, 0, native(stream), p);
    else
      start(relayout_scales_kernel<uint8_t>, grid_for(count), kBlock, 0, native(stream), p);
  }
  check_launch("relayout");
  fill_padding(to, stream);
}

}  // namespace blockscale::gpu
