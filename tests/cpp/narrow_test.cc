// Elements that the CPU backend reads, finds from BF16 bits, or decodes to them, by ways of their
// own: every magnitude around their thresholds, for scales of all sizes, against the scalar oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "cases.h"

namespace blockscale::testing {
namespace {

constexpr int kBlock = 32;  // two blocks of 16
constexpr int64_t kRows = 24 * kBlock, kColumns = 256;

// Bits of the largest magnitude of column `c`: every mantissa, in two binades.
uint32_t largest_bits(uint32_t exponent, int64_t c) {
  return std::min<uint32_t>(exponent * 128 + static_cast<uint32_t>(c), 0x7F7F);
}

// Block b of column c holds its largest magnitude in both halves and 30 of the 720 below it.
float value(uint32_t exponent, int64_t r, int64_t c) {
  const uint32_t largest = largest_bits(exponent, c);
  const auto i = static_cast<uint32_t>(r % 16), half = static_cast<uint32_t>(r / 16);
  const uint32_t bits = i == 0 ? largest : largest - std::min(largest, 15 * half + i - 1);
  return float_of((bits | (r * 7 + c) % 3 / 2 << 15) << 16);
}

void expect_reference(const QuantSpec& spec, int axis, uint32_t exponent, const float* amax) {
  SCOPED_TRACE(to_string(spec) + " axis " + std::to_string(axis) + " exponent " +
               std::to_string(exponent) + " amax " + std::to_string(amax ? *amax : 0));
  const int64_t rows = axis == -2 ? kRows : kColumns, columns = axis == -2 ? kColumns : kRows;
  const Input x(DType::bf16, 1, rows, columns, Strides::row_major,
                [&](int64_t, int64_t r, int64_t c) {
                  return axis == -2 ? value(exponent, r, c) : value(exponent, c, r);
                });
  Output want(spec, {}, axis, rows, columns), got(spec, {}, axis, rows, columns);
  QuantizeOptions options;
  options.amax = spec.outer ? amax : nullptr;
  reference::quantize(x.view(), want.view, options);
  quantize(x.view(), got.view, options);
  ASSERT_TRUE(same_operand(got, want));
}

void sweep(int step) {
  Random random(11);
  for (const char* text : {"nvfp4", "amdfp4", "mxfp4", "mxfp4[scale_rule=rceil]",
                           "mxfp4[scale_rule=even]", "mxfp4[scale_rule=ceil]"}) {
    const QuantSpec spec = parse_spec(text);
    for (uint32_t exponent = 0; exponent < 255; exponent += 1 + random.below(2 * step)) {
      // Amaxes that make scales large, small, zero and everything between; short ones and long.
      const int above = static_cast<int>(random.below(24)) - 6;
      const uint32_t field = std::clamp(static_cast<int>(exponent) + above, 0, 254);
      const uint32_t mantissa = random.one_in(2) ? static_cast<uint32_t>(random.next()) & 0x7FFFFF
                                                 : static_cast<uint32_t>(random.below(8)) << 20;
      const float amax = float_of(field << 23 | mantissa);
      for (int axis : {-1, -2}) expect_reference(spec, axis, exponent, &amax);
    }
  }
}

template <class Body>
void with_every_instruction_set(const Body& body) {
  for (int64_t rest = blockscale_hwy::SupportedTargets(); rest; rest &= rest - 1) {
    blockscale_hwy::SetSupportedTargetsForTest(rest & -rest);
    if (instruction_sets().empty()) continue;  // the processor has it, this build does not
    SCOPED_TRACE(instruction_set());
    body();
  }
  blockscale_hwy::SetSupportedTargetsForTest(0);
}

// Of 2304 magnitudes below the largest, which is 16 binades and two more, and of zeros; the largest
// of a column has its mantissa.
void sweep_bytes() {
  for (const char* text :
       {"mxfp8", "mxfp8[element=e5m2,scale_rule=rceil]", "mxfp8[element=e4m3fnuz,scale_rule=even]",
        "mxfp8[element=e5m2fnuz]", "mxfp8[block=32x32,scale_rule=ceil]", "mxfp6", "fp8_1x128",
        "fp8_1x128[element=e5m2]", "fp8_1x128[element=e4m3fnuz,scale_rule=pow2]"}) {
    const QuantSpec spec = parse_spec(text);
    for (const uint32_t exponent : {1u, 127u, 236u, 0u, 9u, 29u, 63u, 227u, 254u}) {
      if (kSweepStep > 1 && exponent == 0) break;
      for (const int axis : {-1, -2}) {
        SCOPED_TRACE(to_string(spec) + " axis " + std::to_string(axis) + " exponent " +
                     std::to_string(exponent));
        const int64_t block = spec.block, lines = 128;
        const int64_t positions = (2304 + block - 2) / (block - 1) * block;
        const int64_t rows = axis == -1 ? lines : positions;
        const int64_t columns = axis == -1 ? positions : lines;
        const auto at = [&](int64_t line, int64_t pos) {
          const uint32_t largest = largest_bits(exponent, line);
          const auto below = static_cast<uint32_t>(pos / block * (block - 1) + pos % block - 1);
          uint32_t bits = pos % block == 0 ? largest : largest - std::min(largest, below);
          if (line % 32 == 7 && pos % 5 == 1) bits = 0;
          return float_of((bits | (pos * 7 + line) % 3 / 2 << 15) << 16);
        };
        const Input x(
            DType::bf16, 1, rows, columns, Strides::row_major,
            [&](int64_t, int64_t r, int64_t c) { return axis == -1 ? at(r, c) : at(c, r); });
        Output want(spec, {}, axis, rows, columns), got(spec, {}, axis, rows, columns);
        reference::quantize(x.view(), want.view, {});
        quantize(x.view(), got.view, {});
        ASSERT_TRUE(same_operand(got, want));
      }
    }
  }
}

TEST(Narrow, BytesAreTheReferenceForEveryMagnitude) {
  with_every_instruction_set([] { sweep_bytes(); });
}

TEST(Narrow, Fp4IsTheReferenceAroundEveryThreshold) { sweep(kSweepStep > 1 ? 64 : 8); }

TEST(Narrow, Fp4IsTheReferenceWithEveryInstructionSet) {
  with_every_instruction_set([] { sweep(kSweepStep > 1 ? 128 : 16); });
}

// Tiles of whole blocks, which are copied while their maxima are found, and others; some with a
// block that is not finite, or whose scale is 0, for which thresholds will not do.
TEST(Narrow, BothDirectionsAreTheReferenceWhateverOneTileHolds) {
  with_every_instruction_set([] {
    Random random(12);
    for (const char* row_text : {"nvfp4", "mxfp4", "amdfp4[scale_rounding=up]",
                                 "nvfp4[block=16x16]", "nvfp4[hadamard=16]", "mxfp8"})
      for (const char* column_text : {"nvfp4", "mxfp4", "mxfp4[block=32x32]", "mxfp8", "fp8_1x128"})
        for (const int64_t columns : {512, 515}) {
          const QuantSpec row = parse_spec(row_text), column = parse_spec(column_text);
          SCOPED_TRACE(std::string(row_text) + "+" + column_text + " " + std::to_string(columns));
          const int64_t rows = 384;
          const auto bad_row = static_cast<int64_t>(random.below(384));
          const float bad = random.one_in(2) ? float_of(0x7FC00000) : float_of(0x00010000);
          const Input x(DType::bf16, 1, rows, columns, Strides::row_major,
                        [&](int64_t, int64_t r, int64_t c) {
                          if (c / 16 == 20 && r / 16 == bad_row / 16) return r == bad_row ? bad : 0;
                          return value(120 + static_cast<uint32_t>(r * 5 + c * 3) % 16, r, c);
                        });
          Output want_row(row, {}, -1, rows, columns), got_row(row, {}, -1, rows, columns);
          Output want(column, {}, -2, rows, columns), got(column, {}, -2, rows, columns);
          const float amax = 1000;
          QuantizeOptions row_options, options;
          row_options.amax = row.outer ? &amax : nullptr;
          options.amax = column.outer ? &amax : nullptr;
          reference::quantize(x.view(), want_row.view, row_options);
          reference::quantize(x.view(), want.view, options);
          quantize_dual(x.view(), got_row.view, got.view, row_options, options);
          EXPECT_TRUE(same_operand(got_row, want_row)) << "rows";
          EXPECT_TRUE(same_operand(got, want)) << "columns";
        }
  });
}

// Every FP16 number, 16 times in a row of its own, by the scale that its magnitude alone decides.
TEST(Narrow, EveryHalfIsReadAsItsValue) {
  constexpr int64_t rows = 1 << 16, columns = 16;
  const Input x(DType::f16, 1, rows, columns, Strides::row_major,
                [](int64_t, int64_t r, int64_t) { return from_fp16(static_cast<uint16_t>(r)); });
  Output want(kFp8_1x128, {}, -1, rows, columns);
  reference::quantize(x.view(), want.view, {});
  with_every_instruction_set([&] {
    Output got(kFp8_1x128, {}, -1, rows, columns);
    quantize(x.view(), got.view);
    EXPECT_TRUE(same_operand(got, want));
  });
}

// As BF16.
void expect_same_values(const Output& q, int64_t rows, int64_t columns) {
  Guarded want(2 * rows * columns), got(2 * rows * columns);
  const auto to = [&](Guarded& g) { return Matrix{g.data(), DType::bf16, rows, columns, columns}; };
  reference::dequantize(as_const(q.view), to(want));
  dequantize(as_const(q.view), to(got));
  EXPECT_EQ(got.difference(want), "");
}

// Runs of every scale code, so that most are among others of which BF16 is made without FP32.
TEST(Narrow, DequantizesEveryCodeWithEveryScaleAsTheReferenceDoes) {
  with_every_instruction_set([] {
    Random random(13);
    for (const char* text : {"nvfp4", "amdfp4", "mxfp4", "mxfp8", "mxfp8[element=e5m2]",
                             "mxfp8[block=32x32]", "mxfp6"})
      for (const int axis : {-1, -2})
        for (const uint32_t outer : {0x3F800000u, 0x3A123457u, 0x12FFFFFFu, 0x6C345678u, 1u}) {
          const QuantSpec spec = parse_spec(text);
          SCOPED_TRACE(std::string(text) + " axis " + std::to_string(axis) + " outer " +
                       std::to_string(outer));
          const int64_t lines = 67, positions = 256 * spec.block + 16;
          const int64_t rows = axis == -1 ? lines : positions;
          const int64_t columns = axis == -1 ? positions : lines;
          Output q(spec, {}, axis, rows, columns);
          for (int64_t i = 0; i < q.shape.code_bytes; ++i)
            q.view.codes[i] = static_cast<uint8_t>(random.next());
          for (int64_t i = 0; i < q.shape.scale_count; ++i)
            q.view.scales[i] = static_cast<uint8_t>(
                std::min<int64_t>(i % q.shape.scale_columns, traits(spec.scale).nan_code()));
          if (q.view.outer)
            q.view.outer[0] = float_of(outer);
          else if (outer != 1)
            continue;
          expect_same_values(q, rows, columns);
        }
  });
}

// FP32 scales of all sizes; lines of moderate ones among them, of which BF16 is made faster.
TEST(Narrow, DequantizesBytesWithEveryKindOfScaleAsTheReferenceDoes) {
  with_every_instruction_set([] {
    Random random(14);
    for (const char* text :
         {"fp8_1x128", "fp8_1x128[element=e5m2]", "fp8_1x128[element=e4m3fnuz]", "fp8_128x128"})
      for (const int axis : {-1, -2})
        for (const bool special : {false, true}) {
          const QuantSpec spec = parse_spec(text);
          SCOPED_TRACE(std::string(text) + " axis " + std::to_string(axis));
          const int64_t lines = 260, positions = 40 * spec.block + 16;
          const int64_t rows = axis == -1 ? lines : positions;
          const int64_t columns = axis == -1 ? positions : lines;
          Output q(spec, {}, axis, rows, columns);
          const FormatTraits t = traits(spec.element);
          for (int64_t i = 0; i < q.shape.code_bytes; ++i) {
            const auto code = static_cast<uint8_t>(random.next());
            const bool number = (code & t.magnitude_mask()) <= t.max_code();
            q.view.codes[i] = special || number ? code : 1;
          }
          for (int64_t i = 0; i < q.shape.scale_count; ++i) {
            const auto bits = static_cast<uint32_t>(random.next());
            const bool moderate = i / q.shape.scale_columns % 3 != 0;
            const uint32_t scale = moderate ? (bits & 0x807FFFFF) | (27 + bits / 7 % 201) << 23
                                   : random.one_in(4) ? 0
                                   : random.one_in(4) ? kNanBits  // as quantizers write it
                                                      : bits & 0xFF7FFFFF;
            std::memcpy(q.view.scales + 4 * i, &scale, 4);
          }
          expect_same_values(q, rows, columns);
        }
  });
}

}  // namespace
}  // namespace blockscale::testing
