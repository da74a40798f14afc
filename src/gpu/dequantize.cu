// From codes back to values: x^ = fl(fl(outer * scale) * code), rounded to the output's dtype.
//
// Codes along rows go straight through registers. Codes of columns are stored transposed: a tile
// comes in by lines, through shared memory, and leaves by rows.
#include <bit>

#include "gpu/decode.h"
#include "gpu/divisor.h"
#include "gpu/launch.h"
#include "gpu/quantize.h"

namespace blockscale::gpu {
namespace {

constexpr int kDecodeThreads = 256;
constexpr int kPiece = 8;     // values of a row that are stored at once: 16 bytes of BF16
constexpr int kRowLines = 4;  // of a thread along rows, one piece each
constexpr int kAcross = 4;    // tiles beside each other that are worked on at the same time

struct DequantizeParams {
  ConstQuantized q;
  StoredShape shape;
  Decoder element, scale;
  Matrix x;
  int rows, columns;
  int block_shift, tile_shift;  // binary logarithms of a block and of the blocks in kTile
  Plan plan;                    // of groups
  Divisor parts;                // pieces of work of a matrix, or of a row of tiles of a group
  Divisor runs;                 // along rows: pieces of a line
  Divisor bands;                // down columns: tiles in kAcross columns of them
  uint32_t all;                 // along rows: threads with work
};

// What a piece of work is part of: a matrix of the batch, or a row of tiles of a group.
struct Place {
  const uint8_t *codes, *scales;
  float outer;
  int64_t x;  // where its first element lies, from x.data on
  int row;    // the first one
  int rows, padded, code_columns, scale_columns;
};
BLOCKSCALE_DEVICE bool find(const DequantizeParams& p, uint32_t part, Place& at) {
  int batch = static_cast<int>(part);
  const StoredShape& s = p.shape;
  const int scale_bytes = p.q.spec.scale == Format::fp32 ? 4 : 1;
  if (!p.plan.head) {
    at = {p.q.codes + batch * s.code_bytes,
          p.q.scales + batch * s.scale_count * scale_bytes,
          1.0f,
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
          1.0f,
          g.row * p.x.row_stride,
          row.row,
          g.rows,
          g.padded,
          g.code_columns,
          g.scale_columns};
  }
  if (p.q.spec.outer) at.outer = p.q.outer[batch];
  return true;
}

// The scale of a block as it is stored, and as a factor of its codes. Of square blocks in a grid
// `line` counts blocks.
BLOCKSCALE_DEVICE uint32_t stored_scale(const DequantizeParams& p, const Place& at, int line,
                                        int block) {
  const Layout layout = p.q.layout.scales;
  const int64_t i =
      layout == Layout::linear
          ? static_cast<int64_t>(line) * at.scale_columns + block
          : layout_offset_as<uint32_t>(layout, static_cast<uint32_t>(p.shape.scale_rows),
                                       at.scale_columns, line, block);
  if (p.q.spec.scale == Format::fp32) return reinterpret_cast<const uint32_t*>(at.scales)[i];
  return at.scales[i];
}
BLOCKSCALE_DEVICE float factor_of(const DequantizeParams& p, const Place& at, uint32_t stored) {
  const float scale = p.q.spec.scale == Format::fp32 ? bit_cast<float>(stored) : p.scale(stored);
  return __fmul_rn(at.outer, scale);
}

// Where byte `byte` of a line of codes lies.
BLOCKSCALE_DEVICE const uint8_t* code_at(const DequantizeParams& p, const Place& at, int line,
                                         int byte) {
  const Layout layout = p.q.layout.codes;
  if (layout == Layout::linear)
    return at.codes + static_cast<int64_t>(line) * at.code_columns + byte;
  return at.codes + layout_offset(layout, p.shape.code_rows, at.code_columns, line, byte);
}

BLOCKSCALE_DEVICE void store_value(const Matrix& x, int64_t at, float value) {
  if (value != value) value = bit_cast<float>(kNanBits);  // the definition's, not the processor's
  if (x.dtype == DType::f32)
    static_cast<float*>(x.data)[at] = value;
  else
    static_cast<uint16_t*>(x.data)[at] = x.dtype == DType::bf16 ? to_bf16(value) : to_fp16(value);
}
// A piece of row r from column c on. kWide: BF16 with rows at multiples of 16 bytes.
template <bool kWide>
BLOCKSCALE_DEVICE void store_piece(const DequantizeParams& p, const Place& at, int r, int c,
                                   const float* v) {
  const int64_t i = at.x + r * p.x.row_stride + c * p.x.column_stride;
  if (kWide && c + kPiece <= p.columns) {
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.x.data) + i) = to_bf16x8(v);
    return;
  }
#pragma unroll
  for (int j = 0; j < kPiece; ++j)
    if (c + j < p.columns) store_value(p.x, i + j * p.x.column_stride, v[j]);
}

template <Codec kCodec, bool kWide>
__global__ void __launch_bounds__(kDecodeThreads)
    dequantize_rows_kernel(const __grid_constant__ DequantizeParams p) {
  constexpr int kPerWord = codes_per_word(kCodec), kWords = kPiece / kPerWord;
  using Codes = std::conditional_t<kWords == 1, uint32_t, uint2>;
  uint32_t n = blockIdx.x * kDecodeThreads + threadIdx.x;
  if (n >= p.all) return;
  uint32_t lines = p.runs.divide(n);
  const uint32_t part = p.parts.divide(lines);
  const int c = static_cast<int>(n) * kPiece;
  Place at;
  if (!find(p, part, at)) return;
  const int first = at.row + static_cast<int>(lines) * kRowLines;
  if (first >= at.rows) return;
  Codes codes[kRowLines];
  uint32_t stored[kRowLines];
#pragma unroll
  for (int i = 0; i < kRowLines; ++i) {
    const int r = min(first + i, at.rows - 1);  // all loads first, within the matrix
    codes[i] = load_once(
        reinterpret_cast<const Codes*>(code_at(p, at, r, kCodec == Codec::fp4 ? c / 2 : c)));
    stored[i] =
        stored_scale(p, at, p.shape.scale_lines == 1 ? r : r >> p.block_shift, c >> p.block_shift);
  }
#pragma unroll
  for (int i = 0; i < kRowLines; ++i) {
    if (first + i >= at.rows) break;
    const float factor = factor_of(p, at, stored[i]);
    float v[kPiece];
#pragma unroll
    for (int j = 0; j < kPiece / 2; ++j) {
      const uint32_t word = word_of(codes[i], 2 * j / kPerWord);
      decode_pair<kCodec>(p.element, word, j % (kPerWord / 2), v + 2 * j);
    }
#pragma unroll
    for (int j = 0; j < kPiece; ++j) v[j] = __fmul_rn(factor, v[j]);
    store_piece<kWide>(p, at, first + i, c, v);
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

// Up to 16 bytes of a line of codes, of which `count` are there: none, 8 or more.
BLOCKSCALE_DEVICE uint4 load_chunk(const uint8_t* from, int count) {
  uint4 v{};
  if (count >= 16 && reinterpret_cast<uintptr_t>(from) % 16 == 0)
    return load_once(reinterpret_cast<const uint4*>(from));
  const auto* half = reinterpret_cast<const uint2*>(from);
  if (count >= 8) v.x = half[0].x, v.y = half[0].y;
  if (count >= 16) v.z = half[1].x, v.w = half[1].y;
  return v;
}

// The codes and scales of the tile at (r, c) into shared memory; no load waits for another.
template <Codec kCodec>
BLOCKSCALE_DEVICE void load_tile(const DequantizeParams& p, const Place& at, int r, int c,
                                 CodeTile<kCodec>& tile) {
  using Tile = CodeTile<kCodec>;
  const int thread = static_cast<int>(threadIdx.x);
  uint4 chunk[Tile::kLoads];
#pragma unroll
  for (int i = 0; i < Tile::kLoads; ++i) {
    const int n = thread + i * kDecodeThreads, line = c + n / Tile::kChunks;
    const int pos = r + n % Tile::kChunks * (4 * codes_per_word(kCodec));
    const int left = line < p.columns ? at.padded - pos : 0;
    chunk[i] = {};
    if (left > 0)
      chunk[i] = load_chunk(code_at(p, at, line, kCodec == Codec::fp4 ? pos / 2 : pos),
                            kCodec == Codec::fp4 ? left / 2 : left);
  }
  // The blocks of a line are neighbours.
  const int per_line = kTile >> p.block_shift;
  constexpr int kScales = Tile::kMostBlocks * Tile::kLines / kDecodeThreads;
  uint32_t stored[kScales];
  auto for_scales = [&](const auto& body) {
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      const int n = thread + i * kDecodeThreads;
      const int line = n >> p.tile_shift, block = n & (per_line - 1);
      if (line < Tile::kLines && c + line < p.columns && r + (block << p.block_shift) < at.padded)
        body(stored[i], line, block);
    }
  };
  for_scales([&](uint32_t& to, int line, int block) {
    const int row = c + line;
    to = stored_scale(p, at, p.shape.scale_lines == 1 ? row : row >> p.block_shift,
                      (r >> p.block_shift) + block);
  });
#pragma unroll
  for (int i = 0; i < Tile::kLoads; ++i) {
    const int n = thread + i * kDecodeThreads;
    tile.put(n / Tile::kChunks, n % Tile::kChunks, chunk[i]);
  }
  for_scales([&](uint32_t from, int line, int block) {
    tile.factor(line, block) = factor_of(p, at, from);
  });
}

// A warp decodes one word, or two, of every line, and stores whole pieces of rows.
template <Codec kCodec, bool kWide>
__global__ void __launch_bounds__(kDecodeThreads, 4)
    dequantize_columns_kernel(const __grid_constant__ DequantizeParams p) {
  using Tile = CodeTile<kCodec>;
  constexpr int kPerWord = codes_per_word(kCodec);
  constexpr int kPieces = Tile::kLines / kPiece;  // of a row
  __shared__ Tile tile;
  uint32_t n = blockIdx.x;
  const int band = static_cast<int>(p.bands.divide(n));
  uint32_t tile_row = n / kAcross;
  const int tile_c = (band * kAcross + static_cast<int>(n % kAcross)) * Tile::kLines;
  const uint32_t part = p.parts.divide(tile_row);
  Place at;
  if (tile_c >= p.columns || !find(p, part, at)) return;
  const int tile_r = at.row + static_cast<int>(tile_row) * kTile;
  load_tile<kCodec>(p, at, tile_r, tile_c, tile);
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  const int line = thread % kPieces * kPiece, c = tile_c + line;
#pragma unroll 1
  for (int i = 0; i < kPieces * Tile::kWords; i += kDecodeThreads) {
    // Two words of a warp are half a line apart, which is where their banks differ.
    constexpr int kHalves = 32 / kPieces > 1 ? 32 / kPieces : 1;
    const int warp = (i + thread) / 32;
    const int which = warp + thread % 32 / kPieces * (Tile::kWords / kHalves);
    const int r = tile_r + which * kPerWord;
    if (r >= at.rows || c >= p.columns) continue;
    uint32_t word[kPiece];
    float factor[kPiece];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      word[j] = tile.word(line + j, which);
      factor[j] = tile.factor(line + j, which * kPerWord >> p.block_shift);
    }
#pragma unroll
    for (int pair = 0; pair < kPerWord / 2; ++pair) {
      float v[2][kPiece];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        float two[2];
        decode_pair<kCodec>(p.element, word[j], pair, two);
        v[0][j] = __fmul_rn(factor[j], two[0]);
        v[1][j] = __fmul_rn(factor[j], two[1]);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (r + 2 * pair + k < at.rows) store_piece<kWide>(p, at, r + 2 * pair + k, c, v[k]);
    }
  }
}

// Rows of no group are 0; where offsets are wrong, everything is NaN.
__global__ void __launch_bounds__(kDecodeThreads)
    clear_rows_kernel(const __grid_constant__ DequantizeParams p) {
  const float value = p.plan.head->bad ? bit_cast<float>(kNanBits) : 0.0f;
  const int first = p.plan.side[0][p.plan.count].row;
  const int64_t count = static_cast<int64_t>(p.rows - first) * p.columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kDecodeThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kDecodeThreads) + threadIdx.x; i < count;
       i += step)
    store_value(p.x, (first + i / p.columns) * p.x.row_stride + i % p.columns * p.x.column_stride,
                value);
}

template <Codec kCodec, bool kWide>
void launch(DequantizeParams& p, NativeStream stream) {
  const bool groups = p.plan.head, along = p.q.axis == -1;
  // Rows of tiles in all, and where there are groups the most that there can be.
  const int64_t tiles_down = ceil_div(p.rows, kTile);
  const int64_t tile_rows = groups ? p.plan.most_tile_rows : tiles_down * p.x.batch;
  if (along) {
    const int64_t runs = ceil_div(p.columns, kPiece);
    const int64_t each = groups ? kTile / kRowLines : ceil_div(p.rows, kRowLines);
    const int64_t all = runs * each * (groups ? tile_rows : p.x.batch);
    p.runs = Divisor::of(runs), p.parts = Divisor::of(each);
    p.all = static_cast<uint32_t>(all);
    start(dequantize_rows_kernel<kCodec, kWide>,
          static_cast<unsigned>(ceil_div(all, kDecodeThreads)), kDecodeThreads, 0, stream, p);
  } else {
    const int64_t bands = ceil_div(p.columns, CodeTile<kCodec>::kLines * kAcross);
    p.bands = Divisor::of(tile_rows * kAcross), p.parts = Divisor::of(groups ? 1 : tiles_down);
    start(dequantize_columns_kernel<kCodec, kWide>,
          static_cast<unsigned>(bands * tile_rows * kAcross), kDecodeThreads, 0, stream, p);
  }
  if (groups) start(clear_rows_kernel, 512, kDecodeThreads, 0, stream, p);
}
using Launcher = void (*)(DequantizeParams&, NativeStream);

template <bool kWide>
Launcher launcher_of(Format element) {
  if (element == Format::e2m1) return launch<Codec::fp4, kWide>;
  if constexpr (kWide) {
    if (element == Format::e4m3fn) return launch<Codec::e4m3fn, true>;
    if (element == Format::e5m2) return launch<Codec::e5m2, true>;
    if (traits(element).special == Special::none) return launch<Codec::numbers, true>;
  }
  return launch<Codec::any, kWide>;
}

}  // namespace

void dequantize(const ConstQuantized& q, const Matrix& x, const Stream& stream) {
  if (x.rows * x.columns * x.batch == 0) return;
  DequantizeParams p{};
  p.q = q, p.shape = q.shape(), p.x = x;
  p.element = Decoder::of(q.spec.element), p.scale = Decoder::of(q.spec.scale);
  p.rows = static_cast<int>(x.rows), p.columns = static_cast<int>(x.columns);
  p.block_shift = std::countr_zero(q.spec.block);
  p.tile_shift = std::countr_zero(static_cast<unsigned>(kTile / q.spec.block));
  if (q.groups) p.plan = make_plan(q.groups, x.rows, x.columns, &q, nullptr, false, stream);
  const bool wide = is_bf16_rows(as_const(x)) && is_aligned(as_const(x));
  const Launcher run =
      wide ? launcher_of<true>(q.spec.element) : launcher_of<false>(q.spec.element);
  run(p, native(stream));
  check_launch("dequantize");
}

}  // namespace blockscale::gpu
