// What the checks at the boundary let through and what not: the first extents that are refused, and
// each part of a condition by itself. Nothing is read, written or launched.
#include "checks.h"

#include <gtest/gtest.h>

#include <cmath>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "gpu/gpu.h"
#include "testing.h"
#include "throws.h"

namespace blockscale::testing {
namespace {

constexpr int64_t kLimit = int64_t{1} << 31;

alignas(16) uint8_t memory[64];
float floats[4];

// One matrix has no stride to the next, whose product may be no number of 64 bits.
Matrix written(int64_t rows, int64_t columns, int64_t batch = 1) {
  return {memory, DType::f32, rows, columns, columns, 1, batch, batch == 1 ? 0 : rows * columns};
}
ConstMatrix matrix(int64_t rows, int64_t columns, int64_t batch = 1) {
  return as_const(written(rows, columns, batch));
}
Quantized operand(const char* spec, int64_t rows, int64_t columns, int axis = -1,
                  int64_t batch = 1) {
  return {memory, memory + 16, floats, parse_spec(spec), {}, axis, rows, columns, batch};
}
void quantizes(const ConstMatrix& x, const Quantized& q, const QuantizeOptions& o = {},
               Memory where = Memory::device) {
  check_quantize("quantize", x, q, o, where);
}

TEST(Checks, TilesOfABatchOnAGpu) {
  const int64_t most = kLimit / 2 - 1;
  quantizes(matrix(40, 48, most), operand("mxfp8", 40, 48, -1, most));
  EXPECT_ERROR(quantizes(matrix(40, 48, most + 1), operand("mxfp8", 40, 48, -1, most + 1)),
               "x = 1073741824 matrices of [40, 48]", "fewer than 2^30 tiles");
  for (const auto& [rows, columns] : {std::pair{129, 48}, std::pair{40, 129}}) {  // two each
    const int64_t half = kLimit / 4;
    quantizes(matrix(rows, columns, half - 1), operand("mxfp8", rows, columns, -1, half - 1));
    EXPECT_ERROR(quantizes(matrix(rows, columns, half), operand("mxfp8", rows, columns, -1, half)),
                 "fewer than 2^30 tiles");
  }
  // Operators without x count those of their operands.
  const Quantized from = operand("mxfp8", 40, 48, -1, most + 1);
  Quantized to = from;
  to.codes += 32, to.scales += 32;
  EXPECT_ERROR(check_relayout(as_const(from), to, Memory::device), "relayout: from",
               "fewer than 2^30 tiles");
  // None of them is too large, whatever its matrices would be.
  quantizes(matrix(int64_t{1} << 23, int64_t{1} << 22, 0),
            operand("fp8_128x128", int64_t{1} << 23, int64_t{1} << 22, -1, 0));
}

TEST(Checks, TilesOfGroupsOnAGpu) {
  Quantized q = operand("mxfp8", 128, 16384);
  q.groups = {floats, true, 32765};
  quantizes(matrix(128, 16384), q);
  ++q.groups.count;
  EXPECT_ERROR(quantizes(matrix(128, 16384), q), "32766 groups", "fewer than 2^22 tiles");
  // None are counted in host memory.
  const int64_t end = 0, rows = int64_t{1} << 40;
  check_amax_of(matrix(rows, 1), kMxfp8, -1, floats, {&end, true, 1}, Memory::host);
}

// With 4096 more rows and columns, for padding, and 4 bytes for each element.
TEST(Checks, SizesBelow2To60) {
  const int64_t most = (int64_t{1} << 30) - 4096;
  check_sizes("quantize", "x", most - 1, most, 1, 0);
  check_sizes("quantize", "x", most, most - 1, 1, 0);
  EXPECT_ERROR(check_sizes("quantize", "x", most, most, 1, 0), "below 2^60");
}

TEST(Checks, ExtentsOnAGpu) {
  const QuantSpec plain = kNvfp4, wide = parse_spec("nvfp4[hadamard=16]");
  const auto amax_of = [](int64_t rows, int64_t columns, const QuantSpec& spec, int axis) {
    check_amax_of(matrix(rows, columns), spec, axis, floats, {}, Memory::device);
  };
  for (const auto& [rows, columns] : {std::pair{kLimit, int64_t{1}}, std::pair{int64_t{1}, kLimit}})
    EXPECT_ERROR(amax_of(rows, columns, plain, -1), "amax: x = [", "extents below 2^31 on a GPU");
  amax_of(kLimit - 1, 1, plain, -1);
  // A transform fills up its own axis.
  EXPECT_ERROR(amax_of(1, kLimit - 1, wide, -1), "in whole transforms");
  EXPECT_ERROR(amax_of(kLimit - 1, 1, wide, -2), "in whole transforms");
  amax_of(1, kLimit - 1, wide, -2);
  check_amax_of(matrix(1, kLimit - 1), wide, -1, floats, {}, Memory::host);
  // Rows of scales may be padded further than lines of codes.
  Quantized q = operand("fp8_1x128", kLimit - 1, 1);
  q.layout.scales = Layout::mn_major;
  EXPECT_ERROR(quantizes(matrix(kLimit - 1, 1), q), "out", "extents below 2^31, in whole blocks");
  q = operand("nvfp4", kLimit / 2, 1);
  q.layout.scales = Layout::nv_128x4;
  quantizes(matrix(kLimit / 2, 1), q);                                    // 2^32 scales
  quantizes(matrix(1, kLimit - 128), operand("mxfp8", 1, kLimit - 128));  // only tiles are shorter
  // Pieces of 4 rows by 8 columns.
  check_dequantize(as_const(operand("mxfp4", kLimit - 1, 24)), written(kLimit - 1, 24),
                   Memory::device);
  EXPECT_ERROR(check_dequantize(as_const(operand("mxfp4", kLimit - 1, 25)), written(kLimit - 1, 25),
                                Memory::device),
               "fewer than 2^36 elements");
  check_dequantize(as_const(operand("mxfp4", kLimit - 1, 25)), written(kLimit - 1, 25),
                   Memory::host);
  // As those check that call kernels without an operator.
  check_device_operand("gemm", "q", as_const(operand("mxfp4", kLimit - 1, 25)));
  EXPECT_ERROR(check_device_operand("gemm", "q", as_const(operand("mxfp4", kLimit, 1))),
               "gemm: q = [2147483648, 1]", "extents below 2^31");
}

TEST(Checks, SpecsOfAnAmax) {
  QuantSpec spec = kNvfp4;
  spec.block = 32;
  EXPECT_ERROR(check_amax_of(matrix(40, 48), spec, -1, floats, {}, Memory::host), "blocks of 16");
}

// Only a number below 0 is no largest magnitude: NaN is data, and -0 is 0.
TEST(Checks, AmaxesThatAreGiven) {
  float amax = -1;
  QuantizeOptions o;
  o.amax = &amax;
  const auto given = [&](float value, Memory where) {
    amax = value;
    quantizes(matrix(40, 48), operand("nvfp4", 40, 48), o, where);
  };
  for (const float fine : {0.0f, -0.0f, 1.0f, HUGE_VALF, float_of(kNanBits), float_of(0xFFC00000)})
    given(fine, Memory::host);
  given(-1, Memory::device);  // which is not read
  const float tiny = float_of(0x80000001);
  EXPECT_ERROR(given(tiny, Memory::host), "quantize: amax = ", "at least 0");
#if defined(__SSE__)
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);  // to the processor it is 0
  EXPECT_ERROR(given(tiny, Memory::host), "quantize: amax = ", "at least 0");
  _mm_setcsr(saved);
#endif
}

// Scales of a byte may begin anywhere.
TEST(Checks, ScalesOfAByteOnAGpu) {
  Quantized q = operand("mxfp8", 40, 48);
  ++q.scales;
  quantizes(matrix(40, 48), q);
}

TEST(Checks, EveryExtentIsAtLeast0) {
  for (const auto& [rows, columns, batch] :
       {std::tuple{-1, 48, 1}, std::tuple{40, -1, 1}, std::tuple{40, 48, -1}}) {
    EXPECT_ERROR(quantizes(matrix(rows, columns, batch), operand("mxfp8", 40, 48)),
                 "x = ", "at least 0");
    EXPECT_ERROR(check_dequantize(as_const(operand("mxfp8", rows, columns, -1, batch)),
                                  written(40, 48), Memory::host),
                 "q = ", "at least 0");
  }
}

TEST(Checks, EmptyOperandsNeedNoMemory) {
  for (const auto& [rows, columns, batch] :
       {std::tuple{0, 48, 1}, std::tuple{40, 0, 1}, std::tuple{40, 48, 0}}) {
    ConstMatrix x = matrix(rows, columns, batch);
    Quantized q = operand("nvfp4", rows, columns, -1, batch);
    x.data = nullptr, q.codes = q.scales = nullptr;
    if (batch == 0) q.outer = nullptr;  // an empty matrix has one
    for (const Memory where : {Memory::host, Memory::device}) {
      quantizes(x, q, {}, where);
      check_relayout(as_const(q), q, where);
      check_dequantize(as_const(q), {nullptr, DType::f32, rows, columns, 0, 0, batch}, where);
    }
  }
  const Groups none{floats, true, 0};
  check_amax_of(matrix(40, 48, 0), kNvfp4, -1, nullptr, none, Memory::host);
  EXPECT_ERROR(check_amax_of(matrix(0, 48), kNvfp4, -1, nullptr, {floats, true, 2}, Memory::device),
               "amax: out = null");
  EXPECT_ERROR(quantizes(matrix(40, 48),
                         [] {
                           Quantized q = operand("nvfp4", 40, 48);
                           q.groups = {nullptr, true, 2};
                           return q;
                         }()),
               "quantize: offsets = null");
}

TEST(Checks, MemoryThatOneOperandSharesWithTheOther) {
  const Quantized from = operand("mxfp8", 40, 48);
  Quantized codes = from, scales = from;
  codes.scales += 32, scales.codes += 32;
  for (const Quantized& to : {codes, scales})
    EXPECT_ERROR(check_relayout(as_const(from), to, Memory::host), "to = the memory of from");
}

TEST(Checks, OriginsOfRandomBits) {
  const int64_t limit = int64_t{1} << 32;
  QuantizeOptions o;
  o.origin_row = limit;  // nobody counts without random bits
  quantizes(matrix(40, 48), operand("nvfp4", 40, 48), o);
  o.rng = Rng{};
  const Quantized two = operand("nvfp4[rounding=stochastic]", 40, 48, -1, 2);
  o.origin_row = limit - 80;
  quantizes(matrix(40, 48, 2), two, o);
  o.origin_row = limit - 79;  // lines are counted through the batch
  EXPECT_ERROR(quantizes(matrix(40, 48, 2), two, o), "origin", "below 2^32");
  const Quantized down = operand("nvfp4[rounding=stochastic]", 48, 40, -2, 2);
  o.origin_row = 0, o.origin_column = limit - 80;
  quantizes(matrix(48, 40, 2), down, o);
  o.origin_column = limit - 79;
  EXPECT_ERROR(quantizes(matrix(48, 40, 2), down, o), "origin", "below 2^32");
  o.origin_column = -1;
  EXPECT_ERROR(quantizes(matrix(48, 40, 2), down, o), "origin = (0, -1)");
}

TEST(Checks, KeysOnTheDevice) {
  const int64_t key = 0;
  const Quantized q = operand("nvfp4[rounding=stochastic]", 40, 48);
  QuantizeOptions seed, offset, both;
  seed.device_seed = both.device_seed = &key;
  offset.device_offset = both.device_offset = &key;
  for (const QuantizeOptions& one : {seed, offset}) {
    EXPECT_ERROR(quantizes(matrix(40, 48), q, one), "one without the other", "both or neither");
    EXPECT_ERROR(quantizes(matrix(40, 48), q, one, Memory::host), "x is in host memory");
  }
  EXPECT_ERROR(quantizes(matrix(40, 48), q, both, Memory::host), "x is in host memory");
  quantizes(matrix(40, 48), q, both);
}

TEST(Checks, WhatIsWidened) {
  Quantized q = operand("fp8_1x128[element=e5m2]", 40, 64);
  q.layout.scales = Layout::mn_major;
  QuantizeOptions o;
  o.widened = kMxfp4;
  quantizes(matrix(40, 64), q, o);
  Quantized other = q;
  other.spec.element = Format::e4m3fn;
  EXPECT_ERROR(quantizes(matrix(40, 64), other, o), "out = fp8_1x128, mn_major", "one matrix");
  // Origins are those of what is widened.
  o.widened->square = true, o.origin_row = 32;
  quantizes(matrix(40, 64), q, o);
  o.origin_row = 16;
  EXPECT_ERROR(quantizes(matrix(40, 64), q, o), "origin = (16, 0)", "of 32 across it");
  o.widened = parse_spec("mxfp4[scale_rule=rceil,rounding=stochastic]"), o.rng = Rng{};
  o.origin_row = int64_t{1} << 32;
  EXPECT_ERROR(quantizes(matrix(40, 64), q, o), "origin", "below 2^32");
  o = {}, o.widened = kMxfp4;
  other = q, other.batch = 2;
  EXPECT_ERROR(quantizes(matrix(40, 64, 2), other, o), "out = fp8_1x128", "one matrix");
  constexpr int64_t kMost = (int64_t{1} << 31) - 2048;
  const auto of_columns = [](int64_t columns) {
    Quantized wide = operand("fp8_1x128[element=e5m2]", 4, columns);
    wide.layout.scales = Layout::mn_major;
    return wide;
  };
  quantizes(matrix(4, kMost), of_columns(kMost), o);
  EXPECT_ERROR(quantizes(matrix(4, kMost + 1), of_columns(kMost + 1), o),
               "widened = 2147481728 codes in a line", "at most " + std::to_string(kMost));
  q.groups = {memory, true, 2};
  quantizes(matrix(40, 64), q, o);
  o.widened->square = true;
  EXPECT_ERROR(quantizes(matrix(40, 64), q, o), "widened = mxfp4[block=32x32]", "one line");
}

TEST(Checks, BothOperandsOfADualPass) {
  const Quantized row = operand("nvfp4", 40, 48), column = operand("nvfp4", 40, 48, -2);
  const auto dual = [](const Quantized& a, const Quantized& b) {
    check_dual(matrix(40, 48), a, b, {}, {}, Memory::host);
  };
  dual(row, column);
  EXPECT_ERROR(dual(column, column), "axis = -2 and -2");
  EXPECT_ERROR(dual(row, row), "axis = -1 and -1");
  EXPECT_ERROR(dual(operand("nvfp4[rounding=stochastic]", 40, 48), column), "rng = none");
  EXPECT_ERROR(dual(row, operand("nvfp4[rounding=stochastic]", 40, 48, -2)), "rng = none");
}

// Each difference between the groups of two operands by itself. The ends are all in `floats`.
TEST(Checks, GroupsThatAreNotTheSame) {
  Quantized from = operand("mxfp8", 40, 48), to = from;
  to.codes += 32, to.scales += 32;
  from.groups = to.groups = {floats, true, 2};
  check_relayout(as_const(from), to, Memory::device);
  for (const Groups& other :
       {Groups{floats + 2, true, 2}, Groups{floats, false, 2}, Groups{floats, true, 1}}) {
    to.groups = other;
    EXPECT_ERROR(check_relayout(as_const(from), to, Memory::device), "two different ones");
  }
}

TEST(Checks, WhatARelayoutOrTransposeKeeps) {
  const Quantized from = operand("mxfp8[block=32x32]", 64, 96);
  Quantized to = from;
  to.codes += 32, to.scales += 32;
  const auto with = [&](auto change) {
    Quantized other = to;
    change(other);
    return other;
  };
  Quantized taller = with([](Quantized& q) { q.rows = 96; });
  EXPECT_ERROR(check_relayout(as_const(from), taller, Memory::host), "the operand of from");
  const Quantized nowhere = with([](Quantized& q) { q.codes = nullptr; });
  EXPECT_ERROR(check_relayout(as_const(from), nowhere, Memory::host), "to = null codes");
  const auto transposes = [](const Quantized& a, const Quantized& b) {
    check_transpose(as_const(a), b, Memory::device);
  };
  to.axis = -2;
  transposes(from, to);
  EXPECT_ERROR(transposes(from, with([](Quantized& q) { q.spec.rule = ScaleRule::ceil; })),
               "transpose: to = ", "the operand of from along its other axis");
  EXPECT_ERROR(transposes(from, with([](Quantized& q) { q.rows = 96; })), "transpose: to = ");
  const Groups groups{floats, true, 2};
  EXPECT_ERROR(transposes(from, with([&](Quantized& q) { q.groups = groups; })),
               "transpose: to = ");
  Quantized grouped = from, rotated = from;
  grouped.groups = groups, rotated.spec.hadamard = {16, 0, 0};
  EXPECT_ERROR(transposes(grouped, to), "transpose: from = ", "in groups");
  EXPECT_ERROR(transposes(rotated, to), "transpose: from = ", "without a transform");
  EXPECT_ERROR(transposes(with([](Quantized& q) { q.codes = nullptr; }), to), "from = null codes");
  EXPECT_ERROR(transposes(from, with([](Quantized& q) { q.codes = nullptr; })), "to = null codes");
  Quantized fp4 = from, turned = to;
  fp4.spec = turned.spec = parse_spec("mxfp4[block=32x32]");
  transposes(fp4, turned);
  for (Quantized* tiled : {&fp4, &turned}) {
    tiled->layout.codes = Layout::mfma_16x16;
    EXPECT_ERROR(transposes(fp4, turned), "layout = mfma_16x16", "linear codes");
    tiled->layout = {};
  }
}

void multiplies(const Quantized& a, const Quantized& b, const Matrix& d, const GemmOptions& o = {},
                Memory where = Memory::device) {
  check_gemm(as_const(a), as_const(b), d, o, where);
}

TEST(Checks, ExtentsOfAProduct) {
  const Quantized a = operand("fp8_1x128", 40, 64), b = operand("fp8_128x128", 48, 64);
  multiplies(a, b, written(40, 48));
  EXPECT_ERROR(multiplies(a, b, written(41, 48)), "d = [41, 48]", "extents [40, 48]");
  EXPECT_ERROR(multiplies(a, b, written(40, 49)), "d = [40, 49]", "extents [40, 48]");
  EXPECT_ERROR(multiplies(operand("fp8_1x128", 40, 64, -1, 2), b, written(40, 48)), "a.batch = 2");
  Quantized nowhere = b;
  nowhere.codes = nullptr;
  EXPECT_ERROR(multiplies(a, nowhere, written(40, 48)), "gemm: b = null codes");
  // A transform fills both of these up to 64.
  const char* wide = "nvfp4[hadamard=64]";
  EXPECT_ERROR(
      multiplies(operand(wide, 40, 60), operand(wide, 48, 64), written(40, 48), {}, Memory::host),
      "gemm: b", "contraction length of a, 60");
  EXPECT_ERROR(
      multiplies(operand(wide, 40, 64), operand(wide, 48, 60), written(40, 48), {}, Memory::host),
      "gemm: b", "contraction length of a, 64");
  const int64_t large = int64_t{1} << 40;
  EXPECT_ERROR(multiplies(operand("mxfp8", large, 1), operand("mxfp8", large, 1),
                          written(large, large), {}, Memory::host),
               "gemm: d = [1099511627776, 1099511627776]", "below 2^60");
  // Groups along the contraction axis are the same on both sides.
  Quantized ga = operand("fp8_1x128", 64, 40, -2), gb = operand("fp8_1x128", 64, 48, -2);
  ga.groups = gb.groups = {floats, true, 2};
  multiplies(ga, gb, written(40, 48, 2));
  gb.groups.offsets = floats + 2;
  EXPECT_ERROR(multiplies(ga, gb, written(40, 48, 2)), "gemm: offsets = two different ones");
}

TEST(Checks, WhereTheArgumentsOfAProductLie) {
  const Quantized a = operand("fp8_1x128", 40, 64), b = operand("fp8_128x128", 48, 64);
  GemmOptions alpha, bias;
  alpha.device_alpha = floats;
  EXPECT_ERROR(multiplies(a, b, written(40, 48), alpha, Memory::host), "device_alpha = given");
  bias.bias_dtype = DType::bf16;
  multiplies(a, b, written(40, 48), bias, Memory::host);  // there is none
  bias.bias = floats;
  multiplies(a, b, written(40, 48), bias);
  EXPECT_ERROR(multiplies(a, b, written(40, 48), bias, Memory::host), "bias_dtype", "float32");
  bias.bias_dtype = DType::f32_as_bf16;
  EXPECT_ERROR(multiplies(a, b, written(40, 48), bias), "bias_dtype = float32 read as bfloat16");
  bias.bias = nullptr;
  multiplies(a, b, written(40, 48), bias);
}

TEST(Checks, HowAProductOnAGpuIsStored) {
  const Quantized a = operand("fp8_1x128", 40, 64), b = operand("fp8_1x128", 48, 64);
  Matrix d = written(40, 48);
  d.column_stride = 2, d.row_stride = 96;
  EXPECT_ERROR(multiplies(a, b, d), "d.column_stride = 2", "1 on a GPU");
  multiplies(a, b, d, {}, Memory::host);
  d = written(40, 1), d.column_stride = 7;
  multiplies(a, operand("fp8_1x128", 1, 64), d);  // no second column
  d = written(40, 48), d.batch_stride = 7;
  multiplies(a, b, d);  // no second matrix
  Quantized ga = operand("fp8_1x128", 64, 40, -2), gb = operand("fp8_1x128", 64, 48, -2);
  ga.groups = gb.groups = {floats, true, 2};
  for (const int64_t more : {48, -48}) {
    d = written(40, 48, 2), d.batch_stride += more;
    EXPECT_ERROR(multiplies(ga, gb, d), "d.batch_stride = ", "1920 on a GPU");
  }
  d.row_stride = 56, d.batch_stride = 40 * 56;
  multiplies(ga, gb, d);
  // Codes of MXFP4 are moved on the way to FP8, those of other operands are not.
  Quantized tiled = operand("mxfp4", 40, 64);
  tiled.layout.codes = Layout::mfma_16x16;
  multiplies(tiled, operand("mxfp4", 48, 64), written(40, 48));
}

// Which quantizers leave decoded rows beside the codes, and where.
TEST(Checks, ValuesBesideCodes) {
  const Quantized row = operand("nvfp4", 40, 48);
  const Matrix values{memory, DType::bf16, 40, 48, 48, 1, 1, 0};
  const Quantization good{matrix(40, 48), &row, nullptr, {}, {}, values};
  check_values(good);
  check_values({matrix(40, 48, 2), nullptr, nullptr});  // there are none
  Quantized grouped = row, rotated = row;
  grouped.groups = {floats, true, 2}, rotated.spec.hadamard = {16, 0, 0};
  const auto refused = [&](const char* what, auto change) {
    Quantization q = good;
    change(q);
    EXPECT_ERROR(check_values(q), "quantize: row_values = ", what);
  };
  refused("given", [](Quantization& q) { q.row = nullptr; });
  refused("given", [&](Quantization& q) { q.row = &grouped; });
  refused("given", [&](Quantization& q) { q.row = &rotated; });
  refused("given", [](Quantization& q) { q.x.batch = 2; });
  refused("given", [](Quantization& q) { q.row_values.batch = 2; });
  refused("another", [](Quantization& q) { q.row_values.dtype = DType::f16; });
  refused("another", [](Quantization& q) { q.row_values.rows = 41; });
  refused("another", [](Quantization& q) { q.row_values.columns = 47; });
  refused("another", [](Quantization& q) { q.row_values.column_stride = 2; });
  refused("another", [](Quantization& q) { q.row_values.row_stride = 52; });
  refused("another", [](Quantization& q) { q.row_values.row_stride = 40; });
  refused("another", [](Quantization& q) { q.row_values.data = memory + 8; });
}

}  // namespace
}  // namespace blockscale::testing
