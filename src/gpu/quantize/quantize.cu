#include <bit>

#include "gpu/quantize/instances.h"

namespace blockscale::gpu {
namespace {

const Entry* find(const Pass& row, const Pass& column) {
  for (const auto& tables : {fp8_kernels(), mxfp4_kernels(), nvfp4_kernels()})
    for (const Table& table : tables)
      for (const Entry& e : table)
        if (e.row == row && e.column == column) return &e;
  return nullptr;
}

Pass pass_of(const QuantSpec& spec) {
  Encoder encoder = Encoder::any;
  if (spec.element == Format::e2m1)
    encoder = spec.stochastic() ? Encoder::fp4_stochastic : Encoder::fp4_nearest;
  else if (spec.element == Format::e4m3fn && !spec.stochastic())
    encoder = Encoder::e4m3fn;
  else if (spec.element == Format::e5m2 && !spec.stochastic())
    encoder = Encoder::e5m2;
  else if (spec.hadamard.dim == 0)
    encoder = Encoder::byte;
  else
    return Any::kPass;
  return {encoder, spec.scale, spec.square, spec.hadamard.dim != 0};
}

template <bool kGrouped>
void launch_any(QuantizeParams& p, const Pass& row, const Pass& column, NativeStream stream) {
  if (!column.present()) return launch<Any, None, AnyLoader, kGrouped>(p, stream);
  if (!row.present()) return launch<None, Any, AnyLoader, kGrouped>(p, stream);
  launch<Any, Any, AnyLoader, kGrouped>(p, stream);
}

// The compiled quantizer for these passes and this input, or null.
Launcher launcher_for(const QuantizeParams& p, const Pass& row, const Pass& column, bool grouped) {
  // Grids count runs in 31 bits; kernels count the bytes of 128 rows in 32, unsigned.
  const int64_t runs = p.row.shape.lines * (p.row.shape.padded / kRun);
  const int64_t size = p.x.dtype == DType::f32 ? 4 : 2;
  const bool fits = fits_grid(p) && runs < int64_t{1} << 31 && p.x.row_stride >= 0 &&
                    size * kTile * p.x.row_stride < int64_t{1} << 32;
  const Entry* e = fits && p.x.column_stride == 1 ? find(row, column) : nullptr;
  if (!e) return nullptr;
  if (p.x.dtype != DType::bf16) return grouped ? e->floats.grouped : e->floats.matrix;
  if (grouped) return p.aligned ? e->grouped : nullptr;
  return p.aligned ? e->aligned : e->unaligned;
}

void launch(QuantizeParams& p, const Pass& row, const Pass& column, NativeStream stream) {
  if (const Launcher compiled = launcher_for(p, row, column, false)) return compiled(p, stream);
  if (p.tiles == 0) {  // no element, but an outer scale for every matrix
    p.tiles_down = p.tiles_across = 1;
    p.tiles = p.batch;
  }
  launch_any<false>(p, row, column, stream);
}

// The same as next_group() and group_part().
GroupRule rule_of(const Quantized& out, const StoredShape& s) {
  const Layout codes = out.layout.codes, scales = out.layout.scales;
  const GroupUnits u = group_units(out.spec, out.layout, out.axis);
  const auto shift = [](int64_t n) { return std::countr_zero(static_cast<uint64_t>(n)); };
  // From one row or column of a layout's matrix to the next, where groups begin.
  const auto pitch = [&](Layout l, int64_t rows, int64_t columns) {
    const bool beside = l == (out.axis == -1 ? Layout::mn_major : Layout::linear);
    return beside ? 1 : out.axis == -1 ? padded_columns(l, columns) : padded_rows(l, rows);
  };
  GroupRule r{};
  r.position = static_cast<int>(u.position) - 1;
  r.codes = static_cast<int>(u.codes) - 1;
  r.scales = static_cast<int>(u.scales) - 1;
  r.code_shift = shift(u.per_code);
  r.scale_shift = shift(u.per_scale);
  r.code_pitch = static_cast<int>(pitch(codes, s.code_rows, s.code_columns));
  r.scale_pitch = static_cast<int>(pitch(scales, s.scale_rows, s.scale_columns));
  const auto pads = [&](Layout l, int64_t rows, int64_t columns) {
    return out.axis == -1 ? padded_columns(l, columns) != columns : padded_rows(l, rows) != rows;
  };
  r.pads_across =
      pads(codes, s.code_rows, s.code_columns) || pads(scales, s.scale_rows, s.scale_columns);
  return r;
}

Side side_of(const Quantized& out, const QuantizeOptions& o) {
  Side s{};
  s.out = out;
  s.shape = out.shape();
  s.element = ElementFacts(out.spec.element);
  s.amax = o.amax;
  s.seed = o.device_seed;
  s.offset = o.device_offset;
  s.rng = o.device_seed ? Rng{o.device_seed_step, 0} : o.rng.value_or(Rng{});
  const bool rows = out.axis == -1;
  s.origin_line = rows ? o.origin_row : o.origin_column;
  s.origin_pos = rows ? o.origin_column : o.origin_row;
  s.lines = static_cast<int>(s.shape.lines);
  s.padded = static_cast<int>(s.shape.padded);
  s.blocks = static_cast<int>(s.shape.blocks);
  s.line_bytes = static_cast<int>(s.shape.code_columns);
  s.scale_columns = static_cast<int>(s.shape.scale_columns);
  s.scales_up = out.spec.scale_rounding == ScaleRounding::up;
  s.linear_codes = out.layout.codes == Layout::linear;
  s.linear_scales = out.layout.scales == Layout::linear;
  s.plain = s.linear_codes && s.linear_scales;
  for (int i = 0; i < kRun; ++i) s.transform_signs[i] = out.spec.hadamard.negates(i) ? -1.0f : 1.0f;
  if (out.groups)
    s.groups = rule_of(out, s.shape);
  else if (out.layout.scales == Layout::mn_major)
    s.rows_behind =
        static_cast<int>(padded_rows(Layout::mn_major, s.shape.scale_rows) - s.shape.scale_rows);
  // Of every matrix; where groups lie is told on the device.
  const auto aligned = [](const uint8_t* p, int64_t size, int64_t to) {
    return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(size)) % to == 0;
  };
  const bool grouped = static_cast<bool>(out.groups);
  s.code_pairs =
      aligned(out.codes, grouped ? 0 : s.shape.code_bytes | s.line_bytes | s.padded / 2, 16);
  s.scale_words =
      scale_bytes(out.spec.scale) == 1 && s.shape.scale_lines == 1 &&
      (s.linear_scales || out.layout.scales == Layout::nv_128x4) &&
      aligned(out.scales, grouped ? 0 : s.shape.scale_count | s.blocks | s.scale_columns, 4);
  return s;
}

// The amaxes of specs with an outer scale, where the caller has not given them: both from one read
// of x where at most one of them follows a transform.
void find_amaxes(const ConstMatrix& x, const Groups& groups, Side& row, Side& column,
                 const Stream& stream) {
  const auto lacks = [](const Side& s) { return s.out.spec.outer && !s.amax; };
  if (!lacks(row) && !lacks(column)) return;
  const int64_t matrices = groups ? groups.count : x.batch;
  const int64_t bytes = matrices * static_cast<int64_t>(sizeof(float));
  float* found = static_cast<float*>(stream.workspace(2 * bytes));
  clear_async(found, static_cast<size_t>(2 * bytes), native(stream));
  const auto transforms = [](const Side& s) { return s.out.spec.hadamard.dim != 0; };
  if (!groups && lacks(row) && lacks(column) && !(transforms(row) && transforms(column))) {
    Side& first = transforms(row) ? row : column;
    Side& plain = transforms(row) ? column : row;
    float* before = transforms(first) ? found + matrices : nullptr;
    add_amax(x, first.out.spec, first.out.axis, groups, found, before, stream);
    first.amax = found;
    plain.amax = before ? before : found;
    return;
  }
  for (Side* s : {&row, &column}) {
    if (!lacks(*s)) continue;
    add_amax(x, s->out.spec, s->out.axis, groups, found, nullptr, stream);
    s->amax = found;
    found += matrices;
  }
}

// Whether scales of both directions are written as `mn_major` first, and turned then: where a
// kernel more is less than what it saves.
bool turns_scales(const ConstMatrix& x, const Quantized& row_out, const Quantized& column_out) {
  constexpr int64_t kTilesEach = 8;  // of a multiprocessor
  const auto may = [](const Quantized& q) {
    return q.spec.scale == Format::fp32 && !q.spec.square && q.layout.scales == Layout::linear &&
           !q.groups;
  };
  return may(row_out) && may(column_out) &&
         x.batch * x.rows * x.columns >=
             kTilesEach * kTile * kTile * multiprocessors(current_device());
}
// `out` with its scales in the workspace, as `mn_major`.
Quantized with_scales_aside(const Quantized& out, const Stream& stream) {
  Quantized aside = out;
  aside.layout.scales = Layout::mn_major;
  const int64_t bytes = out.batch * aside.shape().scale_count * scale_bytes(out.spec.scale);
  aside.scales = static_cast<uint8_t*>(stream.workspace(bytes));
  return aside;
}

// `aside`: scales are in the workspace.
void quantize_into(const ConstMatrix& x, const Quantized* row_out,
                   const QuantizeOptions& row_options, const Quantized* column_out,
                   const QuantizeOptions& column_options, bool aside, const Stream& stream) {
  const bool wide = (row_out && row_out->spec.hadamard.dim > kRun) ||
                    (column_out && column_out->spec.hadamard.dim > kRun);
  if (wide && row_out && column_out) {  // two different inputs then
    quantize_into(x, row_out, row_options, nullptr, {}, aside, stream);
    quantize_into(x, nullptr, {}, column_out, column_options, aside, stream);
    return;
  }
  const Groups groups = (row_out ? row_out : column_out)->groups;
  const bool positions = groups && wide && column_out;
  Plan plan{};
  const auto planned = [&] {
    if (plan.head) return;
    ConstQuantized a, b;
    if (row_out) a = as_const(*row_out);
    if (column_out) b = as_const(*column_out);
    plan = make_plan(groups, x.rows, x.columns, row_out ? &a : nullptr, column_out ? &b : nullptr,
                     positions, stream);
  };
  QuantizeParams p{};
  ConstMatrix y = x;
  Pass row, column;
  if (row_out) p.row = side_of(*row_out, row_options);
  if (column_out) p.column = side_of(*column_out, column_options);
  p.row.scales_aside = p.column.scales_aside = aside;
  find_amaxes(x, groups, p.row, p.column, stream);
  if (positions) planned();
  auto prepare = [&](const Quantized* out, Side& side, Pass& pass) {
    if (!out) return;
    if (!groups) fill_padding(*out, stream);
    if (wide) {
      y = transformed(x, side.out.spec.hadamard, out->axis,
                      positions ? side.shape.padded : side.shape.extent,
                      positions ? &plan : nullptr, stream);
      side.out.spec.hadamard = {};
    }
    pass = pass_of(side.out.spec);
  };
  prepare(row_out, p.row, row);
  prepare(column_out, p.column, column);
  set_input(p, y);
  if (!groups) {
    launch(p, row, column, native(stream));
  } else if (const Launcher compiled = launcher_for(p, row, column, true)) {
    p.groups = {groups, static_cast<int>(x.rows), most_tile_rows(y.rows, groups.count) + 1,
                positions};
    compiled(p, native(stream));
  } else {
    planned();
    fill_groups(p.row, p.column, plan, stream);
    set_input(p, y, &plan);
    launch_any<true>(p, row, column, native(stream));
  }
  check_launch("quantize");
}

}  // namespace

void quantize(const ConstMatrix& x, const Quantized* row_out, const QuantizeOptions& row_options,
              const Quantized* column_out, const QuantizeOptions& column_options,
              const Stream& stream) {
  if (x.batch == 0) return;
  if (!row_out || !column_out || !turns_scales(x, *row_out, *column_out))
    return quantize_into(x, row_out, row_options, column_out, column_options, false, stream);
  const Quantized to[] = {*row_out, *column_out};
  const Quantized aside[] = {with_scales_aside(*row_out, stream),
                             with_scales_aside(*column_out, stream)};
  quantize_into(x, &aside[0], row_options, &aside[1], column_options, true, stream);
  turn_scales(aside, to, stream);
}

}  // namespace blockscale::gpu
