// The scale rules against a transcription in double precision (specification, section 4).
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>

#include "blockscale/rounding.h"
#include "model_rules.h"
#include "testing.h"

namespace blockscale::testing {
namespace {

// Every exponent with the mantissas at which a rule changes, and random ones.
std::vector<float> interesting_amaxes() {
  std::vector<uint32_t> fractions = {0, 1, 2, 3, 0x7FFFFE, 0x7FFFFF, 0x400000, 0x3FFFFF, 0x400001};
  for (int bit = 18; bit < 23; ++bit)  // the carry points of `even`, and 1.5, 1.75, 1.875, ...
    for (int around : {-1, 0, 1}) {
      fractions.push_back((1u << bit) + static_cast<uint32_t>(around));
      fractions.push_back(((0x7FFFFFu >> bit << bit) + static_cast<uint32_t>(around)) & 0x7FFFFF);
    }
  Random random(3);
  for (int i = 0; i < 64; ++i) fractions.push_back(static_cast<uint32_t>(random.below(1 << 23)));
  std::vector<float> all;
  for (uint32_t exponent = 0; exponent < 255; ++exponent)
    for (uint32_t fraction : fractions) all.push_back(float_of(exponent << 23 | fraction));
  return all;
}

constexpr ScaleRule kMxRules[] = {ScaleRule::floor, ScaleRule::ceil, ScaleRule::even,
                                  ScaleRule::rceil};

TEST(E8M0Rules, AgreeWithLogarithmsForEveryExponent) {
  for (const Facts& f : element_facts())
    for (ScaleRule rule : kMxRules)
      for (float a : interesting_amaxes())
        ASSERT_EQ(e8m0_byte(rule, f.format, a), model_e8m0(rule, f, a))
            << f.name << " rule " << static_cast<int>(rule) << " amax " << std::hexfloat << a;
}

// Around FMAX * 2^k, where rceil and ceil step, including the rounding of the product.
TEST(E8M0Rules, AgreeAroundTheLargestValueTimesPowersOfTwo) {
  for (const Facts& f : element_facts()) {
    for (int k = -149; k < 128; ++k) {
      const float centre = fl(std::ldexp(f.largest, k));
      if (!std::isfinite(centre)) break;
      for (int ulps = -4; ulps <= 4; ++ulps) {
        const uint32_t bits = bits_of(centre) + static_cast<uint32_t>(ulps);
        if (bits > 0x7F7FFFFF) continue;
        for (ScaleRule rule : kMxRules)
          ASSERT_EQ(e8m0_byte(rule, f.format, float_of(bits)), model_e8m0(rule, f, float_of(bits)))
              << f.name << " rule " << static_cast<int>(rule) << " " << k << " " << ulps;
      }
    }
  }
}

TEST(E8M0Rules, AZeroBlockHasByteZeroAndTheMultiplierIsExact) {
  for (const Facts& f : element_facts())
    for (ScaleRule rule : kMxRules) EXPECT_EQ(e8m0_byte(rule, f.format, 0.0f), 0) << f.name;
  for (int byte = 0; byte < 255; ++byte)
    EXPECT_EQ(e8m0_inv(static_cast<uint8_t>(byte)), std::ldexp(1.0, 127 - byte)) << byte;
}

TEST(E8M0Rules, CeilAndRceilKeepTheLargestElementInRange) {
  for (const Facts& f : element_facts())
    for (ScaleRule rule : {ScaleRule::ceil, ScaleRule::rceil})
      for (float a : interesting_amaxes()) {
        const double scaled = std::ldexp(a, 127 - e8m0_byte(rule, f.format, a));
        // rceil compares a rounded quotient: one part in 2^23 beyond the largest is possible.
        ASSERT_LE(scaled, f.largest * (1 + 0x1p-23)) << f.name << " " << std::hexfloat << a;
      }
}

TEST(FloatScales, AmaxAgreesWithDoublePrecision) {
  for (const Facts& f : element_facts()) {
    for (float a : interesting_amaxes()) {
      const FloatScale got = amax_scale(a, static_cast<float>(f.largest));
      const FloatScale want = model_amax(f, a);
      ASSERT_EQ(bits_of(got.inv), bits_of(want.inv)) << f.name << " " << std::hexfloat << a;
      ASSERT_EQ(bits_of(got.scale), bits_of(want.scale)) << f.name << " " << std::hexfloat << a;
    }
  }
}

TEST(FloatScales, TheFloorIsTheFloatNearestTo1em12) {
  EXPECT_EQ(bits_of(kAmaxFloor), 0x2B8CBCCCu);
  for (float a : {0.0f, 0x1p-149f, 1e-13f, kAmaxFloor})
    EXPECT_EQ(amax_scale(a, 448).inv, fl(448.0 / static_cast<double>(1e-12f)));
}

TEST(FloatScales, Pow2IsTheSmallestPowerOfTwoThatFits) {
  for (const Facts& f : element_facts()) {
    std::vector<float> amaxes = interesting_amaxes();
    for (int k = -60; k < 120; ++k)
      for (int ulps : {-1, 0, 1})
        amaxes.push_back(
            float_of(bits_of(fl(std::ldexp(f.largest, k))) + static_cast<uint32_t>(ulps)));
    for (float a : amaxes) {
      if (!std::isfinite(a)) continue;
      const FloatScale got = pow2_scale(a, static_cast<float>(f.largest));
      const FloatScale want = model_pow2(f, a);
      ASSERT_EQ(got.scale, want.scale) << f.name << " " << std::hexfloat << a;
      ASSERT_EQ(got.inv, want.inv) << f.name << " " << std::hexfloat << a;
    }
  }
}

constexpr Format kBlockScales[] = {Format::e4m3, Format::ue5m3};

TEST(TwoLevel, TheTensorsScaleAgreesForEveryExponent) {
  for (Format scale : kBlockScales) {
    for (float a : interesting_amaxes()) {
      const OuterScale got = outer_scale(scale, a), want = model_outer(scale, a);
      ASSERT_EQ(bits_of(got.enc), bits_of(want.enc)) << std::hexfloat << a;
      ASSERT_EQ(bits_of(got.dec), bits_of(want.dec)) << std::hexfloat << a;
    }
    EXPECT_EQ(outer_scale(scale, 0).dec, 1.0f);
    EXPECT_EQ(outer_scale(scale, 0x1p-149f).enc, FLT_MAX);
  }
}

void expect_block_scale_agrees(Format scale, ScaleRounding rounding, float a, OuterScale outer) {
  const BlockScale got = two_level_scale(scale, rounding, a, outer);
  const BlockScale want = model_two_level(scale, rounding, a, outer);
  ASSERT_EQ(got.code, want.code) << std::hexfloat << a << " " << outer.enc;
  ASSERT_EQ(bits_of(got.enc), bits_of(want.enc)) << std::hexfloat << a << " " << outer.enc;
}

TEST(TwoLevel, TheBlocksScaleAgreesForRandomAndExtremeAmaxes) {
  Random random(4);
  const std::vector<float> amaxes = interesting_amaxes();
  for (Format scale : kBlockScales) {
    for (ScaleRounding rounding : {ScaleRounding::nearest, ScaleRounding::up}) {
      for (int i = 0; i < 200000; ++i) {
        const float tensor = random.pick(amaxes);
        // Usually a block amax that the tensor's allows; sometimes any, as with a frozen one.
        const float block =
            random.one_in(4) ? random.pick(amaxes) : fl(tensor * std::exp2(-random.uniform() * 24));
        expect_block_scale_agrees(scale, rounding, block, outer_scale(scale, tensor));
        if (HasFatalFailure()) return;
        expect_block_scale_agrees(scale, rounding, block, {1.0f, 1.0f});
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Blocks whose scale lies exactly on, between, and one ulp from the codes.
TEST(TwoLevel, TheBlocksScaleRoundsRightAtEveryBoundary) {
  const OuterScale outers[] = {{1.0f, 1.0f}, {2.0f, 0.5f}, model_outer(Format::e4m3, 3.7f)};
  for (Format scale : kBlockScales) {
    const std::vector<double>& v = model_magnitudes(scale);
    for (size_t low = 0; low + 1 < v.size(); ++low) {
      for (double wanted : {v[low], (v[low] + v[low + 1]) / 2}) {
        for (const OuterScale& outer : outers) {
          const float centre = fl(wanted * 6 / outer.enc);
          for (int ulps = -3; ulps <= 3; ++ulps) {
            if (centre == 0 && ulps < 0) continue;
            const float a = float_of(bits_of(centre) + static_cast<uint32_t>(ulps));
            for (ScaleRounding r : {ScaleRounding::nearest, ScaleRounding::up})
              expect_block_scale_agrees(scale, r, a, outer);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(TwoLevel, ScalesRoundedUpSaturateNothingAndNearestDoes) {
  Random random(5);
  for (Format scale : kBlockScales) {
    int saturated = 0;
    for (int i = 0; i < 100000; ++i) {
      const float tensor =
          fl(std::ldexp(1 + random.uniform(), static_cast<int>(random.below(160)) - 80));
      const float block = fl(tensor * std::exp2(-random.uniform() * 12));
      const OuterScale outer = outer_scale(scale, tensor);
      const BlockScale up = two_level_scale(scale, ScaleRounding::up, block, outer);
      ASSERT_LE(static_cast<double>(block) * up.enc, 6 * (1 + 0x1p-20)) << block << " " << tensor;
      ASSERT_NE(up.code, 0) << "a tiny block keeps a nonzero scale";
      const BlockScale nearest = two_level_scale(scale, ScaleRounding::nearest, block, outer);
      saturated += static_cast<double>(block) * nearest.enc > 6 * (1 + 0x1p-20);
    }
    EXPECT_GT(saturated, 30000) << "about half of the blocks saturate when scales round to nearest";
  }
}

TEST(TwoLevel, AScaleThatUnderflowsLeavesTheLargestFiniteMultiplier) {
  const BlockScale zero = two_level_scale(Format::e4m3, ScaleRounding::nearest, 0x1p-20f, {1, 1});
  EXPECT_EQ(zero.code, 0);
  EXPECT_EQ(zero.enc, FLT_MAX);
  const BlockScale up = two_level_scale(Format::e4m3, ScaleRounding::up, 0x1p-20f, {1, 1});
  EXPECT_EQ(up.code, 1);
}

}  // namespace
}  // namespace blockscale::testing
