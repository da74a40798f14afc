// The padding of storage layouts, for operands without groups.
#include "gpu/quantize/fill.h"
#include "gpu/quantize/host.h"

namespace blockscale::gpu {
namespace {

// Fills the padding of `batch` contiguous matrices: blockIdx.y, and every gridDim.y-th after it.
__global__ void __launch_bounds__(kFillThreads)
    padding_kernel(uint8_t* to, Layout layout, int64_t batch, int64_t rows, int64_t columns,
                   uint8_t value) {
  after_previous();
  const int64_t each = padded_rows(layout, rows) * padded_columns(layout, columns);
  const Share share{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  for (int64_t b = blockIdx.y; b < batch; b += gridDim.y)
    fill_around(to + b * each, layout, rows, columns, rows, columns, value, share);
}

void fill(uint8_t* to, Layout layout, int64_t batch, int64_t rows, int64_t columns, uint8_t value,
          NativeStream stream) {
  const int64_t count =
      padded_rows(layout, rows) * padded_columns(layout, columns) - rows * columns;
  if (count == 0 || batch == 0) return;
  const dim3 grid(grid_for(count), static_cast<unsigned>(std::min<int64_t>(batch, 1 << 10)));
  start(padding_kernel, grid, kFillThreads, 0, stream, to, layout, batch, rows, columns, value);
}

}  // namespace

void fill_padding(const Quantized& out, const Stream& stream) {
  const StoredShape s = out.shape();
  fill(out.codes, out.layout.codes, out.batch, s.code_rows, s.code_columns, 0, native(stream));
  if (out.spec.scale != Format::fp32)
    fill(out.scales, out.layout.scales, out.batch, s.scale_rows, s.scale_columns,
         padding_fill(out.layout.scales, out.spec.scale), native(stream));
}

}  // namespace blockscale::gpu
