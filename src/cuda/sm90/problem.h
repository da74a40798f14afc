// What one launch multiplies and in which order: the three schedules (dense, row-grouped,
// contraction-grouped) are an enumeration of tiles, and the kernel below them is one.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/sm90/gemm.h"
#include "divisor.h"

namespace blockscale::sm90 {

// In units: a unit is the tile, or the pair of neighbouring tiles, that one cluster computes.
struct Problem {
  int m = 0, n = 0;  // rows: m counts the rows of all groups
  int k_blocks = 0;  // blocks of 128 along K; contraction: of the whole storage
  Grouping grouping = Grouping::dense;
  int groups = 1;
  const void* offsets = nullptr;  // cumulative ends of the groups, int32 or int64
  bool wide_offsets = false;
  Divisor units_across;             // along N
  int units_down = 0;               // along M; rows: not used
  Divisor band;                     // units along M that are walked together, for the L2 cache
  Divisor band_units, group_units;  // of a band; of a group of the contraction axis
};

// The work of a cluster for one output tile pair.
struct Work {
  int row, row_end;  // first row in A and D, and the end of its group
  int column;
  int group;
  int first_block, blocks;  // along K
};

__device__ __forceinline__ int group_end(const Problem& p, int group) {
  if (group < 0) return 0;
  const int64_t limit =
      p.grouping == Grouping::rows ? p.m : static_cast<int64_t>(p.k_blocks) * kBlock;
  const int64_t end = p.wide_offsets ? static_cast<const int64_t*>(p.offsets)[group]
                                     : static_cast<const int32_t*>(p.offsets)[group];
  return static_cast<int>(end < 0 ? 0 : end > limit ? limit : end);
}

// starts[g]: units (rows) or blocks along K (contraction) before group g. All threads call it; the
// caller synchronizes.
template <int kUnitRows>
__device__ __forceinline__ void list_groups(const Problem& p, int* starts) {
  for (int g = static_cast<int>(threadIdx.x); g < p.groups; g += static_cast<int>(blockDim.x)) {
    const int size = max(0, group_end(p, g) - group_end(p, g - 1));
    starts[g + 1] = p.grouping == Grouping::rows
                        ? (size + kUnitRows - 1) / kUnitRows * static_cast<int>(p.units_across.by())
                        : (size + kBlock - 1) / kBlock;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int lane = static_cast<int>(threadIdx.x);
  int before = 0;
  if (lane == 0) starts[0] = 0;
  for (int base = 0; base < p.groups; base += 32) {
    int sum = base + lane < p.groups ? starts[base + lane + 1] : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    // Offsets that decrease come to more than there is.
    const int most = p.grouping == Grouping::rows ? INT_MAX : p.k_blocks;
    if (base + lane < p.groups) starts[base + lane + 1] = min(before + sum, most);
    before += __shfl_sync(~0u, sum, 31);
  }
}

__device__ __forceinline__ int unit_count(const Problem& p, const int* starts) {
  if (p.grouping == Grouping::rows) return starts[p.groups];
  return static_cast<int>(p.group_units.by()) * p.groups;
}

// The work of CTA `rank` in unit `unit`; `group` is where the last call left off, 0 at first.
template <class Tile>
__device__ __forceinline__ Work work_of(const Problem& p, const int* starts, int unit, int rank,
                                        int& group) {
  Work w{0, p.m, 0, 0, 0, p.k_blocks};
  int units_down = p.units_down;
  auto left = static_cast<uint32_t>(unit);
  if (p.grouping == Grouping::rows) {
    while (unit >= starts[group + 1]) ++group;
    left -= starts[group];
    units_down = static_cast<int>(p.units_across.quotient(starts[group + 1] - starts[group]));
    w.row = group_end(p, group - 1);
    w.row_end = group_end(p, group);
  } else if (p.grouping == Grouping::contraction) {
    group = static_cast<int>(p.group_units.divide(left));
    w.first_block = starts[group];
    w.blocks = starts[group + 1] - starts[group];
  }
  w.group = group;
  const int most = static_cast<int>(p.band.by());
  const int first = static_cast<int>(p.band_units.divide(left)) * most;
  const int height = min(most, units_down - first), here = static_cast<int>(left);
  const int across = height == most ? static_cast<int>(p.band.quotient(left)) : here / height;
  const int down = first + here - across * height;
  const int place = Tile::kSplit ? 0 : rank;
  w.row += down * Tile::kUnitRows + (Tile::kPairsColumns ? 0 : place * Tile::kRows);
  w.column = across * Tile::kUnitColumns + (Tile::kPairsColumns ? place * Tile::kColumns : 0);
  if constexpr (Tile::kSplit) {
    const int first = w.blocks * rank / Tile::kCluster;
    w.blocks = w.blocks * (rank + 1) / Tile::kCluster - first;
    w.first_block += first;
  }
  return w;
}

}  // namespace blockscale::sm90
