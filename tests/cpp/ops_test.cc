// The boundary of the operators: what is refused, in which words, and that nothing is written then.
#include "blockscale/ops.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <locale>
#include <stdexcept>
#include <thread>

#include "buffers.h"
#include "checks.h"
#include "throws.h"

namespace blockscale::testing {
namespace {

// Refusals come before anything is launched: no memory is looked at, and there need be no GPU.
class NoStream final : public Stream {
  void* handle() const override { throw std::logic_error("used"); }
  void* workspace(int64_t) const override { throw std::logic_error("used"); }
};

// A small matrix and its operand, as every refusal starts from.
struct Refused : public ::testing::Test {
  Input x{DType::f32, 1, 40, 48, Strides::row_major, [](int64_t, int64_t r, int64_t c) {
            return static_cast<float>(r - c);
          }};
  Output out{kNvfp4, {}, -1, 40, 48}, fresh{kNvfp4, {}, -1, 40, 48};
  QuantizeOptions options;
  void expect_untouched() { EXPECT_TRUE(same_operand(out, fresh)) << "a refusal wrote something"; }
};

TEST_F(Refused, QuantizeAlongNoSuchAxis) {
  for (int axis : {0, 1, -3, 2}) {
    out.view.axis = axis;
    EXPECT_ERROR(quantize(x.view(), out.view), "axis = " + std::to_string(axis), "-1", "-2");
  }
  expect_untouched();
}

TEST_F(Refused, QuantizeWithANegativeAmaxOrOneThatIsNotUsed) {
  float amax = -1;
  options.amax = &amax;
  EXPECT_ERROR(quantize(x.view(), out.view, options), "amax = -1", "at least 0");
  amax = -HUGE_VALF;
  EXPECT_ERROR(quantize(x.view(), out.view, options), "amax", "at least 0");
  expect_untouched();
  amax = 1;
  Output plain(kMxfp8, {}, -1, 40, 48);
  EXPECT_ERROR(quantize(x.view(), plain.view, options), "amax", "mxfp8", "no outer scale");
}

TEST_F(Refused, QuantizeStochasticallyWithoutRandomBits) {
  out.view.spec = parse_spec("nvfp4[rounding=stochastic]");
  EXPECT_ERROR(quantize(x.view(), out.view), "rng", "stochastic", "pass rng");
  expect_untouched();
}

TEST_F(Refused, QuantizeIntoAnotherShape) {
  for (int64_t* extent : {&out.view.rows, &out.view.columns, &out.view.batch}) {
    ++*extent;
    EXPECT_ERROR(quantize(x.view(), out.view), "out", "[40, 48]");
    --*extent;
  }
  expect_untouched();
}

TEST_F(Refused, QuantizeAtAnOriginWithinABlock) {
  options.origin_column = 8;
  EXPECT_ERROR(quantize(x.view(), out.view, options), "origin", "(0, 8)", "multiples of 16");
  options.origin_column = -16;
  EXPECT_ERROR(quantize(x.view(), out.view, options), "origin", "(0, -16)");
  options = {};
  options.origin_row = -1;
  EXPECT_ERROR(quantize(x.view(), out.view, options), "origin", "(-1, 0)");
  options.origin_row = 3;
  out.view.spec = parse_spec("nvfp4[block=16x16]");
  EXPECT_ERROR(quantize(x.view(), out.view, options), "origin", "(3, 0)");
  options.origin_row = 0, options.origin_column = 16;
  out.view.spec = parse_spec("nvfp4[hadamard=64]");
  EXPECT_ERROR(quantize(x.view(), out.view, options), "origin", "multiples of 64");
  expect_untouched();
}

TEST_F(Refused, CoordinatesBeyond32BitsWhereRandomBitsBelongToThem) {
  out.view.spec = parse_spec("nvfp4[rounding=stochastic]");
  options.rng = Rng{1, 2};
  options.origin_row = (int64_t{1} << 32) - 39;  // the last of 40 rows would be row 2^32
  EXPECT_ERROR(quantize(x.view(), out.view, options), "origin", "2^32");
  options.origin_row = 0, options.origin_column = (int64_t{1} << 32) - 16;
  EXPECT_ERROR(quantize(x.view(), out.view, options), "origin", "2^32");
  expect_untouched();
  options.origin_row = (int64_t{1} << 32) - 40, options.origin_column = (int64_t{1} << 32) - 48;
  quantize(x.view(), out.view, options);
}

TEST_F(Refused, SpecsAndLayoutsThatMeanNothing) {
  out.view.spec.block = 32;
  EXPECT_ERROR(quantize(x.view(), out.view), "block");
  out.view.spec = kNvfp4;
  out.view.layout.scales = Layout::mn_major;
  EXPECT_ERROR(quantize(x.view(), out.view), "mn_major");
  expect_untouched();
}

TEST_F(Refused, NullPointersAndNegativeExtents) {
  ConstMatrix none = x.view();
  none.data = nullptr;
  EXPECT_ERROR(quantize(none, out.view), "x = null");
  ConstMatrix negative = x.view();
  negative.rows = -1;
  EXPECT_ERROR(quantize(negative, out.view), "x", "[-1, 48]");
  negative.rows = 40, negative.batch = -2;
  EXPECT_ERROR(quantize(negative, out.view), "x = -2 matrices of [40, 48]", "at least 0");
  Quantized q = out.view;
  q.codes = nullptr;
  EXPECT_ERROR(quantize(x.view(), q), "null codes");
  q = out.view, q.scales = nullptr;
  EXPECT_ERROR(quantize(x.view(), q), "null scales");
  q = out.view, q.outer = nullptr;
  EXPECT_ERROR(quantize(x.view(), q), "null outer", "outer scale");
  q = out.view, q.batch = -2;
  EXPECT_ERROR(quantize(x.view(), q), "out = -2 matrices of [40, 48]", "at least 0");
  for (const int64_t count : {int64_t{-1}, -(int64_t{1} << 50), INT64_MIN}) {
    const Groups groups{&count, true, count};
    q = out.view, q.groups = groups;
    EXPECT_ERROR(quantize(x.view(), q), "quantize: offsets = a negative count");
    float largest = 0;
    EXPECT_ERROR(amax(x.view(), kNvfp4, -1, &largest, serial_executor(), groups),
                 "amax: offsets = a negative count");
  }
  expect_untouched();
}

TEST_F(Refused, DataOffAMultipleOfItsElementsSize) {
  const auto off = [](auto matrix, DType dtype, int64_t bytes) {
    matrix.dtype = dtype;
    const auto at = reinterpret_cast<uintptr_t>(matrix.data) + static_cast<uintptr_t>(bytes);
    matrix.data = reinterpret_cast<decltype(matrix.data)>(at);
    return matrix;
  };
  for (const DType dtype : {DType::f32, DType::f32_as_bf16}) {
    EXPECT_ERROR(quantize(off(x.view(), dtype, 2), out.view),
                 "quantize: x = data off a multiple of 4 bytes", "its dtype's size", "aligned");
    EXPECT_ERROR(quantize(off(x.view(), dtype, 2), out.view, {}, NoStream()),
                 "quantize: x = data off a multiple of 4 bytes");
  }
  for (const DType dtype : {DType::bf16, DType::f16}) {
    EXPECT_ERROR(quantize(off(x.view(), dtype, 1), out.view),
                 "quantize: x = data off a multiple of 2 bytes");
    quantize(off(x.view(), dtype, 2), out.view);
  }
  float largest = 7;
  EXPECT_ERROR(amax(off(x.view(), DType::f32, 1), kNvfp4, -1, &largest), "amax: x = data off");
  EXPECT_EQ(largest, 7);
  std::vector<float> values(40 * 48 + 1, 7);
  const Matrix to = off(Matrix{values.data(), DType::f32, 40, 48, 48, 1, 1, 0}, DType::f32, 2);
  EXPECT_ERROR(dequantize(as_const(out.view), to), "dequantize: x = data off a multiple of 4");
  const Output a(kMxfp8, {}, -1, 40, 32), b(kMxfp8, {}, -1, 48, 32);
  EXPECT_ERROR(gemm(as_const(a.view), as_const(b.view), to), "gemm: d = data off a multiple of 4");
  EXPECT_EQ(values, std::vector<float>(40 * 48 + 1, 7));
  // Nothing is read where there is nothing.
  ConstMatrix none = off(x.view(), DType::f32, 2);
  none.rows = 0;
  EXPECT_EQ((amax(none, kNvfp4, -1, &largest), largest), 0);
}

// Each product of these extents is 0 or small in 64 bits.
TEST_F(Refused, OperandsWhoseSizesOverflow) {
  const auto expect_refused = [&](int64_t rows, int64_t columns, int64_t batch, int64_t groups) {
    ConstMatrix huge = x.view();
    huge.rows = rows, huge.columns = columns, huge.batch = batch;
    Quantized q = out.view;
    q.spec = kMxfp4, q.layout = parse_layout("mfma_16x16+aiter_scale");
    q.rows = rows, q.columns = columns, q.batch = batch, q.groups.count = groups;
    EXPECT_ERROR(quantize(huge, q), "quantize: out = ", "below 2^60", "parts");
    EXPECT_ERROR(dequantize(as_const(q), Matrix{}), "dequantize: q = ", "below 2^60");
  };
  expect_refused(int64_t{1} << 62, 1, 1, 0);
  expect_refused((int64_t{1} << 61) + 16, 1, 1, 0);
  expect_refused(1, std::numeric_limits<int64_t>::max(), 1, 0);
  expect_refused(int64_t{1} << 40, int64_t{1} << 40, 1, 0);
  expect_refused(16, 32, int64_t{1} << 60, 0);
  expect_refused(16, 32, 1, int64_t{1} << 60);
  expect_refused(int64_t{1} << 62, 1, 0, 0);  // an empty batch of them
  check_sizes("quantize", "x", int64_t{1} << 40, int64_t{1} << 16, 1, 1 << 16);
  expect_untouched();
}

TEST_F(Refused, WhatIsWidenedIsNoMxfp4OrGoesElsewhere) {
  QuantizeOptions o;
  const auto expect_refused = [&](const QuantSpec& spec, const Quantized& to, const char* said) {
    o.widened = spec;
    EXPECT_ERROR(quantize(x.view(), to, o, NoStream()), said);
  };
  Quantized q = out.view;
  q.spec = parse_spec("fp8_1x128[element=e5m2]"), q.outer = nullptr;
  expect_refused(kMxfp4, q, "out = fp8_1x128[element=e5m2], linear; need one matrix in fp8_1x128");
  q.layout.scales = Layout::mn_major;
  expect_refused(kMxfp8, q, "quantize: widened = mxfp8; need mxfp4");
  expect_refused(parse_spec("mxfp4[scale_rule=rceil,rounding=stochastic]"), q,
                 "quantize: rng = none");
  o.origin_column = 16;
  expect_refused(kMxfp4, q, "multiples of 32 along axis -1");
  o.widened = kMxfp4;
  EXPECT_ERROR(quantize(x.view(), q, o), "widened = given; need none: x is in host memory");
  expect_untouched();
}

TEST_F(Refused, OperandsThatKernelsCannotCountOnAGpu) {
  const int64_t limit = int64_t{1} << 31;
  const auto expect_refused = [&](const QuantSpec& spec, const char* layout, int64_t rows,
                                  int64_t columns, const char* need) {
    ConstMatrix huge = x.view();
    huge.rows = rows, huge.columns = columns;
    Quantized q = out.view;
    q.spec = spec, q.layout = parse_layout(layout), q.rows = rows, q.columns = columns;
    EXPECT_ERROR(quantize(huge, q, {}, NoStream()), "quantize: out = [", need, "on a GPU", "parts");
    Quantized to = q;
    to.layout = {};
    EXPECT_ERROR(relayout(as_const(q), to, NoStream()), "relayout: from = [", need);
  };
  expect_refused(kFp8_1x128, "linear", 1, limit - 1, "extents below 2^31, in whole blocks");
  expect_refused(kNvfp4, "nv_128x4", limit / 2 + 1, 1, "at most 2^32 scales");
  expect_refused(kNvfp4, "aiter_scale", limit / 4 + 1, 1, "at most 2^32 scales");
  for (const int64_t columns : {limit / 8, limit / 8 - 32})
    expect_refused(kMxfp4, "mfma_16x16", 1, columns, "less than 2^27 bytes, with padding, in mfma");
  expect_refused(kNvfp4, "mfma_16x16", limit - 1, 16, "extents below 2^31, in whole blocks");
  ConstMatrix split = x.view();
  split.rows = 128, split.columns = 16384;
  Quantized grouped = out.view;
  grouped.rows = 128, grouped.columns = 16384, grouped.groups = {&limit, false, 32766};
  EXPECT_ERROR(quantize(split, grouped, {}, NoStream()), "quantize: offsets = 32766 groups",
               "fewer than 2^22 tiles");
  ConstMatrix wide = x.view();
  wide.columns = limit;
  Quantized q = out.view;
  q.columns = limit;
  EXPECT_ERROR(quantize(wide, q, {}, NoStream()), "quantize: x = [40, 2147483648]", "below 2^31");
  ConstMatrix many = x.view();
  many.batch = limit;
  q = out.view;
  q.batch = limit;
  EXPECT_ERROR(quantize(many, q, {}, NoStream()), "quantize: x = 2147483648 matrices of [40, 48]",
               "fewer than 2^30 tiles of 128 x 128 on a GPU", "parts of the batch");
  many.columns = q.columns = 0;
  EXPECT_ERROR(quantize(many, q, {}, NoStream()), "quantize: x = 2147483648 matrices of [40, 0]",
               "fewer than 2^30 tiles");
  float largest = 0;
  EXPECT_ERROR(amax(split, kNvfp4, -1, &largest, NoStream(), grouped.groups),
               "amax: offsets = 32766 groups", "fewer than 2^22 tiles");
  constexpr int64_t kSide = int64_t{1} << 18;
  q = out.view;
  q.spec = kMxfp4, q.rows = q.columns = kSide;
  float to = 0;
  EXPECT_ERROR(dequantize(as_const(q), {&to, DType::f32, kSide, kSide, kSide, 1, 1, 0}, NoStream()),
               "dequantize: q = [262144, 262144]", "fewer than 2^36 elements", "parts");
  Output down(kNvfp4, {}, -2, 40, 48);
  const Quantization turned[] = {{x.view(), &down.view, nullptr}, {x.view(), nullptr, &out.view}};
  EXPECT_ERROR(quantize_two(turned[0], {}, NoStream()), "quantize: axis = -2", "-1 of row");
  EXPECT_ERROR(quantize_two(turned[1], {}, NoStream()), "quantize: axis = -1", "-2 of column");
  Quantization beside{x.view(), &out.view, nullptr};
  beside.row_values = {&to, DType::f32, 40, 48, 48, 1, 1, 0};
  EXPECT_ERROR(quantize_two(beside, {}, NoStream()), "quantize: row_values = another matrix");
}

TEST_F(Refused, MemoryThatKernelsCannotReadOnAGpu) {
  Quantized q = out.view;
  q.codes += 8;
  EXPECT_ERROR(quantize(x.view(), q, {}, NoStream()), "quantize: out = codes off a multiple of 16",
               "codes at a multiple of 16 on a GPU");
  q = out.view;
  q.spec = kFp8_1x128, q.outer = nullptr, q.scales += 2;
  EXPECT_ERROR(quantize(x.view(), q, {}, NoStream()), "quantize: out = scales off a multiple of 4",
               "FP32 scales at a multiple of 4 on a GPU");
  expect_untouched();
}

TEST(GemmNeeds, DeviceByKind) {
  for (const char* device : {"cpu", "cpu:0"}) EXPECT_EQ(gemm_needs(kMxfp8, device), "") << device;
  for (const char* device : {"cuda", "cuda:1"}) {
    EXPECT_NE(gemm_needs(kMxfp8, device), "") << device;
    EXPECT_EQ(gemm_needs(kFp8_1x128, device), "") << device;
    EXPECT_EQ(gemm_needs(kMxfp4, device), "") << device;
  }
  const auto needs = [](const char* spec) { return gemm_needs(parse_spec(spec), "cuda"); };
  EXPECT_EQ(needs("fp8_128x128[element=e5m2]"), "");
  EXPECT_NE(needs("fp8_1x128[element=e4m3fnuz]").find("e4m3fn or e5m2"), std::string::npos);
  EXPECT_NE(needs("fp8_1x128[hadamard=16]").find("no Hadamard"), std::string::npos);
  EXPECT_EQ(gemm_needs(kFp8_1x128, "tpu"), "a device of kind cpu or cuda");
}

// A program's locale may group digits.
TEST_F(Refused, InPlainNumbersWhateverTheLocale) {
  struct Grouped : std::numpunct<char> {
    std::string do_grouping() const override { return "\3"; }
    char do_thousands_sep() const override { return '.'; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Grouped));
  EXPECT_ERROR(quantize(x.view(),
                        [&] {
                          Quantized q = out.view;
                          q.axis = 12345;
                          return q;
                        }()),
               "quantize: axis = 12345; need");
  std::locale::global(before);
}

TEST_F(Refused, DualTakesRowsThenColumns) {
  Output columns(kNvfp4, {}, -2, 40, 48);
  EXPECT_ERROR(quantize_dual(x.view(), columns.view, out.view), "axis", "-1 for the row operand");
  EXPECT_ERROR(quantize_dual(x.view(), out.view, out.view), "axis");
  columns.view.spec = parse_spec("nvfp4[rounding=stochastic]");
  EXPECT_ERROR(quantize_dual(x.view(), out.view, columns.view), "rng");
  expect_untouched();  // the row operand neither
}

TEST_F(Refused, AmaxDequantizeRelayout) {
  float amax_out = 5;
  EXPECT_ERROR(amax(x.view(), kNvfp4, 0, &amax_out), "amax: axis = 0");
  EXPECT_EQ(amax_out, 5);
  ConstMatrix none = x.view();
  none.rows = 0, none.columns = INT64_MAX;
  EXPECT_ERROR(amax(none, kNvfp4, -1, &amax_out), "amax: x = [0, 9223372036854775807]");
  std::vector<float> values(40 * 48, 7);
  Matrix to{values.data(), DType::f32, 48, 40, 40, 1, 1, 0};
  EXPECT_ERROR(dequantize(as_const(out.view), to), "dequantize: x = [48, 40]", "[40, 48]");
  EXPECT_EQ(values, std::vector<float>(40 * 48, 7));
  Output other(kAmdfp4, {}, -1, 40, 48), column(kNvfp4, {}, -2, 40, 48);
  EXPECT_ERROR(relayout(as_const(out.view), other.view), "relayout", "amdfp4", "nvfp4");
  EXPECT_ERROR(relayout(as_const(out.view), column.view), "relayout", "axis -2", "axis -1");
}

TEST_F(Refused, ResultsWhoseElementsShareAPlace) {
  std::vector<float> values(2 * 40 * 48, 7);
  const auto with = [&](int64_t row, int64_t column, int64_t batch) {
    const Output q(kMxfp8, {}, -1, 40, 48, 2);
    dequantize(as_const(q.view), {values.data(), DType::f32, 40, 48, row, column, 2, batch});
  };
  EXPECT_ERROR(with(0, 1, 1920), "dequantize: x.row_stride = 0", "keeps elements apart", "columns");
  EXPECT_ERROR(with(48, 0, 1920), "dequantize: x.column_stride = 0");
  EXPECT_ERROR(with(48, 1, 0), "dequantize: x.batch_stride = 0");
  const Output a(kMxfp8, {}, -1, 40, 32), b(kMxfp8, {}, -1, 48, 32);
  EXPECT_ERROR(gemm(as_const(a.view), as_const(b.view), {values.data(), DType::f32, 40, 48}),
               "gemm: d.row_stride = 0");
  EXPECT_EQ(values, std::vector<float>(2 * 40 * 48, 7));
  with(48, 1, 1920);
  const Output one(kMxfp8, {}, -1, 1, 1), none(kMxfp8, {}, -1, 40, 0);
  dequantize(as_const(one.view), {values.data(), DType::f32, 1, 1, 0, 0});
  dequantize(as_const(none.view), {values.data(), DType::f32, 40, 0});
}

TEST_F(Refused, OperandsThatWouldBeMovedOverThemselves) {
  Quantized same = out.view;
  same.layout.scales = Layout::nv_128x4;
  EXPECT_ERROR(relayout(as_const(out.view), same), "relayout: to = the memory of from");
  Output square(kMxfp8, {}, -1, 64, 64);
  square.view.spec.square = true;
  Quantized turned = square.view;
  turned.axis = -2;
  EXPECT_ERROR(transpose(as_const(square.view), turned), "transpose: to = the memory of from");
  expect_untouched();
}

TEST_F(Refused, NumbersThatAreNoEnumerators) {
  ConstMatrix odd = x.view();
  odd.dtype = static_cast<DType>(99);
  EXPECT_ERROR(quantize(odd, out.view), "quantize: x = dtype 99");
  for (const int number : {kLayoutCount, 99}) {
    out.view.layout = {Layout::linear, static_cast<Layout>(number)};
    EXPECT_ERROR(quantize(x.view(), out.view), "layout: enumerator = " + std::to_string(number));
    out.view.layout = {static_cast<Layout>(number), Layout::linear};
    EXPECT_ERROR(quantize(x.view(), out.view), "layout: enumerator = " + std::to_string(number));
  }
  EXPECT_ERROR(amax(x.view(), kNvfp4, -1, nullptr), "amax: out = null");
  expect_untouched();
}

TEST(RefusedGemm, OperandsThatCannotMultiply) {
  std::vector<float> values(40 * 30, 7);
  Matrix d{values.data(), DType::f32, 40, 30, 30, 1, 1, 0};
  const auto with = [&](const char* a_spec, const char* b_spec, int64_t ka, int64_t kb, int64_t n,
                        const GemmOptions& options = {}) {
    Output a(parse_spec(a_spec), {}, -1, 40, ka), b(parse_spec(b_spec), {}, -2, kb, n);
    gemm(as_const(a.view), as_const(b.view), d, options);
  };
  EXPECT_ERROR(with("nvfp4", "nvfp4", 64, 65, 30), "gemm: b", "contraction length of a, 64");
  EXPECT_ERROR(with("nvfp4[hadamard=16]", "nvfp4", 64, 64, 30), "Hadamard", "or neither");
  EXPECT_ERROR(with("nvfp4[hadamard=16]", "nvfp4[hadamard=16:0x1]", 64, 64, 30), "Hadamard");
  EXPECT_ERROR(with("nvfp4[hadamard=16]", "nvfp4[hadamard=32]", 64, 64, 30), "Hadamard");
  EXPECT_ERROR(with("nvfp4", "mxfp4", 64, 64, 30), "blocks of 16");
  EXPECT_ERROR(with("nvfp4", "nvfp4", 64, 64, 31), "gemm: d = [40, 30]", "[40, 31]");
  d.dtype = DType::f16;
  EXPECT_ERROR(with("nvfp4", "nvfp4", 64, 64, 30), "float16", "float32 or bfloat16");
  d.dtype = DType::bf16;
  EXPECT_ERROR(with("nvfp4", "nvfp4", 64, 64, 30, {.accumulate = true}), "bfloat16", "accumulate");
  d.dtype = DType::f32_as_bf16;
  EXPECT_ERROR(with("nvfp4", "nvfp4", 64, 64, 30), "float32 read as bfloat16", "that is written");
  const Output q(parse_spec("nvfp4"), {}, -1, 40, 30);
  EXPECT_ERROR(dequantize(as_const(q.view), d), "x = float32 read as bfloat16");
  EXPECT_EQ(values, std::vector<float>(40 * 30, 7)) << "a refusal wrote something";
}

TEST(Explain, GivesTheWordsOfTheErrorOrNothing) {
  EXPECT_EQ(explain("nvfp4", "linear", "cpu"), "");
  EXPECT_EQ(explain("mxfp4[block=32x32]", "mfma_16x16+aiter_scale", "cpu"), "");
  const auto says = [](const std::string& text, std::initializer_list<std::string> parts) {
    for (const std::string& part : parts)
      EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
  };
  says(explain("nvpf4", "linear", "cpu"), {"did you mean 'nvfp4'?"});
  says(explain("nvfp4", "mn_major", "cpu"), {"mn_major", "linear, nv_128x4, aiter_scale for"});
  says(explain("nvfp4", "linear", "tpu"), {"'tpu'", "cpu"});
  for (const Backend& backend : backends()) {
    EXPECT_EQ(backend.available, backend.reason.empty()) << backend.name;
    EXPECT_EQ(explain("nvfp4", "linear", backend.name), backend.reason);
    EXPECT_EQ(explain("nvfp4", "linear", backend.name + ":0"), backend.reason);
  }
}

TEST(InstructionSets, TheOneInUseIsTheBestThereIs) {
  ASSERT_FALSE(instruction_sets().empty());
  EXPECT_EQ(instruction_set(), instruction_sets().front());
}

// ---- executors ----

void expect_covers(const Executor& executor, int64_t count) {
  std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
  executor.parallel_for(count, [&](int64_t begin, int64_t end) {
    ASSERT_LE(0, begin);
    ASSERT_LT(begin, end);
    ASSERT_LE(end, count);
    for (int64_t i = begin; i < end; ++i) ++seen[i];
  });
  for (const auto& times : seen) ASSERT_EQ(times, 1);
}

TEST(Executors, EveryIndexIsVisitedOnce) {
  for (const Executor* executor : {&serial_executor(), &default_executor()})
    for (int64_t count : {0, 1, 2, 3, 7, 64, 1001}) expect_covers(*executor, count);
}

TEST(Executors, TheDefaultOneServesManyCallersAtOnce) {
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t)
    callers.emplace_back([] {
      for (int i = 0; i < 200; ++i) expect_covers(default_executor(), 50 + i);
    });
  for (std::thread& caller : callers) caller.join();
}

TEST(Executors, AnExceptionOfABodyReachesTheCaller) {
  for (const Executor* executor : {&serial_executor(), &default_executor()}) {
    EXPECT_THROW(executor->parallel_for(100,
                                        [](int64_t, int64_t end) {
                                          if (end == 100)
                                            throw std::runtime_error("the last piece");
                                        }),
                 std::runtime_error);
    expect_covers(*executor, 10);  // and it works afterwards
  }
}

// Its threads, which all get a piece here, are in use then.
TEST(Executors, TheDefaultOneServesItsOwnBodies) {
  default_executor().parallel_for(64, [](int64_t begin, int64_t end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    for (int64_t i = begin; i < end; ++i) expect_covers(default_executor(), 10 + i);
  });
}

// Which has none of the pool's threads.
TEST(Executors, TheDefaultOneServesAForkedProcess) {
  expect_covers(default_executor(), 100);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // instead of waiting for threads for ever
    std::atomic<int64_t> sum{0};
    default_executor().parallel_for(100, [&](int64_t begin, int64_t end) { sum += end - begin; });
    _exit(sum == 100 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace blockscale::testing
