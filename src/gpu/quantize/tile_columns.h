// A tile's columns, quantized into the stage by the threads of a thread block.
#pragma once

#include "gpu/quantize/column_part.h"
#include "gpu/quantize/columns.h"

namespace blockscale::gpu {

inline constexpr int kDirectWarps = kDirectThreads / 32;

// Finds 1 / scale of every column, a block that all warps hold parts of; scales go to the stage.
template <Pass kPass, class Memory>
BLOCKSCALE_DEVICE void share_blocks(const Side& s, const MatrixAt& m, const uint32_t* amax,
                                    int first, Memory& memory, Stage<kPass>& stage) {
  static_assert(kPass.block() == kTile && ColumnPart<kPass>::kColumns == 4);
  const int warp = static_cast<int>(threadIdx.x / 32), line = static_cast<int>(threadIdx.x);
  *reinterpret_cast<uint4*>(&memory.column_amax[warp][first]) = {amax[0], amax[1], amax[2],
                                                                 amax[3]};
  memory.sync();
  if (line < kTile) {
    uint32_t largest = memory.column_amax[0][line];
#pragma unroll
    for (int i = 1; i < kDirectWarps; ++i) largest = max(largest, memory.column_amax[i][line]);
    const Block b = block_of<kPass>(s, m.outer, largest);
    memory.column_inv[line] = b.inv;
    stage_scale<kPass>(s, stage, b.stored, line, 0);
  }
  memory.sync();
}

// Finds the largest scale of each column, `top`, which all codes of a widened tile share; its four
// blocks are in as many warps. FP32 scales go to the stage.
template <Pass kPass, class Memory>
BLOCKSCALE_DEVICE void share_tops(const Side& s, const Block* blocks, const ColumnPart<kPass>& part,
                                  Memory& memory, Stage<kPass>& stage, uint32_t* top) {
  constexpr int kColumns = ColumnPart<kPass>::kColumns, kBlocks = kTile / kPass.block();
  static_assert(kPass.widened && kPass.stored_block() == kTile && kBlocks <= kDirectWarps);
  const int block = part.run * kRun / kPass.block();
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    memory.column_amax[block][part.first + i] = top_of(blocks[i].stored);
  memory.sync();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    top[i] = memory.column_amax[0][part.first + i];
#pragma unroll
    for (int b = 1; b < kBlocks; ++b) top[i] = max(top[i], memory.column_amax[b][part.first + i]);
    if (block == 0)
      stage_scale<kPass>(s, stage, bit_cast<uint32_t>(widened_scale(top[i])), part.first + i, 0);
  }
}

// What a thread has loaded of a tile: two pairs of columns, or two runs of one pair.
template <class Columns>
struct LoadedColumns {
  static constexpr bool kInRegisters = true;
  Columns in[2];

  // One after another, or both at once.
  BLOCKSCALE_DEVICE Columns next(int) {
    const Columns first = in[0];
    in[0] = in[1];
    return first;
  }
  BLOCKSCALE_DEVICE void both(Columns* to) const { to[0] = in[0], to[1] = in[1]; }
};

struct Nobody {
  template <class... Args>
  BLOCKSCALE_DEVICE void operator()(const Args&...) const {}
};

// Quantizes the columns of a thread one after another, where a run is a block. Large code is
// emitted only once.
template <Pass kPass, class Values, class Columns>
BLOCKSCALE_DEVICE void columns_in_turn(const Side& s, const MatrixAt& m, const TileAt& at,
                                       const ColumnPart<kPass>& part, Columns& columns,
                                       const RandomRuns& random, Stage<kPass>& stage) {
  constexpr int kColumns = ColumnPart<kPass>::kColumns;
  [[maybe_unused]] constexpr int kTimes =
      kPass.hadamard || kPass.encoder == Encoder::fp4_stochastic ? 1 : 2;
  // Where results go: advanced by addition from two columns to the next two.
  uint32_t line = in_register(m.line + at.column + part.first);
  uint8_t* to[] = {&in_place(staged_fp4<kPass, kColumns>(stage, part.first, part.run)),
                   &in_place(staged_fp4<kPass, kColumns>(stage, part.first + 1, part.run))};
  uint8_t* scale = &in_place(stage.template scale<uint8_t>(part.first, kRunsPerLine, part.run));
  auto column = [&](Values& values, auto which) {
    constexpr int kWhich = decltype(which)::value;
    float v[kRun];
    const Block b = block_of_run<kPass>(
        s, m.outer, values.amax[kWhich],
        [&](Block& unusual) { values.template cut<kWhich>(s, unusual); },
        [&](float* to) { values.template unpack<kWhich>(s, to); }, v);
    scale[kWhich * kRunsPerLine] = static_cast<uint8_t>(b.stored);
    const Codes codes =
        encode_run<kPass>(s, v, values.template signs<kWhich>(s), b.inv, random, line + kWhich);
    *reinterpret_cast<uint2*>(to[kWhich]) = {codes.word[0], codes.word[1]};
  };
#pragma unroll kTimes
  for (int i = 0; i < kColumns; i += 2) {
    Values values;
    values.take(columns.next(i), s);
    column(values, Constant<0>{});
    column(values, Constant<1>{});
    line += 2;
    scale += 2 * kRunsPerLine;
    for (auto& p : to) p += 2 * kTile / 2;
  }
}

// The blocks of a thread's columns; scales go to the stage.
template <Pass kPass, class Values, class Memory>
BLOCKSCALE_DEVICE void blocks_of_columns(const Side& s, const MatrixAt& m,
                                         const ColumnPart<kPass>& part, Values (&values)[2],
                                         Memory& memory, Stage<kPass>& stage, Block* blocks) {
  constexpr int kBlock = kPass.block(), kColumns = ColumnPart<kPass>::kColumns;
  uint32_t amax[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    amax[i] = kColumns == 4 ? values[i / 2].amax[i % 2] : max(values[0].amax[i], values[1].amax[i]);
  if constexpr (kPass.square) {
    uint32_t a = max(amax[0], amax[1]);
#pragma unroll
    for (int i = 2; i < kColumns; ++i) a = max(a, amax[i]);
#pragma unroll
    for (int step = 1; step < min(kBlock / kColumns, 32); step *= 2)
      a = max(a, shuffle_xor(a, step));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) amax[i] = a;
  }
  if constexpr (kBlock == kTile) {
    share_blocks<kPass>(s, m, amax, part.first, memory, stage);
    const float4 four = *reinterpret_cast<const float4*>(&memory.column_inv[part.first]);
    blocks[0] = {four.x, 0}, blocks[1] = {four.y, 0};
    blocks[2] = {four.z, 0}, blocks[3] = {four.w, 0};
  } else {
    Block b{};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i == 0 || !kPass.square)
        b = block_of<kPass>(s, m.outer, amax[i], [&](Block& b) {
          if constexpr (kPass.square) {
            for (Values& two : values) two.template cut<0>(s, b), two.template cut<1>(s, b);
          } else {
            for (Values& two : values)
              i == 0 ? two.template cut<0>(s, b) : two.template cut<1>(s, b);
          }
        });
      if (!kPass.widened) stage_scale<kPass>(s, stage, b.stored, part.first + i, part.run);
      blocks[i] = b;
    }
  }
}

// Quantizes the columns of a thread together, where they share blocks with other threads or with
// each other, or a block is longer than a run. Returns the codes of four runs.
template <Pass kPass, class Tile, class Values, class Columns, class Memory>
BLOCKSCALE_DEVICE void columns_at_once(const Side& s, const MatrixAt& m, const TileAt& at,
                                       const ColumnPart<kPass>& part, const Columns& columns,
                                       const RandomRuns* random, Memory& memory,
                                       Stage<kPass>& stage, Codes* all) {
  constexpr int kColumns = ColumnPart<kPass>::kColumns;
  typename Tile::Columns in[2];
  columns.both(in);
  Values values[2];
  values[0].take(in[0], s);
  values[1].take(in[1], s);
  Block blocks[kColumns];
  blocks_of_columns<kPass>(s, m, part, values, memory, stage, blocks);
  [[maybe_unused]] uint32_t top[kColumns];
  if constexpr (kPass.widened) share_tops<kPass>(s, blocks, part, memory, stage, top);
  auto column = [&](auto i) {
    constexpr int kIndex = decltype(i)::value, kColumn = kIndex % kColumns;
    const int line = part.first + kColumn, run = kIndex / kColumns;
    const Values& two = values[kIndex / 2];
    float v[kRun];
    const float inv = unpack_for<kPass>(
        blocks[kColumn], [&](float* to) { two.template unpack<kIndex % 2>(s, to); }, v);
    Codes codes = encode_run<kPass>(s, v, two.template signs<kIndex % 2>(s), inv, random[run],
                                    m.line + at.column + line);
    if constexpr (kPass.widened) codes = widen_run(codes, blocks[kColumn].stored, top[kColumn]);
    stage_codes<kPass, kColumns>(s, stage, codes, line, part.run + run);
    all[kIndex] = codes;
  };
  column(Constant<0>{});
  column(Constant<1>{});
  column(Constant<2>{});
  column(Constant<3>{});
}

// Quantizes the columns of a tile into the stage. load(part) returns them, as LoadedColumns, and
// then out_at() where they belong. kEnds: skips runs of rows past the end. For one-byte codes of
// squares that are a whole tile, it also calls made(part, codes of its four columns).
template <Pass kPass, class Tile, bool kEnds = false, class OutAt, class Memory, class Load,
          class Made = Nobody>
BLOCKSCALE_DEVICE void columns_of_tile(const OutAt& out_at, const TileAt& at, Memory& memory,
                                       Stage<kPass>& stage, const Load& load,
                                       const Made& made = {}) {
  using Part = ColumnPart<kPass>;
  const Part part;
  auto columns = load(part);
  using Values = ColumnValues<kPass, Tile, !decltype(columns)::kInRegisters>;
  const auto out = out_at();
  const Side& s = out.side;
  if (kEnds && at.row + part.run * kRun >= s.padded) return;
  const MatrixAt m = out.template matrix<kPass>(at, memory.outer[1]);
  RandomRuns random[Part::kRuns];
#pragma unroll
  for (int i = 0; i < Part::kRuns; ++i)
    random[i] = random_runs<kPass>(s, m, 1, at.row + (part.run + i) * kRun);
  if constexpr (kPass.block() == kRun && !kPass.square) {
    columns_in_turn<kPass, Values>(s, m, at, part, columns, random[0], stage);
  } else {
    Codes codes[4];
    columns_at_once<kPass, Tile, Values>(s, m, at, part, columns, random, memory, stage, codes);
    if constexpr (kPass.block() == kTile && kPass.square && !kPass.fp4()) made(part, codes);
  }
}

}  // namespace blockscale::gpu
