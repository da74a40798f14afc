#include "checks.h"

#include <algorithm>

#include "gpu/gpu.h"

namespace blockscale {
namespace {

std::string extents(int64_t rows, int64_t columns, int64_t batch = 1) {
  return (batch == 1 ? "" : std::to_string(batch) + " matrices of ") + "[" + std::to_string(rows) +
         ", " + std::to_string(columns) + "]";
}

template <class Any>
std::string extents(const Any& x) {
  return extents(x.rows, x.columns, x.batch);
}

template <class A, class B>
bool same_extents(const A& a, const B& b) {
  return a.rows == b.rows && a.columns == b.columns && a.batch == b.batch;
}

using gpu::kGpuLimit;
using gpu::kTile;

// Messages are built only when a check fails: these run on every call.

// A matrix without elements counts as a tile too: it may have an outer scale. The limit is half of
// what 31 bits hold, as kernels add the size of their grid.
void check_tiles(const char* op, const char* name, int64_t rows, int64_t columns, int64_t batch) {
  const int64_t tiles = std::max<int64_t>(ceil_div(rows, kTile) * ceil_div(columns, kTile), 1);
  if (batch > 0 && batch >= kGpuLimit / 2 / tiles)
    fail(op, name, extents(rows, columns, batch), "fewer than 2^30 tiles of 128 x 128 on a GPU",
         "quantize parts of the batch");
}

void check_matrix(const char* op, const char* name, const ConstMatrix& x, Memory memory) {
  const int64_t rows = x.rows, columns = x.columns, batch = x.batch;
  if (x.dtype > DType::f32_as_bf16)
    fail(op, name, "dtype " + std::to_string(static_cast<int>(x.dtype)), "a DType");
  if (memory == Memory::device && (rows >= kGpuLimit || columns >= kGpuLimit))
    fail(op, name, extents(rows, columns), "extents below 2^31 on a GPU",
         "quantize parts of it, each with its origin");
  if (rows < 0 || columns < 0 || batch < 0) fail(op, name, extents(x), "extents of at least 0");
  if (memory == Memory::device) check_tiles(op, name, rows, columns, batch);
  if (rows == 0 || columns == 0 || batch == 0) return;
  if (!x.data) fail(op, name, "null", "a pointer to data");
  const auto bytes = static_cast<uintptr_t>(dtype_bytes(x.dtype));
  if (reinterpret_cast<uintptr_t>(x.data) % bytes != 0)
    fail(op, name, "data off a multiple of " + std::to_string(bytes) + " bytes",
         "data at a multiple of its dtype's size", "copy it to memory that is aligned");
}

// Rejects strides that would write several elements to one place.
void check_written(const char* op, const std::string& name, const Matrix& out, Memory memory) {
  check_matrix(op, name.c_str(), as_const(out), memory);
  if (out.dtype == DType::f32_as_bf16)
    fail(op, name, "float32 read as bfloat16", "a dtype that is written, such as float32");
  const auto check_stride = [&](const char* which, int64_t stride, int64_t extent) {
    if (stride == 0 && extent > 1 && out.rows > 0 && out.columns > 0 && out.batch > 0)
      fail(op, name + "." + which, 0, "a stride that keeps elements apart",
           "in a matrix without gaps they are 1, columns, and rows x columns for the next one");
  };
  check_stride("column_stride", out.column_stride, out.columns);
  check_stride("row_stride", out.row_stride, out.rows);
  check_stride("batch_stride", out.batch_stride, out.batch);
}

// Operators that move codes and scales still read them after they have begun to write.
void check_apart(const char* op, const ConstQuantized& from, const Quantized& to) {
  if ((to.codes && to.codes == from.codes) || (to.scales && to.scales == from.scales))
    fail(op, "to", "the memory of from", "memory of its own");
}

void check_count(const char* op, int64_t groups) {
  if (groups < 0) fail(op, "offsets", "a negative count", "the end of every group");
}
void check_present(const char* op, const Groups& groups) {
  check_count(op, groups.count);
  if (groups && !groups.offsets) fail(op, "offsets", "null", "the end of every group");
}

// Offsets in host memory are checked here. On a device the kernels check them: if one is wrong, the
// result is NaN.
void check_groups(const char* op, const Groups& groups, int64_t rows, int64_t batch,
                  Memory memory) {
  if (!groups) return;
  check_present(op, groups);
  if (batch != 1) fail(op, "batch", batch, "one matrix: offsets cut the rows of one");
  if (memory == Memory::host) check_offsets(op, groups, rows);
}

// On a GPU, all threads of the tiles of groups are counted in 31 bits, and each group may end in a
// tile of its own.
void check_group_tiles(const char* op, const Groups& groups, int64_t rows, int64_t columns) {
  const int64_t tiles_down = rows / kTile + groups.count + 1;
  const int64_t tiles_across = std::max<int64_t>(ceil_div(columns, kTile), 1);
  if (groups && tiles_down >= kGpuLimit / gpu::kThreads / tiles_across)
    fail(op, "offsets", std::to_string(groups.count) + " groups of " + extents(rows, columns),
         "fewer than 2^22 tiles of 128 x 128, and one more for each group, on a GPU",
         "take fewer groups or columns at a time");
}

// GPU kernels count lines and the codes of a line in 31 bits, the scales of a matrix in 32 bits,
// and 16 times the bytes of a line in mfma_16x16 in 31 bits.
template <class Byte, class Float>
void check_counts(const char* op, const char* name, const BasicQuantized<Byte, Float>& q,
                  const StoredShape& s) {
  const auto refuse = [&](const char* need) {
    fail(op, name, extents(q.rows, q.columns), std::string(need) + " on a GPU",
         "quantize parts of it, each with its origin");
  };
  const int64_t code_rows = padded_rows(q.layout.codes, s.code_rows);
  const int64_t scale_rows = padded_rows(q.layout.scales, s.scale_rows);
  const int64_t code_columns = padded_columns(q.layout.codes, s.code_columns);
  if (s.padded >= kGpuLimit || std::max(code_rows, scale_rows) >= kGpuLimit)
    refuse("extents below 2^31, in whole blocks,");
  if (s.scale_count > 2 * kGpuLimit) refuse("at most 2^32 scales of a matrix, with padding,");
  if (q.layout.codes == Layout::mfma_16x16 && code_columns >= kGpuLimit / 16)
    refuse("lines of less than 2^27 bytes, with padding, in mfma_16x16");
  check_group_tiles(op, q.groups, q.rows, q.columns);
  check_tiles(op, name, q.rows, q.columns, q.batch);
}

template <class Byte, class Float>
void check_quantized(const char* op, const char* name, const BasicQuantized<Byte, Float>& q,
                     Memory memory) {
  validate(q.spec);
  validate(q.spec, q.layout);
  if (q.axis != -1 && q.axis != -2)
    fail(op, "axis", q.axis, "-1 (along rows) or -2 (down columns)",
         "axis is the contraction axis of the GEMM that will read the operand");
  if (q.rows < 0 || q.columns < 0 || q.batch < 0)
    fail(op, name, extents(q), "extents of at least 0");
  check_sizes(op, name, q.rows, q.columns, q.batch, q.groups.count);
  check_groups(op, q.groups, q.rows, q.batch, memory);
  const StoredShape s = q.shape();
  if (!q.codes && s.code_bytes * q.batch != 0) fail(op, name, "null codes", "a pointer to codes");
  if (!q.scales && s.scale_count * q.batch != 0)
    fail(op, name, "null scales", "a pointer to scales");
  if (!q.outer && q.spec.outer && q.matrices() != 0)
    fail(op, name, "null outer", "a pointer to one FP32 per matrix: the spec has an outer scale");
  if (memory == Memory::host) return;
  check_counts(op, name, q, s);
  if (reinterpret_cast<uintptr_t>(q.codes) % 16 != 0)
    fail(op, name, "codes off a multiple of 16 bytes", "codes at a multiple of 16 on a GPU");
  if (q.spec.scale == Format::fp32 && reinterpret_cast<uintptr_t>(q.scales) % sizeof(float) != 0)
    fail(op, name, "scales off a multiple of 4 bytes", "FP32 scales at a multiple of 4 on a GPU");
}

void check_amax(const char* op, const Quantized& out, const QuantizeOptions& options,
                Memory memory) {
  if (!options.amax) return;
  if (!out.spec.outer)
    fail(op, "amax", "given", "none: " + to_string(out.spec) + " has no outer scale",
         "leave amax out");
  if (memory == Memory::device) return;
  for (int64_t b = 0; b < out.matrices(); ++b)
    if (is_negative(options.amax[b]))
      fail(op, "amax", options.amax[b], "a value of at least 0", "pass max |x|, e.g. from amax()");
}

// What x is quantized to.
const QuantSpec& spec_of(const Quantized& out, const QuantizeOptions& o) {
  return o.widened ? *o.widened : out.spec;
}

void check_origin(const char* op, const ConstMatrix& x, const Quantized& out,
                  const QuantizeOptions& o) {
  const QuantSpec& spec = spec_of(out, o);
  const bool rows = out.axis == -1;
  const int64_t pos = rows ? o.origin_column : o.origin_row;
  const int64_t line = rows ? o.origin_row : o.origin_column;
  const int64_t step = spec.unit();
  const auto where = [&] {
    return "(" + std::to_string(o.origin_row) + ", " + std::to_string(o.origin_column) + ")";
  };
  if (pos < 0 || line < 0 || pos % step != 0 || line % spec.block_lines() != 0)
    fail(op, "origin", where(),
         "multiples of " + std::to_string(step) + " along axis " + std::to_string(out.axis) +
             " and of " + std::to_string(spec.block_lines()) + " across it",
         "cut shards at whole blocks");
  const int64_t limit = int64_t{1} << 32;
  const StoredShape s = out.shape();
  // Compared without adding: an origin may be as large as int64_t allows.
  if (spec.stochastic() && (pos > limit - s.padded || line > limit - s.lines * x.batch))
    fail(op, "origin", where(), "global coordinates below 2^32 for stochastic rounding");
}

void check_widened(const char* op, const Quantized& out, const QuantSpec& spec, Memory memory) {
  require(memory == Memory::device, op, "widened", "given", "none: x is in host memory");
  require(gpu::is_mxfp4(spec) && !(spec.square && out.groups), op, "widened", to_string(spec),
          out.groups ? "mxfp4 in blocks of one line" : "mxfp4");
  const StorageLayout layout{Layout::linear, Layout::mn_major};
  if (out.spec != gpu::kWidened || out.batch != 1 || out.layout != layout)
    fail(op, "out", to_string(out.spec) + ", " + to_string(out.layout),
         "one matrix in " + to_string(gpu::kWidened) + ", " + to_string(layout));
  if (const int64_t codes = out.shape().padded; codes > gpu::kMostWidened)
    fail(op, "widened", std::to_string(codes) + " codes in a line",
         "at most " + std::to_string(gpu::kMostWidened),
         "quantize parts of x, and add up their products");
}

}  // namespace

void check_sizes(const char* op, const char* name, int64_t rows, int64_t columns, int64_t batch,
                 int64_t groups) {
  check_count(op, groups);
  // The most that a layout, a transform and a block add to an extent; bytes of a scale or code.
  constexpr int64_t kPadding = 4096, kBytes = 4, kLimit = int64_t{1} << 62;
  const auto times = [](int64_t a, int64_t b) {
    int64_t product = 0;
    return __builtin_mul_overflow(a, b, &product) ? kLimit : product;
  };
  const auto plus = [&](int64_t a, int64_t b) { return a > kLimit - b ? kLimit : a + b; };
  // Each group may have its own padding.
  const int64_t padded_rows = plus(rows, times(plus(groups, 1), kPadding));
  const int64_t matrix = times(padded_rows, plus(columns, kPadding));
  if (times(times(matrix, std::max<int64_t>(batch, 1)), kBytes) < kLimit) return;
  fail(op, name,
       extents(rows, columns, batch) + (groups ? " in " + std::to_string(groups) + " groups" : ""),
       "extents whose product, padded, is below 2^60", "quantize parts of it");
}

void check_quantize(const char* op, const ConstMatrix& x, const Quantized& out,
                    const QuantizeOptions& options, Memory memory) {
  check_matrix(op, "x", x, memory);
  check_quantized(op, "out", out, memory);
  if (!same_extents(out, x)) fail(op, "out", extents(out), "the extents of x, " + extents(x));
  const bool on_device = options.device_seed || options.device_offset;
  if (on_device && (memory == Memory::host || !options.device_seed || !options.device_offset))
    fail(op, "device_seed, device_offset",
         memory == Memory::host ? "given" : "one without the other",
         memory == Memory::host ? "none: x is in host memory" : "both or neither",
         "pass rng for a key by value");
  if (options.widened) check_widened(op, out, *options.widened, memory);
  if (spec_of(out, options).stochastic() && !options.rng && !on_device)
    fail(op, "rng", "none", "a seed and an offset: the spec rounds stochastically",
         "pass rng, or use rounding = nearest");
  check_amax(op, out, options, memory);
  check_origin(op, x, out, options);
}

namespace {

std::string describe(const ConstQuantized& q) {
  return to_string(q.spec) + " " + extents(q) + " along axis " + std::to_string(q.axis);
}

void check_same_groups(const char* op, const Groups& a, const Groups& b) {
  if (a.offsets != b.offsets || a.count != b.count || a.int64_offsets != b.int64_offsets)
    fail(op, "offsets", "two different ones", "the same groups on both sides");
}

}  // namespace

void check_dual(const ConstMatrix& x, const Quantized& row_out, const Quantized& column_out,
                const QuantizeOptions& row_options, const QuantizeOptions& column_options,
                Memory memory) {
  if (row_out.axis != -1 || column_out.axis != -2)
    fail("quantize_dual", "axis",
         std::to_string(row_out.axis) + " and " + std::to_string(column_out.axis),
         "-1 for the row operand and -2 for the column operand");
  check_same_groups("quantize_dual", row_out.groups, column_out.groups);
  check_quantize("quantize_dual", x, row_out, row_options, memory);
  check_quantize("quantize_dual", x, column_out, column_options, memory);
}

void check_amax_of(const ConstMatrix& x, const QuantSpec& spec, int axis, const float* out,
                   const Groups& groups, Memory memory) {
  validate(spec);
  if (axis != -1 && axis != -2) fail("amax", "axis", axis, "-1 (along rows) or -2 (down columns)");
  check_matrix("amax", "x", x, memory);
  check_sizes("amax", "x", x.rows, x.columns, x.batch, groups.count);
  const int64_t extent = axis == -1 ? x.columns : x.rows;
  if (memory == Memory::device && spec.hadamard.dim > 0 &&
      round_up(extent, int64_t{spec.hadamard.dim}) >= kGpuLimit)
    fail("amax", "x", extents(x.rows, x.columns),
         "extents below 2^31, in whole transforms, on a GPU", "take the amax of parts of it");
  check_groups("amax", groups, x.rows, x.batch, memory);
  if (!out && x.batch != 0)
    fail("amax", "out", "null", "a pointer to one FP32 per matrix or group");
  if (memory == Memory::device) check_group_tiles("amax", groups, x.rows, x.columns);
}

void check_dequantize(const ConstQuantized& q, const Matrix& x, Memory memory) {
  check_quantized("dequantize", "q", q, memory);
  check_written("dequantize", "x", x, memory);
  if (!same_extents(x, q)) fail("dequantize", "x", extents(x), "the extents of q, " + extents(q));
  if (memory == Memory::device) check_decodable("dequantize", "q", q);
}

void check_relayout(const ConstQuantized& from, const Quantized& to, Memory memory) {
  check_quantized("relayout", "from", from, memory);
  check_quantized("relayout", "to", to, memory);
  if (from.spec != to.spec || from.axis != to.axis || !same_extents(from, to))
    fail("relayout", "to", describe(as_const(to)), "the operand of from, " + describe(from),
         "relayout changes the layout only");
  check_same_groups("relayout", from.groups, to.groups);
  check_apart("relayout", from, to);
}

void check_transpose(const ConstQuantized& from, const Quantized& to, Memory memory) {
  check_quantized("transpose", "from", from, memory);
  check_quantized("transpose", "to", to, memory);
  if (!from.spec.square || from.spec.hadamard.dim || from.groups)
    fail("transpose", "from", describe(from) + (from.groups ? ", in groups" : ""),
         "square blocks without a transform or groups", "quantize along the other axis");
  if (from.spec != to.spec || from.axis == to.axis || !same_extents(from, to) || to.groups)
    fail("transpose", "to", describe(as_const(to)),
         "the operand of from along its other axis, " + describe(from));
  check_apart("transpose", from, to);
  for (const StorageLayout& layout : {from.layout, to.layout})
    if (layout.codes != Layout::linear)
      fail("transpose", "layout", to_string(layout), "linear codes", "relayout first");
}

namespace {

// Groups divide the rows of A, with one matrix of B for each, or the contraction axis of both.
void check_gemm_groups(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d) {
  const bool along = b.groups.count != 0;
  const int64_t count = a.groups ? a.groups.count : 1;
  if (along && !a.groups)
    fail("gemm", "b", "groups", "none where a has none",
         "groups divide the rows of a, or the contraction axis of both");
  if (along) check_same_groups("gemm", a.groups, b.groups);
  for (const auto& [name, q] : {std::pair{"a", &a}, std::pair{"b", &b}})
    if (q->groups && q->axis != (along ? -2 : -1))
      fail("gemm", name, describe(*q) + ", in groups",
           along ? "groups along the contraction axis, axis -2, as b has groups"
                 : "groups along the rows, axis -1, as b has none");
  const auto check_batch = [](const char* name, int64_t got, int64_t need) {
    if (got != need)
      fail("gemm", name, got, need == 1 ? "one matrix" : std::to_string(need) + ", one a group");
  };
  check_batch("a.batch", a.batch, 1);
  check_batch("b.batch", b.batch, along ? 1 : count);
  check_batch("d.batch", d.batch, along ? count : 1);
}

void check_host_gemm(const GemmOptions& options) {
  if (options.device_alpha) fail("gemm", "device_alpha", "given", "none: a is in host memory");
  if (options.bias && options.bias_dtype != DType::f32)
    fail("gemm", "bias_dtype", "another dtype", "float32 in host memory");
}

void check_device_gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
                       const GemmOptions& options) {
  for (const auto& [name, q] : {std::pair{"a", &a}, std::pair{"b", &b}}) {
    if (const std::string needs = gemm_needs(q->spec, "cuda"); !needs.empty())
      fail("gemm", name, to_string(q->spec) + " on cuda", needs,
           "dequantize both operands and multiply them");
  }
  if (options.bias && options.bias_dtype == DType::f32_as_bf16)
    fail("gemm", "bias_dtype", "float32 read as bfloat16", "float32, bfloat16 or float16");
  if (d.column_stride != 1 && d.columns > 1)
    fail("gemm", "d.column_stride", d.column_stride, "1 on a GPU");
  if (d.batch > 1 && d.batch_stride != d.rows * d.row_stride)
    fail("gemm", "d.batch_stride", d.batch_stride,
         std::to_string(d.rows * d.row_stride) + " on a GPU: one matrix below the other");
}

}  // namespace

void check_gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
                const GemmOptions& options, Memory memory) {
  check_quantized("gemm", "a", a, memory);
  check_quantized("gemm", "b", b, memory);
  check_written("gemm", "d", d, memory);
  check_sizes("gemm", "d", d.rows, d.columns, d.batch, 0);
  check_gemm_groups(a, b, d);
  const StoredShape sa = a.shape(), sb = b.shape();
  const int64_t ka = a.axis == -1 ? a.columns : a.rows, kb = b.axis == -1 ? b.columns : b.rows;
  if (ka != kb)
    fail("gemm", "b", describe(b), "the contraction length of a, " + std::to_string(ka),
         "quantize both operands along their shared axis");
  validate_pair("gemm", a.spec, b.spec);
  if (d.rows != sa.lines || d.columns != sb.lines)
    fail("gemm", "d", extents(d.rows, d.columns), "extents " + extents(sa.lines, sb.lines));
  if (d.dtype == DType::f16) fail("gemm", "d", "float16", "float32 or bfloat16");
  if (options.accumulate && d.dtype != DType::f32)
    fail("gemm", "d", "bfloat16", "float32 to accumulate into");
  if (memory == Memory::host)
    check_host_gemm(options);
  else
    check_device_gemm(a, b, d, options);
}

void check_values(const Quantization& q) {
  const Matrix& v = q.row_values;
  if (!v.data) return;
  require(
      q.row && !q.row->groups && q.row->spec.hadamard.dim == 0 && q.x.batch == 1 && v.batch == 1,
      "quantize", "row_values", "given", "none but for one matrix without groups or a transform");
  require(v.dtype == DType::bf16 && v.rows == q.x.rows && v.columns == q.x.columns &&
              v.column_stride == 1 && v.row_stride % 8 == 0 && v.row_stride >= v.columns &&
              reinterpret_cast<uintptr_t>(v.data) % 16 == 0,
          "quantize", "row_values", "another matrix",
          "bfloat16 with x's extents, rows at multiples of 16 bytes");
}

void check_device_operand(const char* op, const char* name, const ConstQuantized& q) {
  check_quantized(op, name, q, Memory::device);
}

// The threads are counted.
void check_decodable(const char* op, const char* name, const ConstQuantized& q) {
  if (ceil_div(q.rows, gpu::kPieceRows) * ceil_div(q.columns, gpu::kPiece) >= kGpuLimit)
    fail(op, name, extents(q.rows, q.columns), "fewer than 2^36 elements of a matrix on a GPU",
         "take parts of it");
}

void check_offsets(const char* op, const Groups& groups, int64_t rows) {
  const auto name = [](int64_t g) { return "offsets[" + std::to_string(g) + "]"; };
  check_present(op, groups);
  int64_t before = 0;
  for (int64_t g = 0; g < groups.count; before = groups.end(g++)) {
    const int64_t end = groups.end(g);
    if (end < before)
      fail(op, name(g),
           std::to_string(end) + " is smaller than " + (g ? name(g - 1) + " = " : "") +
               std::to_string(before),
           "the cumulative ends of groups of rows", "offsets must not decrease");
    if (end > rows)
      fail(op, name(g), end, "at most " + std::to_string(rows) + ", the rows of x",
           "offsets are the cumulative ends of groups of rows");
  }
}

}  // namespace blockscale
