// The microkernels of BF16 dot products, each where the processor has its instruction: the GEMM
// itself uses only the best of them.
#include <gtest/gtest.h>

#include <cmath>

#include "cases.h"
#include "cpu/dot_bf16.h"

namespace blockscale::testing {
namespace {

bool available(cpu::Avx512Dot) { return cpu::has_bf16(); }
bool available(cpu::AmxDot) { return cpu::AmxDot::available(); }

template <class Dot>
class DotTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!available(Dot())) GTEST_SKIP() << "this processor does not have the instruction";
  }
};
using Dots = ::testing::Types<cpu::Avx512Dot, cpu::AmxDot>;
TYPED_TEST_SUITE(DotTest, Dots);

// A panel of `lines` lines and the values in it. Each word holds two positions of k.
struct Panel {
  Panel(Random& random, int64_t lines, int64_t pairs, int64_t together)
      : words(static_cast<size_t>(lines * pairs)), values(static_cast<size_t>(2 * lines * pairs)) {
    for (int64_t line = 0; line < lines; ++line)
      for (int64_t k = 0; k < 2 * pairs; ++k) {
        const uint16_t bits = to_bf16(static_cast<float>(random.normal()));
        values[static_cast<size_t>(line * 2 * pairs + k)] = from_bf16(bits);
        const int64_t pair = k / 2;
        const int64_t at = (pair / together * lines + line) * together + pair % together;
        words[static_cast<size_t>(at)] |= uint32_t{bits} << (k % 2 ? 16 : 0);
      }
  }
  std::vector<uint32_t> words;
  std::vector<float> values;
};

TYPED_TEST(DotTest, EverySumIsWithinItsBound) {
  using Dot = TypeParam;
  constexpr int64_t kRows = Dot::kRows, kColumns = Dot::kColumns, kStride = kColumns + 3;
  Random random(test_seeds().front());
  [[maybe_unused]] const typename Dot::Session session;
  for (const int64_t pairs : {int64_t{0}, Dot::kTogether, 3 * Dot::kTogether, int64_t{256}}) {
    for (const bool accumulate : {false, true}) {
      const Panel a(random, kRows, pairs, Dot::kTogether), b(random, kColumns, pairs, 1);
      std::vector<float> scales(kRows + kColumns), c(kRows * kStride, 0.5f);
      for (float& s : scales) s = static_cast<float>(std::fabs(random.normal())) + 0.1f;
      Dot::multiply(a.words.data(), b.words.data(), pairs, scales.data(), scales.data() + kRows,
                    accumulate, c.data(), kStride);
      for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t column = 0; column < kStride; ++column) {
          const float got = c[static_cast<size_t>(row * kStride + column)];
          if (column >= kColumns) {
            ASSERT_EQ(got, 0.5f) << "beside the tile";
            continue;
          }
          double sum = 0, magnitude = 0;
          for (int64_t k = 0; k < 2 * pairs; ++k) {
            const double product =
                static_cast<double>(a.values[static_cast<size_t>(row * 2 * pairs + k)]) *
                static_cast<double>(b.values[static_cast<size_t>(column * 2 * pairs + k)]);
            sum += product, magnitude += std::fabs(product);
          }
          const double factor = static_cast<double>(scales[static_cast<size_t>(row)]) *
                                static_cast<double>(scales[static_cast<size_t>(kRows + column)]);
          const double want = factor * sum + (accumulate ? 0.5 : 0.0);
          const double bound = std::ldexp(static_cast<double>(2 * pairs + 4), -24) *
                               (factor * magnitude + (accumulate ? 0.5 : 0.0));
          ASSERT_NEAR(got, want, bound) << pairs << " pairs, row " << row << ", column " << column;
        }
      }
    }
  }
}

TYPED_TEST(DotTest, NaNStaysInItsRowAndColumn) {
  using Dot = TypeParam;
  Random random(test_seeds().front());
  [[maybe_unused]] const typename Dot::Session session;
  constexpr int64_t kPairs = 2 * Dot::kTogether, kRow = Dot::kRows - 1;
  Panel a(random, Dot::kRows, kPairs, Dot::kTogether);
  const Panel b(random, Dot::kColumns, kPairs, 1);
  a.words[static_cast<size_t>(kRow * Dot::kTogether)] |= 0x7FC0;
  const std::vector<float> ones(Dot::kColumns, 1.0f);
  std::vector<float> c(Dot::kRows * Dot::kColumns);
  Dot::multiply(a.words.data(), b.words.data(), kPairs, ones.data(), ones.data(), false, c.data(),
                Dot::kColumns);
  for (int64_t i = 0; i < Dot::kRows * Dot::kColumns; ++i)
    ASSERT_EQ(std::isnan(c[static_cast<size_t>(i)]), i / Dot::kColumns == kRow) << i;
}

}  // namespace
}  // namespace blockscale::testing
