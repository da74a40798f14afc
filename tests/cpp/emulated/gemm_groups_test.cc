// What surrounds a GEMM over groups on a GPU, on the host: the ends of groups, what is made of BF16
// sums, and what no group writes.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "../device.h"
#include "../testing.h"
#include "gpu/gpu.h"

namespace blockscale::testing {
namespace {

// Ends in the integers of the caller, and as the kernel leaves them.
struct Made {
  Made(const std::vector<int64_t>& ends, int64_t rows, int64_t unit, bool int64_offsets)
      : offsets64(ends), offsets32(ends.begin(), ends.end()), made(ends.size(), -7) {
    groups.offsets = int64_offsets ? static_cast<const void*>(offsets64.data())
                                   : static_cast<const void*>(offsets32.data());
    groups.int64_offsets = int64_offsets;
    groups.count = static_cast<int64_t>(ends.size());
    gpu::group_ends(groups, rows, unit, made.data(), &wrong, TestStream());
  }
  gpu::GroupEnds view(bool contraction) const {
    return {made.data(), &wrong, groups.count, contraction};
  }

  std::vector<int64_t> offsets64;
  std::vector<int32_t> offsets32;
  Groups groups;
  std::vector<int32_t> made;
  int32_t wrong = -7;
};

std::vector<int64_t> random_ends(Random& random, size_t count, int64_t rows) {
  std::vector<int64_t> ends(count);
  for (int64_t& end : ends)
    end = static_cast<int64_t>(random.below(static_cast<uint64_t>(rows) + 1));
  std::sort(ends.begin(), ends.end());
  return ends;
}

TEST(GemmGroups, EndsInStorageOfWholeUnits) {
  Random random(1);
  for (const size_t count : {1, 3, 255, 256, 257, 1000}) {
    for (const int64_t unit : {1, 16, 128}) {
      const std::vector<int64_t> ends = random_ends(random, count, 5000);
      const Made m(ends, 5000, unit, count % 2 == 0);
      EXPECT_EQ(m.wrong, 0);
      int64_t before = 0, sum = 0;
      for (size_t g = 0; g < count; before = ends[g++]) {
        sum += round_up(ends[g] - before, unit);
        ASSERT_EQ(m.made[g], sum) << g;
      }
    }
  }
}

TEST(GemmGroups, WrongOffsetsEndNowhere) {
  for (const auto& ends : {std::vector<int64_t>{5, 4, 9}, {5, 6, 11}, {-1, 6, 9}}) {
    const Made m(ends, 10, 16, true);
    EXPECT_EQ(m.wrong, 1);
    EXPECT_EQ(m.made, std::vector<int32_t>(3, 0));
  }
}

// D from sums in FP32 or BF16 with room behind their rows, by the formula.
TEST(GemmGroups, EveryGroupHasItsOuterScalesAndItsBias) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Random random(seed);
    const bool along = random.one_in(2), half = !random.one_in(3);
    const auto count = static_cast<int64_t>(1 + random.below(9));
    const auto rows = static_cast<int64_t>(1 + random.below(60));
    const int64_t matrices = along ? count : 1, height = rows * matrices;
    const auto columns = static_cast<int64_t>(1 + random.below(random.one_in(2) ? 40 : 1200));
    const int64_t stride = random.one_in(2) ? columns : round_up(columns, 8);
    const std::vector<int64_t> ends = random_ends(random, static_cast<size_t>(count), rows);
    const Made m(ends, rows, 1, random.one_in(2));

    std::vector<float> sums(static_cast<size_t>(height * stride)), a(ends.size()), b(ends.size()),
        bias(ends.size() * static_cast<size_t>(columns)), before(sums.size());
    for (auto* all : {&sums, &a, &b, &bias, &before})
      for (float& v : *all) v = from_bf16(to_bf16(static_cast<float>(random.normal())));
    std::vector<uint16_t> halves;
    for (const float v : sums) halves.push_back(to_bf16(v));
    gpu::Epilogue e;
    e.alpha = 1.5f;
    if (random.one_in(2)) e.a_outer = a.data();
    if (random.one_in(2)) e.b_outer = b.data();
    if (random.one_in(2)) e.bias = bias.data();
    e.accumulate = random.one_in(2);
    e.groups = m.view(along);
    std::vector<float> d(before.begin(), before.begin() + height * columns);
    const Matrix out{d.data(), DType::f32, rows, columns, columns, 1, matrices, rows * columns};
    gpu::finish({half ? static_cast<const void*>(halves.data()) : sums.data(),
                 half ? DType::bf16 : DType::f32, rows, columns, stride},
                out, e, TestStream());
    for (int64_t r = 0; r < height; ++r) {
      size_t g = 0;
      while (!along && g < ends.size() && ends[g] <= r) ++g;
      if (along) g = static_cast<size_t>(r / rows);
      const bool outside = g == ends.size();
      const bool empty = along && ends[g] == (g ? ends[g - 1] : 0);
      for (int64_t c = 0; c < columns; ++c) {
        const auto at = static_cast<size_t>(r * columns + c);
        const float old = e.accumulate ? before[at] : 0.0f;
        float want = old;
        if (!outside) {
          const double factor = 1.5 * (e.a_outer ? a[g] : 1.0f) * (e.b_outer ? b[g] : 1.0f);
          double value = empty ? 0 : factor * sums[static_cast<size_t>(r * stride + c)];
          if (e.bias) value += bias[g * static_cast<size_t>(columns) + static_cast<size_t>(c)];
          want = static_cast<float>(value + old);
        }
        ASSERT_EQ(d[at], want) << "seed " << seed << ", row " << r << ", column " << c;
      }
    }
    const Made bad({rows + 1}, rows, 1, false);
    e.groups = bad.view(false);
    gpu::finish({sums.data(), DType::f32, rows, columns, stride},
                {d.data(), DType::f32, rows, columns, columns}, e, TestStream());
    for (int64_t i = 0; i < rows * columns; ++i) ASSERT_TRUE(std::isnan(d[static_cast<size_t>(i)]));
  }
}

TEST(GemmGroups, RowsOfNoGroupAreSettled) {
  for (const bool clear : {false, true}) {
    for (const std::vector<int64_t>& ends :
         {std::vector<int64_t>{2, 2, 5}, {0, 0, 0}, {3, 9, 9}, {5, 4, 9}, {5, 6, 10}}) {
      const bool wrong = ends[1] < ends[0] || ends[2] > 9;
      const Made m(ends, 9, 1, true);
      std::vector<float> d(9 * 7, 3.0f);
      gpu::settle({d.data(), DType::f32, 9, 5, 7}, m.groups, 9, false, clear, TestStream());
      for (int64_t i = 0; i < 9 * 7; ++i) {
        const float got = d[static_cast<size_t>(i)];
        const bool inside = i % 7 < 5, last = i / 7 >= ends[2];
        if (inside && wrong)
          ASSERT_TRUE(std::isnan(got)) << i;
        else
          ASSERT_EQ(got, inside && last && clear ? 0.0f : 3.0f) << i;
      }
      std::vector<uint16_t> halves(3 * 2 * 4, 1);
      gpu::settle({halves.data(), DType::bf16, 2, 4, 4, 1, 3, 8}, m.groups, 9, true, clear,
                  TestStream());
      for (size_t i = 0; i < halves.size(); ++i) {
        const size_t g = i / 8;
        const bool empty = ends[g] == (g ? ends[g - 1] : 0);
        if (wrong)
          ASSERT_TRUE(std::isnan(from_bf16(halves[i])));
        else
          ASSERT_EQ(halves[i], empty && clear ? 0 : 1);
      }
    }
  }
}

}  // namespace
}  // namespace blockscale::testing
