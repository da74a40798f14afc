#include <algorithm>
#include <bit>
#include <utility>

#include "gpu/quantize/any.h"
#include "gpu/quantize/kernels.h"
#include "gpu/quantize/pairs.h"

namespace blockscale::gpu {
namespace {

// One of the operands of an input, if any.
struct Output {
  const Quantized* to = nullptr;
  QuantizeOptions options{};
  int amax_parts = 0;

  // What is computed; `to` may be that widened.
  const QuantSpec& spec() const { return options.widened ? *options.widened : to->spec; }
  bool widens() const { return options.widened.has_value(); }
  bool transforms() const { return spec().hadamard.dim != 0; }
  bool wide() const { return spec().hadamard.dim > kRun; }
  bool lacks_amax() const { return to && to->spec.outer && !options.amax; }
};
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
    return kAny;
  return {encoder, spec.scale, spec.square, spec.hadamard.dim != 0};
}

Pass pass_of(const Output& out) {
  Pass pass = pass_of(out.spec());
  pass.widened = out.widens();
  return pass;
}

template <bool kRows, bool kColumns, bool kGrouped>
void launch_any(QuantizeParams& p, NativeStream stream) {
  constexpr auto kKernel = any_kernel<kRows, kColumns, kGrouped>;
  constexpr int kBytes = sizeof(AnyMemory);
  static_assert(kBytes * AnyLoader::kBlocks <= kSharedBytes);
  const unsigned blocks = set_grid(p, kColumns, AnyLoader::kBlocks * prepare<kKernel>(kBytes));
  start(kKernel, blocks, kThreads, kBytes, stream, p);
}
template <bool kGrouped>
void launch_any(QuantizeParams& p, const Pass& row, const Pass& column, NativeStream stream) {
  if (!column.present()) return launch_any<true, false, kGrouped>(p, stream);
  if (!row.present()) return launch_any<false, true, kGrouped>(p, stream);
  launch_any<true, true, kGrouped>(p, stream);
}

// The compiled quantizer for these passes and this input, or null.
Launcher<QuantizeParams> launcher_for(const QuantizeParams& p, const Pass& row, const Pass& column,
                                      bool grouped) {
  // Grids count runs in 31 bits; kernels count the bytes of 128 rows in 32 bits, unsigned.
  const int64_t runs = p.row.shape.lines * (p.row.shape.padded / kRun);
  const int64_t size = dtype_bytes(p.x.dtype);
  const bool fits = fits_grid(p) && runs < kGpuLimit && p.x.row_stride >= 0 &&
                    size * kTile * p.x.row_stride < int64_t{1} << 32;
  // Twins are encoded once, with one spec.
  const bool differ = has_twins(row, column) && p.row.out.spec != p.column.out.spec;
  const Entry* e = fits && p.x.column_stride == 1 && !differ ? find(row, column) : nullptr;
  if (!e) return nullptr;
  if (p.x.dtype != DType::bf16) return grouped ? e->floats.grouped : e->floats.matrix;
  if (grouped) return p.aligned ? e->grouped : nullptr;
  return p.aligned ? e->aligned : e->unaligned;
}

void launch(QuantizeParams& p, const Pass& row, const Pass& column, NativeStream stream) {
  if (const Launcher<QuantizeParams> compiled = launcher_for(p, row, column, false))
    return compiled(p, stream);
  if (p.row.amax_parts || p.column.amax_parts)
    fail("quantize", "amax", "in parts", "a kernel that reads them, as goes_by_tiles() says");
  if (p.tiles == 0) {  // no elements, but an outer scale for every matrix
    p.tiles_down = p.tiles_across = 1;
    p.tiles = p.batch;
  }
  launch_any<false>(p, row, column, stream);
}

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

struct Work {
  ConstMatrix x;
  Output row, column;
  Matrix row_values;
};

Side side_of(const Output& operand) {
  const Quantized& out = *operand.to;
  const QuantizeOptions& o = operand.options;
  Side s{};
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
  s.set_transform(operand.spec().hadamard);
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

// Finds the amaxes that specs with an outer scale need and the caller has not given: both of an
// input in one read if at most one of them follows a transform. In parts, if the next kernel reads
// them.
void find_amaxes(std::span<Work> works, bool reads_parts, const Stream& stream) {
  Amax asked[4];
  Output* of[4][2];  // the outputs that `out` and `before` are for
  size_t count = 0;
  int64_t words = 0;
  for (Work& w : works) {
    const auto ask = [&](Output& first, Output* before) {
      asked[count] = {w.x,     first.to->spec, first.to->axis, first.to->groups,
                      nullptr, nullptr,        false};
      of[count][0] = &first, of[count++][1] = before;
      words += (before && first.transforms() ? 2 : 1) * first.to->matrices();
    };
    const bool row = w.row.lacks_amax(), column = w.column.lacks_amax();
    const bool one_read = row && column && !w.row.to->groups && !w.row.wide() && !w.column.wide() &&
                          !(w.row.transforms() && w.column.transforms());
    if (one_read) {
      const bool row_first = w.row.transforms();
      ask(row_first ? w.row : w.column, row_first ? &w.column : &w.row);
      continue;
    }
    if (row) ask(w.row, nullptr);
    if (column) ask(w.column, nullptr);
  }
  if (count == 0) return;
  const bool parts = reads_parts && come_in_parts({asked, count});
  if (parts) words = 2 * (tiles_in(asked[0].x) + (count == 2 ? tiles_in(asked[1].x) : 0));
  const int64_t bytes = words * static_cast<int64_t>(sizeof(float));
  float* next = static_cast<float*>(stream.workspace(bytes));
  if (!parts) clear_async(next, static_cast<size_t>(bytes), native(stream));
  for (size_t i = 0; i < count; ++i) {
    Amax& a = asked[i];
    const auto give = [&](Output& to, const float* words) {
      to.options.amax = words;
      if (parts) to.amax_parts = static_cast<int>(tiles_in(a.x));
    };
    const int64_t each = parts ? tiles_in(a.x) : of[i][0]->to->matrices();
    a.parts = parts;
    a.out = std::exchange(next, next + each);
    give(*of[i][0], a.out);
    if (!of[i][1]) continue;
    if (of[i][0]->transforms()) a.before = std::exchange(next, next + each);
    give(*of[i][1], a.before ? a.before : a.out);
  }
  add_amaxes({asked, count}, stream);
}

// Whether scales of both directions first go to the workspace, as words, and are turned afterwards:
// where one more kernel costs less than it saves. One kernel writes both, so neither side may have
// a transform that is a separate pass.
bool turns_scales(const ConstMatrix& x, const Quantized& row_out, const Quantized& column_out) {
  constexpr int64_t kTilesEach = 10;  // per multiprocessor
  const auto may = [](const Quantized& q) {
    const bool words = q.spec.scale == Format::fp32 ||
                       (q.spec.scale == Format::e8m0 && codes_per_byte(q.spec.element) == 1);
    return words && q.spec.hadamard.dim <= kRun && !q.spec.square &&
           q.layout.scales == Layout::linear && !q.groups;
  };
  return may(row_out) && may(column_out) &&
         x.batch * x.rows * x.columns >=
             kTilesEach * kTile * kTile * multiprocessors(current_device());
}
// `out` with its scales in the workspace.
Quantized with_scales_aside(const Quantized& out, const Stream& stream) {
  Quantized aside = out;
  aside.scales = static_cast<uint8_t*>(stream.workspace(4 * out.batch * AsideWords(out).count()));
  return aside;
}
void set_aside(Side& side) {
  const AsideWords words(side.out);
  side.aside_pitch = static_cast<int>(words.pitch);
  side.shape.scale_count = words.count() * 4 / scale_bytes(side.out.spec.scale);
  side.scale_words = true;
  side.linear_scales = side.plain = false;
}

// `aside`: scales are in the workspace.
void quantize_into(const ConstMatrix& x, const Output& row_of, const Output& column_of, bool aside,
                   const Stream& stream) {
  const Quantized *row_out = row_of.to, *column_out = column_of.to;
  const bool wide = (row_out && row_of.wide()) || (column_out && column_of.wide());
  if (wide && row_out && column_out) {  // their inputs differ then
    quantize_into(x, row_of, {}, aside, stream);
    quantize_into(x, {}, column_of, aside, stream);
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
  if (row_out) p.row = side_of(row_of);
  if (column_out) p.column = side_of(column_of);
  if (aside && row_out) set_aside(p.row);
  if (aside && column_out) set_aside(p.column);
  if (positions) planned();
  auto prepare = [&](const Output& operand, Side& side, Pass& pass) {
    const Quantized* const out = operand.to;
    if (!out) return;
    pass = pass_of(operand);
    if (!groups) fill_padding(*out, stream);
    if (wide) {
      y = transformed(x, side.out.spec.hadamard, out->axis,
                      positions ? side.shape.padded : side.shape.extent,
                      positions ? &plan : nullptr, stream);
      side.out.spec.hadamard = {};
      pass = pass_of(side.out.spec);
    }
  };
  prepare(row_of, p.row, row);
  prepare(column_of, p.column, column);
  set_input(p, y);
  if (!groups) {
    launch(p, row, column, native(stream));
  } else if (const Launcher<QuantizeParams> compiled = launcher_for(p, row, column, true)) {
    p.groups = {groups, static_cast<int>(x.rows), positions};
    compiled(p, native(stream));
  } else {
    planned();
    fill_groups(p.row, p.column, plan, stream);
    set_input(p, y, &plan);
    launch_any<true>(p, row, column, native(stream));
  }
}

// Whether a kernel is compiled for an input, whose outputs may be widened.
bool is_compiled(const Work& w) {
  if ((w.row.to && w.row.wide()) || (w.column.to && w.column.wide())) return false;
  QuantizeParams p{};
  Pass row, column;
  set_input(p, w.x);
  if (w.row.to) p.row.out = *w.row.to, p.row.shape = w.row.to->shape(), row = pass_of(w.row);
  if (w.column.to) p.column.out = *w.column.to, column = pass_of(w.column);
  const bool grouped = static_cast<bool>((w.row.to ? w.row : w.column).to->groups);
  return launcher_for(p, row, column, grouped) != nullptr;
}

void quantize_one(const Work& w, const Stream& stream);

// Quantizes to the workspace what is then widened.
void quantize_and_widen(Work w, const Stream& stream) {
  Quantized narrow[2];
  const Quantized* wide[2] = {};
  for (int i = 0; i < 2; ++i) {
    Output& output = i ? w.column : w.row;
    if (!output.to || !output.widens()) continue;
    wide[i] = output.to;
    Quantized& q = narrow[i] = *output.to;
    q.spec = output.spec(), q.layout = {};
    const StoredShape s = q.shape();
    q.codes = static_cast<uint8_t*>(stream.workspace(q.batch * s.code_bytes));
    q.scales = static_cast<uint8_t*>(stream.workspace(q.batch * s.scale_count));
    output.to = &q, output.options.widened.reset();
  }
  quantize_one(w, stream);
  for (int i = 0; i < 2; ++i)
    if (wide[i]) widen_to(as_const(narrow[i]), *wide[i], stream);
}

void quantize_one(const Work& w, const Stream& stream) {
  const auto widens = [](const Output& o) { return o.to && o.widens(); };
  if ((widens(w.row) || widens(w.column)) && !is_compiled(w)) return quantize_and_widen(w, stream);
  Output row = w.row, column = w.column;
  if (!row.to || !column.to || !turns_scales(w.x, *row.to, *column.to))
    return quantize_into(w.x, row, column, false, stream);
  const Quantized to[] = {*row.to, *column.to};
  const Quantized aside[] = {with_scales_aside(to[0], stream), with_scales_aside(to[1], stream)};
  row.to = &aside[0], column.to = &aside[1];
  quantize_into(w.x, row, column, true, stream);
  turn_scales(aside, to, stream);
}

// Whether a small input, of few tiles, goes to a kernel with one tile per thread block: such
// kernels read amaxes in parts.
bool goes_by_tiles(const Work& w) {
  const auto takes = [](const Output& o) { return o.to && !o.to->groups && !o.wide(); };
  return takes(w.row) && takes(w.column) && w.x.batch == 1 && w.x.column_stride == 1 &&
         w.row.to->spec.outer && w.column.to->spec.outer && find(pass_of(w.row), pass_of(w.column));
}

// The compiled kernel for two small inputs in one launch, or null.
const PairEntry* pair_of(std::span<const Work> inputs) {
  constexpr int64_t kTilesEach = 4;  // per multiprocessor
  if (inputs.size() != 2) return nullptr;
  Pass row[2], column[2];
  int64_t tiles = 0;
  for (int i = 0; i < 2; ++i) {
    const ConstMatrix& x = inputs[i].x;
    const Matrix& values = inputs[i].row_values;
    const Quantized *row_out = inputs[i].row.to, *column_out = inputs[i].column.to;
    if (!row_out || row_out->groups || inputs[i].row.wide() ||
        (column_out && inputs[i].column.wide()) || x.batch != 1 || !is_bf16_rows(x) ||
        !is_aligned(x) || x.rows * x.columns == 0 || x.row_stride < 0 ||
        2 * kTile * x.row_stride >= int64_t{1} << 32)
      return nullptr;
    row[i] = pass_of(inputs[i].row);
    if (values.data && !(writes_values(row[i]) && row_out->layout == StorageLayout{}))
      return nullptr;
    if (column_out) column[i] = pass_of(inputs[i].column);
    if (has_twins(row[i], column[i]) && row_out->spec != column_out->spec) return nullptr;
    tiles += ceil_div(x.rows, kTile) * ceil_div(x.columns, kTile);
  }
  if (tiles > kTilesEach * multiprocessors(current_device())) return nullptr;
  for (const PairEntry& e : pair_kernels())
    if (std::ranges::equal(e.row, row) && std::ranges::equal(e.column, column)) return &e;
  return nullptr;
}

void quantize_pair(const PairEntry& pair, std::span<const Work> inputs, const WordCopy& word,
                   const Stream& stream) {
  PairParams p{};
  p.word = word;
  dim3 grid(1, 1, 2);
  for (int i = 0; i < 2; ++i) {
    const auto& [x, row, column, values] = inputs[i];
    p.of[i].x = source_of(x);
    if (values.data)
      p.values[i] = {static_cast<uint16_t*>(values.data), values.row_stride,
                     Decoder::of(row.to->spec.scale)};
    p.of[i].row = side_of(row);
    if (column.to) p.of[i].column = side_of(column);
    p.of[i].sideways = kSidewaysShift;
    for (const Quantized* out : {row.to, column.to})
      if (out) fill_padding(*out, stream);
    const auto down = static_cast<unsigned>(ceil_div(x.rows, kTile));
    const auto across = static_cast<unsigned>(ceil_div(x.columns, kTile * kSideways));
    grid.x = std::max(grid.x, down * kSideways), grid.y = std::max(grid.y, across);
  }
  pair.launch(p, grid, native(stream));
}

// An input stored by columns, described as its transpose, which is stored by rows: its operand
// along the rows is the transpose's down the columns, byte for byte. `made` holds the operands so
// described. Random bits are drawn by axis, and groups are of rows, so such inputs stay as they
// are. No kernel writes values of an operand down the columns: that is left to the caller.
Work by_rows(const Quantization& q, Quantized (&made)[2]) {
  const Work as_given{q.x, {q.row, q.row_options}, {q.column, q.column_options}, q.row_values};
  if (q.x.row_stride != 1 || q.x.column_stride == 1) return as_given;
  for (const Output* out : {&as_given.row, &as_given.column})
    if (out->to && (out->to->groups || out->spec().stochastic())) return as_given;
  const auto turned = [&](const Quantized* out, Quantized& to) -> const Quantized* {
    if (!out) return nullptr;
    to = *out;
    to.axis = out->axis == -1 ? -2 : -1;
    std::swap(to.rows, to.columns);
    return &to;
  };
  const auto from = [](QuantizeOptions o) {
    std::swap(o.origin_row, o.origin_column);
    return o;
  };
  ConstMatrix x = q.x;
  std::swap(x.rows, x.columns);
  std::swap(x.row_stride, x.column_stride);
  return {x,
          {turned(q.column, made[0]), from(q.column_options)},
          {turned(q.row, made[1]), from(q.row_options)},
          {}};
}

// Decodes the values that are asked for.
void decode_rows(std::span<const Quantization> inputs, const Stream& stream) {
  ConstQuantized q[2];
  size_t count = 0;
  const Matrix* to[2];
  for (const Quantization& input : inputs) {
    if (!input.row_values.data) continue;
    q[count] = as_const(*input.row);
    q[count].spec.outer = false, q[count].outer = nullptr;
    to[count++] = &input.row_values;
  }
  if (count == 2)
    dequantize_two(q[0], *to[0], q[1], *to[1], stream);
  else if (count == 1)
    gpu::dequantize(q[0], *to[0], stream);
}

}  // namespace

void quantize(std::span<const Quantization> inputs, const Stream& stream, const WordCopy& word) {
  Quantization given[2];
  Work all[2];
  Quantized turned[2][2];
  size_t count = 0;
  for (const Quantization& q : inputs) {
    if (q.x.batch == 0 || (!q.row && !q.column)) continue;
    given[count] = q;
    all[count] = by_rows(q, turned[count]);
    ++count;
  }
  const PairEntry* const pair = pair_of({all, count});
  find_amaxes({all, count}, pair || (count == 1 && goes_by_tiles(all[0])), stream);
  if (pair) {
    quantize_pair(*pair, {all, count}, word, stream);
    for (size_t i = 0; i < count; ++i)
      if (all[i].row_values.data) given[i].row_values = {};  // already written
  } else {
    if (word.to) copy(word, stream);
    for (size_t i = 0; i < count; ++i) quantize_one(all[i], stream);
    check_launch("quantize");  // so that an error names what failed
  }
  decode_rows({given, count}, stream);
  check_launch("quantize");
}

}  // namespace blockscale::gpu
