// Tensor-core sums over one block, multiplied by their scales and added to FP32 sums; and where the
// scales come from.
#pragma once

#include "cuda/sm90/kernel.h"

namespace blockscale::sm90 {

// sum += tensor-core sums * scales, one scale per row.
template <int kN>
BLOCKSCALE_DEVICE void promote(float (&sum)[kN / 2], const float (&part)[kN / 2], float upper,
                               float lower) {
#pragma unroll
  for (int g = 0; g < kN / 8; ++g) {
    sum[4 * g] = fmaf(part[4 * g], upper, sum[4 * g]);
    sum[4 * g + 1] = fmaf(part[4 * g + 1], upper, sum[4 * g + 1]);
    sum[4 * g + 2] = fmaf(part[4 * g + 2], lower, sum[4 * g + 2]);
    sum[4 * g + 3] = fmaf(part[4 * g + 3], lower, sum[4 * g + 3]);
  }
}
// The same with a scale per column, in shared memory. kAhead pairs of them are loaded before
// waiting for the sums, the others as registers become free.
template <int kN, int kAhead>
struct ColumnScales {
  static constexpr int kGroups = kN / 8;
  uint32_t address;
  float2 next[kAhead];

  BLOCKSCALE_DEVICE explicit ColumnScales(uint32_t scales) : address(scales) {
#pragma unroll
    for (int g = 0; g < kAhead; ++g) next[g] = load_shared2(address + g * 32);
  }
  BLOCKSCALE_DEVICE void promote(float (&sum)[kN / 2], const float (&part)[kN / 2], float upper,
                                 float lower) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float2 b = next[g % kAhead];
      if (g + kAhead < kGroups) next[g % kAhead] = load_shared2(address + (g + kAhead) * 32);
      sum[4 * g] = fmaf(part[4 * g] * upper, b.x, sum[4 * g]);
      sum[4 * g + 2] = fmaf(part[4 * g + 2] * lower, b.x, sum[4 * g + 2]);
      sum[4 * g + 1] = fmaf(part[4 * g + 1] * upper, b.y, sum[4 * g + 1]);
      sum[4 * g + 3] = fmaf(part[4 * g + 3] * lower, b.y, sum[4 * g + 3]);
    }
  }
};

// The scales of B that all columns of a warp share: each lane holds the scale of one of 32 blocks,
// and of one of the next 32.
template <bool kUsed>
struct BlockScales {
  const float* next;
  int step, left;  // from this lane's next block on
  float now, ahead;

  BLOCKSCALE_DEVICE BlockScales(const GemmParams& p, const Work& w, int column) {
    if constexpr (!kUsed) return;
    const int batch = p.problem.grouping == Grouping::rows ? w.group : 0;
    const int across = (p.problem.n + kBlock - 1) / kBlock, line = (across + 3) / 4 * 4;
    next = p.b_scales + batch * p.b_scale_group + (w.first_block + lane_index()) * line +
           min(column / kBlock, across - 1);
    step = 32 * line;
    left = w.blocks - lane_index();
    load();
  }
  BLOCKSCALE_DEVICE void load() {
    if (left > 0) ahead = load_after(next);
    next += step;
    left -= 32;
  }
  // To be called for all blocks, in order.
  BLOCKSCALE_DEVICE float of(int block) {
    if (block % 32 == 0) {
      now = ahead;
      load();
    }
    return __shfl_sync(~0u, now, block % 32);
  }
};

}  // namespace blockscale::sm90
