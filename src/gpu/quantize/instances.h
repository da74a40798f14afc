// Building blocks for the parts of the table of quantizers. Thresholds (numbers of lines, tiles and
// rounds) were measured on an H200: docs/performance/quantizers.md.
#pragma once

#include <algorithm>
#include <bit>

#include "gpu/quantize/copied_tiles.h"
#include "gpu/quantize/joined_tiles.h"
#include "gpu/quantize/kernels.h"
#include "gpu/quantize/layout_rows.h"
#include "gpu/quantize/position_tiles.h"

namespace blockscale::gpu {

// Lines per thread, for `lines` lines of `runs` runs each. An FP4 thread has much to do before its
// first line, so there are no more threads than run at a time as long as each has at most kMost
// lines. Beyond that, each has kOften lines, or half as many if the work is light and there would
// be fewer than kRounds rounds of threads, the last of which may be almost empty. With groups,
// among which a thread must find its own, each has as many lines as whole rounds allow.
template <Pass kPass, bool kGrouped>
int lines_of_a_row_thread(int64_t runs, int64_t lines) {
  if (!kPass.fp4()) return lines_of_a_thread(runs * lines, kDirectLines);
  constexpr int kMost = 24, kOften = 8, kRounds = 6;
  constexpr bool kHeavy = kPass.hadamard || kPass.encoder == Encoder::fp4_stochastic;
  const int64_t threads =
      int64_t{kRowBlocks<kPass, Bf16In<true>>} * multiprocessors(current_device()) * kDirectThreads;
  const int64_t each = ceil_div(lines, std::max<int64_t>(threads / runs, 1));
  if (each <= kMost) return static_cast<int>(round_up(each, 2));
  if (kGrouped) return static_cast<int>(round_up(ceil_div(each, ceil_div(each, kMost)), 2));
  return kHeavy || runs * lines >= kRounds * kOften * threads ? kOften : kOften / 2;
}
template <class Row, class In, bool kGrouped = false>
void launch_rows(QuantizeParams& p, NativeStream stream) {
  const auto runs = static_cast<uint32_t>(p.row.padded / kRun);
  const int each = lines_of_a_row_thread<Row::kPass, kGrouped>(int64_t{runs} * p.row.out.batch,
                                                               int64_t{p.row.lines});
  const int64_t all = runs * ceil_div(p.row.lines, each);
  const RowsParams d{p.x, p.row, p.groups.groups, Divisor(runs), static_cast<uint32_t>(all), each};
  const dim3 grid(static_cast<unsigned>(ceil_div(all, kDirectThreads)),
                  static_cast<unsigned>(p.row.out.batch));
  start(rows_kernel<Row, In, kGrouped>, grid, kDirectThreads, 0, stream, d);
}
// How many adjacent tiles of a row are worked on in turn before the row below, as a shift. For rows
// alone, and for both directions of FP8 with at most 64 tiles in a row: the whole row, up to 128
// tiles, as memory takes whole rows faster. Otherwise kSideways, as tiles below each other share
// sectors of the columns' scales.
template <Pass kRow, Pass kColumn, bool kGrouped>
int sideways_of(const QuantizeParams& p) {
  constexpr int kFew = kSidewaysShift, kMost = 7;
  constexpr bool kBoth = kRow.present() && kColumn.present();
  const int all = std::bit_width(static_cast<unsigned>(p.tiles_across - 1));
  if (!kRow.present() || (kBoth && (kGrouped || kColumn.fp4() || all >= kMost))) return kFew;
  return std::clamp(all, kFew, kMost);
}
template <class Row, class Column, class In, bool kGrouped = false>
void launch_tiles(QuantizeParams& p, NativeStream stream) {
  const int sideways = sideways_of<Row::kPass, Column::kPass, kGrouped>(p);
  const dim3 grid = tiles_grid(kGrouped ? p.groups.tile_rows() : p.tiles_down, p, sideways);
  constexpr auto kKernel = tiles_kernel<Row, Column, In, kGrouped>;
  constexpr int kBytes = sizeof(TileMemory<Row, Column, In>);
  start_with_shared<kKernel>(grid, kDirectThreads, kBytes, stream,
                             TilesParams{p.x, p.row, p.column, p.groups, sideways});
}

template <class Row>
void launch_layout_rows(QuantizeParams& p, NativeStream stream) {
  if (!joins_lines<Row::kPass>(p.row)) return launch_rows<Row, Bf16In<true>>(p, stream);
  const LayoutRowsParams d(p.x, p.row);
  const dim3 grid(static_cast<unsigned>(ceil_div(int64_t{d.all}, kDirectThreads)),
                  static_cast<unsigned>(p.row.out.batch));
  start(layout_rows_kernel<Row>, grid, kDirectThreads, 0, stream, d);
}

// Row by row where the places of groups' rows do not depend on the groups; otherwise by tiles.
template <class Row, class In>
void launch_grouped_rows(QuantizeParams& p, NativeStream stream) {
  if ((p.row.plain || Row::kPass.widened) && p.row.lines > 0 && p.row.padded > 0)
    launch_rows<Row, In, true>(p, stream);
  else
    launch_tiles<Row, PassType<Encoder::none>, In, true>(p, stream);
}

using Aligned = Bf16In<true>;
using Anywhere = Bf16In<false>;

template <class Row, class Column>
void launch_positions(QuantizeParams& p, NativeStream stream) {
  // Lines are whole tiles: nothing that is aligned in a buffer of one matrix is not here.
  static_assert(kGroupLine % kTile == 0);
  // Rows of no group come behind those of the groups, of which each may need all but one row more.
  const int64_t most = int64_t{p.groups.rows} + p.groups.groups.count * p.column.groups.position;
  const auto down = static_cast<int>(ceil_div(std::max<int64_t>(p.column.padded, most), kTile));
  const int sideways = sideways_of<Row::kPass, Column::kPass, true>(p);
  constexpr auto kKernel = positions_kernel<Row, Column>;
  constexpr int kBytes = sizeof(PositionMemory<Row, Column>);
  start_with_shared<kKernel>(tiles_grid(down, p, sideways), kDirectThreads, kBytes, stream,
                             TilesParams{p.x, p.row, p.column, p.groups, sideways});
}

// Tiles of positions, where lines hold groups one after another; otherwise every group's own tiles.
template <class Row, class Column>
void launch_groups(QuantizeParams& p, NativeStream stream) {
  constexpr Pass kRow = Row::kPass, kColumn = Column::kPass;
  if constexpr (goes_by_positions(kRow, kColumn)) {
    const bool rows_follow = !kRow.present() || kRow.widened || p.row.plain;
    if (p.column.plain && rows_follow && !p.groups.positions)
      return launch_positions<Row, Column>(p, stream);
  }
  launch_tiles<Row, Column, Aligned, true>(p, stream);
}

// Tiles in pairs, where there are enough for pairs to keep every multiprocessor busy.
template <class Column>
void launch_joined(QuantizeParams& p, NativeStream stream) {
  constexpr auto kKernel = joined_kernel<Column>;
  constexpr int kBytes = sizeof(JoinedMemory<Column>), kTilesEach = 16;
  const int device = current_device();
  if (kBytes > shared_limit(device) || p.tiles < kTilesEach * multiprocessors(device))
    return launch_tiles<PassType<Encoder::none>, Column, Aligned>(p, stream);
  constexpr int kHalf = kSidewaysShift - 1;
  const dim3 grid = tiles_grid(static_cast<int>(ceil_div(p.tiles_down, kJoined)), p, kHalf);
  start_with_shared<kKernel>(grid, dim3(kDirectThreads, kJoined), kBytes, stream,
                             TilesParams{p.x, p.row, p.column, p.groups, kHalf});
}

// Tiles read by the copy engine, where there are enough for its longer startup not to matter.
template <class Row, class Column>
void launch_copied(QuantizeParams& p, NativeStream stream) {
  constexpr auto kKernel = copied_kernel<Row, Column>;
  using Memory = CopiedMemory<Column>;
  const auto tiles = [&] { launch_tiles<Row, Column, Aligned>(p, stream); };
  constexpr int kBytes = sizeof(Memory), kRounds = 8;
  const int device = current_device();
  const bool parts = p.row.amax_parts != 0 || p.column.amax_parts != 0;  // which it does not read
  if (!p.copies || parts || kBytes > shared_limit(device)) return tiles();
  const int most = multiprocessors(device);
  if (p.tiles < kRounds * Memory::kRows * most) return tiles();
  const int bands = static_cast<int>(ceil_div(p.tiles_across, kSideways));
  const CopiedParams d{p.x,
                       p.row,
                       p.column,
                       Divisor(int64_t{p.tiles_down} * p.tiles_across),
                       Divisor(int64_t{p.tiles_down} * kSideways),
                       Divisor(p.tiles_across - (bands - 1) * kSideways),
                       static_cast<uint32_t>(bands),
                       static_cast<uint32_t>(p.tiles)};
  start_with_shared<kKernel>(dim3(static_cast<unsigned>(most)), dim3(kDirectThreads, Memory::kRows),
                             kBytes, stream, d);
}
// Whether the copy engine is faster: by a few percent, where a tile takes many instructions.
template <Pass kRow, Pass kColumn>
inline constexpr bool kCopied = kCopyEngine&& kColumn.fp4() &&
                                ((kColumn.hadamard && (kRow.present() || kColumn.two_level() ||
                                                       kColumn.encoder == Encoder::fp4_nearest)) ||
                                 (kRow.square && kColumn.square));
// Whether each of a tile's columns has one word of scales, slow to store next to its codes.
template <Pass kRow, Pass kColumn>
inline constexpr bool kJoins =
    !kRow.present() && !kColumn.square &&
    (kColumn.encoder == Encoder::e4m3fn || kColumn.encoder == Encoder::e5m2);
template <class Row, class Column>
constexpr Launcher<QuantizeParams> aligned_launcher() {
  if constexpr (kCopied<Row::kPass, Column::kPass>)
    return launch_copied<Row, Column>;
  else if constexpr (kJoins<Row::kPass, Column::kPass>)
    return launch_joined<Column>;
  else
    return launch_tiles<Row, Column, Aligned>;
}

using None = PassType<Encoder::none>;
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
using Fp4Widened = PassType<Encoder::fp4_nearest, Format::e8m0, false, false, true>;
using Fp4WidenedHadamard = PassType<Encoder::fp4_nearest, Format::e8m0, false, true, true>;
template <Format kScale>
using Stochastic = PassType<Encoder::fp4_stochastic, kScale>;
template <Format kScale>
using StochasticHadamard = PassType<Encoder::fp4_stochastic, kScale, false, true>;

// For FP32 and FP16, kernels with a transform or stochastic rounding are compiled only for both
// directions at once, as layers need them for gradients. The rest runs as `any`, which keeps the
// number of kernels down.
template <class Row, class Column>
constexpr bool common() {
  constexpr Pass kRow = Row::kPass, kColumn = Column::kPass;
  constexpr Pass kOne = kRow.present() ? kRow : kColumn;
  return (kRow.present() && kColumn.present()) ||
         (!kOne.hadamard && kOne.encoder != Encoder::fp4_stochastic);
}
// Groups of FP32 and FP16, which no layer has in square blocks.
template <class Row, class Column>
constexpr Launcher<QuantizeParams> float_groups() {
  if constexpr (Row::kPass.square || Column::kPass.square)
    return nullptr;
  else
    return launch_tiles<Row, Column, FloatsIn, true>;
}
template <class Row, class Column>
constexpr Floats floats() {
  if constexpr (!common<Row, Column>() || Column::kPass.encoder == Encoder::e5m2 ||
                Row::kPass.encoder == Encoder::e5m2)
    return {};
  else if constexpr (Column::kPass.present() || Row::kPass.square)
    return {launch_tiles<Row, Column, FloatsIn>, float_groups<Row, Column>()};
  else
    return {launch_rows<Row, FloatsIn>, float_groups<Row, Column>()};
}
template <class Row, class Column>
inline constexpr Entry kEntry{Row::kPass,
                              Column::kPass,
                              aligned_launcher<Row, Column>(),
                              launch_tiles<Row, Column, Anywhere>,
                              launch_groups<Row, Column>,
                              floats<Row, Column>()};
template <class P>
constexpr Launcher<QuantizeParams> aligned_rows() {
  if constexpr (P::kPass.stored_scale() != Format::fp32)
    return launch_layout_rows<P>;
  else
    return launch_rows<P, Aligned>;
}
template <class P>
inline constexpr Entry kRows{P::kPass,
                             None::kPass,
                             aligned_rows<P>(),
                             launch_rows<P, Anywhere>,
                             launch_grouped_rows<P, Aligned>,
                             floats<P, None>()};
template <class P>
inline constexpr Entry kSquareRows = kEntry<P, None>;
template <class P>
inline constexpr Entry kColumns = kEntry<None, P>;

template <Encoder kElement, Format kScale>
inline constexpr Entry kFp8Entries[] = {
    kRows<Fp8<kElement, kScale>>,
    kColumns<Fp8<kElement, kScale>>,
    kEntry<Fp8Square<kElement, kScale>, Fp8Square<kElement, kScale>>,
#if BLOCKSCALE_SAMPLE < 2
    kSquareRows<Fp8Square<kElement, kScale>>,
    kColumns<Fp8Square<kElement, kScale>>,
    kEntry<Fp8<kElement, kScale>, Fp8<kElement, kScale>>,
#endif
};
// For an x whose rows the forward pass reads, and whose squares the weight's gradient reads.
template <Encoder kElement, Format kScale>
inline constexpr Entry kFp8MixedEntries[] = {
    kEntry<Fp8<kElement, kScale>, Fp8Square<kElement, kScale>>,
};
template <Format kScale>
inline constexpr Entry kFp4Entries[] = {
    kRows<StochasticHadamard<kScale>>,
    kColumns<Fp4Hadamard<kScale>>,
    kEntry<Fp4Square<kScale>, Fp4Square<kScale>>,
    kEntry<Stochastic<kScale>, StochasticHadamard<kScale>>,
#if BLOCKSCALE_SAMPLE < 2
    kRows<Fp4<kScale>>,
    kSquareRows<Fp4Square<kScale>>,
    kRows<Fp4Hadamard<kScale>>,
    kRows<Stochastic<kScale>>,
    kColumns<Fp4<kScale>>,
    kColumns<Fp4Square<kScale>>,
    kColumns<Stochastic<kScale>>,
    kColumns<StochasticHadamard<kScale>>,
    kEntry<Fp4<kScale>, Fp4<kScale>>,
    kEntry<Fp4<kScale>, Fp4Hadamard<kScale>>,
    kEntry<Stochastic<kScale>, Fp4Hadamard<kScale>>,
#endif
};
// MXFP4 for the left of the FP8 GEMM: x in a forward, without and with the operand of its backward
// on the right there, and dy.
inline constexpr Entry kWidenedEntries[] = {
    kEntry<Fp4Widened, Fp4WidenedHadamard>,
#if BLOCKSCALE_SAMPLE < 2
    kRows<Fp4Widened>,
    kEntry<Fp4Widened, Fp4Hadamard<Format::e8m0>>,
#endif
};

}  // namespace blockscale::gpu
