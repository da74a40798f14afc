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
    at = {p.q.codes + batch * s.code_bytes,
          p.q.scales + batch * s.scale_count * scale_bytes,
          nullptr,
          batch * p.x.batch_stride,
          0,
          p.rows,
          static_cast<int>(s.padded),
          static_cast<int>(s.code_columns),
          static_cast<int>(s.scale_columns)};
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

// The codes and scales of pieces one below the other, of which `left` are there; all loads first.
template <class Codes>
BLOCKSCALE_DEVICE void load_linear(const DequantizeParams& p, const Place& at, int first, int c,
                                   int byte, int left, Codes* codes, uint32_t* stored) {
  const uint8_t* from = code_at<true>(p, at, first, byte);
  // The lines of a thread are of one row of a grid of square blocks.
  const bool grid = p.shape.scale_lines != 1;
  const int row = grid ? first >> p.block_shift : first, scale_bytes = p.wide_scales ? 4 : 1;
  const uint8_t* scales =
      at.scales +
      (static_cast<int64_t>(row) * at.scale_columns + (c >> p.block_shift)) * scale_bytes;
  const int64_t step = grid ? 0 : static_cast<int64_t>(at.scale_columns) * scale_bytes;
#pragma unroll
  for (int i = 0; i < kRowLines; ++i) {
    codes[i] = load_once(reinterpret_cast<const Codes*>(from));
    stored[i] =
        p.wide_scales ? load_once(reinterpret_cast<const uint32_t*>(scales)) : load_once(scales);
    if (i + 1 < left) from += at.code_columns, scales += step;
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
  const uint32_t thread = blockIdx.x * kDecodeThreads + threadIdx.x;
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
    const int lane = static_cast<int>(threadIdx.x) % 32, count = line < left ? p.columns - c : 0;
    store_piece<kRows>(p, row, c, {count, lane > 0 && c > 0, lane == 31}, v,
                       has_specials(kCodec) || !is_finite(factor));
    row += p.x.row_stride;
  }
}

// ---- down columns ----

// A tile: kTile positions of as many lines as make 16 KB of codes. Words are permuted so that
// neither the chunks of a line, as they come in, nor a word of every eighth line, as they are
// decoded, share banks.
template <Codec kCodec>
struct CodeTile {
  static constexpr int kWords = kTile / codes_per_word(kCodec);  // of a line
  static constexpr int kChunks = kWords / 4;
  static constexpr int kLines = 4096 / kWords;
  static constexpr int kLoads = kLines * kChunks / kDecodeThreads;  // of a thread
  static constexpr int kMostBlocks = kTile / kRun;                  // of a line
  uint4 codes[kLines * kChunks];
  float4 factors[kMostBlocks * kLines / 4];  // by block, then line

  BLOCKSCALE_DEVICE void put(int line, int chunk, uint4 v) {
    const int turn = line >> 3 & 3;
    if (turn & 1) v = {v.y, v.x, v.w, v.z};
    if (turn & 2) v = {v.z, v.w, v.x, v.y};
    codes[(line * kChunks + chunk) ^ (line >> 5)] = v;
  }
  BLOCKSCALE_DEVICE uint32_t word(int line, int which) const {
    return reinterpret_cast<const uint32_t*>(codes)[(line * kWords + which) ^ (line >> 3)];
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

// A tile on its way: where it lies, and what a thread brings of it, in registers.
template <Codec kCodec>
struct Ahead {
  using Tile = CodeTile<kCodec>;
  Place at;
  int r, c;    // its first row and column
  bool there;  // the same for all threads of a block
  uint4 chunk[Tile::kLoads];
  uint2 stored;

  BLOCKSCALE_DEVICE int lines(const DequantizeParams& p) const {
    return min(p.columns - c, Tile::kLines);
  }
  BLOCKSCALE_DEVICE int rows() const { return min(at.padded - r, kTile); }
  BLOCKSCALE_DEVICE int blocks(const DequantizeParams& p) const {
    return ((rows() - 1) >> p.block_shift) + 1;
  }
  // Tile n; no load waits for another.
  BLOCKSCALE_DEVICE void load(const DequantizeParams& p, uint32_t n) {
    const uint32_t band = p.bands.divide(n);
    uint32_t row = n / kAcross;
    c = static_cast<int>(band * kAcross + n % kAcross) * Tile::kLines;
    const uint32_t part = p.parts.divide(row);
    there = c < p.columns && find(p, part, at);
    if (!there) return;
    r = at.row + static_cast<int>(row) * kTile;
    p.linear ? load_from<true>(p) : load_from<false>(p);
  }
  template <bool kLinear>
  BLOCKSCALE_DEVICE void load_from(const DequantizeParams& p) {
    constexpr int kPerByte = kCodec == Codec::fp4 ? 2 : 1;
    const int thread = static_cast<int>(threadIdx.x);
    // Then what lies behind the codes of a line, if anything, is part of the buffer too.
    const bool whole =
        (reinterpret_cast<uintptr_t>(at.codes) | static_cast<unsigned>(at.code_columns)) % 16 == 0;
#pragma unroll
    for (int i = 0; i < Tile::kLoads; ++i) {
      const int n = thread + i * kDecodeThreads, line = n / Tile::kChunks;
      const int byte = n % Tile::kChunks * 16, left = rows() / kPerByte - byte;
      chunk[i] = {};
      if (line < lines(p) && left > 0)
        chunk[i] = load_chunk(code_at<kLinear>(p, at, c + line, r / kPerByte + byte), left, whole);
    }
    if (thread < lines(p))
      stored = load_scales<kLinear>(p, at, c + thread, r >> p.block_shift, blocks(p));
  }
  BLOCKSCALE_DEVICE void put(const DequantizeParams& p, Tile& tile) const {
    const int thread = static_cast<int>(threadIdx.x);
    const float outer = outer_of(at);
#pragma unroll
    for (int i = 0; i < Tile::kLoads; ++i) {
      const int n = thread + i * kDecodeThreads;
      tile.put(n / Tile::kChunks, n % Tile::kChunks, chunk[i]);
    }
    if (thread >= lines(p)) return;
    tile.factor(thread, 0) =
        factor_of(p, outer, p.wide_scales ? stored.x : permute_bytes(stored.x, 0, 0x4440));
#pragma unroll
    for (int i = 1; i < Tile::kMostBlocks; ++i)
      if (i < blocks(p))
        tile.factor(thread, i) =
            factor_of(p, outer, permute_bytes(i < 4 ? stored.x : stored.y, 0, 0x4440 + i % 4));
  }
};

// The tile at (tile_r, tile_c) of a matrix of `rows` rows at element x. A warp decodes a word, or
// two, of every line, and stores whole pieces of rows.
template <Codec kCodec, Rows kRows>
BLOCKSCALE_DEVICE void decode_tile(const DequantizeParams& p, CodeTile<kCodec>& tile, int64_t x,
                                   int rows, int tile_r, int tile_c) {
  using Tile = CodeTile<kCodec>;
  constexpr int kPerWord = codes_per_word(kCodec);
  constexpr int kPieces = Tile::kLines / kPiece;  // of a row
  const int thread = static_cast<int>(threadIdx.x), piece = thread % kPieces;
  const int line = piece * kPiece, c = tile_c + line;
#pragma unroll 1
  for (int i = 0; i < kPieces * Tile::kWords; i += kDecodeThreads) {
    // Two words of a warp are half a line apart, which is where their banks differ.
    constexpr int kHalves = 32 / kPieces;
    const int which = (i + thread) / 32 + thread % 32 / kPieces * (Tile::kWords / kHalves);
    const int r = tile_r + which * kPerWord;
    if (kRows != Rows::anywhere && (r >= rows || c >= p.columns)) continue;
    uint32_t word[kPiece];
    float factor[kPiece];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      word[j] = tile.word(line + j, which);
      factor[j] = tile.factor(line + j, which * kPerWord >> p.block_shift);
    }
    auto decode = [&](int pair) {
      float v[2][kPiece];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        float two[2];
        decode_pair<kCodec>(p.element, as_fp8<kCodec>(word[j], pair / 2), pair, two);
        v[0][j] = __fmul_rn(factor[j], two[0]);
        v[1][j] = __fmul_rn(factor[j], two[1]);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int row = r + code_of(kCodec, pair, k), count = row < rows ? p.columns - c : 0;
        store_piece<kRows>(p, x + row * p.x.row_stride, c, {count, piece > 0, piece == kPieces - 1},
                           v[k], true);
      }
    };
#pragma unroll 1
    for (int pair = 0; pair < kPerWord / 2; pair += 2) {
      decode(pair);
      decode(pair + 1);
    }
  }
}

// Blocks of threads on a multiprocessor: as many as do not put registers into memory.
constexpr int column_blocks(Rows rows) { return rows == Rows::aligned ? 5 : 4; }

template <Codec kCodec, Rows kRows>
__global__ void __launch_bounds__(kDecodeThreads, column_blocks(kRows))
    dequantize_columns_kernel(const __grid_constant__ DequantizeParams p) {
  after_previous();
  __shared__ CodeTile<kCodec> tile;
  Ahead<kCodec> ahead;
  ahead.load(p, blockIdx.x);
  if (!ahead.there) return;
  ahead.put(p, tile);
  __syncthreads();
  decode_tile<kCodec, kRows>(p, tile, ahead.at.x, ahead.at.rows, ahead.r, ahead.c);
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
    start(dequantize_rows_kernel<kCodec, kRows>,
          static_cast<unsigned>(ceil_div(all, kDecodeThreads)), kDecodeThreads, 0, stream, p);
  } else {
    const int64_t bands = ceil_div(p.columns, CodeTile<kCodec>::kLines * kAcross);
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
