// What one launch multiplies and in which order: the three groupings (dense, row-grouped,
// contraction-grouped) are ways to enumerate tiles; the kernel beneath them is the same.
#pragma once

#include <cstdint>

#include "cuda/sm90/gemm.h"
#include "divisor.h"
#include "gpu/port.h"

namespace blockscale::sm90 {

inline constexpr int kStepBytes = 32, kSteps = kBlock / kStepBytes;  // of K, in one wgmma

// Counted in units: a unit is the tile, or the pair of neighbouring tiles, that one cluster
// computes.
struct Problem {
  int m = 0, n = 0;  // rows: m counts the rows of all groups
  int k_blocks = 0;  // blocks of 128 bytes along K; contraction: of the whole storage
  Grouping grouping = Grouping::dense;
  int groups = 1;
  int group_rows = 0;             // total rows that the groups divide
  int scale_unit = 1;             // rows: groups start at multiples of it among A's scales
  int tail_rows = 0;              // rows: a group's last unit runs late if it has <= this many rows
  int storage_unit = kBlock;      // contraction, BF16: groups start at multiples of it in storage
  const void* offsets = nullptr;  // cumulative ends of the groups, int32 or int64
  bool int64_offsets = false;
  Divisor units_across;             // along N
  int units_down = 0;               // along M; rows: not used
  Divisor band;                     // units along M that are walked together, for the L2 cache
  Divisor band_units, group_units;  // in a band; in a group of the contraction axis
  int counter = -1;                 // of a dynamic schedule; negative: fixed
  Previous previous = Previous::any;
};

// Wait for the preceding kernels, unless a promise makes that unnecessary: before offsets are read
// or units drawn from the counter; before operands are read. Everything else comes after
// after_previous().
BLOCKSCALE_DEVICE void before_units(const Problem& p) {
  if (p.previous == Previous::any) gpu::after_previous();
}
BLOCKSCALE_DEVICE void before_operands(const Problem& p) {
  if (p.previous != Previous::nothing) gpu::after_previous();
}

// The work of a CTA for one unit.
struct alignas(16) Work {
  int row, row_end;  // first row in A and D, and the end of its group
  int scale_row;     // the first row's place among A's scales
  int column;
  int group;
  int first_block, blocks;  // along K; blocks < 0: no more work
  int shift = 0;            // BF16: bytes by which they start past a block of the storage
  int last_steps = kSteps;  // BF16: wgmmas along K in the last block
};

BLOCKSCALE_DEVICE Work no_work() { return {0, 0, 0, 0, 0, 0, -1}; }

BLOCKSCALE_DEVICE int64_t group_end(const Problem& p, int group) {
  if (group < 0) return 0;
  return p.int64_offsets ? static_cast<const int64_t*>(p.offsets)[group]
                         : static_cast<const int32_t*>(p.offsets)[group];
}

// Totals of everything before a group.
struct WorkBefore {
  int work;  // units (rows: without tails); contraction: blocks along K, in BF16 steps of 32 bytes
  uint32_t more;  // rows: tails and gaps, packed so that one addition sums both

  // Units along M with at most p.tail_rows rows.
  BLOCKSCALE_DEVICE int tails() const { return static_cast<int>(more >> 16); }
  // Rows among A's scales that belong to no group.
  BLOCKSCALE_DEVICE int gaps() const { return static_cast<int>(more & 0xFFFF); }
};
static_assert(3 * kMaxGroups < 1 << 16);  // gaps, of up to 3 rows per group, fit in their half

// Lists the starts of all groups, and of what would come after them. False, with no list, where the
// offsets make no sense. All threads call it; the caller synchronizes.
template <class Tile>
BLOCKSCALE_DEVICE bool list_groups(const Problem& p, WorkBefore* starts) {
  const auto units = [](int size, int unit) { return (size + unit - 1) / unit; };
  bool wrong = false;
  for (int g = static_cast<int>(threadIdx.x); g < p.groups; g += static_cast<int>(blockDim.x)) {
    const int64_t begin = group_end(p, g - 1), end = group_end(p, g);
    wrong |= begin > end || end > p.group_rows;
    const int size = static_cast<int>(end - begin);
    if (p.grouping == Grouping::rows) {
      const int whole = units(size - p.tail_rows, Tile::kUnitRows);
      const int gap = units(size, p.scale_unit) * p.scale_unit - size;
      const uint32_t tail = whole * Tile::kUnitRows < size;
      starts[g + 1] = {whole * static_cast<int>(p.units_across.by()), tail << 16 | gap};
    } else if constexpr (Tile::kScaled) {
      starts[g + 1] = {units(size, kBlock), 0};
    } else {
      starts[g + 1] = {units(size, p.storage_unit) * (p.storage_unit / (kStepBytes / 2)), 0};
    }
  }
  if (__syncthreads_or(wrong)) return false;
  if (threadIdx.x >= 32) return true;
  const int lane = static_cast<int>(threadIdx.x);
  WorkBefore before{0, 0};
  if (lane == 0) starts[0] = before;
  for (int base = 0; base < p.groups; base += 32) {
    WorkBefore sum = base + lane < p.groups ? starts[base + lane + 1] : WorkBefore{0, 0};
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int work = __shfl_up_sync(~0u, sum.work, step);
      const uint32_t more = __shfl_up_sync(~0u, sum.more, step);
      if (lane >= step) sum.work += work, sum.more += more;
    }
    sum.work += before.work, sum.more += before.more;
    if (base + lane < p.groups) starts[base + lane + 1] = sum;
    before = {__shfl_sync(~0u, sum.work, 31), __shfl_sync(~0u, sum.more, 31)};
  }
  return true;
}

BLOCKSCALE_DEVICE int unit_count(const Problem& p, const WorkBefore* starts) {
  if (p.grouping == Grouping::rows)
    return starts[p.groups].work + starts[p.groups].tails() * static_cast<int>(p.units_across.by());
  return static_cast<int>(p.group_units.by()) * p.groups;
}

// The work of CTA `rank` in unit `unit`, which comes after the previous call's unit. `place` is
// where that call left off among the groups and then among their tails; initially 0.
template <class Tile>
BLOCKSCALE_DEVICE Work work_of(const Problem& p, const WorkBefore* starts, int unit, int rank,
                               int& place) {
  Work w{0, p.m, 0, 0, 0, 0, p.k_blocks};
  int units_down = p.units_down;
  auto left = static_cast<uint32_t>(unit);
  if (p.grouping == Grouping::rows) {
    // Tails come last: being short, they even out the clusters' load so far.
    const int across = static_cast<int>(p.units_across.by()), whole = starts[p.groups].work;
    const bool tail = unit >= whole;
    const int passed = tail ? p.groups : 0;
    place = max(place, passed);
    const auto before = [&](int g) {
      return tail ? whole + starts[g].tails() * across : starts[g].work;
    };
    while (unit >= before(place - passed + 1)) ++place;
    const int group = w.group = place - passed;
    left -= before(group);
    units_down =
        static_cast<int>(p.units_across.quotient(starts[group + 1].work - starts[group].work));
    w.row = static_cast<int>(group_end(p, group - 1)) + (tail ? units_down * Tile::kUnitRows : 0);
    w.row_end = static_cast<int>(group_end(p, group));
    w.scale_row = w.row + starts[group].gaps();
    if (tail) units_down = 1;
  } else if (p.grouping == Grouping::contraction) {
    const int group = w.group = static_cast<int>(p.group_units.divide(left));
    w.first_block = starts[group].work;
    w.blocks = starts[group + 1].work - starts[group].work;
    if constexpr (!Tile::kScaled) {  // counted in steps until here
      const int steps = w.blocks;
      w.shift = w.first_block % kSteps * kStepBytes;
      w.first_block /= kSteps;
      w.blocks = (steps + kSteps - 1) / kSteps;
      w.last_steps = steps - (w.blocks - 1) * kSteps;
    }
  }
  const int most = static_cast<int>(p.band.by());
  const int first = static_cast<int>(p.band_units.divide(left)) * most;
  const int height = min(most, units_down - first), here = static_cast<int>(left);
  const int across = height == most ? static_cast<int>(p.band.quotient(left)) : here / height;
  const int down = first + here - across * height;
  const int neighbour = Tile::kSplit ? 0 : rank;
  const int row = down * Tile::kUnitRows + (Tile::kPairsColumns ? 0 : neighbour * Tile::kRows);
  w.row += row;
  w.scale_row += row;
  w.column = across * Tile::kUnitColumns + (Tile::kPairsColumns ? neighbour * Tile::kColumns : 0);
  if constexpr (Tile::kSplit) {
    const int first = w.blocks * rank / Tile::kCluster;
    w.blocks = w.blocks * (rank + 1) / Tile::kCluster - first;
    w.first_block += first;
  }
  return w;
}

}  // namespace blockscale::sm90
