// Stochastic rounding and the 16-bit floats (specification, sections 6 and 8).
#include "blockscale/rounding.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cfloat>
#include <cmath>

#include "model.h"
#include "testing.h"

namespace blockscale::testing {
namespace {

uint32_t stochastic(Format f, float y, uint32_t random) {
  return encode_magnitude_stochastic(traits(f), max_value(f), y, random);
}

// How many of y's 256 draws differ from "the upper neighbour iff t + r >= 256".
int wrong_draws(Format f, float y) {
  const Chance chance = model_stochastic(f, y);
  int wrong = 0;
  for (uint32_t r = 0; r < 256; ++r) {
    const int up = chance.of_256 + static_cast<int>(r) >= 256;
    wrong += stochastic(f, y, r) != static_cast<uint32_t>(chance.low + up);
  }
  return wrong;
}

TEST(StochasticRounding, ValuesOnTheGridNeverMove) {
  for (const Facts& f : element_facts()) {
    const std::vector<double>& v = model_magnitudes(f.format);
    for (size_t code = 0; code < v.size(); ++code)
      for (uint32_t r = 0; r < 256; ++r)
        EXPECT_EQ(stochastic(f.format, static_cast<float>(v[code]), r), code) << f.name << " " << r;
  }
}

TEST(StochasticRounding, BeyondTheLargestIsTheLargest) {
  for (const Facts& f : element_facts()) {
    const uint32_t last = static_cast<uint32_t>(model_magnitudes(f.format).size()) - 1;
    const float largest = static_cast<float>(f.largest);
    for (float y : {std::nextafter(largest, HUGE_VALF), 1.5f * largest, FLT_MAX, HUGE_VALF})
      for (uint32_t r = 0; r < 256; ++r) EXPECT_EQ(stochastic(f.format, y, r), last) << f.name;
  }
}

// Every interval between neighbours, at every place where t changes, one ulp around it and halfway
// to the next place, with every random byte.
TEST(StochasticRounding, UpWithProbabilityTOver256InEveryInterval) {
  for (const Facts& f : element_facts()) {
    const std::vector<double>& v = model_magnitudes(f.format);
    std::atomic<int> wrong{0};
    for_chunks(0, v.size() - 1, 1, [&](uint64_t low, uint64_t) {
      for (int k = 0; k <= 512; k += kSweepStep > 1 ? 5 : 1) {
        const float y = static_cast<float>(v[low] + (v[low + 1] - v[low]) * k / 512);
        wrong += wrong_draws(f.format, y);
        wrong += wrong_draws(f.format, std::nextafter(y, HUGE_VALF));
        if (y > 0) wrong += wrong_draws(f.format, std::nextafter(y, 0.0f));
      }
    });
    EXPECT_EQ(wrong, 0) << f.name;
  }
}

TEST(StochasticRounding, TinyValuesAndRandomOnes) {
  Random random(2);
  for (const Facts& f : element_facts()) {
    for (uint32_t bits : {1u, 2u, 0x400000u, 0x7FFFFFu, 0x800000u, 0x33000000u, 0x34000000u})
      EXPECT_EQ(wrong_draws(f.format, float_of(bits)), 0) << f.name << " " << bits;
    for (int i = 0; i < 20000; ++i) {
      const float y = static_cast<float>(
          std::ldexp(f.largest * random.uniform(), -static_cast<int>(random.below(12))));
      EXPECT_EQ(wrong_draws(f.format, y), 0) << f.name << " " << y;
    }
  }
}

TEST(StochasticRounding, ProbabilityIsExactToOne512thWithoutOneSidedError) {
  for (const Facts& f : element_facts()) {
    const std::vector<double>& v = model_magnitudes(f.format);
    double error = 0;
    for (size_t low = 0; low + 1 < v.size(); ++low) {
      for (int k = 0; k < 4096; ++k) {
        const double position = (k + 0.5) / 4096;
        const float y = static_cast<float>(v[low] + (v[low + 1] - v[low]) * position);
        const Chance chance = model_stochastic(f.format, y);
        const double p = chance.low + chance.of_256 / 256.0 - static_cast<double>(low);
        ASSERT_LE(std::fabs(p - position), 1.0 / 512 + 1e-9) << f.name << " " << y;
        error += p - position;
      }
    }
    EXPECT_NEAR(error / (4096.0 * static_cast<double>(v.size() - 1)), 0, 1e-6) << f.name;
  }
}

// Section 6's integers for e2m1, which vector code uses. The step is odd so that low bits vary.
TEST(StochasticRounding, TheIntegerFormOfE2M1IsTheGenericFunction) {
  std::atomic<int> wrong{0};
  const uint32_t end = bits_of(8.0f);
  for_chunks(0, end, uint64_t{1} << 22, [&](uint64_t begin, uint64_t stop) {
    const uint64_t step = 4093 * uint64_t{kSweepStep > 1 ? 16 : 1};
    for (uint64_t at = (begin + step - 1) / step * step; at < stop; at += step) {
      const float y = float_of(static_cast<uint32_t>(at));
      const float v = std::min(y, 6.0f);
      const float z = std::max(v, std::fma(v, 0.5f, 0.5f));
      for (uint32_t r = 0; r < 256; ++r) {
        const uint32_t code = ((bits_of(z) + (r << 14) + (1u << 13)) >> 22) - 252;
        wrong += code != stochastic(Format::e2m1, y, r);
      }
    }
  });
  EXPECT_EQ(wrong, 0);
}

// Value of a 16-bit float with `e` exponent bits, from its definition.
double half_value(uint32_t code, int e) {
  const int m = 15 - e, bias = (1 << (e - 1)) - 1;
  const int exponent = static_cast<int>(code >> m) % (1 << e);
  const double fraction = std::ldexp(code % (1u << m), -m);
  const double sign = code >> 15 ? -1 : 1;
  if (exponent == (1 << e) - 1) return fraction != 0 ? std::nan("") : sign * HUGE_VAL;
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias)
                               : std::ldexp(1 + fraction, exponent - bias));
}

struct Half {
  const char* name;
  int exponent_bits;
  uint32_t infinity;
  float (*from)(uint16_t);
  uint16_t (*to)(float);
};
constexpr Half kHalves[] = {{"bf16", 8, 0x7F80, from_bf16, to_bf16},
                            {"fp16", 5, 0x7C00, from_fp16, to_fp16}};

TEST(Halves, EveryCodeHasItsValueAndComesBack) {
  for (const Half& h : kHalves) {
    for (uint32_t code = 0; code < 0x10000; ++code) {
      const double want = half_value(code, h.exponent_bits);
      const float got = h.from(static_cast<uint16_t>(code));
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(got)) << h.name << " " << code;
        EXPECT_TRUE(std::isnan(h.from(h.to(got)))) << h.name << " " << code;
      } else {
        EXPECT_EQ(got, want) << h.name << " " << code;
        EXPECT_EQ(std::signbit(got), std::signbit(want)) << h.name << " " << code;
        EXPECT_EQ(h.to(got), code) << h.name;
      }
    }
  }
}

// The step from the largest number to infinity rounds like any other: halfway is Inf.
TEST(Halves, HalfwayGoesToEvenAndOneUlpDecides) {
  for (const Half& h : kHalves) {
    for (uint32_t low = 0; low < h.infinity; ++low) {
      const double below = half_value(low, h.exponent_bits);
      const double above = low + 1 < h.infinity
                               ? half_value(low + 1, h.exponent_bits)
                               : below + (below - half_value(low - 1, h.exponent_bits));
      const float middle = static_cast<float>((below + above) / 2);
      ASSERT_EQ(middle, (below + above) / 2);
      for (uint32_t sign : {0u, 0x8000u}) {
        const auto rounded = [&](float x) { return h.to(sign ? -x : x) ^ sign; };
        EXPECT_EQ(rounded(middle), low + low % 2) << h.name << " " << middle;
        EXPECT_EQ(rounded(std::nextafter(middle, 0.0f)), low) << h.name << " " << middle;
        EXPECT_EQ(rounded(std::nextafter(middle, HUGE_VALF)), low + 1) << h.name << " " << middle;
      }
    }
    EXPECT_EQ(h.to(FLT_MAX), h.infinity) << h.name;
    EXPECT_EQ(h.to(-HUGE_VALF), h.infinity | 0x8000) << h.name;
    EXPECT_EQ(h.to(-0.0f), 0x8000) << h.name;
  }
}

TEST(Halves, NanStaysNanWithItsSign) {
  for (const Half& h : kHalves) {
    for (uint32_t bits : {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0x7F80FFFFu}) {
      for (uint32_t sign : {0u, 0x80000000u}) {
        const uint16_t code = h.to(float_of(bits | sign));
        EXPECT_TRUE(std::isnan(h.from(code))) << h.name << " " << bits;
        EXPECT_EQ(code >> 15, sign >> 31) << h.name << " " << bits;
      }
    }
  }
}

}  // namespace
}  // namespace blockscale::testing
