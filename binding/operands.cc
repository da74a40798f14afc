#include "operands.h"

#include "checks.h"

namespace blockscale::binding {
namespace {

QuantizeOptions drawn(const Context& at, const Key& key) {
  require(key.seed && key.offset, at.op(), "rng", "none",
          "a seed and an offset: the recipe rounds stochastically");
  QuantizeOptions o;
  set_key(at, o, key.seed, key.offset, static_cast<uint64_t>(key.role) * 0x9E3779B97F4A7C15);
  return o;
}

void quantize_one(const Quantization& q, const Executor& on) {
  if (q.row && q.column)
    quantize_dual(q.x, *q.row, *q.column, q.row_options, q.column_options, on);
  else if (q.row)
    quantize(q.x, *q.row, q.row_options, on);
  else if (q.column)
    quantize(q.x, *q.column, q.column_options, on);
}

// What an earlier call has filled, where it was made or a copy.
Tensor read_bytes(const Context& at, const char* name, const Tensor& saved, int64_t bytes) {
  at.check(name, saved);
  if (saved.scalar_type() != ScalarType::Byte || saved.numel() != bytes)
    fail(at.op(), name, std::to_string(saved.numel()) + " elements",
         std::to_string(bytes) + " bytes", "pass what was returned for these extents");
  Tensor memory = contiguous_of(saved);
  // Hooks may have brought it back to anywhere; GPU kernels read codes 16 bytes at a time.
  if (reinterpret_cast<uintptr_t>(memory.const_data_ptr()) % 16 != 0)
    memory = torch::stable::clone(memory);
  return memory;
}

}  // namespace

StorageLayout gemm_layout(const QuantSpec& spec) {
  StorageLayout layout;
  if (spec.scale == Format::fp32) layout.scales = Layout::mn_major;
  return layout;
}

OperandPlan::OperandPlan(const QuantSpec& spec, int axis, const Extent& e) {
  q.spec = spec, q.layout = gemm_layout(spec), q.axis = axis;
  q.rows = e.rows, q.columns = e.columns, q.batch = e.batch.value_or(1), q.groups = e.groups;
  check_sizes("linear", "operand", q.rows, q.columns, q.batch, q.groups.count);
  const StoredShape s = q.shape();
  codes = q.batch * s.code_bytes;
  outer = spec.outer ? q.matrices() * static_cast<int64_t>(sizeof(float)) : 0;
  scales = q.batch * s.scale_count * scale_bytes(spec.scale);
}

SavedOperands::SavedOperands(const OperandPlan* first, const OperandPlan* second, bool offset)
    : plans_{first, second}, has_offset_(offset) {
  constexpr int64_t kAlign = 128;
  if (first) bytes_ = first->codes;
  if (second) second_ = round_up(bytes_, kAlign), bytes_ = second_ + second->codes;
  if (offset) bytes_ += sizeof(int64_t);
  for (const OperandPlan* p : plans_)
    if (p) bytes_ += p->outer + p->scales;
}

void SavedOperands::allocate(const Context& at) {
  memory = empty({bytes_}, ScalarType::Byte, at.device());
  const int64_t end = plans_[0] ? plans_[0]->codes : 0;
  if (plans_[1] && second_ != end) {
    Tensor gap = part(memory, {second_ - end}, {1}, end);
    torch::stable::zero_(gap);
  }
  place();
}

void SavedOperands::read(const Context& at, const char* name, const Tensor& saved) {
  memory = read_bytes(at, name, saved, bytes_);
  place();
}

void SavedOperands::place() {
  auto* const base = static_cast<uint8_t*>(const_cast<void*>(memory.const_data_ptr()));
  uint8_t* next = base;
  for (int i = 0; i < 2; ++i) {
    if (!plans_[i]) continue;
    view[i] = plans_[i]->q;
    view[i].codes = base + (i ? second_ : 0);
    next = view[i].codes + plans_[i]->codes;
  }
  const auto place_scales = [&](int64_t size) {
    for (int i = 0; i < 2; ++i)
      if (plans_[i] && scale_bytes(plans_[i]->q.spec.scale) == size)
        view[i].scales = next, next += plans_[i]->scales;
  };
  // By what has to be aligned: mn_major, of whole 16 bytes, as the GEMM reads it; then words.
  place_scales(4);
  if (has_offset_) offset = reinterpret_cast<int64_t*>(next), next += sizeof(int64_t);
  for (int i = 0; i < 2; ++i)
    if (plans_[i]) view[i].outer = reinterpret_cast<float*>(next), next += plans_[i]->outer;
  place_scales(1);
}

bool is_stored_widened(const Context& at, const Spec& a, const Spec& weight, int64_t groups) {
  if (!at.cuda() || !a || !weight) return false;
  return gpu::widens(*a, *weight, groups);
}

bool is_quantized_widened(const Context& at, const Spec& a, const Spec& b, int64_t groups,
                          int64_t rows) {
  return is_stored_widened(at, a, b, groups) && gpu::fits_widened(rows, groups);
}

GemmOperand saved_operand(const Context& at, const char* name, const Tensor& saved,
                          const QuantSpec& spec, int axis, const Extent& e) {
  const OperandPlan plan(spec, axis, e);
  SavedOperands kept(&plan);
  kept.read(at, name, saved);
  return {kept.memory, axis, as_const(kept.view[0])};
}

GemmOperand weight_of(const Context& at, const char* name, const Tensor& saved, const Spec& a,
                      const Spec& weight, int axis, const Extent& e, int64_t groups) {
  if (!weight) return {saved, axis, std::nullopt};
  const OperandPlan plan(*weight, axis, e);
  if (saved.numel() == SavedOperands(&plan).bytes() || !is_stored_widened(at, a, weight, groups))
    return saved_operand(at, name, saved, *weight, axis, e);
  validate_pair(at.op(), *a, *weight);
  const ConstQuantized narrow = as_const(plan.q);
  const Tensor memory = read_bytes(at, name, saved, gpu::widened_bytes(narrow));
  auto* const base = static_cast<uint8_t*>(const_cast<void*>(memory.const_data_ptr()));
  return {memory, axis, std::nullopt, gpu::widened_in(narrow, base)};
}

Tensor matrix(const Tensor& x) {
  if (x.dim() == 2) return x;
  const Ints sizes{rows_of(x), x.size(x.dim() - 1)};
  return x.is_contiguous() ? with_shape(x, sizes) : torch::stable::reshape(x, sizes);
}

Destination::Destination(const Context& at, const QuantSpec& stored, int axis, const Extent& e,
                         Lifetime lifetime)
    : plan(stored, axis, e), view(plan.q) {
  if (lifetime == Lifetime::saved) return;
  uint8_t* const base = at.memory().take(plan.codes + plan.outer + plan.scales);
  view.codes = base;
  view.outer = reinterpret_cast<float*>(base + plan.codes);
  view.scales = base + plan.codes + plan.outer;
}

PendingOperands::PendingOperands(const Context& at, const Tensor& x, bool batched,
                                 const Groups& groups, const OperandRequest& row_request,
                                 const OperandRequest& column_request, const Key& key,
                                 const Shard& shard)
    : in(input(at, x.dim() == 1 ? matrix(x) : x, -1, batched)) {
  const Extent extent{in.view.rows, in.view.columns, in.view.batch, groups};
  const auto prepare = [&](const OperandRequest& request, int axis, const float* amax,
                           std::optional<Destination>& made, QuantizeOptions& o,
                           std::optional<GemmOperand>& side) {
    const Spec& spec = request.spec;
    if (request.lifetime == Lifetime::none) return;
    if (!spec) {
      side = GemmOperand{batched ? x : matrix(x), axis, std::nullopt};
      return;
    }
    made.emplace(at, request.widens ? gpu::kWidened : *spec, axis, extent, request.lifetime);
    if (spec->stochastic()) o = drawn(at, key);
    if (request.widens) o.widened = spec;
    o.origin_row = shard.row, o.origin_column = shard.column;
    if (spec->outer) o.amax = amax;
    if (request.lifetime == Lifetime::call)
      side = GemmOperand{std::nullopt, axis, as_const(made->view)};
  };
  prepare(row_request, -1, shard.row_amax, made_row, row_options, row);
  prepare(column_request, -2, shard.column_amax, made_column, column_options, column);
}

SavedOperands allocate_saved(const Context& at, std::optional<Destination>* first,
                             std::optional<Destination>* second, bool offset) {
  std::optional<Destination>* const made[] = {first, second};
  const auto plan = [&](int i) { return made[i] && *made[i] ? &(*made[i])->plan : nullptr; };
  SavedOperands kept(plan(0), plan(1), offset);
  kept.allocate(at);
  for (int i = 0; i < 2; ++i)
    if (plan(i)) (*made[i])->view = kept.view[i];
  return kept;
}

Previous quantize_operands(const Context& at, const PendingOperands* first,
                           const PendingOperands* second, const WordCopy& word) {
  const auto of = [](const PendingOperands* m) { return m ? m->quantization() : Quantization{}; };
  if (at.cuda()) {
    quantize_two(of(first), of(second), at.stream(), word);
    at.stream().release();
    const auto launched = [](const PendingOperands* m) {
      return m && (m->made_row || m->made_column) && m->in.tensor.numel() > 0;
    };
    return launched(first) || launched(second) ? Previous::operands : Previous::any;
  }
  if (word.to) *word.to = *word.from;
  for (const PendingOperands* m : {first, second})
    if (m) quantize_one(m->quantization(), executor_for(m->in.tensor.numel()));
  return Previous::any;
}

}  // namespace blockscale::binding
