// Every layout over its whole padded range, its sizes, its text, and what it refuses.
#include "blockscale/layout.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "testing.h"
#include "throws.h"

namespace blockscale::testing {
namespace {

constexpr Layout kAll[] = {Layout::linear, Layout::mn_major, Layout::nv_128x4, Layout::aiter_scale,
                           Layout::mfma_16x16};
constexpr int64_t kExtents[] = {0,  1,  2,  3,  4,   5,   7,   8,   15,  16,  17,  31,
                                32, 33, 61, 64, 127, 128, 129, 255, 256, 257, 263, 384};

const char* name(Layout l) { return kLayouts[static_cast<int>(l)].name; }

// Rows and columns of the padded matrix, from the table of layouts (specification, section 12).
std::pair<int64_t, int64_t> padded(Layout l, int64_t rows, int64_t columns) {
  const auto up = [](int64_t n, int64_t m) { return n % m == 0 ? n : n + m - n % m; };
  switch (l) {
    case Layout::mn_major:
      return {up(rows, 4), columns};
    case Layout::nv_128x4:
      return {up(rows, 128), up(columns, 4)};
    case Layout::aiter_scale:
      return {up(rows, 256), up(columns, 8)};
    case Layout::mfma_16x16:
      return {up(rows, 16), up(columns, 32)};
    default:
      return {rows, columns};
  }
}

TEST(Layout, SizesAreThePaddedExtents) {
  for (Layout l : kAll) {
    for (int64_t rows : kExtents) {
      for (int64_t columns : kExtents) {
        const auto [r, c] = padded(l, rows, columns);
        ASSERT_EQ(padded_rows(l, rows), r) << name(l) << " " << rows;
        ASSERT_EQ(padded_columns(l, columns), c) << name(l) << " " << columns;
        ASSERT_EQ(layout_size(l, rows, columns), r * c) << name(l);
      }
    }
  }
}

TEST(Layout, EveryLayoutIsABijectionOverItsPaddedRange) {
  for (Layout l : kAll) {
    for (int64_t rows : kExtents) {
      for (int64_t columns : kExtents) {
        const auto [r, c] = padded(l, rows, columns);
        std::vector<bool> taken(static_cast<size_t>(r * c), false);
        for (int64_t i = 0; i < r; ++i) {
          for (int64_t j = 0; j < c; ++j) {
            const int64_t at = layout_offset(l, rows, columns, i, j);
            ASSERT_TRUE(at >= 0 && at < r * c) << name(l) << " " << i << " " << j << " -> " << at;
            ASSERT_FALSE(taken[at]) << name(l) << " " << i << " " << j << " -> " << at;
            taken[at] = true;
          }
        }
      }
    }
  }
}

// The buffer walked in order: `radix` says how the offset is cut into digits, outermost first;
// each digit adds its place value to the row or to the column. This is how the consumers' own
// shuffles (a view and a permutation) are written down, and does not share the closed forms.
struct Digit {
  int64_t count, row_step, column_step;
};
void expect_order(Layout l, int64_t rows, int64_t columns, const std::vector<Digit>& digits) {
  int64_t total = 1;
  for (const Digit& d : digits) total *= d.count;
  ASSERT_EQ(total, layout_size(l, rows, columns)) << name(l);
  for (int64_t at = 0; at < total; ++at) {
    int64_t rest = at, row = 0, column = 0;
    for (auto d = digits.rbegin(); d != digits.rend(); ++d) {
      row += rest % d->count * d->row_step;
      column += rest % d->count * d->column_step;
      rest /= d->count;
    }
    ASSERT_EQ(layout_offset(l, rows, columns, row, column), at)
        << name(l) << " row " << row << " column " << column;
  }
}

TEST(Layout, TheOrderInMemoryIsTheConsumers) {
  for (int64_t rows : {1, 100, 128, 300}) {
    for (int64_t columns : {1, 4, 33, 70}) {
      const auto tiles = [&](int64_t n, int64_t tile) { return (n + tile - 1) / tile; };
      expect_order(Layout::linear, rows, columns, {{rows, 1, 0}, {columns, 0, 1}});
      expect_order(Layout::mn_major, rows, columns, {{columns, 0, 1}, {tiles(rows, 4) * 4, 1, 0}});
      // cuBLASLt: tiles of 128x4, in each 32 rows of 16 bytes, four row groups of 32 side by side.
      expect_order(Layout::nv_128x4, rows, columns,
                   {{tiles(rows, 128), 128, 0},
                    {tiles(columns, 4), 0, 4},
                    {32, 1, 0},
                    {4, 32, 0},
                    {4, 0, 1}});
      // AITER: view(R/32, 2, 16, S/8, 2, 4).permute(0, 3, 5, 2, 4, 1).
      expect_order(Layout::aiter_scale, rows, columns,
                   {{tiles(rows, 256) * 8, 32, 0},
                    {tiles(columns, 8), 0, 8},
                    {4, 0, 1},
                    {16, 1, 0},
                    {2, 0, 4},
                    {2, 16, 0}});
      // AITER: view(R/16, 16, K/32, 2, 16).permute(0, 2, 3, 1, 4).
      expect_order(Layout::mfma_16x16, rows, columns,
                   {{tiles(rows, 16), 16, 0},
                    {tiles(columns, 32), 0, 32},
                    {2, 0, 16},
                    {16, 1, 0},
                    {16, 0, 1}});
    }
  }
}

TEST(Layout, OffsetsBeyondTwoGigabytesDoNotWrap) {
  const int64_t rows = int64_t{1} << 20, columns = int64_t{1} << 16;
  for (Layout l : kAll)
    EXPECT_EQ(layout_offset(l, rows, columns, rows - 1, columns - 1), rows * columns - 1)
        << name(l);
}

TEST(Layout, PaddingIsOneForE8M0InAitersLayoutAndZeroElsewhere) {
  for (Layout l : kAll)
    for (Format f : {Format::e8m0, Format::e4m3, Format::ue5m3, Format::fp32}) {
      const bool one = l == Layout::aiter_scale && f == Format::e8m0;
      EXPECT_EQ(padding_fill(l, f), one ? 127 : 0) << name(l) << " " << traits(f).name;
    }
  EXPECT_EQ(decode(Format::e8m0, 127), 1.0f);
}

TEST(LayoutText, NamesGoBothWaysAlone) {
  for (const char* text : {"linear", "mn_major", "nv_128x4", "aiter_scale", "mfma_16x16",
                           "mfma_16x16+aiter_scale", "mfma_16x16+nv_128x4"})
    EXPECT_EQ(to_string(parse_layout(text)), text);
  EXPECT_EQ(parse_layout("linear"), StorageLayout{});
  EXPECT_EQ(parse_layout("nv_128x4"), (StorageLayout{Layout::linear, Layout::nv_128x4}));
  EXPECT_EQ(parse_layout("mfma_16x16"), (StorageLayout{Layout::mfma_16x16, Layout::linear}));
  EXPECT_EQ(parse_layout("mfma_16x16+aiter_scale"),
            (StorageLayout{Layout::mfma_16x16, Layout::aiter_scale}));
  EXPECT_EQ(parse_layout("mfma_16x16+linear"), parse_layout("mfma_16x16"));
}

TEST(LayoutText, RefusesWhatMeansNothing) {
  EXPECT_ERROR(parse_layout("nv_128x5"), "'nv_128x5'", "one of", "did you mean 'nv_128x4'?");
  EXPECT_ERROR(parse_layout(""), "layout", "linear");
  EXPECT_ERROR(parse_layout("mfma_16x16+"), "layout");
  EXPECT_ERROR(parse_layout("+nv_128x4"), "layout");
  EXPECT_ERROR(parse_layout("nv_128x4+aiter_scale"), "and one of scales");
  EXPECT_ERROR(parse_layout("mn_major+mn_major"), "and one of scales");
  EXPECT_ERROR(parse_layout("mfma_16x16+mfma_16x16"), "at most one layout of codes");
  EXPECT_ERROR(parse_layout("NV_128x4"), "did you mean 'nv_128x4'?");
}

TEST(LayoutText, ASpecRefusesLayoutsThatCannotHoldIt) {
  for (const QuantSpec& byte_scales : {kMxfp8, kMxfp6, kMxfp4, kNvfp4, kAmdfp4}) {
    EXPECT_ERROR(validate(byte_scales, parse_layout("mn_major")), "mn_major",
                 "one of linear, nv_128x4, aiter_scale for the");
    validate(byte_scales, parse_layout("nv_128x4"));
    validate(byte_scales, parse_layout("aiter_scale"));
  }
  for (const QuantSpec& fp8 : {kFp8_1x128, kFp8_128x128}) {
    validate(fp8, parse_layout("mn_major"));
    EXPECT_ERROR(validate(fp8, parse_layout("nv_128x4")), "nv_128x4",
                 "one of linear, mn_major for");
    EXPECT_ERROR(validate(fp8, parse_layout("aiter_scale")), "aiter_scale", "linear, mn_major for");
  }
  for (const QuantSpec& wide : {kFp8_1x128, kMxfp8, kMxfp6})
    EXPECT_ERROR(validate(wide, parse_layout("mfma_16x16")), "mfma_16x16", "FP4");
  for (const QuantSpec& fp4 : {kMxfp4, kNvfp4, kAmdfp4})
    validate(fp4, parse_layout("mfma_16x16+aiter_scale"));
}

TEST(LayoutText, ALayoutOfCodesIsNoneOfScalesAndTheOtherWayRound) {
  EXPECT_ERROR(validate(kNvfp4, {Layout::linear, Layout::mfma_16x16}), "mfma_16x16", "scales");
  for (Layout l : {Layout::mn_major, Layout::nv_128x4, Layout::aiter_scale})
    EXPECT_ERROR(validate(kNvfp4, {l, Layout::linear}), name(l), "codes");
}

// The table of stored shapes (specification, section 13), for x [R, C].
struct Stored {
  int64_t codes_lines, codes_bytes_per_line, scale_rows, scale_columns;
};
Stored stored(const QuantSpec& spec, int axis, int64_t rows, int64_t columns) {
  const int64_t lines = axis == -1 ? rows : columns;
  int64_t contraction = axis == -1 ? columns : rows;
  while (spec.hadamard.dim && contraction % spec.hadamard.dim) ++contraction;
  const int64_t block = spec.block, blocks = (contraction + block - 1) / block;
  const int64_t bytes = blocks * block / (spec.element == Format::e2m1 ? 2 : 1);
  return {lines, bytes, spec.square ? (lines + block - 1) / block : lines, blocks};
}

TEST(StoredShape, LinearIsTheTableOfTheArchitecture) {
  QuantSpec rotated = kNvfp4;
  rotated.hadamard = {64, 0, 0};
  QuantSpec tiles = kNvfp4;
  tiles.square = true;
  for (const QuantSpec& spec :
       {kFp8_1x128, kFp8_128x128, kMxfp8, kMxfp6, kMxfp4, kNvfp4, rotated, tiles}) {
    for (int axis : {-1, -2}) {
      for (int64_t rows : kExtents) {
        for (int64_t columns : kExtents) {
          const StoredShape s = stored_shape(spec, {}, axis, rows, columns);
          const Stored want = stored(spec, axis, rows, columns);
          ASSERT_EQ(s.lines, want.codes_lines);
          ASSERT_EQ(s.line_bytes, want.codes_bytes_per_line)
              << rows << " " << columns << " " << axis;
          ASSERT_EQ(s.blocks, want.scale_columns);
          ASSERT_EQ(s.padded, want.scale_columns * spec.block);
          ASSERT_EQ(s.scale_rows, want.scale_rows);
          ASSERT_EQ(s.code_bytes, want.codes_lines * want.codes_bytes_per_line);
          ASSERT_EQ(s.scale_count, want.scale_rows * want.scale_columns);
        }
      }
    }
  }
}

TEST(StoredShape, ByteLayoutsHoldOneRowOfScalesPerLineAndMnMajorTheGrid) {
  QuantSpec tiles = kMxfp8;
  tiles.square = true;
  const StoredShape grid = stored_shape(tiles, {}, -1, 100, 70);
  EXPECT_EQ(grid.scale_rows, 4);  // 100 rows in tiles of 32
  EXPECT_EQ(grid.scale_count, 4 * 3);
  const StoredShape rows = stored_shape(tiles, {Layout::linear, Layout::nv_128x4}, -1, 100, 70);
  EXPECT_EQ(rows.scale_rows, 100);
  EXPECT_EQ(rows.scale_count, 128 * 4);
  const StoredShape aiter = stored_shape(tiles, {Layout::linear, Layout::aiter_scale}, -2, 100, 70);
  EXPECT_EQ(aiter.scale_rows, 70);
  EXPECT_EQ(aiter.scale_count, 256 * 8);
  const StoredShape major =
      stored_shape(kFp8_128x128, {Layout::linear, Layout::mn_major}, -1, 300, 200);
  EXPECT_EQ(major.scale_rows, 3);
  EXPECT_EQ(major.scale_count, 4 * 2);
  const StoredShape mfma = stored_shape(kMxfp4, {Layout::mfma_16x16, Layout::linear}, -1, 17, 70);
  EXPECT_EQ(mfma.line_bytes, 48);       // 96 codes
  EXPECT_EQ(mfma.code_bytes, 32 * 64);  // 17 -> 32 rows, 48 -> 64 bytes
}

}  // namespace
}  // namespace blockscale::testing
