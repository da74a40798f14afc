// Moves scales from words that lie as FP32 scales do in `mn_major` to `linear`. With both
// directions at once, a tile produces a word of scales for each of 256 lines; written where they
// belong, each word takes an L2 sector of its own, and together they take as long as a sixth of the
// codes (docs/performance/quantizers.md).
#include "gpu/quantize/host.h"

namespace blockscale::gpu {
namespace {

constexpr int kScaleThreads = 256, kScaleLines = 64, kScaleWords = 32;

// One operand: from matrices of `across` lines of `pitch` words, to `lines` lines of `bytes` bytes.
struct TransposedScales {
  const uint32_t* from;
  uint8_t* to;
  int lines, across, pitch, bytes;
  int words;              // lines are whole words
  uint32_t down, beside;  // parts per matrix
  uint32_t parts;         // in all
};
struct TransposeScalesParams {
  TransposedScales side[2];
};

__global__ void __launch_bounds__(kScaleThreads)
    transpose_scales_kernel(const __grid_constant__ TransposeScalesParams p) {
  after_previous(p);
  __shared__ uint32_t words[kScaleWords][kScaleLines + 1];
  const bool second = blockIdx.x >= p.side[0].parts;
  const TransposedScales& t = p.side[second];
  const uint32_t part = second ? blockIdx.x - p.side[0].parts : blockIdx.x, row = part / t.beside;
  const int64_t batch = row / t.down;
  const int first_line = static_cast<int>(row % t.down) * kScaleLines;
  const int first_word = static_cast<int>(part % t.beside) * kScaleWords;
  const uint32_t* from = t.from + batch * t.across * t.pitch;
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kAcross = kScaleLines / 4, kSteps = kScaleWords * kAcross / kScaleThreads;
  uint4 four[kSteps] = {};
  const int line = thread % kAcross * 4;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int word = first_word + thread / kAcross + i * (kScaleThreads / kAcross);
    if (word < t.across && first_line + line < t.pitch)
      four[i] = *reinterpret_cast<const uint4*>(from + static_cast<int64_t>(word) * t.pitch +
                                                first_line + line);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    uint32_t* at = &words[thread / kAcross + i * (kScaleThreads / kAcross)][line];
    at[0] = four[i].x, at[1] = four[i].y, at[2] = four[i].z, at[3] = four[i].w;
  }
  __syncthreads();
  const int word = thread % kScaleWords, warp = thread / kScaleWords;
  constexpr int kWarps = kScaleThreads / kScaleWords;
  uint8_t* to = t.to + (batch * t.lines + first_line + warp) * t.bytes + 4 * first_word;
  const int bytes = t.bytes - 4 * first_word;
#pragma unroll
  for (int i = warp; i < kScaleLines; i += kWarps, to += kWarps * t.bytes) {
    if (first_line + i >= t.lines) return;
    if (t.words) {
      if (4 * word < bytes) reinterpret_cast<uint32_t*>(to)[word] = words[word][i];
    } else {
#pragma unroll
      for (int b = word; b < 4 * kScaleWords; b += kScaleWords)
        if (b < bytes) to[b] = static_cast<uint8_t>(words[b / 4][i] >> (b % 4 * 8));
    }
  }
}

TransposedScales transposed_scales(const Quantized& from, const Quantized& to) {
  const StoredShape s = to.shape();
  TransposedScales t{};
  t.from = reinterpret_cast<const uint32_t*>(from.scales);
  const AsideWords words(to);
  t.to = to.scales;
  t.lines = static_cast<int>(s.scale_rows);
  t.across = static_cast<int>(words.across);
  t.pitch = static_cast<int>(words.pitch);
  t.bytes = static_cast<int>(s.scale_columns * scale_bytes(to.spec.scale));
  t.words = t.bytes % 4 == 0 && reinterpret_cast<uintptr_t>(to.scales) % 4 == 0;
  t.down = static_cast<uint32_t>(ceil_div(s.scale_rows, kScaleLines));
  t.beside = static_cast<uint32_t>(ceil_div(words.across, kScaleWords));
  t.parts = static_cast<uint32_t>(to.batch) * t.down * t.beside;
  return t;
}

}  // namespace

void transpose_scales(const Quantized from[2], const Quantized to[2], const Stream& stream) {
  const TransposeScalesParams p{
      {transposed_scales(from[0], to[0]), transposed_scales(from[1], to[1])}};
  start(transpose_scales_kernel, p.side[0].parts + p.side[1].parts, kScaleThreads, 0,
        native(stream), p);
  check_launch("quantize");
}

}  // namespace blockscale::gpu
