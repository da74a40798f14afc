// Every backend against the scalar oracle, bit for bit, over random specs, shapes, strides, values
// and layouts; and what must not depend on tiling, threads, batches or shards.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <set>

#include "cases.h"
#include "runner.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace blockscale::testing {
namespace {

#ifdef BLOCKSCALE_EMULATE
constexpr int kCases = kSweepStep > 1 ? 10 : 70;
constexpr int kKernelCases = kSweepStep > 1 ? 1 : 4;
#else
constexpr int kCases = kSweepStep > 1 ? 40 : 300;
constexpr int kKernelCases = 1;
#endif

class QuantizeTest : public BackendTest {};
BLOCKSCALE_BACKEND_TESTS(QuantizeTest, all_runs());
class QuantizeKernelTest : public BackendTest {};
BLOCKSCALE_BACKEND_TESTS(QuantizeKernelTest, kernel_runs());

// One random matrix and what it shall become; half of them what a GPU has kernels of its own for.
struct Case {
  Case(uint64_t seed, int i)
      : random(seed * 1000003 + static_cast<uint64_t>(i)),
        compiled(random.one_in(2)),
        spec(compiled ? random.pick(random.pick(compiled_specs())) : random.pick(valid_specs())),
        layout(random.pick(layouts_for(spec))),
        axis(random.one_in(2) ? -1 : -2),
        batch(1 + static_cast<int64_t>(random.below(3))),
        rows(random_extent(random)),
        columns(random_extent(random)),
        strides(compiled ? random.pick(kRowStrides) : random.pick(kStrides)),
        x(compiled ? DType::bf16 : random_dtype(random), batch, rows, columns, strides,
          random_values(random)),
        wanted(random, spec, axis, batch),
        text(to_string(spec) + " as " + to_string(layout) + " axis " + std::to_string(axis) +
             " batch " + std::to_string(batch) + " [" + std::to_string(rows) + ", " +
             std::to_string(columns) + "] strides " + std::to_string(static_cast<int>(strides)) +
             " dtype " + std::to_string(static_cast<int>(x.view().dtype)) + ", seed " +
             std::to_string(seed) + " case " + std::to_string(i)) {}
  Output output() const { return Output(spec, layout, axis, rows, columns, batch); }
  const QuantizeOptions& options() const { return wanted.options; }

  Random random;
  bool compiled;
  QuantSpec spec;
  StorageLayout layout;
  int axis;
  int64_t batch, rows, columns;
  Strides strides;
  Input x;
  RandomOptions wanted;
  std::string text;
};

TEST_P(QuantizeTest, IsTheReferenceOnAnyThreads) {
  for (int i = 0; i < kCases; ++i) {
    const Case c(seed(), i);
    SCOPED_TRACE(c.text);
    Output want = c.output();
    reference::quantize(c.x.view(), want.view, c.options());
    for (const uint64_t variant : {8 * i, 8 * i + 1, 8 * i + 5}) {
      if (variant % 8 == 0 && i % 8 != 0) continue;
      Output got = c.output();
      runner->quantize(c.x, got, c.options(), variant);
      ASSERT_TRUE(same_operand(got, want)) << "variant " << variant;
    }
    ASSERT_TRUE(c.x.untouched());
  }
}

// Along rows, along columns (a list that is null: not), or along both in one pass.
using Specs = std::vector<QuantSpec>;
void expect_reference(Runner& runner, Random random, Strides strides, const Specs* rows_of,
                      const Specs* columns_of, int64_t least = 1, DType dtype = DType::bf16,
                      int64_t matrices = 0) {
  const bool few = matrices == 0;  // else many, which are small
  const auto batch = few ? 1 + static_cast<int64_t>(random.below(2)) : matrices;
  const auto extent = [&] {
    return few ? random_extent(random) : static_cast<int64_t>(random.below(40));
  };
  const int64_t rows = least + extent();
  const int64_t columns = least + extent() + (few && random.one_in(8) ? 512 : 0);
  const uint64_t variant = random.below(8);
  const Input x(dtype, batch, rows, columns, strides, random_values(random));
  const QuantSpec row_spec = random.pick(rows_of ? *rows_of : *columns_of),
                  column_spec = columns_of && rows_of
                                    ? beside(random, row_spec, *columns_of)
                                    : random.pick(columns_of ? *columns_of : *rows_of);
  const RandomOptions row(random, row_spec, -1, batch), column(random, column_spec, -2, batch);
  const StorageLayout row_layout = random.pick(layouts_for(row_spec)),
                      column_layout = random.pick(layouts_for(column_spec));
  SCOPED_TRACE((rows_of ? "rows " + to_string(row_spec) : "") +
               (columns_of ? " columns " + to_string(column_spec) : "") + " [" +
               std::to_string(rows) + ", " + std::to_string(columns) + "] strides " +
               std::to_string(static_cast<int>(strides)));
  Output got_row(row_spec, row_layout, -1, rows, columns, batch);
  Output got_column(column_spec, column_layout, -2, rows, columns, batch);
  Output want_row(row_spec, row_layout, -1, rows, columns, batch);
  Output want_column(column_spec, column_layout, -2, rows, columns, batch);
  if (!columns_of)
    runner.quantize(x, got_row, row.options, variant);
  else if (!rows_of)
    runner.quantize(x, got_column, column.options, variant);
  else
    runner.quantize_dual(x, got_row, got_column, row.options, column.options, variant);
  if (rows_of) reference::quantize(x.view(), want_row.view, row.options);
  if (columns_of) reference::quantize(x.view(), want_column.view, column.options);
  EXPECT_TRUE(same_operand(got_row, want_row)) << "rows";
  EXPECT_TRUE(same_operand(got_column, want_column)) << "columns";
  EXPECT_TRUE(x.untouched());
}

// Every kernel that is compiled for a spec or a pair of specs: along rows, along columns, at once;
// rows at multiples of 16 bytes, of 4, and anywhere; FP32 and FP16. (Rows that go backwards have no
// such kernel, and of what lies by columns the transpose may have one.)
TEST_P(QuantizeKernelTest, EveryCompiledKernelIsTheReference) {
  constexpr Strides kPlaces[] = {Strides::aligned_rows, Strides::even_rows,
                                 Strides::padded_rows,  Strides::negative_rows,
                                 Strides::column_major, Strides::aligned_columns};
  std::set<const void*> kernels;
  size_t wanted = 0;
  auto check = [&](const Specs* rows_of, const Specs* columns_of) {
    wanted += 2;  // for aligned rows, and for others
    for (const Strides strides : kPlaces) {
      for (int i = 0; i < kKernelCases && !HasFailure(); ++i) {
        const uint64_t place = static_cast<uint64_t>(strides) * 100000 + wanted * 100;
        expect_reference(*runner, Random(seed() * 1000003 + 7000000 + place + i), strides, rows_of,
                         columns_of);
        const bool by_rows = strides == Strides::aligned_rows || strides == Strides::even_rows ||
                             strides == Strides::padded_rows;
        if (by_rows) kernels.insert(runner->last_kernel());
      }
    }
    const bool floats = is_compiled_of_floats(rows_of ? &rows_of->front() : nullptr,
                                              columns_of ? &columns_of->front() : nullptr);
    wanted += floats;
    for (const DType dtype : {DType::f32, DType::f16, DType::f32_as_bf16}) {
      for (const Strides strides : {Strides::aligned_rows, Strides::padded_rows}) {
        expect_reference(*runner, Random(seed() * 1000003 + 8000000 + wanted * 100), strides,
                         rows_of, columns_of, 1, dtype);
        if (floats) kernels.insert(runner->last_kernel());
      }
    }
  };
  for (const Specs& specs : compiled_specs()) {
    check(&specs, nullptr);
    check(nullptr, &specs);
    for (const Specs& others : compiled_specs())
      if (is_compiled_pair(specs.front(), others.front())) check(&specs, &others);
  }
  if (runner->last_kernel()) {
    EXPECT_GE(kernels.size(), wanted);  // some specs have two, by the size
  }
}

// Rows in layouts that put lines beside each other, where neighbours store together.
TEST_P(QuantizeKernelTest, JoinedLinesAreTheReference) {
  Random random(seed());
  for (const Specs& specs : compiled_specs()) {
    const QuantSpec spec = random.pick(specs);
    if (spec.scale == Format::fp32 || spec.square) continue;
    const void* plain = nullptr;
    for (const StorageLayout& layout : layouts_for(spec))
      for (int i = 0; i < kKernelCases + 1 && !HasFailure(); ++i) {
        const int64_t rows = 1 + random_extent(random), batch = 1 + random.below(2);
        const int64_t columns = 256 * (1 + random.below(3)) - random.below(16);
        const Input x(DType::bf16, batch, rows, columns, Strides::aligned_rows,
                      random_values(random));
        const RandomOptions row(random, spec, -1, batch);
        SCOPED_TRACE(to_string(spec) + " as " + to_string(layout) + " [" + std::to_string(rows) +
                     ", " + std::to_string(columns) + "]");
        Output got(spec, layout, -1, rows, columns, batch);
        Output want(spec, layout, -1, rows, columns, batch);
        runner->quantize(x, got, row.options, 8 * i);
        reference::quantize(x.view(), want.view, row.options);
        EXPECT_TRUE(same_operand(got, want));
        if (layout == StorageLayout{}) plain = runner->last_kernel();
        if (plain) {
          EXPECT_EQ(runner->last_kernel() == plain, layout == StorageLayout{});
        }
      }
  }
}

// Blocks of threads take several tiles where there are enough.
TEST_P(QuantizeKernelTest, ManyTilesAreTheReference) {
  Random random(seed());
  for (int i = 0; i < 16 && !HasFailure(); ++i) {
    const Specs rows_of = random.pick(compiled_specs()), columns_of = random.pick(compiled_specs());
    const bool both = is_compiled_pair(rows_of.front(), columns_of.front());
    expect_reference(*runner, Random(seed() + i), Strides::aligned_rows, both ? &rows_of : nullptr,
                     &columns_of, 800);
  }
}

// More matrices than kernels keep outer scales of, and enough for the kernels of many tiles, of
// which emulated multiprocessors, being few, want less.
TEST_P(QuantizeKernelTest, ManyMatricesAreTheReference) {
  const int64_t matrices = std::get<0>(GetParam()) == "cuda" ? 3300 : 80;
  auto check = [&](const Specs* rows_of, const Specs& columns_of) {
    expect_reference(*runner, Random(seed()), Strides::aligned_rows, rows_of, &columns_of, 1,
                     DType::bf16, matrices);
  };
  for (const Specs& all : compiled_specs()) {
    Specs columns_of;
    std::copy_if(all.begin(), all.end(), std::back_inserter(columns_of),
                 [](const QuantSpec& spec) { return spec.outer; });
    if (columns_of.empty()) continue;
    check(nullptr, columns_of);
    for (const Specs& rows_of : compiled_specs())
      if (is_compiled_pair(rows_of.front(), columns_of.front())) check(&rows_of, columns_of);
  }
}

// Many tiles of elements of a byte, which have kernels of their own: for columns in twos, and for
// the scales of both directions.
TEST_P(QuantizeKernelTest, ManyTilesOfBytesAreTheReference) {
  const Specs fp8 = {kFp8_1x128}, mxfp8 = {kMxfp8};
  const Specs wide = {parse_spec("mxfp8[hadamard=32]")};  // in a pass of its own
  for (int i = 0; i < (kSweepStep > 1 ? 1 : 4) && !HasFailure(); ++i) {
    expect_reference(*runner, Random(seed() + i), Strides::aligned_rows, &fp8, &fp8, 800);
    expect_reference(*runner, Random(seed() + i), Strides::padded_rows, &fp8, &fp8, 800);
    expect_reference(*runner, Random(seed() + i), Strides::aligned_rows, &mxfp8, &mxfp8, 800);
    expect_reference(*runner, Random(seed() + i), Strides::negative_rows, &mxfp8, &mxfp8, 800);
    expect_reference(*runner, Random(seed() + i), Strides::aligned_rows, &mxfp8, &wide, 800);
    expect_reference(*runner, Random(seed() + i), Strides::padded_rows, &wide, &mxfp8, 800);
    expect_reference(*runner, Random(seed() + i), Strides::aligned_rows, nullptr, &fp8, 800);
    expect_reference(*runner, Random(seed() + i), Strides::aligned_rows, nullptr, &mxfp8, 800);
  }
}

TEST_P(QuantizeTest, BothAxesInOnePassAreTheTwoPasses) {
  for (int i = 0; i < kCases; ++i) {
    const Case c(seed(), 1000000 + i);
    Random random(seed() + i);
    QuantSpec row_spec = random.pick(valid_specs()), column_spec = random.pick(valid_specs());
    if (c.compiled) {
      do {
        row_spec = random.pick(random.pick(compiled_specs()));
        column_spec = random.pick(random.pick(compiled_specs()));
      } while (!is_compiled_pair(row_spec, column_spec));
    }
    const StorageLayout row_layout = random.pick(layouts_for(row_spec)),
                        column_layout = random.pick(layouts_for(column_spec));
    const RandomOptions row(random, row_spec, -1, c.batch),
        column(random, column_spec, -2, c.batch);
    SCOPED_TRACE(to_string(row_spec) + " and " + to_string(column_spec) + " of: " + c.text);
    Output want_row(row_spec, row_layout, -1, c.rows, c.columns, c.batch);
    Output want_column(column_spec, column_layout, -2, c.rows, c.columns, c.batch);
    Output got_row(row_spec, row_layout, -1, c.rows, c.columns, c.batch);
    Output got_column(column_spec, column_layout, -2, c.rows, c.columns, c.batch);
    reference::quantize(c.x.view(), want_row.view, row.options);
    reference::quantize(c.x.view(), want_column.view, column.options);
    runner->quantize_dual(c.x, got_row, got_column, row.options, column.options, seed() + i);
    ASSERT_TRUE(same_operand(got_row, want_row)) << "rows";
    ASSERT_TRUE(same_operand(got_column, want_column)) << "columns";
    ASSERT_TRUE(c.x.untouched());
  }
}

TEST_P(QuantizeTest, AmaxIsTheReference) {
  for (int i = 0; i < kCases; ++i) {
    const Case c(seed(), 2000000 + i);
    SCOPED_TRACE(c.text);
    std::vector<float> want(static_cast<size_t>(c.batch), -1), got = want;
    reference::amax(c.x.view(), c.spec, c.axis, want.data());
    runner->amax(c.x, c.spec, c.axis, got.data(), seed() + i);
    for (int64_t b = 0; b < c.batch; ++b) ASSERT_EQ(bits_of(got[b]), bits_of(want[b])) << b;
    if (!c.spec.outer) continue;
    // An amax computed before is the one computed within.
    Output within = c.output(), given = c.output();
    QuantizeOptions options = c.options();
    options.amax = nullptr;
    runner->quantize(c.x, within, options);
    options.amax = got.data();
    runner->quantize(c.x, given, options);
    ASSERT_TRUE(same_operand(within, given));
  }
}

// Writes into every stride; what lies between the elements keeps its poison.
TEST_P(QuantizeTest, DequantizeIsTheReferenceInAnyStrides) {
  for (int i = 0; i < kCases; ++i) {
    const Case c(seed(), 3000000 + i);
    SCOPED_TRACE(c.text);
    Output q = c.output();
    reference::quantize(c.x.view(), q.view, c.options());
    Random random(seed() + i);
    Strides kind = random.pick(kStrides);
    if (kind == Strides::same_row || kind == Strides::same_column || kind == Strides::same_matrix)
      kind = Strides::negative_columns;  // an output has one place for each element
    const DType dtype = random_written_dtype(random);
    const auto zero = [](int64_t, int64_t, int64_t) { return 0.0f; };
    const Input frame(dtype, c.batch, c.rows, c.columns, kind, zero);
    const ConstMatrix& f = frame.view();
    const int64_t span = (f.batch + 1) * std::abs(f.batch_stride) + 64;
    Guarded want(2 * span * dtype_bytes(dtype)), got(2 * span * dtype_bytes(dtype));
    const auto matrix = [&](Guarded& g) {
      return Matrix{g.data() + span / 2 * dtype_bytes(dtype),
                    dtype,
                    f.rows,
                    f.columns,
                    f.row_stride,
                    f.column_stride,
                    f.batch,
                    f.batch_stride};
    };
    reference::dequantize(as_const(q.view), matrix(want));
    runner->dequantize(q, matrix(got), got, seed() + i);
    ASSERT_EQ(got.difference(want), "");
  }
}

// Operands that no quantizer makes: scales and outer scales that are any NaN or Inf, codes of Inf.
TEST_P(QuantizeTest, DequantizeStoresOneNan) {
  constexpr int64_t kSide = 160;
  constexpr uint32_t kBits[] = {0xFFC00000, 0x7FBD1C03, 0xFFFFFFFF, kInfBits, 0xFF800000, 0};
  for (const char* name : {"fp8_1x128", "fp8_1x128[element=e5m2]", "mxfp8", "nvfp4"})
    for (const int axis : {-1, -2})
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        SCOPED_TRACE(std::string(name) + " axis " + std::to_string(axis));
        Random random(seed());
        const QuantSpec spec = parse_spec(name);
        const Input x(DType::bf16, 1, kSide, kSide, Strides::row_major, random_values(random));
        Output q(spec, {}, axis, kSide, kSide);
        reference::quantize(x.view(), q.view, {});
        const StoredShape s = q.view.shape();
        const auto any = [&] { return bit_cast<float>(random.pick(kBits)); };
        if (spec.scale == Format::fp32)
          for (int64_t i = 0; i < s.scale_count; i += 3)
            reinterpret_cast<float*>(q.view.scales)[i] = any();
        if (spec.outer) *q.view.outer = any();
        if (spec.element == Format::e5m2)
          for (int64_t i = 0; i < s.code_bytes; i += 7) q.view.codes[i] = 0x7C | (i % 2 << 7);
        Guarded want(kSide * kSide * dtype_bytes(dtype)), got(kSide * kSide * dtype_bytes(dtype));
        const auto matrix = [&](Guarded& g) {
          return Matrix{g.data(), dtype, kSide, kSide, kSide, 1, 1, 0};
        };
        reference::dequantize(as_const(q.view), matrix(want));
        runner->dequantize(q, matrix(got), got, seed());
        ASSERT_EQ(got.difference(want), "");
        const ConstMatrix values = as_const(matrix(want));
        for (int64_t i = 0; i < kSide * kSide; ++i) {
          const float v = load_element(values, i);
          if (v != v) ASSERT_EQ(bit_cast<uint32_t>(v), kNanBits);
        }
      }
}

// BF16 rows that are wider than what a GPU's warp stores of one, each at another address.
TEST_P(QuantizeTest, DequantizeStoresRowsThatStartAnywhere) {
  constexpr int64_t kRows = 135, kColumns = 523;
  for (const char* name : {"fp8_1x128", "fp8_128x128", "mxfp8", "nvfp4", "mxfp4"})
    for (const int axis : {-1, -2}) {
      SCOPED_TRACE(std::string(name) + " axis " + std::to_string(axis));
      Random random(seed());
      const QuantSpec spec = parse_spec(name);
      const Input x(DType::bf16, 1, kRows, kColumns, Strides::row_major, random_values(random));
      Output q(spec, {}, axis, kRows, kColumns);
      reference::quantize(x.view(), q.view, {});
      Guarded want(2 * kRows * kColumns), got(2 * kRows * kColumns);
      const auto matrix = [](Guarded& g) {
        return Matrix{g.data(), DType::bf16, kRows, kColumns, kColumns, 1, 1, 0};
      };
      reference::dequantize(as_const(q.view), matrix(want));
      runner->dequantize(q, matrix(got), got, seed());
      ASSERT_EQ(got.difference(want), "");
    }
}

TEST_P(QuantizeTest, RelayoutIsQuantizingIntoThatLayoutAndComesBack) {
  for (int i = 0; i < kCases; ++i) {
    Case c(seed(), 4000000 + i);
    const StorageLayout layout = c.random.pick(layouts_for(c.spec));
    SCOPED_TRACE(c.text + " into " + to_string(layout));
    Output from = c.output(), back = c.output();
    runner->quantize(c.x, from, c.options());
    Output want(c.spec, layout, c.axis, c.rows, c.columns, c.batch);
    Output got(c.spec, layout, c.axis, c.rows, c.columns, c.batch);
    Output oracle(c.spec, layout, c.axis, c.rows, c.columns, c.batch);
    runner->quantize(c.x, want, c.options());
    runner->relayout(from, got, seed() + i);
    reference::relayout(as_const(from.view), oracle.view);
    ASSERT_TRUE(same_operand(got, want));
    ASSERT_TRUE(same_operand(oracle, want));
    runner->relayout(got, back, 1);
    ASSERT_TRUE(same_operand(back, from)) << "and back";
  }
}

// A shard of rows, of columns, or of both: cut at whole blocks, quantized with its origin.
TEST_P(QuantizeTest, AShardWithItsOriginIsTheSliceOfTheWhole) {
  for (int i = 0; i < kCases; ++i) {
    Random random(seed() * 1000003 + 5000000 + i);
    const QuantSpec& spec = random.pick(valid_specs());
    const int axis = random.one_in(2) ? -1 : -2;
    const int64_t rows = random_extent(random), columns = random_extent(random);
    const Values values = random_values(random);
    const DType dtype = random_dtype(random);
    const Input whole(dtype, 1, rows, columns, Strides::row_major, values);
    const float amax = 3.5f;
    QuantizeOptions options;
    if (spec.outer) options.amax = &amax;
    options.rng = Rng{random.next(), random.next()};
    Output all(spec, {}, axis, rows, columns);
    runner->quantize(whole, all, options);

    const int64_t along = spec.unit();
    const int64_t row_step = axis == -1 ? spec.block_lines() : along;
    const int64_t column_step = axis == -1 ? along : spec.block_lines();
    const int64_t row0 = row_step * random.below(rows / row_step + 1);
    const int64_t column0 = column_step * random.below(columns / column_step + 1);
    // Up to the end, or whole blocks of what is left.
    const auto cut = [&](int64_t left, int64_t step) {
      return random.one_in(2) ? left : step * static_cast<int64_t>(random.below(left / step + 1));
    };
    const int64_t shard_rows = cut(rows - row0, row_step);
    const int64_t shard_columns = cut(columns - column0, column_step);
    const Strides strides = random.one_in(2) ? Strides::row_major : Strides::column_major;
    const Input shard(
        dtype, 1, shard_rows, shard_columns, strides,
        [&](int64_t b, int64_t r, int64_t c) { return values(b, row0 + r, column0 + c); });
    options.origin_row = row0, options.origin_column = column0;
    Output part(spec, {}, axis, shard_rows, shard_columns);
    runner->quantize(shard, part, options);

    SCOPED_TRACE(to_string(spec) + " axis " + std::to_string(axis) + " rows " +
                 std::to_string(row0) + "+" + std::to_string(shard_rows) + " columns " +
                 std::to_string(column0) + "+" + std::to_string(shard_columns) + ", seed " +
                 std::to_string(seed()) + " case " + std::to_string(i));
    const int64_t line0 = axis == -1 ? row0 : column0, at0 = axis == -1 ? column0 : row0;
    for (int64_t line = 0; line < part.shape.lines; ++line) {
      for (int64_t b = 0; b < part.shape.blocks; ++b)
        ASSERT_EQ(part.scale(0, line, b), all.scale(0, line0 + line, at0 / spec.block + b));
      for (int64_t p = 0; p < part.shape.padded; ++p)
        ASSERT_EQ(part.code(0, line, p), all.code(0, line0 + line, at0 + p)) << line << " " << p;
    }
  }
}

// Lines are counted through a batch: slice e draws what it would draw e * lines further on.
TEST_P(QuantizeTest, ASliceOfABatchIsItsOwnMatrixWithLinesCountedThrough) {
  for (int i = 0; i < kCases / 4; ++i) {
    const Case c(seed(), 6000000 + i);
    SCOPED_TRACE(c.text);
    Output batch = c.output();
    QuantizeOptions options = c.options();
    runner->quantize(c.x, batch, options);
    for (int64_t b = 0; b < c.batch; ++b) {
      ConstMatrix slice = c.x.view();
      slice.data = static_cast<const uint8_t*>(slice.data) +
                   b * slice.batch_stride * dtype_bytes(slice.dtype);
      slice.batch = 1;
      Output one(c.spec, c.layout, c.axis, c.rows, c.columns);
      options = c.options();
      if (options.amax) options.amax += b;
      int64_t& line = c.axis == -1 ? options.origin_row : options.origin_column;
      const int64_t further = b * one.shape.lines;
      if (c.spec.square && further % c.spec.block != 0) continue;  // no such origin
      line += further;
      runner->quantize(c.x, slice, one, options, 1);
      ASSERT_EQ(std::memcmp(one.codes.data(), batch.codes.data() + b * one.codes.size(),
                            static_cast<size_t>(one.codes.size())),
                0);
      ASSERT_EQ(std::memcmp(one.scales.data(), batch.scales.data() + b * one.scales.size(),
                            static_cast<size_t>(one.scales.size())),
                0);
      ASSERT_EQ(bits_of(one.outer_scale(0)), bits_of(batch.outer_scale(b)));
    }
  }
}

// A transform that is a pass of its own has one kernel, which takes any number of matrices. (Once,
// as emulated threads take their time.)
TEST(Quantize, MoreMatricesThanAGridHasAreTheReference) {
  const int64_t matrices = kSweepStep > 1 ? 3 : (1 << 16) + 3;
  QuantSpec spec = kMxfp8;
  spec.hadamard.dim = 32;
  Random random(6);
  const Input x(DType::bf16, matrices, 1, 32, Strides::row_major,
                [&](int64_t, int64_t, int64_t) { return static_cast<float>(random.normal()); });
  Output want(spec, {}, -1, 1, 32, matrices);
  reference::quantize(x.view(), want.view, {});
  for (const std::string& backend : test_backends()) {
    const std::unique_ptr<Runner> runner = make_runner(backend);
    if (!runner->unavailable().empty()) continue;
    Output got(spec, {}, -1, 1, 32, matrices);
    runner->quantize(x, got, {});
    EXPECT_TRUE(same_operand(got, want)) << backend;
  }
}

#ifndef BLOCKSCALE_EMULATE
TEST(Quantize, EveryInstructionSetGivesTheReference) {
  const std::vector<std::string> names = instruction_sets();
  size_t tested = 0;
  for (int64_t rest = blockscale_hwy::SupportedTargets(); rest; rest &= rest - 1) {
    blockscale_hwy::SetSupportedTargetsForTest(rest & -rest);
    if (instruction_sets().empty()) continue;  // the processor has it, this build does not
    SCOPED_TRACE(instruction_set());
    EXPECT_EQ(instruction_set(), names[tested++]);
    for (int i = 0; i < kCases / 2; ++i) {
      const Case c(8, i);
      SCOPED_TRACE(c.text);
      Output want = c.output(), got = c.output();
      reference::quantize(c.x.view(), want.view, c.options());
      quantize(c.x.view(), got.view, c.options());
      EXPECT_TRUE(same_operand(got, want));
      const auto values = static_cast<size_t>(c.batch * c.rows * c.columns);
      std::vector<float> expected(values), decoded(values);
      const auto matrix = [&](std::vector<float>& v) {
        return Matrix{v.data(),  DType::f32, c.rows,  c.columns,
                      c.columns, 1,          c.batch, c.rows * c.columns};
      };
      reference::dequantize(as_const(want.view), matrix(expected));
      dequantize(as_const(want.view), matrix(decoded));
      EXPECT_TRUE(values == 0 || std::memcmp(decoded.data(), expected.data(), 4 * values) == 0);
    }
  }
  blockscale_hwy::SetSupportedTargetsForTest(0);
  EXPECT_EQ(instruction_sets(), names);
  EXPECT_EQ(tested, names.size());
}

#if defined(__SSE__)
// A caller that flushes subnormals (torch.set_flush_denormal) gets the same bits, and keeps its
// setting.
TEST(Quantize, DoesNotDependOnTheCallersFloatingPointModes) {
  const unsigned saved = _mm_getcsr();
  for (int i = 0; i < 60; ++i) {
    const Case c(7, i);
    SCOPED_TRACE(c.text);
    const Input tiny(c.x.view().dtype, 1, c.rows, c.columns, Strides::row_major,
                     [](int64_t, int64_t r, int64_t col) {
                       return float_of(static_cast<uint32_t>(r * 7919 + col * 104729) & 0x80FFFFFF);
                     });
    Output want(c.spec, c.layout, c.axis, c.rows, c.columns),
        got(c.spec, c.layout, c.axis, c.rows, c.columns);
    QuantizeOptions options = c.options();
    options.amax = nullptr;
    reference::quantize(tiny.view(), want.view, options);
    constexpr unsigned kFlush = 0x8040, kUpward = 0x4000;
    _mm_setcsr(saved | kFlush | kUpward);
    quantize(tiny.view(), got.view, options, i % 2 ? serial_executor() : default_executor());
    const unsigned after = _mm_getcsr();
    _mm_setcsr(saved);
    EXPECT_EQ(after & (kFlush | kUpward), kFlush | kUpward) << "the caller's modes were changed";
    ASSERT_TRUE(same_operand(got, want));
  }
}
#endif
#endif

}  // namespace
}  // namespace blockscale::testing
