// Host side of the quantizers: what their kernels take, and the passes before and after them.
#pragma once

#include <algorithm>
#include <span>

#include "gpu/launch.h"
#include "gpu/quantize/walk.h"

namespace blockscale::gpu {

inline Source source_of(const ConstMatrix& x) {
  return {{},
          x.data,
          x.row_stride,
          x.column_stride,
          x.batch_stride,
          static_cast<int>(x.rows),
          static_cast<int>(x.columns),
          x.dtype};
}

// Whether 32 bits, unsigned, hold the bytes of a tile's rows, as compiled kernels count them. Other
// inputs, and those whose rows come in descending order, go to the general kernels.
template <class Input>
bool rows_are_near(const Input& x) {
  return x.row_stride >= 0 && x.row_stride < (int64_t{1} << 32) / kTile / dtype_bytes(x.dtype);
}

// Sets the input of a kernel that walks over tiles.
inline void set_input(QuantizeParams& p, const ConstMatrix& x, const Plan* plan = nullptr) {
  p.x = source_of(x);
  p.copies =
      is_bf16_rows(x) && x.rows > 0 && x.columns > 0 &&
      describe(p.x.map, x.data, x.rows, x.columns, x.batch, x.row_stride, x.batch_stride, kTile);
  p.tiles_down = static_cast<int>(ceil_div(x.rows, kTile));
  p.tiles_across = static_cast<int>(ceil_div(x.columns, kTile));
  p.batch = static_cast<int>(x.batch);
  p.aligned = is_aligned(x);
  if (plan) p.plan = *plan;
  p.tiles =
      static_cast<int>(x.batch * (plan ? plan->most_tile_rows : p.tiles_down) * p.tiles_across);
}
// Sets its grid of at most `most` thread blocks, and how far apart a block's tiles lie.
inline unsigned set_grid(QuantizeParams& p, bool down, int most) {
  const int64_t blocks = std::max(std::min(p.tiles, most), 1);
  if (p.plan.head) return static_cast<unsigned>(blocks);  // the rest is known on the device
  const int64_t firsts = down ? p.tiles_down : p.tiles_across;
  const int64_t seconds = down ? p.tiles_across : p.tiles_down;
  p.step_first = static_cast<int>(blocks % firsts);
  p.step_second = static_cast<int>(blocks / firsts % seconds);
  p.step_batch = static_cast<int>(blocks / firsts / seconds);
  return static_cast<unsigned>(blocks);
}

// y = the Hadamard transform of x along `axis`, BF16, extended to y's extents. `plan`: of groups
// along that axis, which start at their positions in y, or null.
void hadamard(const ConstMatrix& x, const Hadamard& h, int axis, const ConstMatrix& y,
              const Plan* plan, const Stream& stream);
// x after a Hadamard transform wider than a run, as BF16 in the workspace; `extent` elements along
// the axis.
inline ConstMatrix transformed(const ConstMatrix& x, const Hadamard& h, int axis, int64_t extent,
                               const Plan* plan, const Stream& stream) {
  ConstMatrix y = x;
  (axis == -1 ? y.columns : y.rows) = extent;
  y.dtype = DType::bf16;
  y.row_stride = round_up(y.columns, 8);
  y.column_stride = 1;
  y.batch_stride = y.rows * y.row_stride;
  y.data = stream.workspace(y.batch * y.batch_stride * 2);
  hadamard(x, h, axis, y, plan, stream);
  return y;
}
// An amax to find, into `out`, which holds zeros; and max |x| before a transform of 16 into
// `before`, if given and there are no groups. With `parts`, into one word per tile of a matrix,
// whatever the words hold, so that nothing has to be cleared before.
struct Amax {
  ConstMatrix x;
  QuantSpec spec;
  int axis;
  Groups groups;
  float *out, *before;
  bool parts;
};
// For one input or two; small ones in one launch.
void add_amaxes(std::span<const Amax> amaxes, const Stream& stream);
// Whether they can be found in parts.
bool come_in_parts(std::span<const Amax> amaxes);
inline int64_t tiles_in(const ConstMatrix& x) {
  return ceil_div(x.columns, kTile) * ceil_div(x.rows, kTile) * x.batch;
}
// The scales of one matrix in the workspace, in words: an FP32 scale, or the scales of four blocks
// of a line. The words lie as FP32 scales do in `mn_major`.
struct AsideWords {
  int64_t pitch, across;  // lines, with padding; words per line

  explicit AsideWords(const Quantized& q) {
    const StoredShape s = q.shape();
    pitch = padded_rows(Layout::mn_major, s.scale_rows);
    across = ceil_div(s.scale_columns * scale_bytes(q.spec.scale), 4);
  }
  int64_t count() const { return pitch * across; }
};
// Moves the scales of two operands from there to where they belong, `linear`.
void transpose_scales(const Quantized from[2], const Quantized to[2], const Stream& stream);
// Writes the padding of a storage layout and nothing else: neither that of FP32 scales, which
// store_scale() and pad_widened() write, nor that of groups (fill.h).
void fill_padding(const Quantized& out, const Stream& stream);
// Writes what no tile of a group writes: the padding of layouts, what lies behind the last group,
// and all outer scales of a side that has amaxes. Where offsets are wrong that is everything, as
// NaN. Sides that the plan lacks are left out.
void fill_groups(const Side& row, const Side& column, const Plan& plan, const Stream& stream);

}  // namespace blockscale::gpu
