// Every code of every format, every rounding boundary, and every float of the half binades in which
// the code changes (specification, sections 2 and 3).
#include "blockscale/formats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>

#include "model.h"
#include "testing.h"

namespace blockscale::testing {
namespace {

std::vector<Facts> all_facts() {
  std::vector<Facts> all = element_facts();
  all.insert(all.end(), scale_facts().begin(), scale_facts().end());
  return all;
}

TEST(Formats, NamesSizesAndLargestValues) {
  for (const Facts& f : all_facts()) {
    const FormatTraits t = traits(f.format);
    EXPECT_EQ(t.name, f.name);
    EXPECT_EQ(t.bits(), f.is_signed + f.exponent_bits + f.mantissa_bits) << f.name;
    EXPECT_EQ(t.is_signed, f.is_signed) << f.name;
    EXPECT_EQ(max_value(f.format), f.largest) << f.name;
    EXPECT_EQ(codes_per_byte(f.format), f.name == "e2m1" ? 2 : 1) << f.name;
    if (!f.nan_codes.empty()) {
      EXPECT_TRUE(std::isnan(decode(f.format, t.nan_code()))) << f.name;
    }
  }
  EXPECT_EQ(traits(Format::e4m3fnuz).nan_code(), 0x80u);
  EXPECT_EQ(traits(Format::e4m3).nan_code(), 0x7Fu);
  EXPECT_EQ(traits(Format::ue5m3).nan_code(), 0xFFu);
  EXPECT_EQ(traits(Format::e8m0).nan_code(), 0xFFu);
  EXPECT_EQ(max_value(Format::e8m0), 0x1p127f);
  EXPECT_EQ(max_value(Format::fp32), FLT_MAX);
  EXPECT_EQ(scale_bytes(Format::fp32), 4);
  for (Format f : {Format::e8m0, Format::e4m3, Format::ue5m3}) EXPECT_EQ(scale_bytes(f), 1);
}

TEST(Formats, EveryCodeDecodesToItsValue) {
  for (const Facts& f : all_facts()) {
    for (int code = 0; code < 1 << traits(f.format).bits(); ++code) {
      const double want = model_value(f, code);
      const float got = decode(f.format, code);
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(got)) << f.name << " " << code;
      } else {
        EXPECT_EQ(got, want) << f.name << " " << code;
        EXPECT_EQ(std::signbit(got), std::signbit(want)) << f.name << " " << code;
      }
    }
  }
}

TEST(Formats, E8M0IsAPowerOfTwoWithoutZero) {
  for (int code = 0; code < 255; ++code)
    EXPECT_EQ(decode(Format::e8m0, code), std::ldexp(1.0, code - 127)) << code;
  EXPECT_TRUE(std::isnan(decode(Format::e8m0, 255)));
}

TEST(Formats, TheGridsAreTheOnesWrittenDown) {
  const std::vector<double> e2m1 = {0, .5, 1, 1.5, 2, 3, 4, 6};
  EXPECT_EQ(model_magnitudes(Format::e2m1), e2m1);
  for (size_t code = 0; code < e2m1.size(); ++code)
    EXPECT_EQ(decode(Format::e2m1, static_cast<uint32_t>(code)), e2m1[code]);
  // ue5m3: 0x01-07 = m 2^-17, then (1 + m/8) 2^(e-15).
  EXPECT_EQ(decode(Format::ue5m3, 0x07), 7 * 0x1p-17f);
  EXPECT_EQ(decode(Format::ue5m3, 0x08), 0x1p-14f);
  EXPECT_EQ(decode(Format::ue5m3, 0xFE), 114688.0f);
  EXPECT_EQ(decode(Format::e5m2, 0x7C), HUGE_VALF);
  EXPECT_EQ(decode(Format::e5m2, 0xFC), -HUGE_VALF);
}

TEST(Formats, WhatIsNegativeOrFinite) {
  for (const float x : {0x1p-149f, 0x1p-126f, 1.0f, FLT_MAX}) {
    EXPECT_TRUE(is_negative(-x) && !is_negative(x)) << x;
    EXPECT_TRUE(is_finite(-x) && is_finite(x)) << x;
  }
  EXPECT_FALSE(is_negative(0.0f) || is_negative(-0.0f));
  EXPECT_TRUE(is_negative(-HUGE_VALF) && !is_negative(HUGE_VALF));
  EXPECT_FALSE(is_finite(-HUGE_VALF) || is_finite(HUGE_VALF));
  for (const uint32_t nan : {kInfBits + 1, kNanBits, 0xFFC00000u, 0xFFFFFFFFu})
    EXPECT_FALSE(is_negative(float_of(nan)) || is_finite(float_of(nan))) << nan;
}

TEST(Formats, PowersOfTwoAreExactDownToTheSmallestSubnormal) {
  for (int e = -149; e <= 127; ++e) EXPECT_EQ(exp2i(e), std::ldexp(1.0, e)) << e;
}

TEST(Formats, EncodeInvertsDecodeOnEveryFiniteCode) {
  for (const Facts& f : all_facts()) {
    for (int code = 0; code < 1 << traits(f.format).bits(); ++code) {
      const double value = model_value(f, code);
      if (!std::isfinite(value)) continue;
      EXPECT_EQ(encode(f.format, static_cast<float>(value)), code) << f.name;
    }
  }
}

TEST(Formats, E2M1TiesGoWhereTheSpecificationSays) {
  const double ties[][2] = {{.25, 0}, {.75, 1}, {1.25, 1}, {1.75, 2}, {2.5, 2}, {3.5, 4}, {5, 4}};
  for (const auto& [x, want] : ties) {
    EXPECT_EQ(decode(Format::e2m1, encode(Format::e2m1, static_cast<float>(x))), want) << x;
    EXPECT_EQ(decode(Format::e2m1, encode(Format::e2m1, static_cast<float>(-x))), -want) << x;
  }
}

// The code of -magnitude: the sign bit, except for a zero that has none and unsigned formats.
int negative(const Facts& f, int code) {
  if (!f.is_signed || (code == 0 && !f.negative_zero)) return code;
  return code + (1 << (f.exponent_bits + f.mantissa_bits));
}

void expect_encodes(const Facts& f, float x, int code) {
  EXPECT_EQ(encode(f.format, x), code) << f.name << " " << x;
  EXPECT_EQ(encode(f.format, -x), negative(f, code)) << f.name << " " << -x;
}
int encode_up(const Facts& f, float x) {
  return static_cast<int>(encode_magnitude(traits(f.format), x, RoundingDirection::up));
}

TEST(Formats, RoundToNearestAtEveryBoundaryAndOneUlpAround) {
  for (const Facts& f : all_facts()) {
    const std::vector<double>& v = model_magnitudes(f.format);
    for (int low = 0; low + 1 < static_cast<int>(v.size()); ++low) {
      const float middle = static_cast<float>((v[low] + v[low + 1]) / 2);
      ASSERT_EQ(middle, (v[low] + v[low + 1]) / 2) << "the midpoint is an FP32 number";
      expect_encodes(f, std::nextafter(middle, 0.0f), low);
      expect_encodes(f, middle, low % 2 == 0 ? low : low + 1);
      expect_encodes(f, std::nextafter(middle, HUGE_VALF), low + 1);
      const float value = static_cast<float>(v[low]);
      if (low > 0) expect_encodes(f, std::nextafter(value, 0.0f), low);
      expect_encodes(f, std::nextafter(value, HUGE_VALF), low);
    }
  }
}

TEST(Formats, RoundUpGoesToTheNextValueUnlessOnTheGrid) {
  for (const Facts& f : all_facts()) {
    const std::vector<double>& v = model_magnitudes(f.format);
    for (int low = 0; low + 1 < static_cast<int>(v.size()); ++low) {
      const float value = static_cast<float>(v[low]);
      EXPECT_EQ(encode_up(f, value), low) << f.name;
      EXPECT_EQ(encode_up(f, std::nextafter(value, HUGE_VALF)), low + 1) << f.name << " " << low;
      EXPECT_EQ(encode_up(f, static_cast<float>((v[low] + v[low + 1]) / 2)), low + 1) << f.name;
      EXPECT_EQ(encode_up(f, std::nextafter(static_cast<float>(v[low + 1]), 0.0f)), low + 1);
    }
    for (float x : {0x1p-149f, 0x1p-127f, 0x1p-126f, 0x1p-60f}) EXPECT_EQ(encode_up(f, x), 1);
    for (float x : {static_cast<float>(f.largest), FLT_MAX, HUGE_VALF})
      EXPECT_EQ(encode_up(f, x), static_cast<int>(v.size()) - 1) << f.name << " " << x;
  }
}

TEST(Formats, SaturatesAndKeepsSmallNumbersAndSigns) {
  for (const Facts& f : all_facts()) {
    const int last = static_cast<int>(model_magnitudes(f.format).size()) - 1;
    const float largest = static_cast<float>(f.largest);
    for (float x : {largest, std::nextafter(largest, HUGE_VALF), 2 * largest, FLT_MAX, HUGE_VALF})
      expect_encodes(f, x, last);
    for (float x : {0.0f, 0x1p-149f, 0x1.8p-140f, FLT_MIN, 0x1p-30f}) expect_encodes(f, x, 0);
  }
}

TEST(Formats, NanEncodesToNanOrToZeroWhereThereIsNone) {
  for (const Facts& f : all_facts()) {
    for (uint32_t bits : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFF800001u, 0x7FFFFFFFu}) {
      const uint8_t code = encode(f.format, float_of(bits));
      EXPECT_EQ(code, f.nan_codes.empty() ? 0 : traits(f.format).nan_code()) << f.name;
    }
  }
}

// All floats (every `step`-th) of the halves of binades where the code changes, and one in 61 of
// the others, which are below half of the smallest value or beyond the largest. Codes grow with the
// magnitude, so the FP32 line is cut into runs at exact midpoints and every encode within a run has
// to give that run's code: one comparison a float. Returns the number of floats that differ.
template <Format kFormat, RoundingDirection kDirection>
uint64_t sweep(bool with_negative, uint64_t step = kSweepStep) {
  const Facts& f = facts(kFormat);
  const std::vector<double>& v = model_magnitudes(kFormat);
  std::vector<uint32_t> first = {0};  // first[c]: bits of the smallest magnitude that gives code c
  for (int c = 1; c < static_cast<int>(v.size()); ++c) {
    if (kDirection == RoundingDirection::up) {
      first.push_back(bits_of(static_cast<float>(v[c - 1])) + 1);
    } else {
      const uint32_t middle = bits_of(static_cast<float>((v[c - 1] + v[c]) / 2));
      first.push_back(c % 2 == 0 ? middle : middle + 1);
    }
  }
  const auto run_after = [&](uint64_t bits) {
    return std::upper_bound(first.begin(), first.end(), static_cast<uint32_t>(bits));
  };
  constexpr uint64_t kHalfBinade = uint64_t{1} << 22, kElsewhere = 61;
  std::atomic<uint64_t> wrong{0};
  for_chunks(0, uint64_t{kInfBits} + 1, kHalfBinade, [&](uint64_t begin, uint64_t end) {
    const uint64_t each = run_after(begin) == run_after(end - 1) ? kElsewhere * step : step;
    uint64_t bad = 0;
    for (uint64_t at = begin; at < end;) {
      const auto next = run_after(at);
      const int code = static_cast<int>(next - first.begin()) - 1;
      const int minus_code = negative(f, code);
      const uint64_t stop = next == first.end() ? end : std::min<uint64_t>(end, *next);
      for (; at < stop; at += each) {
        const float x = float_of(static_cast<uint32_t>(at));
        if constexpr (kDirection == RoundingDirection::up)
          bad += encode_magnitude(traits(kFormat), x, kDirection) != static_cast<uint32_t>(code);
        else
          bad += encode(kFormat, x) != code;
        if (with_negative) bad += encode(kFormat, -x) != minus_code;
      }
    }
    wrong += bad;
  });
  return wrong;
}
template <Format kFormat>
uint64_t sweep_nans() {
  const int want = facts(kFormat).nan_codes.empty() ? 0 : facts(kFormat).nan_codes[0];
  uint64_t bad = 0;
  for (uint32_t bits = kInfBits + 1; bits < 0x80000000u; ++bits) {
    bad += encode(kFormat, float_of(bits)) != want;
    bad += encode(kFormat, float_of(bits | 0x80000000u)) != want;
  }
  return bad;
}

TEST(FloatSweep, E2M1) {
  EXPECT_EQ((sweep<Format::e2m1, RoundingDirection::nearest_even>(true)), 0u);
  EXPECT_EQ(sweep_nans<Format::e2m1>(), 0u);
}
TEST(FloatSweep, E4M3) {
  EXPECT_EQ((sweep<Format::e4m3fn, RoundingDirection::nearest_even>(true)), 0u);
  EXPECT_EQ(sweep_nans<Format::e4m3fn>(), 0u);
}
TEST(FloatSweep, UE5M3) {
  EXPECT_EQ((sweep<Format::ue5m3, RoundingDirection::nearest_even>(true)), 0u);
  EXPECT_EQ(sweep_nans<Format::ue5m3>(), 0u);
}
// Rounding up is proved on its boundaries above; here every 97th magnitude between them.
TEST(FloatSweep, ScalesRoundedUp) {
  EXPECT_EQ((sweep<Format::e4m3, RoundingDirection::up>(false, 97)), 0u);
  EXPECT_EQ((sweep<Format::ue5m3, RoundingDirection::up>(false, 97)), 0u);
}

}  // namespace
}  // namespace blockscale::testing
