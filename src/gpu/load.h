// Rows of BF16 that start anywhere, by whole 16 bytes of memory.
#pragma once

#include "gpu/tile.h"

namespace blockscale::gpu {

// A run on its way, as the chunks of 16 bytes around it; `skew` elements lie before it.
struct RunAround {
  uint4 chunk[3];
  int skew;

  // All of it moves down by the skew: by 4 elements, by 2, and by 1.
  BLOCKSCALE_DEVICE PairRun pairs() const {
    const uint32_t w[12] = {chunk[0].x, chunk[0].y, chunk[0].z, chunk[0].w, chunk[1].x, chunk[1].y,
                            chunk[1].z, chunk[1].w, chunk[2].x, chunk[2].y, chunk[2].z, chunk[2].w};
    uint32_t by_4[10], by_2[9];
    PairRun run;
#pragma unroll
    for (int i = 0; i < 10; ++i) by_4[i] = skew & 4 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 9; ++i) by_2[i] = skew & 2 ? by_4[i + 1] : by_4[i];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      run.pair[i] = skew & 1 ? shift_right_in(by_2[i + 1], by_2[i], 16) : by_2[i];
    return run;
  }
};

// Eight BF16 at p, of which those from `begin` up to `end` are there, and zeros.
BLOCKSCALE_DEVICE uint4 load_some(const uint16_t* p, int begin, int end) {
  uint32_t word[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i >= begin && i < end) word[i / 2] |= static_cast<uint32_t>(p[i]) << (16 * (i % 2));
  return {word[0], word[1], word[2], word[3]};
}
// The run at p, zeros beyond the `count` elements that are there; of the same row `before` lie
// before p. Nothing outside of the row is read, and no load waits for another.
BLOCKSCALE_DEVICE RunAround load_around(const uint16_t* p, int before, int count) {
  RunAround run;
  run.skew = static_cast<int>(reinterpret_cast<uintptr_t>(p) / 2 % 8);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int first = 8 * i - run.skew;
    run.chunk[i] = {};
    if (i == 2 && run.skew == 0) continue;
    if (first >= -before && first + 8 <= count)
      run.chunk[i] = load_once(reinterpret_cast<const uint4*>(p + first));
    else if (first < count)
      run.chunk[i] = load_some(p + first, -before - first, count - first);
  }
  return run;
}

// The same where rows start at multiples of 16 bytes.
struct RunAligned {
  uint4 chunk[2];

  BLOCKSCALE_DEVICE PairRun pairs() const {
    const uint4 a = chunk[0], b = chunk[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }
};
BLOCKSCALE_DEVICE RunAligned load_aligned(const uint16_t* p, int count) {
  const auto* chunk = reinterpret_cast<const uint4*>(p);
  if (count >= kRun) return {load_once(chunk), load_once(chunk + 1)};
  return {load_some(p, 0, count), load_some(p + 8, 0, count - 8)};
}

}  // namespace blockscale::gpu
