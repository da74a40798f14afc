// From codes back to values: x^ = fl(fl(outer * scale) * code), rounded to the output's dtype.
//
// Codes along rows go straight through registers. Codes of columns are stored transposed: a tile
// comes in by lines, through shared memory, and leaves by rows.
#include <bit>

#include "divisor.h"
#include "gpu/decode.h"
#include "gpu/launch.h"
#include "gpu/quantize.h"
#include "gpu/store.h"

namespace blockscale::gpu {
namespace {

constexpr int kDecodeThreads = 256;
constexpr int kRowLines = 4;  // of a thread along rows, one piece each
constexpr int kAcross = 4;    // tiles beside each other that are worked on at the same time

struct DequantizeParams {
  ConstQuantized q;
  StoredShape shape;
  Decoder element, scale;
  Matrix x;
  int rows, columns;
  int linear, wide_scales;  // both layouts are linear; scales are FP32
  int block_shift;          // the binary logarithm of a block
  Plan plan;                // of groups
  Divisor parts;            // pieces of work of a matrix, or of a row of tiles of a group
  Divisor runs;             // along rows: pieces of a line
  Divisor bands;            // down columns: tiles in kAcross columns of them
  uint32_t all;             // along rows: threads with work
};

// What a piece of work is part of: a matrix of the batch, or a row of tiles of a group.
struct Place {
  const uint8_t *codes, *scales;
  const float* outer;  // its outer scale, or null
  int64_t x;           // where its first element lies, from x.data on
  int row;             // the first one
  int rows, padded, code_columns, scale_columns;
};
BLOCKSCALE_DEVICE bool find(const DequantizeParams& p, uint32_t part, Place& at) {
  int batch = static_cast<int>(part);
  const StoredShape& s = p.shape;
  const int scale_bytes = p.q.spec.scale == Format::fp32 ? 4 : 1;
  if (!p.plan.head) {
    at = {p.q.codes,
          p.q.scales,
          nullptr,
          0,
          0,
          p.rows,
          static_cast<int>(s.padded),
          static_cast<int>(s.code_columns),
          static_cast<int>(s.scale_columns)};
    if (p.x.batch > 1) {
      at.codes += batch * s.code_bytes;
      at.scales += batch * s.scale_count * scale_bytes;
      at.x = batch * p.x.batch_stride;
    }
  } else {
    if (batch >= p.plan.head->tile_rows) return false;
    const TileRow row = p.plan.tile_rows[batch];
    const GroupAt g = p.plan.side[0][row.group];
    batch = row.group;
    at = {p.q.codes + g.codes,
          p.q.scales + g.scales * scale_bytes,
          nullptr,
          g.row * p.x.row_stride,
          row.row,
          g.rows,
          g.padded,
          g.code_columns,
          g.scale_columns};
  }
  if (p.q.spec.outer) at.outer = p.q.outer + batch;
  return true;
}

// The scale of a block as it is stored, and as a factor of its codes.
template <bool kLinear>
BLOCKSCALE_DEVICE uint32_t stored_scale(const DequantizeParams& p, const Place& at, int line,
                                        int block) {
  const int row = p.shape.scale_lines == 1 ? line : line >> p.block_shift;
  const int64_t i = kLinear ? static_cast<int64_t>(row) * at.scale_columns + block
                            : layout_offset_as<uint32_t>(p.q.layout.scales,
                                                         static_cast<uint32_t>(p.shape.scale_rows),
                                                         at.scale_columns, row, block);
  return p.wide_scales ? load_once(reinterpret_cast<const uint32_t*>(at.scales) + i)
                       : load_once(at.scales + i);
}
// To be loaded after the codes are on their way: the compiler waits for what all threads share.
BLOCKSCALE_DEVICE float outer_of(const Place& at) { return at.outer ? load_once(at.outer) : 1.0f; }
BLOCKSCALE_DEVICE float factor_of(const DequantizeParams& p, float outer, uint32_t stored) {
  return __fmul_rn(outer, p.wide_scales ? bit_cast<float>(stored) : p.scale.scale(stored));
}

// Where byte `byte` of a line of codes lies.
template <bool kLinear>
BLOCKSCALE_DEVICE const uint8_t* code_at(const DequantizeParams& p, const Place& at, int line,
                                         int byte) {
  if (kLinear) return at.codes + static_cast<int64_t>(line) * at.code_columns + byte;
  return at.codes + layout_offset(p.q.layout.codes, p.shape.code_rows, at.code_columns, line, byte);
}

// Stores a piece from column c on of a row that begins at element `row`. All lanes of a warp come
// here when rows start anywhere; those without a piece have a count of 0.
template <Rows kRows>
BLOCKSCALE_DEVICE void store_piece(const DequantizeParams& p, int64_t row, int c, const PieceAt& at,
                                   const float* v, bool may_be_nan) {
  const int64_t i = row + c * (kRows == Rows::any ? p.x.column_stride : 1);
  auto* to = static_cast<uint16_t*>(p.x.data) + i;
  if constexpr (kRows == Rows::anywhere) {
    store_shifted(to, to_bf16x8(v, may_be_nan), at);
  } else if constexpr (kRows == Rows::aligned) {
    const uint4 piece = to_bf16x8(v, may_be_nan);
    if (at.count >= kPiece)
      *reinterpret_cast<uint4*>(to) = piece;
    else
      store_some(to, piece, 0, at.count);
  } else {
#pragma unroll
    for (int j = 0; j < kPiece; ++j)
      if (j < at.count) store_value(p.x, i + j * p.x.column_stride, v[j]);
  }
}

// Where rows start anywhere, the first piece of a warp, or of a row of a tile, is the last of the
// one before: a lane stores what the lane before has, too.
template <Rows kRows>
constexpr int kHalo = kRows == Rows::anywhere ? 1 : 0;  // pieces

// Pieces that were stored with the conversion's NaN, one below the other, get the definition's.
BLOCKSCALE_DEVICE void define_nans(uint16_t* to, int64_t stride, int count) {
#pragma unroll 1
  for (int i = 0; i < count; ++i, to += stride) {
    auto* piece = reinterpret_cast<uint4*>(to);
    *piece = define_nan(*piece);
  }
}

// The codes and scales of pieces one below the other, of which `left` are there; all loads first.
template <class Codes>
BLOCKSCALE_DEVICE void load_linear(const DequantizeParams& p, const Place& at, int first, int c,
                                   int byte, int left, Codes* codes, uint32_t* stored) {
  const uint8_t* from = code_at<true>(p, at, first, byte);
  // The lines of a thread are of one row of a grid of square blocks.
  const bool grid = p.shape.scale_lines != 1;
  const int row = grid ? first >> p.block_shift : first;
  const int64_t scale = static_cast<int64_t>(row) * at.scale_columns + (c >> p.block_shift);
  const int step = grid ? 0 : at.scale_columns;
  int further[kRowLines];  // what stands for lines that are not there is the last that is
#pragma unroll
  for (int i = 0; i < kRowLines; ++i) {
    further[i] = min(i, left - 1);
    codes[i] = load_once(
        reinterpret_cast<const Codes*>(from + static_cast<int64_t>(further[i]) * at.code_columns));
  }
  if (p.wide_scales) {
    const auto* scales = reinterpret_cast<const uint32_t*>(at.scales) + scale;
#pragma unroll
    for (int i = 0; i < kRowLines; ++i)
      stored[i] = load_once(scales + static_cast<int64_t>(further[i]) * step);
  } else {
    const uint8_t* scales = at.scales + scale;
#pragma unroll
    for (int i = 0; i < kRowLines; ++i)
      stored[i] = load_once(scales + static_cast<int64_t>(further[i]) * step);
  }
}
template <class Codes>
BLOCKSCALE_DEVICE void load_any(const DequantizeParams& p, const Place& at, int first, int c,
                                int byte, int left, Codes* codes, uint32_t* stored) {
#pragma unroll
  for (int i = 0; i < kRowLines; ++i) {
    const int r = first + min(i, left - 1);
    codes[i] = load_once(reinterpret_cast<const Codes*>(code_at<false>(p, at, r, byte)));
    stored[i] = stored_scale<false>(p, at, r, c >> p.block_shift);
  }
}

template <Codec kCodec, Rows kRows>
__global__ void __launch_bounds__(kDecodeThreads)
    dequantize_rows_kernel(const __grid_constant__ DequantizeParams p) {
  after_previous();
  constexpr int kPerWord = codes_per_word(kCodec), kWords = kPiece / kPerWord;
  using Codes = std::conditional_t<kWords == 1, uint32_t, uint2>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t thread = blockIdx.x * kDecodeThreads + threadIdx.x;
  if (kHalo<kRows>) thread -= thread / 32 + 1;  // the first: beyond all
  uint32_t n = min(thread, p.all - 1);
  uint32_t lines = p.runs.divide(n);
  const uint32_t part = p.parts.divide(lines);
  const int c = static_cast<int>(n) * kPiece;
  Place at{};
  const bool found = thread < p.all && find(p, part, at);
  const int first = at.row + static_cast<int>(lines) * kRowLines;
  const int left = found ? at.rows - first : 0;
  if (kRows != Rows::anywhere && left <= 0) return;
  Codes codes[kRowLines] = {};
  uint32_t stored[kRowLines] = {};
  if (left > 0) {
    const int byte = kCodec == Codec::fp4 ? c / 2 : c;
    if (p.linear)
      load_linear(p, at, first, c, byte, left, codes, stored);
    else
      load_any(p, at, first, c, byte, left, codes, stored);
  }
  const float outer = outer_of(at);
  int64_t row = at.x + first * p.x.row_stride;
  const int count = kHalo<kRows> == 0 || lane > 0 ? p.columns - c : 0;
  const bool direct = kRows == Rows::aligned && count >= kPiece;
  auto* to = static_cast<uint16_t*>(p.x.data) + row + c;
  uint32_t largest = 0;
#pragma unroll
  for (int line = 0; line < kRowLines; ++line) {
    if (kRows != Rows::anywhere && line >= left) break;
    const float factor = factor_of(p, outer, stored[line]);
    float v[kPiece];
#pragma unroll
    for (int i = 0; i < kPiece / 2; ++i) {
      constexpr int kPairs = kPerWord / 2;
      const int word = i / kPairs, pair = i % kPairs;
      float two[2];
      decode_pair<kCodec>(p.element, as_fp8<kCodec>(word_of(codes[line], word), pair / 2), pair,
                          two);
      for (int j = 0; j < 2; ++j)
        v[word * kPerWord + code_of(kCodec, pair, j)] = __fmul_rn(factor, two[j]);
    }
    if (direct) {
      store_vector(to + line * p.x.row_stride, convert_bf16x8(v, largest));
    } else {
      store_piece<kRows>(p, row + line * p.x.row_stride, c, {line < left ? count : 0, c > 0}, v,
                         has_specials(kCodec) || !is_finite(factor));
    }
  }
  if (direct && has_nan(largest)) define_nans(to, p.x.row_stride, min(left, kRowLines));
}

// ---- down columns ----

// A tile: kTile positions of as many lines. Chunks are permuted so that those of every eighth line,
// as they are decoded, lie in banks of their own.
template <Codec kCodec>
struct CodeTile {
  static constexpr int kLines = kTile;
  static constexpr int kWords = kTile / codes_per_word(kCodec);  // of a line
  static constexpr int kChunks = kWords / 4;
  static constexpr int kLoads = kLines * kChunks / kDecodeThreads;  // of a thread
  static constexpr int kMostBlocks = kTile / kRun;                  // of a line
  uint4 codes[kLines * kChunks];
  float4 factors[kMostBlocks * kLines / 4];  // by block, then line

  BLOCKSCALE_DEVICE uint4& chunk(int line, int which) {
    return codes[(line * kChunks + which) ^ (line >> 3 & 7)];
  }
  BLOCKSCALE_DEVICE uint32_t word(int line, int which) const {
    const int at = (line * kChunks + which / 4) ^ (line >> 3 & 7);
    return reinterpret_cast<const uint32_t*>(codes)[4 * at + which % 4];
  }
  BLOCKSCALE_DEVICE float& factor(int line, int block) {
    return reinterpret_cast<float*>(factors)[block * kLines + line];
  }
};

// 16 bytes of a line of codes, of which `count` are there, 8 or more; `whole`: all of them can be
// read at once.
BLOCKSCALE_DEVICE uint4 load_chunk(const uint8_t* from, int count, bool whole) {
  if (whole) return load_once(reinterpret_cast<const uint4*>(from));
  const auto* half = reinterpret_cast<const uint2*>(from);
  const uint2 low = load_once(half), high = count >= 16 ? load_once(half + 1) : uint2{};
  return {low.x, low.y, high.x, high.y};
}

// The scales of `count` consecutive blocks of a line, those of a byte as the bytes of two words.
template <bool kLinear>
BLOCKSCALE_DEVICE uint2 load_scales(const DequantizeParams& p, const Place& at, int line, int block,
                                    int count) {
  if (p.wide_scales) return {stored_scale<kLinear>(p, at, line, block), 0};  // a block is kTile
  if constexpr (kLinear) {
    const uint8_t* from = at.scales + block;
    from += static_cast<int64_t>(p.shape.scale_lines == 1 ? line : line >> p.block_shift) *
            at.scale_columns;
    if (count == 8 && reinterpret_cast<uintptr_t>(from) % 8 == 0)
      return load_once(reinterpret_cast<const uint2*>(from));
    if (count == 4 && reinterpret_cast<uintptr_t>(from) % 4 == 0)
      return {load_once(reinterpret_cast<const uint32_t*>(from)), 0};
  }
  uint32_t word[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) word[i / 4] |= stored_scale<kLinear>(p, at, line, block + i) << (i % 4 * 8);
  return {word[0], word[1]};
}

// Tile n of all: which one it is, and what it becomes.
template <Codec kCodec, Rows kRows>
struct Columns {
  using Tile = CodeTile<kCodec>;
  static constexpr int kPerByte = kCodec == Codec::fp4 ? 2 : 1;
  const DequantizeParams& p;
  Tile& tile;
  Place at;
  int r, c;    // its first row and column
  bool there;  // the same for all threads of a block

  BLOCKSCALE_DEVICE Columns(const DequantizeParams& params, Tile& memory, uint32_t n)
      : p(params), tile(memory) {
    const uint32_t band = p.bands.divide(n);
    uint32_t row = n / kAcross;
    c = static_cast<int>(band * kAcross + n % kAcross) * (Tile::kLines - kHalo<kRows> * kPiece) -
        kHalo<kRows> * kPiece;
    const uint32_t part = p.parts.divide(row);
    there = c < p.columns && find(p, part, at);
    if (there) r = at.row + static_cast<int>(row) * kTile;
  }

  // ---- in ----

  BLOCKSCALE_DEVICE bool has_line(int line) const {
    return static_cast<unsigned>(c + line) < static_cast<unsigned>(p.columns);
  }
  BLOCKSCALE_DEVICE int rows() const { return min(at.padded - r, kTile); }
  BLOCKSCALE_DEVICE int blocks() const { return ((rows() - 1) >> p.block_shift) + 1; }

  BLOCKSCALE_DEVICE void load() {
    uint2 stored{};
    p.linear ? load_from<true>(stored) : load_from<false>(stored);
    const int thread = static_cast<int>(threadIdx.x);
    const float outer = outer_of(at);
    if (thread < Tile::kLines && has_line(thread)) {
      tile.factor(thread, 0) =
          factor_of(p, outer, p.wide_scales ? stored.x : permute_bytes(stored.x, 0, 0x4440));
#pragma unroll
      for (int i = 1; i < Tile::kMostBlocks; ++i)
        if (i < blocks())
          tile.factor(thread, i) =
              factor_of(p, outer, permute_bytes(i < 4 ? stored.x : stored.y, 0, 0x4440 + i % 4));
    }
    wait_for_chunks();
  }
  template <bool kLinear>
  BLOCKSCALE_DEVICE void load_from(uint2& stored) {
    const int thread = static_cast<int>(threadIdx.x);
    // Then what lies behind the codes of a line, if anything, is part of the buffer too.
    const bool aligned =
        (reinterpret_cast<uintptr_t>(at.codes) | static_cast<unsigned>(at.code_columns)) % 16 == 0;
    const int first = thread / Tile::kChunks, chunk = thread % Tile::kChunks;
    constexpr int kStep = kDecodeThreads / Tile::kChunks;
    if (kLinear && aligned && rows() == kTile && c >= 0 && c + Tile::kLines <= p.columns) {
      const uint8_t* from = code_at<true>(p, at, c + first, r / kPerByte + chunk * 16);
#pragma unroll
      for (int i = 0; i < Tile::kLoads; ++i, from += static_cast<int64_t>(kStep) * at.code_columns)
        begin_chunk(&tile.chunk(first + i * kStep, chunk), from);
    } else {
      uint4 v[Tile::kLoads];
      const int left = rows() / kPerByte - chunk * 16;
#pragma unroll
      for (int i = 0; i < Tile::kLoads; ++i) {
        const int line = first + i * kStep;
        v[i] = {};
        if (has_line(line) && left > 0)
          v[i] = load_chunk(code_at<kLinear>(p, at, c + line, r / kPerByte + chunk * 16), left,
                            aligned);
      }
#pragma unroll
      for (int i = 0; i < Tile::kLoads; ++i) tile.chunk(first + i * kStep, chunk) = v[i];
    }
    if (thread < Tile::kLines && has_line(thread))
      stored = load_scales<kLinear>(p, at, c + thread, r >> p.block_shift, blocks());
  }

  // ---- out ----

  // A thread decodes a word or two of eight lines, and stores a piece of as many rows.
  BLOCKSCALE_DEVICE void store() {
    constexpr int kPieces = Tile::kLines / kPiece, kPerWord = codes_per_word(kCodec);
    constexpr int kEach = Tile::kWords * kPieces / kDecodeThreads;  // words
    const int thread = static_cast<int>(threadIdx.x), piece = thread % kPieces;
    const int first = thread / kPieces * kEach, line = piece * kPiece;
    const int row = r + first * kPerWord, column = c + line, count = p.columns - column;
    if (kRows != Rows::anywhere && count <= 0) return;
    float factor[kPiece];
#pragma unroll
    for (int j = 0; j < kPiece; ++j)
      factor[j] = tile.factor(line + j, first * kPerWord >> p.block_shift);
    const bool whole =
        kRows == Rows::aligned && count >= kPiece && row + kEach * kPerWord <= at.rows;
    const int64_t x = at.x + row * p.x.row_stride;
    auto* to = static_cast<uint16_t*>(p.x.data) + x + column;
    uint32_t largest = 0;
#pragma unroll 1
    for (int w = 0; w < kEach; ++w) {
      uint32_t word[kPiece];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) word[j] = tile.word(line + j, first + w);
      // The rows of a pair.
      auto decode = [&](int pair, float(&v)[2][kPiece]) {
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          float two[2];
          decode_pair<kCodec>(p.element, as_fp8<kCodec>(word[j], pair / 2), pair, two);
          v[0][j] = __fmul_rn(factor[j], two[0]);
          v[1][j] = __fmul_rn(factor[j], two[1]);
        }
      };
      if (whole) {
#pragma unroll
        for (int pair = 0; pair < kPerWord / 2; ++pair) {
          float v[2][kPiece];
          decode(pair, v);
#pragma unroll
          for (int i = 0; i < 2; ++i)
            store_vector(to + code_of(kCodec, pair, i) * p.x.row_stride,
                         convert_bf16x8(v[i], largest));
        }
        to += kPerWord * p.x.row_stride;
      } else {
#pragma unroll 1
        for (int pair = 0; pair < kPerWord / 2; ++pair) {
          float v[2][kPiece];
          decode(pair, v);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int down = w * kPerWord + code_of(kCodec, pair, i);
            const bool mine = row + down < at.rows && piece >= kHalo<kRows>;
            store_piece<kRows>(p, x + down * p.x.row_stride, column, {mine ? count : 0, column > 0},
                               v[i], true);
          }
        }
      }
    }
    if (whole && has_nan(largest))
      define_nans(to - kEach * kPerWord * p.x.row_stride, p.x.row_stride, kEach * kPerWord);
  }
};

// Blocks of threads on a multiprocessor: as many as do not put registers into memory.
constexpr int kColumnBlocks = 4;

template <Codec kCodec, Rows kRows>
__global__ void __launch_bounds__(kDecodeThreads, kColumnBlocks)
    dequantize_columns_kernel(const __grid_constant__ DequantizeParams p) {
  after_previous();
  __shared__ CodeTile<kCodec> tile;
  Columns<kCodec, kRows> columns(p, tile, blockIdx.x);
  if (!columns.there) return;
  columns.load();
  __syncthreads();
  columns.store();
}

// Rows of no group are 0; where offsets are wrong, everything is NaN.
__global__ void __launch_bounds__(kDecodeThreads)
    clear_rows_kernel(const __grid_constant__ DequantizeParams p) {
  after_previous();
  const float value = p.plan.head->bad ? bit_cast<float>(kNanBits) : 0.0f;
  const int first = p.plan.side[0][p.plan.count].row;
  const int64_t count = static_cast<int64_t>(p.rows - first) * p.columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kDecodeThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kDecodeThreads) + threadIdx.x; i < count;
       i += step)
    store_value(p.x, (first + i / p.columns) * p.x.row_stride + i % p.columns * p.x.column_stride,
                value);
}

template <Codec kCodec, Rows kRows>
void launch(DequantizeParams& p, NativeStream stream) {
  const bool groups = p.plan.head, along = p.q.axis == -1;
  // Rows of tiles in all, and where there are groups the most that there can be.
  const int64_t tiles_down = ceil_div(p.rows, kTile);
  const int64_t tile_rows = groups ? p.plan.most_tile_rows : tiles_down * p.x.batch;
  if (along) {
    const int64_t runs = ceil_div(p.columns, kPiece);
    const int64_t each = groups ? kTile / kRowLines : ceil_div(p.rows, kRowLines);
    const int64_t all = runs * each * (groups ? tile_rows : p.x.batch);
    p.runs = Divisor(runs), p.parts = Divisor(each);
    p.all = static_cast<uint32_t>(all);
    constexpr int kPieces = kDecodeThreads / 32 * (32 - kHalo<kRows>);  // of a block of threads
    start(dequantize_rows_kernel<kCodec, kRows>, static_cast<unsigned>(ceil_div(all, kPieces)),
          kDecodeThreads, 0, stream, p);
  } else {
    const int64_t bands =
        ceil_div(p.columns, (CodeTile<kCodec>::kLines - kHalo<kRows> * kPiece) * kAcross);
    const int64_t all = bands * tile_rows * kAcross;
    p.bands = Divisor(tile_rows * kAcross), p.parts = Divisor(groups ? 1 : tiles_down);
    start(dequantize_columns_kernel<kCodec, kRows>, static_cast<unsigned>(all), kDecodeThreads, 0,
          stream, p);
  }
  if (groups) start(clear_rows_kernel, 512, kDecodeThreads, 0, stream, p);
}
using Launcher = void (*)(DequantizeParams&, NativeStream);

template <Rows kRows>
Launcher launcher_of(Format element) {
  if (element == Format::e2m1) return launch<Codec::fp4, kRows>;
  if constexpr (kRows != Rows::any) {
    if (element == Format::e2m3) return launch<Codec::e2m3, kRows>;
    if (element == Format::e3m2) return launch<Codec::e3m2, kRows>;
    if (element == Format::e4m3fn) return launch<Codec::e4m3fn, kRows>;
    if (element == Format::e5m2) return launch<Codec::e5m2, kRows>;
  }
  return launch<Codec::any, kRows>;
}

}  // namespace

void dequantize(const ConstQuantized& q, const Matrix& x, const Stream& stream) {
  if (x.rows * x.columns * x.batch == 0) return;
  DequantizeParams p{};
  p.q = q, p.shape = q.shape(), p.x = x;
  p.element = Decoder::of(q.spec.element), p.scale = Decoder::of(q.spec.scale);
  p.rows = static_cast<int>(x.rows), p.columns = static_cast<int>(x.columns);
  p.block_shift = std::countr_zero(q.spec.block);
  if (q.groups) p.plan = make_plan(q.groups, x.rows, x.columns, &q, nullptr, false, stream);
  p.linear = q.layout == StorageLayout{}, p.wide_scales = q.spec.scale == Format::fp32;
  const ConstMatrix to = as_const(x);
  const Launcher run = !is_bf16_rows(to) ? launcher_of<Rows::any>(q.spec.element)
                       : is_aligned(to)  ? launcher_of<Rows::aligned>(q.spec.element)
                                         : launcher_of<Rows::anywhere>(q.spec.element);
  run(p, native(stream));
  check_launch("dequantize");
}

}  // namespace blockscale::gpu
