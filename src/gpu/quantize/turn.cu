// Scales of FP32 from `mn_major` to `linear`. In both directions at once a tile leaves its scales
// as words of 256 lines; written where they belong, each is a sector of L2 of its own, and together
// they take as long as a sixth of the codes. See docs/performance.md.
#include "gpu/launch.h"

namespace blockscale::gpu {
namespace {

constexpr int kTurnThreads = 256, kTurnLines = 64, kTurnBlocks = 32;

// One operand: matrices of `blocks` lines of `pitch`, and of `lines` lines of `blocks`.
struct Turned {
  const uint32_t* from;
  uint32_t* to;
  int lines, blocks, pitch;
  uint32_t down, across;  // parts of a matrix
  uint32_t parts;         // of all
};
struct TurnParams {
  Turned side[2];
};

__global__ void __launch_bounds__(kTurnThreads) turn_kernel(const __grid_constant__ TurnParams p) {
  after_previous(p);
  __shared__ uint32_t words[kTurnBlocks][kTurnLines + 1];
  const bool second = blockIdx.x >= p.side[0].parts;
  const Turned& t = p.side[second];
  const uint32_t part = second ? blockIdx.x - p.side[0].parts : blockIdx.x, row = part / t.across;
  const int64_t batch = row / t.down;
  const int first_line = static_cast<int>(row % t.down) * kTurnLines;
  const int first_block = static_cast<int>(part % t.across) * kTurnBlocks;
  const uint32_t* from = t.from + batch * t.blocks * t.pitch;
  uint32_t* to = t.to + batch * t.blocks * t.lines;
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kAcross = kTurnLines / 4, kSteps = kTurnBlocks * kAcross / kTurnThreads;
  uint4 four[kSteps] = {};
  const int line = thread % kAcross * 4;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int block = first_block + thread / kAcross + i * (kTurnThreads / kAcross);
    if (block < t.blocks && first_line + line < t.pitch)
      four[i] = *reinterpret_cast<const uint4*>(from + static_cast<int64_t>(block) * t.pitch +
                                                first_line + line);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    uint32_t* at = &words[thread / kAcross + i * (kTurnThreads / kAcross)][line];
    at[0] = four[i].x, at[1] = four[i].y, at[2] = four[i].z, at[3] = four[i].w;
  }
  __syncthreads();
  const int block = thread % kTurnBlocks;
  if (first_block + block >= t.blocks) return;
  to += static_cast<int64_t>(first_line) * t.blocks + first_block + block;
#pragma unroll
  for (int i = thread / kTurnBlocks; i < kTurnLines; i += kTurnThreads / kTurnBlocks)
    if (first_line + i < t.lines) to[static_cast<int64_t>(i) * t.blocks] = words[block][i];
}

Turned turned(const Quantized& from, const Quantized& to) {
  const StoredShape s = to.shape();
  Turned t{};
  t.from = reinterpret_cast<const uint32_t*>(from.scales);
  t.to = reinterpret_cast<uint32_t*>(to.scales);
  t.lines = static_cast<int>(s.scale_rows);
  t.blocks = static_cast<int>(s.scale_columns);
  t.pitch = static_cast<int>(padded_rows(Layout::mn_major, s.scale_rows));
  t.down = static_cast<uint32_t>(ceil_div(s.scale_rows, kTurnLines));
  t.across = static_cast<uint32_t>(ceil_div(s.scale_columns, kTurnBlocks));
  t.parts = static_cast<uint32_t>(to.batch) * t.down * t.across;
  return t;
}

}  // namespace

void turn_scales(const Quantized from[2], const Quantized to[2], const Stream& stream) {
  const TurnParams p{{turned(from[0], to[0]), turned(from[1], to[1])}};
  start(turn_kernel, p.side[0].parts + p.side[1].parts, kTurnThreads, 0, native(stream), p);
  check_launch("quantize");
}

}  // namespace blockscale::gpu
