// The kernel's math warpgroups: multiply, promote, and walk over the tiles.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/sm90/decode.h"
#include "cuda/sm90/output.h"
#include "cuda/sm90/promote.h"

namespace blockscale::sm90 {

// Starts a wave's products with one block; `part` may be used after waiting for them.
template <int kN, bool kAE5m2, bool kBE5m2>
BLOCKSCALE_DEVICE void start_wave(float (&part)[kN / 2], uint64_t a_tile, uint64_t b_tile) {
  pin(part);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < kBlock / 32; ++k)
    wgmma<kN, kAE5m2, kBE5m2>(part, a_tile + 2 * k, b_tile + 2 * k, k != 0);
  wgmma_commit();
}

// The state that a thread of a math warpgroup keeps while it walks over the tiles, and the sums of
// one tile.
template <class T, bool kSquare, bool kAE5m2, bool kBE5m2>
struct Multiplier {
  static constexpr int kN = T::kN;
  static constexpr int kWaveStep = T::kWaveRows * kBlock / 16;  // in descriptors
  using Sums = float[T::kWaves][kN / 2];

  const Shared<T, kSquare>& shared;
  int lane, group_column;
  uint32_t a_tiles, b_tiles;  // descriptors of this warpgroup's part of the first stage
  bool tells;                 // lane l signals CTA l of those that share
  uint32_t empty_there;       // that CTA's first empty barrier
  Ring<T::kStages> ring;

  BLOCKSCALE_DEVICE void release(int stage) const {
    if (tells) barrier_arrive_there(empty_there + stage * kBarrierBytes);
  }
  BLOCKSCALE_DEVICE uint64_t a_tile(int stage) const {
    return tile_descriptor(a_tiles + stage * (T::kABytes / 16));
  }
  BLOCKSCALE_DEVICE uint64_t b_tile(int stage) const {
    return tile_descriptor(b_tiles + stage * (T::kBBytes / 16));
  }
  // The scales of this thread's rows, the first of which is `first` in the stage's copy.
  template <int kRows>
  BLOCKSCALE_DEVICE void load_row_scales(float (&scale)[kRows], int stage, int first) const {
    const uint32_t a_scales = shared.a_scales(stage) + first * 4;
#pragma unroll
    for (int j = 0; j < kRows; ++j)
      scale[j] = load_shared(a_scales + (j / 2 * T::kWaveRows + j % 2 * 8) * 4);
  }

  // For a warpgroup that has no row of the group.
  BLOCKSCALE_DEVICE void pass_over(int blocks) {
    for (int i = 0; i < blocks; ++i, ring.next()) {
      barrier_wait(shared.full(ring.stage), ring.phase);
      release(ring.stage);
    }
  }

  // One wave after another. `square`: index, in the stage's copy of B's scales, of the first
  // 128x128 block that these columns lie in.
  template <int kWaves>
  BLOCKSCALE_DEVICE void multiply(Sums& sum, int blocks, int first_scale, int square,
                                  BlockScales<kBringsScales<T, kSquare>>& block_scales) {
    constexpr bool kBrings = kBringsScales<T, kSquare>;
    // Unrolled so that the end of one block overlaps the start of the next; per-column scales leave
    // no registers for that.
    constexpr int kUnroll = kSquare ? 4 : 1;
    constexpr int kAhead = kN < 32 ? kN / 8 : 4;  // pairs of column scales
    float part[kN / 2];
    bool full = false;
    if (!kSquare && blocks > 0) barrier_wait(shared.full(ring.stage), ring.phase);
#pragma unroll kUnroll
    for (int i = 0; i < blocks; ++i) {
      const int stage = ring.stage;
      if (kSquare && !full) barrier_wait(shared.full(stage), ring.phase);
      const uint64_t a = a_tile(stage), b = b_tile(stage);
      const uint32_t b_scales =
          shared.b_scales(stage) + (kSquare ? square : group_column + lane % 4 * 2) * 4;
      float scale[2 * kWaves], of_columns = 1;  // of this thread's rows; of all its columns
      load_row_scales(scale, stage, first_scale);
      if constexpr (kSquare && !kBrings) of_columns = load_shared(b_scales);
      bool next_full = false;  // tested before the promotion, needed after it
      ring.next();
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        const bool last = wave == kWaves - 1;
        start_wave<kN, kAE5m2, kBE5m2>(part, a + wave * kWaveStep, b);
        if (kSquare && wave == 0) {
          if constexpr (kBrings) of_columns = block_scales.of(i);
#pragma unroll
          for (float& row_scale : scale) row_scale *= of_columns;
          __syncwarp();  // all lanes have their scales before one lane signals it
        }
        const float upper = scale[2 * wave], lower = scale[2 * wave + 1];
        if constexpr (kSquare) {
          pin(part);
          wgmma_wait();
          if (last) release(stage);
          if (last) next_full = barrier_test(shared.full(ring.stage), ring.phase);
          promote<kN>(sum[wave], part, upper, lower);
        } else {
          ColumnScales<kN, kAhead> columns(b_scales);
          pin(part);
          wgmma_wait();
          if (last) next_full = barrier_test(shared.full(ring.stage), ring.phase);
          columns.promote(sum[wave], part, upper, lower);
          if (last) __syncwarp();  // as above
          if (last) release(stage);
        }
      }
      // Where the loop is unrolled, only the result of the test may come before the next block.
      if (kSquare)
        full = next_full;
      else if (!next_full && i + 1 < blocks)
        barrier_wait(shared.full(ring.stage), ring.phase);
    }
  }

  // Adds the products of one stage: all of its steps, or the first `steps` if not kWhole.
  template <int kWaves, bool kWhole>
  BLOCKSCALE_DEVICE void start_plain(Sums& sum, int stage, int steps) const {
    const uint64_t a = a_tile(stage), b = b_tile(stage);
    wgmma_begin();
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) {
      pin(sum[wave]);
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        if (kWhole || k < steps) wgmma_bf16<kN>(sum[wave], a + wave * kWaveStep + 2 * k, b + 2 * k);
    }
    wgmma_commit();
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) pin(sum[wave]);
  }

  // Without scales the tensor cores add up all blocks themselves, but only `last_steps` steps of
  // the last. A stage is free once the next one's products are under way, as its own are done by
  // then.
  template <int kWaves>
  BLOCKSCALE_DEVICE void multiply_plain(Sums& sum, int blocks, int last_steps) {
    int before = -1;
    const int whole = last_steps == kSteps ? blocks : blocks - 1;
#pragma unroll 1
    for (int i = 0; i < whole; ++i, ring.next()) {
      barrier_wait(shared.full(ring.stage), ring.phase);
      start_plain<kWaves, true>(sum, ring.stage, kSteps);
      wgmma_wait<1>();
      if (before >= 0) release(before);
      before = ring.stage;
    }
    if (whole < blocks) {
      barrier_wait(shared.full(ring.stage), ring.phase);
      start_plain<kWaves, false>(sum, ring.stage, last_steps);
    }
    wgmma_wait();
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) pin(sum[wave]);
    if (before >= 0) release(before);
    if (whole < blocks) {
      release(ring.stage);
      ring.next();
    }
  }

  // Waves that share their column scales, alternating between two accumulators: the tensor cores
  // fill one while the other is promoted. All scales are loaded beforehand: loads from shared
  // memory in between would wait behind the tensor cores' reads.
  template <int kWaves>
  BLOCKSCALE_DEVICE void multiply_in_turn(Sums& sum, int blocks, int first_scale) {
    float part[kN / 2], other[kN / 2];
    bool full = false;
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
      const int stage = ring.stage;
      if (!full) barrier_wait(shared.full(stage), ring.phase);
      const uint64_t a = a_tile(stage), b = b_tile(stage);
      float scale[2 * kWaves];
      load_row_scales(scale, stage, first_scale);
      ColumnScales<kN, kN / 8> columns(shared.b_scales(stage) + (group_column + lane % 4 * 2) * 4);
      ring.next();
      start_wave<kN, kAE5m2, kBE5m2>(part, a, b);
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        float(&now)[kN / 2] = wave % 2 ? other : part;
        float(&then)[kN / 2] = wave % 2 ? part : other;
        const bool last = wave == kWaves - 1;
        if (!last) start_wave<kN, kAE5m2, kBE5m2>(then, a + (wave + 1) * kWaveStep, b);
        pin(now);
        if (last)
          wgmma_wait();
        else
          wgmma_wait<1>();
        pin(now);
        if (last) {
          __syncwarp();  // as above
          release(stage);
          full = barrier_test(shared.full(ring.stage), ring.phase);
        }
        columns.promote(sum[wave], now, scale[2 * wave], scale[2 * wave + 1]);
      }
    }
  }
};

template <class T, bool kSquare, bool kAE5m2, bool kBE5m2>
BLOCKSCALE_DEVICE void multiply_tiles(const GemmParams& p, const Shared<T, kSquare>& shared,
                                      const Mailbox& mailbox, int rank) {
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int group_index = warp / 4, lane = lane_index();
  // This warpgroup's place in the tile, and this thread's first row in the warpgroup.
  const int group_row = T::kSideBySide ? 0 : group_index * 64;
  const int group_column = T::kSideBySide ? group_index * T::kN : 0;
  const int thread_row = warp % 4 * 16 + lane / 4;
  const uint32_t a_tiles = tile_low_word(shared.a(0) + group_row * kBlock);
  const uint32_t b_tiles = tile_low_word(shared.b(0) + group_column * kBlock);
  const bool tells = lane < T::kSharing;
  const uint32_t empty_there = there_of(shared.empty(0), T::kSplit ? rank : tells ? lane : 0);
  Multiplier<T, kSquare, kAE5m2, kBE5m2> multiplier{shared,  lane,  group_column, a_tiles,
                                                    b_tiles, tells, empty_there,  {}};
  for (int turn = 0;; ++turn) {
    const Work w = mailbox.read(turn);
    if (w.blocks < 0) break;
    if (turn == 0) before_operands(p.problem);
    const int row = w.row + group_row, column = w.column + group_column;
    const int last_wave = row + (T::kWaves - 1) * T::kWaveRows;  // its first row
    const bool whole = last_wave + 64 <= w.row_end || w.row_end == p.problem.m;
    float sum[T::kWaves][T::kN / 2] = {};
    const int square = column / kBlock - w.column / kBlock / 4 * 4;
    const int first_scale = w.scale_row % 4 + group_row + thread_row;
    BlockScales<kBringsScales<T, kSquare>> block_scales(p, w, column);
    const auto multiply_waves = [&](auto waves) {
      constexpr int kWaves = decltype(waves)::value;
      if constexpr (!T::kScaled)
        multiplier.template multiply_plain<kWaves>(sum, w.blocks, w.last_steps);
      else if constexpr (T::kInTurn)
        multiplier.template multiply_in_turn<kWaves>(sum, w.blocks, first_scale);
      else
        multiplier.template multiply<kWaves>(sum, w.blocks, first_scale, square, block_scales);
    };
    // All waves, the first one alone, or none.
    if (T::kWaves > 1 ? row + T::kWaveRows < w.row_end : row < w.row_end)
      multiply_waves(std::integral_constant<int, T::kWaves>());
    else if (T::kWaves > 1 && row < w.row_end)
      multiply_waves(std::integral_constant<int, 1>());
    else
      multiplier.pass_over(w.blocks);
    if (turn == 0) after_previous();  // for D, and for the epilogue's factors and addends
    const bool any = w.blocks > 0;
    // D stays as it is, even a -0. (One CTA's part of K may be empty while others, which wait for
    // it, are not.)
    if (!T::kSplit && !any && p.out.add && !p.out.bias) continue;
    if constexpr (T::kScaled)
      finish<T>(sum, p, w.group, column, any, !T::kSplit || rank == 0);
    else
      finish_outer<T>(sum, p, w.group, column, any);
    if constexpr (T::kSplit) {
      add_parts<T>(sum, p, shared.base, w, group_column, rank);
      return;  // the launch has a cluster for every unit
    }
    if (!T::kStaged || !p.out.boxes || !whole) {
      store_elements<T>(sum, p, w, row, column);
    } else if constexpr (T::kStaged) {
      if (p.out.f32)
        store_boxes<T, kSquare, true>(sum, p, shared, group_index, w, row, column);
      else
        store_boxes<T, kSquare, false>(sum, p, shared, group_index, w, row, column);
    }
  }
  if (lane == 0) stores_wait_read();
}

// By one thread: barriers, and the tensor maps where the copy engine finds them.
template <class T, bool kSquare>
BLOCKSCALE_DEVICE void set_up(const GemmParams& p, const Shared<T, kSquare>& shared,
                              const Mailbox& mailbox) {
  // Warps that fill a stage of B by themselves.
  constexpr int kDecoders = T::kDecodes ? T::kColumns / 32 : 0;
  for (int i = 0; i < T::kStages; ++i) {
    // Arrivals: the thread that loads codes, those warps, and the warp that loads scales.
    barrier_init(shared.full(i), 1 + kDecoders + (kScaleWarp<T, kSquare> ? 32 : 0));
    barrier_init(shared.empty(i), T::kSharing * T::kGroups * 4);
  }
  mailbox.init(T::kGroups * 4 + kScaleWarp<T, kSquare> + 4 * T::kDecodes);
  barrier_init_done();
  if (p.problem.k_blocks > 0) prefetch_map(p.a);
  if (p.problem.k_blocks > 0 && !T::kDecodes) prefetch_map(p.b);
  if (p.out.boxes) prefetch_map(p.d);
}

template <class T, bool kSquare, bool kAE5m2, bool kBE5m2>
BLOCKSCALE_DEVICE void multiply_all(const GemmParams& p) {
  extern __shared__ uint8_t memory[];
  const uint32_t start = shared_address(memory), base = (start + 1023) / 1024 * 1024;
  const Shared<T, kSquare> shared{__shfl_sync(~0u, base, 0)};
  uint8_t* const tables = memory + (base - start);
  auto* starts = reinterpret_cast<WorkBefore*>(tables + kStartsAt<T, kSquare>);
  constexpr int kWorkAt = kMailboxAt<T, kSquare> + Mailbox::kWorkAt;
  const Mailbox mailbox{shared.base + kMailboxAt<T, kSquare>,
                        reinterpret_cast<Work*>(tables + kWorkAt)};
  const int rank = T::kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
  // One thread sets up the barriers while another, which will load codes, looks for its first work.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp == 4 * T::kGroups) {
    cluster_arrive();
    if (elect_one()) find_first<T>(p.problem, mailbox, rank);
  } else {
    if (threadIdx.x == 0) set_up<T, kSquare>(p, shared, mailbox);
    __syncwarp();
    cluster_arrive();
  }
  __syncwarp();
  cluster_wait();
  if (p.problem.grouping != Grouping::dense) {
    before_units(p.problem);
    if (!list_groups<T>(p.problem, starts)) {
      after_previous();
      const int matrices = p.problem.grouping == Grouping::rows ? 1 : p.problem.groups;
      fill_rows<T::kThreads / 32>(p, 0, int64_t{1} * matrices * p.problem.m,
                                  __uint_as_float(kNanBits), static_cast<int>(threadIdx.x) / 32);
      return;
    }
    __syncthreads();
  }

  if (T::kDecodes && threadIdx.x >= 128 * (T::kGroups + 1)) {
    if constexpr (T::kDecodes) {
      registers_down<T::kDecodeRegisters>();
      decode_tiles(p, shared, mailbox, warp % 4);
      __syncwarp();
    }
  } else if (threadIdx.x >= 128 * T::kGroups) {
    registers_down<T::kCopyRegisters>();
    const int copying = warp - 4 * T::kGroups;
    if (copying == 0 && elect_one())
      bring_tiles<T, kSquare>(p, shared, {p.problem, starts, mailbox, rank});
    if (kScaleWarp<T, kSquare> && copying == 1) bring_scales<T, kSquare>(p, shared, mailbox);
    // No other warp writes the rows of no group.
    if (copying >= 2 && p.problem.grouping == Grouping::rows && !p.out.add) {
      after_previous();
      fill_rows<2>(p, group_end(p.problem, p.problem.groups - 1), p.problem.m, 0, copying - 2);
    }
    __syncwarp();
    if constexpr (T::kSplit) cluster_sync();  // the one in add_parts()
  } else {
    registers_up<T::kMathRegisters>();
    gpu::bring_parameters<offsetof(GemmParams, a_scales)>(p);  // before there is anything to do
    multiply_tiles<T, kSquare, kAE5m2, kBE5m2>(p, shared, mailbox, rank);
    __syncwarp();
  }
  // No CTA exits while another still reads its sums (add_parts()).
  if constexpr (T::kSplit) cluster_sync();
}

template <class T, bool kSquare, bool kAE5m2, bool kBE5m2>
__global__ void __launch_bounds__(T::kThreads, 1)
    gemm_kernel(const __grid_constant__ GemmParams p) {
  multiply_all<T, kSquare, kAE5m2, kBE5m2>(p);
  // Even where a CTA had no work: a kernel that waits for this one thereby waits for all before it.
  if (p.problem.previous != Previous::any) after_previous();
}

}  // namespace blockscale::sm90
