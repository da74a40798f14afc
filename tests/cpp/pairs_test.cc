// What one launch does for two operands on a GPU, or emulated, against the definitions.
#include <gtest/gtest.h>

#if defined(BLOCKSCALE_CUDA) || defined(BLOCKSCALE_EMULATE)
#include <optional>
#include <string>
#include <vector>

#include "cases.h"
#include "device.h"
#include "gpu/gpu.h"

namespace blockscale::testing {
namespace {

Strides random_strides(Random& random) {
  constexpr Strides kOthers[] = {Strides::padded_rows, Strides::negative_rows,
                                 Strides::aligned_columns, Strides::aligned_columns};
  return random.one_in(2) ? random.pick(kOthers) : Strides::aligned_rows;
}

// An input and its operands, made and as they ought to be. Without a column spec along rows alone.
struct Made {
  Made(Random& random, DType dtype, const std::string& row_spec, const std::string& column_spec,
       int64_t rows, int64_t columns)
      : x(dtype, 1, rows, columns, random_strides(random), random_values(random)),
        row(parse_spec(row_spec), {}, -1, rows, columns),
        want_row(parse_spec(row_spec), {}, -1, rows, columns),
        device_x(x, x.view()),
        device_row(row) {
    reference::quantize(x.view(), want_row.view, {});
    if (column_spec.empty()) return;
    column.emplace(parse_spec(column_spec), StorageLayout{}, -2, rows, columns);
    device_column.emplace(*column);
    want_column.emplace(parse_spec(column_spec), StorageLayout{}, -2, rows, columns);
    reference::quantize(x.view(), want_column->view, {});
  }
  Quantization asked() {
    return {device_x.view, &device_row.view, column ? &device_column->view : nullptr, {}, {}};
  }
  void check() {
    device_row.read(row);
    EXPECT_TRUE(same_operand(row, want_row)) << "rows";
    if (column) {
      device_column->read(*column);
      EXPECT_TRUE(same_operand(*column, *want_column)) << "columns";
    }
  }

  Input x;
  Output row, want_row;
  std::optional<Output> column, want_column;
  DeviceInput device_x;
  DeviceOutput device_row;
  std::optional<DeviceOutput> device_column;
};

class Pairs : public DeviceTest<::testing::Test> {};

TEST_F(Pairs, AmaxesOfTwoInputs) {
  const TestStream stream;
  Random random(1);
  const std::string plain = "nvfp4", square = "nvfp4[block=16x16]", turned = "nvfp4[hadamard=16]";
  const std::pair<std::string, std::string> kinds[] = {
      {plain, ""},      {plain, turned},    {square, square},
      {turned, turned}, {"mxfp8", "mxfp8"}, {plain, "nvfp4[hadamard=64]"},
      {"mxfp4", turned}};
  for (const DType dtype : {DType::bf16, DType::f32, DType::f32_as_bf16}) {
    for (const auto& [row, column] : kinds) {
      for (const auto& [other_row, other_column] : kinds) {
        SCOPED_TRACE(row + " " + column + ", " + other_row + " " + other_column);
        Made a(random, dtype, row, column, random_extent(random), random_extent(random));
        Made b(random, dtype, other_row, other_column, random_extent(random),
               random_extent(random));
        quantize_two(a.asked(), b.asked(), stream);
        stream.wait();
        a.check();
        b.check();
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

// As named recipes quantize them; and with what has no kernel for both.
TEST_F(Pairs, QuantizedInOneLaunch) {
  const TestStream stream;
  Random random(3);
  const struct {
    std::string row, column, weight;
  } recipes[] = {{"fp8_1x128", "fp8_1x128", "fp8_128x128"},
                 {"mxfp8", "mxfp8", "mxfp8"},
                 {"mxfp4", "mxfp4[hadamard=16:0x0]", "mxfp4[block=32x32]"},
                 {"nvfp4", "nvfp4[hadamard=16]", "nvfp4[block=16x16]"},
                 {"amdfp4", "amdfp4[hadamard=16]", "amdfp4[block=16x16]"}};
  for (const auto& [row, column, weight] : recipes) {
    for (const auto& [x_column, w_column] :
         {std::pair(column, weight), {"", ""}, {column, ""}, {"", weight}}) {
      for (int i = 0; i < 4; ++i) {
        SCOPED_TRACE(row + " " + x_column + ", " + weight + " " + w_column);
        const int64_t columns = random_extent(random);
        Made x(random, DType::bf16, row, x_column, random_extent(random), columns);
        Made w(random, DType::bf16, weight, w_column, random_extent(random), columns);
        const uint64_t words[] = {0, random.next()};
        const Memory word(words, sizeof words);
        quantize_two(x.asked(), w.asked(), stream, {word.as<int64_t>(), word.as<int64_t>() + 1});
        stream.wait();
        x.check();
        w.check();
        uint64_t copied = 0;
        word.read(&copied, sizeof copied);
        EXPECT_EQ(copied, words[1]);
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

TEST_F(Pairs, DecodedTwoOperands) {
  const TestStream stream;
  Random random(2);
  const std::pair<std::string, std::string> kinds[] = {
      {"nvfp4[outer=false]", "nvfp4[outer=false,block=16x16]"},
      {"mxfp4[block=32x32]", "mxfp4"},
      {"mxfp8", "mxfp8"},
      {"mxfp8", "mxfp8[element=e5m2]"},
      {"mxfp6", "mxfp6"},
      {"nvfp4", "nvfp4"}};
  for (const auto& [left, right] : kinds) {
    for (int i = 0; i < 8; ++i) {
      SCOPED_TRACE(left + ", " + right);
      const int64_t columns = random_extent(random), stride = round_up(columns, 8) + 8;
      const int64_t rows[] = {random_extent(random), random_extent(random)};
      std::vector<uint16_t> got((rows[0] + rows[1]) * stride, 0x7B7B), want = got;
      const Made a(random, DType::bf16, left, "", rows[0], columns);
      const Made b(random, DType::bf16, right, "", rows[1], columns);
      const auto view = [&](uint16_t* to, int which) {
        to += which ? rows[0] * stride : 0;
        return Matrix{to, DType::bf16, rows[which], columns, stride, 1, 1, 0};
      };
      reference::dequantize(as_const(a.want_row.view), view(want.data(), 0));
      reference::dequantize(as_const(b.want_row.view), view(want.data(), 1));
      const DeviceOutput qa(a.want_row), qb(b.want_row);
      const Memory to(got);
      gpu::dequantize_two(as_const(qa.view), view(to.as<uint16_t>(), 0), as_const(qb.view),
                          view(to.as<uint16_t>(), 1), stream);
      stream.wait();
      to.read(got.data(), static_cast<int64_t>(got.size() * sizeof got[0]));
      ASSERT_EQ(got, want) << rows[0] << " and " << rows[1] << " rows of " << columns;
    }
  }
}

// In the launch that quantizes them, or in one of its own.
TEST_F(Pairs, QuantizedAndDecoded) {
  const TestStream stream;
  Random random(3);
  struct Kind {
    std::string row, column, other_row, other_column;
  };
  const std::string square = "nvfp4[block=16x16]", turned = "nvfp4[hadamard=16]";
  const Kind kinds[] = {
      {"mxfp8", "mxfp8", "mxfp8", "mxfp8"},    {"mxfp8", "", "mxfp8", ""},
      {"nvfp4", turned, square, square},       {"amdfp4", "", "amdfp4[block=16x16]", ""},
      {"mxfp4", "", "mxfp4[block=32x32]", ""}, {"mxfp6", "", "mxfp8", "mxfp8"},
      {"fp8_1x128", "", "fp8_128x128", ""}};
  for (const auto& [row, column, other_row, other_column] : kinds) {
    for (int i = 0; i < 8; ++i) {
      SCOPED_TRACE(row + ", " + other_row);
      const int64_t columns = random_extent(random), stride = round_up(columns, 8) + 8;
      const int64_t rows[] = {random_extent(random), random_extent(random)};
      std::vector<uint16_t> got((rows[0] + rows[1]) * stride, 0x7B7B), want = got;
      Made made[] = {Made(random, DType::bf16, row, column, rows[0], columns),
                     Made(random, DType::bf16, other_row, other_column, rows[1], columns)};
      const auto view = [&](uint16_t* to, int which) {
        to += which ? rows[0] * stride : 0;
        return Matrix{to, DType::bf16, rows[which], columns, stride, 1, 1, 0};
      };
      const Memory to(got);
      Quantization asked[] = {made[0].asked(), made[1].asked()};
      for (int j = 0; j < 2; ++j) {
        ConstQuantized q = as_const(made[j].want_row.view);
        q.spec.outer = false, q.outer = nullptr;
        reference::dequantize(q, view(want.data(), j));
        asked[j].row_values = view(to.as<uint16_t>(), j);
      }
      quantize_two(asked[0], asked[1], stream);
      stream.wait();
      to.read(got.data(), static_cast<int64_t>(got.size() * sizeof got[0]));
      ASSERT_EQ(got, want) << rows[0] << " and " << rows[1] << " rows of " << columns;
      for (Made& one : made) one.check();
    }
  }
}

}  // namespace
}  // namespace blockscale::testing
#else
TEST(Pairs, QuantizedInOneLaunch) { GTEST_SKIP() << "this build has no CUDA kernels"; }
#endif
