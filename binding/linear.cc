// A linear layer's forward: which tensors are quantized along which axes, and what is multiplied.
// One operator, as is the backward (linear_backward.cc), since in eager mode calls cost more than
// the work of a small layer.
#include "linear.h"

#include "layer.h"
#include "product.h"

namespace blockscale::binding {
namespace {

// A missing key matters only to operands that draw random bits.
const int64_t* key_or_none(const Context& at, const char* name, const std::optional<Tensor>& key) {
  return key ? key_of(at, name, *key) : nullptr;
}

// The operator refuses what it cannot take; Python says it in more words.
void check_operands(const Context& at, const Tensor& x, const Tensor& w,
                    const std::optional<Tensor>& bias, const std::optional<Tensor>& offsets) {
  const bool grouped = offsets.has_value();
  const int64_t rank = x.dim();
  require((grouped ? rank == 2 && w.dim() == 3 : rank >= 1 && w.dim() == 2) &&
              x.size(rank - 1) == w.size(w.dim() - 1),
          at.op(), "x, w", "other shapes",
          grouped ? "x [T, K] and w [E, N, K]" : "x [..., K] and w [N, K]");
  dtype_of(at.op(), "x.dtype", x.scalar_type());
  dtype_of(at.op(), "w.dtype", w.scalar_type());
  at.check("w", w);
  require(!grouped || (!bias && offsets->numel() == w.size(0)), at.op(), "offsets, bias", "others",
          "the end of a group for each matrix of w, and no bias");
  if (!bias) return;
  dtype_of(at.op(), "bias.dtype", bias->scalar_type());
  at.check("bias", *bias);
  require(bias->dim() == 1 && bias->numel() == w.size(0), at.op(), "bias", "another shape", "[N]");
}

// W's operand along its rows, which an earlier call has made, or FSDP2 gathered: then `whole` holds
// it. `groups`: of x's rows, or 0.
GemmOperand made_ahead(const Context& at, const Tensor& w, const std::vector<Tensor>& made,
                       const Recipe& recipe, int64_t groups, std::optional<Operand>& whole) {
  const char* const name = "quantized_w";
  require(!recipe.fprop_w || !made.empty(), at.op(), name, "empty",
          "what quantize_weight returned");
  const Extent extent{w.size(w.dim() - 2),
                      w.size(w.dim() - 1),
                      w.dim() == 3 ? std::optional(w.size(0)) : std::nullopt,
                      {}};
  if (!made.empty() && is_gathered(made.front())) {
    whole = gathered(at, name, made, recipe.fprop_w, extent);
    return {std::nullopt, -1, whole->view};
  }
  return weight_of(at, name, recipe.fprop_w ? made.front() : w, recipe.fprop_x, recipe.fprop_w, -1,
                   extent, groups);
}

// What is asked of a forward.
struct Asked {
  Tensor x, w;
  std::optional<Tensor> bias;
  bool dx, dw;  // the gradients that will be asked for
  std::optional<Tensor> seed{}, offset{}, offsets{};
  std::optional<ScalarType> dtype{};  // y's; without one, that of x
  std::optional<std::vector<Tensor>> quantized_w{}, quantized_x{};
  Shard x_shard{}, w_shard{};
};

class Forward {
 public:
  Forward(const Asked& asked, const Text& recipe)
      : asked_(asked),
        recipe_(recipe_of(recipe)),
        at_(name_of(asked.offsets.has_value()), "x", asked.x) {
    check_operands(at_, asked.x, asked.w, asked.bias, asked.offsets);
    groups_ = groups_of(at_, asked.offsets, std::nullopt, rows_of(asked.x));
    seed_ = key_or_none(at_, "seed", asked.seed);
    offset_ = key_or_none(at_, "offset", asked.offset);
  }

  // y and, if there is any, the memory of what is kept for the backward.
  std::vector<Tensor> run() {
    const GemmOperand left = left_operand(), right = right_operand();
    const bool draws = recipe_.backward_draws(asked_.dx, asked_.dw);
    std::optional<SavedOperands> kept;
    if (draws || (xs_ && xs_->made_column) || (ws_ && ws_->made_column))
      kept = allocate_saved(at_, xs_ ? &xs_->made_column : nullptr,
                            ws_ ? &ws_->made_column : nullptr, draws);
    // The model's offset moves on in place, perhaps before the backward of this forward runs.
    WordCopy snapshot;
    if (draws) {
      require(offset_, at_.op(), "offset", "none", "the offset of dy's random bits");
      snapshot = {kept->offset, offset_};
    }
    const bool both = xs_ && ws_ && left.view && right.view;
    auto values = both ? room_for_values(at_, *left.view, *right.view) : std::nullopt;
    if (values) xs_->row_values = values->left, ws_->row_values = values->right;
    const Previous previous =
        quantize_operands(at_, xs_ ? &*xs_ : nullptr, ws_ ? &*ws_ : nullptr, snapshot);
    const ScalarType out = asked_.dtype.value_or(asked_.x.scalar_type());
    const Target y{out, with_last(asked_.x, n()), std::nullopt, previous};
    std::vector<Tensor> results{product(at_, left, right, asked_.bias, out, y, groups_,
                                        rows_of(asked_.x), values ? &*values : nullptr)};
    if (kept) results.push_back(kept->memory);
    return results;
  }

 private:
  int64_t n() const { return asked_.w.size(asked_.w.dim() - 2); }
  int64_t k() const { return asked_.w.size(asked_.w.dim() - 1); }

  // An operand that is to be made, or was made before.
  GemmOperand left_operand() {
    const bool widens = is_quantized_widened(at_, recipe_.fprop_x, recipe_.fprop_w, groups_.count);
    if (const auto& made = asked_.quantized_x) {
      const char* const name = "quantized_x";
      require(recipe_.fprop_x && !made->empty(), at_.op(), name, "none",
              "what quantize_input returned");
      return saved_operand(at_, name, made->front(), widens ? gpu::kWidened : *recipe_.fprop_x, -1,
                           {rows_of(asked_.x), k(), {}, groups_});
    }
    xs_.emplace(at_, asked_.x, false, groups_,
                OperandRequest{recipe_.fprop_x, Lifetime::call, widens},
                OperandRequest{recipe_.wgrad_x, saved_if(asked_.dw && recipe_.wgrad_x)},
                Key{Role::x, seed_, offset_}, asked_.x_shard);
    return *xs_->row;
  }
  GemmOperand right_operand() {
    if (const auto& made = asked_.quantized_w)
      return made_ahead(at_, asked_.w, *made, recipe_, groups_.count, gathered_w_);
    ws_.emplace(at_, asked_.w, asked_.offsets.has_value(), Groups{},
                OperandRequest{recipe_.fprop_w, Lifetime::call},
                OperandRequest{recipe_.dgrad_w, saved_if(asked_.dx && recipe_.dgrad_w)},
                Key{Role::w, seed_, offset_}, asked_.w_shard);
    return *ws_->row;
  }

  const Asked& asked_;
  const Recipe& recipe_;
  const Context at_;
  Groups groups_;
  const int64_t *seed_ = nullptr, *offset_ = nullptr;
  std::optional<PendingOperands> xs_, ws_;
  std::optional<Operand> gathered_w_;
};

}  // namespace

std::vector<Tensor> linear_op(Tensor x, Tensor w, std::optional<Tensor> bias, Text recipe, bool dx,
                              bool dw, std::optional<Tensor> seed, std::optional<Tensor> offset,
                              std::optional<Tensor> offsets, std::optional<ScalarType> dtype,
                              std::optional<std::vector<Tensor>> quantized_w,
                              std::optional<std::vector<Tensor>> quantized_x) {
  const Asked asked{.x = std::move(x),
                    .w = std::move(w),
                    .bias = std::move(bias),
                    .dx = dx,
                    .dw = dw,
                    .seed = std::move(seed),
                    .offset = std::move(offset),
                    .offsets = std::move(offsets),
                    .dtype = dtype,
                    .quantized_w = std::move(quantized_w),
                    .quantized_x = std::move(quantized_x)};
  return Forward(asked, recipe).run();
}

std::vector<Tensor> linear_piece_op(Tensor x, Tensor w, std::optional<Tensor> bias, Text recipe,
                                    bool dx, bool dw, std::optional<Tensor> seed,
                                    std::optional<Tensor> offset, std::optional<ScalarType> dtype,
                                    Ints origins, std::optional<Tensor> x_amax,
                                    std::optional<Tensor> w_amax) {
  const Context at("linear", "x", x);
  require(origins.size() == 4, at.op(), "origins", origins.size(), "rows and columns of x and w");
  const Asked asked{.x = std::move(x),
                    .w = std::move(w),
                    .bias = std::move(bias),
                    .dx = dx,
                    .dw = dw,
                    .seed = std::move(seed),
                    .offset = std::move(offset),
                    .dtype = dtype,
                    .x_shard = shard_of(at, "x_amax", x_amax, origins[0], origins[1]),
                    .w_shard = shard_of(at, "w_amax", w_amax, origins[2], origins[3])};
  return Forward(asked, recipe).run();
}

std::vector<Tensor> quantize_weight_op(Tensor w, Text recipe_text, bool dgrad,
                                       std::optional<Tensor> seed, std::optional<Tensor> offset) {
  const Recipe& recipe = recipe_of(recipe_text);
  const Context at("quantize_weight", "w", w);
  require(w.dim() == 2 || w.dim() == 3, at.op(), "w.dim()", w.dim(), "2, [N, K], or 3, [E, N, K]");
  const bool batched = w.dim() == 3;
  const int64_t groups = batched ? w.size(0) : 0;
  const bool row_widened = is_stored_widened(at, recipe.fprop_x, recipe.fprop_w, groups);
  const bool column_widened = is_stored_widened(at, recipe.dgrad_dy, recipe.dgrad_w, groups);
  // What is widened is quantized into memory of this call.
  const auto wanted = [](bool made, bool widened) {
    return widened ? for_call_if(made) : saved_if(made);
  };
  PendingOperands made(
      at, w, batched, {},
      OperandRequest{recipe.fprop_w, wanted(recipe.fprop_w.has_value(), row_widened)},
      OperandRequest{recipe.dgrad_w, wanted(dgrad && recipe.dgrad_w, column_widened)},
      {Role::w, key_or_none(at, "seed", seed), key_or_none(at, "offset", offset)});
  std::vector<Tensor> results;
  const auto allocate = [&](std::optional<Destination>& operand, bool widened) {
    if (!operand) return;
    const int64_t bytes = widened ? gpu::widened_bytes(as_const(operand->view)) : 0;
    results.push_back(widened ? empty({bytes}, ScalarType::Byte, at.device())
                              : allocate_saved(at, &operand).memory);
  };
  allocate(made.made_row, row_widened);
  allocate(made.made_column, column_widened);
  quantize_operands(at, &made);
  const auto widen = [&](const std::optional<Destination>& operand, bool widened, Tensor& to) {
    if (operand && widened)
      gpu::widen_right(as_const(operand->view), static_cast<uint8_t*>(to.mutable_data_ptr()),
                       at.stream());
  };
  if (!results.empty()) {
    widen(made.made_row, row_widened, results.front());
    widen(made.made_column, column_widened, results.back());
  }
  return results;
}

std::vector<Tensor> quantize_input_op(Tensor x, Text recipe_text, bool dw,
                                      std::optional<Tensor> offsets) {
  const Recipe& recipe = recipe_of(recipe_text);
  const Context at(name_of(offsets.has_value()), "x", x);
  require(x.dim() >= 1, at.op(), "x.dim()", x.dim(), "1 or more, [..., K]");
  const Groups groups = groups_of(at, offsets, std::nullopt, rows_of(x));
  const bool widens = is_quantized_widened(at, recipe.fprop_x, recipe.fprop_w, groups.count);
  PendingOperands made(at, x, false, groups,
                       OperandRequest{recipe.fprop_x, saved_if(recipe.fprop_x.has_value()), widens},
                       OperandRequest{recipe.wgrad_x, saved_if(dw && recipe.wgrad_x)},
                       Key{Role::x, nullptr, nullptr});
  std::vector<Tensor> results;
  for (std::optional<Destination>* operand : {&made.made_row, &made.made_column})
    if (*operand) results.push_back(allocate_saved(at, operand).memory);
  quantize_operands(at, &made);
  return results;
}

}  // namespace blockscale::binding
