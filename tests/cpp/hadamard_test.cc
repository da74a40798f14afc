// The Hadamard transform (specification, section 8).
#include "blockscale/hadamard.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "model_quantize.h"
#include "testing.h"

namespace blockscale::testing {
namespace {

Hadamard with_mask(int dim, uint64_t low, uint64_t high = 0) {
  return {static_cast<uint16_t>(dim), low, high};
}

TEST(Hadamard, TheSizesAndTheirNorms) {
  EXPECT_EQ((std::vector<int>(std::begin(kHadamardSizes), std::end(kHadamardSizes))),
            (std::vector<int>{16, 32, 64, 128}));
  for (int dim : kHadamardSizes)
    EXPECT_EQ(hadamard_norm(dim), static_cast<float>(1 / std::sqrt(static_cast<double>(dim))));
  EXPECT_EQ(kDefaultSigns16, 0xD7E8u);
}

// Row i of Sylvester's matrix has the sign (-1)^popcount(i & j) in column j: every unit vector
// gives one column, with the sign of its mask bit.
TEST(Hadamard, UnitVectorsGiveSylvestersColumnsWithTheMasksSigns) {
  for (int dim : kHadamardSizes) {
    const Hadamard h =
        with_mask(dim, dim < 64 ? 0xD7E8A591D7E8u & ((uint64_t{1} << dim) - 1) : 0xB5F00D7E8A591C33,
                  dim == 128 ? 0x8000000000000001 : 0);
    for (int j = 0; j < dim; ++j) {
      std::vector<float> x(static_cast<size_t>(dim), 0.0f);
      x[j] = 1;
      hadamard_block(h, x.data());
      const uint64_t word = j < 64 ? h.mask_lo : h.mask_hi;
      const int mask_sign = (word >> (j % 64)) % 2 ? -1 : 1;
      for (int i = 0; i < dim; ++i) {
        const int sign = std::popcount(static_cast<unsigned>(i & j)) % 2 ? -1 : 1;
        const float want = from_bf16(to_bf16(hadamard_norm(dim)));
        EXPECT_EQ(x[i], static_cast<float>(sign * mask_sign) * want) << dim << " " << i << " " << j;
      }
    }
  }
}

TEST(Hadamard, EveryRoundingIsInStageOrder) {
  Random random(1);
  for (int dim : kHadamardSizes) {
    for (int repeat = 0; repeat < 200; ++repeat) {
      const Hadamard h = with_mask(dim, dim == 16 ? 0xD7E8 : random.next() >> (dim == 32 ? 32 : 0),
                                   dim == 128 ? random.next() : 0);
      std::vector<float> x(static_cast<size_t>(dim));
      for (float& v : x)
        v = static_cast<float>(std::ldexp(random.normal(), static_cast<int>(random.below(30))));
      std::vector<float> want = x;
      model_transform(h, want);
      hadamard_block(h, x.data());
      for (int i = 0; i < dim; ++i) EXPECT_EQ(bits_of(x[i]), bits_of(want[i])) << dim << " " << i;
    }
  }
}

TEST(Hadamard, NoResultIsNegativeZero) {
  for (int dim : kHadamardSizes) {
    std::vector<float> x;
    for (uint64_t mask : {0, 1, 0xD7E8, 0xFFFF}) {
      x.assign(static_cast<size_t>(dim), -0.0f);
      hadamard_block(with_mask(dim, mask), x.data());
      for (float v : x) EXPECT_EQ(bits_of(v), 0u) << dim << " " << mask;
    }
    x.assign(static_cast<size_t>(dim), 0.0f);
    x[0] = 1, x[1] = -1;  // cancels in half of the outputs
    hadamard_block(with_mask(dim, 2), x.data());
    for (float v : x) EXPECT_NE(bits_of(v), 0x80000000u);
  }
}

TEST(Hadamard, ANonFiniteInputMakesItsWholeBlockNonFinite) {
  for (int dim : kHadamardSizes) {
    for (float bad : {HUGE_VALF, -HUGE_VALF, std::nanf("")}) {
      for (int at : {0, 1, dim / 2, dim - 1}) {
        std::vector<float> x(static_cast<size_t>(dim), 1.0f);
        x[at] = bad;
        hadamard_block(with_mask(dim, 0), x.data());
        for (float v : x) EXPECT_FALSE(std::isfinite(v)) << dim << " " << at;
      }
    }
  }
}

}  // namespace
}  // namespace blockscale::testing
