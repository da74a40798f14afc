// Random cases for the property tests: shapes, values, specs, layouts. Every run prints its seed;
// BLOCKSCALE_TEST_SEED=n repeats that one alone.
#pragma once

#include <cstdlib>
#include <random>
#include <string>

#include "buffers.h"
#include "specs.h"

// Of the library's own copy of Highway: which instruction sets there are, and a way to pretend.
namespace blockscale_hwy {
int64_t SupportedTargets();
void SetSupportedTargetsForTest(int64_t targets);
}  // namespace blockscale_hwy

namespace blockscale::testing {

inline std::vector<uint64_t> test_seeds() {
  if (const char* text = std::getenv("BLOCKSCALE_TEST_SEED"))
    return {std::strtoull(text, nullptr, 0)};
  const uint64_t fresh = std::random_device{}();
  if (kSweepStep > 1) return {fresh};
  return {1, 2, 3, fresh};
}

inline int64_t random_extent(Random& random) {
  static const std::vector<int64_t> some = {0,   1,   2,   7,   15,  16,  17,  31,
                                            32,  33,  63,  64,  65,  97,  100, 127,
                                            128, 129, 191, 211, 255, 256, 257, 293};
  return random.one_in(3) ? static_cast<int64_t>(random.below(300)) : random.pick(some);
}

// Each kind of matrix has its own mixture; values are a function of their place, so that a shard
// can be cut out of a larger matrix.
inline Values random_values(Random& random) {
  const uint64_t seed = random.next();
  const int kind = static_cast<int>(random.below(12));
  const int centre = static_cast<int>(random.below(200)) - 100;
  return [=](int64_t b, int64_t r, int64_t c) -> float {
    Random at(seed ^ static_cast<uint64_t>((b * 1000003 + r) * 1000033 + c));
    const double normal = at.normal();
    // Rows and groups of 16 columns have magnitudes of their own: blocks differ from each other.
    const int spread = static_cast<int>((r * 7 + c / 16 * 5) % 23) - 11;
    switch (kind) {
      case 0:
        return static_cast<float>(normal);
      case 1:
        return static_cast<float>(std::ldexp(normal, spread));
      case 2:
        return static_cast<float>(std::ldexp(normal, centre + spread));
      case 3:  // around the smallest normal and below, with zeros of both signs
        if (at.one_in(4)) return at.one_in(2) ? 0.0f : -0.0f;
        return static_cast<float>(
            std::ldexp(normal, -126 - static_cast<int>(at.below(24)) + spread));
      case 4:  // near overflow
        return std::fmin(std::fmax(static_cast<float>(std::ldexp(normal, 125)), -3.4028235e38f),
                         3.4028235e38f);
      case 5:  // few distinct numbers: ties and values on the grid
        return static_cast<float>((static_cast<int>(at.below(49)) - 24) * 0.25);
      case 6:  // the same, each block with its own power of two and its 6 somewhere: exact ties
        if (at.one_in(8)) return std::ldexp(at.one_in(2) ? 6.0f : -6.0f, spread);
        return std::ldexp(static_cast<float>((static_cast<int>(at.below(49)) - 24) * 0.25), spread);
      case 7:  // blocks of one magnitude, some of them zeros, with signs
        return std::copysign(spread == 0 ? 0.0f : std::ldexp(1 + 0.125f * (c / 16 % 8), spread),
                             static_cast<float>(normal));
      case 8:  // blocks so small beside others that scales underflow
        return static_cast<float>(std::ldexp(normal, 6 * spread));
      case 9:  // ties again, so small that scales underflow or saturate
        return std::ldexp(static_cast<float>((static_cast<int>(at.below(49)) - 24) * 0.25),
                          -126 + centre / 4 + spread);
      case 10:  // any bits whatever
        return float_of(static_cast<uint32_t>(at.next()));
      default:  // a few NaN and Inf among numbers
        if (at.one_in(200))
          return at.one_in(2) ? std::nanf("") : at.one_in(2) ? HUGE_VALF : -HUGE_VALF;
        return static_cast<float>(std::ldexp(normal, spread));
    }
  };
}

inline std::vector<StorageLayout> layouts_for(const QuantSpec& spec) {
  std::vector<StorageLayout> list;
  for (Layout codes : {Layout::linear, Layout::mfma_16x16})
    for (Layout scales :
         {Layout::linear, Layout::mn_major, Layout::nv_128x4, Layout::aiter_scale}) {
      if (codes == Layout::mfma_16x16 && spec.element != Format::e2m1) continue;
      if (scales == Layout::mn_major && spec.scale != Format::fp32) continue;
      if (scales != Layout::linear && scales != Layout::mn_major && spec.scale == Format::fp32)
        continue;
      list.push_back({codes, scales});
    }
  return list;
}

inline DType random_dtype(Random& random) {
  constexpr DType kAll[] = {DType::f32, DType::bf16, DType::f16, DType::f32_as_bf16};
  return random.pick(kAll);
}
// Of an output.
inline DType random_written_dtype(Random& random) {
  constexpr DType kAll[] = {DType::f32, DType::bf16, DType::f16};
  return random.pick(kAll);
}

// What a spec needs to be quantized with.
struct RandomOptions {
  RandomOptions(Random& random, const QuantSpec& spec, int axis, int64_t batch)
      : amax(static_cast<size_t>(batch)) {
    // The last ones make outer scales of 1: of E4M3 and of UE5M3.
    static const float odd[] = {0, 0x1p-149f, 1e-30f, 3.4e38f, HUGE_VALF, NAN, 2688.0f, 688128.0f};
    for (float& a : amax)
      a = random.one_in(6) ? random.pick(odd)
                           : static_cast<float>(std::ldexp(
                                 1 + random.uniform(), static_cast<int>(random.below(40)) - 20));
    if (spec.outer && random.one_in(2)) options.amax = amax.data();
    if (spec.stochastic() || random.one_in(3)) options.rng = Rng{random.next(), random.next()};
    const int64_t along = int64_t{spec.unit()} * random.below(5000000);
    const int64_t across = spec.block_lines() * random.below(3000000);
    if (random.one_in(2)) {
      options.origin_row = axis == -1 ? across : along;
      options.origin_column = axis == -1 ? along : across;
    }
  }
  RandomOptions(const RandomOptions&) = delete;
  std::vector<float> amax;
  QuantizeOptions options;
};

}  // namespace blockscale::testing
