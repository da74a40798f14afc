// What one launch does for two operands, on the host, against the definitions.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../buffers.h"
#include "../cases.h"
#include "gpu/gpu.h"
#include "gpu/port/host.h"
#include "host_stream.h"

namespace blockscale::testing {
namespace {

Strides random_strides(Random& random) {
  constexpr Strides kOthers[] = {Strides::padded_rows, Strides::negative_rows};
  return random.one_in(4) ? random.pick(kOthers) : Strides::aligned_rows;
}

// An input and its operands, made and as they ought to be. Without a column spec along rows alone.
struct Made {
  Made(Random& random, DType dtype, const std::string& row_spec, const std::string& column_spec,
       int64_t rows, int64_t columns)
      : x(dtype, 1, rows, columns, random_strides(random), random_values(random)),
        row(parse_spec(row_spec), {}, -1, rows, columns),
        want_row(parse_spec(row_spec), {}, -1, rows, columns) {
    reference::quantize(x.view(), want_row.view, {});
    if (column_spec.empty()) return;
    column.emplace(parse_spec(column_spec), StorageLayout{}, -2, rows, columns);
    want_column.emplace(parse_spec(column_spec), StorageLayout{}, -2, rows, columns);
    reference::quantize(x.view(), want_column->view, {});
  }
  Quantization asked() { return {x.view(), &row.view, column ? &column->view : nullptr, {}, {}}; }
  void check() const {
    EXPECT_TRUE(same_operand(row, want_row)) << "rows";
    if (column) {
      EXPECT_TRUE(same_operand(*column, *want_column)) << "columns";
    }
  }

  Input x;
  Output row, want_row;
  std::optional<Output> column, want_column;
};

TEST(Pairs, AmaxesOfTwoInputs) {
  Random random(1);
  const std::string plain = "nvfp4", square = "nvfp4[block=16x16]", turned = "nvfp4[hadamard=16]";
  const std::pair<std::string, std::string> kinds[] = {
      {plain, ""},      {plain, turned},    {square, square},
      {turned, turned}, {"mxfp8", "mxfp8"}, {plain, "nvfp4[hadamard=64]"},
      {"mxfp4", turned}};
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const auto& [row, column] : kinds) {
      for (const auto& [other_row, other_column] : kinds) {
        SCOPED_TRACE(row + " " + column + ", " + other_row + " " + other_column);
        Made a(random, dtype, row, column, random_extent(random), random_extent(random));
        Made b(random, dtype, other_row, other_column, random_extent(random),
               random_extent(random));
        quantize_two(a.asked(), b.asked(), HostStream());
        a.check();
        b.check();
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

// As named recipes quantize them; and with what has no kernel for both.
TEST(Pairs, QuantizedInOneLaunch) {
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
        const int64_t from = static_cast<int64_t>(random.next());
        int64_t to = 0;
        quantize_two(x.asked(), w.asked(), HostStream(), {&to, &from});
        x.check();
        w.check();
        EXPECT_EQ(to, from);
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

TEST(Pairs, DecodedTwoOperands) {
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
      const auto view = [&](std::vector<uint16_t>& to, int which) {
        return Matrix{to.data() + (which ? rows[0] * stride : 0),
                      DType::bf16,
                      rows[which],
                      columns,
                      stride,
                      1,
                      1,
                      0};
      };
      const ConstQuantized qa = as_const(a.want_row.view), qb = as_const(b.want_row.view);
      reference::dequantize(qa, view(want, 0));
      reference::dequantize(qb, view(want, 1));
      gpu::dequantize_two(qa, view(got, 0), qb, view(got, 1), HostStream());
      ASSERT_EQ(got, want) << rows[0] << " and " << rows[1] << " rows of " << columns;
    }
  }
}

}  // namespace
}  // namespace blockscale::testing
