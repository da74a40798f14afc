// A linear layer's forward and backward: which tensors are quantized along which axes, and what is
// multiplied. One operator each, since in eager mode calls cost more than the work of a small
// layer.
#include "linear.h"

#include <algorithm>
#include <span>
#include <sstream>

#include "matmul.h"
#include "operands.h"
#include "product.h"

namespace blockscale::binding {
namespace {

using Ints = std::vector<int64_t>;

struct Recipe {
  Spec fprop_x, fprop_w, dgrad_dy, dgrad_w, wgrad_dy, wgrad_x;
  // Whether the operands made in a backward that gives these gradients draw random bits.
  bool backward_draws(bool dx, bool dw) const {
    return (dx && dgrad_dy && dgrad_dy->stochastic()) || (dw && wgrad_dy && wgrad_dy->stochastic());
  }
};

Recipe parse_recipe(const std::string& text) {
  std::istringstream words(text);
  std::vector<Spec> specs;
  for (std::string word; words >> word;)
    specs.push_back(word == "none" ? Spec() : Spec(parse_spec(word)));
  require(specs.size() == 6, "linear", "recipe", text, "six specs, or none in their place");
  return {specs[0], specs[1], specs[2], specs[3], specs[4], specs[5]};
}
const Recipe& recipe_of(const Text& text) { return parsed_once<parse_recipe>(text); }

Ints with_last(const Tensor& x, int64_t last) {
  Ints sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = last;
  return sizes;
}

// One that is not given matters to what draws alone.
const int64_t* key_or_none(const Place& at, const char* name, const std::optional<Tensor>& key) {
  return key ? key_of(at, name, *key) : nullptr;
}

// The operator refuses what it cannot take; Python says it in more words.
void check_operands(const Place& at, const Tensor& x, const Tensor& w,
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

// A weight's operand along its rows as FSDP2 gathers it: codes, scales and outer scale, each as
// quantize_piece returns it. Codes have two dimensions, or three of [E, N, K]; what is not gathered
// is bytes in one, or values.
constexpr size_t kGatheredParts = 3;
bool is_gathered(const Tensor& first) {
  const ScalarType type = first.scalar_type();
  return first.dim() > 1 && type != ScalarType::Float && type != ScalarType::BFloat16 &&
         type != ScalarType::Half;
}
Operand gathered(const Place& at, const char* name, std::span<const Tensor> parts, const Spec& spec,
                 const Extent& e, bool batched) {
  require(spec && spec->square && parts.size() == kGatheredParts, at.op(), name, parts.size(),
          "codes, scales and outer scale of a weight that the recipe quantizes in square blocks");
  require(parts[0].numel() == 0 || parts[0].const_data_ptr(), at.op(), name,
          "a weight whose memory FSDP2 has freed", "one that is gathered",
          "have FSDP2 unshard its module for the backward (set_unshard_in_backward)");
  return operand(at, std::string(name) + ".", parts[0], parts[1], parts[2], *spec, {}, -1, e.rows,
                 e.columns, batched ? std::optional(e.batch) : std::nullopt, {}, true);
}

const char* name_of(bool grouped) { return grouped ? "grouped_linear" : "linear"; }

// The buffer that W's gradient is added to.
void check_into(const Place& at, const std::optional<Tensor>& into, const Ints& sizes) {
  if (!into) return;
  at.check("accumulate_into", *into);
  const bool same =
      std::equal(sizes.begin(), sizes.end(), into->sizes().begin(), into->sizes().end());
  require(same && into->scalar_type() == ScalarType::Float && into->is_contiguous(), at.op(),
          "accumulate_into", "another tensor", "contiguous float32 of w's shape");
}

// `amax`: what the outer scales of the operands along the rows and down the columns come from.
Cut cut_of(const Place& at, const char* name, const std::optional<Tensor>& amax, int64_t row,
           int64_t column) {
  if (!amax) return {row, column};
  at.check(name, *amax);
  require(amax->scalar_type() == ScalarType::Float && amax->numel() == 2 && amax->is_contiguous(),
          at.op(), name, "another tensor", "float32 [2]");
  const auto* of = static_cast<const float*>(amax->const_data_ptr());
  return {row, column, of, of + 1};
}

// W's operand along its rows, which an earlier call has made, or FSDP2 gathered: then `whole` holds
// it. `groups`: of x's rows, or 0.
Side made_ahead(const Place& at, const Tensor& w, const std::vector<Tensor>& made,
                const Recipe& recipe, int64_t groups, std::optional<Operand>& whole) {
  const char* const name = "quantized_w";
  require(!recipe.fprop_w || !made.empty(), at.op(), name, "empty",
          "what quantize_weight returned");
  const bool batched = w.dim() == 3;
  const Extent extent{w.size(w.dim() - 2), w.size(w.dim() - 1), batched ? w.size(0) : 1, {}};
  if (!made.empty() && is_gathered(made.front())) {
    whole = gathered(at, name, made, recipe.fprop_w, extent, batched);
    return {std::nullopt, -1, whole->view};
  }
  return weight_of(at, name, recipe.fprop_w ? made.front() : w, recipe.fprop_x, recipe.fprop_w, -1,
                   extent, groups);
}

std::vector<Tensor> forward(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                            const Text& recipe_text, bool dx, bool dw,
                            const std::optional<Tensor>& seed, const std::optional<Tensor>& offset,
                            const std::optional<Tensor>& offsets,
                            const std::optional<ScalarType>& dtype,
                            const std::optional<std::vector<Tensor>>& quantized_w,
                            const std::optional<std::vector<Tensor>>& quantized_x = {},
                            const Cut& x_cut = {}, const Cut& w_cut = {}) {
  const Recipe& recipe = recipe_of(recipe_text);
  const bool grouped = offsets.has_value();
  const Place at(name_of(grouped), "x", x);
  check_operands(at, x, w, bias, offsets);
  const ScalarType out = dtype.value_or(x.scalar_type());
  const int64_t rows = rows_of(x);
  const Groups groups = groups_of(at, offsets, std::nullopt, rows);
  const int64_t* const seed_at = key_or_none(at, "seed", seed);
  const int64_t* const offset_at = key_or_none(at, "offset", offset);
  const int64_t n = w.size(w.dim() - 2), k = w.size(w.dim() - 1);
  const bool x_widens = goes_wide(at, recipe.fprop_x, recipe.fprop_w, groups.count);
  std::optional<Making> xs, ws;
  std::optional<Operand> whole_w;
  std::optional<Side> left, right;
  if (!quantized_x) {
    xs.emplace(at, x, false, groups, Wish{recipe.fprop_x, Wanted::here, x_widens},
               Wish{recipe.wgrad_x, outside_if(dw && recipe.wgrad_x)},
               Key{Role::x, seed_at, offset_at}, x_cut);
    left = xs->row;
  } else {
    require(recipe.fprop_x && !quantized_x->empty(), at.op(), "quantized_x", "none",
            "what quantize_input returned");
    left = made_before(at, "quantized_x", quantized_x->front(),
                       x_widens ? gpu::kWidened : *recipe.fprop_x, -1, {rows, k, 1, groups});
  }
  if (!quantized_w) {
    ws.emplace(at, w, grouped, Groups{}, Wish{recipe.fprop_w, Wanted::here},
               Wish{recipe.dgrad_w, outside_if(dx && recipe.dgrad_w)},
               Key{Role::w, seed_at, offset_at}, w_cut);
    right = ws->row;
  } else {
    right = made_ahead(at, w, *quantized_w, recipe, groups.count, whole_w);
  }
  const bool draws = recipe.backward_draws(dx, dw);
  std::optional<Kept> kept;
  if (draws || (xs && xs->made_column) || (ws && ws->made_column))
    kept = hand_out(at, xs ? &xs->made_column : nullptr, ws ? &ws->made_column : nullptr, draws);
  // The model's offset moves on in place, perhaps before the backward of this forward runs.
  WordCopy snapshot;
  if (draws) {
    require(offset_at, at.op(), "offset", "none", "the offset of dy's random bits");
    snapshot = {kept->offset, offset_at};
  }
  const bool both = xs && ws && left->view && right->view;
  auto values = both ? room_for_values(at, *left->view, *right->view) : std::nullopt;
  if (values) xs->row_values = values->left, ws->row_values = values->right;
  const Previous previous = make(at, xs ? &*xs : nullptr, ws ? &*ws : nullptr, snapshot);
  const Target y{out, with_last(x, n), std::nullopt, previous};
  std::vector<Tensor> results{
      product(at, *left, *right, bias, out, y, groups, rows, values ? &*values : nullptr)};
  if (kept) results.push_back(kept->memory);
  return results;
}

}  // namespace

std::vector<Tensor> linear_op(Tensor x, Tensor w, std::optional<Tensor> bias, Text recipe, bool dx,
                              bool dw, std::optional<Tensor> seed, std::optional<Tensor> offset,
                              std::optional<Tensor> offsets, std::optional<ScalarType> dtype,
                              std::optional<std::vector<Tensor>> quantized_w,
                              std::optional<std::vector<Tensor>> quantized_x) {
  return forward(x, w, bias, recipe, dx, dw, seed, offset, offsets, dtype, quantized_w,
                 quantized_x);
}

std::vector<Tensor> linear_piece_op(Tensor x, Tensor w, std::optional<Tensor> bias, Text recipe,
                                    bool dx, bool dw, std::optional<Tensor> seed,
                                    std::optional<Tensor> offset, std::optional<ScalarType> dtype,
                                    std::vector<int64_t> origins, std::optional<Tensor> x_amax,
                                    std::optional<Tensor> w_amax) {
  const Place at("linear", "x", x);
  require(origins.size() == 4, at.op(), "origins", origins.size(), "rows and columns of x and w");
  return forward(x, w, bias, recipe, dx, dw, seed, offset, {}, dtype, {}, {},
                 cut_of(at, "x_amax", x_amax, origins[0], origins[1]),
                 cut_of(at, "w_amax", w_amax, origins[2], origins[3]));
}

std::vector<Tensor> quantize_weight_op(Tensor w, Text recipe_text, bool dgrad,
                                       std::optional<Tensor> seed, std::optional<Tensor> offset) {
  const Recipe& recipe = recipe_of(recipe_text);
  const Place at("quantize_weight", "w", w);
  require(w.dim() == 2 || w.dim() == 3, at.op(), "w.dim()", w.dim(), "2, [N, K], or 3, [E, N, K]");
  const bool batched = w.dim() == 3;
  const int64_t groups = batched ? w.size(0) : 0;
  const bool row_wide = lies_wide(at, recipe.fprop_x, recipe.fprop_w, groups);
  const bool column_wide = lies_wide(at, recipe.dgrad_dy, recipe.dgrad_w, groups);
  // What is widened is quantized into memory of this call.
  const auto wanted = [](bool made, bool wide) { return wide ? here_if(made) : outside_if(made); };
  Making made(at, w, batched, {},
              Wish{recipe.fprop_w, wanted(recipe.fprop_w.has_value(), row_wide)},
              Wish{recipe.dgrad_w, wanted(dgrad && recipe.dgrad_w, column_wide)},
              {Role::w, key_or_none(at, "seed", seed), key_or_none(at, "offset", offset)});
  std::vector<Tensor> results;
  const auto allocate = [&](std::optional<Made>& operand, bool wide) {
    if (!operand) return;
    const int64_t bytes = wide ? gpu::wide_bytes(as_const(operand->view)) : 0;
    results.push_back(wide ? empty({bytes}, ScalarType::Byte, at.device())
                           : hand_out(at, &operand).memory);
  };
  allocate(made.made_row, row_wide);
  allocate(made.made_column, column_wide);
  make(at, &made);
  const auto widen = [&](const std::optional<Made>& operand, bool wide, Tensor& to) {
    if (operand && wide)
      gpu::widen_b(as_const(operand->view), static_cast<uint8_t*>(to.mutable_data_ptr()),
                   at.stream());
  };
  if (!results.empty()) {
    widen(made.made_row, row_wide, results.front());
    widen(made.made_column, column_wide, results.back());
  }
  return results;
}

std::vector<Tensor> quantize_input_op(Tensor x, Text recipe_text, bool dw,
                                      std::optional<Tensor> offsets) {
  const Recipe& recipe = recipe_of(recipe_text);
  const Place at(name_of(offsets.has_value()), "x", x);
  require(x.dim() >= 1, at.op(), "x.dim()", x.dim(), "1 or more, [..., K]");
  const Groups groups = groups_of(at, offsets, std::nullopt, rows_of(x));
  const bool widens = goes_wide(at, recipe.fprop_x, recipe.fprop_w, groups.count);
  Making made(
      at, x, false, groups, Wish{recipe.fprop_x, outside_if(recipe.fprop_x.has_value()), widens},
      Wish{recipe.wgrad_x, outside_if(dw && recipe.wgrad_x)}, Key{Role::x, nullptr, nullptr});
  std::vector<Tensor> results;
  for (std::optional<Made>* operand : {&made.made_row, &made.made_column})
    if (*operand) results.push_back(hand_out(at, operand).memory);
  make(at, &made);
  return results;
}

namespace {

// The gradients that the forward was told of, and which quantized operands it has not made itself.
struct Needs {
  bool dx, dw, x_apart = false, w_apart = false;
};

// One of `saved`, which hooks for saved tensors may have changed: it has to be as it was.
const Tensor& values_in(const Place& at, const Tensor& saved, const Extent& e,
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
  Saved(const Place& at, const std::vector<Tensor>& saved, const Recipe& recipe, const Needs& needs,
        bool draws, const Extent& of_x, const Extent& of_w) {
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
      std::optional<Plan> x_plan, w_plan;
      if (x_here) x_plan.emplace(*recipe.wgrad_x, -2, of_x);
      if (w_here) w_plan.emplace(*recipe.dgrad_w, -2, of_w);
      Kept kept(x_plan ? &*x_plan : nullptr, w_plan ? &*w_plan : nullptr, draws);
      kept.read(at, "saved", take(1)[0]);
      if (x_here) x = Side{kept.memory, -2, as_const(kept.view[0])};
      if (w_here) w = Side{kept.memory, -2, as_const(kept.view[1])};
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
  std::optional<Side> x, w;
  std::optional<Tensor> x_values, w_values;  // to be quantized
  std::optional<Operand> w_rows;             // to be transposed
  const int64_t *seed = nullptr, *offset = nullptr;
  std::optional<Tensor> memory;  // of the offset

 private:
  static constexpr const char* kNeeds =
      "what the forward made, x, w and seed, each where it is needed";

  void read_x(const Place& at, const Tensor& saved, const Spec& spec, const Extent& e) {
    if (spec && saved.scalar_type() == ScalarType::Byte)
      x = made_before(at, "saved", saved, *spec, -2, e);
    else if (const Tensor& values = values_in(at, saved, e); spec)
      x_values = values;
    else
      x = Side{matrix(values), -2, std::nullopt};
  }

  void read_w(const Place& at, std::span<const Tensor> saved, const Recipe& recipe, const Extent& e,
              int64_t groups) {
    const Spec& spec = recipe.dgrad_w;
    const Tensor& first = saved.front();
    const bool batched = groups > 0;
    if (is_gathered(first))
      w_rows = gathered(at, "saved", saved, spec, e, batched);
    else if (spec && first.scalar_type() == ScalarType::Byte)
      w = weight_of(at, "saved", first, recipe.dgrad_dy, spec, -2, e, groups);
    else if (const Tensor& values = values_in(at, first, e, batched); spec)
      w_values = values;
    else
      w = Side{batched ? values : matrix(values), -2, std::nullopt};
  }
};

// In square blocks the operand along the rows has the codes and scales of that down the columns.
Side transposed(const Place& at, const Operand& rows) {
  const ConstQuantized& q = rows.view;
  const Made made(at, q.spec, -2, {q.rows, q.columns, q.batch, {}}, Wanted::here);
  run(at, rows.codes.numel(), [&](const auto& on) { transpose(q, made.view, on); });
  return {std::nullopt, -2, as_const(made.view)};
}

// W's gradient, [N, K] or one for each group, of dy's and x's operands along the rows. `turned`: in
// memory it is [K, N], as W is, which is the product the other way round.
Tensor weight_gradient(const Place& at, const Side& dy, const Side& x, ScalarType compute,
                       Target target, const Groups& groups, int64_t m, bool turned) {
  // One in square blocks the FP8 GEMM takes on the right alone.
  const bool x_goes_left = !x.view || !x.view->spec.square;
  if (!turned || target.into || !x_goes_left)
    return product(at, dy, x, std::nullopt, compute, target, groups, m);
  std::swap(target.sizes.back(), target.sizes[target.sizes.size() - 2]);
  return torch::stable::transpose(product(at, x, dy, std::nullopt, compute, target, groups, m), -2,
                                  -1);
}

// The gradients asked for, but dw where it is added to `into`: of those in `needs` this backward
// leaves out `skip_dx` and `skip_dw`.
std::vector<Tensor> backward(const Tensor& dy, const std::vector<Tensor>& saved,
                             const Text& recipe_text, int64_t k, const Needs& needs, bool db,
                             bool skip_dx, bool skip_dw, const std::optional<Tensor>& offsets,
                             const std::optional<ScalarType>& x_dtype,
                             const std::optional<ScalarType>& w_dtype,
                             const std::optional<ScalarType>& bias_dtype,
                             const std::optional<Tensor>& into, bool w_turned = false,
                             const Cut& cut = {}) {
  const Recipe& recipe = recipe_of(recipe_text);
  const Place at(name_of(offsets.has_value()), "dy", dy);
  require(dy.dim() >= 1, at.op(), "dy.dim()", dy.dim(), "1 or more, [..., N]");
  const bool draws = recipe.backward_draws(needs.dx, needs.dw);
  const int64_t m = rows_of(dy), n = dy.size(dy.dim() - 1);
  const Groups groups = groups_of(at, offsets, std::nullopt, m);
  const int64_t batch = groups ? groups.count : 1;
  const Saved from(at, saved, recipe, needs, draws, {m, k, 1, groups}, {n, k, batch, {}});
  const bool dx = needs.dx && !skip_dx, dw = needs.dw && !skip_dw;

  const ScalarType dtype = dy.scalar_type();
  // Turned round, the product for dw has dy on the right.
  const bool dx_widens = goes_wide(at, recipe.dgrad_dy, recipe.dgrad_w, groups.count);
  const bool dw_widens =
      (!w_turned || into) && goes_wide(at, recipe.wgrad_dy, recipe.wgrad_x, groups.count, m);
  const Making dys(at, dy, false, groups, Wish{recipe.dgrad_dy, here_if(dx), dx_widens},
                   Wish{recipe.wgrad_dy, here_if(dw), dw_widens},
                   {Role::dy, from.seed, from.offset}, cut);
  std::optional<Making> ws;
  if (dx && from.w_values)
    ws.emplace(at, *from.w_values, static_cast<bool>(groups), Groups{}, Wish{Spec(), Wanted::no},
               Wish{recipe.dgrad_w, Wanted::here}, Key{Role::w, nullptr, nullptr});
  // Before anything is added to `into`: a call that lacks memory leaves that as it was.
  std::optional<Tensor> bias_gradient;
  if (db) {
    const Ints rows{0};
    const ScalarType type = bias_dtype.value_or(dtype);
    // On a GPU PyTorch sums BF16 in FP32 anyway and rounds once; on a CPU not always.
    const bool once = at.cuda() && type == dtype;
    const Tensor sum = torch::stable::sum(matrix(dy), rows, false, once ? type : ScalarType::Float);
    bias_gradient = once ? sum : torch::stable::to(sum, type);
  }
  Previous previous = make(at, &dys, ws ? &*ws : nullptr);
  std::vector<Tensor> gradients;
  if (dx) {
    const Side w = ws ? *ws->column : from.w_rows ? transposed(at, *from.w_rows) : *from.w;
    const Target to{x_dtype.value_or(dtype), with_last(dy, k), std::nullopt, previous};
    gradients.push_back(product(at, *dys.row, w, std::nullopt, dtype, to, groups, m));
    // W's gradient reads nothing of it.
    const bool apart =
        previous == Previous::operands && dy.numel() > 0 && multiplies_codes(*dys.row, w);
    previous = apart ? Previous::nothing : Previous::any;
  }
  if (dw) {
    Ints sizes{n, k};
    if (groups) sizes.insert(sizes.begin(), batch);
    check_into(at, into, sizes);
    std::optional<Making> xs;
    if (from.x_values) {
      xs.emplace(at, *from.x_values, false, groups, Wish{Spec(), Wanted::no},
                 Wish{recipe.wgrad_x, Wanted::here}, Key{Role::x, nullptr, nullptr});
      previous = make(at, &*xs);
    }
    const Target to{w_dtype.value_or(dtype), sizes, into, previous};
    const Tensor made = weight_gradient(at, *dys.column, xs ? *xs->column : *from.x, dtype, to,
                                        groups, m, w_turned);
    if (!into) gradients.push_back(made);
  }
  if (bias_gradient) gradients.push_back(std::move(*bias_gradient));
  return gradients;
}

}  // namespace

std::vector<Tensor> linear_backward_op(Tensor dy, std::vector<Tensor> saved, Text recipe, int64_t k,
                                       bool dx, bool dw, bool db, std::optional<Tensor> offsets,
                                       std::optional<ScalarType> x_dtype,
                                       std::optional<ScalarType> w_dtype,
                                       std::optional<ScalarType> bias_dtype, bool skip_dx,
                                       bool skip_dw, bool w_turned, bool x_apart, bool w_apart) {
  return backward(dy, saved, recipe, k, {dx, dw, x_apart, w_apart}, db, skip_dx, skip_dw, offsets,
                  x_dtype, w_dtype, bias_dtype, {}, w_turned);
}

std::vector<Tensor> linear_piece_backward_op(Tensor dy, std::vector<Tensor> saved, Text recipe,
                                             int64_t k, bool dx, bool dw, bool db,
                                             std::optional<ScalarType> x_dtype,
                                             std::optional<ScalarType> w_dtype,
                                             std::optional<ScalarType> bias_dtype, bool skip_dx,
                                             bool skip_dw, std::vector<int64_t> origin,
                                             std::optional<Tensor> amax) {
  const Place at("linear", "dy", dy);
  require(origin.size() == 2, at.op(), "origin", origin.size(), "the row and column of dy");
  return backward(dy, saved, recipe, k, {dx, dw}, db, skip_dx, skip_dw, {}, x_dtype, w_dtype,
                  bias_dtype, {}, false, cut_of(at, "amax", amax, origin[0], origin[1]));
}

std::tuple<Tensor, Tensor> linear_backward_into_op(Tensor dy, std::vector<Tensor> saved,
                                                   Text recipe, int64_t k, bool dx, bool db,
                                                   std::optional<Tensor> offsets, Tensor into,
                                                   std::optional<ScalarType> x_dtype,
                                                   std::optional<ScalarType> bias_dtype,
                                                   bool skip_dx, bool x_apart, bool w_apart) {
  const auto made = backward(dy, saved, recipe, k, {dx, true, x_apart, w_apart}, db, skip_dx, false,
                             offsets, x_dtype, ScalarType::Float, bias_dtype, into);
  // Each an empty tensor of its own: results of an operator may not alias.
  const auto none = [&] { return empty({0}, ScalarType::Float, dy.device()); };
  return {dx && !skip_dx ? made[0] : none(), db ? made.back() : none()};
}

}  // namespace blockscale::binding
