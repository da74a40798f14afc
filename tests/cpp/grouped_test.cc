// Groups of rows: every group is what it would be alone, at its place in the buffers of the whole.
#include <gtest/gtest.h>

#include <cstdio>
#include <set>

#include "cases.h"
#include "runner.h"
#include "throws.h"

namespace blockscale::testing {
namespace {

#ifdef BLOCKSCALE_EMULATE
constexpr int kCases = kSweepStep > 1 ? 3 : 20;  // a kernel's threads by turns
#else
constexpr int kCases = kSweepStep > 1 ? 60 : 300;
#endif

// Ends of random groups of up to `rows` rows: ragged, some empty, some of one row; often short of
// the last row. Now and then more of them than a thread block has threads.
std::vector<int64_t> random_ends(Random& random, int64_t rows) {
  const uint64_t most = random.one_in(16) ? 700 : random.one_in(4) ? 100 : 6;
  const auto count = static_cast<size_t>(1 + random.below(most));
  std::vector<int64_t> ends(count);
  for (int64_t& end : ends)
    end = static_cast<int64_t>(random.below(static_cast<uint64_t>(rows) + 1));
  if (random.one_in(2)) ends.back() = rows;
  for (size_t g = 1; g < count; ++g) {
    if (random.one_in(4)) ends[g] = ends[g - 1];
    if (random.one_in(6)) ends[g] = std::min(rows, ends[g - 1] + 1);
    if (random.one_in(6)) ends[g] = std::min(rows, round_up(ends[g - 1] + 1, 128));
  }
  std::sort(ends.begin(), ends.end());
  return ends;
}

using Specs = std::vector<QuantSpec>;

// One random matrix, its groups, and what they shall become. With `specs`, of one compiled kernel:
// one of them along that axis, and a matrix that kernel takes.
struct GroupedCase {
  GroupedCase(uint64_t seed, int i, const Specs* specs = nullptr, int along = 0)
      : random(seed * 1000003 + static_cast<uint64_t>(i)),
        spec(random.pick(specs ? *specs : valid_specs())),
        layout(random.pick(layouts_for(spec))),
        axis(specs              ? along
             : random.one_in(2) ? -1
                                : -2),
        rows(random_extent(random) * (random.one_in(4) ? 4 : 1)),
        columns(random_extent(random)),
        x(specs ? DType::bf16 : random_dtype(random), 1, rows, columns,
          specs ? Strides::aligned_rows : random.pick(kStrides), random_values(random)),
        ends(random_ends(random, rows)),
        offsets(ends, random.one_in(2)),
        wanted(random, spec, axis, static_cast<int64_t>(ends.size())) {
    text = to_string(spec) + " as " + to_string(layout) + " axis " + std::to_string(axis) + " [" +
           std::to_string(rows) + ", " + std::to_string(columns) + "] ends";
    for (int64_t end : ends) text += " " + std::to_string(end);
    text += ", seed " + std::to_string(seed) + " case " + std::to_string(i);
  }
  Output output() const { return output(spec, layout, axis); }
  Output output(const QuantSpec& s, const StorageLayout& l, int along) const {
    return Output(s, l, along, rows, columns, 1, offsets.view());
  }
  int64_t begin(size_t g) const { return g ? ends[g - 1] : 0; }
  ConstMatrix group(size_t g) const {
    ConstMatrix part = x.view();
    part.data = static_cast<const uint8_t*>(part.data) +
                begin(g) * part.row_stride * dtype_bytes(part.dtype);
    part.rows = ends[g] - begin(g);
    return part;
  }
  const QuantizeOptions& options() const { return wanted.options; }

  Random random;
  QuantSpec spec;
  StorageLayout layout;
  int axis;
  int64_t rows, columns;
  Input x;
  std::vector<int64_t> ends;
  Offsets offsets;
  RandomOptions wanted;
  std::string text;
};

// A buffer seen as a matrix of rows, to which others are joined below or to the right.
struct Joined {
  std::vector<uint8_t> bytes;
  int64_t rows, columns, at = 0;

  void join(bool below, const uint8_t* from, int64_t from_rows, int64_t from_columns) {
    for (int64_t r = 0; r < from_rows; ++r)
      for (int64_t c = 0; c < from_columns; ++c)
        bytes.at(static_cast<size_t>(below ? (at + r) * columns + c : r * columns + at + c)) =
            from[r * from_columns + c];
    at += below ? from_rows : from_columns;
    ASSERT_LE(at, below ? rows : columns);
  }
};

// The matrix of rows and columns that memory holds: `linear` a plain one, `mn_major` its transpose;
// the tiled layouts are one run of bytes.
struct Memory2d {
  int64_t rows, columns;
};
Memory2d memory_of(Layout l, int64_t rows, int64_t columns, int64_t element) {
  if (l == Layout::linear) return {rows, columns * element};
  if (l == Layout::mn_major) return {columns, padded_rows(l, rows) * element};
  return {layout_size(l, rows, columns) * element, 1};
}

// What the whole must hold, from the groups alone: their buffers joined in order, the rest padding.
struct Expected {
  Joined codes, scales;
  std::vector<float> outer;
};
// Those of group g by itself, which begins at `position` along the contraction axis.
QuantizeOptions options_of(const GroupedCase& c, size_t g, int64_t position) {
  QuantizeOptions options = c.options();
  if (options.amax) options.amax += g;
  options.origin_row += c.axis == -1 ? c.begin(g) : position;
  return options;
}

Expected expected_of(const GroupedCase& c, const Output& whole) {
  const StoredShape& s = whole.shape;
  const int bytes = scale_bytes(c.spec.scale);
  const auto buffer = [](int64_t size, uint8_t fill, const Memory2d& m) {
    return Joined{std::vector<uint8_t>(static_cast<size_t>(size), fill), m.rows, m.columns};
  };
  Expected want{
      buffer(whole.codes.size(), 0, memory_of(c.layout.codes, s.code_rows, s.code_columns, 1)),
      buffer(whole.scales.size(), padding_fill(c.layout.scales, c.spec.scale),
             memory_of(c.layout.scales, s.scale_rows, s.scale_columns, bytes)),
      {}};
  int64_t position = 0;
  for (size_t g = 0; g < c.ends.size(); ++g) {
    const ConstMatrix part = c.group(g);
    Output one(c.spec, c.layout, c.axis, part.rows, c.columns);
    const QuantizeOptions options = options_of(c, g, position);
    reference::quantize(part, one.view, options);
    position += one.shape.padded;
    const auto join = [&](Joined& to, Layout l, const Guarded& from, int64_t rows, int64_t columns,
                          int64_t element) {
      const Memory2d m = memory_of(l, rows, columns, element);
      const bool below = l == Layout::linear     ? c.axis == -1
                         : l == Layout::mn_major ? c.axis == -2
                                                 : true;
      to.join(below, from.data(), m.rows, m.columns);
    };
    join(want.codes, c.layout.codes, one.codes, one.shape.lines, one.shape.line_bytes, 1);
    join(want.scales, c.layout.scales, one.scales, one.shape.scale_rows, one.shape.blocks, bytes);
    want.outer.push_back(one.outer_scale(0));
  }
  return want;
}

void expect_groups_alone(const GroupedCase& c, const Output& got) {
  const Expected want = expected_of(c, got);
  const auto same = [](const std::vector<uint8_t>& a, const Guarded& b) {
    for (int64_t i = 0; i < b.size(); ++i)
      if (a[static_cast<size_t>(i)] != b.data()[i]) return i;
    return int64_t{-1};
  };
  ASSERT_EQ(same(want.codes.bytes, got.codes), -1) << "of " << got.codes.size() << " codes";
  ASSERT_EQ(same(want.scales.bytes, got.scales), -1) << "of " << got.scales.size() << " scales";
  ASSERT_TRUE(got.codes.guards_whole() && got.scales.guards_whole() && got.outer.guards_whole());
  if (!c.spec.outer) return;
  for (size_t g = 0; g < c.ends.size(); ++g)
    ASSERT_EQ(bits_of(got.view.outer[g]), bits_of(want.outer[g])) << "group " << g;
}

class GroupedTest : public BackendTest {};
BLOCKSCALE_BACKEND_TESTS(GroupedTest, all_runs());
class GroupedKernelTest : public BackendTest {};
BLOCKSCALE_BACKEND_TESTS(GroupedKernelTest, kernel_runs());

TEST_P(GroupedTest, EveryGroupIsWhatItIsAlone) {
  for (int i = 0; i < kCases; ++i) {
    const GroupedCase c(seed(), i);
    SCOPED_TRACE(c.text);
    Output got = c.output(), oracle = c.output();
    reference::quantize(c.x.view(), oracle.view, c.options());
    expect_groups_alone(c, oracle);
    if (HasFatalFailure()) FAIL() << "the reference";
    for (const uint64_t variant : {1, 5, 8}) {
      Output mine = c.output();
      runner->quantize(c.x, mine, c.options(), variant);
      ASSERT_TRUE(same_operand(mine, oracle)) << "variant " << variant;
    }
    ASSERT_TRUE(c.x.untouched());
  }
}

TEST_P(GroupedTest, BothAxesInOnePassAreTheTwoPasses) {
  for (int i = 0; i < kCases; ++i) {
    const GroupedCase c(seed(), 1000000 + i);
    Random random(seed() + i);
    // Often the same squares both ways, which backends encode once.
    const QuantSpec row_spec = c.spec,
                    column_spec = random.one_in(3) ? c.spec : random.pick(valid_specs());
    const StorageLayout row_layout = c.layout,
                        column_layout = random.pick(layouts_for(column_spec));
    const auto count = static_cast<int64_t>(c.ends.size());
    const RandomOptions row(random, row_spec, -1, count), column(random, column_spec, -2, count);
    SCOPED_TRACE(to_string(row_spec) + " and " + to_string(column_spec) + " of: " + c.text);
    Output want_row = c.output(row_spec, row_layout, -1),
           want_column = c.output(column_spec, column_layout, -2);
    Output got_row = c.output(row_spec, row_layout, -1),
           got_column = c.output(column_spec, column_layout, -2);
    reference::quantize(c.x.view(), want_row.view, row.options);
    reference::quantize(c.x.view(), want_column.view, column.options);
    runner->quantize_dual(c.x, got_row, got_column, row.options, column.options, seed() + i);
    ASSERT_TRUE(same_operand(got_row, want_row)) << "rows";
    ASSERT_TRUE(same_operand(got_column, want_column)) << "columns";
    ASSERT_TRUE(c.x.untouched());
  }
}

// A group of one row takes 16 positions: with 113 rows behind it, the last lies at position 128,
// for which the columns' lines have no room.
TEST_P(GroupedTest, RowsOfNoGroupBehindWholeLines) {
  const QuantSpec spec = parse_spec("nvfp4[outer=false]");
  const Offsets offsets({1}, false);
  for (const int64_t rows : {113, 114, 115}) {
    Random random(seed());
    const Input x(DType::bf16, 1, rows, 40, Strides::aligned_rows, random_values(random));
    const auto output = [&](int axis) {
      return Output(spec, StorageLayout{}, axis, rows, 40, 1, offsets.view());
    };
    Output row = output(-1), column = output(-2), want_row = output(-1), want_column = output(-2);
    ASSERT_EQ(column.shape.padded, 128);
    reference::quantize(x.view(), want_row.view, {});
    reference::quantize(x.view(), want_column.view, {});
    runner->quantize_dual(x, row, column, {}, {}, 1);
    EXPECT_TRUE(same_operand(row, want_row)) << rows;
    EXPECT_TRUE(same_operand(column, want_column)) << rows;
  }
}

// Whether groups in linear layouts have kernels of their own: along rows, as they lie as rows do
// without them; down columns, where a line holds groups one after another and no block is a tile.
bool has_linear_kernel(const Specs* rows, const Specs* columns) {
  const bool squares = rows && rows->front().square;
  return !squares && (!columns || columns->front().block < 128);
}

// Every kernel that is compiled for groups: along rows, along columns, at once.
TEST_P(GroupedKernelTest, EveryCompiledKernelIsTheReference) {
  constexpr int kEach = 3;
  std::set<const void*> kernels;
  int wanted = 0;
  enum class In { any, linear, other };
  auto check = [&](const Specs* rows_of, const Specs* columns_of, In layouts = In::any) {
    ++wanted;
    for (int i = 0, seen = 0; seen < kEach && !HasFailure(); ++i) {
      const GroupedCase c(seed(), 3000000 + 1000 * wanted + i, rows_of ? rows_of : columns_of,
                          rows_of ? -1 : -2);
      SCOPED_TRACE(c.text);
      const bool linear = c.layout == StorageLayout{};
      if (layouts != In::any && linear != (layouts == In::linear)) continue;
      Output got = c.output(), want = c.output();
      reference::quantize(c.x.view(), want.view, c.options());
      if (rows_of && columns_of) {
        Random random(seed() + i);
        const QuantSpec other = beside(random, c.spec, *columns_of);
        const RandomOptions column(random, other, -2, static_cast<int64_t>(c.ends.size()));
        const StorageLayout layout =
            layouts == In::linear ? StorageLayout{} : random.pick(layouts_for(other));
        Output got_column = c.output(other, layout, -2), want_column = c.output(other, layout, -2);
        reference::quantize(c.x.view(), want_column.view, column.options);
        runner->quantize_dual(c.x, got, got_column, c.options(), column.options, i);
        EXPECT_TRUE(same_operand(got_column, want_column)) << "columns " << to_string(other);
      } else {
        runner->quantize(c.x, got, c.options(), i);
      }
      EXPECT_TRUE(same_operand(got, want));
      if (c.rows * c.columns == 0) continue;  // runs no kernel of its own
      kernels.insert(runner->last_kernel());
      ++seen;
    }
  };
  auto check_layouts = [&](const Specs* rows_of, const Specs* columns_of) {
    if (!has_linear_kernel(rows_of, columns_of)) return check(rows_of, columns_of);
    check(rows_of, columns_of, In::linear);
    check(rows_of, columns_of, In::other);
  };
  for (const Specs& specs : compiled_specs()) {
    check_layouts(&specs, nullptr);
    check_layouts(nullptr, &specs);
    for (const Specs& others : compiled_specs())
      if (is_compiled_pair(specs.front(), others.front())) check_layouts(&specs, &others);
  }
  EXPECT_GT(wanted, 0);
  if (runner->last_kernel()) {
    EXPECT_EQ(kernels.size(), static_cast<size_t>(wanted));
  }
}

TEST_P(GroupedTest, AmaxIsThatOfEveryGroup) {
  for (int i = 0; i < kCases; ++i) {
    const GroupedCase c(seed(), 2000000 + i);
    SCOPED_TRACE(c.text);
    std::vector<float> got(c.ends.size(), -1), oracle = got;
    reference::amax(c.x.view(), c.spec, c.axis, oracle.data(), c.offsets.view());
    runner->amax(c.x, c.spec, c.axis, got.data(), seed() + i, c.offsets.view());
    for (size_t g = 0; g < c.ends.size(); ++g) {
      float alone = -1;
      reference::amax(c.group(g), c.spec, c.axis, &alone);
      ASSERT_EQ(bits_of(oracle[g]), bits_of(alone)) << "the reference, group " << g;
      ASSERT_EQ(bits_of(got[g]), bits_of(alone)) << "group " << g;
    }
  }
}

TEST_P(GroupedTest, DequantizeIsThatOfEveryGroupAndZeroBehindThem) {
  for (int i = 0; i < kCases; ++i) {
    const GroupedCase c(seed(), 3000000 + i);
    SCOPED_TRACE(c.text);
    Output q = c.output();
    reference::quantize(c.x.view(), q.view, c.options());
    Random random(seed() + i);
    const DType dtype = random_written_dtype(random);
    const int64_t size = c.rows * c.columns * dtype_bytes(dtype);
    Guarded got(size), oracle(size), want(size, 0);
    const auto matrix = [&](Guarded& g) {
      return Matrix{g.data(), dtype, c.rows, c.columns, c.columns, 1, 1, 0};
    };
    int64_t position = 0;
    for (size_t g = 0; g < c.ends.size(); ++g) {
      const ConstMatrix part = c.group(g);
      Output one(c.spec, c.layout, c.axis, part.rows, c.columns);
      const QuantizeOptions options = options_of(c, g, position);
      position += one.shape.padded;
      reference::quantize(part, one.view, options);
      Matrix to = matrix(want);
      to.rows = part.rows;
      to.data = want.data() + c.begin(g) * c.columns * dtype_bytes(dtype);
      reference::dequantize(as_const(one.view), to);
    }
    reference::dequantize(as_const(q.view), matrix(oracle));
    ASSERT_EQ(oracle.difference(want), "") << "the reference";
    runner->dequantize(q, matrix(got), got, seed() + i);
    ASSERT_EQ(got.difference(want), "");
  }
}

TEST_P(GroupedTest, RelayoutIsQuantizingIntoThatLayoutAndComesBack) {
  for (int i = 0; i < kCases; ++i) {
    GroupedCase c(seed(), 4000000 + i);
    const StorageLayout layout = c.random.pick(layouts_for(c.spec));
    SCOPED_TRACE(c.text + " into " + to_string(layout));
    Output from = c.output(), back = c.output();
    reference::quantize(c.x.view(), from.view, c.options());
    Output want = c.output(c.spec, layout, c.axis), got = c.output(c.spec, layout, c.axis),
           oracle = c.output(c.spec, layout, c.axis);
    reference::quantize(c.x.view(), want.view, c.options());
    runner->relayout(from, got, seed() + i);
    reference::relayout(as_const(from.view), oracle.view);
    ASSERT_TRUE(same_operand(oracle, want));
    ASSERT_TRUE(same_operand(got, want));
    runner->relayout(got, back, 1);
    ASSERT_TRUE(same_operand(back, from)) << "and back";
  }
}

// On a device nothing waits for the offsets: where they make no sense, everything is NaN.
TEST_P(GroupedTest, OffsetsThatMakeNoSenseGiveNan) {
  if (std::get<0>(GetParam()) == "cpu") GTEST_SKIP() << "refused there";
  const auto expect_nan = [&](GroupedCase c) {
    const size_t wrong = c.random.below(c.ends.size());
    if (wrong > 0 && c.ends[wrong - 1] > 0 && c.random.one_in(2))
      c.ends[wrong] = c.ends[wrong - 1] - 1;
    else
      c.ends[wrong] = c.random.one_in(2) ? -1 : c.rows + 1;
    const bool int64 = c.random.one_in(2);
    if (int64 && c.random.one_in(3)) c.ends[wrong] -= int64_t{1} << 32;  // its lower half alone
    c.offsets = Offsets(c.ends, int64);
    SCOPED_TRACE(c.text + ", wrong " + std::to_string(wrong));
    Output q = c.output();
    runner->quantize(c.x, q, c.options(), seed());
    for (int64_t k = 0; k < q.codes.size(); ++k) ASSERT_EQ(q.codes.data()[k], 0) << "code " << k;
    const int bytes = scale_bytes(c.spec.scale);
    for (int64_t k = 0; k < q.shape.scale_count; ++k) {
      uint32_t bits = q.scales.data()[bytes * k];
      if (bytes == 4) std::memcpy(&bits, q.scales.data() + 4 * k, 4);
      ASSERT_EQ(bits, bytes == 4 ? kNanBits : traits(c.spec.scale).nan_code()) << "scale " << k;
    }
    ASSERT_TRUE(q.codes.guards_whole() && q.scales.guards_whole() && q.outer.guards_whole());
    std::vector<float> amaxes(c.ends.size(), 0);
    runner->amax(c.x, c.spec, c.axis, amaxes.data(), 0, c.offsets.view());
    for (size_t g = 0; g < c.ends.size(); ++g) {
      ASSERT_EQ(bits_of(amaxes[g]), kNanBits) << g;
      if (c.spec.outer) {
        ASSERT_EQ(bits_of(q.view.outer[g]), kNanBits) << g;
      }
    }
    Guarded values(c.rows * c.columns * 4);
    const Matrix to{values.data(), DType::f32, c.rows, c.columns, c.columns, 1, 1, 0};
    runner->dequantize(q, to, values, 0);
    for (int64_t k = 0; k < c.rows * c.columns; ++k)
      ASSERT_EQ(bits_of(static_cast<const float*>(to.data)[k]), kNanBits) << "value " << k;
  };
  for (int i = 0; i < kCases / 4 && !HasFailure(); ++i)
    expect_nan(GroupedCase(seed(), 5000000 + i));
  int i = 6000000;
  for (const Specs& specs : compiled_specs())
    for (int axis : {-1, -2})
      if (!HasFailure()) expect_nan(GroupedCase(seed(), i++, &specs, axis));
}

// ---- refusals ----

struct RefusedGroups : public ::testing::Test {
  Input x{DType::f32, 1, 40, 48, Strides::row_major, [](int64_t, int64_t r, int64_t c) {
            return static_cast<float>(r - c);
          }};
  // Quantizes x with these ends.
  void with(const std::vector<int64_t>& ends, int64_t batch = 1) {
    const Offsets offsets(ends, true);
    Output out(kNvfp4, {}, -1, 40, 48, 1, offsets.view()),
        fresh(kNvfp4, {}, -1, 40, 48, 1, offsets.view());
    out.view.batch = batch;
    ConstMatrix in = x.view();
    in.batch = batch;
    try {
      quantize(in, out.view);
    } catch (...) {
      EXPECT_TRUE(same_operand(out, fresh)) << "a refusal wrote something";
      throw;
    }
  }
};

TEST_F(RefusedGroups, OffsetsThatAreNoCumulativeEnds) {
  EXPECT_ERROR(with({10, 30, 20, 40}), "quantize: offsets[2] = 20 is smaller than offsets[1] = 30",
               "offsets must not decrease");
  EXPECT_ERROR(with({-1, 30}), "offsets[0] = -1 is smaller than 0", "must not decrease");
  EXPECT_ERROR(with({10, 41}), "quantize: offsets[1] = 41", "at most 40, the rows of x");
  EXPECT_ERROR(with({10, 40}, 2), "batch = 2", "one matrix");
  EXPECT_ERROR(with({10, 40}, 0), "batch = 0", "one matrix");
  check_offsets("quantize", {}, 40);  // no groups, no ends
  EXPECT_ERROR(check_offsets("quantize", {nullptr, true, -1}, 40), "offsets = a negative count");
}

TEST_F(RefusedGroups, InEveryOperatorByItsName) {
  const Offsets good({10, 40}, false), bad({30, 20}, false), other({10, 40}, false);
  Output q(kNvfp4, {}, -1, 40, 48, 1, good.view()), column(kNvfp4, {}, -2, 40, 48, 1, other.view());
  quantize(x.view(), q.view);
  EXPECT_ERROR(quantize_dual(x.view(), q.view, column.view), "quantize_dual: offsets",
               "the same groups");
  float amaxes[2];
  EXPECT_ERROR(amax(x.view(), kNvfp4, -1, amaxes, serial_executor(), bad.view()),
               "amax: offsets[1] = 20 is smaller than offsets[0] = 30");
  std::vector<float> values(40 * 48);
  const Matrix to{values.data(), DType::f32, 40, 48, 48, 1, 1, 0};
  q.view.groups = bad.view();
  EXPECT_ERROR(dequantize(as_const(q.view), to), "dequantize: offsets[1] = 20");
  EXPECT_ERROR(relayout(as_const(q.view), q.view), "relayout: offsets[1] = 20");
  q.view.groups = good.view();
  const Matrix d{values.data(), DType::f32, 40, 40, 40, 1, 1, 0};
  EXPECT_ERROR(gemm(as_const(q.view), as_const(q.view), d), "gemm: a", "axis -2");
}

TEST_F(RefusedGroups, ANegativeAmaxOfAnyGroup) {
  const Offsets offsets({10, 40}, true);
  Output out(kNvfp4, {}, -1, 40, 48, 1, offsets.view());
  const float amaxes[] = {1, -2};
  QuantizeOptions options;
  options.amax = amaxes;
  EXPECT_ERROR(quantize(x.view(), out.view, options), "amax = -2", "at least 0");
}

}  // namespace
}  // namespace blockscale::testing
