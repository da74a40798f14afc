// How tiles are loaded into shared memory, for kernels whose thread blocks walk over them.
#pragma once

#include <type_traits>

#include "gpu/quantize/load.h"

namespace blockscale::gpu {

// A loader brings tiles into a few stages of shared memory in turn: begin() starts loading one;
// after finish() the calling thread may read it; release() says that its warp has done so.
//
// Rows at multiples of 16 bytes, by the copy engine: one thread issues the copy, and what lies
// outside the matrix arrives as zero. No warp waits for another, except the one that issues copies.
struct CopyLoader {
  using Tile = Bf16Tile;
  static constexpr int kBlocks = 2;  // thread blocks per multiprocessor
  static constexpr int kStages = 3;  // most tiles in shared memory
  struct Shared {
    CopyBarrier full[kStages], empty[kStages];
  };
  Shared& shared;
  uint32_t full_parity = 0,
           empty_parity = ~0u;  // of the next wait, one bit per stage; new stages are empty

  BLOCKSCALE_DEVICE explicit CopyLoader(Shared& s) : shared(s) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        init(shared.full[stage], 1);
        init(shared.empty[stage], kThreads / 32);
      }
    }
    __syncthreads();
  }
  BLOCKSCALE_DEVICE void begin(const Source& x, const TileAt& at, Tile& to, int stage) {
    if (threadIdx.x == 0) {
      wait(shared.empty[stage], empty_parity >> stage & 1);
      copy_tile(&to, sizeof(Tile), x.map, at.column, at.row, at.batch, shared.full[stage]);
    }
    empty_parity ^= 1u << stage;
  }
  // Whether the calling thread takes part in begin().
  BLOCKSCALE_DEVICE bool asks() const { return threadIdx.x == 0; }
  BLOCKSCALE_DEVICE void finish(Tile&, int stage) {
    wait(shared.full[stage], full_parity >> stage & 1);
    full_parity ^= 1u << stage;
  }
  BLOCKSCALE_DEVICE void release(int stage) {
    sync_warp();
    if (threadIdx.x % 32 == 0) arrive(shared.empty[stage]);
  }
};

// BF16 rows that start anywhere: aligned words, joined in registers.
struct UnalignedLoader {
  using Tile = Bf16Tile;
  static constexpr int kBlocks = 2, kStages = 2;
  static constexpr int kSteps = kTile * Tile::kChunks / kThreads;
  struct Shared {};
  uint4 held[kSteps];

  BLOCKSCALE_DEVICE explicit UnalignedLoader(Shared&) {}

  BLOCKSCALE_DEVICE static uint4 load(const uint16_t* p, int count) {
    if (count < Tile::kChunk) return load_some(p, count);
    uint32_t word[4] = {};
    if (reinterpret_cast<uintptr_t>(p) % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = reinterpret_cast<const uint32_t*>(p)[i];
    } else {
      const uint32_t* inner = reinterpret_cast<const uint32_t*>(p + 1);
      const uint32_t a = inner[0], b = inner[1], c = inner[2];
      word[0] = a << 16 | p[0];
      word[1] = shift_right_in(b, a, 16);
      word[2] = shift_right_in(c, b, 16);
      word[3] = static_cast<uint32_t>(p[7]) << 16 | c >> 16;
    }
    return {word[0], word[1], word[2], word[3]};
  }
  BLOCKSCALE_DEVICE void begin(const Source& x, const TileAt& at, Tile&, int) {
    const auto* base = static_cast<const uint16_t*>(x.data) + at.batch * x.batch_stride;
    const int column = at.column + static_cast<int>(threadIdx.x) % Tile::kChunks * Tile::kChunk;
    const int count = min(max(x.columns - column, 0), Tile::kChunk);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = at.row + (static_cast<int>(threadIdx.x) + i * kThreads) / Tile::kChunks;
      held[i] = load(base + row * x.row_stride + column, row < x.rows ? count : 0);
    }
  }
  BLOCKSCALE_DEVICE void finish(Tile& tile, int) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      tile.chunk[static_cast<int>(threadIdx.x) + i * kThreads] = held[i];
    }
    __syncthreads();
  }
  BLOCKSCALE_DEVICE void release(int) {}
  BLOCKSCALE_DEVICE bool asks() const { return true; }
};

// The loader for rows at multiples of 16 bytes.
using AlignedLoader = std::conditional_t<kCopyEngine, CopyLoader, UnalignedLoader>;

// Any dtype, any strides.
struct AnyLoader {
  using Tile = FloatTile;
  static constexpr int kBlocks = 1, kStages = 2;
  static constexpr int kSteps = kTile * kTile / kThreads;
  struct Shared {};
  uint32_t held[kSteps];  // elements, as they lie in memory
  DType dtype;
  bool down;  // neighbouring threads read neighbouring addresses, whichever extent is contiguous

  BLOCKSCALE_DEVICE explicit AnyLoader(Shared&) {}
  BLOCKSCALE_DEVICE static float value(DType dtype, uint32_t bits) {
    if (dtype == DType::f32) return bit_cast<float>(bits);
    if (dtype == DType::f32_as_bf16) return nearest_bf16(bit_cast<float>(bits));
    const auto half = static_cast<uint16_t>(bits);
    return dtype == DType::bf16 ? from_bf16(half) : float_of_fp16(half);
  }
  BLOCKSCALE_DEVICE static float load(const Source& x, int64_t batch, int r, int c) {
    if (r >= x.rows || c >= x.columns) return 0.0f;
    const int64_t at = batch * x.batch_stride + r * x.row_stride + c * x.column_stride;
    return value(x.dtype, dtype_bytes(x.dtype) == 4
                              ? bits_at(static_cast<const float*>(x.data) + at)
                              : bits_at(static_cast<const uint16_t*>(x.data) + at));
  }
  // A thread has one position along the first extent and every kThreads / kTile-th of the other.
  BLOCKSCALE_DEVICE static int first() { return static_cast<int>(threadIdx.x) % kTile; }
  BLOCKSCALE_DEVICE static int second(int step) {
    return static_cast<int>(threadIdx.x) / kTile + step * (kThreads / kTile);
  }
  BLOCKSCALE_DEVICE void begin(const Source& x, const TileAt& at, Tile&, int) {
    dtype = x.dtype;
    down = x.row_stride == 1;
    const int firsts = down ? x.rows - at.row : x.columns - at.column;
    const int seconds = first() >= firsts ? 0 : down ? x.columns - at.column : x.rows - at.row;
    const int64_t step = down ? x.column_stride : x.row_stride;
    const int64_t start = at.batch * x.batch_stride + at.row * x.row_stride +
                          at.column * x.column_stride +
                          first() * (down ? x.row_stride : x.column_stride) + second(0) * step;
    const auto bring = [&](const auto* p) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i, p += step * (kThreads / kTile))
        held[i] = second(i) < seconds ? bits_at(p) : 0;
    };
    if (dtype_bytes(dtype) == 4)
      bring(static_cast<const float*>(x.data) + start);
    else
      bring(static_cast<const uint16_t*>(x.data) + start);
  }
  // The barrier is for the readers of both tiles: this one, and the previous one, which the next
  // finish() overwrites.
  BLOCKSCALE_DEVICE void finish(Tile& tile, int) {
    float* to =
        &tile.value[down ? first() * Tile::kPitch + second(0) : second(0) * Tile::kPitch + first()];
    const int step = (kThreads / kTile) * (down ? 1 : Tile::kPitch);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) to[i * step] = value(dtype, held[i]);
    __syncthreads();
  }
  BLOCKSCALE_DEVICE void release(int) {}
  BLOCKSCALE_DEVICE bool asks() const { return true; }

 private:
  BLOCKSCALE_DEVICE static uint32_t bits_at(const float* p) { return bit_cast<uint32_t>(*p); }
  BLOCKSCALE_DEVICE static uint32_t bits_at(const uint16_t* p) { return *p; }
};

}  // namespace blockscale::gpu
