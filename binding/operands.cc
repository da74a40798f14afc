#include "operands.h"

namespace blockscale::binding {
namespace {

using Ints = std::vector<int64_t>;

// How the operands of a layer are stored: as GEMMs read them. FP32 scales lie transposed, which is
// how Hopper's FP8 GEMM brings them in; everything else is linear.
StorageLayout storage_of(const QuantSpec& spec) {
  StorageLayout layout;
  if (spec.scale == Format::fp32) layout.scales = Layout::mn_major;
  return layout;
}

// An operand without memory, and where its parts lie in what it gets. Codes take whole blocks of at
// least 8 bytes, so that what follows is aligned.
struct Plan {
  Plan(const QuantSpec& spec, int axis, const Extent& e) {
    q.spec = spec, q.layout = storage_of(spec), q.axis = axis;
    q.rows = e.rows, q.columns = e.columns, q.batch = e.batch, q.groups = e.groups;
    const StoredShape s = q.shape();
    outer = q.batch * s.code_bytes;
    scales = outer + (spec.outer ? q.matrices() * static_cast<int64_t>(sizeof(float)) : 0);
    bytes = scales + q.batch * s.scale_count * scale_bytes(spec.scale);
  }
  Quantized in(uint8_t* base) const {
    Quantized placed = q;
    placed.codes = base;
    placed.outer = reinterpret_cast<float*>(base + outer);
    placed.scales = base + scales;
    return placed;
  }
  Quantized q;
  int64_t outer, scales, bytes;
};

QuantizeOptions drawn(const Place& at, const Key& key) {
  require(key.seed && key.offset, at.op(), "rng", "none",
          "a seed and an offset: the recipe rounds stochastically");
  QuantizeOptions o;
  set_key(at, o, *key.seed, *key.offset, static_cast<uint64_t>(key.role) * 0x9E3779B97F4A7C15);
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

}  // namespace

Made::Made(const Place& at, const QuantSpec& spec, int axis, const Extent& e, Wanted wanted) {
  const Plan plan(spec, axis, e);
  if (wanted == Wanted::outside) {
    memory = empty({plan.bytes}, ScalarType::Byte, at.device());
    view = plan.in(static_cast<uint8_t*>(memory.mutable_data_ptr()));
  } else {
    view = plan.in(static_cast<uint8_t*>(at.memory().take(plan.bytes)));
  }
}

Side kept(const Place& at, const char* name, const Tensor& saved, const Spec& spec, int axis,
          const Extent& e) {
  if (!spec) return {saved, axis, std::nullopt};
  const Plan plan(*spec, axis, e);
  at.check(name, saved);
  if (saved.scalar_type() != ScalarType::Byte || saved.numel() != plan.bytes)
    fail(at.op(), name, std::to_string(saved.numel()) + " elements",
         std::to_string(plan.bytes) + " bytes for " + to_string(*spec),
         "pass what was returned for these extents");
  Tensor memory = contiguous_of(saved);
  // Hooks may have brought it back to anywhere; GPU kernels read codes 16 bytes at a time.
  if (reinterpret_cast<uintptr_t>(memory.const_data_ptr()) % 16 != 0)
    memory = torch::stable::clone(memory);
  auto* base = static_cast<uint8_t*>(const_cast<void*>(memory.const_data_ptr()));
  return {memory, axis, as_const(plan.in(base))};
}

int64_t rows_of(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return rows;
}
Tensor matrix(const Tensor& x) {
  if (x.dim() == 2) return x;
  const Ints sizes{rows_of(x), x.size(x.dim() - 1)};
  return x.is_contiguous() ? with_shape(x, sizes) : torch::stable::reshape(x, sizes);
}

Making::Making(const Place& at, const Tensor& x, bool batched, const Groups& groups,
               const Spec& row_spec, const Spec& column_spec, Wanted want_row, Wanted want_column,
               const Key& key)
    : in(input(at, x.dim() == 1 ? matrix(x) : x, -1, batched)) {
  const Extent extent{in.view.rows, in.view.columns, in.view.batch, groups};
  const auto prepare = [&](const Spec& spec, int axis, Wanted wanted, std::optional<Made>& made,
                           QuantizeOptions& o, std::optional<Side>& side) {
    if (wanted == Wanted::no) return;
    if (!spec) {
      side = Side{batched ? x : matrix(x), axis, std::nullopt};
      return;
    }
    made.emplace(at, *spec, axis, extent, wanted);
    if (spec->stochastic()) o = drawn(at, key);
    side = made->side();
  };
  prepare(row_spec, -1, want_row, made_row, row_options, row);
  prepare(column_spec, -2, want_column, made_column, column_options, column);
}

void make(const Place& at, const Making& first, const Making* second) {
  const Quantization none;
  if (at.cuda()) {
    quantize_two(first.quantization(), second ? second->quantization() : none, at.stream());
    at.stream().release();
    return;
  }
  for (const Making* m : {&first, second})
    if (m) quantize_one(m->quantization(), executor_for(m->in.tensor.numel()));
}

}  // namespace blockscale::binding
