// The quantizer: one kernel for every spec, axis and pair of axes.
//
// A block of threads walks over tiles of 128 x 128 elements; while it works on one, the next is on
// its way into shared memory. A thread works on runs of 16 elements along the axis. Rows are
// stored from registers. Columns, which leave transposed, are collected in shared memory, so that
// each line of codes is written in pieces of 64 or 128 bytes. With both axes wanted each tile is
// read once for both.
#pragma once

#include "gpu/scale.h"

namespace blockscale::gpu {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

struct QuantizeParams {
  Source x;
  Side row, column;
  int tiles_down, tiles_across;
  int64_t tiles;  // of all matrices
  // gridDim.x tiles further on, in tiles down, across and matrices.
  int step_first, step_second;
  int64_t step_batch;
  bool copies;  // whether x.map describes x
};

// Amaxes of the blocks that more than one thread sees. Three by turns, with one barrier a tile
// between filling and reading: after it, the one of the tile before has been read by all, and is
// cleared for the tile after the next.
struct BlockTables {
  static constexpr int kSize = kTile * kTile / 32;
  static_assert(kSize == kThreads);
  uint32_t amax[3][kSize];

  BLOCKSCALE_DEVICE void clear(int which) { amax[which][threadIdx.x] = 0; }
};
// Which of several buffers a tile uses.
template <int kStages>
struct Turn {
  int stage = 0, two = 0, three = 0;
  BLOCKSCALE_DEVICE void advance() {
    stage = stage == kStages - 1 ? 0 : stage + 1;
    two ^= 1;
    three = three == 2 ? 0 : three + 1;
  }
};
// Codes and scales of a tile's columns on their way out.
template <Pass kPass>
struct Stage {
  static constexpr int kCodeBytes = kTile * kTile / (kPass.fp4() ? 2 : 1);
  uint4 codes[kCodeBytes / 16];
  uint32_t scales[kTile * kRunsPerLine / 4];  // of scale_bytes each

  template <class Scale>
  BLOCKSCALE_DEVICE Scale& scale(int line, int blocks, int block) {
    return reinterpret_cast<Scale*>(scales)[line * blocks + block];
  }
};

// Shared memory of one direction.
template <Pass kPass, bool kColumns>
struct Output {
  // Only along columns, and where blocks are squares, does a block meet several warps.
  static constexpr bool kTables =
      kPass.present() && (kPass.any() || kPass.square || (kColumns && kPass.block() != kRun));
  BlockTables tables[kTables ? 1 : 0];
  Stage<kPass> stage[kColumns && kPass.present() ? 2 : 0];  // one is filled while the other may
                                                            // still be read

  BLOCKSCALE_DEVICE void clear() {
    if constexpr (kTables) {
      tables[0].clear(0);
      tables[0].clear(1);
    }
  }
};

template <Pass kRow, Pass kColumn, class Loader>
struct Shared {
  static constexpr int kStages = kColumn.present() ? 2 : Loader::kStages;
  typename Loader::Tile tile[kStages];
  Output<kRow, false> row;
  Output<kColumn, true> column;
  typename Loader::Shared loader;
};

// Entry of the block of (line, pos), both within the tile.
template <Pass kPass>
BLOCKSCALE_DEVICE int table_index(const Side& s, int line, int pos) {
  const int block = block_length<kPass>(s);
  return is_square<kPass>(s) ? line / block * (kTile / block) + pos / block
                             : pos / block * kTile + line;
}

// Where run `g` of a line lies in the stage: 16 bytes (8 for FP4) apart within a line, permuted so
// that neither the writers (32 pairs of lines at one g) nor the readers (one line) share banks.
template <bool kFp4>
BLOCKSCALE_DEVICE int stage_offset(int line, int g) {
  if (kFp4) return (line ^ (line >> 4 & 1)) * (kTile / 2) + (g ^ (line >> 1 & 7)) * 8;
  return line * kTile + (g ^ (line >> 1 & 7)) * 16;
}

BLOCKSCALE_DEVICE Rng rng_of(const Side& s) {
  if (!s.seed) return s.rng;
  return {static_cast<uint64_t>(*s.seed), static_cast<uint64_t>(*s.offset)};
}

// The codes of one run of a block whose amax is `largest`. `line` and `pos` are global coordinates;
// v is used up.
template <Pass kPass>
BLOCKSCALE_DEVICE Codes encode_run(const Side& s, float* v, float inv, float largest,
                                   const Rng& rng, int plane, uint32_t line, int64_t pos) {
  constexpr bool kStochastic = kPass.encoder == Encoder::fp4_stochastic;
  PhiloxBlock random{};
  if (kStochastic || (kPass.any() && s.out.spec.stochastic()))
    random = random_block(rng, plane, line, static_cast<uint32_t>(pos / kElementsPerPhilox));
  Codes out{};
  const bool finite = inv != 0.0f;
  if constexpr (kPass.any()) {
    out = encode_any(s.element, s.out.spec.stochastic(), v, inv, random.word);
  } else if constexpr (kPass.encoder == Encoder::fp8) {
    const bool e5m2 = s.out.spec.element == Format::e5m2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float y[4];
      for (int j = 0; j < 4; ++j) y[j] = __fmul_rn(v[4 * i + j], inv);
      out.word[i] =
          e5m2 ? to_fp8x4<true>(y[0], y[1], y[2], y[3]) : to_fp8x4<false>(y[0], y[1], y[2], y[3]);
    }
  } else {
    if (__fmul_rn(largest, inv) > (kStochastic ? kStochasticSafe : kNearestSafe)) saturate(v, inv);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      out.word[i] = kStochastic ? fp4_stochastic_of_8(v + 8 * i, inv, random.word + 2 * i)
                                : fp4_nearest_of_8(v + 8 * i, inv);
  }
  if (!finite) out = {};
  return out;
}

// ---- rows
// ----------------------------------------------------------------------------------------

// The run at (r, c) of the tile after the transform, and its amax.
template <Pass kPass, class Tile>
struct RowValues {
  typename Tile::Run plain;
  PairRun transformed;
  uint32_t amax;

  BLOCKSCALE_DEVICE void load(const Tile& tile, const Side& s, int r, int c) {
    plain = tile.row(r, c);
    if (!transforms<kPass>(s)) {
      amax = plain.amax_bits();
      return;
    }
    plain.flip(static_cast<uint32_t>(s.out.spec.hadamard.mask_lo));
    float v[kRun];
    plain.unpack(v);
    transformed = hadamard16<Tile::kExactQuarter>(v);
    amax = transformed.amax_bits();
  }
  BLOCKSCALE_DEVICE void unpack(const Side& s, float* v) const {
    if (transforms<kPass>(s))
      transformed.unpack(v);
    else
      plain.unpack(v);
  }
};

// Runs of a thread: two of a tile, kRowStep rows apart.
inline constexpr int kRowStep = kThreads / kRunsPerLine;
inline constexpr int kRowRuns = kTile / kRowStep;

template <Pass kPass, class Loader, class Turn>
BLOCKSCALE_DEVICE void quantize_rows(Loader& loader, const typename Loader::Tile& tile,
                                     bool last_reader, const Side& s, const Outer& outer,
                                     const Rng& rng, const TileAt& at, Output<kPass, false>& shared,
                                     const Turn& turn) {
  using Tile = typename Loader::Tile;
  const StoredShape& shape = s.shape;
  const bool square = is_square<kPass>(s);
  const int block = block_length<kPass>(s);
  const int pos = static_cast<int>(threadIdx.x) % kRunsPerLine * kRun;
  const int first = static_cast<int>(threadIdx.x) / kRunsPerLine;
  RowValues<kPass, Tile> values[kRowRuns];
#pragma unroll
  for (int i = 0; i < kRowRuns; ++i) values[i].load(tile, s, first + i * kRowStep, pos);
  if (last_reader) loader.release(turn.stage);
  BlockTables& tables = shared.tables[0];
  uint32_t* table = tables.amax[turn.three];
  if (square) {
#pragma unroll
    for (int i = 0; i < kRowRuns; ++i) {
      if (block == kTile) {
        const uint32_t largest = warp_max(values[i].amax);
        if (threadIdx.x % 32 == 0) atomicMax(&table[0], largest);
      } else {
        atomicMax(&table[table_index<kPass>(s, first + i * kRowStep, pos)], values[i].amax);
      }
    }
    __syncthreads();
    tables.clear(turn.three == 0 ? 2 : turn.three - 1);
  }
  const uint32_t global_line =
      static_cast<uint32_t>(s.origin_line + at.batch * shape.lines + at.row);
  const int c = at.column + pos;
#pragma unroll
  for (int i = 0; i < kRowRuns; ++i) {
    const int line = first + i * kRowStep, r = at.row + line;
    uint32_t a = values[i].amax;
    if (square) {
      a = table[table_index<kPass>(s, line, pos)];
    } else {
#pragma unroll
      for (int step = 1; step < kRunsPerLine; step *= 2)
        if (step * kRun < block) a = max(a, shuffle_xor(a, step));
    }
    if (r >= shape.lines || c >= shape.padded) continue;
    const Block b = block_of<kPass>(s, outer, a);
    if (pos % block == 0) store_scale<kPass>(s, at.batch, r, c / block, b.stored);
    float v[kRun];
    values[i].unpack(s, v);
    const Codes codes = encode_run<kPass>(s, v, b.inv, bit_cast<float>(a), rng, 0,
                                          global_line + line, s.origin_pos + c);
    uint8_t* to = codes_at<kPass>(s, at.batch, r, c);
    if (is_fp4<kPass>(s))
      *reinterpret_cast<uint2*>(to) = {codes.word[0], codes.word[1]};
    else
      *reinterpret_cast<uint4*>(to) = {codes.word[0], codes.word[1], codes.word[2], codes.word[3]};
  }
}

// ---- columns
// -------------------------------------------------------------------------------------

// Whether threads of several warps see parts of one block.
template <Pass kPass>
BLOCKSCALE_DEVICE bool shares_blocks(const Side& s) {
  return is_square<kPass>(s) || block_length<kPass>(s) != kRun;
}

// Columns c and c + 1 of the tile down one run of rows, and their amaxes.
template <Pass kPass, class Tile>
struct ColumnValues {
  typename Tile::Columns plain;
  PairRun transformed[2];
  uint32_t amax[2];

  BLOCKSCALE_DEVICE void load(const Tile& tile, const Side& s, int r, int c) {
    plain = tile.columns(r, c);
    if (!transforms<kPass>(s)) {
      plain.amax_bits(amax);
      return;
    }
    plain.flip(static_cast<uint32_t>(s.out.spec.hadamard.mask_lo));
    float v[kRun];
    plain.template unpack<0>(v);
    transformed[0] = hadamard16<Tile::kExactQuarter>(v);
    plain.template unpack<1>(v);
    transformed[1] = hadamard16<Tile::kExactQuarter>(v);
    amax[0] = transformed[0].amax_bits();
    amax[1] = transformed[1].amax_bits();
  }
  template <int kWhich>
  BLOCKSCALE_DEVICE void unpack(const Side& s, float* v) const {
    if (transforms<kPass>(s))
      transformed[kWhich].unpack(v);
    else
      plain.template unpack<kWhich>(v);
  }
};

// Codes and scales from the stage to memory; `line` and `pos` are those of the tile.
template <Pass kPass>
BLOCKSCALE_DEVICE void store_stage(const Side& s, int64_t batch, int tile_line, int tile_pos,
                                   Stage<kPass>& stage) {
  const StoredShape& shape = s.shape;
  const auto* staged = reinterpret_cast<const uint8_t*>(stage.codes);
  const bool fp4 = is_fp4<kPass>(s);
  const int runs =
      static_cast<int>(min(static_cast<int64_t>(kRunsPerLine), (shape.padded - tile_pos) / kRun));
  const int lines = static_cast<int>(min(static_cast<int64_t>(kTile), shape.lines - tile_line));
  // FP4 goes in pairs of runs, 16 bytes, where lines are whole multiples of that.
  const bool pairs = fp4 && shape.line_bytes % 16 == 0;
  const int step = pairs ? 2 : 1, per_line = kRunsPerLine / step;
  for (int i = threadIdx.x; i < kTile * per_line; i += kThreads) {
    const int line = i / per_line, g = i % per_line * step;
    if (line >= lines || g >= runs) continue;
    uint8_t* to = codes_at<kPass>(s, batch, tile_line + line, tile_pos + g * kRun);
    if (!fp4) {
      *reinterpret_cast<uint4*>(to) =
          *reinterpret_cast<const uint4*>(staged + stage_offset<false>(line, g));
      continue;
    }
    const uint2 low = *reinterpret_cast<const uint2*>(staged + stage_offset<true>(line, g));
    if (pairs) {
      const uint2 high = *reinterpret_cast<const uint2*>(staged + stage_offset<true>(line, g + 1));
      *reinterpret_cast<uint4*>(to) = {low.x, low.y, high.x, high.y};
    } else {
      *reinterpret_cast<uint2*>(to) = low;
    }
  }
  const int block = block_length<kPass>(s), blocks = kTile / block;
  const int first_block = tile_pos / block;
  for (int i = threadIdx.x; i < kTile * blocks; i += kThreads) {
    const int line = i / blocks, b = i % blocks;
    if (line >= lines || first_block + b >= shape.blocks) continue;
    store_scale<kPass>(s, batch, tile_line + line, first_block + b,
                       has_wide_scales<kPass>(s) ? stage.template scale<uint32_t>(line, blocks, b)
                                                 : stage.template scale<uint8_t>(line, blocks, b));
  }
}

template <Pass kPass, class Loader, class Turn>
BLOCKSCALE_DEVICE void quantize_columns(Loader& loader, const typename Loader::Tile& tile,
                                        const Side& s, const Outer& outer, const Rng& rng,
                                        const TileAt& at, Output<kPass, true>& shared,
                                        const Turn& turn) {
  const bool square = is_square<kPass>(s);
  const int block = block_length<kPass>(s);
  // A warp: 32 pairs of columns, half of the tile, by one run of rows.
  const int warp = static_cast<int>(threadIdx.x) / 32, g = warp % kRunsPerLine;
  const int first = warp / kRunsPerLine * (kTile / 2) + static_cast<int>(threadIdx.x) % 32 * 2;
  const bool shared_blocks = shares_blocks<kPass>(s);
  ColumnValues<kPass, typename Loader::Tile> values;
  values.load(tile, s, g * kRun, first);
  loader.release(turn.stage);
  BlockTables& tables = shared.tables[0];
  Stage<kPass>& stage = shared.stage[turn.two];
  uint32_t* table = tables.amax[turn.three];
  if (shared_blocks) {
    if (square && block == kTile) {
      const uint32_t a = warp_max(max(values.amax[0], values.amax[1]));
      if (threadIdx.x % 32 == 0) atomicMax(&table[0], a);
    } else {
      atomicMax(&table[table_index<kPass>(s, first, g * kRun)], values.amax[0]);
      atomicMax(&table[table_index<kPass>(s, first + 1, g * kRun)], values.amax[1]);
    }
    __syncthreads();
    tables.clear(turn.three == 0 ? 2 : turn.three - 1);
  }
  const uint32_t global_line =
      static_cast<uint32_t>(s.origin_line + at.batch * s.shape.lines + at.column);
  const bool fp4 = is_fp4<kPass>(s);
  auto* staged = reinterpret_cast<uint8_t*>(stage.codes);
  auto column = [&](auto which) {
    constexpr int kWhich = decltype(which)::value;
    const int line = first + kWhich;
    const uint32_t a =
        shared_blocks ? table[table_index<kPass>(s, line, g * kRun)] : values.amax[kWhich];
    const Block b = block_of<kPass>(s, outer, a);
    float v[kRun];
    values.template unpack<kWhich>(s, v);
    const Codes codes = encode_run<kPass>(s, v, b.inv, bit_cast<float>(a), rng, 1,
                                          global_line + line, s.origin_pos + at.row + g * kRun);
    if (g * kRun % block == 0) {
      if (has_wide_scales<kPass>(s))
        stage.template scale<uint32_t>(line, kTile / block, g * kRun / block) = b.stored;
      else
        stage.template scale<uint8_t>(line, kTile / block, g * kRun / block) =
            static_cast<uint8_t>(b.stored);
    }
    if (fp4)
      *reinterpret_cast<uint2*>(staged + stage_offset<true>(line, g)) = {codes.word[0],
                                                                         codes.word[1]};
    else
      *reinterpret_cast<uint4*>(staged + stage_offset<false>(line, g)) = {
          codes.word[0], codes.word[1], codes.word[2], codes.word[3]};
  };
  column(Constant<0>{});
  column(Constant<1>{});
  __syncthreads();
  store_stage<kPass>(s, at.batch, at.column, at.row, stage);
}

// ---- both
// ----------------------------------------------------------------------------------------

// Walks over tiles, gridDim.x at a time. Down first when columns leave: neighbours in time then
// write neighbouring pieces of a line.
template <bool kDown>
struct Walk {
  int first, second;  // tile within the matrix, `first` moving faster
  int64_t batch;

  BLOCKSCALE_DEVICE explicit Walk(const QuantizeParams& p) {
    const int firsts = kDown ? p.tiles_down : p.tiles_across;
    const int seconds = kDown ? p.tiles_across : p.tiles_down;
    first = static_cast<int>(blockIdx.x % firsts);
    second = static_cast<int>(blockIdx.x / firsts % seconds);
    batch = blockIdx.x / firsts / seconds;
  }
  BLOCKSCALE_DEVICE void advance(const QuantizeParams& p) {
    const int firsts = kDown ? p.tiles_down : p.tiles_across;
    const int seconds = kDown ? p.tiles_across : p.tiles_down;
    first += p.step_first;
    second += p.step_second + (first >= firsts);
    batch += p.step_batch + (second >= seconds);
    if (first >= firsts) first -= firsts;
    if (second >= seconds) second -= seconds;
  }
  BLOCKSCALE_DEVICE TileAt at() const {
    return {batch, (kDown ? first : second) * kTile, (kDown ? second : first) * kTile};
  }
};

// The outer scale of the matrix that a tile belongs to; its first tile stores it.
template <Pass kPass>
BLOCKSCALE_DEVICE void refresh(const Side& s, const TileAt& at, int64_t before, Outer& outer) {
  if constexpr (kPass.any() || kPass.two_level()) {
    if (at.batch != before) outer = outer_of(s, at.batch);
    if (s.out.spec.outer && at.row == 0 && at.column == 0 && threadIdx.x == 0)
      s.out.outer[at.batch] = outer.dec;
  }
}

template <class Row, class Column, class Loader>
__global__ void __launch_bounds__(kThreads, Loader::kBlocks)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
  constexpr Pass kRow = Row::kPass, kColumn = Column::kPass;
  constexpr bool kRows = kRow.present(), kColumns = kColumn.present();
  extern __shared__ __align__(128) uint8_t memory[];
  using Memory = Shared<kRow, kColumn, Loader>;
  auto& shared = *reinterpret_cast<Memory*>(memory);
  Loader loader(shared.loader);
  constexpr int kAhead = Memory::kStages - 1;
  Walk<kColumns> walk(p), ahead(p);
  int64_t left = p.tiles - blockIdx.x;
  for (int i = 0; i < kAhead; ++i, ahead.advance(p))
    if (left > i * static_cast<int64_t>(gridDim.x))
      loader.begin(p.x, ahead.at(), shared.tile[i], i);
  shared.row.clear();
  shared.column.clear();
  __syncthreads();
  Outer row_outer, column_outer;
  Rng row_rng, column_rng;
  if constexpr (kRows) row_rng = rng_of(p.row);
  if constexpr (kColumns) column_rng = rng_of(p.column);
  int64_t before = -1;
  Turn<kAhead + 1> turn;
#pragma unroll 1
  for (; left > 0; left -= gridDim.x, turn.advance(), walk.advance(p), ahead.advance(p)) {
    auto& tile = shared.tile[turn.stage];
    const TileAt at = walk.at();
    loader.finish(tile, turn.stage);
    if (left > kAhead * static_cast<int64_t>(gridDim.x)) {
      const int stage = turn.stage == 0 ? kAhead : turn.stage - 1;
      loader.begin(p.x, ahead.at(), shared.tile[stage], stage);
    }
    if constexpr (kRows) {
      refresh<kRow>(p.row, at, before, row_outer);
      quantize_rows<kRow>(loader, tile, !kColumns, p.row, row_outer, row_rng, at, shared.row, turn);
    }
    if constexpr (kColumns) {
      refresh<kColumn>(p.column, at, before, column_outer);
      quantize_columns<kColumn>(loader, tile, p.column, column_outer, column_rng, at, shared.column,
                                turn);
    }
    before = at.batch;
  }
}

}  // namespace blockscale::gpu
