// Hopper GEMMs: D = alpha * (A B^T) [+ bias] [+ D], in FP8 with FP32 scales, A [m, k] in blocks of
// 1x128 and B [n, k] in blocks of 128x128 or 1x128 (specification, section 10); or in BF16.
//
// One warpgroup has the copy engine load tiles of both operands into a ring of stages, each 128
// codes long on the contraction axis; two or three others multiply them with wgmma. A stage is one
// block of scales, so after each stage the tensor cores' sums are multiplied by their scales and
// added to FP32 sums on the ordinary units ("promoted"), while another warpgroup keeps the tensor
// cores busy. CTAs stay on their multiprocessor and walk over the tiles.
//
// In BF16 a stage has 64 values, and the tensor cores add up all stages; there are no scales, and
// `kSquare` says nothing. Where B is in codes, one more warpgroup fills its half of each stage
// (decode.h).
//
// Words: a unit is the tile of a CTA, or what a cluster computes (problem.h); a wave, 64 rows of a
// tile, the M of one wgmma (not a round of tiles over the chip); a band, units along M that are
// walked together so that L2 serves them (rasterization); the mailbox, where a CTA's threads learn
// of its units (scheduler.h); finishing a tile, the epilogue (output.h).
#pragma once

#include "cuda/sm90/scheduler.h"
#include "cuda/sm90/wgmma.h"
#include "cuda/tiles.h"
#include "gpu/dequantize/decode.h"

namespace blockscale::sm90 {

struct Output {
  void* d = nullptr;
  int64_t row_stride = 0, group_stride = 0;  // in elements
  float alpha = 1;
  const float* device_alpha = nullptr;  // one more factor
  const float* a_outer = nullptr;       // two more per group
  const float* b_outer = nullptr;
  const float* factors = nullptr;  // and one per column
  const void* bias = nullptr;
  DType bias_dtype = DType::f32;
  bool f32 = false;
  bool add = false;    // to the previous D; FP32 only
  bool boxes = false;  // the copy engine can write D
  bool early = false;  // a hint: no cluster has a second unit
  bool pairs = false;  // pairs of neighbouring elements of D are aligned to their size
};

// What is decoded where B is in codes (decode.h).
struct CodedFormat {
  gpu::Codec codec;
  Format element, scale;
  int block;
};
// B's codes and scales there, linear.
struct CodedLines {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t code_batch, scale_batch;  // bytes from one group to the next
  int code_line, scale_line;        // and from one line of codes, or row of scales, to the next
  int line_shift;                   // log2 of the lines that share a row of scales
};

struct GemmParams {
  CUtensorMap a, b, d;
  // mn_major: one line of scales per block along K. A line has one scale per row of A, and one per
  // row, or per 128 rows, of B.
  const float* a_scales;
  const float* b_scales;
  int a_scale_line;       // values in a line of A's scales
  int64_t b_scale_group;  // values from one group of B to the next
  uint32_t stage_bytes;   // of codes; with few rows, less than there is room for
  Problem problem;
  Output out;
  CodedLines coded;  // in place of b
};

// A tile of output: kGroups math warpgroups, side by side along N (kSideBySide) or one below the
// other, each with kWaves wgmmas of 64 x kN. The waves' rows alternate between the warpgroups, so
// that all of them have less to do where a group of rows ends early. Clusters of two share the
// operand they have in common; with kSplit each CTA of a cluster sums a part of K instead.
// `Shape` holds the TileShape, as kShape, and the format of B that is decoded, as kCoded.
template <class Shape, bool kScaled_>
struct Tile {
  static constexpr cuda::TileShape kShape = Shape::kShape;
  static constexpr int kGroups = kShape.groups, kWaves = kShape.waves, kN = kShape.n;
  static constexpr int kStages = kShape.stages, kCluster = kShape.cluster;
  static constexpr bool kSplit = kShape.split, kSideBySide = kShape.side_by_side;
  static constexpr bool kScaled = kScaled_;         // FP8 in blocks; else BF16, 64 values per block
  static constexpr bool kDecodes = kShape.decodes;  // one more warpgroup, see decode.h
  static constexpr CodedFormat kCoded = Shape::kCoded;
  static constexpr int kSharing = kShape.sharing();                   // CTAs that share an operand
  static constexpr bool kInTurn = kSideBySide && kWaves > 1;          // see multiply_in_turn()
  static constexpr int kWaveRows = 64 * (kSideBySide ? 1 : kGroups);  // from wave to wave
  static constexpr int kRows = kShape.rows(), kColumns = kShape.columns();
  static constexpr bool kPairsColumns = kShape.pairs_columns();
  static constexpr int kUnitRows = kShape.unit_rows(), kUnitColumns = kShape.unit_columns();
  static constexpr int kThreads = 128 * (kGroups + 1 + kDecodes);
  // Two waves of sums need every register that the threads that load can spare.
  static constexpr int kMathRegisters = kDecodes       ? (kWaves > 1 ? 184 : 176)
                                        : kGroups == 3 ? 152
                                        : kWaves > 1   ? 232
                                                       : 224;
  // What is left of the launch's, as many per thread as a multiprocessor has: 168 or 128.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kOtherRegisters =
      (kGroups + 1 + kDecodes) * kLaunchRegisters - kGroups * kMathRegisters;
  static constexpr int kCopyRegisters = kDecodes ? 40 : kOtherRegisters;
  static constexpr int kDecodeRegisters = kOtherRegisters - kCopyRegisters;

  // Shared memory, in bytes.
  static constexpr int kABytes = kRows * kBlock, kBBytes = kColumns * kBlock;
  static constexpr int kAScaleBytes = (kRows * 4 + 16 + 127) / 128 * 128;
  static constexpr int kBScaleBytes = (kColumns * 4 + 127) / 128 * 128;
  // A warpgroup stages its output in chunks of 64 rows x 128 bytes.
  static constexpr int kChunkBytes = 8192, kChunks = kShape.chunks();
  static constexpr bool kStaged = kChunks > 0;
  static constexpr int kChunksAt = kStages * (kABytes + kBBytes);
  static constexpr int kScalesAt = kChunksAt + kGroups * kChunks * kChunkBytes;
};
// Where columns share a scale and blocks are not short, the copy engine loads A's scales with the
// codes, and threads load B's themselves. Otherwise a warp copies both.
template <class T, bool kSquare>
inline constexpr bool kBringsScales = (T::kScaled && T::kRows >= 128 && kSquare);
template <class T, bool kSquare>
inline constexpr bool kScaleWarp = T::kScaled && !kBringsScales<T, kSquare>;
inline constexpr int kBarrierBytes = 16;       // of a stage: full, empty
inline constexpr int kSquareScaleBytes = 128;  // of a stage; holds the at most 8 that are copied
template <class T, bool kSquare>
inline constexpr int kScaleBytes =  // of a stage
    T::kScaled ? T::kAScaleBytes + (kSquare ? kSquareScaleBytes : T::kBScaleBytes) : 0;
template <class T, bool kSquare>
inline constexpr int kBarriersAt = T::kScalesAt + T::kStages* kScaleBytes<T, kSquare>;
template <class T, bool kSquare>
inline constexpr int kMailboxAt = kBarriersAt<T, kSquare> + T::kStages* kBarrierBytes;
template <class T, bool kSquare>
inline constexpr int kStartsAt = kMailboxAt<T, kSquare> + Mailbox::kBytes;
// `groups` is 0 for a dense product. The extra 1024 bytes let the kernel align the base by hand.
template <class T, bool kSquare>
constexpr int shared_bytes(int groups) {
  return kStartsAt<T, kSquare> +
         (groups ? (groups + 1) * static_cast<int>(sizeof(WorkBefore)) : 0) + 1024;
}

// A position in the ring of stages.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  BLOCKSCALE_DEVICE void next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <class T, bool kSquare>
struct Shared {
  uint32_t base;
  BLOCKSCALE_DEVICE uint32_t a(int stage) const { return base + stage * T::kABytes; }
  BLOCKSCALE_DEVICE uint32_t b(int stage) const {
    return base + T::kStages * T::kABytes + stage * T::kBBytes;
  }
  BLOCKSCALE_DEVICE uint32_t chunk(int group, int chunk) const {
    return base + T::kChunksAt + (group * T::kChunks + chunk) * T::kChunkBytes;
  }
  BLOCKSCALE_DEVICE uint32_t a_scales(int stage) const {
    return base + T::kScalesAt + stage * T::kAScaleBytes;
  }
  BLOCKSCALE_DEVICE uint32_t b_scales(int stage) const {
    return base + T::kScalesAt + T::kStages * T::kAScaleBytes +
           stage * (kSquare ? kSquareScaleBytes : T::kBScaleBytes);
  }
  BLOCKSCALE_DEVICE uint32_t full(int stage) const {
    return base + kBarriersAt<T, kSquare> + stage * kBarrierBytes;
  }
  BLOCKSCALE_DEVICE uint32_t empty(int stage) const { return full(stage) + 8; }
};

// A part of a line of scales, at most kCount values, copied by one warp. Rows of a group may start
// anywhere but copies only at multiples of 4 values, so a tile's scales start up to 3 values into
// their copy.
template <int kCount>
struct ScaleCopy {
  const float* from;
  int64_t line;  // values between blocks of K
  int values;    // 0 where the tile lies outside the matrix
  BLOCKSCALE_DEVICE ScaleCopy(const float* scales, int in_line, int first, int lane) {
    line = in_line;
    const int start = first / 4 * 4;
    from = scales + start + lane * 4;
    values = min(kCount, in_line - start) - lane * 4;  // from this lane on
  }
  BLOCKSCALE_DEVICE void issue(int block, uint32_t to) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 128)
      if (i < values) copy_16_bytes(to + i * 4, from + block * line + i);
  }
};

// Walks over the blocks of all units of this CTA in order: calls `start` once with each unit's
// work, and the `bring` that it returns with each block once its stage is free.
template <class T, bool kSquare, class Units, class Start>
BLOCKSCALE_DEVICE void for_each_block(const GemmParams& p, const Shared<T, kSquare>& shared,
                                      Units& units, Start start) {
  Ring<T::kStages> ring;
  for (int turn = 0;; ++turn) {
    const Work w = units.next(turn);
    if (w.blocks < 0) break;
    const auto bring = start(w, p.problem.grouping == Grouping::rows ? w.group : 0);
    if (turn == 0) before_operands(p.problem);  // what comes before may come before the wait
    if (w.blocks == 0) units.ask();
    for (int i = 0; i < w.blocks; ++i, ring.next()) {
      if (i == w.blocks - 1) units.ask();  // the answer arrives while the stage becomes free
      barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
      bring(w.first_block + i, ring.stage);
    }
  }
  // Keep this CTA resident until nothing arrives at its barriers any more.
  if constexpr (T::kSharing > 1)
    for (int i = 0; i < T::kStages; ++i, ring.next())
      barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
}

// One thread keeps the ring full of codes, and of A's scales with them. The first CTA loads an
// operand that two CTAs share.
template <class T, bool kSquare>
BLOCKSCALE_DEVICE void bring_tiles(const GemmParams& p, const Shared<T, kSquare>& shared,
                                   Scheduler<T> scheduler) {
  constexpr bool kShareA = T::kSharing > 1 && T::kPairsColumns;
  constexpr bool kShareB = T::kSharing > 1 && !T::kPairsColumns;
  constexpr bool kBrings = kBringsScales<T, kSquare>;
  // Every CTA then begins at a row that exists, which has scales to bring.
  static_assert(!kBrings || T::kSharing == 1 || T::kPairsColumns);
  for_each_block(p, shared, scheduler, [&](const Work& w, int b_batch) {
    const int first = w.scale_row / 4 * 4;
    const float* a_scales = p.a_scales + first;
    const int values = (w.scale_row - first + T::kRows + 3) / 4 * 4;
    const uint32_t scale_bytes = kBrings ? 4 * min(values, p.a_scale_line - first) : 0;
    return [&, row = w.row, column = w.column, shift = w.shift, b_batch, a_scales, scale_bytes](
               int block, int stage) {
      const uint32_t full = shared.full(stage);
      const int k = block * kBlock + shift;
      barrier_expect(full, p.stage_bytes + scale_bytes);
      if (kBrings && (!kShareA || scheduler.first()))
        copy_bytes<kShareA>(shared.a_scales(stage), a_scales + int64_t{1} * block * p.a_scale_line,
                            scale_bytes, full);
      if (!kShareA || scheduler.first()) copy_box<kShareA>(shared.a(stage), p.a, full, k, row, 0);
      if (!T::kDecodes && (!kShareB || scheduler.first()))
        copy_box<kShareB>(shared.b(stage), p.b, full, k, column, b_batch);
    };
  });
}

// And one warp keeps it full of scales: small copies would hold up the copy engine.
template <class T, bool kSquare>
BLOCKSCALE_DEVICE void bring_scales(const GemmParams& p, const Shared<T, kSquare>& shared,
                                    const Mailbox& mailbox) {
  const int lane = lane_index(), n = p.problem.n;
  const Reader reader{mailbox};
  const int b_scale_line = ((kSquare ? (n + kBlock - 1) / kBlock : n) + 3) / 4 * 4;
  for_each_block(p, shared, reader, [&](const Work& w, int b_batch) {
    const float* b_line = p.b_scales + b_batch * p.b_scale_group;
    const ScaleCopy<T::kRows + 4> a_scales(p.a_scales, p.a_scale_line, w.scale_row, lane);
    const ScaleCopy<kSquare ? 8 : T::kColumns> b_scales(
        b_line, b_scale_line, kSquare ? w.column / kBlock : w.column, lane);
    return [=, &shared](int block, int stage) {
      a_scales.issue(block, shared.a_scales(stage) + lane * 16);
      b_scales.issue(block, shared.b_scales(stage) + lane * 16);
      barrier_arrive_after_copies(shared.full(stage));
    };
  });
}

}  // namespace blockscale::sm90
