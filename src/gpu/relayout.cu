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
  Plan plan;  // of groups: side 0 is `from`
};

// Goes on to group `blockIdx.y`, if there are groups: `p` becomes that group's.
BLOCKSCALE_DEVICE void enter_group(RelayoutParams& p, int group) {
  const int bytes = p.to.spec.scale == Format::fp32 ? 4 : 1;
  const GroupAt from = p.plan.side[0][group], to = p.plan.side[1][group];
  const auto extents = [](StoredShape& s, const GroupAt& at, int per_byte) {
    s.lines = at.lines;
    s.blocks = at.blocks;
    s.line_bytes = at.padded / per_byte;
    s.code_columns = at.code_columns;
    s.scale_columns = at.scale_columns;
  };
  const int per_byte = codes_per_byte(p.to.spec.element);
  extents(p.f, from, per_byte);
  extents(p.t, to, per_byte);
  p.from.codes += from.codes;
  p.from.scales += from.scales * bytes;
  p.to.codes += to.codes;
  p.to.scales += to.scales * bytes;
}

// Calls body(params) for what the block has part in: everything, or some of the groups.
template <class Body>
BLOCKSCALE_DEVICE void for_groups(const RelayoutParams& given, const Body& body) {
  if (!given.plan.head) return body(given);
  for (int g = static_cast<int>(blockIdx.y); g < given.plan.count;
       g += static_cast<int>(gridDim.y)) {
    RelayoutParams p = given;
    enter_group(p, g);
    body(p);
  }
}

__global__ void __launch_bounds__(kBlock)
    relayout_codes_kernel(const __grid_constant__ RelayoutParams given) {
  // 8 bytes at a time: every layout keeps 16 together, and lines of packed codes are multiples
  // of 8 (a block of 16).
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlock;
  for_groups(given, [step](const RelayoutParams& p) {
    const int64_t per_line = p.t.line_bytes / 8, all = p.t.lines * per_line * p.to.batch;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(kBlock) + threadIdx.x; i < all; i += step) {
      const int64_t at = i % per_line * 8, line = i / per_line % p.t.lines;
      const int64_t batch = i / per_line / p.t.lines;
      *reinterpret_cast<uint2*>(
          p.to.codes + batch * p.t.code_bytes +
          layout_offset(p.to.layout.codes, p.t.code_rows, p.t.code_columns, line, at)) =
          *reinterpret_cast<const uint2*>(
              p.from.codes + batch * p.f.code_bytes +
              layout_offset(p.from.layout.codes, p.f.code_rows, p.f.code_columns, line, at));
    }
  });
}

template <class Scale>
__global__ void __launch_bounds__(kBlock)
    relayout_scales_kernel(const __grid_constant__ RelayoutParams given) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlock;
  for_groups(given, [step](const RelayoutParams& p) {
    const int64_t rows = ceil_div(p.t.lines, p.t.scale_lines);
    const int64_t all = rows * p.t.blocks * p.to.batch;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(kBlock) + threadIdx.x; i < all; i += step) {
      const int64_t s = i % p.t.blocks, row = i / p.t.blocks % rows;
      const int64_t batch = i / p.t.blocks / rows;
      // The row of the source that covers the same lines: grids of square blocks have fewer rows.
      const int64_t from_row = row * p.t.scale_lines / p.f.scale_lines;
      const int64_t to_at =
          layout_offset(p.to.layout.scales, p.t.scale_rows, p.t.scale_columns, row, s);
      const int64_t from_at =
          layout_offset(p.from.layout.scales, p.f.scale_rows, p.f.scale_columns, from_row, s);
      reinterpret_cast<Scale*>(p.to.scales)[batch * p.t.scale_count + to_at] =
          reinterpret_cast<const Scale*>(p.from.scales)[batch * p.f.scale_count + from_at];
    }
  });
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
  fill<uint8_t>(out.codes, out.layout.codes, out.batch, s.code_rows, s.code_columns, 0,
                native(stream));
  if (out.spec.scale == Format::fp32)
    fill<uint32_t>(reinterpret_cast<uint32_t*>(out.scales), out.layout.scales, out.batch,
                   s.scale_rows, s.scale_columns, 0, native(stream));
  else
    fill<uint8_t>(out.scales, out.layout.scales, out.batch, s.scale_rows, s.scale_columns,
                  padding_fill(out.layout.scales, out.spec.scale), native(stream));
}

void relayout(const ConstQuantized& from, const Quantized& to, const Stream& stream) {
  RelayoutParams p{from, to, from.shape(), to.shape(), {}};
  const auto grid = [&](int64_t count) {
    if (!to.groups) return dim3(grid_for(count));
    const int64_t groups = std::min<int64_t>(to.groups.count, 1 << 15);
    return dim3(grid_for(ceil_div(count, groups)), static_cast<unsigned>(groups));
  };
  if (to.groups) {
    const ConstQuantized target = as_const(to);
    p.plan = make_plan(to.groups, to.rows, to.columns, &from, &target, false, stream);
  }
  if (to.spec.outer)
    copy_async(to.outer, from.outer, static_cast<size_t>(to.matrices()) * sizeof(float),
               native(stream));
  if (from.layout.codes == to.layout.codes)
    copy_async(to.codes, from.codes, static_cast<size_t>(to.batch * p.t.code_bytes),
               native(stream));
  else if (const int64_t count = to.batch * p.t.code_bytes / 8)
    start(relayout_codes_kernel, grid(count), kBlock, 0, native(stream), p);
  if (const int64_t count = to.batch * p.t.scale_count) {
    if (to.spec.scale == Format::fp32)
      start(relayout_scales_kernel<uint32_t>, grid(count), kBlock, 0, native(stream), p);
    else
      start(relayout_scales_kernel<uint8_t>, grid(count), kBlock, 0, native(stream), p);
  }
  check_launch("relayout");
  if (!to.groups) return fill_padding(to, stream);
  Side side{};
  side.out = to;
  side.shape = p.t;
  fill_groups(side, p.plan, 1, stream);
}

}  // namespace blockscale::gpu
