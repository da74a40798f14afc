// The scalar oracle against a second writing of the specification in double precision.
#include <gtest/gtest.h>

#include <cstdio>

#include "cases.h"
#include "model_quantize.h"

namespace blockscale::testing {
namespace {

std::vector<std::vector<float>> lines_of(const Input& x, int64_t b, int axis) {
  const ConstMatrix& m = x.view();
  const int64_t lines = axis == -1 ? m.rows : m.columns, extent = axis == -1 ? m.columns : m.rows;
  std::vector<std::vector<float>> all(static_cast<size_t>(lines));
  for (int64_t line = 0; line < lines; ++line)
    for (int64_t i = 0; i < extent; ++i)
      all[line].push_back(axis == -1 ? x.at(b, line, i) : x.at(b, i, line));
  return all;
}

void expect_is_the_model(const Input& x, const Output& out, const QuantizeOptions& options) {
  const QuantSpec& spec = out.view.spec;
  const int axis = out.view.axis;
  const int64_t contraction = axis == -1 ? x.view().columns : x.view().rows;
  for (int64_t b = 0; b < x.view().batch; ++b) {
    ModelOptions model;
    if (options.amax) model.amax = options.amax[b];
    model.rng = options.rng.value_or(Rng{});
    model.origin_line =
        (axis == -1 ? options.origin_row : options.origin_column) + b * out.shape.lines;
    model.origin_position = axis == -1 ? options.origin_column : options.origin_row;
    const ModelOperand want = model_quantize(lines_of(x, b, axis), contraction, spec, axis, model);
    if (std::isnan(want.outer))
      ASSERT_TRUE(std::isnan(out.outer_scale(b)));
    else
      ASSERT_EQ(bits_of(out.outer_scale(b)), bits_of(want.outer));
    for (int64_t line = 0; line < out.shape.lines; ++line) {
      ASSERT_EQ(static_cast<int64_t>(want.scales[line].size()), out.shape.blocks);
      for (int64_t block = 0; block < out.shape.blocks; ++block)
        ASSERT_EQ(out.scale(b, line, block), want.scales[line][block])
            << "scale of line " << line << " block " << block;
      for (int64_t i = 0; i < out.shape.padded; ++i)
        ASSERT_EQ(out.code(b, line, i), want.codes[line][i]) << "line " << line << " at " << i;
    }
  }
}

class ReferenceTest : public ::testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override { std::printf("seed %llu\n", static_cast<unsigned long long>(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Seeds, ReferenceTest, ::testing::ValuesIn(test_seeds()));

TEST_P(ReferenceTest, QuantizeIsTheSpecificationWrittenTwice) {
  // Every seed takes its share of the specs.
  constexpr size_t kStep = kSweepStep > 1 ? 21 : 3;
  for (size_t i = GetParam() % 3; i < valid_specs().size(); i += kStep) {
    Random random(GetParam() * 1000003 + i);
    const QuantSpec& spec = valid_specs()[i];
    const StorageLayout layout = random.pick(layouts_for(spec));
    const int axis = random.one_in(2) ? -1 : -2;
    const int64_t batch = 1 + static_cast<int64_t>(random.below(2));
    const int64_t rows = random.one_in(3) ? random_extent(random) : random.below(40);
    const int64_t columns = rows > 40 ? random.below(40) : random_extent(random);
    const Input x(random_dtype(random), batch, rows, columns, random.pick(kStrides),
                  random_values(random));
    const RandomOptions options(random, spec, axis, batch);
    Output out(spec, layout, axis, rows, columns, batch);
    reference::quantize(x.view(), out.view, options.options);
    SCOPED_TRACE(to_string(spec) + " as " + to_string(layout) + " axis " + std::to_string(axis) +
                 " [" + std::to_string(rows) + ", " + std::to_string(columns) + "], seed " +
                 std::to_string(GetParam()));
    expect_is_the_model(x, out, options.options);
    if (HasFatalFailure()) return;
    ASSERT_TRUE(out.codes.guards_whole() && out.scales.guards_whole() && out.outer.guards_whole());
    ASSERT_TRUE(x.untouched());
  }
}

// Section 5, block by block: what a NaN or an Inf does to its block, and to nothing else.
TEST(NonFinite, ABlockGetsANanScaleAndZeroCodesAndItsNeighboursDoNot) {
  for (const QuantSpec& spec : valid_specs()) {
    if (spec.outer || spec.hadamard.dim) continue;
    for (float bad : {NAN, HUGE_VALF, -HUGE_VALF}) {
      const int64_t rows = spec.block + 3, columns = 3 * spec.block + 1, at = spec.block + 5;
      const Input x(DType::f32, 1, rows, columns, Strides::row_major,
                    [&](int64_t, int64_t r, int64_t c) { return r == 2 && c == at ? bad : -3.0f; });
      Output out(spec, {}, -1, rows, columns);
      QuantizeOptions options;
      options.rng = Rng{};
      quantize(x.view(), out.view, options);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
          const bool hit = c / spec.block == 1 && (spec.square ? r < spec.block : r == 2);
          const uint32_t scale = out.scale(0, r, c / spec.block);
          const float value =
              spec.scale == Format::fp32 ? float_of(scale) : decode(spec.scale, scale);
          ASSERT_EQ(std::isnan(value), hit) << to_string(spec) << " " << r << " " << c;
          ASSERT_EQ(out.code(0, r, c) == 0, hit) << to_string(spec) << " " << r << " " << c;
        }
      }
    }
  }
}

TEST(NonFinite, ATensorScaledByANonFiniteAmaxIsNanAllOver) {
  const Values ones = [](int64_t, int64_t, int64_t) { return 1.0f; };
  for (const QuantSpec& spec : valid_specs()) {
    if (!spec.outer) continue;
    const Values one_bad = [&](int64_t, int64_t r, int64_t c) {
      return r == 39 && c == 16 ? HUGE_VALF : 1.0f;
    };
    for (float bad : {NAN, HUGE_VALF, 0.0f}) {  // 0: computed, from a tensor with an Inf
      const Input x(DType::f32, 1, 40, 17, Strides::row_major, bad == 0 ? one_bad : ones);
      QuantizeOptions options;
      options.rng = Rng{};
      if (bad != 0) options.amax = &bad;
      Output out(spec, {}, -1, 40, 17), oracle(spec, {}, -1, 40, 17);
      quantize(x.view(), out.view, options);
      reference::quantize(x.view(), oracle.view, options);
      for (const Output* o : {&out, &oracle}) {
        EXPECT_EQ(bits_of(o->outer_scale(0)), 0x7FC00000u) << to_string(spec);
        for (int64_t i = 0; i < o->scales.size(); ++i)
          ASSERT_EQ(o->scales.data()[i], spec.scale == Format::ue5m3 ? 0xFF : 0x7F);
        for (int64_t i = 0; i < o->codes.size(); ++i) ASSERT_EQ(o->codes.data()[i], 0);
      }
    }
  }
}

TEST_P(ReferenceTest, AmaxIsTheLargestMagnitudeAfterTheTransform) {
  for (int i = 0; i < 300; ++i) {
    Random random(GetParam() * 1000003 + i);
    const QuantSpec& spec = random.pick(valid_specs());
    const int axis = random.one_in(2) ? -1 : -2;
    const Input x(random_dtype(random), 2, random_extent(random), random.below(50),
                  random.pick(kStrides), random_values(random));
    float got[2];
    reference::amax(x.view(), spec, axis, got);
    for (int b = 0; b < 2; ++b) {
      float want = 0;
      bool nan = false;
      for (std::vector<float>& line : lines_of(x, b, axis)) {
        while (spec.hadamard.dim && line.size() % spec.hadamard.dim) line.push_back(0);
        model_transform(spec.hadamard, line);
        for (float v : line) nan = nan || std::isnan(v), want = std::fmax(want, std::fabs(v));
      }
      if (nan)
        EXPECT_TRUE(std::isnan(got[b])) << to_string(spec);
      else
        EXPECT_EQ(got[b], want) << to_string(spec);
    }
  }
}

// x^ = fl(fl(outer * scale) * code), rounded to the output's dtype.
TEST_P(ReferenceTest, DequantizeIsTwoRoundedProducts) {
  for (int i = 0; i < 300; ++i) {
    Random random(GetParam() * 1000003 + i);
    const QuantSpec& spec = random.pick(valid_specs());
    const int axis = random.one_in(2) ? -1 : -2;
    const int64_t rows = random_extent(random), columns = random.below(60);
    const Input x(DType::f32, 1, rows, columns, Strides::row_major, random_values(random));
    const RandomOptions options(random, spec, axis, 1);
    Output out(spec, random.pick(layouts_for(spec)), axis, rows, columns);
    reference::quantize(x.view(), out.view, options.options);
    std::vector<float> decoded(static_cast<size_t>(rows * columns));
    reference::dequantize(as_const(out.view),
                          {decoded.data(), DType::f32, rows, columns, columns, 1, 1, 0});
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t line = axis == -1 ? r : c, at = axis == -1 ? c : r;
        const uint32_t stored = out.scale(0, line, at / spec.block);
        const double scale =
            spec.scale == Format::fp32 ? float_of(stored)
            : spec.scale == Format::e8m0
                ? (stored == 255 ? NAN : std::ldexp(1.0, static_cast<int>(stored) - 127))
                : model_value(facts(spec.scale), static_cast<int>(stored));
        const double code = model_value(facts(spec.element), out.code(0, line, at));
        const double first = fl(out.outer_scale(0) * scale);
        const double product = first * code;
        const float got = decoded[r * columns + c];
        if (std::isnan(product))
          ASSERT_TRUE(std::isnan(got)) << to_string(spec);
        else
          ASSERT_EQ(bits_of(got), bits_of(fl(product))) << to_string(spec) << " " << r << " " << c;
      }
    }
  }
}

}  // namespace
}  // namespace blockscale::testing
