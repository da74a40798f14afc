// A linear layer's forward and backward: which tensors are quantized along which axes, and what is
// multiplied. One operator each, since in eager mode calls cost more than the work of a small
// layer.
#include "linear.h"

#include <array>
#include <sstream>
#include <unordered_map>

#include "gpu/gpu.h"
#include "matmul.h"

namespace blockscale::binding {
namespace {

using Ints = std::vector<int64_t>;
using Spec = std::optional<QuantSpec>;  // none: high precision

// The first result of one of PyTorch's operators.
template <class... Args>
Tensor call(const char* op, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

struct Recipe {
  Spec fprop_x, fprop_w, dgrad_dy, dgrad_w, wgrad_dy, wgrad_x;
  // Whether the operands made in a backward that gives these gradients draw random bits.
  bool backward_draws(bool dx, bool dw) const {
    return (dx && dgrad_dy && dgrad_dy->stochastic()) || (dw && wgrad_dy && wgrad_dy->stochastic());
  }
};

const Recipe& recipe_of(const Text& text) {
  thread_local std::unordered_map<std::string, Recipe> cache;
  const auto found = cache.find(text.value);
  if (found != cache.end()) return found->second;
  std::istringstream words(text.value);
  std::vector<Spec> specs;
  for (std::string word; words >> word;)
    specs.push_back(word == "none" ? Spec() : Spec(parse_spec(word)));
  require(specs.size() == 6, "linear", "recipe", text.value, "six specs, or none in their place");
  return cache
      .emplace(text.value, Recipe{specs[0], specs[1], specs[2], specs[3], specs[4], specs[5]})
      .first->second;
}

// How the operands of a layer are stored: as GEMMs read them. FP32 scales of single lines lie
// transposed, which is how Hopper's FP8 GEMM brings them in; everything else is linear.
StorageLayout storage_of(const QuantSpec& spec) {
  StorageLayout layout;
  if (spec.scale == Format::fp32 && !spec.square) layout.scales = Layout::mn_major;
  return layout;
}

// Where the parts of a quantized operand lie in its memory. Codes take whole blocks of at least 8
// bytes, so that what follows is aligned.
struct Parts {
  Parts(const QuantSpec& spec, int axis, int64_t rows, int64_t columns) {
    const StoredShape s = stored_shape(spec, storage_of(spec), axis, rows, columns);
    outer = s.code_bytes;
    scales = outer + (spec.outer ? static_cast<int64_t>(sizeof(float)) : 0);
    bytes = scales + s.scale_count * scale_bytes(spec.scale);
  }
  int64_t outer, scales, bytes;
};

// One operand of a GEMM, [lines, contraction length]: quantized, or a high-precision matrix.
struct Side {
  Tensor memory;  // of `view`, or the matrix
  std::optional<ConstQuantized> view;
};

// Where a quantizer writes.
struct Made {
  Made(const Place& at, const QuantSpec& spec, int axis, int64_t rows, int64_t columns)
      : parts(spec, axis, rows, columns),
        memory(empty({parts.bytes}, ScalarType::Byte, at.device())) {
    auto* base = static_cast<uint8_t*>(memory.mutable_data_ptr());
    view = {base,
            base + parts.scales,
            reinterpret_cast<float*>(base + parts.outer),
            spec,
            storage_of(spec),
            axis,
            rows,
            columns};
  }
  Side side() const { return {memory, as_const(view)}; }

  Parts parts;
  Tensor memory;
  Quantized view;
};

// An operand that an earlier call has made, from its memory.
Side kept(const Place& at, const Tensor& saved, const QuantSpec& spec, int64_t lines, int64_t k) {
  const Parts parts(spec, -1, lines, k);
  at.check("saved", saved);
  if (saved.scalar_type() != ScalarType::Byte || saved.numel() != parts.bytes)
    fail(at.op(), "saved", std::to_string(saved.numel()) + " elements",
         std::to_string(parts.bytes) + " bytes for " + to_string(spec),
         "pass what linear returned");
  Tensor memory = torch::stable::contiguous(saved);
  // Hooks may have brought it back to anywhere; GPU kernels read codes 16 bytes at a time.
  if (reinterpret_cast<uintptr_t>(memory.const_data_ptr()) % 16 != 0)
    memory = torch::stable::clone(memory);
  const auto* base = static_cast<const uint8_t*>(memory.const_data_ptr());
  const auto* outer = reinterpret_cast<const float*>(base + parts.outer);
  return {memory,
          ConstQuantized{base, base + parts.scales, outer, spec, storage_of(spec), -1, lines, k}};
}

int64_t rows_of(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return rows;
}
Tensor matrix(const Tensor& x) {
  return x.dim() == 2 ? x : torch::stable::reshape(x, Ints{rows_of(x), x.size(x.dim() - 1)});
}
Ints with_last(const Tensor& x, int64_t last) {
  Ints sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = last;
  return sizes;
}

// A high-precision operand: the matrix, or its transpose.
Side exact(const Tensor& x, int axis) {
  const Tensor m = matrix(x);
  return {axis == -1 ? m : torch::stable::transpose(m, 0, 1), std::nullopt};
}

struct Key {
  const std::optional<Tensor>&seed, &offset;
};

// The operands of x along its rows and down its columns, in one pass where both are quantized; one
// that is not wanted is left out.
struct Operands {
  std::optional<Side> row, column;
};
Operands operands(const Place& at, const Tensor& x, const Spec& row_spec, const Spec& column_spec,
                  bool want_row, bool want_column, const Key& key) {
  const Tensor t = x.dim() == 1 ? matrix(x) : x;
  const Input in = input(at, t, -1, 0);
  Operands result;
  std::optional<Made> row, column;
  QuantizeOptions row_options, column_options;
  const auto prepare = [&](const Spec& spec, int axis, std::optional<Made>& made,
                           QuantizeOptions& o, std::optional<Side>& side) {
    if (!spec) {
      side = exact(x, axis);
      return;
    }
    made.emplace(at, *spec, axis, in.view.rows, in.view.columns);
    if (spec->stochastic())
      o = options(at, *spec, std::nullopt, key.seed, key.offset, {}, 1).options;
    side = made->side();
  };
  if (want_row) prepare(row_spec, -1, row, row_options, result.row);
  if (want_column) prepare(column_spec, -2, column, column_options, result.column);
  run(at, x.numel(), [&](const auto& on) {
    if (row && column)
      quantize_dual(in.view, row->view, column->view, row_options, column_options, on);
    else if (row)
      quantize(in.view, row->view, row_options, on);
    else if (column)
      quantize(in.view, column->view, column_options, on);
  });
  return result;
}

// The values of an operand in a dtype, [lines, k].
Tensor values(const Place& at, const Side& side, ScalarType dtype) {
  if (!side.view) return torch::stable::to(side.memory, dtype);
  ConstQuantized q = *side.view;
  const int64_t lines = q.axis == -1 ? q.rows : q.columns;
  const int64_t k = q.axis == -1 ? q.columns : q.rows;
  q.axis = -1, q.rows = lines, q.columns = k;
  Tensor out = empty({lines, k}, dtype, at.device());
  const Matrix view{
      out.mutable_data_ptr(), dtype_of(at.op(), "dtype", dtype), lines, k, k, 1, 1, lines * k};
  run(at, lines * k, [&](const auto& on) { dequantize(q, view, on); });
  return out;
}

// A·Bᵀ + bias, `sizes` in all; in PyTorch's own GEMM of `compute` unless both are quantized.
Tensor product(const Place& at, const Side& a, const Side& b, const std::optional<Tensor>& bias,
               ScalarType compute, ScalarType out_dtype, const Ints& sizes) {
  if (a.view && b.view) return matmul(at, *a.view, *b.view, bias, out_dtype, sizes);
  std::optional<Tensor> row;
  if (bias) row = torch::stable::to(*bias, compute);
  const Tensor y = call("aten::linear", "", values(at, a, compute), values(at, b, compute), row);
  return with_shape(torch::stable::to(y, out_dtype), sizes);
}

// The model's offset moves on in place, perhaps before the backward of this forward runs.
Tensor snapshot(const Place& at, const std::optional<Tensor>& offset) {
  require(offset.has_value(), at.op(), "offset", "none", "the offset of dy's random bits");
  at.check("offset", *offset);
  require(offset->scalar_type() == ScalarType::Long && offset->numel() == 1, at.op(), "offset",
          "another tensor", "one int64");
  Tensor copy =
      empty(Ints(offset->sizes().begin(), offset->sizes().end()), ScalarType::Long, at.device());
  auto* to = static_cast<int64_t*>(copy.mutable_data_ptr());
  const auto* from = static_cast<const int64_t*>(offset->const_data_ptr());
  if (at.cuda())
    gpu::copy(to, from, TorchStream(at.device()));
  else
    *to = *from;
  return copy;
}

}  // namespace

std::vector<Tensor> linear_op(Tensor x, Tensor w, std::optional<Tensor> bias, Text recipe_text,
                              bool dx, bool dw, ScalarType dtype, std::optional<Tensor> seed_x,
                              std::optional<Tensor> seed_w, std::optional<Tensor> offset) {
  const Recipe& recipe = recipe_of(recipe_text);
  const Place at("linear", "x", x);
  at.check("w", w);
  require(w.dim() == 2 && x.dim() >= 1 && x.size(x.dim() - 1) == w.size(1), at.op(), "x, w",
          "other shapes", "x [..., K] and w [N, K]");
  const Operands xs =
      operands(at, x, recipe.fprop_x, recipe.wgrad_x, true, dw && recipe.wgrad_x, {seed_x, offset});
  const Operands ws =
      operands(at, w, recipe.fprop_w, recipe.dgrad_w, true, dx && recipe.dgrad_w, {seed_w, offset});
  std::vector<Tensor> results{
      product(at, *xs.row, *ws.row, bias, dtype, dtype, with_last(x, w.size(0)))};
  if (xs.column) results.push_back(xs.column->memory);
  if (ws.column) results.push_back(ws.column->memory);
  if (recipe.backward_draws(dx, dw)) results.push_back(snapshot(at, offset));
  return results;
}

std::vector<Tensor> linear_backward_op(Tensor dy, std::vector<Tensor> saved, Text recipe_text,
                                       int64_t k, bool dx, bool dw, ScalarType dtype,
                                       ScalarType x_dtype, ScalarType w_dtype,
                                       std::optional<ScalarType> bias_dtype) {
  const Recipe& recipe = recipe_of(recipe_text);
  const Place at("linear", "dy", dy);
  require(dy.dim() >= 1, at.op(), "dy.dim()", dy.dim(), "1 or more, [..., N]");
  const bool draws = recipe.backward_draws(dx, dw);
  require(saved.size() == size_t{dw} + size_t{dx} + 2 * size_t{draws}, at.op(), "saved",
          saved.size(), "x's operand, w's operand, offset and seed, each where it is needed");
  const int64_t m = rows_of(dy), n = dy.size(dy.dim() - 1);
  auto next = saved.begin();
  std::optional<Side> x, w;
  if (dw) x = recipe.wgrad_x ? kept(at, *next, *recipe.wgrad_x, k, m) : exact(*next, -2);
  if (dw) ++next;
  if (dx) w = recipe.dgrad_w ? kept(at, *next, *recipe.dgrad_w, k, n) : exact(*next, -2);
  if (dx) ++next;
  std::optional<Tensor> seed, offset;
  if (draws) offset = *next++, seed = *next++;

  const Operands dys = operands(at, dy, recipe.dgrad_dy, recipe.wgrad_dy, dx, dw, {seed, offset});
  std::vector<Tensor> gradients;
  if (dx)
    gradients.push_back(product(at, *dys.row, *w, std::nullopt, dtype, x_dtype, with_last(dy, k)));
  if (dw) gradients.push_back(product(at, *dys.column, *x, std::nullopt, dtype, w_dtype, {n, k}));
  if (bias_dtype) {
    const Ints rows{0};
    const Tensor sum = torch::stable::sum(matrix(dy), rows, false, ScalarType::Float);
    gradients.push_back(torch::stable::to(sum, *bias_dtype));
  }
  return gradients;
}

}  // namespace blockscale::binding
