// E2M1 to nearest is found from thresholds on BF16 bits: every magnitude around them, for scales of
// all sizes, against the scalar oracle.
#include <gtest/gtest.h>

#include <algorithm>

#include "cases.h"

// Of the library's own copy of Highway.
namespace blockscale_hwy {
int64_t SupportedTargets();
void SetSupportedTargetsForTest(int64_t targets);
}  // namespace blockscale_hwy

namespace blockscale::testing {
namespace {

constexpr int kBlock = 32;  // two blocks of 16
constexpr int64_t kRows = 24 * kBlock, kColumns = 256;

// Bits of the largest magnitude of column `c`: every mantissa, in two binades.
uint32_t largest_bits(uint32_t exponent, int64_t c) {
  return std::min<uint32_t>(exponent * 128 + static_cast<uint32_t>(c), 0x7F7F);
}

// Block b of column c holds its largest magnitude in both halves and 30 of the 720 below it.
float value(uint32_t exponent, int64_t r, int64_t c) {
  const uint32_t largest = largest_bits(exponent, c);
  const auto i = static_cast<uint32_t>(r % 16), half = static_cast<uint32_t>(r / 16);
  const uint32_t bits = i == 0 ? largest : largest - std::min(largest, 15 * half + i - 1);
  return float_of((bits | (r * 7 + c) % 3 / 2 << 15) << 16);
}

void expect_reference(const QuantSpec& spec, int axis, uint32_t exponent, const float* amax) {
  SCOPED_TRACE(to_string(spec) + " axis " + std::to_string(axis) + " exponent " +
               std::to_string(exponent) + " amax " + std::to_string(amax ? *amax : 0));
  const int64_t rows = axis == -2 ? kRows : kColumns, columns = axis == -2 ? kColumns : kRows;
  const Input x(DType::bf16, 1, rows, columns, Strides::row_major,
                [&](int64_t, int64_t r, int64_t c) {
                  return axis == -2 ? value(exponent, r, c) : value(exponent, c, r);
                });
  Output want(spec, {}, axis, rows, columns), got(spec, {}, axis, rows, columns);
  QuantizeOptions options;
  options.amax = spec.outer ? amax : nullptr;
  reference::quantize(x.view(), want.view, options);
  quantize(x.view(), got.view, options);
  ASSERT_TRUE(same_operand(got, want));
}

void sweep(int step) {
  Random random(11);
  for (const char* text : {"nvfp4", "amdfp4", "mxfp4", "mxfp4[scale_rule=rceil]",
                           "mxfp4[scale_rule=even]", "mxfp4[scale_rule=ceil]"}) {
    const QuantSpec spec = parse_spec(text);
    for (uint32_t exponent = 0; exponent < 255; exponent += 1 + random.below(2 * step)) {
      // Amaxes that make scales large, small, zero and everything between; short ones and long.
      const int above = static_cast<int>(random.below(24)) - 6;
      const uint32_t field = std::clamp(static_cast<int>(exponent) + above, 0, 254);
      const uint32_t mantissa = random.one_in(2) ? static_cast<uint32_t>(random.next()) & 0x7FFFFF
                                                 : static_cast<uint32_t>(random.below(8)) << 20;
      const float amax = float_of(field << 23 | mantissa);
      for (int axis : {-1, -2}) expect_reference(spec, axis, exponent, &amax);
    }
  }
}

TEST(Fp4, NearestIsTheReferenceAroundEveryThreshold) { sweep(kSweepStep > 1 ? 64 : 8); }

TEST(Fp4, NearestIsTheReferenceWithEveryInstructionSet) {
  for (int64_t rest = blockscale_hwy::SupportedTargets(); rest; rest &= rest - 1) {
    blockscale_hwy::SetSupportedTargetsForTest(rest & -rest);
    if (instruction_sets().empty()) continue;  // the processor has it, this build does not
    SCOPED_TRACE(instruction_set());
    sweep(kSweepStep > 1 ? 128 : 16);
  }
  blockscale_hwy::SetSupportedTargetsForTest(0);
}

}  // namespace
}  // namespace blockscale::testing
