#include <algorithm>
#include <utility>

#include "gpu/quantize/any.h"
#include "gpu/quantize/host.h"
#include "gpu/quantize/kernels.h"
#include "gpu/quantize/operand.h"
#include "gpu/quantize/pairs.h"

namespace blockscale::gpu {
namespace {

const Entry* find(const Pass& row, const Pass& column) {
  for (const auto& tables : {fp8_kernels(), mxfp4_kernels(), nvfp4_kernels()})
    for (const Table& table : tables)
      for (const Entry& e : table)
        if (e.row == row && e.column == column) return &e;
  return nullptr;
}

template <bool kRows, bool kColumns, bool kGrouped>
void launch_any(QuantizeParams& p, NativeStream stream) {
  constexpr auto kKernel = any_kernel<kRows, kColumns, kGrouped>;
  constexpr int kBytes = sizeof(AnyMemory);
  static_assert(kBytes * AnyLoader::kBlocks <= kSharedBytes);
  const int most = AnyLoader::kBlocks * multiprocessors(current_device());
  const unsigned blocks = set_grid(p, kColumns, most);
  start_with_shared<kKernel>(blocks, kThreads, kBytes, stream, p);
}
template <bool kGrouped>
void launch_any(QuantizeParams& p, const Pass& row, const Pass& column, NativeStream stream) {
  if (!column.present()) return launch_any<true, false, kGrouped>(p, stream);
  if (!row.present()) return launch_any<false, true, kGrouped>(p, stream);
  launch_any<true, true, kGrouped>(p, stream);
}

void fill_padding(const Output& row, const Output& column, const Stream& stream) {
  for (const Output* out : {&row, &column})
    if (out->to) gpu::fill_padding(*out->to, stream);
}

// The compiled quantizer for these passes and this input, or null.
Launcher<QuantizeParams> launcher_for(const QuantizeParams& p, const Pass& row, const Pass& column,
                                      bool grouped) {
  // Grids count runs in 31 bits.
  const int64_t runs = p.row.shape.lines * (p.row.shape.padded / kRun);
  const bool fits = fits_grid(p) && runs < kGpuLimit && rows_are_near(p.x);
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

struct Work {
  ConstMatrix x;
  Output row, column;
  Matrix row_values;
};

// One read of x, for the amax of `of` after its transform, if any, and for that of `other`, which
// has no transform.
struct AmaxRead {
  const ConstMatrix* x;
  Output* of;
  Output* other = nullptr;

  bool finds_two() const { return other && of->transforms(); }
  int64_t words_of_each(bool parts) const { return parts ? tiles_in(*x) : of->to->matrices(); }
};
// The reads for amaxes that an input's specs need and the caller has not given: one for both, if at
// most one of them follows a transform. Returns how many there are.
size_t amax_reads(Work& w, AmaxRead* reads) {
  const bool row = w.row.lacks_amax(), column = w.column.lacks_amax();
  const bool both = row && column && !w.row.to->groups && !w.row.needs_hadamard_pass() &&
                    !w.column.needs_hadamard_pass() &&
                    !(w.row.transforms() && w.column.transforms());
  if (both) {
    const bool row_first = w.row.transforms();
    reads[0] = {&w.x, row_first ? &w.row : &w.column, row_first ? &w.column : &w.row};
    return 1;
  }
  size_t count = 0;
  if (row) reads[count++] = {&w.x, &w.row};
  if (column) reads[count++] = {&w.x, &w.column};
  return count;
}

// Finds these amaxes for all inputs, and gives them to the outputs; in parts, if the next kernel
// reads them.
void find_amaxes(std::span<Work> works, bool reads_parts, const Stream& stream) {
  AmaxRead reads[4];
  Amax amaxes[4];
  size_t count = 0;
  for (Work& w : works) count += amax_reads(w, reads + count);
  if (count == 0) return;
  for (size_t i = 0; i < count; ++i) {
    const Quantized& q = *reads[i].of->to;
    amaxes[i] = {*reads[i].x, q.spec, q.axis, q.groups, nullptr, nullptr, false};
  }
  const bool parts = reads_parts && come_in_parts({amaxes, count});
  int64_t words = 0;
  for (const AmaxRead& r : std::span(reads, count))
    words += r.words_of_each(parts) * (r.finds_two() ? 2 : 1);
  const int64_t bytes = words * static_cast<int64_t>(sizeof(float));
  float* next = static_cast<float*>(stream.workspace(bytes));
  if (!parts) clear_async(next, static_cast<size_t>(bytes), native(stream));
  for (size_t i = 0; i < count; ++i) {
    const AmaxRead& r = reads[i];
    Amax& a = amaxes[i];
    const auto take_words = [&] { return std::exchange(next, next + r.words_of_each(parts)); };
    const auto give = [&](Output& to, const float* found) {
      to.options.amax = found;
      if (parts) to.amax_parts = static_cast<int>(tiles_in(a.x));
    };
    a.parts = parts;
    a.out = take_words();
    if (r.finds_two()) a.before = take_words();
    give(*r.of, a.out);
    if (r.other) give(*r.other, r.finds_two() ? a.before : a.out);
  }
  add_amaxes({amaxes, count}, stream);
}

// Whether scales of both directions first go to the workspace, as words, and are transposed
// afterwards: where one more kernel costs less than it saves. One kernel writes both, so neither
// side may have a transform that is a separate pass.
bool transposes_scales(const ConstMatrix& x, const Quantized& row_out,
                       const Quantized& column_out) {
  constexpr int64_t kTilesEach = 10;  // per multiprocessor, measured on an H200
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

Plan plan_for(const ConstMatrix& x, const Output& row, const Output& column, bool positions,
              const Stream& stream) {
  ConstQuantized a, b;
  if (row.to) a = as_const(*row.to);
  if (column.to) b = as_const(*column.to);
  return make_plan((row.to ? a : b).groups, x.rows, x.columns, row.to ? &a : nullptr,
                   column.to ? &b : nullptr, positions, stream);
}

// `aside`: scales of both are in the workspace.
void quantize_into(const ConstMatrix& x, const Output& row, const Output& column, bool aside,
                   const Stream& stream) {
  const bool hadamard_pass = row.needs_hadamard_pass() || column.needs_hadamard_pass();
  if (hadamard_pass && row.to && column.to) {  // their inputs differ then
    quantize_into(x, row, {}, aside, stream);
    quantize_into(x, {}, column, aside, stream);
    return;
  }
  const Groups groups = (row.to ? row : column).to->groups;
  QuantizeParams p{};
  p.row = side_of(row), p.column = side_of(column);
  if (aside) set_aside(p.row), set_aside(p.column);
  Pass row_pass = pass_of(row), column_pass = pass_of(column);
  const bool positions = groups && hadamard_pass && column.to;
  Plan plan{};
  if (positions) plan = plan_for(x, row, column, positions, stream);
  if (!groups) fill_padding(row, column, stream);
  ConstMatrix y = x;
  if (hadamard_pass) {
    Side& side = row.to ? p.row : p.column;
    y = transformed(x, side.out.spec.hadamard, side.out.axis,
                    positions ? side.shape.padded : side.shape.extent, positions ? &plan : nullptr,
                    stream);
    side.out.spec.hadamard = {};
    (row.to ? row_pass : column_pass) = pass_of(side.out.spec);
  }
  set_input(p, y);
  if (!groups) return launch(p, row_pass, column_pass, native(stream));
  if (const Launcher<QuantizeParams> compiled = launcher_for(p, row_pass, column_pass, true)) {
    p.groups = {groups, static_cast<int>(x.rows), positions};
    return compiled(p, native(stream));
  }
  if (!plan.head) plan = plan_for(x, row, column, positions, stream);
  fill_groups(p.row, p.column, plan, stream);
  set_input(p, y, &plan);
  launch_any<true>(p, row_pass, column_pass, native(stream));
}

// Whether a kernel is compiled for an input, whose outputs may be widened.
bool is_compiled(const Work& w) {
  if (w.row.needs_hadamard_pass() || w.column.needs_hadamard_pass()) return false;
  QuantizeParams p{};
  set_input(p, w.x);
  if (w.row.to) p.row.out = *w.row.to, p.row.shape = w.row.to->shape();
  if (w.column.to) p.column.out = *w.column.to;
  const bool grouped = static_cast<bool>((w.row.to ? w.row : w.column).to->groups);
  return launcher_for(p, pass_of(w.row), pass_of(w.column), grouped) != nullptr;
}

void quantize_one(const Work& w, const Stream& stream);

// Quantizes to the workspace what is then widened.
void quantize_and_widen(Work w, const Stream& stream) {
  Quantized narrow[2];
  const Quantized* to[2] = {};
  for (int i = 0; i < 2; ++i) {
    Output& output = i ? w.column : w.row;
    if (!output.widens()) continue;
    to[i] = output.to;
    Quantized& q = narrow[i] = *output.to;
    q.spec = output.spec(), q.layout = {};
    const StoredShape s = q.shape();
    q.codes = static_cast<uint8_t*>(stream.workspace(q.batch * s.code_bytes));
    q.scales = static_cast<uint8_t*>(stream.workspace(q.batch * s.scale_count));
    output.to = &q, output.options.widened.reset();
  }
  quantize_one(w, stream);
  for (int i = 0; i < 2; ++i)
    if (to[i]) widen_to(as_const(narrow[i]), *to[i], stream);
}

void quantize_one(const Work& w, const Stream& stream) {
  if ((w.row.widens() || w.column.widens()) && !is_compiled(w))
    return quantize_and_widen(w, stream);
  Output row = w.row, column = w.column;
  if (!row.to || !column.to || !transposes_scales(w.x, *row.to, *column.to))
    return quantize_into(w.x, row, column, false, stream);
  const Quantized to[] = {*row.to, *column.to};
  const Quantized aside[] = {with_scales_aside(to[0], stream), with_scales_aside(to[1], stream)};
  row.to = &aside[0], column.to = &aside[1];
  quantize_into(w.x, row, column, true, stream);
  transpose_scales(aside, to, stream);
}

// Whether a small input, of few tiles, goes to a kernel with one tile per thread block: such
// kernels read amaxes in parts.
bool goes_by_tiles(const Work& w) {
  const auto takes = [](const Output& o) {
    return o.to && !o.to->groups && !o.needs_hadamard_pass();
  };
  return takes(w.row) && takes(w.column) && w.x.batch == 1 && w.x.column_stride == 1 &&
         w.row.to->spec.outer && w.column.to->spec.outer && find(pass_of(w.row), pass_of(w.column));
}

// The compiled kernel for two small inputs in one launch, or null.
const PairEntry* pair_of(std::span<const Work> inputs) {
  constexpr int64_t kTilesEach = 4;  // per multiprocessor, measured on an H100
  if (inputs.size() != 2) return nullptr;
  Pass row[2], column[2];
  int64_t tiles = 0;
  for (int i = 0; i < 2; ++i) {
    const ConstMatrix& x = inputs[i].x;
    const Matrix& values = inputs[i].row_values;
    const Quantized *row_out = inputs[i].row.to, *column_out = inputs[i].column.to;
    if (!row_out || row_out->groups || inputs[i].row.needs_hadamard_pass() ||
        inputs[i].column.needs_hadamard_pass() || x.batch != 1 || !is_bf16_rows(x) ||
        !is_aligned(x) || x.rows * x.columns == 0 || !rows_are_near(x))
      return nullptr;
    row[i] = pass_of(inputs[i].row);
    if (values.data && !(writes_values(row[i]) && row_out->layout == StorageLayout{}))
      return nullptr;
    column[i] = pass_of(inputs[i].column);
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
    p.of[i].column = side_of(column);
    p.of[i].sideways = kSidewaysShift;
    fill_padding(row, column, stream);
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
  const auto transposed = [&](const Quantized* out, Quantized& to) -> const Quantized* {
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
          {transposed(q.column, made[0]), from(q.column_options)},
          {transposed(q.row, made[1]), from(q.row_options)},
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
  const ForgetsFailure at_end;
  Quantization given[2];
  Work all[2];
  Quantized transposed[2][2];
  size_t count = 0;
  for (const Quantization& q : inputs) {
    if (q.x.batch == 0 || (!q.row && !q.column)) continue;
    given[count] = q;
    all[count] = by_rows(q, transposed[count]);
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
