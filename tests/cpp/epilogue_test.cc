// What follows the sums of a GEMM on a GPU: from equal sums, the bits that the CPU's GEMM gives.
#include <gtest/gtest.h>

#if defined(BLOCKSCALE_CUDA) || defined(BLOCKSCALE_EMULATE)
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cases.h"
#include "device.h"
#include "gpu/gpu.h"

namespace blockscale::testing {
namespace {

// Host bytes on the device, so many bytes behind a multiple of 16, with guards around them.
class OnDevice {
 public:
  OnDevice(const void* from, size_t size, size_t behind = 0)
      : host_(guarded(from, size, behind)),
        behind_(behind),
        memory_(host_.all(), host_.all_size()) {}
  template <class T = void>
  T* data() const {
    return reinterpret_cast<T*>(memory_.at(Guarded::kGuard) + behind_);
  }
  std::vector<uint8_t> read() {
    const std::vector<uint8_t> before(host_.data(), host_.data() + behind_);
    memory_.read(host_.all(), host_.all_size());
    EXPECT_TRUE(host_.guards_whole()) << "written beside D";
    EXPECT_TRUE(std::equal(before.begin(), before.end(), host_.data())) << "written before D";
    return {host_.data() + behind_, host_.data() + host_.size()};
  }

 private:
  static Guarded guarded(const void* from, size_t size, size_t behind) {
    static_assert(Guarded::kGuard % 16 == 0);
    Guarded bytes(static_cast<int64_t>(behind + size));
    std::memcpy(bytes.data() + behind, from, size);
    return bytes;
  }
  Guarded host_;
  size_t behind_;
  Memory memory_;
};

std::vector<uint8_t> stored(const std::vector<float>& values, DType dtype) {
  std::vector<uint8_t> bytes(values.size() * dtype_bytes(dtype));
  const Matrix to{bytes.data(), dtype};
  for (size_t i = 0; i < values.size(); ++i) store_element(to, static_cast<int64_t>(i), values[i]);
  return bytes;
}

struct EpilogueTest : public DeviceTest<::testing::TestWithParam<uint64_t>> {
  void SetUp() override {
    DeviceTest::SetUp();
    std::printf("seed %llu\n", static_cast<unsigned long long>(GetParam()));
  }
};
INSTANTIATE_TEST_SUITE_P(Seeds, EpilogueTest, ::testing::ValuesIn(test_seeds()));

// Every dtype, with and without each part of the formula, extents that no vector divides, D at any
// element, outer scales whose product leaves FP32's range, and values that are not numbers.
TEST_P(EpilogueTest, GivesTheBitsOfTheCpuFromItsSums) {
  for (int i = 0; i < 60; ++i) {
    Random random(GetParam() * 1000003 + static_cast<uint64_t>(i));
    const auto m = static_cast<int64_t>(1 + random.below(70));
    const auto n = static_cast<int64_t>(1 + random.below(i % 4 == 0 ? 9000 : 150));
    const int64_t k = 16;
    // The sums: the CPU's own, without outer scales.
    QuantSpec plain = kNvfp4;
    plain.outer = false;
    Output a(plain, {}, -1, m, k), b(plain, {}, -1, n, k);
    for (Output* o : {&a, &b}) {
      const Input x(DType::f32, 1, o->view.rows, k, Strides::row_major,
                    [&](int64_t, int64_t, int64_t) { return static_cast<float>(random.normal()); });
      quantize(x.view(), o->view, {}, serial_executor());
    }
    std::vector<float> sums(static_cast<size_t>(m * n));
    gemm(as_const(a.view), as_const(b.view), {sums.data(), DType::f32, m, n, n, 1, 1, m * n});

    const bool extreme = random.one_in(4);
    const auto scale = [&](int exponent) {
      return static_cast<float>(std::ldexp(random.normal(), extreme ? exponent : 0));
    };
    const float outers[] = {scale(-110), scale(-100)};
    GemmOptions options;
    options.alpha = random.one_in(2) || extreme ? scale(120) : 1.0f;
    const DType bias_dtype = random.pick(std::array{DType::f32, DType::bf16, DType::f16});
    std::vector<float> bias(static_cast<size_t>(n));
    for (float& v : bias) v = from_bf16(to_bf16(static_cast<float>(random.normal())));
    const std::vector<uint8_t> bias_bytes = stored(bias, bias_dtype);
    const Matrix bias_view{const_cast<uint8_t*>(bias_bytes.data()), bias_dtype};
    for (int64_t c = 0; c < n; ++c)  // FP16 may have rounded it
      bias[c] = load_element({bias_view.data, bias_dtype}, c);
    if (random.one_in(2)) options.bias = bias.data();
    const DType dtype = random.pick(std::array{DType::f32, DType::bf16, DType::f16});
    options.accumulate = dtype == DType::f32 && random.one_in(2);
    const bool a_outer = !random.one_in(4), b_outer = !random.one_in(4);

    // What the CPU makes of them. It writes no FP16: that is its FP32 rounded.
    a.view.spec.outer = a_outer, b.view.spec.outer = b_outer;
    a.view.outer = const_cast<float*>(&outers[0]), b.view.outer = const_cast<float*>(&outers[1]);
    std::vector<float> before(sums.size(), 0.75f), want = before;
    gemm(as_const(a.view), as_const(b.view), {want.data(), DType::f32, m, n, n, 1, 1, m * n},
         options);

    OnDevice device_sums(sums.data(), sums.size() * 4), scales(outers, sizeof outers),
        device_bias(bias_bytes.data(), bias_bytes.size());
    const std::vector<uint8_t> initial = stored(before, dtype);
    OnDevice d(initial.data(), initial.size(), random.below(8) * dtype_bytes(dtype));
    const bool in_place = dtype == DType::f32 && !options.accumulate && random.one_in(2);
    const TestStream stream;
    gpu::Epilogue e;
    e.alpha = options.alpha;
    if (a_outer) e.a_outer = scales.data<float>();
    if (b_outer) e.b_outer = scales.data<float>() + 1;
    if (options.bias) e.bias = device_bias.data();
    e.bias_dtype = bias_dtype;
    e.accumulate = options.accumulate;
    gpu::finish({device_sums.data(), DType::f32, m, n, n},
                {in_place ? device_sums.data() : d.data(), dtype, m, n, n, 1, 1, m * n}, e, stream);
    stream.wait();
    ASSERT_EQ((in_place ? device_sums : d).read(), stored(want, dtype))
        << m << "x" << n << ", seed " << GetParam() << " case " << i;
  }
}

TEST_P(EpilogueTest, HidesNoNan) {
  const float sums[] = {NAN, HUGE_VALF, -HUGE_VALF, 1, 0}, outers[] = {NAN, 0.0f};
  for (const float& outer : outers) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const std::vector<uint8_t> none(5 * dtype_bytes(dtype));
      OnDevice s(sums, sizeof sums), o(&outer, 4), d(none.data(), none.size());
      const TestStream stream;
      gpu::Epilogue e;
      e.b_outer = o.data<float>();
      gpu::finish({s.data(), DType::f32, 1, 5, 5}, {d.data(), dtype, 1, 5, 5, 1, 1, 5}, e, stream);
      stream.wait();
      const std::vector<uint8_t> got = d.read();
      for (int i = 0; i < 5; ++i)
        EXPECT_EQ(std::isnan(load_element({got.data(), dtype}, i)), std::isnan(sums[i] * outer));
    }
  }
}

// A contraction axis of no elements: 0, or D as it was, even -0, whatever the outer scales.
TEST_P(EpilogueTest, TakesNothingFromNoSums) {
  const float sums[6] = {}, outer = NAN, before[] = {-0.0f, 0.0f, 1.0f, -2.0f, 3.0f, 4.0f};
  const float bias[] = {-0.0f, 0.5f, -1.0f};
  for (int choice = 0; choice < 4; ++choice) {
    const bool accumulate = choice % 2, biased = choice / 2;
    OnDevice s(sums, sizeof sums), o(&outer, 4), b(bias, sizeof bias), d(before, sizeof before);
    const TestStream stream;
    gpu::Epilogue e;
    e.a_outer = o.data<float>();
    if (biased) e.bias = b.data();
    e.accumulate = accumulate;
    e.empty = true;
    gpu::finish({s.data(), DType::f32, 2, 3, 3}, {d.data(), DType::f32, 2, 3, 3, 1, 1, 6}, e,
                stream);
    stream.wait();
    std::vector<float> want(before, before + 6);
    for (int i = 0; i < 6; ++i) {
      const float kept = accumulate ? before[i] : 0.0f;
      want[i] = biased ? 0.0f + bias[i % 3] + kept : kept;
    }
    EXPECT_EQ(d.read(), stored(want, DType::f32)) << choice;
  }
}

}  // namespace
}  // namespace blockscale::testing
#else
TEST(EpilogueTest, GivesTheBitsOfTheCpuFromItsSums) {
  GTEST_SKIP() << "this build has no CUDA kernels";
}
#endif
