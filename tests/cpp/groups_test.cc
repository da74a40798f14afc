// Where groups lie in the buffers of the whole: sizes, places, ends, and rows of no group.
#include "blockscale/groups.h"

#include <gtest/gtest.h>

#include "cases.h"

namespace blockscale::testing {
namespace {

TEST(Grouped, BuffersAreLargeEnoughForAnyGroupsAndNoLarger) {
  const QuantSpec wide = parse_spec("nvfp4[hadamard=64]");
  for (const QuantSpec& spec : {kFp8_1x128, kFp8_128x128, kMxfp8, kNvfp4, wide}) {
    for (const StorageLayout& layout : layouts_for(spec)) {
      for (int axis : {-1, -2}) {
        for (int64_t rows : {1, 5, 300, 1024}) {
          for (int64_t count : {1, 3, 8}) {
            const StoredShape s = grouped_shape(spec, layout, axis, rows, 200, count);
            int64_t most_codes = 0, most_scales = 0, most_positions = 0;
            // The worst: one row more than whole tiles in every group.
            for (int64_t step : {1, 17, 33, 129, 257}) {
              GroupStart end;
              for (int64_t g = 0; g < count; ++g) {
                const int64_t left = rows - end.row;
                end = next_group(end, spec, layout, axis,
                                 g + 1 < count ? std::min(step, left) : left);
              }
              most_codes = std::max(most_codes, end.codes);
              most_scales = std::max(most_scales, end.scales);
              most_positions = std::max(most_positions, end.position);
            }
            const int64_t codes = axis == -1 ? s.code_rows : s.code_columns;
            const int64_t scales = axis == -1 ? s.scale_rows : s.scale_columns;
            ASSERT_LE(most_codes, codes);
            ASSERT_LE(most_scales, scales);
            if (rows == 1024 && count > 1) {
              const GroupUnits u = group_units(spec, layout, axis);
              // Lines through all groups are whole tiles.
              const auto room = [&](Layout l, int64_t most, int64_t per) {
                const bool lines = axis == -2 && traits(l).column_multiple == 1;
                return lines ? round_up(most * per, kGroupLine) / per : most;
              };
              SCOPED_TRACE(to_string(spec) + " " + to_string(layout) + std::to_string(axis));
              EXPECT_EQ(room(layout.codes, most_codes, u.per_code), codes);
              EXPECT_EQ(room(layout.scales, most_scales, u.per_scale), scales);
              if (axis == -2) {
                EXPECT_EQ(room(Layout::linear, most_positions, 1), s.padded);
                EXPECT_EQ(s.extent, s.padded);
                EXPECT_EQ(s.blocks, s.padded / spec.block);
                EXPECT_EQ(s.line_bytes, s.padded / codes_per_byte(spec.element));
              }
            }
          }
        }
      }
    }
  }
}

// What a GEMM over groups counts on, in numbers.
TEST(Grouped, Places) {
  const StorageLayout linear{}, nv{Layout::linear, Layout::nv_128x4};
  // Groups of 5, 0, 130 and 7 rows of x [142, 256].
  const auto starts = [](const QuantSpec& spec, const StorageLayout& layout, int axis) {
    std::vector<std::pair<int64_t, int64_t>> list;
    GroupStart at;
    for (int64_t rows : {5, 0, 130, 7}) {
      list.emplace_back(at.codes, at.scales);
      at = next_group(at, spec, layout, axis, rows);
    }
    return list;
  };
  using List = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(starts(kFp8_1x128, linear, -1), (List{{0, 0}, {5, 5}, {5, 5}, {135, 135}}));
  EXPECT_EQ(starts(kFp8_1x128, linear, -2), (List{{0, 0}, {128, 1}, {128, 1}, {384, 3}}));
  EXPECT_EQ(starts(kFp8_128x128, linear, -1), (List{{0, 0}, {5, 1}, {5, 1}, {135, 3}}));
  EXPECT_EQ(starts(kNvfp4, nv, -1), (List{{0, 0}, {5, 128}, {5, 128}, {135, 384}}));
  EXPECT_EQ(starts(kNvfp4, nv, -2), (List{{0, 0}, {8, 4}, {8, 4}, {80, 16}}));
}

// As kernels find them, which see them first.
TEST(Grouped, EndsThatMakeNoSense) {
  const Offsets offsets({0, 5, 5, 3, 12, 13, -1}, true);
  const Groups groups = offsets.view();
  const bool wrong[] = {false, false, false, true, false, true, true};
  for (int64_t g = 0; g < 7; ++g) EXPECT_EQ(groups.is_wrong(g, 12), wrong[g]) << g;
  EXPECT_EQ(groups.begin(0), 0);
  EXPECT_EQ(groups.begin(1), 0);
  EXPECT_EQ(groups.begin(2), 5);
  const Offsets below({-1}, false);
  EXPECT_TRUE(below.view().is_wrong(0, 12));
}

TEST(Grouped, RowsOfNoGroupBecome0InAnyStrides) {
  const Offsets offsets({1}, true);
  Output q(kMxfp8, {}, -1, 3, 4, 1, offsets.view());
  const Input x(DType::f32, 1, 3, 4, Strides::row_major,
                [](int64_t, int64_t, int64_t) { return 1; });
  quantize(x.view(), q.view);
  std::vector<float> values(3 * 9, 7);
  dequantize(as_const(q.view), {values.data(), DType::f32, 3, 4, 9, 2});
  for (int64_t at = 0; at < 27; ++at) {
    const int64_t r = at / 9, c = at % 9;
    EXPECT_EQ(values[static_cast<size_t>(at)], c % 2 || c == 8 ? 7 : r == 0 ? 1 : 0) << at;
  }
}

// However many rows of no group are to become 0.
TEST(Grouped, RowsWithoutColumnsTakeNoTime) {
  const Offsets offsets({0}, true);
  ConstQuantized q;
  q.spec = kMxfp8, q.rows = int64_t{1} << 40, q.groups = offsets.view();
  const Matrix none{nullptr, DType::f32, q.rows, 0};
  dequantize(q, none);
  reference::dequantize(q, none);
}

}  // namespace
}  // namespace blockscale::testing
