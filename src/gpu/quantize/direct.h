// Quantizing rows straight from global memory: each thread loads what it works on, so that it waits
// only for its own loads, and the hardware hands out the work in small pieces, on odd and small
// shapes too.
//
// Along rows, a thread takes one run of each of up to 24 lines, or of four lines for FP8. Down
// columns, with square blocks, and for both directions at once, a thread block takes a tile of 128
// x 128; the columns leave it in shared memory for the rows.
#pragma once

#include "divisor.h"
#include "gpu/quantize/floats.h"
#include "gpu/quantize/rows.h"

namespace blockscale::gpu {

inline constexpr int kDirectThreads = 256;
inline constexpr int kDirectLines = 4;  // per thread in a tile, and at once for FP8
// This many adjacent tiles of a row are worked on in turn.
inline constexpr int kSidewaysShift = 3, kSideways = 1 << kSidewaysShift;

struct RowsParams {
  Source x;
  Side row;
  Groups groups;  // of rows, where the kernel is compiled for them
  Divisor runs;   // per line
  uint32_t all;   // threads with work: runs per line times groups of lines
  int each;       // lines per thread: fewer where there is little to do
};

// Reads the runs at `pos` of a thread's lines, one after another from `line` on; `lines` of them
// exist. In place of the others, it reads some run that does.
template <bool kAligned>
struct LineReader {
  using Tile = Bf16Tile;
  using Run = std::conditional_t<kAligned, RunAligned, RunAround>;
  const uint16_t* at;
  int64_t stride;
  int count, left;
  int most, least;  // `left` for which all chunks around a run lie in the matrix

  BLOCKSCALE_DEVICE LineReader(const Source& x, int batch, int line, int pos, int lines)
      : stride(x.row_stride), count(x.columns - pos), left(lines) {
    const auto* matrix = static_cast<const uint16_t*>(x.data) + batch * x.batch_stride;
    at = matrix + (lines > 0 ? line : 0) * stride + pos;
    if constexpr (!kAligned) {
      constexpr int kNone = 1 << 30;
      const int64_t first = at - matrix, last = first + max(lines - 1, 0) * stride;
      const int64_t end = (x.rows - 1) * stride + x.columns - 24;
      most = first >= 7 ? lines : stride >= 7 && lines > 1 ? lines - 1 : -kNone;
      least = last <= end ? -kNone : last - stride <= end ? 2 : kNone;
    }
    keep(at);
  }
  BLOCKSCALE_DEVICE Run next() {
    Run run;
    if constexpr (kAligned) {
      run = load_aligned(at, count);
    } else {
      const bool inside = left <= most && left >= least;
      run = load_around(at, inside || left > 0 ? count : 0, inside);
    }
    if (--left > 0) at += stride;
    return run;
  }
};
// The input: BF16, with rows that start at multiples of 16 bytes or anywhere, or FP32 or FP16.
template <bool kAligned>
struct Bf16In {
  static constexpr bool kFloats = false;
  static constexpr bool kAround = !kAligned;  // tiles come as TileAround
  using Tile = Bf16Tile;
  using Reader = LineReader<kAligned>;
  using Kept = KeptTile;
  using KeptReader = gpu::KeptReader;

  // Moves the start of the input to row `rows`.
  BLOCKSCALE_DEVICE static void skip(Source& x, int64_t rows) {
    x.data = static_cast<const uint16_t*>(x.data) + rows * x.row_stride;
  }
};
struct FloatsIn {
  static constexpr bool kFloats = true;
  static constexpr bool kAround = false;
  using Tile = FloatTile;
  using Reader = FloatReader;
  using Kept = KeptFloats;
  using KeptReader = KeptFloatReader;

  BLOCKSCALE_DEVICE static void skip(Source& x, int64_t rows) {
    x.data = static_cast<const uint8_t*>(x.data) + rows * FloatMemory(x).pitch;
  }
};

// Stores one-byte scales of four lines. Eight threads have four blocks of each line, two threads
// per block; they exchange scales until each has a word of one line.
BLOCKSCALE_DEVICE void store_scales_aside(const Side& s, const MatrixAt& m, const Block* b,
                                          int line, int pos) {
  const int run = pos / kRun % kRunsPerLine, mine = run / 2;
  uint32_t word = permute_bytes(permute_bytes(b[0].stored, b[1].stored, 0x0040),
                                permute_bytes(b[2].stored, b[3].stored, 0x0040), 0x5410);
  // Lines 0 and 1, or 2 and 3, of blocks two apart; then one line of all four.
  word = permute_bytes(word, shuffle_xor(word, 4), mine & 2 ? 0x3276 : 0x5410);
  word = permute_bytes(word, shuffle_xor(word, 2), mine & 1 ? 0x3715 : 0x6240);
  if (run % 2 == 0 && line + mine < s.lines) store_aside(s, m, line + mine, pos / kTile, word);
}

// Rows of groups in linear layouts, and widened ones, lie where they would without groups, so that
// one matrix is quantized: all that matters is where the last group ends and, for outer scales,
// which group a line is in.
template <Pass kPass>
struct LineGroups : MatrixAt {
  Groups groups;
  int end = 0;           // rows of all groups
  bool wrong;            // offsets decrease or pass the end: no row is in a group, results are NaN
  int next = 0;          // the group after the one whose outer scale this has
  int end_of_group = 0;  // where the group of that outer scale ends

  // For a thread that starts at `line`; the threads of a warp start in line order.
  BLOCKSCALE_DEVICE LineGroups(const Side& s, const Groups& g, int line)
      : MatrixAt(matrix_at(s, 0, no_outer())), groups(g) {
    const uint32_t first = ~warp_max(~static_cast<uint32_t>(line));
    uint32_t last = 0;
#pragma unroll 1
    for (int base = 0; base < static_cast<int>(groups.count); base += 32) {
      const WarpEnds ends(groups, base, s.lines);
      last = max(last, ends.wrong ? ~0u : static_cast<uint32_t>(ends.end));
      if (kPass.two_level())
        next += static_cast<int>(warp_sum(static_cast<uint32_t>(ends.end) <= first));
    }
    last = warp_max(last);
    wrong = last == ~0u;
    if (!wrong) end = static_cast<int>(last);
  }
  // Advances to a line that is in a group.
  BLOCKSCALE_DEVICE void to_line(const Side& s, int line) {
    if constexpr (kPass.two_level()) {
      if (line < end_of_group) return;
      do end_of_group = static_cast<int>(groups.end(next++));
      while (line >= end_of_group);
      outer = outer_of(s, next - 1);
    }
  }
};
template <Pass kPass>
BLOCKSCALE_DEVICE void to_line(const MatrixAt&, const Side&, int) {}
template <Pass kPass>
BLOCKSCALE_DEVICE void to_line(LineGroups<kPass>& m, const Side& s, int line) {
  m.to_line(s, line);
}

// A thread's lines, one below the other, from `line` on.
template <Pass kPass>
struct LinesInTurn {
  RowTarget<kPass> target;
  int first, lines, pos;

  BLOCKSCALE_DEVICE LinesInTurn(const Side& s, const MatrixAt& m, int line, int lines, int pos)
      : target(s, m, line, pos), first(line), lines(lines), pos(pos) {}
  BLOCKSCALE_DEVICE int line(int i) const { return first + i; }
  BLOCKSCALE_DEVICE bool there_is(int i) const { return i < lines; }
  template <class Odd>
  BLOCKSCALE_DEVICE void store(const Side& s, const MatrixAt& m, const Codes& codes, const Block& b,
                               int i, Odd) {
    store_row<kPass>(s, m, codes, b, there_is(i), line(i), pos, target);
    target.advance(s);
  }
};

// Quantizes `each` runs of FP4, an even number; the first is already being loaded. `lines` knows
// which lines they are in, and stores the results. There is enough work to hide the loads of one
// line behind the previous line, and too much code to repeat it for more than two lines.
template <Pass kPass, class Reader, class Matrix, class Lines>
BLOCKSCALE_DEVICE void quantize_fp4_lines(Reader& reader, typename Reader::Run even, const Side& s,
                                          Matrix& m, Lines& lines, int pos, int each) {
  using Values = RowValues<kPass, typename Reader::Tile>;
  const RandomRuns random = random_runs<kPass>(s, m, 0, pos);
  auto quantize = [&](const typename Reader::Run& run, int i, auto odd) {
    Values values;
    values.take(run.elements(), s);
    const uint32_t amax = row_block_amax<kPass>(s, values.amax);
    if (lines.there_is(i)) to_line<kPass>(m, s, lines.line(i));
    float v[kRun];
    // With a transform, registers would spill.
    constexpr bool kAhead = kPass.encoder == Encoder::fp4_stochastic && !kPass.hadamard;
    Block b = block_of_run<kPass, kAhead>(
        s, m.outer, amax, [&](Block& unusual) { values.cut(s, unusual); },
        [&](float* to) { values.unpack(s, to); }, v);
    Codes codes = encode_run<kPass>(s, v, values.signs(s), b.inv, random, m.line + lines.line(i));
    if constexpr (kPass.widened) widen_row<kPass>(codes, b);
    lines.store(s, m, codes, b, i, odd);
  };
#pragma unroll 1
  for (int i = 0; i < each; i += 2) {
    const typename Reader::Run odd = reader.next();
    quantize(even, i, std::false_type{});
    even = reader.next();
    quantize(odd, i + 1, std::true_type{});
  }
}

// Quantizes at most `each` runs of a reader; FP8 loads all of them before it begins. loaded()
// returns the matrix, after the first loads are issued; from then on `lines` is known. With kAside,
// scales may go to the workspace: that code, even when not run, costs rows alone up to 4%.
template <Pass kPass, bool kAside, class Reader, class Loaded>
BLOCKSCALE_DEVICE void quantize_lines(Reader reader, const Side& s, int line, int pos,
                                      const int& lines, int each, const Loaded& loaded) {
  using Values = RowValues<kPass, typename Reader::Tile>;
  if constexpr (kPass.fp4()) {
    const typename Reader::Run first = reader.next();
    auto m = loaded();
    LinesInTurn<kPass> in_turn(s, m, line, lines, pos);
    quantize_fp4_lines<kPass>(reader, first, s, m, in_turn, pos, each);
    if constexpr (kPass.widened) pad_widened(s, m, line, min(lines, each), pos);
  } else {
    typename Reader::Run runs[kDirectLines];
#pragma unroll
    for (int i = 0; i < kDirectLines; ++i) runs[i] = reader.next();
    const MatrixAt m = loaded();
    const RandomRuns random = random_runs<kPass>(s, m, 0, pos);
    RowTarget<kPass> to(s, m, line, pos);
    Values values[kDirectLines];
    uint32_t amax[kDirectLines];
#pragma unroll
    for (int i = 0; i < kDirectLines; ++i) {
      values[i].take(runs[i].elements(), s);
      amax[i] = row_block_amax<kPass>(s, values[i].amax);
    }
    if constexpr (kPass.scale == Format::fp32) {
      // Eight threads share the blocks of the same four lines: each finds one of the scales.
      static_assert(kPass.block() == kRunsPerLine * kRun && kDirectLines == 4);
      const int mine = static_cast<int>(threadIdx.x) % kDirectLines;
      const uint32_t low = mine % 2 == 0 ? amax[0] : amax[1];
      const uint32_t high = mine % 2 == 0 ? amax[2] : amax[3];
      const Block b = block_of<kPass>(s, m.outer, mine < 2 ? low : high);
      if (mine < lines && pos / kRun % kRunsPerLine < kDirectLines)
        store_scale<kPass>(s, m, line + mine, pos / kPass.block(), b.stored);
#pragma unroll
      for (int i = 0; i < kDirectLines; ++i, to.advance(s)) {
        const float inv = bit_cast<float>(shuffle_xor(bit_cast<uint32_t>(b.inv), mine ^ i));
        if (i < lines)
          store_row_codes<kPass>(s, m, random, values[i], Block{inv, 0}, line + i, pos, to);
      }
    } else if (kAside && goes_aside<kPass>(s)) {
      Block b[kDirectLines];
#pragma unroll
      for (int i = 0; i < kDirectLines; ++i) b[i] = block_of<kPass>(s, m.outer, amax[i]);
      store_scales_aside(s, m, b, line, pos);
#pragma unroll
      for (int i = 0; i < kDirectLines; ++i, to.advance(s))
        if (i < lines) store_row_codes<kPass>(s, m, random, values[i], b[i], line + i, pos, to);
    } else {
#pragma unroll
      for (int i = 0; i < kDirectLines; ++i, to.advance(s))
        if (i < lines)
          store_row_run<kPass>(s, m, random, values[i], block_of<kPass>(s, m.outer, amax[i]),
                               line + i, pos, to);
    }
  }
}

// Resident thread blocks per multiprocessor.
template <Pass kPass, class In>
inline constexpr int kRowBlocks = (kPass.fp4() ? 4 : 3) - In::kFloats;

// Fills lines after the last group: with padding, or NaN.
template <Pass kPass>
BLOCKSCALE_DEVICE void fill_lines(const Side& s, const LineGroups<kPass>& m, int line, int pos,
                                  int first, int lines) {
  const uint32_t scale = m.wrong ? nan_block<kPass.stored_scale()>().stored : 0;
  for (int i = max(first, 0); i < lines; ++i) {
    if (pos % kPass.stored_block() == 0)
      store_scale<kPass>(s, m, line + i, pos / kPass.stored_block(), scale);
    store_codes<kPass>(codes_at<kPass>(s, m, line + i, pos), s, Codes{});
  }
}

template <class Row, class In, bool kGrouped>
__global__ void __launch_bounds__(kDirectThreads, (kRowBlocks<Row::kPass, In>))
    rows_kernel(const __grid_constant__ RowsParams p) {
  after_previous(p);
  const Side& s = p.row;
  const int batch = static_cast<int>(blockIdx.y);
  const uint32_t n = blockIdx.x * kDirectThreads + threadIdx.x, at = min(n, p.all - 1);
  const uint32_t group = p.runs.quotient(at);
  const int line = static_cast<int>(group) * p.each;
  const int pos = static_cast<int>(at - group * p.runs.by()) * kRun;
  const int there = n < p.all ? min(s.lines - line, p.each) : 0;
  const typename In::Reader reader(p.x, batch, line, pos, there);
  if constexpr (kGrouped) {
    using Lines = LineGroups<Row::kPass>;
    int lines = 0;
    quantize_lines<Row::kPass, false>(reader, s, line, pos, lines, p.each, [&] {
      const Lines m(s, p.groups, line);
      lines = min(m.end - line, there);
      return m;
    });
    // Few warps have more to do: lines after the groups to fill, or outer scales to store.
    const auto count = static_cast<uint32_t>(p.groups.count);
    if (warp_max(lines < there || n < count) == 0) return;
    const Lines m(s, p.groups, line);
    fill_lines<Row::kPass>(s, m, line, pos, lines, there);
    if (s.out.spec.outer)
      for (uint32_t g = n; g < count; g += p.all)
        s.out.outer[g] = m.wrong ? bit_cast<float>(kNanBits) : outer_of(s, g).dec;
    return;
  }
  quantize_lines<Row::kPass, false>(reader, s, line, pos, there, p.each, [&] {
    // Every thread computes the outer scale itself: a barrier would cost more.
    const MatrixAt m = matrix_at(s, batch, outer_of(s, batch));
    if (s.out.spec.outer && n == 0) s.out.outer[batch] = m.outer.dec;
    return m;
  });
}

}  // namespace blockscale::gpu
