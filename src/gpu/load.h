// Rows of BF16 that start anywhere, by whole 16 bytes of memory.
#pragma once

#include "gpu/tile.h"

namespace blockscale::gpu {

// Whether load_around() may read a run, which has `before` elements before it in its row and
// `count` from its start on: nothing outside of the row is read.
BLOCKSCALE_DEVICE bool has_around(const uint16_t* p, int before, int count) {
  const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(p) / 2 % 8);
  return before >= skew && count >= (skew == 0 ? kRun : kRun + 8 - skew);
}
// The run at p from the chunks of 16 bytes around it, which three loads bring; then all of it moves
// down by the elements of the first chunk that lie before it: by 4, by 2, and by 1.
BLOCKSCALE_DEVICE PairRun load_around(const uint16_t* p) {
  const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(p) / 2 % 8);
  const auto* chunk = reinterpret_cast<const uint4*>(p - skew);
  const uint4 a = load_once(chunk), b = load_once(chunk + 1);
  const uint4 c = skew == 0 ? uint4{} : load_once(chunk + 2);
  const uint32_t w[12] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w};
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

}  // namespace blockscale::gpu
