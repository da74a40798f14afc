// Shared by rows and columns: random bits, and the codes of a run.
#pragma once

#include "gpu/quantize/walk.h"

namespace blockscale::gpu {

// The random bits of the runs at `pos` in all lines of a matrix.
struct RandomRuns : RandomLines {
  uint32_t beside;  // kBesideRandom
};
template <Pass kPass>
BLOCKSCALE_DEVICE bool draws(const Side& s) {
  return kPass.encoder == Encoder::fp4_stochastic ||
         ((kPass.any() || kPass.encoder == Encoder::byte) && s.out.spec.stochastic());
}
template <Pass kPass>
BLOCKSCALE_DEVICE RandomRuns random_runs(const Side& s, const MatrixAt& m, int plane, int pos) {
  if (draws<kPass>(s))
    return {RandomLines(m.rng, plane,
                        (static_cast<uint32_t>(s.origin_pos) + static_cast<uint32_t>(pos)) /
                            kElementsPerPhilox),  // global coordinates are below 2^32
            in_register(kBesideRandom)};
  return {};
}

// Unpacks the values of a run of block `b` with unpack(v); returns the factor to multiply them by.
template <Pass kPass, class Unpack>
BLOCKSCALE_DEVICE float unpack_for(const Block& b, const Unpack& unpack, float* v) {
  unpack(v);
  float inv = b.inv;
  if (kPass.encoder == Encoder::fp4_stochastic && b.far) saturate(v, inv);
  return inv;
}
// The block of an FP4 run that is a block by itself, with the factor of its values v as `inv`. If
// values are unpacked ahead, all that is unusual takes one test, after which they may be saturated.
template <Pass kPass, bool kAhead = kPass.encoder == Encoder::fp4_stochastic, class Cut,
          class Unpack>
BLOCKSCALE_DEVICE Block block_of_run(const Side& s, const Outer& outer, uint32_t amax,
                                     const Cut& cut, const Unpack& unpack, float* v) {
  if (kAhead) unpack(v);
  Block b = block_of<kPass>(s, outer, amax, [&](Block& unusual) {
    cut(unusual);
    if (kAhead) unusual.inv = unpack_for<kPass>(unusual, unpack, v);
  });
  if (!kAhead) b.inv = unpack_for<kPass>(b, unpack, v);
  return b;
}

// The codes of one run of `line`, a global line number; v times inv is below the encoder's limit.
// `signs` are those of v; only FP4 uses them.
template <Pass kPass>
BLOCKSCALE_DEVICE Codes encode_run(const Side& s, const float* v, const RunSigns& signs, float inv,
                                   const RandomRuns& runs, uint32_t line) {
  constexpr bool kStochastic = kPass.encoder == Encoder::fp4_stochastic;
  constexpr bool kByte = kPass.encoder == Encoder::byte;
  PhiloxBlock random{};
  if (draws<kPass>(s)) random = runs.block(line);
  Codes out{};
  if constexpr (kPass.any() || kByte) {
    out = encode_any<kByte>(s.element, s.out.spec.stochastic(), v, inv, random.word);
  } else if constexpr (!kPass.fp4()) {
    constexpr bool kE5m2 = kPass.encoder == Encoder::e5m2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float y[4];
      for (int j = 0; j < 4; ++j) y[j] = __fmul_rn(v[4 * i + j], inv);
      out.word[i] = to_fp8x4<kE5m2>(y[0], y[1], y[2], y[3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      out.word[i] = kStochastic ? fp4_stochastic_of_8(v + 8 * i, inv, signs.of_8[i],
                                                      random.word + 2 * i, runs.beside)
                                : fp4_nearest_of_8(v + 8 * i, inv, signs.of_8[i]);
    }
  }
  if (!kPass.fp4() && inv == 0.0f) out = {};  // not finite
  return out;
}

}  // namespace blockscale::gpu
