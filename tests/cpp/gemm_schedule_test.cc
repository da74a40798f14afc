// Counters of dynamic schedules: launches that run at the same time have different ones.
#ifdef BLOCKSCALE_CUDA
#include <array>
#include <set>
#include <vector>

#include "cuda/sm90/counters.h"
#include "cuda/sm90/gemm.h"
#include "gemm_device.h"

namespace blockscale::testing {
namespace {

using sm90::CounterNumbers;
using sm90::Schedule;

TEST(CounterNumbers, AreOneStreamsOrOneLaunchsOwn) {
  CounterNumbers numbers(3, 5);
  const int first = numbers.of_stream(70), captured = numbers.of_captured();
  const int second = numbers.of_stream(7), third = numbers.of_stream(0);
  EXPECT_EQ(numbers.of_stream(70), first);
  EXPECT_EQ(numbers.of_stream(1), -1);
  EXPECT_EQ(numbers.of_stream(7), second);
  const int last = numbers.of_captured();
  EXPECT_EQ(numbers.of_captured(), -1);
  EXPECT_EQ(numbers.of_captured(), -1);
  EXPECT_EQ((std::set{first, second, third, captured, last}), (std::set{0, 1, 2, 3, 4}));
}

constexpr int64_t kM = 1100, kN = 1300, kK = 256;

// The operands of one product, and what a fixed schedule makes of them.
class Product {
 public:
  Product() {
    multiply(want_, Schedule::fixed, nullptr);
    check(cudaDeviceSynchronize());
  }

  // In 64 x 32: several tiles for each multiprocessor.
  void multiply(const Memory& d, Schedule schedule, cudaStream_t stream) const {
    sm90::Fp8Gemm g;
    g.m = kM, g.n = kN, g.k = kK;
    g.a = a_.as<void>(), g.b = b_.as<void>();
    g.a_scales = g.b_scales = ones_.as<float>();
    g.d = d.as<void>(), g.d_stride = kN, g.d_f32 = true;
    g.tile = 5, g.schedule = schedule;
    check(sm90::fp8_gemm(g, stream));
  }
  bool is_in(const Memory& d) const { return values(d) == values(want_); }
  static Memory cleared() { return Memory(std::vector<float>(static_cast<size_t>(kM * kN))); }

 private:
  static std::vector<uint8_t> codes(int64_t lines) {
    Random random(static_cast<uint64_t>(lines));
    std::vector<uint8_t> all(static_cast<size_t>(lines * kK));
    for (uint8_t& code : all) code = static_cast<uint8_t>(random.below(0x70));
    return all;
  }
  static std::vector<float> values(const Memory& d) {
    std::vector<float> all(static_cast<size_t>(kM * kN));
    d.read(all.data(), kM * kN * 4);
    return all;
  }

  const Memory a_{codes(kM)}, b_{codes(kN)}, ones_{std::vector<float>(kM * kK / 128 + 4, 1.0f)};
  const Memory want_ = cleared();
};

class ScheduleTest : public HopperTest {};

TEST_F(ScheduleTest, StreamsSideBySide) {
  const Product product;
  const std::array streams{new_stream(), new_stream()};
  for (int repeat = 0; repeat < 20; ++repeat) {
    const std::array d{product.cleared(), product.cleared(), product.cleared(), product.cleared()};
    for (size_t i = 0; i < 4; ++i) product.multiply(d[i], Schedule::dynamic, streams[i % 2]);
    check(cudaDeviceSynchronize());
    for (const Memory& one : d) ASSERT_TRUE(product.is_in(one)) << "repeat " << repeat;
  }
  for (cudaStream_t stream : streams) delete_stream(stream);
}

// Both are captured on one stream, and run on two.
TEST_F(ScheduleTest, GraphsSideBySide) {
  const Product product;
  const std::array streams{new_stream(), new_stream()};
  const std::array d{product.cleared(), product.cleared(), product.cleared()};
  std::array<cudaGraphExec_t, 2> runs{};
  for (size_t i = 0; i < 2; ++i) {
    cudaGraph_t graph{};
    check(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal));
    for (int launch = 0; launch < 3; ++launch)
      product.multiply(d[i], Schedule::dynamic, streams[0]);
    check(cudaStreamEndCapture(streams[0], &graph));
    check(cudaGraphInstantiate(&runs[i], graph, 0));
    check(cudaGraphDestroy(graph));
  }
  for (int repeat = 0; repeat < 20; ++repeat) {
    for (const Memory& one : d) check(cudaMemset(one.as<void>(), 0, kM * kN * 4));
    check(cudaDeviceSynchronize());
    for (size_t i = 0; i < 2; ++i) check(cudaGraphLaunch(runs[i], streams[i]));
    product.multiply(d[2], Schedule::dynamic, streams[0]);
    check(cudaDeviceSynchronize());
    for (const Memory& one : d) ASSERT_TRUE(product.is_in(one)) << "repeat " << repeat;
  }
  for (cudaGraphExec_t run : runs) check(cudaGraphExecDestroy(run));
  for (cudaStream_t stream : streams) delete_stream(stream);
}

}  // namespace
}  // namespace blockscale::testing
#endif  // BLOCKSCALE_CUDA
