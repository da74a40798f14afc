// Quantizing BF16 straight from global memory: what a thread works on it loads itself, so that
// there is nothing to wait for but its own loads, and the hardware hands out the work in small
// pieces, on odd and small shapes too.
//
// Along rows a thread takes one run of each of up to four lines. Down columns, with square blocks,
// and for both directions at once, a block of threads takes a tile of 128 x 128; the second
// direction finds the tile in the L1 cache.
#pragma once

#include "gpu/columns.h"
#include "gpu/divisor.h"
#include "gpu/load.h"
#include "gpu/rows.h"

namespace blockscale::gpu {

inline constexpr int kDirectThreads = 256;
inline constexpr int kDirectLines = 4;  // of a thread, one run each
inline constexpr int kSideways = 4;     // tiles that lie beside each other are this many in a row

struct RowsParams {
  Source x;
  Side row;
  Divisor runs;  // of a line
  uint32_t all;  // threads with work: runs of a line by groups of lines
  int each;      // lines of a thread: fewer where there is little to do
};

// The same where rows start at multiples of 16 bytes.
struct RunAligned {
  uint4 chunk[2];

  BLOCKSCALE_DEVICE PairRun pairs() const {
    const uint4 a = chunk[0], b = chunk[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }
};
BLOCKSCALE_DEVICE RunAligned load_aligned(const uint16_t* row, int column, int columns) {
  RunAligned run;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int first = column + 8 * i;
    if (first + 8 <= columns)
      run.chunk[i] = load_once(reinterpret_cast<const uint4*>(row + first));
    else
      run.chunk[i] = load_some(row + first, 0, columns - first);
  }
  return run;
}

// The lines of a thread, one after another from `line` on; `left` of them are there.
template <bool kAligned>
struct LineReader {
  using Run = std::conditional_t<kAligned, RunAligned, RunAround>;
  const uint16_t* row;
  int64_t stride;
  int pos, columns, left;

  BLOCKSCALE_DEVICE LineReader(const Source& x, int batch, int line, int p, int lines)
      : row(static_cast<const uint16_t*>(x.data) + batch * x.batch_stride + line * x.row_stride),
        stride(x.row_stride),
        pos(p),
        columns(x.columns),
        left(lines) {}
  BLOCKSCALE_DEVICE Run next() {
    Run run{};
    if (left > 0) {
      if constexpr (kAligned)
        run = load_aligned(row, pos, columns);
      else
        run = load_around(row, pos, columns);
    }
    row += stride;
    --left;
    return run;
  }
};
// Quantizes them. FP4 has work enough to hide the loads of one line behind the line before, and
// code enough to be kept once; FP8 loads all before it begins. `each`: how many of kDirectLines a
// thread has, the same for all. `loaded` gives the matrix, after the first loads are on their way.
template <Pass kPass, bool kAligned, class Loaded>
BLOCKSCALE_DEVICE void quantize_lines(const Source& x, const Side& s, int batch, int line, int pos,
                                      int lines, int each, const Loaded& loaded) {
  constexpr int kDepth = kPass.fp4() ? 1 : kDirectLines;
  LineReader<kAligned> reader(x, batch, line, pos, lines);
  typename LineReader<kAligned>::Run ahead[kDepth];
#pragma unroll
  for (int i = 0; i < kDepth; ++i) ahead[i] = reader.next();
  const MatrixAt m = loaded();
  const Rng rng = rng_of(s);
  RowTarget<kPass> to(s, m, line, pos);
#pragma unroll 1
  for (int group = 0; group < each; group += kDepth) {
    RowValues<kPass, Bf16Tile> values[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i) values[i].take(ahead[i].pairs(), s);
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
      if (kDepth < kDirectLines) ahead[i] = reader.next();
#pragma unroll
    for (int i = 0; i < kDepth; ++i, to.advance(s)) {
      if (kDepth > 1 && i >= each) break;
      const uint32_t amax = row_block_amax<kPass>(s, values[i].amax);
      if (group + i < lines)
        store_row_run<kPass>(s, m, rng, values[i], amax, block_of<kPass>(s, m.outer, amax),
                             line + group + i, pos, to);
    }
  }
}

template <class Row, bool kAligned>
__global__ void __launch_bounds__(kDirectThreads, Row::kPass.fp4() ? 4
                                                  : kAligned       ? 3
                                                                   : 2)
    rows_kernel(const __grid_constant__ RowsParams p) {
  const Side& s = p.row;
  const int batch = static_cast<int>(blockIdx.y);
  const uint32_t n = blockIdx.x * kDirectThreads + threadIdx.x, at = min(n, p.all - 1);
  const uint32_t group = p.runs.quotient(at);
  const int line = static_cast<int>(group) * p.each;
  const int pos = static_cast<int>(at - group * p.runs.value) * kRun;
  const int lines = n < p.all ? min(s.lines - line, p.each) : 0;
  quantize_lines<Row::kPass, kAligned>(p.x, s, batch, line, pos, lines, p.each, [&] {
    // Every thread finds the outer scale for itself: a barrier would cost more.
    const MatrixAt m = matrix_at(s, batch, outer_of(s, batch));
    if (s.out.spec.outer && n == 0) s.out.outer[batch] = m.outer.dec;
    return m;
  });
}

// ---- tiles ----

struct TilesParams {
  Source x;
  Side row, column;
};

inline constexpr int kDirectWarps = kDirectThreads / 32;
static_assert(kDirectWarps * kRun == kTile && 32 * kDirectLines == kTile);

// The largest of the amaxes that the warps which share a block hold for it, entry by entry: `block`
// is its length down the tile, and each warp has 16 rows. `parts` has a line for every warp.
template <int kBlock, class T, class Max>
BLOCKSCALE_DEVICE T max_over_warps(T mine, T* parts, int stride, const Max& larger) {
  constexpr int kWarps = kBlock / kRun;
  if constexpr (kWarps > 1) {
    const int warp = static_cast<int>(threadIdx.x) / 32, first = warp / kWarps * kWarps;
    parts[warp * stride] = mine;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) mine = larger(mine, parts[(first + i) * stride]);
    __syncthreads();
  }
  return mine;
}
BLOCKSCALE_DEVICE uint4 larger_of(const uint4& a, const uint4& b) {
  return {max(a.x, b.x), max(a.y, b.y), max(a.z, b.z), max(a.w, b.w)};
}

struct DirectMemory {
  uint4 column_amax[kDirectWarps * 32];            // of four columns, by warp
  uint32_t row_amax[kDirectWarps * kRunsPerLine];  // of squares, by warp
  Outer outer[2];
};

// The outer scale is stored by the first tile of a matrix.
BLOCKSCALE_DEVICE MatrixAt direct_matrix(const Side& s, const TileAt& at, const Outer& outer) {
  if (s.out.spec.outer && at.row == 0 && at.column == 0 && threadIdx.x == 0)
    s.out.outer[at.batch] = outer.dec;
  return matrix_at(s, at.batch, outer);
}

// The rows of a tile: a warp has 16 lines of 8 runs.
template <Pass kPass, bool kAligned, class Loaded>
BLOCKSCALE_DEVICE void rows_of_tile(const Source& x, const Side& s, const TileAt& at,
                                    DirectMemory& memory, const Loaded& loaded) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int line = at.row + warp * kRun + lane / kRunsPerLine * kDirectLines;
  const int pos = at.column + lane % kRunsPerLine * kRun;
  const int lines = pos < s.padded ? s.lines - line : 0;
  if constexpr (!kPass.square) {
    quantize_lines<kPass, kAligned>(x, s, at.batch, line, pos, lines, kDirectLines, [&] {
      loaded();
      return direct_matrix(s, at, memory.outer[0]);
    });
  } else {
    LineReader<kAligned> reader(x, at.batch, line, pos, lines);
    typename LineReader<kAligned>::Run in[kDirectLines];
#pragma unroll
    for (int i = 0; i < kDirectLines; ++i) in[i] = reader.next();
    loaded();
    const MatrixAt m = direct_matrix(s, at, memory.outer[0]);
    RowValues<kPass, Bf16Tile> values[kDirectLines];
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kDirectLines; ++i) {
      values[i].take(in[i].pairs(), s);
      amax = max(amax, values[i].amax);
    }
    amax = row_block_amax<kPass>(s, amax);
    amax = max(amax, shuffle_xor(amax, kRunsPerLine));
    amax = max(amax, shuffle_xor(amax, 2 * kRunsPerLine));
    amax = max_over_warps<kPass.block()>(amax, memory.row_amax + lane % kRunsPerLine, kRunsPerLine,
                                         [](uint32_t a, uint32_t b) { return max(a, b); });
    const Rng rng = rng_of(s);
    const Block b = block_of<kPass>(s, m.outer, amax);
    RowTarget<kPass> to(s, m, line, pos);
#pragma unroll
    for (int i = 0; i < kDirectLines; ++i, to.advance(s))
      if (i < lines) store_row_run<kPass>(s, m, rng, values[i], amax, b, line + i, pos, to);
  }
}

// Four BF16 at p, of which `count` are there.
template <bool kAligned>
BLOCKSCALE_DEVICE uint2 load_four(const uint16_t* p, int count) {
  if (count < 4) {
    uint2 four{};
    if (count > 0) four.x = p[0];
    if (count > 1) four.x |= static_cast<uint32_t>(p[1]) << 16;
    if (count > 2) four.y = p[2];
    return four;
  }
  if (kAligned) return *reinterpret_cast<const uint2*>(p);
  if (reinterpret_cast<uintptr_t>(p) % 4 == 0)
    return {reinterpret_cast<const uint32_t*>(p)[0], reinterpret_cast<const uint32_t*>(p)[1]};
  const uint32_t inner = *reinterpret_cast<const uint32_t*>(p + 1);
  return {inner << 16 | p[0], static_cast<uint32_t>(p[3]) << 16 | inner >> 16};
}

// The columns of a tile: a warp has 16 rows, a thread four columns of them.
template <Pass kPass, bool kAligned, class Loaded>
BLOCKSCALE_DEVICE void columns_of_tile(const Source& x, const Side& s, const TileAt& at,
                                       DirectMemory& memory, Stage<kPass>& stage,
                                       const Loaded& loaded) {
  constexpr int kBlock = kPass.block();
  const int lane = static_cast<int>(threadIdx.x) % 32, g = static_cast<int>(threadIdx.x) / 32;
  const int first = lane * kDirectLines, r = at.row + g * kRun, c = at.column + first;
  // From the tile's first element, which is the same for all threads, in bytes.
  const auto* tile = static_cast<const uint8_t*>(x.data) +
                     2 * (at.batch * x.batch_stride + at.row * x.row_stride + at.column);
  const auto pitch = static_cast<uint32_t>(2 * x.row_stride);
  uint32_t offset = g * kRun * pitch + 2 * first;
  PairColumns in[2];
  const int rows = x.rows - r, count = x.columns - c;
  auto load = [&](bool whole) {
#pragma unroll
    for (int i = 0; i < kRun; ++i, offset += pitch) {
      const auto* p = reinterpret_cast<const uint16_t*>(tile + offset);
      const uint2 four = whole      ? load_four<kAligned>(p, 4)
                         : i < rows ? load_four<kAligned>(p, count)
                                    : uint2{};
      in[0].pair[i] = four.x;
      in[1].pair[i] = four.y;
    }
  };
  if (rows >= kRun && count >= 4)
    load(true);
  else
    load(false);
  loaded();
  const MatrixAt m = direct_matrix(s, at, memory.outer[1]);
  const Rng rng = rng_of(s);
  ColumnValues<kPass, Bf16Tile> values[2];
  values[0].take(in[0], s);
  values[1].take(in[1], s);
  uint4 amax = {values[0].amax[0], values[0].amax[1], values[1].amax[0], values[1].amax[1]};
  if constexpr (kPass.square) {
    uint32_t a = max(max(amax.x, amax.y), max(amax.z, amax.w));
#pragma unroll
    for (int step = 1; step < kBlock / kDirectLines; step *= 2) a = max(a, shuffle_xor(a, step));
    amax = {a, a, a, a};
  }
  amax = max_over_warps<kBlock>(amax, memory.column_amax + lane, 32, larger_of);
  Block b = block_of<kPass>(s, m.outer, amax.x);
  auto column = [&](auto which) {
    constexpr int kWhich = decltype(which)::value;
    const int line = first + kWhich;
    const uint32_t a = kWhich == 0 ? amax.x : kWhich == 1 ? amax.y : kWhich == 2 ? amax.z : amax.w;
    if (kWhich > 0 && !kPass.square) b = block_of<kPass>(s, m.outer, a);
    float v[kRun];
    values[kWhich / 2].template unpack<kWhich % 2>(s, v);
    const Codes codes =
        encode_run<kPass>(s, v, values[kWhich / 2].template signs<kWhich % 2>(s), b.inv,
                          bit_cast<float>(a), rng, 1, m.line + at.column + line, s.origin_pos + r);
    stage_run<kPass>(s, stage, codes, b.stored, line, g);
  };
  column(Constant<0>{});
  column(Constant<1>{});
  column(Constant<2>{});
  column(Constant<3>{});
  __syncthreads();
  store_stage<kPass, kDirectThreads>(s, m, at.column, at.row, stage);
}

// Grid: tiles down, kSideways of a row by turns; groups of kSideways tiles across; matrices.
template <class Row, class Column, bool kAligned>
__global__ void __launch_bounds__(kDirectThreads, 3)
    tiles_kernel(const __grid_constant__ TilesParams p) {
  constexpr Pass kRow = Row::kPass, kColumn = Column::kPass;
  __shared__ DirectMemory memory;
  const TileAt at{static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.x / kSideways) * kTile,
                  static_cast<int>(blockIdx.y * kSideways + blockIdx.x % kSideways) * kTile};
  if (at.column >= p.x.columns) return;
  // The outer scales, each found by one warp while the first loads are on their way.
  auto loaded = [&] {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (kRow.present() && warp == 0) memory.outer[0] = outer_of(p.row, at.batch);
    if (kColumn.present() && warp == 1) memory.outer[1] = outer_of(p.column, at.batch);
    __syncthreads();
  };
  if constexpr (kColumn.present()) {
    __shared__ Stage<kColumn> stage;
    columns_of_tile<kColumn, kAligned>(p.x, p.column, at, memory, stage, loaded);
    if constexpr (kRow.present()) rows_of_tile<kRow, kAligned>(p.x, p.row, at, memory, [] {});
  } else {
    rows_of_tile<kRow, kAligned>(p.x, p.row, at, memory, loaded);
  }
}

}  // namespace blockscale::gpu
