#include <bit>

#include "gpu/launch.h"
#include "gpu/quantize/operand.h"

namespace blockscale::gpu {
namespace {

// The same as next_group() and group_part(); `packed`: groups of rows leave no gaps among scales.
GroupRule rule_of(const Quantized& out, const StoredShape& s, bool packed) {
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
  r.scales = packed && out.axis == -1 ? 0 : static_cast<int>(u.scales) - 1;
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

}  // namespace

Pass pass_of(const QuantSpec& spec) {
  Encoder encoder = Encoder::any;
  if (spec.element == Format::e2m1)
    encoder = spec.stochastic() ? Encoder::fp4_stochastic : Encoder::fp4_nearest;
  else if (spec.element == Format::e4m3fn && !spec.stochastic())
    encoder = Encoder::e4m3fn;
  else if (spec.element == Format::e5m2 && !spec.stochastic())
    encoder = Encoder::e5m2;
  else if (codes_per_byte(spec.element) == 1 && spec.hadamard.dim == 0)
    encoder = Encoder::byte;
  else
    return {Encoder::any};
  return {encoder, spec.scale, spec.square, spec.hadamard.dim != 0};
}

Pass pass_of(const Output& operand) {
  if (!operand.to) return {};
  Pass pass = pass_of(operand.spec());
  pass.widened = operand.widens();
  return pass;
}

Side side_of(const Output& operand) {
  Side s{};
  if (!operand.to) return s;
  const Quantized& out = *operand.to;
  const QuantizeOptions& o = operand.options;
  s.out = out;
  s.shape = out.shape();
  s.out.spec.rule = operand.spec().rule;
  s.element = ElementFacts(operand.spec().element);
  s.amax = o.amax, s.amax_parts = operand.amax_parts;
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
  s.scale_step = s.linear_scales ? s.scale_columns * scale_bytes(out.spec.scale) : 0;
  s.scale_steps = row_steps(out.layout.scales, s.scale_columns);
  s.transform = signs_of(operand.spec().hadamard);
  if (out.groups)
    s.groups = rule_of(out, s.shape, operand.widens());
  else if (out.layout.scales == Layout::mn_major)
    s.rows_behind =
        static_cast<int>(padded_rows(Layout::mn_major, s.shape.scale_rows) - s.shape.scale_rows);
  // For every matrix; where groups lie is known only on the device.
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
  s.aiter_words = out.layout.scales == Layout::aiter_scale && !grouped && aligned(out.scales, 0, 4);
  return s;
}

}  // namespace blockscale::gpu
