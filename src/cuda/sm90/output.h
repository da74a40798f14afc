// What follows a tile's sums: factors, bias, and the ways to write a tile of output.
#pragma once

#include <cuda_fp16.h>

#include "cuda/sm90/kernel.h"

namespace blockscale::sm90 {

// Loads the bias of the columns whose sums a thread holds: two of every eight from `column` on,
// counted from `first`; 0 past the last column. Its dtype is tested once, so that all loads are in
// flight together: one after another they took up to a third of a tile's time.
template <int kN>
BLOCKSCALE_DEVICE void load_bias(float (&to)[kN / 4], const Output& out, int64_t first, int column,
                                 int columns) {
  const auto load = [&](const auto& at) {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const int c = column + i / 2 * 8 + i % 2;
      to[i] = c < columns ? at(first + c) : 0.0f;
    }
  };
  if (out.bias_dtype == DType::f32) {
    load([&](int64_t at) { return static_cast<const float*>(out.bias)[at]; });
    return;
  }
  const auto* bits = static_cast<const uint16_t*>(out.bias);
  if (out.bias_dtype == DType::bf16)
    load([&](int64_t at) { return __uint_as_float(uint32_t{bits[at]} << 16); });
  else
    load([&](int64_t at) { return __half2float(__ushort_as_half(bits[at])); });
}

// Applies the group's outer scales and bias, in double like the separate epilogue kernel, so that
// no product of outer scales leaves the range. `any`: whether anything was summed.
template <class T>
BLOCKSCALE_DEVICE void finish_outer(float (&sum)[T::kWaves][T::kN / 2], const GemmParams& p,
                                    int group, int column, bool any) {
  const Output& out = p.out;
  const double outer = static_cast<double>(out.alpha) * (out.a_outer ? out.a_outer[group] : 1.0f) *
                       (out.b_outer ? out.b_outer[group] : 1.0f);
  const double factor = any ? outer : 0.0;
  if (factor == 1.0 && !out.bias) return;  // no reason to convert the sums
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float row[T::kN / 4] = {};
  if (out.bias)
    load_bias<T::kN>(row, out, int64_t{1} * group * p.problem.n, column + lane % 4 * 2,
                     p.problem.n);
#pragma unroll
  for (int g = 0; g < T::kN / 8; ++g) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto bias = static_cast<double>(row[2 * g + i]);
#pragma unroll
      for (int w = 0; w < T::kWaves; ++w)
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
          float& v = sum[w][4 * g + half + i];
          const double value = factor * static_cast<double>(v);
          v = static_cast<float>(out.bias ? value + bias : value);
        }
    }
  }
}

// Applies column factors, alpha and bias; `any` as above.
template <class T>
BLOCKSCALE_DEVICE void finish(float (&sum)[T::kWaves][T::kN / 2], const GemmParams& p, int group,
                              int column, bool any, bool with_bias) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first = int64_t{1} * group * p.problem.n;
  if (p.out.factors && any) {
#pragma unroll
    for (int g = 0; g < T::kN / 8; ++g) {
      const int c = column + g * 8 + lane % 4 * 2;
      const float x = c < p.problem.n ? p.out.factors[first + c] : 0.0f;
      const float y = c + 1 < p.problem.n ? p.out.factors[first + c + 1] : 0.0f;
#pragma unroll
      for (int w = 0; w < T::kWaves; ++w) {
        sum[w][4 * g] *= x;
        sum[w][4 * g + 1] *= y;
        sum[w][4 * g + 2] *= x;
        sum[w][4 * g + 3] *= y;
      }
    }
  }
  const float alpha = p.out.device_alpha ? p.out.alpha * *p.out.device_alpha : p.out.alpha;
  if (alpha != 1.0f && any) {
#pragma unroll
    for (int w = 0; w < T::kWaves; ++w)
#pragma unroll
      for (int i = 0; i < T::kN / 2; ++i) sum[w][i] *= alpha;
  }
  if (p.out.bias && with_bias) {
    float row[T::kN / 4];
    load_bias<T::kN>(row, p.out, first, column + lane % 4 * 2, p.problem.n);
#pragma unroll
    for (int w = 0; w < T::kWaves; ++w)
#pragma unroll
      for (int i = 0; i < T::kN / 2; ++i) sum[w][i] += row[i / 4 * 2 + i % 2];
  }
}

// Puts 64 rows x 128 bytes of a wave's sums, from the columns 8 * `eight` on, into a chunk: 16-byte
// piece x of row r lies at x ^ r % 8, the copy engine's 128-byte swizzle.
template <bool kF32>
BLOCKSCALE_DEVICE void stage_chunk(const float* sum, int eight, uint32_t chunk) {
  constexpr int kEights = kF32 ? 4 : 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  if constexpr (kF32) {
    // Neighbouring lanes exchange halves: even lanes then hold four columns of the upper row, odd
    // lanes of the lower. (Sums stored as pairs would have to lie in pairs of registers, which the
    // main loop's multiply-adds would pay for in bank conflicts.)
    const bool odd = lane % 2 != 0;
    const int r = warp_row + lane / 4 + (odd ? 8 : 0);
#pragma unroll
    for (int g = 0; g < kEights; ++g) {
      const float* v = sum + 4 * (eight + g);
      const float x = __shfl_xor_sync(~0u, odd ? v[0] : v[2], 1);
      const float y = __shfl_xor_sync(~0u, odd ? v[1] : v[3], 1);
      store_shared4(chunk + r * 128 + ((g * 2 + lane % 4 / 2) ^ (r % 8)) * 16, odd ? x : v[0],
                    odd ? y : v[1], odd ? v[2] : x, odd ? v[3] : y);
    }
  } else {
    const int r = warp_row + lane % 16;
#pragma unroll
    for (int g = 0; g < kEights; g += 2) {
      const float* v = sum + 4 * (eight + g);
      const uint32_t words[4] = {to_bf16x2(v[0], v[1]), to_bf16x2(v[2], v[3]),
                                 to_bf16x2(v[4], v[5]), to_bf16x2(v[6], v[7])};
      store_matrices(chunk + r * 128 + ((g + lane / 16) ^ (r % 8)) * 16, words);
    }
  }
}

// Stores through shared memory, from which the copy engine writes while the next tile is computed;
// it clips what lies outside D. As many chunks at once as there is room for.
template <class T, bool kSquare, bool kF32>
BLOCKSCALE_DEVICE void store_boxes(const float (&sum)[T::kWaves][T::kN / 2], const GemmParams& p,
                                   const Shared<T, kSquare>& shared, int group, const Work& w,
                                   int row, int column) {
  constexpr int kColumns = kF32 ? 32 : 64, kAcross = T::kN / kColumns;
  constexpr int kTotal = T::kWaves * kAcross;
  const int warp = static_cast<int>(threadIdx.x) % 128 / 32, lane = lane_index();
  const auto stage = [&](int i, int chunk) {
    stage_chunk<kF32>(sum[i / kAcross], i % kAcross * kColumns / 8, shared.chunk(group, chunk));
  };
  const auto store = [&](int i, int chunk) {
    store_box(shared.chunk(group, chunk), p.d, column + i % kAcross * kColumns,
              row + i / kAcross * T::kWaveRows,
              p.problem.grouping == Grouping::contraction ? w.group : 0, p.out.add);
  };
  const auto begin = [&](bool stores) {
    if (stores) stores_wait_read();  // of what the chunks held before
    named_sync(1 + group, 128);
  };
  const auto staged = [&] {
    gpu::fence_copies();
    named_sync(1 + group, 128);
  };
  if constexpr (kSquare && kTotal <= T::kChunks) {
    // Each warp stores a chunk: one thread would take longer. After a CTA's only tile, nothing
    // hides that the copy engine reads them, so one half leaves while the other is staged. (Where
    // every column has a scale, D is FP32 for the most part, with no room for all of it at once,
    // and the compiler's code for 192 x 128's main loop gets slower by 3% if this is here.)
    constexpr int kHalf = kTotal / 2;
    static_assert(kTotal <= 4);
    const auto leave = [&](int first, int last) {
      staged();
      if (lane == 0 && first <= warp && warp < last) {
        store(warp, warp);
        stores_commit();
      }
    };
    begin(lane == 0);
#pragma unroll
    for (int i = 0; i < kTotal; ++i) {
      stage(i, i);
      if (i + 1 == kHalf && p.out.early) leave(0, kHalf);
    }
    leave(p.out.early ? kHalf : 0, kTotal);
  } else {
    const bool stores = warp == 0 && lane == 0;
#pragma unroll
    for (int done = 0; done < kTotal; done += T::kChunks) {
      begin(stores);
#pragma unroll
      for (int i = 0; i < T::kChunks && done + i < kTotal; ++i) stage(done + i, i);
      staged();
      if (stores) {
#pragma unroll
        for (int i = 0; i < T::kChunks && done + i < kTotal; ++i) store(done + i, i);
        stores_commit();
      }
    }
  }
}

BLOCKSCALE_DEVICE void store_pair(const GemmParams& p, int64_t at, int column, float x, float y) {
  const Output& out = p.out;
  const bool second = column + 1 < p.problem.n;
  if (out.f32) {
    float* d = static_cast<float*>(out.d) + at;
    d[0] = out.add ? d[0] + x : x;
    if (second) d[1] = out.add ? d[1] + y : y;
  } else {
    uint16_t* d = static_cast<uint16_t*>(out.d) + at;
    const uint32_t both = to_bf16x2(x, y);
    if (out.pairs && second) {
      *reinterpret_cast<uint32_t*>(d) = both;
    } else {
      d[0] = static_cast<uint16_t>(both);
      if (second) d[1] = static_cast<uint16_t>(both >> 16);
    }
  }
}

// Fills rows [first, last) of D, numbered across its matrices, with kWarps warps of every CTA.
template <int kWarps>
BLOCKSCALE_DEVICE void fill_rows(const GemmParams& p, int64_t first, int64_t last, float value,
                                 int warp) {
  const int step = static_cast<int>(gridDim.x) * kWarps;
  for (int64_t row = first + static_cast<int>(blockIdx.x) * kWarps + warp; row < last; row += step)
    for (int c = lane_index() * 2; c < p.problem.n; c += 64)
      store_pair(p, row * p.out.row_stride + c, c, value, value);
}

// Stores straight from registers: the tail of a group of rows, and outputs that the copy engine
// cannot describe.
template <class T>
BLOCKSCALE_DEVICE void store_elements(const float (&sum)[T::kWaves][T::kN / 2], const GemmParams& p,
                                      const Work& w, int row, int column) {
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  const int64_t base =
      p.problem.grouping == Grouping::contraction ? w.group * p.out.group_stride : 0;
#pragma unroll
  for (int wave = 0; wave < T::kWaves; ++wave) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + wave * T::kWaveRows + thread / 32 * 16 + lane / 4 + half * 8;
      if (r >= w.row_end) continue;
      const int64_t line = base + r * p.out.row_stride;
#pragma unroll
      for (int g = 0; g < T::kN / 8; ++g) {
        const int c = column + g * 8 + lane % 4 * 2;
        if (c < p.problem.n)
          store_pair(p, line + c, c, sum[wave][4 * g + 2 * half], sum[wave][4 * g + 2 * half + 1]);
      }
    }
  }
}

// Each CTA of the cluster has summed a part of K in its registers. The parts meet in shared memory,
// where each CTA adds up some of the rows, always in the same order.
template <class T>
BLOCKSCALE_DEVICE void add_parts(const float (&sum)[T::kWaves][T::kN / 2], const GemmParams& p,
                                 uint32_t memory, const Work& w, int group_column, int rank) {
  constexpr int kPitch = T::kColumns + 8, kThreads = 128 * T::kGroups, kAcross = T::kColumns / 4;
  static_assert(!T::kSplit || T::kRows == 64);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  named_sync(1, kThreads);  // all warps are done with the stages there
#pragma unroll
  for (int g = 0; g < T::kN / 8; ++g) {
    const int r = thread % 128 / 32 * 16 + lane / 4, c = group_column + g * 8 + lane % 4 * 2;
    const uint32_t at = memory + (r * kPitch + c) * 4;
    store_shared2(at, sum[0][4 * g], sum[0][4 * g + 1]);
    store_shared2(at + 8 * kPitch * 4, sum[0][4 * g + 2], sum[0][4 * g + 3]);
  }
  cluster_sync();
  for (int i = rank * kThreads + thread; i < 64 * kAcross; i += T::kCluster * kThreads) {
    const int r = i / kAcross, c = i % kAcross * 4;
    if (w.row + r >= w.row_end) break;
    float4 part[T::kCluster];
#pragma unroll
    for (int j = 0; j < T::kCluster; ++j)
      part[j] = load_there4(there_of(memory + (r * kPitch + c) * 4, j));
    float4 v = part[0];
#pragma unroll
    for (int j = 1; j < T::kCluster; ++j) {
      v.x += part[j].x, v.y += part[j].y, v.z += part[j].z, v.w += part[j].w;
    }
    const int column = w.column + c;
    const int64_t at = (w.row + r) * p.out.row_stride + column;
    if (column < p.problem.n) store_pair(p, at, column, v.x, v.y);
    if (column + 2 < p.problem.n) store_pair(p, at + 2, column + 2, v.z, v.w);
  }
}

}  // namespace blockscale::sm90
