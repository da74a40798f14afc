// From codes back to values: x^ = fl(fl(outer * scale) * code), rounded to the output's dtype.
//
// Codes along rows go straight through registers. Codes of columns are stored transposed: a tile
// comes in by lines, goes through shared memory, and leaves by rows (dequantize_columns.h).
#include <algorithm>
#include <bit>

#include "gpu/dequantize/dequantize_columns.h"

namespace blockscale::gpu {
namespace {

// Loads the codes and scales of pieces one below the other, of which `left` exist; issues all loads
// first.
template <class Codes>
BLOCKSCALE_DEVICE void load_linear(const DequantizeParams& p, const Place& at, int first, int c,
                                   int byte, int left, Codes* codes, uint32_t* stored) {
  // Kept in a register: the compiler would multiply for every line.
  const uint8_t* from = code_at<true>(p, at, first, byte);
#pragma unroll
  for (int i = 0; i < kPieceRows; ++i, from += at.code_columns, keep(from))
    if (i < left) codes[i] = load_once(reinterpret_cast<const Codes*>(from));
  const int row = first >> at.scale_shift;
  const int64_t scale = static_cast<int64_t>(row) * at.scale_columns + (c >> p.block_shift);
  // A thread's lines lie in one row of a grid of square blocks.
  const int step = at.scale_shift ? 0 : at.scale_columns;
  const auto load_scales = [&](auto* scales) {
#pragma unroll
    for (int i = 0; i < kPieceRows; ++i, scales += step, keep(scales))
      if (i < left) stored[i] = load_once(scales);
  };
  if (p.fp32_scales)
    load_scales(reinterpret_cast<const uint32_t*>(at.scales) + scale);
  else
    load_scales(at.scales + scale);
}
template <class Codes>
BLOCKSCALE_DEVICE void load_any(const DequantizeParams& p, const Place& at, int first, int c,
                                int byte, int left, Codes* codes, uint32_t* stored) {
#pragma unroll
  for (int i = 0; i < kPieceRows; ++i) {
    const int r = first + min(i, left - 1);
    codes[i] = load_once(reinterpret_cast<const Codes*>(code_at<false>(p, at, r, byte)));
    stored[i] = stored_scale<false>(p, at, r, c >> p.block_shift);
  }
}

template <Codec kCodec, Rows kRows>
__global__ void __launch_bounds__(kDecodeThreads)
    dequantize_rows_kernel(const __grid_constant__ DequantizeParams p) {
  after_previous(p);
  using Codes = std::conditional_t<kCodec == Codec::fp4, uint32_t, uint2>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t thread = blockIdx.x * kDecodeThreads + threadIdx.x;
  if (kHalo<kRows>) thread -= thread / 32 + 1;  // thread 0 wraps past all others
  uint32_t n = min(thread, p.all - 1);
  uint32_t lines = p.runs.divide(n);
  const uint32_t part = p.parts.divide(lines);
  const int c = static_cast<int>(n) * kPiece;
  Place at{};
  const bool found = thread < p.all && find(p, part, at);
  const int first = at.row + static_cast<int>(lines) * kPieceRows;
  const int left = found ? at.rows - first : 0;
  if (kRows != Rows::anywhere && left <= 0) return;
  Codes codes[kPieceRows] = {};
  uint32_t stored[kPieceRows] = {};
  if (left > 0) {
    const int byte = kCodec == Codec::fp4 ? c / 2 : c;
    if (p.linear)
      load_linear(p, at, first, c, byte, left, codes, stored);
    else
      load_any(p, at, first, c, byte, left, codes, stored);
  }
  const float outer = outer_of(at);
  float factor[kPieceRows];
#pragma unroll
  for (int line = 0; line < kPieceRows; ++line) factor[line] = factor_of(p, outer, stored[line]);
  int64_t row = at.x + first * p.x.row_stride;
  const int count = kHalo<kRows> == 0 || lane > 0 ? p.columns - c : 0;
  const bool direct = kRows == Rows::aligned && count >= kPiece;
  auto* const to = static_cast<uint16_t*>(p.x.data) + row + c;
  uint32_t largest = 0;
#pragma unroll
  for (int line = 0; line < kPieceRows; ++line, row += p.x.row_stride) {
    if (kRows != Rows::anywhere && line >= left) break;
    const PieceAt piece_at = {line < left ? count : 0, c > 0};
    if constexpr (kRows == Rows::any) {
      float v[kPiece];
      decode_piece<kCodec>(p.element, codes[line], factor[line], v);
      store_piece<kRows>(p, row, c, piece_at, v);
    } else {
      const uint4 piece = decode_bf16x8<kCodec>(p.element, codes[line], factor[line], largest);
      if (!direct)
        store_piece<kRows>(p, row, c, piece_at, has_nan(largest) ? define_nan(piece) : piece);
      else if constexpr (kCodec == Codec::fp4)
        store_vector_once(to + line * p.x.row_stride, piece);
      else
        store_vector(to + line * p.x.row_stride, piece);
    }
  }
  if (direct && has_nan(largest)) define_nans(to, p.x.row_stride, min(left, kPieceRows));
}

// Rows of no group become 0; where offsets are wrong, everything becomes NaN.
__global__ void __launch_bounds__(kDecodeThreads)
    clear_rows_kernel(const __grid_constant__ DequantizeParams p) {
  after_previous(p);
  const float value = p.plan.head->wrong ? bit_cast<float>(kNanBits) : 0.0f;
  const int first = p.plan.side[0][p.plan.count].row;
  const int64_t count = static_cast<int64_t>(p.rows - first) * p.columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kDecodeThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kDecodeThreads) + threadIdx.x; i < count;
       i += step)
    store_value(p.x, (first + i / p.columns) * p.x.row_stride + i % p.columns * p.x.column_stride,
                value);
}

template <Codec kCodec, Rows kRows>
void launch(DequantizeParams& p, NativeStream stream) {
  const bool groups = p.plan.head;
  // Matrices or, with groups, the most rows of tiles that there can be.
  const int64_t parts = groups ? p.plan.most_tile_rows : p.x.batch;
  if (p.q.axis == -1) {
    const int64_t runs = ceil_div(p.columns, kPiece);
    const int64_t each = groups ? kTile / kPieceRows : ceil_div(p.rows, kPieceRows);
    const int64_t all = runs * (each * parts + ceil_div(p.second.rows, kPieceRows));
    p.runs = Divisor(runs), p.parts = Divisor(each);
    p.all = static_cast<uint32_t>(all);
    constexpr int kPieces = kDecodeThreads / 32 * (32 - kHalo<kRows>);  // per thread block
    start(dequantize_rows_kernel<kCodec, kRows>, static_cast<unsigned>(ceil_div(all, kPieces)),
          kDecodeThreads, 0, stream, p);
  } else {
    launch_columns<kCodec, kRows>(p, parts, stream);
  }
  if (groups) start(clear_rows_kernel, 512, kDecodeThreads, 0, stream, p);
}

// Codec::any reads one code per byte, so no second format may have two.
static_assert(std::ranges::count_if(kFormats,
                                    [](const FormatTraits& f) { return f.bits() == 4; }) == 1);
template <Rows kRows>
Launcher<DequantizeParams> launcher_of(Format element) {
  if (element == Format::e2m1) return launch<Codec::fp4, kRows>;
  if constexpr (kRows != Rows::any) {
    if (element == Format::e2m3) return launch<Codec::e2m3, kRows>;
    if (element == Format::e3m2) return launch<Codec::e3m2, kRows>;
    if (element == Format::e4m3fn) return launch<Codec::e4m3fn, kRows>;
    if (element == Format::e5m2) return launch<Codec::e5m2, kRows>;
  }
  return launch<Codec::any, kRows>;
}

int scale_shift_of(const ConstQuantized& q, const StoredShape& s) {
  return s.scale_lines == 1 ? 0 : std::countr_zero(q.spec.block);
}
DequantizeParams params_of(const ConstQuantized& q, const Matrix& x) {
  DequantizeParams p{};
  p.q = q, p.shape = q.shape(), p.x = x;
  p.element = Decoder::of(q.spec.element), p.scale = Decoder::of(q.spec.scale);
  p.rows = static_cast<int>(x.rows), p.columns = static_cast<int>(x.columns);
  p.block_shift = std::countr_zero(q.spec.block);
  p.linear = q.layout == StorageLayout{}, p.fp32_scales = q.spec.scale == Format::fp32;
  p.first = {q.codes,
             q.scales,
             nullptr,
             0,
             0,
             p.rows,
             static_cast<int>(p.shape.padded),
             static_cast<int>(p.shape.code_columns),
             static_cast<int>(p.shape.scale_columns),
             scale_shift_of(q, p.shape)};
  return p;
}
void run(DequantizeParams& p, const Stream& stream) {
  const ConstMatrix to = as_const(p.x);
  const Launcher<DequantizeParams> launcher =
      !is_bf16_rows(to) ? launcher_of<Rows::any>(p.q.spec.element)
      : is_aligned(to)  ? launcher_of<Rows::aligned>(p.q.spec.element)
                        : launcher_of<Rows::anywhere>(p.q.spec.element);
  launcher(p, native(stream));
  check_launch("dequantize");
}

// The matrices of a batch from `first` up to `end`.
ConstQuantized matrices_of(ConstQuantized q, int64_t first, int64_t end) {
  const StoredShape s = q.shape();
  q.codes += first * s.code_bytes;
  q.scales += first * s.scale_count * scale_bytes(q.spec.scale);
  if (q.outer) q.outer += first;
  q.batch = end - first;
  return q;
}
Matrix matrices_of(Matrix x, int64_t first, int64_t end) {
  x.data = static_cast<uint8_t*>(x.data) + first * x.batch_stride * dtype_bytes(x.dtype);
  x.batch = end - first;
  return x;
}

// Whether one launch can decode both: their lines have the same form, so that they differ only in
// where they lie and how many share a scale.
bool alike(const ConstQuantized& a, const Matrix& x, const ConstQuantized& b, const Matrix& y) {
  const auto plain = [](const ConstQuantized& q, const Matrix& to) {
    return q.axis == -1 && !q.groups && !q.spec.outer && q.layout == StorageLayout{} &&
           q.batch == 1 && to.rows * to.columns != 0 && is_bf16_rows(as_const(to)) &&
           is_aligned(as_const(to));
  };
  return plain(a, x) && plain(b, y) && a.spec.element == b.spec.element &&
         a.spec.scale == b.spec.scale && a.spec.block == b.spec.block && x.columns == y.columns &&
         x.row_stride == y.row_stride &&
         ceil_div(x.columns, kPiece) * (x.rows + y.rows) < kGpuLimit;
}

}  // namespace

void dequantize(const ConstQuantized& q, const Matrix& x, const Stream& stream) {
  if (x.rows * x.columns * x.batch == 0) return;
  // Kernels count the pieces of all rows in 31 bits.
  if (x.batch > 1 && ceil_div(x.columns, kPiece) * x.rows * x.batch >= kGpuLimit) {
    const int64_t half = x.batch / 2;
    gpu::dequantize(matrices_of(q, 0, half), matrices_of(x, 0, half), stream);
    return gpu::dequantize(matrices_of(q, half, q.batch), matrices_of(x, half, x.batch), stream);
  }
  DequantizeParams p = params_of(q, x);
  if (q.groups) p.plan = make_plan(q.groups, x.rows, x.columns, &q, nullptr, false, stream);
  run(p, stream);
}

void dequantize_two(const ConstQuantized& a, const Matrix& x, const ConstQuantized& b,
                    const Matrix& y, const Stream& stream) {
  if (!alike(a, x, b, y)) {
    gpu::dequantize(a, x, stream);
    return gpu::dequantize(b, y, stream);
  }
  if (x.rows < y.rows) return dequantize_two(b, y, a, x, stream);  // the longer one is the first
  DequantizeParams p = params_of(a, x);
  p.second = {b.codes, b.scales, static_cast<uint16_t*>(y.data) - static_cast<uint16_t*>(x.data),
              static_cast<int>(y.rows), scale_shift_of(b, b.shape())};
  run(p, stream);
}

}  // namespace blockscale::gpu
