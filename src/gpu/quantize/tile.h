// A tile of the input in shared memory, and how a run, which is 16 consecutive elements along an
// axis, is read from it. A run is a thread's unit of work: one Philox call, one Hadamard transform
// of 16, one block of the two-level formats.
#pragma once

#include <type_traits>

#include "blockscale/tensor.h"
#include "gpu/gpu.h"
#include "gpu/port.h"

namespace blockscale::gpu {

inline constexpr int kRun = 16;
inline constexpr int kRunsPerLine = kTile / kRun;
// With kThreads threads, each has kRowRuns runs along the rows, kRowStep rows apart.
inline constexpr int kRowStep = kThreads / kRunsPerLine;
inline constexpr int kRowRuns = kTile / kRowStep;

struct Source {
  CopyMap map;  // for the copy engine, where it can read x
  const void* data;
  int64_t row_stride, column_stride, batch_stride;
  int rows, columns;
  DType dtype;
};

// Where a tile lies.
struct TileAt {
  int batch, row, column;
};

// ---- BF16 tiles ----

// Signs of eight elements, in the top bits of the bytes of four even and four odd ones.
struct Signs {
  uint32_t even, odd;

  // Packed FP4 codes with these signs; the codes' own sign bits are ignored.
  BLOCKSCALE_DEVICE uint32_t with(uint32_t codes) const {
    return select_bits(0x88888888, select_bits(0x0F0F0F0F, even >> 4, odd), codes);
  }
};
struct RunSigns {
  Signs of_8[2];
};

// The two elements of a BF16 pair.
BLOCKSCALE_DEVICE float low_of(uint32_t pair) { return bit_cast<float>(pair << 16); }
BLOCKSCALE_DEVICE float high_of(uint32_t pair) { return bit_cast<float>(pair & 0xFFFF0000); }

// A run as BF16 pairs, in some order.
struct Pairs {
  uint32_t pair[kRun / 2];

  BLOCKSCALE_DEVICE uint32_t amax_bits() const {
    uint32_t m = max_magnitude_bf16x2(pair[0], pair[1]);
#pragma unroll
    for (int i = 2; i < kRun / 2; ++i) m = max_magnitude_bf16x2(m, pair[i]);
    return max_magnitude(low_of(m), high_of(m));
  }
  // Clamps magnitudes to those of the pair `largest`.
  BLOCKSCALE_DEVICE void limit(uint32_t largest) {
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) pair[i] = min_magnitude_bf16x2(pair[i], largest);
  }
  BLOCKSCALE_DEVICE void keep_if(bool condition) {
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) pair[i] &= condition ? ~0u : 0;
  }
};
// Element 2i in the low half of pair[i], as in memory.
struct PairRun : Pairs {
  BLOCKSCALE_DEVICE RunSigns signs() const {
    RunSigns signs;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t* p = pair + 4 * i;
      // Top bytes of elements 0 2 1 3 and 4 6 5 7.
      const uint32_t low = permute_bytes(p[0], p[1], 0x7351);
      const uint32_t high = permute_bytes(p[2], p[3], 0x7351);
      signs.of_8[i] = {permute_bytes(low, high, 0x5410), permute_bytes(low, high, 0x7632)};
    }
    return signs;
  }
  BLOCKSCALE_DEVICE void unpack(float* v) const {
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) {
      v[2 * i] = low_of(pair[i]);
      v[2 * i + 1] = high_of(pair[i]);
    }
  }
};
// Elements 0 2, 1 3, 4 6, 5 7 and so on: the signs of even elements, and of odd ones, are adjacent.
struct SplitRun : Pairs {
  // The first element of a pair; the second is two elements further.
  BLOCKSCALE_DEVICE static constexpr int first(int i) { return i / 2 * 4 + i % 2; }

  BLOCKSCALE_DEVICE void pack(const float* v) {
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) pair[i] = to_bf16x2(v[first(i)], v[first(i) + 2]);
  }
  BLOCKSCALE_DEVICE RunSigns signs() const {
    RunSigns signs;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t* p = pair + 4 * i;
      signs.of_8[i] = {permute_bytes(p[0], p[2], 0x7531), permute_bytes(p[1], p[3], 0x7531)};
    }
    return signs;
  }
  BLOCKSCALE_DEVICE void unpack(float* v) const {
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) {
      v[first(i)] = low_of(pair[i]);
      v[first(i) + 2] = high_of(pair[i]);
    }
  }
};

// Two neighbouring columns down 16 rows: row i's two elements in pair[i].
struct PairColumns {
  uint32_t pair[kRun];

  BLOCKSCALE_DEVICE void amax_bits(uint32_t* largest) const {
    uint32_t m = max_magnitude_bf16x2(pair[0], pair[1]);
#pragma unroll
    for (int i = 2; i < kRun; ++i) m = max_magnitude_bf16x2(m, pair[i]);
    largest[0] = m << 16 & 0x7FFF0000;
    largest[1] = m & 0x7FFF0000;
  }
  // Clamps magnitudes of one of the two columns to those of `largest`.
  template <int kWhich>
  BLOCKSCALE_DEVICE void limit(uint32_t largest) {
    const uint32_t both = permute_bytes(largest, 0x7F7F, kWhich == 0 ? 0x5410 : 0x1054);
#pragma unroll
    for (int i = 0; i < kRun; ++i) pair[i] = min_magnitude_bf16x2(pair[i], both);
  }
  template <int kWhich>
  BLOCKSCALE_DEVICE void keep_if(bool condition) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) pair[i] &= condition ? ~0u : kWhich == 0 ? 0xFFFF0000 : 0xFFFF;
  }
  template <int kWhich>
  BLOCKSCALE_DEVICE RunSigns signs() const {
    RunSigns signs;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t* p = pair + 8 * i;
      // Top bytes of both columns: rows 0 2, 4 6, 1 3, 5 7, the first column in the low half.
      const uint32_t even[2] = {permute_bytes(p[0], p[2], 0x7351),
                                permute_bytes(p[4], p[6], 0x7351)};
      const uint32_t odd[2] = {permute_bytes(p[1], p[3], 0x7351),
                               permute_bytes(p[5], p[7], 0x7351)};
      constexpr uint32_t kHalf = kWhich == 0 ? 0x5410 : 0x7632;
      signs.of_8[i] = {permute_bytes(even[0], even[1], kHalf),
                       permute_bytes(odd[0], odd[1], kHalf)};
    }
    return signs;
  }
  template <int kWhich>
  BLOCKSCALE_DEVICE void unpack(float* v) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) v[i] = kWhich == 0 ? low_of(pair[i]) : high_of(pair[i]);
  }
};

// Rows of 256 bytes in 16 chunks of 16, one after another.
struct Bf16Tile {
  using Run = PairRun;
  using Columns = PairColumns;
  static constexpr bool kBf16 = true;
  static constexpr int kChunk = 8, kChunks = kTile / kChunk;
  uint4 chunk[kTile * kChunks];

  BLOCKSCALE_DEVICE Run row(int r, int c) const {
    const uint4* p = &chunk[r * kChunks + c / kChunk];
    const uint4 a = p[0], b = p[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }
  BLOCKSCALE_DEVICE Columns columns(int r, int c) const {
    const uint32_t* p = reinterpret_cast<const uint32_t*>(chunk) + (r * kTile + c) / 2;
    Columns both;
#pragma unroll
    for (int i = 0; i < kRun; ++i) both.pair[i] = p[i * kTile / 2];
    return both;
  }
};

// ---- any dtype, any strides ----

struct FloatRun {
  float value[kRun];

  BLOCKSCALE_DEVICE uint32_t amax_bits() const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i) largest = max_magnitude(bit_cast<float>(largest), value[i]);
    return largest;
  }
  BLOCKSCALE_DEVICE RunSigns signs() const {
    RunSigns signs;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto tops = [&](int a, int b) {
        return permute_bytes(bit_cast<uint32_t>(value[8 * i + a]),
                             bit_cast<uint32_t>(value[8 * i + b]), 0x0073);
      };
      signs.of_8[i] = {permute_bytes(tops(0, 2), tops(4, 6), 0x5410),
                       permute_bytes(tops(1, 3), tops(5, 7), 0x5410)};
    }
    return signs;
  }
  // As in PairRun.
  BLOCKSCALE_DEVICE void limit(uint32_t largest) {
    const float most = bit_cast<float>(largest & 0x7FFF0000);
#pragma unroll
    for (int i = 0; i < kRun; ++i) value[i] = fmaxf(fminf(value[i], most), -most);
  }
  BLOCKSCALE_DEVICE void keep_if(bool condition) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) value[i] = condition ? value[i] : 0.0f;
  }
  BLOCKSCALE_DEVICE void unpack(float* v) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) v[i] = value[i];
  }
};
struct FloatColumns {
  FloatRun run[2];

  BLOCKSCALE_DEVICE void amax_bits(uint32_t* largest) const {
    largest[0] = run[0].amax_bits();
    largest[1] = run[1].amax_bits();
  }
  template <int kWhich>
  BLOCKSCALE_DEVICE void limit(uint32_t largest) {
    run[kWhich].limit(largest);
  }
  template <int kWhich>
  BLOCKSCALE_DEVICE void keep_if(bool condition) {
    run[kWhich].keep_if(condition);
  }
  template <int kWhich>
  BLOCKSCALE_DEVICE RunSigns signs() const {
    return run[kWhich].signs();
  }
  template <int kWhich>
  BLOCKSCALE_DEVICE void unpack(float* v) const {
    run[kWhich].unpack(v);
  }
};

struct FloatTile {
  using Run = FloatRun;
  using Columns = FloatColumns;
  static constexpr bool kBf16 = false;
  static constexpr int kPitch = kTile + 1;
  float value[kTile * kPitch];

  BLOCKSCALE_DEVICE Run row(int r, int c) const {
    Run run;
#pragma unroll
    for (int i = 0; i < kRun; ++i) run.value[i] = value[r * kPitch + c + i];
    return run;
  }
  BLOCKSCALE_DEVICE Columns columns(int r, int c) const {
    Columns both;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      both.run[0].value[i] = value[(r + i) * kPitch + c];
      both.run[1].value[i] = value[(r + i) * kPitch + c + 1];
    }
    return both;
  }
};

}  // namespace blockscale::gpu
