// The BF16 GEMM of Hopper against sums in double: dense, by groups of rows and of the contraction
// axis, every tile, every tail, into poisoned and guarded memory.
//
// Values of 0, ±1 and ±2 have sums that no order and no precision of the machine rounds. Outer
// scales, bias and the rounding to D follow in double, so the result must be equal to the bit.
// Random values: the tensor cores add 16 products and the sum so far at once, each cut to 23 bits
// below the largest of them, which is at most the sum of all magnitudes.
//
// B in its codes, for the GEMM that decodes it, has values and scales likewise.
#ifdef BLOCKSCALE_CUDA
#include <cmath>
#include <vector>

#include "cuda/sm90/gemm.h"
#include "cuda/tiles.h"
#include "gemm_device.h"
#include "gpu/gpu.h"

namespace blockscale::testing {
namespace {

using sm90::Bf16Gemm;
using sm90::CodedGemm;
using sm90::Grouping;
using sm90::Schedule;

struct Case {
  int64_t m = 0, n = 0, k = 0;
  std::vector<int64_t> groups;  // sizes along M or K, instead of m or k
  int64_t unit = 0;             // along K: each starts at a multiple of it
  int64_t behind = 0;           // rows of no group
  bool f32 = true, accumulate = false, outer = false, bias = false, int64_offsets = false;
  bool wrong = false;  // the last group ends behind the rows
  DType bias_dtype = DType::f32;
  bool exact = true;
  int tile = -1;
  const char* coded = nullptr;  // the spec of B in its codes
  Schedule schedule = Schedule::chosen;
  int64_t pad = 0;  // elements before D and between its rows: odd ones are not for the copy engine
};

constexpr float kBefore = GuardedD::kBefore;

class Product {
 public:
  Product(const Case& c, uint64_t seed) : c_(c), random_(seed) {
    int64_t& along = c.unit ? c_.k : c_.m;
    const int64_t unit = std::max<int64_t>(c.unit, 1);
    if (!c.groups.empty()) along = 0;
    for (const int64_t size : c.groups) {
      ends_.push_back((ends_.empty() ? 0 : ends_.back()) + size);
      starts_.push_back(along);
      along += round_up(size, unit);
    }
    starts_.push_back(along);
    if (!c.groups.empty()) along += c.behind * unit;
    groups_ = std::max<int64_t>(1, static_cast<int64_t>(ends_.size()));
    batch_ = c.unit ? 1 : groups_;
    matrices_ = c.unit ? groups_ : 1;
    stride_ = round_up(std::max<int64_t>(c_.k, 1), 8);
    a_ = values(c_.m);
    if (c.coded)
      draw_codes(parse_spec(c.coded));
    else
      b_ = values(batch_ * c_.n);
    for (int64_t g = 0; g < groups_; ++g) a_outer_.push_back(scale()), b_outer_.push_back(scale());
    for (int64_t i = 0; i < groups_ * c_.n; ++i) bias_.add(scale());
  }

  void run() {
    const Memory a(a_), b(b_), codes(codes_), scales(scales_), a_outer(a_outer_), b_outer(b_outer_);
    const Memory bias = bias_.on_device(c_.bias_dtype);
    std::vector<int64_t> ends = ends_;
    const int64_t rows = c_.unit ? c_.k : c_.m;  // that the groups divide
    if (c_.wrong) ends.back() = rows + 1;
    const Memory wide(ends), narrow(std::vector<int32_t>(ends.begin(), ends.end()));
    GuardedD d(matrices_ * c_.m, c_.n, c_.pad, c_.f32, c_.accumulate);
    d.run([&](void* to, Previous previous) {
      CodedGemm g;
      g.m = c_.m, g.n = c_.n, g.k = c_.k, g.stride = stride_;
      g.a = a.as<void>(), g.b = b.as<void>();
      g.d = to;
      g.d_stride = d.stride(), g.d_f32 = c_.f32, g.accumulate = c_.accumulate;
      if (c_.outer) g.alpha = 0.75f, g.a_outer = a_outer.as<float>();
      if (c_.outer) g.b_outer = b_outer.as<float>();
      if (c_.bias) g.bias = bias.as<void>();
      g.bias_dtype = c_.bias_dtype;
      if (!ends_.empty()) g.grouping = c_.unit ? Grouping::contraction : Grouping::rows;
      if (c_.unit) g.storage_unit = static_cast<int>(c_.unit);
      g.groups = static_cast<int>(groups_), g.group_rows = rows;
      g.offsets = c_.int64_offsets ? wide.as<void>() : narrow.as<void>(),
      g.int64_offsets = c_.int64_offsets;
      g.tile = c_.tile, g.schedule = c_.schedule, g.previous = previous;
      if (!c_.coded) return sm90::bf16_gemm(g, nullptr);
      g.coded = coded_;
      g.coded.codes = codes.as<uint8_t>(), g.coded.scales = scales.as<uint8_t>();
      EXPECT_TRUE(sm90::takes_coded(g.coded));
      return sm90::coded_gemm(g, nullptr);
    });
    if (::testing::Test::HasFatalFailure()) return;
    check(d);
    d.check_guards();
  }

 private:
  std::vector<uint16_t> values(int64_t lines) {
    std::vector<uint16_t> all(static_cast<size_t>(lines * stride_), 0x7FC0);  // NaN between lines
    for (int64_t i = 0; i < lines * stride_; ++i)
      if (i % stride_ < c_.k)
        all[static_cast<size_t>(i)] = to_bf16(c_.exact ? static_cast<float>(random_.below(5)) - 2
                                                       : static_cast<float>(random_.normal()));
    return all;
  }
  // B in codes, and their values.
  void draw_codes(const QuantSpec& spec) {
    coded_.spec = spec, coded_.batch = batch_, coded_.rows = c_.n, coded_.columns = c_.k;
    const StoredShape s = coded_.shape();
    codes_.resize(static_cast<size_t>(batch_ * s.code_bytes));
    scales_.resize(static_cast<size_t>(batch_ * s.scale_count));
    for (uint8_t& code : scales_)
      code = static_cast<uint8_t>(
          encode(spec.scale, c_.exact ? std::ldexp(1.0f, static_cast<int>(random_.below(3)) - 1)
                                      : static_cast<float>(0.1 + random_.uniform())));
    b_.assign(static_cast<size_t>(batch_ * c_.n * stride_), 0x7FC0);
    const bool half = traits(spec.element).bits() == 4;
    for (int64_t line = 0; line < batch_ * c_.n; ++line) {
      const int64_t matrix = line / c_.n, row = line % c_.n / s.scale_lines;
      for (int64_t k = 0; k < c_.k; ++k) {
        const uint32_t code =
            encode(spec.element, c_.exact ? static_cast<float>(random_.below(5)) - 2
                                          : static_cast<float>(random_.normal()));
        uint8_t& byte = codes_[static_cast<size_t>(line * s.line_bytes + (half ? k / 2 : k))];
        byte = static_cast<uint8_t>(byte | code << (half && k % 2 ? 4 : 0));
        const int64_t scale = matrix * s.scale_count + row * s.blocks + k / spec.block;
        b_[static_cast<size_t>(line * stride_ + k)] = to_bf16(
            decode(spec.element, code) * decode(spec.scale, scales_[static_cast<size_t>(scale)]));
      }
    }
  }
  float scale() { return static_cast<float>(0.01 * (1 + random_.uniform())); }

  // Of an element of D, before it is rounded to BF16.
  struct Value {
    float exact;
    double bound;
  };
  Value value(int64_t row, int64_t group, int64_t column) const {
    const uint16_t* a = &a_[static_cast<size_t>(row * stride_)];
    const uint16_t* b = &b_[static_cast<size_t>((group % batch_ * c_.n + column) * stride_)];
    const int64_t first = c_.unit ? starts_[static_cast<size_t>(group)] : 0;
    const int64_t last = c_.unit ? starts_[static_cast<size_t>(group + 1)] : c_.k;
    double sum = 0, all = 0;
    for (int64_t k = first; k < last; ++k) {
      const double p = static_cast<double>(from_bf16(a[k])) * from_bf16(b[k]);
      sum += p, all += std::fabs(p);
    }
    const auto of_group = static_cast<size_t>(group);
    const double factor =
        c_.outer ? static_cast<double>(0.75f) * a_outer_[of_group] * b_outer_[of_group] : 1.0;
    double v = factor * sum;
    if (c_.bias) v += bias_[group * c_.n + column];
    const double cut = 17 * 0x1p-23 * all * static_cast<double>(ceil_div(last - first, 16));
    const double bound = factor * cut + 0x1p-22 * (std::fabs(v) + kBefore);
    return {static_cast<float>(v) + (c_.accumulate ? kBefore : 0.0f), bound};
  }

  void check(const GuardedD& d) const {
    int64_t group = 0;
    for (int64_t line = 0; line < matrices_ * c_.m; ++line) {
      const auto behind = [&] { return line >= ends_[static_cast<size_t>(group)]; };
      if (c_.unit) group = line / c_.m;
      while (!c_.unit && !ends_.empty() && group < groups_ && behind()) ++group;
      for (int64_t column = 0; column < c_.n; ++column) {
        const float found = d.value(line, column);
        const std::string where =
            "line " + std::to_string(line) + ", column " + std::to_string(column);
        if (c_.wrong) {
          ASSERT_TRUE(std::isnan(found)) << where;
          continue;
        }
        const bool of_none = group == groups_;
        const Value want =
            of_none ? Value{c_.accumulate ? kBefore : 0.0f, 0} : value(line % c_.m, group, column);
        if (c_.exact) {
          ASSERT_EQ(found, c_.f32 ? want.exact : from_bf16(to_bf16(want.exact))) << where;
          continue;
        }
        const double exact = want.exact;
        const double bound = want.bound + (c_.f32 ? 0 : 0x1p-8 * (std::fabs(exact) + want.bound));
        ASSERT_LE(std::fabs(static_cast<double>(found) - exact), bound) << where;
      }
    }
  }

  Case c_;
  Random random_;
  std::vector<int64_t> ends_;
  std::vector<int64_t> starts_;  // of groups along K in storage, and where the last one ends
  int64_t groups_ = 1, stride_ = 0;
  int64_t batch_ = 1, matrices_ = 1;  // of B and of D
  std::vector<uint16_t> a_, b_;
  ConstQuantized coded_;
  std::vector<uint8_t> codes_, scales_;
  std::vector<float> a_outer_, b_outer_;
  BiasValues bias_;
};

class Bf16GemmTest : public HopperTest {};

void run(const Case& c, uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed) + ": " + std::to_string(c.m) + " x " +
               std::to_string(c.n) + " x " + std::to_string(c.k) + ", " +
               std::to_string(c.groups.size()) + " groups, tile " + std::to_string(c.tile) +
               ", schedule " + std::to_string(static_cast<int>(c.schedule)) +
               (c.f32 ? ", FP32" : ", BF16") + (c.coded ? ", " + std::string(c.coded) : "") +
               (c.exact ? ", exact" : ", random"));
  Product(c, seed).run();
}

// Draws what is left open.
Case drawn(Random& random, int tile) {
  constexpr int64_t kSizes[] = {1, 7, 64, 127, 128, 129, 300};
  Case c;
  c.tile = tile, c.schedule = static_cast<Schedule>(random.below(3));
  c.m = random.pick(kSizes), c.n = random.pick(kSizes), c.k = random.pick(kSizes);
  c.f32 = random.one_in(2);
  c.accumulate = c.f32 && random.one_in(3);
  c.outer = !random.one_in(3), c.bias = random.one_in(2), c.int64_offsets = random.one_in(2);
  c.bias_dtype = static_cast<DType>(random.below(3));
  c.exact = !random.one_in(4);
  c.pad = random.one_in(2) ? 0 : random.one_in(2) ? 8 : 1;
  return c;
}

TEST_F(Bf16GemmTest, EveryTileEveryTail) {
  for (int tile = -1; tile < cuda::kBf16TileCount; ++tile) {
    for (uint64_t seed = 0; seed < 12; ++seed) {
      Random random(seed * 100 + static_cast<uint64_t>(tile + 1));
      Case c = drawn(random, tile);
      if (seed == 0) c.m = 520, c.n = 400, c.k = 700, c.pad = 0;  // several tiles, whole ones too
      if (seed == 1) c.k = 1300;                                  // more stages than any ring has
      run(c, seed);
      c.m = 0, c.n = std::min<int64_t>(c.n, 129), c.k = std::min<int64_t>(c.k, 129);
      c.groups = drawn_groups(random);
      c.behind = random.one_in(2) ? 0 : 37;
      run(c, seed);
      constexpr int64_t kUnits[] = {16, 32, 128};
      c.unit = random.pick(kUnits), c.m = 70;
      run(c, seed);
      if (HasFatalFailure()) return;
    }
  }
}

constexpr const char* kCodedSpecs[] = {"nvfp4", "nvfp4[block=16x16]", "amdfp4",
                                       "mxfp8", "mxfp8[block=32x32]", "mxfp6"};

// Whatever codes and scales there are, NaN and Inf included, the bits of D are those for B decoded
// before.
TEST_F(Bf16GemmTest, CodedIsDecodedThenMultiplied) {
  constexpr int64_t kM = 300, kN = 190, kK = 320, kGroups = 4;
  const TestStream stream;
  for (const char* spec : kCodedSpecs) {
    SCOPED_TRACE(spec);
    Random random(1);
    ConstQuantized b;
    b.spec = parse_spec(spec), b.spec.outer = false;
    b.batch = kGroups, b.rows = kN, b.columns = kK;
    const StoredShape s = b.shape();
    std::vector<uint16_t> a(kM * kK);
    for (uint16_t& v : a) v = to_bf16(static_cast<float>(random.normal()));
    std::vector<uint8_t> codes(static_cast<size_t>(kGroups * s.code_bytes));
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random.below(256));
    std::vector<uint8_t> scales(static_cast<size_t>(kGroups * s.scale_count));
    const uint32_t one = encode(b.spec.scale, 1.0f);
    for (uint8_t& scale : scales)
      scale = static_cast<uint8_t>(random.one_in(40) ? random.below(256) : one + random.below(3));
    const Memory on_a(a), on_codes(codes), on_scales(scales), values(kGroups * kN * kK * 2);
    const Memory ends(std::vector<int32_t>{90, 90, 91, 290});
    b.codes = on_codes.as<uint8_t>(), b.scales = on_scales.as<uint8_t>();
    gpu::dequantize(b, {values.as<void>(), DType::bf16, kN, kK, kK, 1, kGroups, kN * kK}, stream);
    stream.wait();
    for (const bool grouped : {false, true}) {
      CodedGemm g;
      g.m = kM, g.n = kN, g.k = kK, g.stride = kK, g.d_stride = kN, g.d_f32 = true;
      g.a = on_a.as<void>(), g.b = values.as<void>(), g.coded = b;
      if (grouped) {
        g.grouping = Grouping::rows, g.groups = kGroups, g.group_rows = kM;
        g.offsets = ends.as<void>();
      } else {
        g.coded.batch = 1;
      }
      const auto bits_of = [&](const auto& multiply) {
        const Memory d(std::vector<float>(kM * kN, 7));
        g.d = d.as<void>();
        EXPECT_EQ(multiply(g, nullptr), cudaSuccess);
        std::vector<uint32_t> found(kM * kN);
        d.read(found.data(), kM * kN * 4);
        return found;
      };
      const auto want = bits_of(sm90::bf16_gemm);
      for (g.tile = 0; g.tile < cuda::kCodedTileCount; ++g.tile)
        ASSERT_EQ(bits_of(sm90::coded_gemm), want)
            << "tile " << g.tile << (grouped ? ", groups" : "");
    }
  }
}

// B in every format that is decoded, in rows and in squares.
TEST_F(Bf16GemmTest, Coded) {
  for (const char* spec : kCodedSpecs) {
    for (int tile = -1; tile < cuda::kCodedTileCount; ++tile) {
      for (uint64_t seed = 0; seed < 6; ++seed) {
        Random random(seed * 100 + static_cast<uint64_t>(tile + 1));
        Case c = drawn(random, tile);
        c.coded = spec;
        c.k = 64 * (1 + static_cast<int64_t>(random.below(5)));
        if (seed == 0) c.m = 520, c.n = 400, c.pad = 0;  // several tiles, whole ones too
        if (seed == 1) c.k = 1344;                       // more stages than any ring has
        run(c, seed);
        c.m = 0, c.n = std::min<int64_t>(c.n, 129), c.k = std::min<int64_t>(c.k, 192);
        c.groups = drawn_groups(random);
        c.behind = random.one_in(2) ? 0 : 37;
        run(c, seed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// More tiles than a device has multiprocessors, so that clusters have several each.
TEST_F(Bf16GemmTest, EverySchedule) {
  Case c;
  c.tile = cuda::kBf16TileCount - 1;
  c.k = 70, c.n = 1300, c.outer = true;
  for (const Schedule schedule : {Schedule::fixed, Schedule::dynamic}) {
    c.schedule = schedule, c.m = 1100, c.groups.clear(), c.unit = 0;
    run(c, 1);
    c.groups = {400, 0, 1, 499, 200}, c.behind = 37;
    run(c, 2);
    for (int tile = 0; tile < cuda::kCodedTileCount; ++tile)
      for (const char* spec : {"nvfp4", "mxfp8"})
        for (const int64_t k : {64, 320}) {  // no multiples of a ring, or of what warps are dealt
          const bool large = cuda::kCodedTiles[tile].rows() > 64;
          Case coded = c;
          coded.tile = tile, coded.coded = spec, coded.k = k;
          coded.n = large ? 1450 : 700;
          coded.groups = {large ? 1700 : 300, 0, 1, large ? 900 : 200, 200};
          run(coded, 4);
          coded.groups.clear(), coded.behind = 0, coded.m = large ? 2900 : 800;
          run(coded, 5);
        }
    c.groups = {30, 0, 5, 35}, c.unit = 16, c.m = 300;
    run(c, 3);
  }
}

TEST_F(Bf16GemmTest, ManyGroups) {
  Case c;
  c.n = 70, c.k = 72, c.outer = c.bias = true;
  c.groups = many_groups();
  for (const bool f32 : {false, true}) {
    c.f32 = f32;
    run(c, 1);
  }
}

TEST_F(Bf16GemmTest, WrongOffsetsMakeAllNan) {
  Case c;
  c.n = 130, c.k = 64, c.groups = {100, 0, 30}, c.wrong = true;
  for (const bool wide : {false, true}) {
    c.int64_offsets = wide;
    for (const int64_t unit : {0, 16}) {
      c.unit = unit, c.m = 20;
      run(c, 1);
    }
  }
}

TEST_F(Bf16GemmTest, NothingToAdd) {
  Case c;
  c.m = 5, c.n = 70, c.k = 0;
  for (const bool bias : {false, true}) {
    c.bias = bias;
    run(c, 1);
  }
}

TEST_F(Bf16GemmTest, RefusesWhatItHasNoKernelFor) {
  Bf16Gemm g;
  g.m = g.n = g.k = 8, g.groups = sm90::kMaxGroups + 1;
  EXPECT_EQ(sm90::bf16_gemm(g, nullptr), cudaErrorInvalidValue);
  g.groups = 1, g.grouping = Grouping::contraction, g.storage_unit = 8;
  EXPECT_EQ(sm90::bf16_gemm(g, nullptr), cudaErrorInvalidValue);
}

TEST_F(Bf16GemmTest, TakesOnlyCodesThatItDecodes) {
  const auto operand = [](const char* spec, int64_t columns = 128) {
    ConstQuantized q;
    q.spec = parse_spec(spec), q.rows = 48, q.columns = columns;
    return q;
  };
  EXPECT_TRUE(sm90::takes_coded(operand("nvfp4")));
  EXPECT_TRUE(sm90::takes_coded(operand("nvfp4", 64)));
  EXPECT_FALSE(sm90::takes_coded(operand("nvfp4", 96)));
  EXPECT_FALSE(sm90::takes_coded(operand("mxfp4")));
  EXPECT_FALSE(sm90::takes_coded(operand("fp8_1x128")));
  EXPECT_FALSE(sm90::takes_coded(operand("mxfp8[element=e5m2]")));
  ConstQuantized q = operand("nvfp4");
  q.layout.scales = Layout::nv_128x4;
  EXPECT_FALSE(sm90::takes_coded(q));
  q = operand("nvfp4"), q.codes = reinterpret_cast<const uint8_t*>(8);
  EXPECT_FALSE(sm90::takes_coded(q));
  q = operand("nvfp4"), q.scales = reinterpret_cast<const uint8_t*>(1);
  EXPECT_FALSE(sm90::takes_coded(q));
  q = operand("nvfp4"), q.groups.count = 2;
  EXPECT_FALSE(sm90::takes_coded(q));
  CodedGemm g;
  g.m = g.n = 8, g.k = 96, g.coded = operand("nvfp4", 96);
  EXPECT_EQ(sm90::coded_gemm(g, nullptr), cudaErrorInvalidValue);
  g.k = 128, g.coded = operand("nvfp4"), g.grouping = Grouping::contraction;
  EXPECT_EQ(sm90::coded_gemm(g, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace blockscale::testing
#endif
