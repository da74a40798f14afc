// direct.h for tiles of 128 x 128: columns, square blocks, both directions at once, and groups.
#pragma once

#include "gpu/quantize/fill.h"
#include "gpu/quantize/tile_columns.h"

namespace blockscale::gpu {

struct TilesParams {
  Source x;
  Side row, column;
  GroupGrid groups;  // if any
  int sideways;      // for direct_tile()
};

static_assert(kDirectWarps * kRun == kTile && 32 * kDirectLines == kTile);
static_assert(kKeptLines == kDirectLines);
static_assert(kDirectThreads == kFillThreads);  // as fill.h counts a thread block's share

// What the threads of a tile exchange.
struct DirectMemory {
  uint32_t row_amax[kDirectWarps * kRunsPerLine];  // of squares, by warp
  uint32_t column_amax[kDirectWarps][kTile];       // by warp
  float column_inv[kTile];
  Outer outer[2];

  BLOCKSCALE_DEVICE static void sync() { __syncthreads(); }
};
// One output at a tile: as it was given, or with the extents of the tile's group of `rows` rows.
template <bool kGrouped, int kOperand>
struct OutputAt {
  const Side& side;

  BLOCKSCALE_DEVICE explicit OutputAt(const Side& whole) : side(whole) {}
  // The tile's matrix; the first tile of a matrix stores its outer scale.
  template <Pass kPass>
  BLOCKSCALE_DEVICE MatrixAt matrix(const TileAt& at, const Outer& outer) const {
    if (!kPass.two_level()) return matrix_at(side, at.batch, no_outer());
    if (side.out.spec.outer && at.row == 0 && at.column == 0 && threadIdx.x == 0)
      side.out.outer[at.batch] = outer.dec;
    return matrix_at(side, at.batch, outer);
  }
};
// With groups along its rows, an output needs only the number of rows before the group has been
// placed; along the contraction axis, the group must be placed first.
template <int kOperand>
struct OutputAt<true, kOperand> {
  Side side;
  const GroupSide& group;

  BLOCKSCALE_DEVICE OutputAt(const Side& whole, const GroupSide& placed, int rows)
      : side(whole), group(placed) {
    if constexpr (kOperand == 0) {
      side.lines = rows;
    } else {
      side.padded = group.padded, side.blocks = group.blocks;
      side.line_bytes = group.line_bytes, side.scale_columns = group.scale_columns;
      side.origin_pos = group.origin_pos;
      side.code_pairs = group.code_pairs, side.scale_words = group.scale_words;
    }
  }
  BLOCKSCALE_DEVICE MatrixAt matrix(const Outer& outer) const {
    return {outer, group.codes, group.scales, group.line, rng_of(side)};
  }
  template <Pass kPass>
  BLOCKSCALE_DEVICE MatrixAt matrix(const TileAt&, const Outer& outer) const {
    return matrix(kPass.two_level() ? outer : no_outer());
  }
};

// Quantizes the rows of a tile: a warp has 16 lines of 8 runs. reader_at(line and run within the
// tile, number of lines that exist) returns their reader.
template <Pass kPass, class Output, class Memory, class ReaderAt, class Loaded>
BLOCKSCALE_DEVICE void rows_of_tile(const Output& out, const TileAt& at, Memory& memory,
                                    const ReaderAt& reader_at, const Loaded& loaded) {
  const Side& s = out.side;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int tile_line = warp * kRun + lane / kRunsPerLine * kDirectLines;
  const int line = at.row + tile_line, pos = at.column + lane % kRunsPerLine * kRun;
  const int lines = pos < s.padded ? s.lines - line : 0;
  auto reader = reader_at(tile_line, lane % kRunsPerLine, lines);
  if constexpr (!kPass.square) {
    quantize_lines<kPass, true>(reader, s, line, pos, lines, kDirectLines, [&] {
      loaded();
      return out.template matrix<kPass>(at, memory.outer[0]);
    });
  } else {
    typename decltype(reader)::Run in[kDirectLines];
#pragma unroll
    for (int i = 0; i < kDirectLines; ++i) in[i] = reader.next();
    loaded();
    const MatrixAt m = out.template matrix<kPass>(at, memory.outer[0]);
    RowValues<kPass, typename decltype(reader)::Tile> values[kDirectLines];
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kDirectLines; ++i) {
      values[i].take(in[i].elements(), s);
      if (i < lines) amax = max(amax, values[i].amax);
    }
    amax = row_block_amax<kPass>(s, amax);
    amax = max(amax, shuffle_xor(amax, kRunsPerLine));
    amax = max(amax, shuffle_xor(amax, 2 * kRunsPerLine));
    // A warp has 16 lines.
    constexpr int kWarps = kPass.block() / kRun;
    if constexpr (kWarps > 1) {
      const int run = lane % kRunsPerLine;
      memory.row_amax[warp * kRunsPerLine + run] = amax;
      memory.sync();
#pragma unroll
      for (int i = 0; i < kWarps; ++i)
        amax = max(amax, memory.row_amax[(warp / kWarps * kWarps + i) * kRunsPerLine + run]);
    }
    const RandomRuns random = random_runs<kPass>(s, m, 0, pos);
    const Block b = block_of<kPass>(s, m.outer, amax, [&](Block& b) {
#pragma unroll
      for (auto& run : values) run.cut(s, b);
    });
    RowTarget<kPass> to(s, m, line, pos);
#pragma unroll
    for (int i = 0; i < kDirectLines; ++i, to.advance(s))
      if (i < lines) store_row_run<kPass>(s, m, random, values[i], b, line + i, pos, to);
  }
}

// Stores the rows of a tile that is one square, from its columns' codes: four in each of 16 rows.
template <Pass kPass, class Output, class Part>
BLOCKSCALE_DEVICE void rows_of_codes(const Output& out, const TileAt& at, const Part& part,
                                     const Codes* columns) {
  const Side& s = out.side;
  const int line = at.row + part.run * kRun;
  const MatrixAt m = out.template matrix<kPass>(at, no_outer());
  uint8_t* to = m.codes + static_cast<int64_t>(line) * s.line_bytes + at.column + part.first;
  keep(to);
#pragma unroll
  for (int i = 0; i < kRun / 4; ++i) {
    const auto word = [&](int c) { return columns[c].word[i]; };
    const uint32_t rows[] = {
        permute_bytes(word(0), word(1), 0x5140), permute_bytes(word(0), word(1), 0x7362),
        permute_bytes(word(2), word(3), 0x5140), permute_bytes(word(2), word(3), 0x7362)};
#pragma unroll
    for (int r = 0; r < 4; ++r, to += s.line_bytes)
      if (line + 4 * i + r < s.lines)
        *reinterpret_cast<uint32_t*>(to) =
            permute_bytes(rows[r / 2], rows[2 + r / 2], r % 2 ? 0x7632 : 0x5410);
  }
}

// Grid: tiles down, with 1 << `sideways` of each row in turn; groups of as many across; matrices.
BLOCKSCALE_DEVICE TileAt direct_tile(int sideways) {
  const uint32_t down = blockIdx.x >> sideways, across = blockIdx.x - (down << sideways);
  return {static_cast<int>(blockIdx.z), static_cast<int>(down) * kTile,
          static_cast<int>((blockIdx.y << sideways) + across) * kTile};
}
// That grid, and whether it fits: matrices, and groups of tiles across, are counted in 16 bits.
inline dim3 tiles_grid(int down, const QuantizeParams& p, int sideways) {
  return dim3(static_cast<unsigned>(down) << sideways,
              static_cast<unsigned>(ceil_div(p.tiles_across, int64_t{1} << sideways)),
              static_cast<unsigned>(p.batch));
}
inline bool fits_grid(const QuantizeParams& p) {
  return p.tiles > 0 && p.batch < 1 << 16 && p.tiles_across < 1 << 16;
}
// Whether a tile is one square in both directions, with the same codes.
BLOCKSCALE_HD constexpr bool has_twins(const Pass& row, const Pass& column) {
  return row == column && row.square && row.block() == kTile && row.encoder != Encoder::byte;
}
// Resident thread blocks per multiprocessor: as many as registers allow without spilling, except
// for FP8 in both directions, which waits for memory more than it computes. Rows at odd addresses
// take many registers while they are loaded.
template <Pass kRow, Pass kColumn, class In>
inline constexpr int kTileBlocks = In::kFloats ? 2
                                   : kColumn.hadamard ||
                                           kColumn.encoder == Encoder::fp4_stochastic ||
                                           (kRow.present() && kColumn.present() &&
                                            !kColumn.fp4()) ||
                                           (In::kAround && !kColumn.present())
                                       ? 3
                                       : 4;

// Shared memory of a thread block.
template <class Row, class Column, class In>
struct TileMemory {
  struct None {};
  static constexpr bool kColumns = Column::kPass.present();
  static constexpr bool kTwins = has_twins(Row::kPass, Column::kPass);
  static constexpr bool kKeeps = kColumns && Row::kPass.present() && !kTwins;
  struct Results {
    std::conditional_t<kKeeps, typename In::Kept, None> kept;
    std::conditional_t<kColumns, Stage<Column::kPass>, None> stage;
  };
  union {
    std::conditional_t<kColumns && In::kAround, TileAround, None> around;  // until it has been read
    Results results;
  };
  DirectMemory direct;
  GroupSide group[2];  // of the row and the column operand
};

// What a tile belongs to: the last argument of quantize_tile(), one of InMatrix, InGroup and
// AtPositions. A warp's find() finds places of groups while the first loads are in flight (kFinds:
// it writes what others read after a barrier); row() and column() are the outputs there; missing()
// is what BF16 pairs hold where x has no rows. kOneGroup: all rows of the tile are of one group.
//
// A matrix of a batch:
struct InMatrix {
  static constexpr bool kFinds = false, kOneGroup = false;
  const TilesParams& p;

  BLOCKSCALE_DEVICE void find(int) const {}
  BLOCKSCALE_DEVICE Outer outer_by_warp(int operand, const TileAt& at) const {
    return gpu::outer_by_warp(operand == 0 ? p.row : p.column, at.batch);
  }
  BLOCKSCALE_DEVICE uint32_t missing() const { return 0; }
  BLOCKSCALE_DEVICE OutputAt<false, 0> row() const { return OutputAt<false, 0>(p.row); }
  BLOCKSCALE_DEVICE OutputAt<false, 1> column() const { return OutputAt<false, 1>(p.column); }
};
// One group. Two warps find its place in either operand, by place(operand).
template <class Place>
struct InGroup : InMatrix {
  static constexpr bool kFinds = true, kOneGroup = true;
  const GroupSide* group;  // of both operands
  int rows;                // of the group in what the kernel reads
  const Place& place;

  BLOCKSCALE_DEVICE void find(int warp) const { place(warp - 2); }
  BLOCKSCALE_DEVICE OutputAt<true, 0> row() const { return {p.row, group[0], rows}; }
  BLOCKSCALE_DEVICE OutputAt<true, 1> column() const { return {p.column, group[1], rows}; }
};

template <class Row, class Column, class In, class Where>
BLOCKSCALE_DEVICE void quantize_tile(const Source& x, const TileAt& at,
                                     TileMemory<Row, Column, In>& memory, const Where& where) {
  using Memory = TileMemory<Row, Column, In>;
  constexpr Pass kRow = Row::kPass, kColumn = Column::kPass;
  DirectMemory& direct = memory.direct;
  auto loaded = [&] {
    constexpr bool kRowOuter = kRow.two_level(), kColumnOuter = kColumn.two_level();
    const int warp = static_cast<int>(threadIdx.x / 32);
    if (kRowOuter && warp == 0) direct.outer[0] = where.outer_by_warp(0, at);
    if (kColumnOuter && warp == 1) direct.outer[1] = where.outer_by_warp(1, at);
    where.find(warp);
    if (kRowOuter || kColumnOuter || Where::kFinds) __syncthreads();
  };
  if constexpr (!Memory::kColumns) {
    const auto reader_at = [&](int line, int run, int lines) {
      return typename In::Reader(x, at.batch, at.row + line, at.column + run * kRun, lines);
    };
    rows_of_tile<kRow>(where.row(), at, direct, reader_at, loaded);
  } else {
    auto& results = memory.results;
    const auto load = [&](const auto& part) {
      LoadedColumns<typename In::Tile::Columns> columns;
      if constexpr (In::kAround) {
        memory.around.begin(x, at);
        loaded();
        wait_for_chunks();
        __syncthreads();
        part.read(memory.around, x, at, columns.in);
        __syncthreads();  // results overwrite it
      } else {
        part.load(In{}, x, at, columns.in, where.missing());
        loaded();
      }
      if constexpr (Memory::kKeeps) part.keep(columns.in, results.kept);
      return columns;
    };
    const auto column_at = [&] { return where.column(); };
    // On average, half of a group's last tile is past its end. Skipping that half costs more where
    // registers are scarce, and is not possible where all threads share blocks of a whole tile.
    constexpr bool kEnds = Where::kOneGroup && !kRow.present() && kColumn.stored_block() < kTile &&
                           !(kColumn.hadamard && kColumn.encoder == Encoder::fp4_stochastic);
    const auto made = [&](const auto& part, const Codes* codes) {
      if constexpr (Memory::kTwins) rows_of_codes<kRow>(where.row(), at, part, codes);
    };
    columns_of_tile<kColumn, typename In::Tile, kEnds>(column_at, at, direct, results.stage, load,
                                                       made);
    __syncthreads();
    // Found again: where a group lies would have been kept in registers that are scarce above.
    const auto column = where.column();
    store_stage<kColumn, ColumnPart<kColumn>::kColumns, kDirectThreads>(
        column.side, column.template matrix<kColumn>(at, direct.outer[1]), at.column, at.row,
        results.stage);
    if constexpr (Memory::kKeeps) {
      const auto reader_at = [&](int line, int run, int) {
        return typename In::KeptReader(results.kept, line, run);
      };
      rows_of_tile<kRow>(where.row(), at, direct, reader_at, [] {});
    }
    if constexpr (Memory::kTwins) {
      const auto row = where.row();
      if (threadIdx.x == 0 && at.row < row.side.lines)
        store_scale<kRow>(row.side, row.template matrix<kRow>(at, no_outer()), at.row,
                          at.column / kTile, results.stage.template scale<uint32_t>(0, 1, 0));
    }
  }
}

template <class Row, class Column, class In, bool kGrouped>
__global__ void __launch_bounds__(kDirectThreads, (kTileBlocks<Row::kPass, Column::kPass, In>))
    tiles_kernel(const __grid_constant__ TilesParams p) {
  after_previous(p);
  BLOCKSCALE_DYNAMIC_SHARED(bytes);
  auto& memory = in_place(*reinterpret_cast<TileMemory<Row, Column, In>*>(bytes));
  const TileAt at = direct_tile(p.sideways);
  if (at.column >= p.x.columns) return;
  if constexpr (!kGrouped) {
    quantize_tile(p.x, at, memory, InMatrix{p});
  } else {
    // A group's tiles start at its first row and end with its last.
    const int tile_row = at.row / kTile, across = (p.x.columns + kTile - 1) / kTile;
    const int column = at.column / kTile;
    const GroupTile tile = find_tile(p.groups, tile_row);
    const auto for_each_operand = [&](const auto& does) {
      if constexpr (Row::kPass.present()) does(p.row, Constant<0>{});
      if constexpr (Column::kPass.present()) does(p.column, Constant<1>{});
    };
    if (tile.group < 0) {
      const int count = static_cast<int>(p.groups.groups.count);
      const Share rows = share_of_none(p.groups, tile.wrong, tile_row);
      for_each_operand([&](const Side& side, auto) {
        const GroupRows end = rows_before(p.groups, side.groups, tile.wrong ? 0 : count);
        fill_behind_groups(side, end.codes >> side.groups.code_shift,
                           end.scales >> side.groups.scale_shift, count, tile.wrong,
                           {rows.at * across + column, rows.of * across});
      });
      return;
    }
    Source x = p.x;
    int begin = tile.begin;
    x.rows = tile.rows;
    if (p.groups.positions) {
      begin = rows_before(p.groups, p.column.groups, tile.group).position;
      x.rows = round_up_by(tile.rows, p.column.groups.position);
    }
    In::skip(x, begin);
    x.batch_stride = 0;
    const auto place = [&](int warp) {
      for_each_operand([&](const Side& side, auto operand) {
        constexpr int kOperand = decltype(operand)::value;
        if (warp != kOperand) return;
        const GroupRows before = rows_before(p.groups, side.groups, tile.group);
        if (threadIdx.x % 32 == 0)
          memory.group[kOperand] = group_side<kOperand>(side, before, tile.begin, tile.rows);
      });
    };
    quantize_tile(x, {tile.group, tile.row, at.column}, memory,
                  InGroup<decltype(place)>{{p}, memory.group, x.rows, place});
    for_each_operand([&](const Side& side, auto operand) {
      constexpr int kOperand = decltype(operand)::value;
      if (!side.groups.pads(tile.rows)) return;
      const OutputAt<true, kOperand> out(side, memory.group[kOperand], tile.rows);
      fill_around_group(
          out.side, out.matrix(no_outer()),
          {tile.row / kTile * across + column, (x.rows + kTile - 1) / kTile * across});
    });
  }
}

}  // namespace blockscale::gpu
