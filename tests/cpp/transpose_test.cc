// The operand along the other axis, against the quantizer that makes it from x.
#include "runner.h"
#include "throws.h"

namespace blockscale::testing {
namespace {

constexpr const char* kSquares[] = {
    "fp8_128x128",        "fp8_128x128[element=e5m2]", "mxfp8[block=32x32]", "mxfp6[block=32x32]",
    "mxfp4[block=32x32]", "nvfp4[block=16x16]",        "amdfp4[block=16x16]"};

class TransposeTest : public BackendTest {
 protected:
  // Of quantize along `axis`, in these layouts, to the other one.
  void check(const QuantSpec& spec, const Input& x, int axis, const StorageLayout& from_layout,
             const StorageLayout& to_layout, uint64_t variant) {
    const ConstMatrix& v = x.view();
    Output from(spec, from_layout, axis, v.rows, v.columns, v.batch);
    Output got(spec, to_layout, -3 - axis, v.rows, v.columns, v.batch);
    Output want(spec, to_layout, -3 - axis, v.rows, v.columns, v.batch);
    reference::quantize(x.view(), from.view, {});
    reference::quantize(x.view(), want.view, {});
    runner->transpose(from, got, variant);
    ASSERT_TRUE(same_operand(got, want));
  }
};

TEST_P(TransposeTest, IsTheOperandAlongTheOtherAxis) {
  for (const char* name : kSquares) {
    const QuantSpec spec = parse_spec(name);
    Random random(seed());
    for (int i = 0; i < 40; ++i) {
      const int64_t rows = random_extent(random), columns = random_extent(random);
      const auto batch = static_cast<int64_t>(random.below(4));
      const int axis = random.one_in(2) ? -1 : -2;
      std::vector<StorageLayout> layouts;
      for (const StorageLayout& layout : layouts_for(spec))
        if (layout.codes == Layout::linear) layouts.push_back(layout);
      const StorageLayout from = random.pick(layouts), to = random.pick(layouts);
      SCOPED_TRACE(std::string(name) + " " + std::to_string(batch) + " x " + std::to_string(rows) +
                   " x " + std::to_string(columns) + " axis " + std::to_string(axis) + " " +
                   to_string(from) + " to " + to_string(to));
      const Input x(random_dtype(random), batch, rows, columns, Strides::row_major,
                    random_values(random));
      check(spec, x, axis, from, to, seed() + static_cast<uint64_t>(i));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(TransposeTest, LargerThanATile) {
  for (const char* name : kSquares) {
    SCOPED_TRACE(name);
    Random random(seed());
    const Input x(DType::bf16, 1, 523, 1000, Strides::row_major, random_values(random));
    check(parse_spec(name), x, -1, {}, {}, seed());
  }
}
BLOCKSCALE_BACKEND_TESTS(TransposeTest, all_runs());

TEST(Transpose, RefusesWhatHasOneAxis) {
  const auto operand = [](const char* name, int axis, StorageLayout layout = {}) {
    return Output(parse_spec(name), layout, axis, 64, 96);
  };
  Output row = operand("nvfp4", -1), column = operand("nvfp4", -2);
  EXPECT_ERROR(transpose(as_const(row.view), column.view), "transpose: from = ", "square blocks");
  Output square = operand("nvfp4[block=16x16]", -1), same = operand("nvfp4[block=16x16]", -1);
  EXPECT_ERROR(transpose(as_const(square.view), same.view), "transpose: to = ", "its other axis");
  Output tiled = operand("nvfp4[block=16x16]", -2, {Layout::mfma_16x16, Layout::linear});
  EXPECT_ERROR(transpose(as_const(square.view), tiled.view),
               "transpose: layout = ", "linear codes");
}

}  // namespace
}  // namespace blockscale::testing
