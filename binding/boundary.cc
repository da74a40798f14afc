#include "boundary.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "checks.h"

namespace blockscale::binding {
namespace {

std::string list_text(const int64_t* values, size_t count) {
  std::string text = "[";
  for (size_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

// The torch dtype of codes or scales: torch's own where it has one, else bytes.
ScalarType torch_dtype(Format format) {
  switch (format) {
    case Format::e4m3fn:
    case Format::e4m3:
      return ScalarType::Float8_e4m3fn;
    case Format::e4m3fnuz:
      return ScalarType::Float8_e4m3fnuz;
    case Format::e5m2:
      return ScalarType::Float8_e5m2;
    case Format::e5m2fnuz:
      return ScalarType::Float8_e5m2fnuz;
    case Format::e8m0:
      return ScalarType::Float8_e8m0fnu;
    case Format::fp32:
      return ScalarType::Float;
    default:
      return ScalarType::Byte;
  }
}

template <class Byte, class Float>
void describe(BasicQuantized<Byte, Float>& q, const QuantSpec& spec, const StorageLayout& layout,
              int axis, const Extent& e) {
  q.spec = spec, q.layout = layout, q.axis = axis;
  q.rows = e.rows, q.columns = e.columns, q.batch = e.batch.value_or(1), q.groups = e.groups;
}

// Shapes and dtypes of the stored tensors (specification, section 13). Non-linear layouts are flat,
// but for mn_major, which is a transposed and padded matrix.
struct Sizes {
  Ints codes, scales, outer;
  ScalarType code_type, scale_type;
};
Sizes sizes_of(const Context& at, const ConstQuantized& q, std::optional<int64_t> batch,
               bool bytes) {
  check_sizes(at.op(), "shape", q.rows, q.columns, q.batch, q.groups.count);
  const StoredShape s = q.shape();
  const StorageLayout& layout = q.layout;
  Sizes sizes{{}, {}, {}, torch_dtype(q.spec.element), torch_dtype(q.spec.scale)};
  if (batch) sizes.codes = sizes.scales = sizes.outer = {*batch};
  if (q.groups) sizes.outer = {q.groups.count};
  auto append = [](Ints& to, std::initializer_list<int64_t> extents) {
    to.insert(to.end(), extents);
  };
  if (layout.codes == Layout::linear)
    append(sizes.codes, {s.code_rows, s.code_columns});
  else
    append(sizes.codes, {s.code_bytes});
  if (layout.scales == Layout::linear)
    append(sizes.scales, {s.scale_rows, s.scale_columns});
  else if (layout.scales == Layout::mn_major)
    append(sizes.scales, {s.scale_columns, padded_rows(layout.scales, s.scale_rows)});
  else
    append(sizes.scales, {s.scale_count});
  if (!q.spec.outer) sizes.outer = {0};
  if (bytes) {  // which codes are already
    sizes.code_type = sizes.scale_type = ScalarType::Byte;
    sizes.scales.back() *= scale_bytes(q.spec.scale);
  }
  return sizes;
}

// Contiguous, and exactly of this dtype and shape.
Tensor checked(const Context& at, const std::string& name, const Tensor& t, ScalarType dtype,
               const Ints& sizes, const QuantSpec& spec) {
  const char* op = at.op();
  at.check(name.c_str(), t);
  if (t.scalar_type() != dtype)
    fail(op, name + ".dtype", dtype_text(t.scalar_type()),
         dtype_text(dtype) + " for " + to_string(spec));
  if (!std::equal(sizes.begin(), sizes.end(), t.sizes().begin(), t.sizes().end()))
    fail(op, name + ".shape", shape_text(t),
         list_text(sizes.data(), sizes.size()) + " for " + to_string(spec),
         "the operand is damaged, or described by the wrong extents or layout");
  return contiguous_of(t);
}

// A row stride that walks all leading dimensions, if there is one. Dimensions of extent 1 have no
// say, and so has no dimension of a tensor without elements.
std::optional<int64_t> common_row_stride(const Tensor& x) {
  if (x.numel() == 0) return 0;
  std::optional<int64_t> stride;
  int64_t next = 0;  // what the stride of the next dimension has to be
  for (int64_t d = x.dim() - 2; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (stride && x.stride(d) != next) return std::nullopt;
    if (!stride) stride = x.stride(d);
    next = x.stride(d) * x.size(d);
  }
  return stride.value_or(0);
}

}  // namespace

std::string shape_text(const Tensor& t) { return list_text(t.sizes().data(), t.sizes().size()); }

std::string dtype_text(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:
      break;
  }
  std::string text = torch::headeronly::toString(type);
  std::transform(text.begin(), text.end(), text.begin(), [](char c) { return std::tolower(c); });
  return text;
}

const QuantSpec& spec_of(const Text& text) { return parsed_once<parse_spec>(text); }
const StorageLayout& layout_of(const Text& text) { return parsed_once<parse_layout>(text); }

int checked_axis(const char* op, int64_t axis) {
  require(axis == -1 || axis == -2, op, "axis", axis, "-1 or -2",
          "-1: blocks run along a row; -2: down a column");
  return static_cast<int>(axis);
}

DType dtype_of(const char* op, const char* argument, ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::f16;
    default:
      fail(op, argument, dtype_text(type), "float32, bfloat16 or float16",
           "convert with .to(torch.float32)");
  }
}

Matrix matrices(const Context& at, const Tensor& out, int64_t rows, int64_t columns,
                int64_t batch) {
  const DType dtype = dtype_of(at.op(), "dtype", out.scalar_type());
  return {out.mutable_data_ptr(), dtype, rows, columns, columns, 1, batch, rows * columns};
}

Input input(const Context& at, const Tensor& x, int axis, int64_t batch_dims) {
  const char* op = at.op();
  const DType dtype = dtype_of(op, "x.dtype", x.scalar_type());
  require(batch_dims == 0 || batch_dims == 1, op, "batch_dims", batch_dims, "0 or 1",
          "flatten the leading dimensions into one");
  const int64_t rank = x.dim();
  if (batch_dims == 1 && rank != 3)
    fail(op, "x.shape", shape_text(x), "rank 3, [E, R, C], with batch_dims = 1");
  if (axis == -2 && rank < 2)
    fail(op, "x.shape", shape_text(x), "rank 2 or more, for an operand along axis -2");
  if (rank < 1) fail(op, "x.shape", shape_text(x), "rank 1 or more");

  Input result{x, {}};
  if (batch_dims == 0 && !common_row_stride(x)) result.tensor = torch::stable::contiguous(x);
  const Tensor& t = result.tensor;
  ConstMatrix& view = result.view;
  view.data = t.const_data_ptr();
  view.dtype = dtype;
  view.columns = t.size(rank - 1);
  view.column_stride = t.stride(rank - 1);
  if (batch_dims == 1) {
    view.batch = t.size(0);
    view.batch_stride = t.stride(0);
    view.rows = t.size(1);
    view.row_stride = t.stride(1);
  } else {
    view.rows = rows_of(t);
    view.row_stride = *common_row_stride(t);
  }
  return result;
}

Groups groups_of(const Context& at, const std::optional<Tensor>& offsets,
                 std::optional<int64_t> batch, int64_t rows) {
  if (!offsets) return {};
  const char* op = at.op();
  at.check("offsets", *offsets);
  const ScalarType type = offsets->scalar_type();
  if (type != ScalarType::Int && type != ScalarType::Long)
    fail(op, "offsets.dtype", dtype_text(type), "int32 or int64");
  if (offsets->dim() != 1 || offsets->numel() == 0)
    fail(op, "offsets.shape", shape_text(*offsets), "one dimension of at least 1 group",
         "offsets are the cumulative ends of groups of rows");
  if (!offsets->is_contiguous())
    fail(op, "offsets", "strided", "contiguous memory", "call offsets.contiguous()");
  if (batch)
    fail(op, "batch_dims", 1, "0: offsets cut the rows of one matrix", "pass either of the two");
  const Groups groups{offsets->const_data_ptr(), type == ScalarType::Long, offsets->numel()};
  static const char* const asked = std::getenv("BLOCKSCALE_CHECK_OFFSETS");
  static const bool checks = asked && *asked && std::strcmp(asked, "0") != 0;
  if (!at.cuda()) {  // under this operator's name, and before anything is read by them
    check_offsets(op, groups, rows);
  } else if (checks) {
    const Tensor copy = torch::stable::to(*offsets, Device(DeviceType::CPU));
    check_offsets(op, {copy.const_data_ptr(), groups.int64_offsets, groups.count}, rows);
  }
  return groups;
}

Output allocate(const Context& at, const QuantSpec& spec, const StorageLayout& layout, int axis,
                const Extent& extent, bool bytes) {
  Output out{.codes = {}, .scales = {}, .outer = {}, .view = {}};
  Quantized& q = out.view;
  describe(q, spec, layout, axis, extent);
  const Sizes sizes = sizes_of(at, as_const(q), extent.batch, bytes);
  out.codes = empty(sizes.codes, sizes.code_type, at.device());
  out.scales = empty(sizes.scales, sizes.scale_type, at.device());
  out.outer = empty(sizes.outer, ScalarType::Float, at.device());
  q.codes = static_cast<uint8_t*>(out.codes.mutable_data_ptr());
  q.scales = static_cast<uint8_t*>(out.scales.mutable_data_ptr());
  q.outer = static_cast<float*>(out.outer.mutable_data_ptr());
  return out;
}

Operand operand(const Context& at, const std::string& prefix, const Tensor& codes,
                const Tensor& scales, const Tensor& outer, const QuantSpec& spec,
                const StorageLayout& layout, int axis, const Extent& extent, bool bytes) {
  validate(spec, layout);
  Operand result{.codes = {}, .scales = {}, .outer = {}, .view = {}};
  ConstQuantized& q = result.view;
  describe(q, spec, layout, axis, extent);
  const Sizes sizes = sizes_of(at, q, extent.batch, bytes);
  const auto check = [&](const char* name, const Tensor& t, ScalarType dtype, const Ints& size) {
    return checked(at, prefix + name, t, dtype, size, spec);
  };
  result.codes = check("codes", codes, sizes.code_type, sizes.codes);
  result.scales = check("scales", scales, sizes.scale_type, sizes.scales);
  result.outer = check("outer", outer, ScalarType::Float, sizes.outer);
  // A part of a larger tensor may begin anywhere. GPU kernels read codes 16 bytes at a time, and
  // FP32 scales, which may be bytes here, as words.
  const auto align = [&](Tensor& t, uintptr_t bytes) {
    if (at.cuda() && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % bytes != 0)
      t = torch::stable::clone(t);
  };
  align(result.codes, 16);
  align(result.scales, static_cast<uintptr_t>(scale_bytes(spec.scale)));
  q.codes = static_cast<const uint8_t*>(result.codes.const_data_ptr());
  q.scales = static_cast<const uint8_t*>(result.scales.const_data_ptr());
  q.outer = static_cast<const float*>(result.outer.const_data_ptr());
  return result;
}

int64_t rows_of(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return rows;
}

Extent extent_of(const char* op, const Ints& shape) {
  const std::string text = list_text(shape.data(), shape.size());
  require(shape.size() == 2 || shape.size() == 3, op, "shape", text, "[R, C] or [E, R, C]",
          "flatten the leading dimensions into rows");
  for (int64_t extent : shape) require(extent >= 0, op, "shape", text, "extents of 0 or more");
  const size_t at = shape.size() - 2;
  return {shape[at], shape[at + 1], at ? std::optional<int64_t>(shape[0]) : std::nullopt, {}};
}

const int64_t* key_of(const Context& at, const char* name, const Tensor& t) {
  at.check(name, t);
  if (t.scalar_type() != ScalarType::Long)
    fail(at.op(), std::string(name) + ".dtype", dtype_text(t.scalar_type()), "int64");
  if (t.numel() != 1) fail(at.op(), name, shape_text(t), "one element");
  return static_cast<const int64_t*>(t.const_data_ptr());
}

void set_key(const Context& at, QuantizeOptions& options, const int64_t* seed,
             const int64_t* offset, uint64_t step) {
  if (at.cuda()) {
    options.device_seed = seed, options.device_offset = offset;
    options.device_seed_step = step;
  } else {
    options.rng = Rng{static_cast<uint64_t>(*seed) + step, static_cast<uint64_t>(*offset)};
  }
}

Options options(const Context& at, const QuantSpec& spec, const char* amax_name,
                const std::optional<Tensor>& amax, const std::optional<Tensor>& seed,
                const std::optional<Tensor>& offset, const Ints& origin, int64_t matrices) {
  const char* op = at.op();
  const std::string name = amax_name;
  Options result;
  if (amax) {
    at.check(amax_name, *amax);
    if (!spec.outer)
      fail(op, name, "given", "none: " + to_string(spec) + " has no outer scale", "drop " + name);
    if (amax->scalar_type() != ScalarType::Float)
      fail(op, name + ".dtype", dtype_text(amax->scalar_type()), "float32");
    if (amax->numel() != matrices)
      fail(op, name + ".shape", shape_text(*amax),
           std::to_string(matrices) +
               (matrices == 1 ? " element" : " elements, one per matrix or group"));
    result.amax_tensor = contiguous_of(*amax);
    result.options.amax = static_cast<const float*>(result.amax_tensor->const_data_ptr());
    // NaN and Inf are data (the whole result becomes NaN); a negative maximum is a mistake.
    for (int64_t e = 0; !at.cuda() && e < matrices; ++e)
      require(!is_negative(result.options.amax[e]), op, amax_name, result.options.amax[e],
              "0 or more", "amax is the largest |x|; bs.amax computes it");
  }
  require(seed.has_value() == offset.has_value(), op, "seed, offset",
          seed ? "a seed without an offset" : "an offset without a seed", "both or neither");
  if (seed) set_key(at, result.options, key_of(at, "seed", *seed), key_of(at, "offset", *offset));
  require(!spec.stochastic() || seed, op, "rng", "none",
          "a seed and an offset: the spec rounds stochastically", "pass rng=bs.Rng(seed, offset)");
  if (!origin.empty()) {
    const std::string text = list_text(origin.data(), origin.size());
    require(origin.size() == 2, op, "origin", text, "[row, column]");
    require(origin[0] >= 0 && origin[1] >= 0, op, "origin", text, "coordinates of 0 or more");
    result.options.origin_row = origin[0];
    result.options.origin_column = origin[1];
  }
  return result;
}

}  // namespace blockscale::binding
