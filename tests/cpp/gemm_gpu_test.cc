// The FP8 GEMM of Hopper against sums in double: dense, row-grouped and contraction-grouped, every
// tile, every tail, into poisoned and guarded memory.
//
// Exact cases: codes of 0, ±1 and ±2 and scales of ½, 1 and 2 have sums below 2^24 in units of ¼,
// which no order and no precision of the machine rounds; the result must be equal to the bit.
//
// Random cases: the tensor cores add 32 products and the sum so far at once, each cut to 13 bits
// below the largest of them: 33 errors of 2^-13 of it, four times a block of 128, where the largest
// is at most the largest product or partial sum of the block (34 leaves room for that being the
// exact one). Blocks are then scaled and added in FP32: at most the product of scales, the product
// with the sum, the addition.
#ifdef BLOCKSCALE_CUDA
#include <cmath>
#include <vector>

#include "cuda/sm90/gemm.h"
#include "cuda/tiles.h"
#include "gemm_device.h"

namespace blockscale::testing {
namespace {

using sm90::Fp8Gemm;
using sm90::Grouping;
using sm90::Schedule;

struct Case {
  Grouping grouping = Grouping::dense;
  int64_t m, n, k;
  std::vector<int64_t> groups;  // sizes along M or K, instead of m or k
  bool square = true, a_e5m2 = false, b_e5m2 = false;
  bool f32 = true, accumulate = false, alpha = false, bias = false, int64_offsets = false;
  bool factors = false;
  DType bias_dtype = DType::f32;
  bool exact = true;
  int tile = -1;
  Schedule schedule = Schedule::chosen;
  bool spread = false;  // groups of rows start at multiples of 4 among the scales
  int64_t behind = 0;   // rows of no group
  int64_t pad = 0;  // elements before D and between its rows: odd ones are not for the copy engine
};

constexpr float kBefore = GuardedD::kBefore;

class Product {
 public:
  Product(const Case& c, uint64_t seed) : c_(c), random_(seed) {
    if (c.grouping == Grouping::rows) c_.m = 0;
    if (c.grouping == Grouping::contraction) c_.k = 0;
    for (const int64_t size : c.groups) {
      if (c.grouping == Grouping::rows) c_.m += size;
      if (c.grouping == Grouping::contraction) c_.k += round_up(size, 128);
      ends_.push_back((ends_.empty() ? 0 : ends_.back()) + size);
      scale_starts_.push_back(scale_rows_);
      scale_rows_ += round_up(size, c.spread ? 4 : 1);
    }
    if (c.grouping == Grouping::rows) c_.m += c.behind;
    if (c.grouping != Grouping::rows || !c.spread) scale_rows_ = c_.m;
    scale_rows_ = round_up(scale_rows_, 4);
    batch_ = c.grouping == Grouping::rows ? static_cast<int64_t>(ends_.size()) : 1;
    outs_ = c.grouping == Grouping::contraction ? static_cast<int64_t>(ends_.size()) : 1;
    padded_ = round_up(c_.k, 128);
    blocks_ = padded_ / 128;
    a_ = codes(c_.m, c.a_e5m2);
    b_ = codes(batch_ * c.n, c.b_e5m2);
    a_values_ = decoded(a_, c.a_e5m2);
    b_values_ = decoded(b_, c.b_e5m2);
    b_lines_ = c.square ? ceil_div(c.n, 128) : c.n;
    a_scales_ = scales(scale_rows_ * blocks_);
    b_scales_ = scales(batch_ * round_up(b_lines_, 4) * blocks_);
    for (const float v : scales(std::max(batch_, outs_) * c.n)) {
      bias_.add(v);
      factors_.push_back(std::ldexp(1.0f, static_cast<int>(random_.below(3)) - 1));
    }
  }

  void run() {
    const Memory a(a_), b(b_), as(a_scales_), bs(b_scales_);
    const Memory bias = bias_.on_device(c_.bias_dtype);
    const Memory factors(factors_);
    const Memory alpha(std::vector<float>{0.5f});
    const Memory wide(ends_), narrow(std::vector<int32_t>(ends_.begin(), ends_.end()));
    GuardedD d(outs_ * c_.m, c_.n, c_.pad, c_.f32, c_.accumulate);
    d.run([&](void* to, Previous previous) {
      Fp8Gemm g;
      g.m = c_.m, g.n = c_.n, g.k = c_.k;
      g.a = a.as<void>(), g.b = b.as<void>();
      g.a_scales = as.as<float>(), g.b_scales = bs.as<float>();
      g.a_e5m2 = c_.a_e5m2, g.b_e5m2 = c_.b_e5m2, g.b_square = c_.square;
      g.d = to;
      g.d_stride = d.stride(), g.d_f32 = c_.f32, g.accumulate = c_.accumulate;
      if (c_.alpha) g.alpha = 4, g.device_alpha = alpha.as<float>();
      if (c_.factors) g.b_factors = factors.as<float>();
      if (c_.bias) g.bias = bias.as<void>();
      g.bias_dtype = c_.bias_dtype;
      g.grouping = c_.grouping, g.groups = static_cast<int>(std::max<size_t>(ends_.size(), 1));
      g.group_rows = c_.grouping == Grouping::rows ? c_.m : c_.k;
      g.a_scale_line = scale_rows_, g.a_scale_unit = c_.spread ? 4 : 1;
      g.offsets = c_.int64_offsets ? wide.as<void>() : narrow.as<void>(),
      g.int64_offsets = c_.int64_offsets;
      g.tile = c_.tile, g.schedule = c_.schedule, g.previous = previous;
      return sm90::fp8_gemm(g, nullptr);
    });
    if (::testing::Test::HasFatalFailure()) return;
    check(d);
    d.check_guards();
  }

 private:
  std::vector<uint8_t> codes(int64_t lines, bool e5m2) {
    std::vector<uint8_t> all(static_cast<size_t>(lines * padded_));
    const Format format = e5m2 ? Format::e5m2 : Format::e4m3fn;
    for (int64_t i = 0; i < lines * padded_; ++i) {
      if (i % padded_ >= c_.k) continue;
      const float v = c_.exact ? static_cast<float>(random_.below(5)) - 2
                               : static_cast<float>(random_.normal()) * 100;
      all[static_cast<size_t>(i)] = static_cast<uint8_t>(encode(format, v));
    }
    return all;
  }
  std::vector<float> scales(int64_t count) {
    std::vector<float> all(static_cast<size_t>(count));
    for (float& s : all)
      s = c_.exact ? std::ldexp(1.0f, static_cast<int>(random_.below(3)) - 1)
                   : static_cast<float>(0.01 * (1 + random_.uniform()));
    return all;
  }
  static std::vector<float> decoded(const std::vector<uint8_t>& codes, bool e5m2) {
    std::vector<float> values;
    for (const uint8_t code : codes)
      values.push_back(decode(e5m2 ? Format::e5m2 : Format::e4m3fn, code));
    return values;
  }

  struct Sum {
    double exact = 0, bound = 0;
  };
  Sum sum(int64_t row, int64_t group, int64_t column, int64_t first, int64_t last) const {
    Sum s;
    double magnitude = 0;
    const float* a = &a_values_[static_cast<size_t>(row * padded_)];
    int64_t scale_row = row;
    if (c_.grouping == Grouping::rows)
      scale_row += scale_starts_[static_cast<size_t>(group)] -
                   (group > 0 ? ends_[static_cast<size_t>(group - 1)] : 0);
    const float* b =
        &b_values_[static_cast<size_t>(((batch_ > 1 ? group : 0) * c_.n + column) * padded_)];
    for (int64_t block = first; block < last; ++block) {
      double part = 0, all = 0, largest = 0;
      for (int64_t k = block * 128; k < block * 128 + 128; ++k) {
        const double p = static_cast<double>(a[k]) * b[k];
        part += p, all += std::fabs(p);
        largest = std::max(largest, std::max(std::fabs(p), std::fabs(part)));
      }
      const int64_t b_block = (batch_ > 1 ? group : 0) * blocks_ + block;
      const double scale =
          static_cast<double>(a_scales_[static_cast<size_t>(block * scale_rows_ + scale_row)]) *
          b_scales_[static_cast<size_t>(b_block * round_up(b_lines_, 4) +
                                        (c_.square ? column / 128 : column))];
      s.exact += scale * part;
      s.bound += scale * 4 * 34 * 0x1p-13 * largest;
      magnitude += scale * all;
    }
    s.bound += static_cast<double>(last - first + 3) * 0x1p-24 * magnitude;
    return s;
  }

  void check(const GuardedD& d) const {
    int64_t group = 0, first = 0;
    for (int64_t line = 0; line < outs_ * c_.m; ++line) {
      const int64_t row = line % c_.m;
      int64_t last = blocks_;
      if (c_.grouping == Grouping::contraction) {
        if (row == 0 && line > 0) first += ceil_div(c_.groups[static_cast<size_t>(group++)], 128);
        last = first + ceil_div(c_.groups[static_cast<size_t>(group)], 128);
      }
      const auto groups = static_cast<int64_t>(ends_.size());
      if (c_.grouping == Grouping::rows)
        while (group < groups && row >= ends_[static_cast<size_t>(group)]) ++group;
      const bool of_none = c_.grouping == Grouping::rows && group == groups;
      for (int64_t column = 0; column < c_.n; ++column) {
        const double value = d.value(line, column);
        if (of_none) {
          ASSERT_EQ(value, c_.accumulate ? kBefore : 0) << "row " << line << ", column " << column;
          continue;
        }
        const Sum s = sum(row, group, column, first, last);
        const int64_t of_column = group * c_.n + column;
        const double alpha =
            (c_.alpha ? 2 : 1) * (c_.factors ? factors_[static_cast<size_t>(of_column)] : 1.0f);
        const double exact =
            alpha * s.exact + (c_.accumulate ? kBefore : 0) + (c_.bias ? bias_[of_column] : 0);
        double bound = c_.exact ? 0 : alpha * s.bound + 0x1p-22 * (std::fabs(exact) + 4);
        if (!c_.f32) bound += 0x1p-8 * (std::fabs(exact) + bound);
        ASSERT_LE(std::fabs(value - exact), bound)
            << "row " << line << ", column " << column << ": " << value << " for " << exact;
      }
    }
  }

  Case c_;
  Random random_;
  std::vector<int64_t> ends_, scale_starts_;
  int64_t scale_rows_ = 0;
  std::vector<uint8_t> a_, b_;
  std::vector<float> a_values_, b_values_, a_scales_, b_scales_, factors_;
  BiasValues bias_;
  int64_t batch_ = 1, outs_ = 1, padded_ = 0, blocks_ = 0, b_lines_ = 0;
};

class Fp8GemmTest : public HopperTest {};

void run(const Case& c, uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed) + ": " + std::to_string(c.m) + " x " +
               std::to_string(c.n) + " x " + std::to_string(c.k) + ", grouping " +
               std::to_string(static_cast<int>(c.grouping)) + ", tile " + std::to_string(c.tile) +
               ", schedule " + std::to_string(static_cast<int>(c.schedule)) +
               (c.square ? ", square" : ", lines") + (c.exact ? ", exact" : ", random"));
  Product(c, seed).run();
}

// Draws what is left open.
Case drawn(Random& random, int tile) {
  constexpr int64_t kSizes[] = {1, 7, 64, 127, 128, 129, 300};
  Case c;
  c.tile = tile, c.schedule = static_cast<Schedule>(random.below(3));
  c.m = random.pick(kSizes), c.n = random.pick(kSizes), c.k = random.pick(kSizes);
  c.square = random.one_in(2);
  c.a_e5m2 = random.one_in(3), c.b_e5m2 = random.one_in(3);
  if (tile >= 0 && !cuda::kTiles[tile].compiled(c.square, c.a_e5m2, c.b_e5m2))
    c.b_e5m2 = c.a_e5m2 = c.square;
  c.f32 = random.one_in(2);
  c.accumulate = c.f32 && random.one_in(2);
  c.factors = random.one_in(3);
  c.alpha = random.one_in(2), c.bias = random.one_in(2), c.int64_offsets = random.one_in(2);
  c.bias_dtype = static_cast<DType>(random.below(3));
  c.exact = !random.one_in(3);
  c.pad = random.one_in(2) ? 0 : random.one_in(2) ? 8 : 1;
  return c;
}

TEST_F(Fp8GemmTest, EveryTileEveryTail) {
  for (int tile = -1; tile < cuda::kTileCount; ++tile) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      Random random(seed * 100 + static_cast<uint64_t>(tile + 1));
      Case c = drawn(random, tile);
      if (seed == 0) c.m = 520, c.n = 400, c.k = 1100, c.pad = 0;  // several tiles, whole ones too
      run(c, seed);
      if (tile >= 0 && cuda::kTiles[tile].split) continue;  // of dense products only
      for (const Grouping grouping : {Grouping::rows, Grouping::contraction}) {
        c.grouping = grouping;
        c.m = grouping == Grouping::rows ? 0 : 70;
        c.n = std::min<int64_t>(c.n, 129);
        c.k = std::min<int64_t>(c.k, 129);
        c.groups = drawn_groups(random);
        if (seed == 0) c.groups = many_groups();
        c.spread = random.one_in(2), c.behind = random.one_in(2) ? 0 : 37;
        run(c, seed);
      }
      if (HasFatalFailure()) return;
    }
  }
}

// Fewer blocks of K than it is cut into parts: some add nothing, and store their share of the sums.
TEST_F(Fp8GemmTest, EmptyPartsOfK) {
  for (int tile = 0; tile < cuda::kTileCount; ++tile) {
    if (!cuda::kTiles[tile].split) continue;
    for (const int64_t k : {1, 128, 129, 300}) {
      Case c;
      c.tile = tile, c.m = 70, c.n = 300, c.k = k, c.f32 = true;
      c.square = cuda::kTiles[tile].compiled(true, false, false);
      for (const bool accumulate : {false, true}) {
        c.accumulate = accumulate;
        run(c, 1);
      }
    }
  }
}

// More tiles than a device has multiprocessors, so that clusters have several each.
TEST_F(Fp8GemmTest, EverySchedule) {
  Case c;
  c.tile = 5, c.k = 70, c.n = 1300;  // 64 x 32
  for (const Schedule schedule : {Schedule::fixed, Schedule::dynamic}) {
    c.schedule = schedule, c.grouping = Grouping::dense, c.m = 1100, c.groups.clear();
    run(c, 1);
    c.grouping = Grouping::rows, c.groups = {400, 0, 1, 499, 200}, c.behind = 37;
    run(c, 2);
    c.grouping = Grouping::contraction, c.groups = {0, 30, 0, 0, 5, 35}, c.m = 300, c.behind = 0;
    run(c, 3);
  }
}

TEST_F(Fp8GemmTest, NothingToAdd) {
  Case c;
  c.m = 5, c.n = 70, c.k = 0;
  for (const bool bias : {false, true}) {
    c.bias = bias;
    run(c, 1);
  }
  c.accumulate = true;
  run(c, 1);
}

// Whether threads add to D, or the copy engine.
TEST_F(Fp8GemmTest, SumsKeepSubnormals) {
  constexpr int64_t kSide = 512;
  const Memory zeros{std::vector<uint8_t>(kSide * sm90::kBlock)};
  const Memory ones{std::vector<float>(kSide, 1.0f)};
  for (int tile = -1; tile < cuda::kTileCount; ++tile) {
    for (const int64_t stride : {kSide, kSide + 1}) {
      const std::vector<float> before(kSide * stride, 1e-39f);
      const Memory d{before};
      sm90::Fp8Gemm g;
      g.m = g.n = kSide, g.k = sm90::kBlock;
      g.a = g.b = zeros.as<void>();
      g.a_scales = g.b_scales = ones.as<float>();
      g.d = d.as<void>(), g.d_stride = stride;
      g.d_f32 = g.accumulate = true;
      g.tile = tile;
      check(sm90::fp8_gemm(g, nullptr));
      check(cudaDeviceSynchronize());
      std::vector<float> after(before.size());
      d.read(after.data(), static_cast<int64_t>(after.size() * sizeof(float)));
      EXPECT_EQ(after, before) << "tile " << tile << ", stride " << stride;
    }
  }
}

}  // namespace
}  // namespace blockscale::testing
#endif  // BLOCKSCALE_CUDA
