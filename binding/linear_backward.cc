// A linear layer's backward: what the forward has left, and the gradients from it.
#include <algorithm>
#include <span>

#include "layer.h"
#include "linear.h"
#include "product.h"

namespace blockscale::binding {
namespace {

// The gradients that the forward prepared for, and the quantized operands that it left to the
// backward.
struct Needs {
  bool dx, dw, x_apart = false, w_apart = false;
};

// One of `saved`, which hooks for saved tensors may have changed: it has to be as it was.
const Tensor& values_in(const Context& at, const Tensor& saved, const Extent& e,
                        bool batched = false) {
  at.check("saved", saved);
  const int64_t rank = saved.dim();
  const bool fits = rank >= 1 && saved.size(rank - 1) == e.columns &&
                    (batched ? rank == 3 && saved.size(0) == e.batch && saved.size(1) == e.rows
                             : rows_of(saved) == e.rows);
  require(fits, at.op(), "saved", shape_text(saved), "x and w as the forward had them");
  return saved;
}

// What a backward finds in `saved`: one tensor with what the forward has made, then x's operand and
// w's where they lie apart (three tensors of a w that was gathered), then the seed.
struct Saved {
  Saved(const Context& at, const std::vector<Tensor>& saved, const Recipe& recipe,
        const Needs& needs, bool draws, const Extent& of_x, const Extent& of_w) {
    std::span<const Tensor> left(saved);
    const auto take = [&](size_t count) {
      require(count <= left.size(), at.op(), "saved", saved.size(), kNeeds);
      const auto taken = left.first(count);
      left = left.subspan(count);
      return taken;
    };
    const bool x_apart = needs.dw && (!recipe.wgrad_x || needs.x_apart);
    const bool w_apart = needs.dx && (!recipe.dgrad_w || needs.w_apart);
    const bool x_here = needs.dw && !x_apart, w_here = needs.dx && !w_apart;
    if (x_here || w_here || draws) {
      std::optional<OperandPlan> x_plan, w_plan;
      if (x_here) x_plan.emplace(*recipe.wgrad_x, -2, of_x);
      if (w_here) w_plan.emplace(*recipe.dgrad_w, -2, of_w);
      SavedOperands kept(x_plan ? &*x_plan : nullptr, w_plan ? &*w_plan : nullptr, draws);
      kept.read(at, "saved", take(1)[0]);
      if (x_here) x = GemmOperand{kept.memory, -2, as_const(kept.view[0])};
      if (w_here) w = GemmOperand{kept.memory, -2, as_const(kept.view[1])};
      offset = kept.offset;
      memory = kept.memory;
    }
    if (x_apart) read_x(at, take(1)[0], recipe.wgrad_x, of_x);
    if (w_apart) {
      const bool parts = !left.empty() && is_gathered(left[0]);
      read_w(at, take(parts ? kGatheredParts : 1), recipe, of_w, of_x.groups.count);
    }
    if (draws) seed = key_of(at, "seed", take(1)[0]);
    require(left.empty(), at.op(), "saved", saved.size(), kNeeds);
  }
  std::optional<GemmOperand> x, w;
  std::optional<Tensor> x_values, w_values;  // to be quantized
  std::optional<Operand> w_rows;             // to be transposed
  const int64_t *seed = nullptr, *offset = nullptr;
  std::optional<Tensor> memory;  // of the offset

 private:
  static constexpr const char* kNeeds =
      "what the forward made, x, w and seed, each where it is needed";

  void read_x(const Context& at, const Tensor& saved, const Spec& spec, const Extent& e) {
    if (spec && saved.scalar_type() == ScalarType::Byte)
      x = saved_operand(at, "saved", saved, *spec, -2, e);
    else if (const Tensor& values = values_in(at, saved, e); spec)
      x_values = values;
    else
      x = GemmOperand{matrix(values), -2, std::nullopt};
  }

  void read_w(const Context& at, std::span<const Tensor> saved, const Recipe& recipe,
              const Extent& e, int64_t groups) {
    const Spec& spec = recipe.dgrad_w;
    const Tensor& first = saved.front();
    const bool batched = groups > 0;
    if (is_gathered(first))
      w_rows = gathered(at, "saved", saved, spec, e);
    else if (spec && first.scalar_type() == ScalarType::Byte)
      w = weight_of(at, "saved", first, recipe.dgrad_dy, spec, -2, e, groups);
    else if (const Tensor& values = values_in(at, first, e, batched); spec)
      w_values = values;
    else
      w = GemmOperand{batched ? values : matrix(values), -2, std::nullopt};
  }
};

// In square blocks the operand along the rows has the codes and scales of that down the columns.
GemmOperand transposed(const Context& at, const Operand& rows) {
  const ConstQuantized& q = rows.view;
  const Destination made(at, q.spec, -2, {q.rows, q.columns, q.batch, {}}, Lifetime::call);
  run(at, rows.codes.numel(), [&](const auto& on) { transpose(q, made.view, on); });
  return {std::nullopt, -2, as_const(made.view)};
}

// The buffer that W's gradient is added to.
void check_into(const Context& at, const std::optional<Tensor>& into, const Ints& sizes) {
  if (!into) return;
  at.check("accumulate_into", *into);
  const bool same =
      std::equal(sizes.begin(), sizes.end(), into->sizes().begin(), into->sizes().end());
  require(same && into->scalar_type() == ScalarType::Float && into->is_contiguous(), at.op(),
          "accumulate_into", "another tensor", "contiguous float32 of w's shape");
}

// What is asked of a backward.
struct Asked {
  Needs needs;
  bool dx, dw, db;  // of the gradients that the forward was told of, those wanted now
  std::optional<Tensor> offsets{};
  // Without one, that of dy.
  std::optional<ScalarType> x_dtype{}, w_dtype{}, bias_dtype{};
  std::optional<Tensor> into{};  // w's gradient is added to it
  bool w_transposed = false;     // w's gradient lies as [K, N], as w does
  Shard shard{};
};

class Backward {
 public:
  Backward(const Tensor& dy, const std::vector<Tensor>& saved, const Text& recipe, int64_t k,
           const Asked& asked)
      : dy_(dy),
        asked_(asked),
        recipe_(recipe_of(recipe)),
        at_(name_of(asked.offsets.has_value()), "dy", dy),
        groups_(groups_of(at_, asked.offsets, std::nullopt, rows())),
        n_(columns()),
        k_(k),
        from_(at_, saved, recipe_, asked.needs,
              recipe_.backward_draws(asked.needs.dx, asked.needs.dw), {rows(), k, {}, groups_},
              {n_, k, groups_ ? std::optional(groups_.count) : std::nullopt, {}}),
        dys_(operands_of_dy()) {}

  // Those wanted, but w's where it is added to a buffer.
  std::vector<Tensor> gradients() {
    // Before anything is added to the buffer: a call that lacks memory leaves that as it was.
    std::optional<Tensor> db;
    if (asked_.db) db = bias_gradient();
    std::optional<PendingOperands> ws;
    if (asked_.dx && from_.w_values)
      ws.emplace(at_, *from_.w_values, static_cast<bool>(groups_), Groups{},
                 OperandRequest{Spec(), Lifetime::none},
                 OperandRequest{recipe_.dgrad_w, Lifetime::call}, Key{Role::w, nullptr, nullptr});
    previous_ = quantize_operands(at_, &dys_, ws ? &*ws : nullptr);
    std::vector<Tensor> made;
    if (asked_.dx) made.push_back(input_gradient(ws));
    if (asked_.dw) {
      Tensor dw = weight_gradient();
      if (!asked_.into) made.push_back(std::move(dw));
    }
    if (db) made.push_back(std::move(*db));
    return made;
  }

 private:
  int64_t rows() const { return rows_of(dy_); }
  int64_t columns() const {
    require(dy_.dim() >= 1, at_.op(), "dy.dim()", dy_.dim(), "1 or more, [..., N]");
    return dy_.size(dy_.dim() - 1);
  }
  int64_t batch() const { return groups_ ? groups_.count : 1; }
  ScalarType dtype() const { return dy_.scalar_type(); }

  PendingOperands operands_of_dy() const {
    // Turned round, the product for dw has dy on the right.
    const bool dx_widens =
        is_quantized_widened(at_, recipe_.dgrad_dy, recipe_.dgrad_w, groups_.count);
    const bool dw_widens =
        (!asked_.w_transposed || asked_.into) &&
        is_quantized_widened(at_, recipe_.wgrad_dy, recipe_.wgrad_x, groups_.count, rows());
    return {at_,
            dy_,
            false,
            groups_,
            OperandRequest{recipe_.dgrad_dy, for_call_if(asked_.dx), dx_widens},
            OperandRequest{recipe_.wgrad_dy, for_call_if(asked_.dw), dw_widens},
            {Role::dy, from_.seed, from_.offset},
            asked_.shard};
  }

  Tensor bias_gradient() const {
    const Ints first{0};
    const ScalarType type = asked_.bias_dtype.value_or(dtype());
    // On a GPU PyTorch sums BF16 in FP32 anyway and rounds once; on a CPU not always.
    const bool once = at_.cuda() && type == dtype();
    const Tensor sum =
        torch::stable::sum(matrix(dy_), first, false, once ? type : ScalarType::Float);
    return once ? sum : torch::stable::to(sum, type);
  }

  Tensor input_gradient(const std::optional<PendingOperands>& ws) {
    const GemmOperand w = ws             ? *ws->column
                          : from_.w_rows ? transposed(at_, *from_.w_rows)
                                         : *from_.w;
    const Target to{asked_.x_dtype.value_or(dtype()), with_last(dy_, k_), std::nullopt, previous_};
    Tensor made = product(at_, *dys_.row, w, std::nullopt, dtype(), to, groups_, rows());
    // W's gradient reads nothing of it.
    const bool apart =
        previous_ == Previous::operands && dy_.numel() > 0 && multiplies_codes(*dys_.row, w);
    previous_ = apart ? Previous::nothing : Previous::any;
    return made;
  }

  // [N, K], or one for each group.
  Tensor weight_gradient() {
    Ints sizes{n_, k_};
    if (groups_) sizes.insert(sizes.begin(), batch());
    check_into(at_, asked_.into, sizes);
    std::optional<PendingOperands> xs;
    if (from_.x_values) {
      xs.emplace(at_, *from_.x_values, false, groups_, OperandRequest{Spec(), Lifetime::none},
                 OperandRequest{recipe_.wgrad_x, Lifetime::call}, Key{Role::x, nullptr, nullptr});
      previous_ = quantize_operands(at_, &*xs);
    }
    Target to{asked_.w_dtype.value_or(dtype()), sizes, asked_.into, previous_};
    const GemmOperand &dy = *dys_.column, &x = xs ? *xs->column : *from_.x;
    // Turned, it is the product the other way round; but one in square blocks the FP8 GEMM takes on
    // the right alone.
    const bool x_goes_left = !x.view || !x.view->spec.square;
    if (!asked_.w_transposed || asked_.into || !x_goes_left)
      return product(at_, dy, x, std::nullopt, dtype(), to, groups_, rows());
    std::swap(to.sizes.back(), to.sizes[to.sizes.size() - 2]);
    return torch::stable::transpose(product(at_, x, dy, std::nullopt, dtype(), to, groups_, rows()),
                                    -2, -1);
  }

  const Tensor& dy_;
  const Asked& asked_;
  const Recipe& recipe_;
  const Context at_;
  const Groups groups_;
  const int64_t n_, k_;
  const Saved from_;
  const PendingOperands dys_;
  Previous previous_ = Previous::any;
};

}  // namespace

std::vector<Tensor> linear_backward_op(Tensor dy, std::vector<Tensor> saved, Text recipe, int64_t k,
                                       bool dx, bool dw, bool db, std::optional<Tensor> offsets,
                                       std::optional<ScalarType> x_dtype,
                                       std::optional<ScalarType> w_dtype,
                                       std::optional<ScalarType> bias_dtype, bool skip_dx,
                                       bool skip_dw, bool w_transposed, bool x_apart,
                                       bool w_apart) {
  const Asked asked{.needs = {dx, dw, x_apart, w_apart},
                    .dx = dx && !skip_dx,
                    .dw = dw && !skip_dw,
                    .db = db,
                    .offsets = offsets,
                    .x_dtype = x_dtype,
                    .w_dtype = w_dtype,
                    .bias_dtype = bias_dtype,
                    .w_transposed = w_transposed};
  return Backward(dy, saved, recipe, k, asked).gradients();
}

std::vector<Tensor> linear_piece_backward_op(Tensor dy, std::vector<Tensor> saved, Text recipe,
                                             int64_t k, bool dx, bool dw, bool db,
                                             std::optional<ScalarType> x_dtype,
                                             std::optional<ScalarType> w_dtype,
                                             std::optional<ScalarType> bias_dtype, bool skip_dx,
                                             bool skip_dw, Ints origin,
                                             std::optional<Tensor> amax) {
  const Context at("linear", "dy", dy);
  require(origin.size() == 2, at.op(), "origin", origin.size(), "the row and column of dy");
  const Asked asked{.needs = {dx, dw},
                    .dx = dx && !skip_dx,
                    .dw = dw && !skip_dw,
                    .db = db,
                    .x_dtype = x_dtype,
                    .w_dtype = w_dtype,
                    .bias_dtype = bias_dtype,
                    .shard = shard_of(at, "amax", amax, origin[0], origin[1])};
  return Backward(dy, saved, recipe, k, asked).gradients();
}

std::tuple<Tensor, Tensor> linear_backward_into_op(Tensor dy, std::vector<Tensor> saved,
                                                   Text recipe, int64_t k, bool dx, bool db,
                                                   std::optional<Tensor> offsets, Tensor into,
                                                   std::optional<ScalarType> x_dtype,
                                                   std::optional<ScalarType> bias_dtype,
                                                   bool skip_dx, bool x_apart, bool w_apart) {
  const bool wants_x = dx && !skip_dx;
  const Asked asked{.needs = {dx, true, x_apart, w_apart},
                    .dx = wants_x,
                    .dw = true,
                    .db = db,
                    .offsets = offsets,
                    .x_dtype = x_dtype,
                    .w_dtype = ScalarType::Float,
                    .bias_dtype = bias_dtype,
                    .into = into};
  const std::vector<Tensor> made = Backward(dy, saved, recipe, k, asked).gradients();
  // Each an empty tensor of its own: results of an operator may not alias.
  const auto none = [&] { return empty({0}, ScalarType::Float, dy.device()); };
  return {wants_x ? made[0] : none(), db ? made.back() : none()};
}

}  // namespace blockscale::binding
