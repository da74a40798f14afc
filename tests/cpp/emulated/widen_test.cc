// MXFP4 operands as FP8 ones, on the host: what every code says before and after.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "../buffers.h"
#include "../throws.h"
#include "gpu/gpu.h"
#include "host_stream.h"

namespace blockscale::testing {
namespace {

// An operand of any codes whose scales lie in [least, least + spread], and now and then are NaN.
struct Operand {
  Operand(Random& random, bool square, int64_t batch, int64_t lines, int64_t extent, int least,
          int spread, bool nans) {
    q.spec = parse_spec(square ? "mxfp4[block=32x32]" : "mxfp4");
    q.axis = -1, q.rows = lines, q.columns = extent, q.batch = batch;
    const StoredShape s = q.shape();
    codes.resize(static_cast<size_t>(batch * s.code_bytes + 16));
    scales.resize(static_cast<size_t>(batch * s.scale_count));
    for (uint8_t& c : codes) c = static_cast<uint8_t>(random.next());
    for (uint8_t& c : scales)
      c = nans && random.one_in(20)
              ? 0xFF
              : static_cast<uint8_t>(
                    least + static_cast<int>(random.below(static_cast<uint64_t>(spread) + 1)));
    q.codes = codes.data(), q.scales = scales.data();
  }
  // Without its scale.
  double code(int64_t line, int64_t k) const {
    const StoredShape s = q.shape();
    const uint8_t byte = q.codes[line * s.line_bytes + k / 2];
    return decode(Format::e2m1, k % 2 ? byte >> 4 : byte & 15);
  }
  int scale(int64_t line, int64_t k) const {
    const StoredShape s = q.shape();
    const int64_t matrix = line / s.lines, row = line % s.lines / s.scale_lines;
    return q.scales[matrix * s.scale_count + row * s.blocks + k / q.spec.block];
  }

  ConstQuantized q;
  std::vector<uint8_t> codes, scales;
};

// Lines share a scale in pieces of `shared` codes. Returns how many values were not exact.
int64_t check(const Operand& from, const ConstQuantized& to, const float* line_scales) {
  const StoredShape s = from.q.shape(), t = to.shape();
  const int64_t padded = round_up(s.padded, 128), shared = line_scales ? padded : 128;
  const int64_t pitch = padded_rows(Layout::mn_major, t.scale_rows);
  const auto* scales = reinterpret_cast<const float*>(to.scales);
  for (int64_t at = 0; at < to.batch * t.scale_count; ++at) {
    if (at % pitch < t.scale_rows) continue;
    EXPECT_EQ(scales[at], 0) << "padding " << at;
  }
  int64_t inexact = 0;
  for (int64_t line = 0; line < from.q.batch * s.lines; ++line) {
    for (int64_t first = 0; first < padded; first += shared) {
      int top = 0;
      for (int64_t k = first; k < std::min(first + shared, s.padded); ++k)
        if (const int scale = from.scale(line, k); scale != 0xFF) top = std::max(top, scale);
      for (int64_t k = first; k < first + shared; ++k) {
        const double code = decode(Format::e5m2, to.codes[line * padded + k]);
        const int64_t row = line % s.lines;
        double factor = scales[line / s.lines * t.scale_count + k / 128 * pitch +
                               (line_scales ? row / 128 : row)];
        if (line_scales) {
          EXPECT_EQ(factor, 1);
          factor = line_scales[line];
        }
        EXPECT_EQ(factor, std::ldexp(1.0, top - 127 - 13));
        if (k >= s.padded) {
          EXPECT_EQ(code, 0);
          continue;
        }
        const int scale = from.scale(line, k);
        if (scale == 0xFF) {
          EXPECT_TRUE(std::isnan(code));
          continue;
        }
        const double want = from.code(line, k) * std::ldexp(1.0, scale - 127);
        const double off = std::fabs(code * factor - want);
        if (top - scale <= 28) {
          EXPECT_EQ(off, 0) << line << ", " << k;
        } else {
          EXPECT_LE(off, std::ldexp(1.0, top - 127 - 30)) << line << ", " << k;
          inexact += off != 0;
        }
        if (::testing::Test::HasFailure()) return inexact;
      }
    }
  }
  return inexact;
}

TEST(Widen, EveryValueStaysWhatItIs) {
  Random random(1);
  constexpr int64_t kExtents[] = {1, 31, 32, 100, 128, 129, 2048, 2049, 4500};
  constexpr int64_t kLines[] = {1, 7, 8, 9, 33, 130};
  for (int i = 0; i < 60; ++i) {
    const int64_t extent = random.pick(kExtents), batch = random.one_in(3) ? 3 : 1;
    const int spread = random.one_in(3) ? 0 : 28, least = static_cast<int>(random.below(227));
    const bool nans = random.one_in(2);
    const Operand a(random, random.one_in(3), 1, random.pick(kLines), extent, least, spread, nans);
    const Operand b(random, random.one_in(3), batch, random.pick(kLines), extent, least, spread,
                    nans);
    const HostStream stream;
    const gpu::WidenedPair widened = gpu::widen(a.q, b.q, stream);
    EXPECT_EQ(to_string(widened.a.q.spec), "fp8_1x128[element=e5m2]");
    EXPECT_EQ(to_string(widened.b.q.spec), "fp8_128x128[element=e5m2]");
    EXPECT_EQ(check(a, widened.a.q, nullptr), 0) << i;
    EXPECT_EQ(check(b, widened.b.q, widened.b.line_scales), 0) << i;
    // Each by itself.
    const gpu::WidenedOperand right = gpu::widen_right(b.q, stream);
    EXPECT_EQ(check(b, right.q, right.line_scales), 0) << i;
    Output alone(gpu::kWidened, {Layout::linear, Layout::mn_major}, -1, a.q.rows, a.q.columns);
    gpu::widen_to(a.q, alone.view, stream);
    EXPECT_EQ(check(a, as_const(alone.view), nullptr), 0) << i;
    // A weight, and what a later call finds of it.
    Guarded memory(gpu::widened_bytes(b.q));
    const gpu::WidenedOperand made = gpu::widen_right(b.q, memory.data(), stream);
    const gpu::WidenedOperand found = gpu::widened_in(b.q, memory.data());
    EXPECT_EQ(made.q.codes, found.q.codes);
    EXPECT_EQ(made.line_scales, found.line_scales);
    EXPECT_EQ(check(b, found.q, found.line_scales), 0) << i;
    EXPECT_TRUE(memory.guards_whole());
    if (HasFailure()) return;
  }
}

TEST(Widen, GroupsAlongTheContractionAxis) {
  Random random(3);
  for (int i = 0; i < 30; ++i) {
    const int64_t lines[] = {1 + static_cast<int64_t>(random.below(40)),
                             1 + static_cast<int64_t>(random.below(140))};
    std::vector<int64_t> ends;
    for (uint64_t g = 1 + random.below(7); g > 0; --g)
      ends.push_back((ends.empty() ? 0 : ends.back()) +
                     static_cast<int64_t>(random.one_in(3) ? 0 : random.below(700)));
    const int64_t count = static_cast<int64_t>(ends.size()), rows = ends.back() + 17;
    const Groups groups{ends.data(), true, count};
    // Every group by itself is cut out of the operand of all.
    Operand both[] = {{random, false, 1, lines[0], 32, 90, 20, true},
                      {random, random.one_in(2), 1, lines[1], 32, 90, 20, true}};
    for (int side = 0; side < 2; ++side) {
      ConstQuantized& q = both[side].q;
      q.axis = -2, q.rows = rows, q.columns = lines[side], q.groups = groups;
      const StoredShape s = q.shape();
      both[side].codes.resize(static_cast<size_t>(s.code_bytes));
      both[side].scales.resize(static_cast<size_t>(s.scale_count));
      for (uint8_t& c : both[side].codes) c = static_cast<uint8_t>(random.next());
      for (uint8_t& c : both[side].scales) c = static_cast<uint8_t>(90 + random.below(20));
      q.codes = both[side].codes.data(), q.scales = both[side].scales.data();
    }
    const HostStream stream;
    const gpu::WidenedPair widened = gpu::widen(both[0].q, both[1].q, stream);
    for (int side = 0; side < 2; ++side) {
      const Operand& from = both[side];
      const ConstQuantized& to = side == 0 ? widened.a.q : widened.b.q;
      const StoredShape s = from.q.shape(), t = to.shape();
      const int64_t pitch = padded_rows(Layout::mn_major, t.scale_rows);
      const auto* scales = reinterpret_cast<const float*>(to.scales);
      int64_t at = 0, to_at = 0;
      for (int64_t g = 0; g < count; ++g) {
        const int64_t size =
            ends[static_cast<size_t>(g)] - (g ? ends[static_cast<size_t>(g - 1)] : 0);
        for (int64_t line = 0; line < lines[side]; ++line) {
          for (int64_t k = 0; k < round_up(size, 128); ++k) {
            const int64_t k_to = to_at + k;
            double got = decode(Format::e5m2, to.codes[line * t.padded + k_to]);
            got *= scales[k_to / 128 * pitch + (side == 0 ? line : line / 128)];
            if (side == 1) got *= widened.b.line_scales[g * lines[1] + line];
            double want = 0;
            if (k < round_up(size, 32)) {
              const uint8_t byte = from.q.codes[line * s.line_bytes + (at + k) / 2];
              const int64_t row = line / s.scale_lines;
              want = decode(Format::e2m1, k % 2 ? byte >> 4 : byte & 15) *
                     std::ldexp(1.0, from.q.scales[row * s.blocks + (at + k) / 32] - 127);
            }
            ASSERT_EQ(got, want) << i << ", side " << side << ", group " << g << ", line " << line
                                 << ", " << k;
          }
          if (side == 1) {
            EXPECT_TRUE(std::isfinite(widened.b.line_scales[g * lines[1] + line]));
          }
        }
        at += round_up(size, 32), to_at += round_up(size, 128);
      }
    }
  }
}

TEST(Widen, LinesThatCannotBeCountedIn31Bits) {
  ConstQuantized q;
  q.spec = kMxfp4, q.rows = 1, q.columns = (int64_t{1} << 31) - 2048;
  EXPECT_EQ(gpu::widened_bytes(q) / q.columns, 1);
  for (const int64_t columns : {q.columns + 1, (int64_t{1} << 31) - 32}) {
    q.columns = columns;
    EXPECT_ERROR(gpu::widened_bytes(q),
                 "gemm: k = ", "at most " + std::to_string(gpu::kMostWidened), "parts");
  }
}

TEST(Widen, BlocksFarBelowTheLargestAreRounded) {
  Random random(2);
  const Operand a(random, false, 1, 40, 1000, 0, 254, false);
  const Operand b(random, false, 1, 30, 1000, 0, 254, false);
  const HostStream stream;
  const gpu::WidenedPair widened = gpu::widen(a.q, b.q, stream);
  EXPECT_GT(check(a, widened.a.q, nullptr), 0);
  EXPECT_GT(check(b, widened.b.q, widened.b.line_scales), 0);
}

}  // namespace
}  // namespace blockscale::testing
