#include <span>

#include "gpu/direct.h"
#include "gpu/launch.h"
#include "gpu/quantize.h"

namespace blockscale::gpu {
namespace {

template <class Row, class Column, class Loader, bool kGrouped = false>
void launch(QuantizeParams& p, NativeStream stream) {
  constexpr int kBytes = sizeof(Shared<Row::kPass, Column::kPass, Loader>);
  static_assert(kBytes * Loader::kBlocks <= kSharedBytes);
  constexpr auto kKernel = quantize_kernel<Row, Column, Loader, kGrouped>;
  const unsigned blocks =
      set_grid(p, Column::kPass.present(), Loader::kBlocks * prepare<kKernel>(kBytes));
  start(kKernel, blocks, kThreads, kBytes, stream, p);
}
template <class Row, bool kAligned>
void launch_rows(QuantizeParams& p, NativeStream stream) {
  const auto runs = static_cast<uint32_t>(p.row.padded / kRun);
  const int each = lines_of_a_thread(runs * p.row.lines * p.row.out.batch, kDirectLines);
  const int64_t all = runs * ceil_div(p.row.lines, each);
  const RowsParams d{p.x, p.row, Divisor::of(runs), static_cast<uint32_t>(all), each};
  const dim3 grid(static_cast<unsigned>(ceil_div(all, kDirectThreads)),
                  static_cast<unsigned>(p.row.out.batch));
  start(rows_kernel<Row, kAligned>, grid, kDirectThreads, 0, stream, d);
}
template <class Row, class Column, bool kAligned>
void launch_tiles(QuantizeParams& p, NativeStream stream) {
  const dim3 grid(static_cast<unsigned>(p.tiles_down * kSideways),
                  static_cast<unsigned>(ceil_div(p.tiles_across, kSideways)),
                  static_cast<unsigned>(p.batch));
  start(tiles_kernel<Row, Column, kAligned>, grid, kDirectThreads, 0, stream,
        TilesParams{p.x, p.row, p.column});
}
using Launcher = void (*)(QuantizeParams&, NativeStream);

using None = PassType<Encoder::none>;
using Any = PassType<Encoder::any>;
template <Encoder kElement, Format kScale>
using Fp8 = PassType<kElement, kScale>;
template <Encoder kElement, Format kScale>
using Fp8Square = PassType<kElement, kScale, true>;
template <Format kScale>
using Fp4 = PassType<Encoder::fp4_nearest, kScale>;
template <Format kScale>
using Fp4Square = PassType<Encoder::fp4_nearest, kScale, true>;
template <Format kScale>
using Fp4Hadamard = PassType<Encoder::fp4_nearest, kScale, false, true>;
template <Format kScale>
using Stochastic = PassType<Encoder::fp4_stochastic, kScale>;
template <Format kScale>
using StochasticHadamard = PassType<Encoder::fp4_stochastic, kScale, false, true>;

// The kernels of BF16 inputs: what recipes ask for, along rows, along columns, and both at once.
// Whatever is not here runs as `any`.
struct Entry {
  Pass row, column;
  Launcher aligned, unaligned;
  Launcher grouped;  // of rows that the copy engine reads, or null
};
// Groups are rows of tokens: no square blocks, and what is not plain is wanted in both directions.
// The rest runs as `any`, which keeps the number of kernels down.
template <class Row, class Column>
constexpr Launcher grouped_launcher() {
  constexpr Pass kRow = Row::kPass, kColumn = Column::kPass;
  constexpr Pass kOne = kRow.present() ? kRow : kColumn;
  constexpr bool kPlain = !kOne.hadamard && kOne.encoder != Encoder::fp4_stochastic;
  if constexpr (!kRow.square && !kColumn.square &&
                (kPlain || (kRow.present() && kColumn.present())))
    return launch<Row, Column, AlignedLoader, true>;
  else
    return nullptr;
}
template <class Row, class Column>
constexpr Entry kEntry{Row::kPass, Column::kPass, launch_tiles<Row, Column, true>,
                       launch_tiles<Row, Column, false>, grouped_launcher<Row, Column>()};
template <class P>
constexpr Entry kRows{P::kPass, None::kPass, launch_rows<P, true>, launch_rows<P, false>,
                      grouped_launcher<P, None>()};
template <class P>
constexpr Entry kSquareRows = kEntry<P, None>;
template <class P>
constexpr Entry kColumns = kEntry<None, P>;

template <Encoder kElement, Format kScale>
constexpr Entry kFp8Entries[] = {
    kRows<Fp8<kElement, kScale>>,
    kSquareRows<Fp8Square<kElement, kScale>>,
    kColumns<Fp8<kElement, kScale>>,
    kColumns<Fp8Square<kElement, kScale>>,
    kEntry<Fp8<kElement, kScale>, Fp8<kElement, kScale>>,
    kEntry<Fp8Square<kElement, kScale>, Fp8Square<kElement, kScale>>,
};
template <Format kScale>
constexpr Entry kFp4Entries[] = {
    kRows<Fp4<kScale>>,
    kSquareRows<Fp4Square<kScale>>,
    kRows<Fp4Hadamard<kScale>>,
    kRows<Stochastic<kScale>>,
    kRows<StochasticHadamard<kScale>>,
    kColumns<Fp4<kScale>>,
    kColumns<Fp4Square<kScale>>,
    kColumns<Fp4Hadamard<kScale>>,
    kColumns<Stochastic<kScale>>,
    kColumns<StochasticHadamard<kScale>>,
    kEntry<Fp4<kScale>, Fp4<kScale>>,
    kEntry<Fp4Square<kScale>, Fp4Square<kScale>>,
    kEntry<Fp4<kScale>, Fp4Hadamard<kScale>>,
    kEntry<Stochastic<kScale>, Fp4Hadamard<kScale>>,
    kEntry<Stochastic<kScale>, StochasticHadamard<kScale>>,
};

const Entry* find(const Pass& row, const Pass& column) {
  using Table = std::span<const Entry>;
  static constexpr Table kTables[] = {
      Table(kFp8Entries<Encoder::e4m3fn, Format::fp32>),
      Table(kFp8Entries<Encoder::e4m3fn, Format::e8m0>),
      Table(kFp8Entries<Encoder::e5m2, Format::fp32>),
      Table(kFp8Entries<Encoder::e5m2, Format::e8m0>),
      Table(kFp4Entries<Format::e8m0>),
      Table(kFp4Entries<Format::e4m3>),
      Table(kFp4Entries<Format::ue5m3>),
  };
  for (const Table& table : kTables)
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

void launch(QuantizeParams& p, const Pass& row, const Pass& column, NativeStream stream) {
  const bool bf16 = p.x.dtype == DType::bf16 && p.x.column_stride == 1;
  if (p.plan.head) {
    const Entry* e = bf16 && p.copies ? find(row, column) : nullptr;
    return e && e->grouped ? e->grouped(p, stream) : launch_any<true>(p, row, column, stream);
  }
  // Grids count matrices, and groups of tiles across, in 16 bits; runs and tiles down in 31; the
  // bytes of 128 rows in 32, unsigned.
  const int64_t runs = p.row.shape.lines * (p.row.shape.padded / kRun);
  const bool fits = p.tiles > 0 && p.batch < 1 << 16 && p.tiles_across < 1 << 16 &&
                    runs < int64_t{1} << 31 && p.x.row_stride >= 0 &&
                    2 * kTile * p.x.row_stride < int64_t{1} << 32;
  if (bf16 && fits)
    if (const Entry* e = find(row, column))
      return p.aligned ? e->aligned(p, stream) : e->unaligned(p, stream);
  if (p.tiles == 0) {  // no element, but an outer scale for every matrix
    p.tiles_down = p.tiles_across = 1;
    p.tiles = p.batch;
  }
  launch_any<false>(p, row, column, stream);
}

Side side_of(const Quantized& out, const QuantizeOptions& o) {
  Side s{};
  s.out = out;
  s.shape = out.shape();
  s.element = {traits(out.spec.element), max_value(out.spec.element),
               codes_per_byte(out.spec.element) == 2};
  s.amax = o.amax;
  s.seed = o.device_seed;
  s.offset = o.device_offset;
  s.rng = o.rng.value_or(Rng{});
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

}  // namespace

void quantize(const ConstMatrix& x, const Quantized* row_out, const QuantizeOptions& row_options,
              const Quantized* column_out, const QuantizeOptions& column_options,
              const Stream& stream) {
  if (x.batch == 0) return;
  const bool wide = (row_out && row_out->spec.hadamard.dim > kRun) ||
                    (column_out && column_out->spec.hadamard.dim > kRun);
  if (wide && row_out && column_out) {  // two different inputs then
    gpu::quantize(x, row_out, row_options, nullptr, {}, stream);
    gpu::quantize(x, nullptr, {}, column_out, column_options, stream);
    return;
  }
  const Groups groups = (row_out ? row_out : column_out)->groups;
  const bool positions = groups && wide && column_out;
  Plan plan;
  if (groups) {
    ConstQuantized a, b;
    if (row_out) a = as_const(*row_out);
    if (column_out) b = as_const(*column_out);
    plan = make_plan(groups, x.rows, x.columns, row_out ? &a : nullptr, column_out ? &b : nullptr,
                     positions, stream);
  }
  QuantizeParams p{};
  ConstMatrix y = x;
  Pass row, column;
  if (row_out) p.row = side_of(*row_out, row_options);
  if (column_out) p.column = side_of(*column_out, column_options);
  find_amaxes(x, groups, p.row, p.column, stream);
  auto prepare = [&](const Quantized* out, Side& side, Pass& pass) {
    if (!out) return;
    if (groups)
      fill_groups(side, plan, out == row_out ? 0 : 1, stream);
    else
      fill_padding(*out, stream);
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
  set_input(p, y, groups ? &plan : nullptr);
  launch(p, row, column, native(stream));
  check_launch("quantize");
}

}  // namespace blockscale::gpu
