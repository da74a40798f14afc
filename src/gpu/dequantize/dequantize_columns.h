// Codes of columns back to values: tiles come in by lines of codes and leave by rows.
//
// Memory sets the pace, and the order of accesses matters: the tiles of a row of tiles follow each
// other, so that whole rows are written, and a tile is high enough to read 128 bytes or more of a
// line. What the next row of tiles reads of that line may be fetched along with it, and high FP4
// tiles, which have less to read, prefetch more ahead of time.
#pragma once

#include "gpu/dequantize/dequantize.h"

namespace blockscale::gpu {

// A tile: kHigh positions of kTile lines. Chunks are permuted so that those of every eighth line,
// as they are decoded, lie in different banks.
template <Codec kCodec, int kHigh>
struct CodeTile {
  static constexpr int kLines = kTile;
  static constexpr int kWords = kHigh / codes_per_word(kCodec);  // of a line
  static constexpr int kChunks = kWords / 4;
  static constexpr int kMostBlocks = kHigh / kRun;  // of a line
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

template <Codec kCodec, int kHigh>
inline constexpr bool kAsksAhead = kCodec == Codec::fp4&& kHigh > kTile;

// The scales of `count` consecutive blocks of a line; one-byte scales as the bytes of two words.
// They are few, so those of the next rows of tiles are fetched along with them.
template <bool kLinear>
BLOCKSCALE_DEVICE uint2 load_scales(const DequantizeParams& p, const Place& at, int line, int block,
                                    int count) {
  if (p.fp32_scales) return {stored_scale<kLinear>(p, at, line, block), 0};  // a block is kTile
  if constexpr (kLinear) {
    const uint8_t* from = at.scales + block;
    from += static_cast<int64_t>(line >> at.scale_shift) * at.scale_columns;
    if (count == 8 && reinterpret_cast<uintptr_t>(from) % 8 == 0)
      return load_once_and_more(reinterpret_cast<const uint2*>(from));
    if (count == 4 && reinterpret_cast<uintptr_t>(from) % 4 == 0)
      return {load_once_and_more(reinterpret_cast<const uint32_t*>(from)), 0};
  }
  uint32_t word[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) word[i / 4] |= stored_scale<kLinear>(p, at, line, block + i) << (i % 4 * 8);
  return {word[0], word[1]};
}

// Tile n of all: which one it is, and how it is loaded and stored.
template <Codec kCodec, Rows kRows, int kHigh>
struct Columns {
  using Tile = CodeTile<kCodec, kHigh>;
  static constexpr int kPerByte = kCodec == Codec::fp4 ? 2 : 1;
  const DequantizeParams& p;
  Tile& tile;
  Place at;
  int r, c;    // its first row and column
  bool there;  // uniform across the thread block

  BLOCKSCALE_DEVICE Columns(const DequantizeParams& params, Tile& memory, uint32_t n)
      : p(params), tile(memory) {
    uint32_t row = p.across.divide(n);
    c = static_cast<int>(n) * (Tile::kLines - kHalo<kRows> * kPiece) - kHalo<kRows> * kPiece;
    const uint32_t part = p.parts.divide(row);
    there = find(p, part, at);
    if (there) r = at.row + static_cast<int>(row) * kHigh;
  }

  // ---- in ----

  BLOCKSCALE_DEVICE bool has_line(int line) const {
    return static_cast<unsigned>(c + line) < static_cast<unsigned>(p.columns);
  }
  BLOCKSCALE_DEVICE int rows() const { return min(at.padded - r, kHigh); }

  BLOCKSCALE_DEVICE void load() {
    p.linear ? load_codes<true>() : load_codes<false>();
    // A thread computes the factors of kTile positions of a line.
    const int thread = static_cast<int>(threadIdx.x), line = thread % Tile::kLines;
    const int from = thread / Tile::kLines * kTile;
    static_assert(kHigh / kTile * Tile::kLines <= kDecodeThreads && kHigh <= 2 * kTile);
    const int first = from >> p.block_shift;
    const int blocks = ((min(rows() - from, kTile) - 1) >> p.block_shift) + 1;
    const bool mine = from < rows() && from < kHigh && has_line(line);
    uint2 stored{};
    if (mine) {
      const int block = (r >> p.block_shift) + first;
      stored = p.linear ? load_scales<true>(p, at, c + line, block, blocks)
                        : load_scales<false>(p, at, c + line, block, blocks);
    }
    const float outer = outer_of(at);
    if (mine) {
      tile.factor(line, first) =
          factor_of(p, outer, p.fp32_scales ? stored.x : permute_bytes(stored.x, 0, 0x4440));
#pragma unroll
      for (int i = 1; i < kTile / kRun; ++i)
        if (i < blocks)
          tile.factor(line, first + i) =
              factor_of(p, outer, permute_bytes(i < 4 ? stored.x : stored.y, 0, 0x4440 + i % 4));
    }
    wait_for_chunks();
  }
  template <bool kLinear>
  BLOCKSCALE_DEVICE void load_codes() {
    const int thread = static_cast<int>(threadIdx.x);
    // If so, whatever follows the codes of a line is part of the buffer too.
    const bool aligned =
        (reinterpret_cast<uintptr_t>(at.codes) | static_cast<unsigned>(at.code_columns)) % 16 == 0;
    const int first = thread / Tile::kChunks, chunk = thread % Tile::kChunks;
    constexpr int kStep = kDecodeThreads / Tile::kChunks;
    if (kLinear && aligned && rows() == kHigh && c >= 0 && c <= p.columns - Tile::kLines) {
      const uint8_t* from = code_at<true>(p, at, c + first, r / kPerByte + chunk * 16);
#pragma unroll
      for (int i = 0; i < Tile::kLines; i += kStep, from += int64_t{kStep} * at.code_columns)
        begin_chunk_and_more(&tile.chunk(first + i, chunk), from);
      if constexpr (kAsksAhead<kCodec, kHigh>) ask_ahead();
      return;
    }
    const int left = rows() / kPerByte - chunk * 16;  // bytes of a line, 8 at a time
    if (left <= 0) return;
#pragma unroll
    for (int i = 0; i < Tile::kLines; i += kStep) {
      const int line = first + i;
      if (!has_line(line)) continue;
      const uint8_t* from = code_at<kLinear>(p, at, c + line, r / kPerByte + chunk * 16);
      auto* to = reinterpret_cast<uint2*>(&tile.chunk(line, chunk));
      if (aligned) {
        begin_chunk(to, from);
      } else {
        begin_half_chunk(to, from);
        if (left >= 16) begin_half_chunk(to + 1, from + 8);
      }
    }
  }

  // Every second row of tiles prefetches what two others read later: 256 bytes of each line.
  BLOCKSCALE_DEVICE void ask_ahead() const {
    constexpr int kBytes = 2 * kHigh / kPerByte;
    const int line = static_cast<int>(threadIdx.x), byte = (r + p.ahead) / kPerByte;
    if (p.ahead > 0 && r / kHigh % 2 == 0 && line < Tile::kLines &&
        byte + kBytes <= at.code_columns)
      ask_for(code_at<true>(p, at, c + line, byte), kBytes);
  }

  // ---- out ----

  // A thread decodes a few words of eight lines, and stores a piece of each of their rows.
  BLOCKSCALE_DEVICE void store() {
    constexpr int kPieces = Tile::kLines / kPiece, kPerWord = codes_per_word(kCodec);
    constexpr int kEach = Tile::kWords * kPieces / kDecodeThreads;  // words
    const int thread = static_cast<int>(threadIdx.x), piece = thread % kPieces;
    const int first = thread / kPieces * kEach, line = piece * kPiece;
    const int row = r + first * kPerWord, column = c + line, count = p.columns - column;
    if (kRows != Rows::anywhere && count <= 0) return;
    float factor[kPiece];
    static_assert(kEach * kPerWord <= kRun);  // of one block
#pragma unroll
    for (int j = 0; j < kPiece; ++j)
      factor[j] = tile.factor(line + j, first * kPerWord >> p.block_shift);
    const bool whole =
        kRows == Rows::aligned && count >= kPiece && row <= at.rows - kEach * kPerWord;
    const int64_t x = at.x + row * p.x.row_stride;
    auto* to = static_cast<uint16_t*>(p.x.data) + x + column;
    uint32_t largest = 0;
#pragma unroll 1
    for (int w = 0; w < kEach; ++w) {
      uint32_t word[kPiece];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) word[j] = tile.word(line + j, first + w);
      // The two rows of a pair.
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
          for (int i = 0; i < 2; ++i) {
            uint16_t* const row_at = to + code_of(kCodec, pair, i) * p.x.row_stride;
            if constexpr (kAsksAhead<kCodec, kHigh>)
              store_vector_once(row_at, convert_bf16x8(v[i], largest));
            else
              store_vector(row_at, convert_bf16x8(v[i], largest));
          }
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
                               v[i]);
          }
        }
      }
    }
    if (whole && has_nan(largest))
      define_nans(to - kEach * kPerWord * p.x.row_stride, p.x.row_stride, kEach * kPerWord);
  }
};

// Thread blocks per multiprocessor: as many as possible without spilling registers.
inline constexpr int kColumnBlocks = 4;

template <Codec kCodec, Rows kRows, int kHigh>
__global__ void __launch_bounds__(kDecodeThreads, kColumnBlocks)
    dequantize_columns_kernel(const __grid_constant__ DequantizeParams p) {
  after_previous(p);
  __shared__ CodeTile<kCodec, kHigh> tile;
  Columns<kCodec, kRows, kHigh> columns(p, tile, blockIdx.x);
  if (!columns.there) return;
  columns.load();
  __syncthreads();
  columns.store();
}

template <Codec kCodec, Rows kRows, int kHigh>
void launch_tiles(DequantizeParams& p, int64_t parts, NativeStream stream) {
  const int64_t across = ceil_div(p.columns, kTile - kHalo<kRows> * kPiece);
  const int64_t down = p.plan.head ? 1 : ceil_div(p.rows, kHigh);
  p.across = Divisor(across), p.parts = Divisor(down);
  // About half as many tiles ahead as are at work, where there are two rounds of them.
  constexpr int64_t kTilesAhead = 256;
  if (kAsksAhead<kCodec, kHigh> && across * down * parts >= 4 * kTilesAhead)
    p.ahead = static_cast<int>(std::max<int64_t>(kTilesAhead / across / 2, 1) * 2 * kHigh);
  start(dequantize_columns_kernel<kCodec, kRows, kHigh>,
        static_cast<unsigned>(across * down * parts), kDecodeThreads, 0, stream, p);
}
// High tiles where there are enough of them for every multiprocessor. With a byte per element even
// low tiles read 128 bytes of a line, so they are high only where the last round does not count.
template <Codec kCodec, Rows kRows>
void launch_columns(DequantizeParams& p, int64_t parts, NativeStream stream) {
  if constexpr (kRows == Rows::aligned && kCodec != Codec::any) {
    constexpr int kHigh = 2 * kTile, kEach = kCodec == Codec::fp4 ? 1 : 8;
    const int64_t tiles = ceil_div(p.rows, kHigh) * ceil_div(p.columns, kTile) * parts;
    if (!p.plan.head && tiles >= kEach * multiprocessors(current_device()))
      return launch_tiles<kCodec, kRows, kHigh>(p, parts, stream);
  }
  launch_tiles<kCodec, kRows, kTile>(p, parts, stream);
}

}  // namespace blockscale::gpu
