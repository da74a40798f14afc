// The size of quantization errors, bounded from both sides: too small is as wrong as too large.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "cases.h"
#include "model_rules.h"

namespace blockscale::testing {
namespace {

constexpr int64_t kRows = 256, kColumns = 1024;

// Independent Gaussians (Box-Muller).
std::vector<float> gaussians(uint64_t seed, size_t count) {
  Random random(seed);
  std::vector<float> values;
  while (values.size() < count) {
    const double radius = std::sqrt(-2 * std::log(1 - random.uniform()));
    values.push_back(static_cast<float>(radius * std::cos(6.283185307179586 * random.uniform())));
  }
  return values;
}

struct Quantization {
  Quantization(const QuantSpec& spec, const std::vector<float>& x, int64_t rows, int64_t columns,
               Rng rng = {})
      : out(spec, {}, -1, rows, columns), decoded(x.size()) {
    QuantizeOptions options;
    options.rng = rng;
    quantize({x.data(), DType::f32, rows, columns, columns, 1, 1, 0}, out.view, options);
    dequantize(as_const(out.view), {decoded.data(), DType::f32, rows, columns, columns, 1, 1, 0});
  }
  // The scale an element is decoded with.
  double scale(int64_t row, int64_t column) const {
    const uint32_t stored = out.scale(0, row, column / out.view.spec.block);
    const double block = out.view.spec.scale == Format::fp32 ? float_of(stored)
                                                             : decode(out.view.spec.scale, stored);
    return block * out.outer_scale(0);
  }
  Output out;
  std::vector<float> decoded;
};

// With y between the neighbours a and b of the grid under the stored scales, rounding to nearest
// has the square min(y-a, b-y)^2 and stochastic rounding the expectation (y-a)(b-y). FP32 rounding
// of the products moves the former by about 2^-20; 2^18 draws leave the latter a spread of about
// .3%, and the 1/256 resolution of the probability less. Twice and half are far outside.
TEST(QuantizationError, IsWhatTheGridAndTheScalesPredict) {
  const std::vector<float> x = gaussians(11, kRows * kColumns);
  size_t number = 0;
  for (const QuantSpec& spec : valid_specs()) {
    if (spec.hadamard.dim) continue;                    // dequantize gives the transformed operand
    if (kSweepStep > 1 && number++ % 5 != 0) continue;  // under sanitizers, a sample
    const Quantization q(spec, x, kRows, kColumns, {5, 6});
    const std::vector<double>& grid = model_magnitudes(spec.element);
    double predicted = 0, measured = 0;
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < kColumns; ++c) {
        const double value = x[r * kColumns + c], scale = q.scale(r, c);
        const double y = std::fabs(value) / scale, error = q.decoded[r * kColumns + c] - value;
        if (y >= grid.back()) continue;  // saturated
        const int low = model_floor(spec.element, y);
        const double below = (y - grid[low]) * scale, above = (grid[low + 1] - y) * scale;
        const double nearest = std::min(below, above);
        predicted += spec.stochastic() ? below * above : nearest * nearest;
        measured += error * error;
      }
    }
    EXPECT_NEAR(measured / predicted, 1, spec.stochastic() ? 0.02 : 1e-4) << to_string(spec);
  }
}

struct Moments {
  double gain, relative_error;  // E[x^ x] / E[x^2], E[(x^ - x)^2] / E[x^2]
};
Moments moments(const std::vector<float>& x, const std::vector<float>& y) {
  double square = 0, product = 0, error = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    square += static_cast<double>(x[i]) * x[i];
    product += static_cast<double>(x[i]) * y[i];
    error += std::pow(static_cast<double>(y[i]) - x[i], 2);
  }
  return {product / square, error / square};
}

// Section 6's figures for Gaussian data. The sampling error of the gain is sqrt(.0222 / 2^18) =
// .0003; that of the relative error about .3%.
TEST(QuantizationError, OfStochasticNvfp4IsTheSpecificationsFigure) {
  const std::vector<float> x = gaussians(12, kRows * kColumns);
  const Quantization up(parse_spec("nvfp4[rounding=stochastic]"), x, kRows, kColumns, {7, 8});
  EXPECT_NEAR(moments(x, up.decoded).gain, 1, 0.0012);
  EXPECT_NEAR(moments(x, up.decoded).relative_error, 0.0222, 0.0003);
  const Quantization nearest(parse_spec("nvfp4[rounding=stochastic,scale_rounding=nearest]"), x,
                             kRows, kColumns, {7, 8});
  EXPECT_NEAR(moments(x, nearest.decoded).relative_error, 0.0189, 0.0003);
  EXPECT_LT(moments(x, nearest.decoded).gain, 0.998) << "rounding scales to nearest saturates";
}

// Every element of a few blocks, drawn 4096 times: its mean is the element within five standard
// errors and the resolution of the probability, half of 1/256 of an interval.
TEST(StochasticRoundingMean, IsTheElement) {
  constexpr int kDraws = kSweepStep > 1 ? 512 : 4096;
  const std::vector<float> x = gaussians(13, 4 * 128);
  for (const char* text :
       {"nvfp4[rounding=stochastic]", "amdfp4[rounding=stochastic]",
        "nvfp4[rounding=stochastic,block=16x16]", "mxfp8[rounding=stochastic]",
        "mxfp4[rounding=stochastic,scale_rule=ceil]", "mxfp6[element=e3m2,rounding=stochastic]",
        "fp8_1x128[element=e5m2,rounding=stochastic]"}) {
    const QuantSpec spec = parse_spec(text);
    const std::vector<double>& grid = model_magnitudes(spec.element);
    std::vector<double> sum(x.size());
    for (int draw = 0; draw < kDraws; ++draw) {
      const Quantization q(spec, x, 4, 128, {21, static_cast<uint64_t>(draw)});
      for (size_t i = 0; i < x.size(); ++i) sum[i] += q.decoded[i];
    }
    const Quantization once(spec, x, 4, 128, {21, 0});
    for (size_t i = 0; i < x.size(); ++i) {
      const double scale = once.scale(static_cast<int64_t>(i) / 128, static_cast<int64_t>(i) % 128);
      const double y = std::min(std::fabs(x[i]) / scale, grid.back() * (1 - 1e-9));
      const int low = model_floor(spec.element, y);
      const double width = (grid[low + 1] - grid[low]) * scale;
      const double p = (y - grid[low]) / (grid[low + 1] - grid[low]);
      const double standard_error = width * std::sqrt(p * (1 - p) / kDraws);
      EXPECT_NEAR(sum[i] / kDraws, x[i],
                  5 * standard_error + width / 500 + std::fabs(x[i]) * 0x1p-19)
          << text << " element " << i;
    }
  }
}

TEST(StochasticRoundingMean, DifferentOffsetsAndSeedsDrawDifferentBits) {
  const std::vector<float> x = gaussians(14, 64 * 64);
  const QuantSpec spec = parse_spec("nvfp4[rounding=stochastic]");
  const Quantization base(spec, x, 64, 64, {1, 1}), offset(spec, x, 64, 64, {1, 2}),
      seed(spec, x, 64, 64, {2, 1}), again(spec, x, 64, 64, {1, 1});
  EXPECT_TRUE(base.out.codes == again.out.codes);
  for (const Quantization* other : {&offset, &seed}) {
    EXPECT_TRUE(base.out.scales == other->out.scales) << "scales draw nothing";
    int differ = 0;
    for (size_t i = 0; i < x.size(); ++i) differ += base.decoded[i] != other->decoded[i];
    EXPECT_GT(differ, 64 * 64 / 5);
    EXPECT_LT(differ, 64 * 64 / 2);
  }
}

}  // namespace
}  // namespace blockscale::testing
