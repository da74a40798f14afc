// BF16 rows that start anywhere, loaded in aligned chunks of 16 bytes.
#pragma once

#include "gpu/quantize/tile.h"

namespace blockscale::gpu {

// A run being loaded, as the 16-byte chunks around it; `skew` elements precede it, and those from
// `count` on are not in its row.
struct RunAround {
  uint4 chunk[3];
  int skew, count;

  // Shifts everything down by the skew: by 4 elements, by 2, and by 1.
  BLOCKSCALE_DEVICE PairRun elements() const {
    const uint32_t w[12] = {chunk[0].x, chunk[0].y, chunk[0].z, chunk[0].w, chunk[1].x, chunk[1].y,
                            chunk[1].z, chunk[1].w, chunk[2].x, chunk[2].y, chunk[2].z, chunk[2].w};
    uint32_t by_4[10], by_2[9];
    PairRun run;
#pragma unroll
    for (int i = 0; i < 10; ++i) by_4[i] = skew & 4 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 9; ++i) by_2[i] = skew & 2 ? by_4[i + 1] : by_4[i];
#pragma unroll
    for (int i = 0; i < 8; ++i) run.pair[i] = shift_right_in(by_2[i + 1], by_2[i], skew % 2 * 16);
    if (count < kRun) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (2 * i >= count)
          run.pair[i] = 0;
        else if (2 * i + 1 == count)
          run.pair[i] &= 0xFFFF;
      }
    }
    return run;
  }
};

// Eight BF16 at p: `count` of them, then zeros.
BLOCKSCALE_DEVICE uint4 load_some(const uint16_t* p, int count) {
  uint32_t word[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) word[i / 2] |= static_cast<uint32_t>(p[i]) << (16 * (i % 2));
  return {word[0], word[1], word[2], word[3]};
}
// The run at p, with zeros beyond the `count` elements of its row. `inside`: all 24 elements from
// p's chunk on lie in the matrix, so they can be read whichever rows they belong to.
BLOCKSCALE_DEVICE RunAround load_around(const uint16_t* p, int count, bool inside) {
  RunAround run{{}, 0, count};
  if (inside) {
    run.skew = static_cast<int>(reinterpret_cast<uintptr_t>(p) / 2 % 8);
    const auto* chunk = reinterpret_cast<const uint4*>(p - run.skew);
    run.chunk[0] = load_once(chunk);
    run.chunk[1] = load_once(chunk + 1);
    if (run.skew != 0) run.chunk[2] = load_once(chunk + 2);
  } else {
    run.chunk[0] = load_some(p, count);
    run.chunk[1] = load_some(p + 8, count - 8);
  }
  return run;
}

// The same where rows start at multiples of 16 bytes.
struct RunAligned {
  uint4 chunk[2];

  BLOCKSCALE_DEVICE PairRun elements() const {
    const uint4 a = chunk[0], b = chunk[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }
};
BLOCKSCALE_DEVICE RunAligned load_aligned(const uint16_t* p, int count) {
  const auto* chunk = reinterpret_cast<const uint4*>(p);
  if (count >= kRun) return {load_once(chunk), load_once(chunk + 1)};
  return {load_some(p, count), load_some(p + 8, count - 8)};
}

}  // namespace blockscale::gpu
