// GEMM against sums of the decoded numbers in double precision (specification, section 10).
//
// The bound. Let u = 2^-24, the rounding unit of FP32. A decoded operand scale * code is exact or,
// with FP32 scales, rounded once: 2u for a product of two. A product may be rounded before it is
// added (no FMA): u. K terms are added in any order in at most K - 1 rounded additions, plus one
// for a second accumulator: K u. To first order |S - S_exact| <= (K + 3) u sum|a b|; K + 4 covers
// the higher orders for every K here. Then the result is rounded once to FP32, u, or also to BF16,
// 2^-8. Products below FP32's range are absolute errors: half a smallest subnormal each, twice.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "cases.h"
#include "model_rules.h"

namespace blockscale::testing {
namespace {

class GemmTest : public ::testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override { std::printf("seed %llu\n", static_cast<unsigned long long>(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Seeds, GemmTest, ::testing::ValuesIn(test_seeds()));

// One operand of `lines` x `length`, stored along either axis in any layout.
struct Operand {
  Operand(const QuantSpec& s, const StorageLayout& layout, int axis, int64_t lines, int64_t length)
      : q(s, layout, axis, axis == -1 ? lines : length, axis == -1 ? length : lines) {}
  void fill(const Values& values, DType dtype = DType::f32, const QuantizeOptions& options = {}) {
    const Input x(dtype, 1, q.view.rows, q.view.columns, Strides::row_major, values);
    quantize(x.view(), q.view, options, serial_executor());
  }
  ConstQuantized view() const { return as_const(q.view); }
  // scale * code as a real number, without the outer scale.
  double value(int64_t line, int64_t k) const {
    const QuantSpec& spec = q.view.spec;
    const uint32_t stored = q.scale(0, line, k / spec.block);
    const double scale =
        spec.scale == Format::fp32 ? float_of(stored)
        : spec.scale == Format::e8m0
            ? (stored == 255 ? NAN : std::ldexp(1.0, static_cast<int>(stored) - 127))
            : model_value(facts(spec.scale), static_cast<int>(stored));
    return scale * model_value(facts(spec.element), q.code(0, line, k));
  }
  std::vector<double> decoded() const {
    std::vector<double> all;
    for (int64_t line = 0; line < q.shape.lines; ++line)
      for (int64_t k = 0; k < q.shape.padded; ++k) all.push_back(value(line, k));
    return all;
  }
  Output q;
};

struct Result {
  Result(DType dtype, int64_t m, int64_t n, Strides kind, float initial = 0)
      : frame(dtype, 1, m, n, kind, [=](int64_t, int64_t, int64_t) { return initial; }) {
    const ConstMatrix& f = frame.view();
    view = {const_cast<void*>(f.data), f.dtype, m, n, f.row_stride, f.column_stride, 1, 0};
  }
  Input frame;
  Matrix view;
};

// Whether every element of d is within the bound of the exact sums.
void expect_within_bound(const Operand& a, const Operand& b, const Result& d,
                         const GemmOptions& options, float initial = 0) {
  const std::vector<double> va = a.decoded(), vb = b.decoded();
  const int64_t k = a.q.shape.padded;
  const double factor =
      static_cast<double>(options.alpha) * a.q.outer_scale(0) * b.q.outer_scale(0);
  const bool half = d.view.dtype == DType::bf16;
  for (int64_t m = 0; m < d.view.rows; ++m) {
    for (int64_t n = 0; n < d.view.columns; ++n) {
      long double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < k; ++i) {
        const long double product = static_cast<long double>(va[m * k + i]) * vb[n * k + i];
        sum += product;
        magnitude += std::fabs(product);
      }
      const long double exact = factor * sum +
                                (options.bias ? static_cast<const float*>(options.bias)[n] : 0.0f) +
                                (options.accumulate ? initial : 0.0f);
      const float got = d.frame.at(0, m, n);
      if (std::isnan(exact)) {
        ASSERT_TRUE(std::isnan(got)) << m << " " << n << " is " << got;
        continue;
      }
      const long double sums =
          static_cast<long double>(k + 4) * 0x1p-24L * std::fabs(factor) * magnitude +
          2 * static_cast<long double>(k) * 0x1p-150L * std::fabs(factor);
      const long double rounding =
          half ? (0x1p-8L + 0x1p-24L) * (std::fabs(exact) + sums) + 0x1p-134L
               : 0x1p-24L * (std::fabs(exact) + sums) + 0x1p-150L;
      const long double error = std::fabs(static_cast<long double>(got) - exact);
      ASSERT_LE(error, sums + rounding)
          << "element " << m << ", " << n << ": " << got << " for " << static_cast<double>(exact);
    }
  }
}

// Two specs that may meet in a GEMM: equal blocks and transforms.
std::pair<QuantSpec, QuantSpec> random_pair(Random& random) {
  for (;;) {
    const QuantSpec a = random.pick(valid_specs()), b = random.pick(valid_specs());
    if (a.block == b.block && a.hadamard == b.hadamard) return {a, b};
  }
}
Values mixed(Random& random) {
  const uint64_t seed = random.next();
  return [=](int64_t, int64_t r, int64_t c) {
    Random at(seed ^ static_cast<uint64_t>(r * 1000033 + c));
    if (at.one_in(9)) return 0.0f;
    return static_cast<float>(std::ldexp(at.normal(), static_cast<int>((r * 3 + c / 16) % 17) - 8));
  };
}
QuantizeOptions with_rng(Random& random) {
  QuantizeOptions options;
  options.rng = Rng{random.next(), 1};
  return options;
}

TEST_P(GemmTest, IsWithinTheBoundForMixedSpecsShapesAndLayouts) {
  for (int i = 0; i < (kSweepStep > 1 ? 10 : 80); ++i) {
    Random random(GetParam() * 1000003 + static_cast<uint64_t>(i));
    const auto [sa, sb] = random_pair(random);
    const int64_t m = random.below(70), n = random.below(90);
    const int64_t k = random.one_in(8) ? 500 + random.below(700) : random_extent(random);
    Operand a(sa, random.pick(layouts_for(sa)), random.one_in(2) ? -1 : -2, m, k);
    Operand b(sb, random.pick(layouts_for(sb)), random.one_in(2) ? -1 : -2, n, k);
    a.fill(mixed(random), DType::bf16, with_rng(random));
    b.fill(mixed(random), DType::f32, with_rng(random));
    GemmOptions options;
    if (random.one_in(2)) options.alpha = static_cast<float>(random.normal());
    std::vector<float> bias(static_cast<size_t>(n));
    for (float& v : bias) v = static_cast<float>(random.normal() * 100);
    if (random.one_in(2)) options.bias = bias.data();
    const DType dtype = random.one_in(2) ? DType::f32 : DType::bf16;
    options.accumulate = dtype == DType::f32 && random.one_in(2);
    constexpr Strides kinds[] = {Strides::row_major, Strides::column_major, Strides::padded_rows,
                                 Strides::every_second_column, Strides::negative_rows};
    const Strides kind = random.pick(kinds);
    SCOPED_TRACE(to_string(sa) + " x " + to_string(sb) + " " + std::to_string(m) + "x" +
                 std::to_string(n) + "x" + std::to_string(k) + ", seed " +
                 std::to_string(GetParam()) + " case " + std::to_string(i));
    Result serial(dtype, m, n, kind, 2.5f), odd(dtype, m, n, kind, 2.5f),
        oracle(dtype, m, n, kind, 2.5f);
    gemm(a.view(), b.view(), serial.view, options, serial_executor());
    expect_within_bound(a, b, serial, options, 2.5f);
    if (HasFatalFailure()) return;
    gemm(a.view(), b.view(), odd.view, options, OddExecutor(GetParam() + i));
    reference::gemm(a.view(), b.view(), oracle.view, options);
    expect_within_bound(a, b, oracle, options, 2.5f);
    if (HasFatalFailure()) return;
    for (int64_t r = 0; r < m; ++r)
      for (int64_t c = 0; c < n; ++c)
        ASSERT_EQ(bits_of(odd.frame.at(0, r, c)), bits_of(serial.frame.at(0, r, c)))
            << "sums depend on the number of threads";
  }
}

// Small integers under scales of one: every sum is exact, in any order, so D has no error at all.
TEST(Gemm, SumsOfSmallIntegersAreExact) {
  const Values ints = [](int64_t, int64_t r, int64_t c) {
    return static_cast<float>((r * 31 + c * 17) % 13 - 6);
  };
  const Values grid = [](int64_t, int64_t r, int64_t c) {
    constexpr float kValues[] = {6, -4, 3, 2, -1.5f, 1, 0.5f, 0, -6};
    return c % 32 == 0 ? 6.0f : kValues[(r * 5 + c * 7) % 9];
  };
  for (const auto& [spec, values] : {std::pair(kMxfp8, ints), std::pair(kMxfp4, grid)}) {
    for (const auto& [m, n, k] :
         {std::tuple(1, 1, 1), std::tuple(13, 33, 70), std::tuple(97, 65, 1500),
          std::tuple(5, 1100, 130), std::tuple(200, 3, 513)}) {
      Operand a(spec, {}, -1, m, k), b(spec, {}, -2, n, k);
      a.fill(values);
      b.fill([&](int64_t i, int64_t r, int64_t c) { return values(i, c, r); });
      const std::vector<double> va = a.decoded(), vb = b.decoded();
      std::vector<float> bias(static_cast<size_t>(n));
      for (int64_t c = 0; c < n; ++c) bias[c] = static_cast<float>(c % 1021);
      Result d(DType::f32, m, n, Strides::row_major);
      gemm(a.view(), b.view(), d.view, {.bias = bias.data()});
      const int64_t padded = a.q.shape.padded;
      for (int64_t r = 0; r < m; ++r)
        for (int64_t c = 0; c < n; ++c) {
          double sum = bias[c];
          for (int64_t i = 0; i < padded; ++i) sum += va[r * padded + i] * vb[c * padded + i];
          ASSERT_EQ(d.frame.at(0, r, c), sum)
              << to_string(spec) << " " << m << "x" << n << "x" << k;
        }
    }
  }
}

// Scales of 2^90, whose product is infinite, on codes that meet only zeros: 0, not 0 x Inf.
TEST(Gemm, LargeScalesDoNotMakeNanOfZeros) {
  for (const QuantSpec& spec : {kFp8_1x128, kFp8_128x128, kMxfp8, kNvfp4}) {
    Operand a(spec, {}, -1, 3, 150), b(spec, {}, -1, 5, 150);
    a.fill([](int64_t, int64_t, int64_t c) { return c % 2 ? 0.0f : 0x1p99f; });
    b.fill([](int64_t, int64_t, int64_t c) { return c % 2 ? -0x1p99f : 0.0f; });
    Result d(DType::f32, 3, 5, Strides::row_major, NAN);
    gemm(a.view(), b.view(), d.view);
    for (int64_t r = 0; r < 3; ++r)
      for (int64_t c = 0; c < 5; ++c) EXPECT_EQ(d.frame.at(0, r, c), 0) << to_string(spec);
  }
}

TEST(Gemm, AnEmptyContractionGivesTheBiasOrZeroAndKeepsWhatAccumulates) {
  Operand a(kNvfp4, {}, -1, 3, 0), b(kAmdfp4, {}, -1, 2, 0);
  const Values none = [](int64_t, int64_t, int64_t) { return 0.0f; };
  a.fill(none), b.fill(none);
  const float bias[] = {1.5f, -2};
  Result d(DType::f32, 3, 2, Strides::row_major, NAN),
      with_bias(DType::bf16, 3, 2, Strides::row_major, NAN),
      added(DType::f32, 3, 2, Strides::row_major, 7);
  gemm(a.view(), b.view(), d.view);
  gemm(a.view(), b.view(), with_bias.view, {.bias = bias});
  gemm(a.view(), b.view(), added.view, {.bias = bias, .accumulate = true});
  Result want(DType::f32, 3, 2, Strides::row_major, 7);
  reference::gemm(a.view(), b.view(), want.view, {.bias = bias, .accumulate = true});
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t c = 0; c < 2; ++c) {
      EXPECT_EQ(want.frame.at(0, r, c), 7 + bias[c]);
      EXPECT_EQ(d.frame.at(0, r, c), 0);
      EXPECT_EQ(with_bias.frame.at(0, r, c), bias[c]);
      EXPECT_EQ(added.frame.at(0, r, c), 7 + bias[c]);
    }
}

// Nothing is multiplied by the outer scale of what is empty, and -0 + 0 is not -0.
TEST(Gemm, AnEmptyContractionReadsNoOuterScale) {
  Operand a(kNvfp4, {}, -1, 3, 0), b(kNvfp4, {}, -1, 2, 0);
  const Values none = [](int64_t, int64_t, int64_t) { return 0.0f; };
  a.fill(none), b.fill(none);
  a.q.view.outer[0] = NAN;
  Result d(DType::f32, 3, 2, Strides::row_major, 7),
      added(DType::f32, 3, 2, Strides::row_major, -0.0f);
  gemm(a.view(), b.view(), d.view);
  gemm(a.view(), b.view(), added.view, {.accumulate = true});
  Result want(DType::f32, 3, 2, Strides::row_major, 7),
      kept(DType::f32, 3, 2, Strides::row_major, -0.0f);
  reference::gemm(a.view(), b.view(), want.view, {});
  reference::gemm(a.view(), b.view(), kept.view, {.accumulate = true});
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t c = 0; c < 2; ++c) {
      EXPECT_EQ(d.frame.at(0, r, c), 0);
      EXPECT_EQ(want.frame.at(0, r, c), 0);
      EXPECT_TRUE(std::signbit(added.frame.at(0, r, c)));
      EXPECT_TRUE(std::signbit(kept.frame.at(0, r, c)));
    }
}

TEST(Gemm, EmptyMatricesTouchNothing) {
  for (const auto& [m, n] : {std::pair(0, 5), std::pair(5, 0), std::pair(0, 0)}) {
    Operand a(kMxfp8, {}, -1, m, 40), b(kMxfp8, {}, -1, n, 40);
    const Values one = [](int64_t, int64_t, int64_t) { return 1.0f; };
    a.fill(one), b.fill(one);
    Result d(DType::f32, m, n, Strides::row_major);
    gemm(a.view(), b.view(), d.view);
    EXPECT_TRUE(d.frame.untouched());
  }
}

// A non-finite input reaches exactly the rows or columns of D that read its block.
TEST(Gemm, NanGoesWhereItsBlockIsReadAndNowhereElse) {
  for (const Family& family : families()) {
    for (float bad : {NAN, HUGE_VALF, -HUGE_VALF}) {
      for (bool in_a : {true, false}) {
        QuantSpec spec = family.spec;
        spec.outer = false;
        const int64_t m = 37, n = 41, k = 200, line = 20;
        Operand a(spec, {}, -1, m, k), b(spec, {}, -2, n, k);
        const auto values = [&](bool poisoned, bool transposed) {
          return [=](int64_t, int64_t r, int64_t c) {
            if (transposed) std::swap(r, c);
            return poisoned && r == line && c == 133 ? bad : static_cast<float>((r + c) % 5);
          };
        };
        a.fill(values(in_a, false));
        b.fill(values(!in_a, true));
        Result d(DType::f32, m, n, Strides::row_major);
        gemm(a.view(), b.view(), d.view);
        const int64_t size = spec.block_lines(), first = line / size * size;
        for (int64_t r = 0; r < m; ++r)
          for (int64_t c = 0; c < n; ++c) {
            const int64_t at = in_a ? r : c;
            ASSERT_EQ(std::isnan(d.frame.at(0, r, c)), at >= first && at < first + size)
                << family.name << " " << r << " " << c;
          }
      }
    }
  }
}

TEST(Gemm, ANonFiniteTensorWithAnOuterScaleMakesAllOfDNan) {
  for (const QuantSpec& spec : {kNvfp4, kAmdfp4}) {
    Operand a(spec, {}, -1, 5, 50), b(spec, {}, -1, 7, 50);
    a.fill([](int64_t, int64_t r, int64_t c) { return r == 3 && c == 49 ? HUGE_VALF : 1.0f; });
    b.fill([](int64_t, int64_t, int64_t) { return 1.0f; });
    Result d(DType::bf16, 5, 7, Strides::row_major);
    gemm(a.view(), b.view(), d.view);
    for (int64_t r = 0; r < 5; ++r)
      for (int64_t c = 0; c < 7; ++c) EXPECT_TRUE(std::isnan(d.frame.at(0, r, c)));
  }
}

// One operand huge and the other tiny, so that D is of ordinary size.
TEST(Gemm, ExtremeScalesCancel) {
  for (const Family& family : families()) {
    for (int exponent : {-120, -100, -60, 60, 100, 120}) {
      const int64_t m = 9, n = 11, k = 150;
      Operand a(family.spec, {}, -1, m, k), b(family.spec, {}, -1, n, k);
      Random random(9);
      const Values base = mixed(random);
      const auto scaled = [&](int e) {
        return [=](int64_t i, int64_t r, int64_t c) {
          const double v = std::fmin(std::fmax(base(i, r, c), -100.0), 100.0);
          return static_cast<float>(std::ldexp(v, e));
        };
      };
      a.fill(scaled(exponent));
      b.fill(scaled(-exponent));
      Result d(DType::f32, m, n, Strides::row_major);
      gemm(a.view(), b.view(), d.view);
      SCOPED_TRACE(std::string(family.name) + " 2^" + std::to_string(exponent));
      expect_within_bound(a, b, d, {});
      if (HasFatalFailure()) return;
    }
  }
}

// Bytes 0 and 254 of E8M0, the smallest and largest scales there are.
TEST(Gemm, TheExtremeBytesOfE8M0) {
  for (const QuantSpec& spec : {kMxfp8, kMxfp4}) {
    Operand a(spec, {}, -1, 4, 64), b(spec, {}, -1, 5, 64);
    const Values grid = [](int64_t, int64_t r, int64_t c) { return (r + c) % 2 ? 1.0f : -0.5f; };
    a.fill(grid), b.fill(grid);
    std::fill_n(a.q.scales.data(), a.q.scales.size(), uint8_t{0});
    std::fill_n(b.q.scales.data(), b.q.scales.size(), uint8_t{254});
    // The codes of `grid` are those of up to 448 or 6; 2^127 takes no more than 1.
    for (Operand* operand : {&a, &b})
      for (int64_t i = 0; i < operand->q.codes.size(); ++i)
        operand->q.codes.data()[i] = spec.element == Format::e2m1 ? 0x2A : i % 2 ? 0x38 : 0xB8;
    Result d(DType::f32, 4, 5, Strides::row_major);
    gemm(a.view(), b.view(), d.view);
    expect_within_bound(a, b, d, {});
    for (int64_t r = 0; r < 4; ++r) EXPECT_EQ(d.frame.at(0, r, 0), 64.0f);
  }
}

// The smallest code of every element at every scale whose products come near FP32's smallest normal
// number: the instruction that takes subnormals for zeros must not get them.
TEST(Gemm, SmallestCodesOfSmallBlocksAreNotZeros) {
  for (const Format element : {Format::e2m1, Format::e2m3, Format::e3m2, Format::e4m3fn,
                               Format::e4m3fnuz, Format::e5m2, Format::e5m2fnuz}) {
    QuantSpec spec = kMxfp8;
    spec.element = element;
    for (int scale = 60; scale < 90; ++scale) {
      Operand a(spec, {}, -1, 1, 32), b(spec, {}, -1, 1, 32);
      for (Operand* operand : {&a, &b}) {
        std::fill_n(operand->q.scales.data(), operand->q.scales.size(), uint8_t(scale));
        std::fill_n(operand->q.codes.data(), operand->q.codes.size(), uint8_t{0});
        operand->q.codes.data()[0] = 1;
      }
      Result d(DType::f32, 1, 1, Strides::row_major);
      gemm(a.view(), b.view(), d.view);
      const double exact = a.value(0, 0) * b.value(0, 0);
      EXPECT_EQ(d.frame.at(0, 0, 0), static_cast<float>(exact))
          << to_string(spec) << " scale " << scale;
    }
  }
}

// The product of two FP32 scales is subnormal, what it multiplies makes it normal again.
TEST(Gemm, SmallFp32ScalesLoseNoBits) {
  for (const float scale : {0x1.3p-58f, 0x1.7p-61f, 0x1.9p-68f, 0x1.5p-75f}) {
    Operand a(kFp8_1x128, {}, -1, 2, 128), b(kFp8_1x128, {}, -1, 3, 128);
    for (Operand* operand : {&a, &b}) {
      operand->fill([](int64_t, int64_t, int64_t) { return 448.0f; });
      auto* scales = reinterpret_cast<float*>(operand->q.scales.data());
      std::fill_n(scales, operand->q.scales.size() / 4, scale);
    }
    Result d(DType::f32, 2, 3, Strides::row_major);
    gemm(a.view(), b.view(), d.view);
    expect_within_bound(a, b, d, {});
  }
}

// Outer scales leave FP32's range together, though D does not.
TEST(Gemm, OuterScalesAndAlphaAreAppliedWithoutOverflow) {
  Operand a(kNvfp4, {}, -1, 3, 32), b(kNvfp4, {}, -1, 3, 32);
  const Values ones = [](int64_t, int64_t r, int64_t) { return static_cast<float>(r + 1); };
  a.fill(ones), b.fill(ones);
  a.q.view.outer[0] = 0x1p-120f, b.q.view.outer[0] = 0x1p-110f;
  Result d(DType::f32, 3, 3, Strides::row_major);
  gemm(a.view(), b.view(), d.view, {.alpha = 0x1p127f});
  expect_within_bound(a, b, d, {.alpha = 0x1p127f});
  EXPECT_GT(d.frame.at(0, 0, 0), 0);
}

}  // namespace
}  // namespace blockscale::testing
