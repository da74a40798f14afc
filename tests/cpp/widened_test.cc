// MXFP4 that quantizers store as FP8, for the left of a GEMM: the same as quantizing and widening,
// on a GPU or emulated.
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

// Tells whether anything was asked of the workspace, as nothing is where a kernel is compiled.
class WatchedStream final : public Stream {
 public:
  void* handle() const override { return stream_.handle(); }
  void* workspace(int64_t bytes) const override {
    asked_ = true;
    return stream_.workspace(bytes);
  }
  bool asked() const { return asked_; }
  void wait() const { stream_.wait(); }

 private:
  TestStream stream_;
  mutable bool asked_ = false;
};

// One operand of an input, quantized with `spec` and, if it is to be widened, that in FP8.
struct Operand {
  Operand(const std::string& text, bool widens, int axis, int64_t rows, int64_t columns,
          const Groups& groups)
      : spec(parse_spec(text)),
        widens(widens),
        narrow(spec, {}, axis, rows, columns, 1, groups),
        device_narrow(narrow) {
    if (!widens) {
      got.emplace(spec, StorageLayout{}, axis, rows, columns, 1, groups);
    } else {
      for (auto* output : {&got, &want})
        output->emplace(gpu::kWidened, StorageLayout{Layout::linear, Layout::mn_major}, axis, rows,
                        columns, 1, groups);
      device_want.emplace(*want);
      options.widened = spec;
    }
    device_got.emplace(*got);
  }

  // After the narrow operand has been made.
  void widen(const TestStream& stream) {
    if (widens) gpu::widen_to(as_const(device_narrow.view), device_want->view, stream);
  }
  void check(const std::vector<int64_t>& ends) {
    device_got->read(*got);
    if (!widens) {
      device_narrow.read(narrow);
      EXPECT_TRUE(same_operand(*got, narrow));
      return;
    }
    device_want->read(*want);
    EXPECT_TRUE(got->codes.guards_whole() && got->scales.guards_whole());
    const StoredShape& s = got->shape;
    // What lies behind the last group no product reads.
    const bool grouped = static_cast<bool>(narrow.view.groups), rows = narrow.view.axis == -1;
    const int64_t lines = grouped && rows ? ends.back() : s.lines;
    int64_t padded = s.padded;
    if (grouped && !rows) {
      padded = 0;
      for (size_t g = 0; g < ends.size(); ++g)
        padded += round_up(ends[g] - (g ? ends[g - 1] : 0), gpu::kWidened.block);
    }
    const int64_t behind = grouped ? s.lines : padded_rows(Layout::mn_major, s.lines);
    for (int64_t line = s.lines; line < behind; ++line) {
      for (int64_t block = 0; block < s.blocks; ++block) {
        ASSERT_EQ(got->scale(0, line, block), 0u) << "padding " << line << ", " << block;
        ASSERT_EQ(want->scale(0, line, block), 0u) << "padding " << line << ", " << block;
      }
    }
    for (int64_t line = 0; line < lines; ++line) {
      for (int64_t k = 0; k < padded; ++k) {
        ASSERT_EQ(got->code(0, line, k), want->code(0, line, k)) << "code " << line << ", " << k;
        if (k % gpu::kWidened.block == 0) {
          ASSERT_EQ(got->scale(0, line, k / gpu::kWidened.block),
                    want->scale(0, line, k / gpu::kWidened.block))
              << "scale " << line << ", " << k;
        }
      }
    }
  }

  QuantSpec spec;
  bool widens;
  Output narrow;
  std::optional<Output> got, want;
  DeviceOutput device_narrow;
  std::optional<DeviceOutput> device_got, device_want;
  QuantizeOptions options;
};

struct Kind {
  const char *row, *column;  // or null
  bool row_widens, column_widens;
  bool compiled;
};
constexpr const char *kPlain = "mxfp4", *kTurned = "mxfp4[hadamard=16]",
                     *kSquare = "mxfp4[block=32x32]";
constexpr Kind kKinds[] = {{kPlain, kTurned, true, true, true},
#if BLOCKSCALE_SAMPLE < 2
                           {kPlain, nullptr, true, false, true},
                           {kPlain, kTurned, true, false, true},
#endif
                           {nullptr, kTurned, false, true, false},
                           {kPlain, "mxfp4[hadamard=64]", true, true, false},
                           {"mxfp4[scale_rule=floor]", "mxfp4", false, true, false},
                           {kSquare, kSquare, true, true, false}};
bool takes_groups(const Kind& kind) { return kind.row != kSquare; }

void compare(Random& random, const Kind& kind, DType dtype, Strides strides, int64_t rows,
             int64_t columns, const std::vector<int64_t>& ends) {
  SCOPED_TRACE(std::string(kind.row ? kind.row : "") + " " + (kind.column ? kind.column : "") +
               ", " + std::to_string(rows) + " x " + std::to_string(columns) + ", " +
               std::to_string(ends.size()) + " groups");
  const Offsets offsets(ends, random.one_in(2));
  const Groups groups = ends.empty() ? Groups{} : offsets.view();
  const Input x(dtype, 1, rows, columns, strides, random_values(random));
  const DeviceInput device_x(x, x.view());
  std::optional<Operand> row, column;
  if (kind.row) row.emplace(kind.row, kind.row_widens, -1, rows, columns, groups);
  if (kind.column) column.emplace(kind.column, kind.column_widens, -2, rows, columns, groups);
  const TestStream stream;
  const WatchedStream watched;
  const Quantization narrow{device_x.view, row ? &row->device_narrow.view : nullptr,
                            column ? &column->device_narrow.view : nullptr};
  gpu::quantize({&narrow, 1}, stream);
  const Quantization asked{device_x.view, row ? &row->device_got->view : nullptr,
                           column ? &column->device_got->view : nullptr,
                           row ? row->options : QuantizeOptions{},
                           column ? column->options : QuantizeOptions{}};
  gpu::quantize({&asked, 1}, watched);
  for (auto* operand : {&row, &column})
    if (*operand) (*operand)->widen(stream);
  stream.wait(), watched.wait();
  for (auto* operand : {&row, &column})
    if (*operand) (*operand)->check(ends);
  if (kind.compiled && strides == Strides::aligned_rows && rows * columns > 0) {
    EXPECT_FALSE(watched.asked()) << "no kernel is compiled for it";
  }
}

class WidenedOutput : public DeviceTest<::testing::Test> {};

TEST_F(WidenedOutput, IsWhatWideningMakes) {
  for (const uint64_t seed : test_seeds()) {
    Random random(seed);
    SCOPED_TRACE("seed " + std::to_string(seed));
    for (int i = 0; i < (kSweepStep > 1 ? 60 : 200); ++i) {
      constexpr DType kTypes[] = {DType::bf16, DType::bf16, DType::f32, DType::f16};
      const Strides strides = random.one_in(3) ? random.pick(kStrides) : Strides::aligned_rows;
      const int64_t rows = random_extent(random), columns = random_extent(random);
      const Kind& kind = random.pick(kKinds);
      std::vector<int64_t> ends;
      if (takes_groups(kind) && random.one_in(2))
        for (uint64_t g = 1 + random.below(6); g > 0; --g) {
          const int64_t start = ends.empty() ? 0 : ends.back();
          const auto left = static_cast<uint64_t>(rows - start);
          ends.push_back(start + static_cast<int64_t>(random.below(left + 1)));
        }
      compare(random, kind, random.pick(kTypes), strides, rows, columns, ends);
      if (HasFailure()) return;
    }
  }
}

// More tiles than thread blocks take one of each: they come by the copy engine.
TEST_F(WidenedOutput, OfManyTiles) {
#if defined(BLOCKSCALE_EMULATE)
  GTEST_SKIP() << "for a GPU";
#endif
  Random random(5);
  for (const Kind& kind : kKinds)
    compare(random, kind, DType::bf16, Strides::aligned_rows, 8200, 8328, {});
}

}  // namespace
}  // namespace blockscale::testing
#endif
