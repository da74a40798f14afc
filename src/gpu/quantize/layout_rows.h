// Quantizing rows into layouts that store together what lies several lines apart in the matrix:
// each thread takes eight lines whose scales are adjacent, and it and its neighbours join their
// parts of a sector before storing it. Line by line, the sector would be written byte by byte.
#pragma once

#include "gpu/quantize/direct.h"

namespace blockscale::gpu {

inline constexpr int kJoinedLines = 8;

// Offsets of one such line from the first: in lines, and in bytes of the input, of codes, and of
// scales in linear layouts.
struct alignas(16) LineAt {
  uint32_t line, x, codes, scale;
};
// Which lines a thread takes. A layout stores lines that are one run apart next to each other, as
// many as a tile has runs, and then the next line of each run (LayoutTraits).
struct LineOrder {
  int runs_shift, sets_shift;  // log2 of the runs per tile, and of the threads per tile
  int run_rows;

  // First line of a set of eight lines; sets are counted from the first tile.
  BLOCKSCALE_HD constexpr int first(uint32_t set) const {
    const uint32_t tile = set >> sets_shift, within = set - (tile << sets_shift);
    return static_cast<int>((tile << sets_shift) * kJoinedLines +
                            within * (kJoinedLines >> runs_shift));
  }
  constexpr uint32_t line(int i) const {
    return static_cast<uint32_t>(i % (1 << runs_shift) * run_rows + (i >> runs_shift));
  }
  // The number of sets, for whole tiles.
  constexpr int64_t sets(int64_t lines) const {
    return ceil_div(lines, int64_t{kJoinedLines} << sets_shift) << sets_shift;
  }
};
constexpr LineOrder line_order(Layout scales) {
  const LayoutTraits t = traits(scales);
  const auto log2 = [](int n) { return std::countr_zero(static_cast<unsigned>(n)); };
  return {log2(t.tile_rows / t.run_rows), log2(std::max(t.tile_rows / kJoinedLines, 1)),
          t.run_rows};
}

// What JoinedLines assumes of the layouts: where a thread's lines lie, in order, with its
// neighbours' blocks next to them.
static_assert([] {
  constexpr Layout nv = Layout::nv_128x4, aiter = Layout::aiter_scale;
  for (int i = 0; i < kJoinedLines; ++i)
    for (int b = 0; b < 8; ++b) {
      const auto at = [&](Layout l) { return layout_offset(l, 256, 8, line_order(l).line(i), b); };
      if (at(nv) != b / 4 * 512 + i * 4 + b % 4) return false;
      if (at(aiter) != b % 4 * 64 + i / 2 * 4 + b / 4 * 2 + i % 2) return false;
    }
  return layout_offset(Layout::mfma_16x16, 16, 32, 1, 8) == 16 + 8;
}());

struct LayoutRowsParams {
  Source x;
  Side row;
  LineOrder order;
  LineAt lines[kJoinedLines];
  // Whether codes are joined (two runs of two lines, adjacent in mfma_16x16) and scales are linear;
  // otherwise scales are joined.
  int joins_codes;
  Divisor runs;  // per line
  uint32_t all;  // threads with work: runs per line times sets of lines

  LayoutRowsParams(const Source& source, const Side& s)
      : x(source),
        row(s),
        order(line_order(s.out.layout.scales)),
        joins_codes(s.linear_scales && !s.linear_codes),
        runs(s.padded / kRun),
        all(static_cast<uint32_t>(s.padded / kRun * order.sets(s.lines))) {
    const RowSteps codes = row_steps(s.out.layout.codes, s.line_bytes);
    for (int i = 0; i < kJoinedLines; ++i) {
      const uint32_t line = order.line(i);
      lines[i] = {line, line * static_cast<uint32_t>(2 * x.row_stride),
                  static_cast<uint32_t>(codes.at(line)),
                  line * static_cast<uint32_t>(s.scale_columns)};
    }
  }
};

// Reads the runs at `pos` of a thread's lines; for lines that do not exist, some other run.
struct OrderedReader {
  using Tile = Bf16Tile;
  using Run = RunAligned;
  const uint8_t* at;
  const LayoutRowsParams& p;
  int count, there;  // elements from `pos` on; lines from the first on
  int i = 0;

  BLOCKSCALE_DEVICE OrderedReader(const LayoutRowsParams& p, int batch, int line, int pos,
                                  int there)
      : p(p), count(p.x.columns - pos), there(there) {
    at = static_cast<const uint8_t*>(p.x.data) +
         2 * (batch * p.x.batch_stride + (there > 0 ? line : 0) * p.x.row_stride + pos);
    keep(at);
  }
  BLOCKSCALE_DEVICE Run next() {
    const LineAt& line = p.lines[min(i++, kJoinedLines - 1)];
    const uint8_t* run = at + (static_cast<int>(line.line) < there ? line.x : 0);
    return load_aligned(reinterpret_cast<const uint16_t*>(run), count);
  }
};

// Takes the results of these runs, line by line, and stores them.
template <Pass kPass>
struct JoinedLines {
  static constexpr int kRuns = kPass.block() / kRun;  // per block
  const LayoutRowsParams& p;
  uint8_t *codes, *scale;  // of the first line; scale: in linear layouts
  int first, there, pos;   // `there` lines from the first on exist
  Codes even;              // of the previous line
  uint32_t even_scale;
  uint32_t scales[2] = {};  // of four lines each

  BLOCKSCALE_DEVICE JoinedLines(const LayoutRowsParams& p, const MatrixAt& m, int line, int there,
                                int pos)
      : p(p), first(line), there(there), pos(pos) {
    const Side& s = p.row;
    codes = codes_at<kPass>(s, m, line, pos) + (p.joins_codes ? 8 * second() : 0);
    scale = m.scales + linear_offset(line, s.scale_columns, block());
    keep(codes);
    keep(scale);
  }
  BLOCKSCALE_DEVICE int block() const { return pos / kPass.block(); }
  // Whether this is the second of two adjacent runs.
  BLOCKSCALE_DEVICE int second() const { return pos / kRun % 2; }
  BLOCKSCALE_DEVICE int line(int i) const { return first + static_cast<int>(p.lines[i].line); }
  BLOCKSCALE_DEVICE bool there_is(int i) const { return static_cast<int>(p.lines[i].line) < there; }

  template <class Odd>
  BLOCKSCALE_DEVICE void store(const Side& s, const MatrixAt&, const Codes& now, const Block& b,
                               int i, Odd) {
    const bool is_there = there_is(i);
    uint32_t stored = b.stored;
    if (p.joins_codes) {
      if (is_there && pos % kPass.block() == 0)
        scale[p.lines[i].scale] = static_cast<uint8_t>(stored);
    } else {
      if (!is_there) stored = padding_fill(s.out.layout.scales, kPass.scale);
      if (is_there) store_codes<kPass>(codes + p.lines[i].codes, s, now);
    }
    if constexpr (!Odd::value) {
      even = now;
      even_scale = stored;
    } else if (p.joins_codes) {
      store_two_lines(now, i - 1);
    } else {
      scales[0] = permute_bytes(scales[0], scales[1], 0x5432);
      scales[1] = permute_bytes(scales[1], permute_bytes(even_scale, stored, 0x0040), 0x5432);
    }
  }
  // The first of two threads stores the first of two lines, the second thread the other.
  BLOCKSCALE_DEVICE void store_two_lines(const Codes& odd, int i) {
    const bool other = second();
    uint4 joined;
    uint32_t* const words = reinterpret_cast<uint32_t*>(&joined);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const uint32_t kept = other ? odd.word[w] : even.word[w];
      const uint32_t given = shuffle_xor(other ? even.word[w] : odd.word[w], 1);
      words[w] = other ? given : kept;
      words[2 + w] = other ? kept : given;
    }
    if (i + second() < there) *reinterpret_cast<uint4*>(codes + p.lines[i].codes) = joined;
  }
  // After the last line: stores eight adjacent bytes, out of the 32 that four blocks of the lines
  // fill together (nv_128x4), or out of the 16 that two blocks fill (aiter_scale).
  BLOCKSCALE_DEVICE void store_scales(const Side& s, const MatrixAt& m) const {
    if (p.joins_codes) return;
    const bool nv = s.out.layout.scales == Layout::nv_128x4;
    const int apart = nv ? 2 : 4;
    const bool high = block() & apart;
    // Four lines of two blocks that lie `apart` blocks apart.
    const uint32_t mine = high ? scales[1] : scales[0];
    const uint32_t given = shuffle_xor(high ? scales[0] : scales[1], apart * kRuns);
    uint32_t low = high ? given : mine, upper = high ? mine : given;
    const int from = high ? kJoinedLines / 2 >> p.order.runs_shift : 0;
    uint32_t column;
    uint2 joined;
    if (nv) {
      // Two lines of four blocks.
      const bool odd = block() % 2;
      const uint32_t kept = permute_bytes(low, upper, odd ? 0x7632 : 0x5410);
      const uint32_t other = shuffle_xor(permute_bytes(low, upper, odd ? 0x5410 : 0x7632), kRuns);
      low = odd ? other : kept, upper = odd ? kept : other;
      joined = {permute_bytes(low, upper, 0x6240), permute_bytes(low, upper, 0x7351)};
      column = layout_column_as<uint32_t>(Layout::nv_128x4, 0, block() & ~3) + (odd ? 8 : 0);
    } else {
      joined = {permute_bytes(low, upper, 0x5410), permute_bytes(low, upper, 0x7632)};
      column = layout_column_as<uint32_t>(Layout::aiter_scale, 0, block() & ~4);
    }
    if (from < there && pos % kPass.block() == 0)
      *reinterpret_cast<uint2*>(m.scales + (s.scale_steps.at(first + from) + column)) = joined;
  }
};

// Quantizes a thread's eight runs into one-byte codes, loading four runs at a time.
template <Pass kPass>
BLOCKSCALE_DEVICE void quantize_byte_lines(OrderedReader& reader, const Side& s, const MatrixAt& m,
                                           JoinedLines<kPass>& lines) {
  const RandomRuns random = random_runs<kPass>(s, m, 0, lines.pos);
#pragma unroll 1
  for (int first = 0; first < kJoinedLines; first += kDirectLines) {
    RunAligned runs[kDirectLines];
#pragma unroll
    for (RunAligned& run : runs) run = reader.next();
    const auto quantize = [&](const RunAligned& run, int i, auto odd) {
      RowValues<kPass, Bf16Tile> values;
      values.take(run.elements(), s);
      const Block b = block_of<kPass>(s, m.outer, row_block_amax<kPass>(s, values.amax));
      const Codes codes = encode_row_run<kPass>(s, m, random, values, b, lines.line(i));
      lines.store(s, m, codes, b, i, odd);
    };
#pragma unroll
    for (int i = 0; i < kDirectLines; i += 2) {
      quantize(runs[i], first + i, std::false_type{});
      quantize(runs[i + 1], first + i + 1, std::true_type{});
    }
  }
}

// Whether neighbouring threads hold the parts to be joined, and stores are aligned to their size.
template <Pass kPass>
bool joins_lines(const Side& s) {
  const bool linear = s.linear_scales;
  const int runs = s.padded / kRun, together = s.out.layout.scales == Layout::nv_128x4 ? 4 : 8;
  const auto at = [](const uint8_t* p) { return reinterpret_cast<uintptr_t>(p); };
  constexpr int64_t kFar = int64_t{1} << 32;  // beyond line offsets
  return !s.plain && kTile * int64_t{s.line_bytes} < kFar &&
         runs % (linear ? 2 : together * JoinedLines<kPass>::kRuns) == 0 &&
         at(s.out.scales) % (linear ? 1 : sizeof(uint2)) == 0 &&
         at(s.out.codes) % (linear ? sizeof(uint4) : 1) == 0;
}

template <class Row>
__global__ void __launch_bounds__(kDirectThreads, (kRowBlocks<Row::kPass, Bf16In<true>>))
    layout_rows_kernel(const __grid_constant__ LayoutRowsParams p) {
  after_previous(p);
  constexpr Pass kPass = Row::kPass;
  const Side& s = p.row;
  const int batch = static_cast<int>(blockIdx.y);
  const uint32_t n = blockIdx.x * kDirectThreads + threadIdx.x, at = min(n, p.all - 1);
  const uint32_t set = p.runs.quotient(at);
  int line = p.order.first(set), there = n < p.all ? s.lines - line : 0;
  keep_here(line);
  keep_here(there);
  const int pos = static_cast<int>(at - set * p.runs.by()) * kRun;
  OrderedReader reader(p, batch, line, pos, there);
  if constexpr (kPass.fp4()) {
    const RunAligned first = reader.next();
    const MatrixAt m = matrix_at(s, batch, outer_of(s, batch));
    if (s.out.spec.outer && n == 0) s.out.outer[batch] = m.outer.dec;
    JoinedLines<kPass> joined(p, m, line, there, pos);
    quantize_fp4_lines<kPass>(reader, first, s, m, joined, pos, kJoinedLines);
    joined.store_scales(s, m);
  } else {
    const MatrixAt m = matrix_at(s, batch, no_outer());
    JoinedLines<kPass> joined(p, m, line, there, pos);
    quantize_byte_lines<kPass>(reader, s, m, joined);
    joined.store_scales(s, m);
  }
}

}  // namespace blockscale::gpu
