// Products over groups: every group's is what a product of its own operands would be, to the bit,
// and nothing else of D is touched but the rows that belong to no group.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>

#include "cases.h"
#include "device.h"
#include "parts.h"
#include "throws.h"
#ifdef BLOCKSCALE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace blockscale::testing {
namespace {

enum class Form { rows, contraction };

std::vector<int64_t> ends_of(Random& random, int64_t count, int64_t rows) {
  std::vector<int64_t> ends;
  int64_t end = 0;
  for (int64_t g = 0; g < count; ++g) {
    const int64_t left = rows - end;
    const auto some =
        static_cast<int64_t>(random.below(static_cast<uint64_t>(2 * rows / count + 2)));
    end += random.one_in(4)   ? 0
           : random.one_in(4) ? std::min<int64_t>(1, left)
                              : std::min(some, left);
    ends.push_back(end);
  }
  return ends;
}

// Two specs that may meet; B's draws no random bits, which would follow its place in the batch.
std::pair<QuantSpec, QuantSpec> random_pair(Random& random) {
  for (;;) {
    const QuantSpec a = random.pick(valid_specs()), b = random.pick(valid_specs());
    if (a.block == b.block && a.hadamard == b.hadamard && !b.stochastic()) return {a, b};
  }
}

// A of [T, C], and B: a batch of [N, C], or [T, N] in the same groups.
struct Problem {
  Problem(Form form_, const QuantSpec& sa, const QuantSpec& sb, const StorageLayout& la,
          const StorageLayout& lb, const std::vector<int64_t>& ends_, int64_t t, int64_t c,
          int64_t n, bool wide, const Values& a_values, const Values& b_values)
      : form(form_),
        ends(ends_),
        offsets(ends_, wide),
        count(static_cast<int64_t>(ends_.size())),
        xa(DType::f32, 1, t, c, Strides::row_major, a_values),
        xb(DType::f32, form_ == Form::rows ? count : 1, form_ == Form::rows ? n : t,
           form_ == Form::rows ? c : n, Strides::row_major, b_values),
        axis(form_ == Form::rows ? -1 : -2),
        a(sa, la, axis, t, c, 1, offsets.view()),
        b(sb, lb, axis, xb.view().rows, xb.view().columns, xb.view().batch,
          form_ == Form::rows ? Groups{} : offsets.view()) {
    options.rng = Rng{17, 3};
    quantize(xa.view(), a.view, options, serial_executor());
    quantize(xb.view(), b.view, options, serial_executor());
  }
  int64_t rows() const { return form == Form::rows ? xa.view().rows : xa.view().columns; }
  int64_t columns() const { return form == Form::rows ? xb.view().rows : xb.view().columns; }
  int64_t matrices() const { return form == Form::rows ? 1 : count; }
  int64_t elements() const { return matrices() * rows() * columns(); }
  Matrix d(void* data, DType dtype) const {
    return {data, dtype, rows(), columns(), columns(), 1, matrices(), rows() * columns()};
  }

  // The same, from the operands of each group alone.
  template <class Gemm>
  void by_pieces(const Matrix& out, const GemmOptions& o, const Gemm& multiply) const {
    GroupStart at;
    for (int64_t g = 0; g < count; ++g) {
      const int64_t height = ends[static_cast<size_t>(g)] - at.row;
      const auto piece = [&](const Input& x, const Output& whole) {
        auto one = std::make_unique<Output>(whole.view.spec, whole.view.layout, axis, height,
                                            x.view().columns);
        QuantizeOptions mine = options;
        mine.origin_row = axis == -1 ? at.row : at.position;
        reference::quantize(rows_of(x.view(), at.row, height), one->view, mine);
        return one;
      };
      const auto left = piece(xa, a);
      std::unique_ptr<Output> right;
      Matrix to = out;
      to.batch = 1;
      if (form == Form::rows) {
        right =
            std::make_unique<Output>(b.view.spec, b.view.layout, axis, columns(), b.view.columns);
        ConstMatrix one = xb.view();
        one.data = static_cast<const float*>(one.data) + g * one.batch_stride;
        one.batch = 1;
        quantize(one, right->view, {}, serial_executor());
        to = rows_of(to, at.row, height);
      } else {
        right = piece(xb, b);
        to.data = static_cast<uint8_t*>(to.data) + g * to.batch_stride * dtype_bytes(to.dtype);
      }
      GemmOptions mine = o;
      if (mine.bias) mine.bias = static_cast<const float*>(mine.bias) + g * columns();
      multiply(as_const(left->view), as_const(right->view), to, mine);
      at = next_group(at, a.view.spec, a.view.layout, axis, height);
    }
    if (form == Form::rows && !o.accumulate) clear_rows(out, at.row);
  }

  Form form;
  std::vector<int64_t> ends;
  Offsets offsets;
  int64_t count;
  Input xa, xb;
  int axis;
  Output a, b;
  QuantizeOptions options;
};

class GemmGroupedTest : public ::testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override { std::printf("seed %llu\n", static_cast<unsigned long long>(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Seeds, GemmGroupedTest, ::testing::ValuesIn(test_seeds()));

TEST_P(GemmGroupedTest, IsTheProductsOfItsGroups) {
  for (int i = 0; i < (kSweepStep > 1 ? 12 : 30); ++i) {
    Random random(GetParam() * 1000003 + static_cast<uint64_t>(i));
    const auto [sa, sb] = random_pair(random);
    const StorageLayout la = random.pick(layouts_for(sa)), lb = random.pick(layouts_for(sb));
    const Form form = random.one_in(2) ? Form::rows : Form::contraction;
    constexpr int64_t kCounts[] = {1, 3, 8, 33};
    const auto t = static_cast<int64_t>(random.below(400));
    const Problem p(form, sa, sb, la, lb, ends_of(random, random.pick(kCounts), t), t,
                    static_cast<int64_t>(random.below(150)), static_cast<int64_t>(random.below(70)),
                    random.one_in(2), random_values(random), random_values(random));
    GemmOptions options;
    if (random.one_in(2)) options.alpha = static_cast<float>(random.normal());
    std::vector<float> bias(static_cast<size_t>(p.count * p.columns()));
    for (float& v : bias) v = static_cast<float>(random.normal());
    if (random.one_in(2)) options.bias = bias.data();
    const DType dtype = random.one_in(2) ? DType::f32 : DType::bf16;
    options.accumulate = dtype == DType::f32 && random.one_in(2);
    SCOPED_TRACE(to_string(sa) + " as " + to_string(la) + " x " + to_string(sb) + " as " +
                 to_string(lb) + (form == Form::rows ? ", rows" : ", contraction") + " seed " +
                 std::to_string(GetParam()) + " case " + std::to_string(i));
    const int64_t bytes = p.elements() * dtype_bytes(dtype);
    // 0x3D3D3D3D is a small number: something to add to.
    Guarded got(bytes, 0x3D), want(bytes, 0x3D), odd(bytes, 0x3D);
    gemm(as_const(p.a.view), as_const(p.b.view), p.d(got.data(), dtype), options,
         serial_executor());
    p.by_pieces(p.d(want.data(), dtype), options,
                [](const auto& a, const auto& b, const Matrix& d, const GemmOptions& o) {
                  gemm(a, b, d, o, serial_executor());
                });
    ASSERT_EQ(got.difference(want), "");
    gemm(as_const(p.a.view), as_const(p.b.view), p.d(odd.data(), dtype), options,
         OddExecutor(GetParam() + static_cast<uint64_t>(i)));
    ASSERT_EQ(odd.difference(got), "") << "sums depend on the number of threads";

    Guarded reference(bytes, 0x3D), pieces(bytes, 0x3D);
    reference::gemm(as_const(p.a.view), as_const(p.b.view), p.d(reference.data(), dtype), options);
    p.by_pieces(p.d(pieces.data(), dtype), options, reference::gemm);
    ASSERT_EQ(reference.difference(pieces), "");
  }
}

// ---- exact operands: a block's largest number is 448 and all are multiples of 64, so that scales
// are 1, codes exact and sums the same in any order ----

Values exact_values(const std::vector<int64_t>& ends, int axis) {
  return [=](int64_t b, int64_t r, int64_t c) {
    int64_t begin = 0;
    for (const int64_t end : ends)
      if (end <= r) begin = end;
    const int64_t along = axis == -1 ? c : r - begin;
    if (along % 128 == 0) return 448.0f;
    return static_cast<float>(64 * ((b * 3 + r * 5 + c * 7) % 5 - 2));
  };
}
Problem exact_problem(Random& random, Form form, int64_t count, int64_t t, int64_t c, int64_t n,
                      bool square) {
  std::vector<int64_t> ends = ends_of(random, count, t);
  if (random.one_in(2)) ends.back() = t;
  const int axis = form == Form::rows ? -1 : -2;
  const StorageLayout linear{}, major{Layout::linear, Layout::mn_major};
  return Problem(form, kFp8_1x128, square ? kFp8_128x128 : kFp8_1x128,
                 random.one_in(2) ? linear : major, random.one_in(2) ? linear : major, ends, t, c,
                 n, random.one_in(2), exact_values(ends, axis),
                 exact_values(form == Form::rows ? std::vector<int64_t>{} : ends, axis));
}

// Sums of exact operands have no error: CPU and reference agree to the bit.
TEST(GemmGrouped, ExactSumsAreExact) {
  for (const Form form : {Form::rows, Form::contraction}) {
    for (const int64_t count : {1, 8, 33, 256}) {
      Random random(static_cast<uint64_t>(count));
      const Problem p = exact_problem(random, form, count, 300, 130, 37, count == 8);
      Guarded got(p.elements() * 4), want(p.elements() * 4);
      gemm(as_const(p.a.view), as_const(p.b.view), p.d(got.data(), DType::f32));
      reference::gemm(as_const(p.a.view), as_const(p.b.view), p.d(want.data(), DType::f32), {});
      ASSERT_EQ(got.difference(want), "") << count;
    }
  }
}

TEST(GemmGrouped, EveryMatrixOfBHasItsOwnScales) {
  const Values a = [](int64_t, int64_t r, int64_t c) { return static_cast<float>(r - c); };
  const Values b = [&](int64_t batch, int64_t r, int64_t c) {
    return std::ldexp(a(0, r, c), static_cast<int>(3 * batch));
  };
  for (const QuantSpec& spec : {kFp8_1x128, kMxfp8, kNvfp4}) {
    const Problem p(Form::rows, spec, spec, {}, {}, {5, 5, 40}, 40, 70, 7, true, a, b);
    Guarded got(p.elements() * 4), want(p.elements() * 4);
    gemm(as_const(p.a.view), as_const(p.b.view), p.d(got.data(), DType::f32));
    p.by_pieces(p.d(want.data(), DType::f32), {},
                [](const auto& left, const auto& right, const Matrix& d, const GemmOptions& o) {
                  gemm(left, right, d, o);
                });
    ASSERT_EQ(got.difference(want), "") << to_string(spec);
  }
}

TEST(GemmGrouped, MatricesOfDMayLieApart) {
  Random random(1);
  const Problem p = exact_problem(random, Form::contraction, 3, 300, 13, 7, false);
  const int64_t size = p.rows() * p.columns(), apart = size + 5;
  std::vector<float> close(static_cast<size_t>(3 * size)), far(static_cast<size_t>(3 * apart), 9);
  gemm(as_const(p.a.view), as_const(p.b.view), p.d(close.data(), DType::f32));
  Matrix d = p.d(far.data(), DType::f32);
  d.batch_stride = apart;
  gemm(as_const(p.a.view), as_const(p.b.view), d);
  for (int64_t g = 0; g < 3; ++g)
    for (int64_t i = 0; i < apart; ++i)
      ASSERT_EQ(far[static_cast<size_t>(g * apart + i)],
                i < size ? close[static_cast<size_t>(g * size + i)] : 9)
          << g << " " << i;
}

TEST(GemmGrouped, Refusals) {
  const Offsets offsets({10, 40}, true), decreasing({30, 20}, true);
  const auto with = [&](int a_axis, const Groups& a_groups, int b_axis, const Groups& b_groups,
                        int64_t b_batch, int64_t d_batch) {
    Output a(kMxfp8, {}, a_axis, 40, 64, 1, offsets.view());
    Output b(kMxfp8, {}, b_axis, b_groups ? 40 : 30, b_groups ? 30 : 64, b_batch, b_groups);
    a.view.groups = a_groups;
    std::vector<float> values(2 * 64 * 40);
    gemm(as_const(a.view), as_const(b.view),
         {values.data(), DType::f32, a_axis == -1 ? 40 : 64, 30, 30, 1, d_batch, 64 * 30});
  };
  const Groups none, good = offsets.view();
  with(-1, good, -1, none, 2, 1);
  with(-2, good, -2, good, 1, 2);
  EXPECT_ERROR(with(-1, none, -2, good, 1, 1), "gemm: b", "groups", "none where a has none");
  EXPECT_ERROR(with(-2, good, -1, none, 2, 1), "gemm: a", "groups along the rows, axis -1");
  EXPECT_ERROR(with(-1, good, -2, good, 1, 2), "gemm: a", "groups along the contraction axis");
  EXPECT_ERROR(with(-1, good, -1, none, 3, 1), "gemm: b.batch = 3", "2, one a group");
  EXPECT_ERROR(with(-2, good, -2, good, 1, 1), "gemm: d.batch = 1", "2, one a group");
  EXPECT_ERROR(with(-1, decreasing.view(), -1, none, 2, 1), "gemm: offsets[1] = 20 is smaller");
}

#ifdef BLOCKSCALE_CUDA
// Operands on the device for as long as the stream lives.
Groups on_device(const Groups& g, const TestStream& stream) {
  return {stream.copy(g.offsets, g.count * (g.int64_offsets ? 8 : 4)), g.int64_offsets, g.count};
}
ConstQuantized on_device(const Output& o, const Groups& groups, const TestStream& stream) {
  ConstQuantized q = as_const(o.view);
  q.codes = static_cast<const uint8_t*>(stream.copy(q.codes, o.codes.size()));
  q.scales = static_cast<const uint8_t*>(stream.copy(q.scales, o.scales.size()));
  if (q.groups) q.groups = groups;
  return q;
}

class GemmGroupedGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int major = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess ||
        major != 9)
      GTEST_SKIP() << "no GPU of compute capability 9.0";
  }
  // D on the GPU with its guards; `offsets` instead of the problem's own where given, and FP32
  // values of `before`.
  static Guarded run(const Problem& p, DType dtype, const GemmOptions& options,
                     const Offsets* offsets = nullptr, std::optional<float> before = {}) {
    const TestStream stream;
    Guarded out(p.elements() * dtype_bytes(dtype), 0x3D);
    if (before) std::fill_n(reinterpret_cast<float*>(out.data()), p.elements(), *before);
    const Memory d(out.all(), out.all_size());
    const Groups groups = on_device((offsets ? *offsets : p.offsets).view(), stream);
    GemmOptions o = options;
    if (o.bias) o.bias = stream.copy(o.bias, p.count * p.columns() * 4);
    gemm(on_device(p.a, groups, stream), on_device(p.b, groups, stream),
         p.d(d.at(Guarded::kGuard), dtype), o, stream);
    stream.wait();
    d.read(out.all(), out.all_size());
    return out;
  }
};

TEST_F(GemmGroupedGpuTest, GivesTheBitsOfTheCpuOnExactSums) {
  for (const Form form : {Form::rows, Form::contraction}) {
    for (const int64_t count : {1, 8, 33, 256}) {
      for (uint64_t seed = 0; seed < 6; ++seed) {
        Random random(seed * 1000 + static_cast<uint64_t>(count));
        constexpr int64_t kSizes[] = {1, 64, 127, 128, 130, 300};
        const Problem p =
            exact_problem(random, form, count, static_cast<int64_t>(random.below(1500)),
                          random.pick(kSizes), random.pick(kSizes), random.one_in(2));
        std::vector<float> bias(static_cast<size_t>(count * p.columns()));
        for (float& v : bias) v = static_cast<float>(random.below(9));
        GemmOptions options;
        if (random.one_in(2)) options.bias = bias.data();
        options.alpha = random.one_in(2) ? 0.5f : 1;
        const DType dtype = random.one_in(2) ? DType::f32 : DType::bf16;
        options.accumulate = dtype == DType::f32 && random.one_in(2);
        Guarded want(p.elements() * dtype_bytes(dtype), 0x3D);
        gemm(as_const(p.a.view), as_const(p.b.view), p.d(want.data(), dtype), options);
        const Guarded got = run(p, dtype, options);
        ASSERT_EQ(got.difference(want), "") << count << " groups, seed " << seed;
      }
    }
  }
}

// A sum of nothing is 0, whatever it is multiplied by, and changes nothing, not even -0.
TEST_F(GemmGroupedGpuTest, EmptyGroupsAddNothing) {
  Random random(1);
  const Problem p = exact_problem(random, Form::contraction, 3, 0, 130, 70, false);
  GemmOptions options;
  options.alpha = std::numeric_limits<float>::infinity();
  for (const bool accumulate : {false, true}) {
    options.accumulate = accumulate;
    const float before = accumulate ? -0.0f : 1.0f;
    const Guarded got = run(p, DType::f32, options, nullptr, before);
    for (int64_t i = 0; i < p.elements(); ++i) {
      const float value = reinterpret_cast<const float*>(got.data())[i];
      ASSERT_TRUE(value == 0 && std::signbit(value) == accumulate) << i << ": " << value;
    }
  }
}

TEST_F(GemmGroupedGpuTest, WrongOffsetsMakeAllOfDNan) {
  for (const Form form : {Form::rows, Form::contraction}) {
    Random random(1);
    const Problem p = exact_problem(random, form, 3, 500, 130, 70, true);
    for (const auto& ends : {std::vector<int64_t>{500, 100, 500}, {10, 20, 501}, {-5, 20, 30}}) {
      const Offsets wrong(ends, false);
      const Guarded got = run(p, DType::f32, {}, &wrong);
      for (int64_t i = 0; i < p.elements(); ++i)
        ASSERT_TRUE(std::isnan(reinterpret_cast<const float*>(got.data())[i])) << i;
      ASSERT_TRUE(got.guards_whole());
    }
  }
}
#endif

}  // namespace
}  // namespace blockscale::testing
