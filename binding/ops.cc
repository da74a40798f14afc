// The operators under torch.ops.blockscale. One function serves every device and picks the backend
// by where its tensors lie; a device without one is refused by name, where the dispatcher would
// only say that nothing is registered. Autograd and fake kernels are Python, over these.
#include "boundary.h"
#include "gpu/gpu.h"
#include "linear.h"
#include "matmul.h"
#include "torch_errors.h"

namespace blockscale::binding {
namespace {

using OptionalTensor = std::optional<Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;

// That of an input, whose rows offsets may cut.
Extent extent_of_input(const Context& at, const Input& in, int64_t batch_dims,
                       const OptionalTensor& offsets) {
  Extent e{in.view.rows, in.view.columns};
  if (batch_dims) e.batch = in.view.batch;
  e.groups = groups_of(at, offsets, e.batch, e.rows);
  return e;
}

Triple quantize_op(Tensor x, Text spec_text, int64_t axis_value, OptionalTensor amax,
                   OptionalTensor seed, OptionalTensor offset, Ints origin, Text layout_text,
                   int64_t batch_dims, OptionalTensor offsets) {
  constexpr const char* kOp = "quantize";
  const int axis = checked_axis(kOp, axis_value);
  const QuantSpec& spec = spec_of(spec_text);
  const StorageLayout& layout = layout_of(layout_text);
  validate(spec, layout);
  const Context at(kOp, "x", x);
  const Input in = input(at, x, axis, batch_dims);
  Output out = allocate(at, spec, layout, axis, extent_of_input(at, in, batch_dims, offsets));
  const Options o = options(at, spec, "amax", amax, seed, offset, origin, out.view.matrices());
  run(at, x.numel(), [&](const auto& on) { quantize(in.view, out.view, o.options, on); });
  return {out.codes, out.scales, out.outer};
}

// An input whose values are those that it would have in `dtype`: FP32 is rounded to BF16 where it
// is read.
Input input_as(const Context& at, const Tensor& x, int axis, int64_t batch_dims, ScalarType dtype) {
  const bool rounds = x.scalar_type() == ScalarType::Float && dtype == ScalarType::BFloat16;
  const bool same = rounds || x.scalar_type() == dtype;
  Input in = input(at, same ? x : torch::stable::to(x, dtype), axis, batch_dims);
  if (rounds) in.view.dtype = DType::f32_as_bf16;
  return in;
}

// A rank's piece of a weight on its way to the others: what quantize makes of it in `dtype`, as
// bytes.
Triple quantize_piece_op(Tensor x, ScalarType dtype, Text spec_text, OptionalTensor amax,
                         int64_t batch_dims) {
  const QuantSpec& spec = spec_of(spec_text);
  const Context at("quantize", "x", x);
  const Input in = input_as(at, x, -1, batch_dims, dtype);
  Output out = allocate(at, spec, {}, -1, extent_of_input(at, in, batch_dims, {}), true);
  const Options o = options(at, spec, "amax", amax, {}, {}, {}, out.view.matrices());
  run(at, x.numel(), [&](const auto& on) { quantize(in.view, out.view, o.options, on); });
  return {out.codes, out.scales, out.outer};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_dual_op(
    Tensor x, Text row_text, Text column_text, OptionalTensor row_amax, OptionalTensor column_amax,
    OptionalTensor seed, OptionalTensor offset, Ints origin, Text row_layout_text,
    Text column_layout_text, int64_t batch_dims, OptionalTensor offsets) {
  constexpr const char* kOp = "quantize_dual";
  const QuantSpec& row_spec = spec_of(row_text);
  const QuantSpec& column_spec = spec_of(column_text);
  const StorageLayout& row_layout = layout_of(row_layout_text);
  const StorageLayout& column_layout = layout_of(column_layout_text);
  validate(row_spec, row_layout);
  validate(column_spec, column_layout);
  const Context at(kOp, "x", x);
  const Input in = input(at, x, -2, batch_dims);
  const Extent extent = extent_of_input(at, in, batch_dims, offsets);
  Output row = allocate(at, row_spec, row_layout, -1, extent);
  Output column = allocate(at, column_spec, column_layout, -2, extent);
  const int64_t matrices = row.view.matrices();
  const Options row_o = options(at, row_spec, "row_amax", row_amax, seed, offset, origin, matrices);
  const Options column_o =
      options(at, column_spec, "col_amax", column_amax, seed, offset, origin, matrices);
  run(at, x.numel(), [&](const auto& on) {
    quantize_dual(in.view, row.view, column.view, row_o.options, column_o.options, on);
  });
  return {row.codes, row.scales, row.outer, column.codes, column.scales, column.outer};
}

Tensor amax_op(Tensor x, Text spec_text, int64_t axis_value, int64_t batch_dims,
               OptionalTensor offsets, std::optional<ScalarType> dtype) {
  constexpr const char* kOp = "amax";
  const int axis = checked_axis(kOp, axis_value);
  const QuantSpec& spec = spec_of(spec_text);
  const Context at(kOp, "x", x);
  const Input in = input_as(at, x, axis, batch_dims, dtype.value_or(x.scalar_type()));
  const Groups groups = extent_of_input(at, in, batch_dims, offsets).groups;
  const Ints sizes = groups ? Ints{groups.count} : batch_dims ? Ints{in.view.batch} : Ints{};
  Tensor out = empty(sizes, ScalarType::Float, at.device());
  float* const found = static_cast<float*>(out.mutable_data_ptr());
  run(at, x.numel(), [&](const auto& on) { amax(in.view, spec, axis, found, on, groups); });
  return out;
}

Tensor dequantize_op(Tensor codes, Tensor scales, Tensor outer, Text spec_text, int64_t axis_value,
                     Ints shape, Text layout_text, ScalarType dtype, OptionalTensor offsets) {
  constexpr const char* kOp = "dequantize";
  const int axis = checked_axis(kOp, axis_value);
  Extent e = extent_of(kOp, shape);
  const Context at(kOp, "codes", codes);
  e.groups = groups_of(at, offsets, e.batch, e.rows);
  const Operand q =
      operand(at, "", codes, scales, outer, spec_of(spec_text), layout_of(layout_text), axis, e);
  Tensor out = empty(shape, dtype, at.device());
  const Matrix view = matrices(at, out, e.rows, e.columns, e.batch.value_or(1));
  run(at, out.numel(), [&](const auto& on) { dequantize(q.view, view, on); });
  return out;
}

std::tuple<Tensor, Tensor> relayout_op(Tensor codes, Tensor scales, Text spec_text,
                                       int64_t axis_value, Ints shape, Text from_text, Text to_text,
                                       OptionalTensor offsets) {
  constexpr const char* kOp = "relayout";
  const int axis = checked_axis(kOp, axis_value);
  QuantSpec spec = spec_of(spec_text);
  const StorageLayout& to = layout_of(to_text);
  validate(spec, to);
  // Only codes and scales change their place: the outer scale is left out of the spec.
  spec.outer = false;
  Extent e = extent_of(kOp, shape);
  const Context at(kOp, "codes", codes);
  const Tensor none = empty({0}, ScalarType::Float, at.device());
  e.groups = groups_of(at, offsets, e.batch, e.rows);
  const Operand from = operand(at, "", codes, scales, none, spec, layout_of(from_text), axis, e);
  Output out = allocate(at, spec, to, axis, e);
  run(at, codes.numel(), [&](const auto& on) { relayout(from.view, out.view, on); });
  return {out.codes, out.scales};
}

Tensor matmul_op(Tensor a_codes, Tensor a_scales, Tensor a_outer, Text a_spec, Text a_layout,
                 int64_t a_rows, Tensor b_codes, Tensor b_scales, Tensor b_outer, Text b_spec,
                 Text b_layout, int64_t b_rows, int64_t k, OptionalTensor bias,
                 ScalarType out_dtype, OptionalTensor offsets, int64_t axis) {
  const char* const op = offsets ? "grouped_matmul" : "matmul";
  for (int64_t extent : {a_rows, b_rows, k})
    require(extent >= 0, op, "a_rows, b_rows, k", extent, "0 or more");
  require(out_dtype == ScalarType::Float || out_dtype == ScalarType::BFloat16, op, "out_dtype",
          dtype_text(out_dtype), "float32 or bfloat16", "convert the result with .to()");
  const Context at(op, "a_codes", a_codes);
  // Without groups, stored operands look the same along either axis: lines of codes along the
  // contraction axis. Groups divide rows of what was quantized: those of a, or the contraction
  // axis.
  const bool along = checked_axis(op, axis) == -2;
  require(offsets || !along, op, "axis", axis, "-1 without offsets");
  const Groups groups = groups_of(at, offsets, std::nullopt, along ? k : a_rows);
  const auto read = [&](const char* prefix, const Tensor& codes, const Tensor& scales,
                        const Tensor& outer, const Text& spec, const Text& layout, int64_t lines,
                        std::optional<int64_t> batch, const Groups& in) {
    return operand(at, prefix, codes, scales, outer, spec_of(spec), layout_of(layout),
                   along ? -2 : -1, {along ? k : lines, along ? lines : k, batch, in});
  };
  const auto batch = groups && !along ? std::optional(groups.count) : std::nullopt;
  const Operand a =
      read("a_", a_codes, a_scales, a_outer, a_spec, a_layout, a_rows, std::nullopt, groups);
  const Operand b = read("b_", b_codes, b_scales, b_outer, b_spec, b_layout, b_rows, batch,
                         along ? groups : Groups{});
  Ints sizes{a_rows, b_rows};
  if (along) sizes.insert(sizes.begin(), groups.count);
  return matmul(at, a.view, b.view, bias, {out_dtype, sizes});
}

// Sets the offset of the forward that begins, and that of the next one if this one counts; returns
// a copy of the first. PyTorch's operators would be three launches.
Tensor begin_forward_op(Tensor offset, Tensor upcoming, bool counts) {
  const Context at("begin_forward", "offset", offset);
  key_of(at, "offset", offset), key_of(at, "upcoming", upcoming);
  auto* const here = static_cast<int64_t*>(offset.mutable_data_ptr());
  auto* const next = static_cast<int64_t*>(upcoming.mutable_data_ptr());
  Tensor copy = empty({}, ScalarType::Long, at.device());
  auto* const kept = static_cast<int64_t*>(copy.mutable_data_ptr());
  if (at.cuda()) {
    gpu::begin_forward(here, next, kept, counts, at.stream());
  } else {
    *here = *kept = *next;
    if (counts) ++*next;
  }
  return copy;
}

}  // namespace
}  // namespace blockscale::binding

STABLE_TORCH_LIBRARY(blockscale, m) {
  m.def(
      "quantize(Tensor x, str spec, int axis, Tensor? amax, Tensor? seed, Tensor? offset, "
      "SymInt[] origin, str layout, int batch_dims, Tensor? offsets=None) -> (Tensor codes, "
      "Tensor scales, Tensor outer)");
  m.def(
      "quantize_dual(Tensor x, str row_spec, str col_spec, Tensor? row_amax, Tensor? col_amax, "
      "Tensor? seed, Tensor? offset, SymInt[] origin, str row_layout, str col_layout, "
      "int batch_dims, Tensor? offsets=None) -> (Tensor row_codes, Tensor row_scales, Tensor "
      "row_outer, "
      "Tensor col_codes, Tensor col_scales, Tensor col_outer)");
  m.def(
      "quantize_piece(Tensor x, ScalarType dtype, str spec, Tensor? amax, int batch_dims) -> "
      "(Tensor codes, Tensor scales, Tensor outer)");
  m.def(
      "amax(Tensor x, str spec, int axis, int batch_dims, Tensor? offsets=None, "
      "ScalarType? dtype=None) -> Tensor");
  m.def(
      "dequantize(Tensor codes, Tensor scales, Tensor outer, str spec, int axis, SymInt[] shape, "
      "str layout, ScalarType dtype, Tensor? offsets=None) -> Tensor");
  m.def(
      "relayout(Tensor codes, Tensor scales, str spec, int axis, SymInt[] shape, str from_layout, "
      "str to_layout, Tensor? offsets=None) -> (Tensor codes, Tensor scales)");
  m.def(
      "matmul(Tensor a_codes, Tensor a_scales, Tensor a_outer, str a_spec, str a_layout, "
      "SymInt a_rows, Tensor b_codes, Tensor b_scales, Tensor b_outer, str b_spec, str b_layout, "
      "SymInt b_rows, SymInt k, Tensor? bias, ScalarType out_dtype, Tensor? offsets=None, "
      "int axis=-1) -> Tensor");
  m.def(
      "linear(Tensor x, Tensor w, Tensor? bias, str recipe, bool dx=False, bool dw=False, "
      "Tensor? seed=None, Tensor? offset=None, Tensor? offsets=None, ScalarType? dtype=None, "
      "Tensor[]? quantized_w=None, Tensor[]? quantized_x=None) -> Tensor[]");
  // The same without defaults, for programs that keep operators and no autograd.Function: its
  // derivative is registered in _exported.py.
  m.def(
      "linear_exported(Tensor x, Tensor w, Tensor? bias, str recipe, bool dx, bool dw, "
      "Tensor? seed, Tensor? offset, Tensor? offsets, ScalarType? dtype, Tensor[]? quantized_w, "
      "Tensor[]? quantized_x) -> Tensor[]");
  m.def(
      "linear_piece(Tensor x, Tensor w, Tensor? bias, str recipe, bool dx, bool dw, Tensor? seed, "
      "Tensor? offset, ScalarType? dtype, SymInt[] origins, Tensor? x_amax, Tensor? w_amax) -> "
      "Tensor[]");
  m.def(
      "quantize_weight(Tensor w, str recipe, bool dgrad, Tensor? seed=None, Tensor? offset=None) "
      "-> Tensor[]");
  m.def("quantize_input(Tensor x, str recipe, bool dw, Tensor? offsets=None) -> Tensor[]");
  m.def(
      "linear_backward(Tensor dy, Tensor[] saved, str recipe, SymInt k, bool dx, bool dw, bool db, "
      "Tensor? offsets=None, ScalarType? x_dtype=None, ScalarType? w_dtype=None, "
      "ScalarType? bias_dtype=None, bool skip_dx=False, bool skip_dw=False, "
      "bool w_transposed=False, bool x_apart=False, bool w_apart=False) -> Tensor[]");
  m.def(
      "linear_piece_backward(Tensor dy, Tensor[] saved, str recipe, SymInt k, bool dx, bool dw, "
      "bool db, ScalarType? x_dtype, ScalarType? w_dtype, ScalarType? bias_dtype, bool skip_dx, "
      "bool skip_dw, SymInt[] origin, Tensor? amax) -> Tensor[]");
  m.def(
      "linear_backward_into(Tensor dy, Tensor[] saved, str recipe, SymInt k, bool dx, bool db, "
      "Tensor? offsets, Tensor(a!) into, ScalarType? x_dtype=None, ScalarType? bias_dtype=None, "
      "bool skip_dx=False, bool x_apart=False, bool w_apart=False) -> (Tensor dx, Tensor db)");
  m.def("begin_forward(Tensor(a!) offset, Tensor(b!) upcoming, bool counts) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(blockscale, CompositeExplicitAutograd, m) {
  using namespace blockscale::binding;
  m.impl("quantize", TORCH_BOX(&WithTorchErrors<&quantize_op>::call));
  m.impl("quantize_dual", TORCH_BOX(&WithTorchErrors<&quantize_dual_op>::call));
  m.impl("quantize_piece", TORCH_BOX(&WithTorchErrors<&quantize_piece_op>::call));
  m.impl("amax", TORCH_BOX(&WithTorchErrors<&amax_op>::call));
  m.impl("dequantize", TORCH_BOX(&WithTorchErrors<&dequantize_op>::call));
  m.impl("relayout", TORCH_BOX(&WithTorchErrors<&relayout_op>::call));
  m.impl("matmul", TORCH_BOX(&WithTorchErrors<&matmul_op>::call));
  m.impl("linear", TORCH_BOX(&WithTorchErrors<&linear_op>::call));
  m.impl("linear_exported", TORCH_BOX(&WithTorchErrors<&linear_op>::call));
  m.impl("linear_piece", TORCH_BOX(&WithTorchErrors<&linear_piece_op>::call));
  m.impl("linear_piece_backward", TORCH_BOX(&WithTorchErrors<&linear_piece_backward_op>::call));
  m.impl("quantize_weight", TORCH_BOX(&WithTorchErrors<&quantize_weight_op>::call));
  m.impl("quantize_input", TORCH_BOX(&WithTorchErrors<&quantize_input_op>::call));
  m.impl("linear_backward", TORCH_BOX(&WithTorchErrors<&linear_backward_op>::call));
  m.impl("linear_backward_into", TORCH_BOX(&WithTorchErrors<&linear_backward_into_op>::call));
  m.impl("begin_forward", TORCH_BOX(&WithTorchErrors<&begin_forward_op>::call));
}
