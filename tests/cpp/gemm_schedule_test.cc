// Dynamic schedules: the bits of fixed ones, and launches at the same time that do not disturb each
// other.
#ifdef BLOCKSCALE_CUDA
#include <array>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include "cuda/sm90/counters.h"
#include "cuda/sm90/gemm.h"
#include "gemm_device.h"

namespace blockscale::testing {
namespace {

using sm90::CounterNumbers;
using sm90::Grouping;
using sm90::Schedule;

TEST(CounterNumbers, AreOneStreamsOrOneLaunchsOwn) {
  CounterNumbers numbers(3, 5);
  const int first = numbers.of_stream(70), captured = numbers.take();
  const int second = numbers.of_stream(7), third = numbers.of_stream(0);
  EXPECT_EQ(numbers.of_stream(70), first);
  EXPECT_EQ(numbers.of_stream(1), -1);
  EXPECT_EQ(numbers.of_stream(7), second);
  EXPECT_EQ(numbers.of_stream(70, 1), -1) << "another kind of kernels";
  CounterNumbers few(2, 2);
  EXPECT_EQ(few.of_stream(70, 1), 0);
  EXPECT_EQ(few.of_stream(70, 2), -1) << "streams have the other half";
  EXPECT_EQ(few.of_stream(70), 1);
  const int last = numbers.take();
  EXPECT_EQ(numbers.take(), -1);
  EXPECT_EQ((std::set{first, second, third, captured, last}), (std::set{0, 1, 2, 3, 4}));
  numbers.give_back(captured);
  EXPECT_EQ(numbers.take(), captured);
  EXPECT_EQ(numbers.take(), -1);
}

class ScheduleTest : public HopperTest {};

// A graph with what `work` launches.
template <class Work>
cudaGraph_t captured(cudaStream_t stream, const Work& work) {
  cudaGraph_t graph{};
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  work();
  check(cudaStreamEndCapture(stream, &graph));
  return graph;
}

TEST_F(ScheduleTest, EveryStreamAndEveryCapturedLaunchHasACounter) {
  cudaStream_t one = new_stream(), other = new_stream();
  const int first = sm90::counter_of(one, Previous::any),
            second = sm90::counter_of(other, Previous::any);
  const int of_default = sm90::counter_of(nullptr, Previous::any);
  EXPECT_EQ(sm90::counter_of(one, Previous::any), first);
  EXPECT_EQ(sm90::counter_of(cudaStreamLegacy, Previous::any), of_default);
  int in_thread = -1, here = sm90::counter_of(cudaStreamPerThread, Previous::any);
  std::thread([&] { in_thread = sm90::counter_of(cudaStreamPerThread, Previous::any); }).join();
  delete_stream(other);
  other = new_stream();
  const int third = sm90::counter_of(other, Previous::any);
  std::set<int> all{first, second, third, of_default, in_thread, here};
  const auto promised = [&] {
    for (const Previous previous : {Previous::operands, Previous::nothing}) {
      const int number = sm90::counter_of(one, previous);
      all.insert(number);
      EXPECT_EQ(sm90::counter_of(one, previous), number);
    }
  };
  promised();
  std::thread(promised).join();
  EXPECT_EQ(all.size(), 10u);
  EXPECT_GE(*all.begin(), 0);

  std::array<int, 3> launches{};
  const auto ask = [&] {
    for (int& launch : launches) launch = sm90::counter_of(one, Previous::any);
  };
  const cudaGraph_t graph = captured(one, ask);
  const std::set<int> of_graph(launches.begin(), launches.end());
  EXPECT_EQ(of_graph.size(), 3u);
  EXPECT_GE(*of_graph.begin(), 0);
  for (const int number : of_graph) EXPECT_EQ(all.count(number), 0u);
  // What is instantiated from a graph keeps its counters.
  cudaGraphExec_t run{};
  check(cudaGraphInstantiate(&run, graph, 0));
  check(cudaGraphDestroy(graph));
  const cudaGraph_t later = captured(one, ask);
  for (const int number : launches) EXPECT_EQ(of_graph.count(number), 0u);
  check(cudaGraphDestroy(later));
  check(cudaGraphExecDestroy(run));
  // They are given back a little later, to be found among others.
  std::set<int> again;
  std::vector<cudaGraph_t> kept;
  while (kept.size() < 500 && again != of_graph) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    kept.push_back(captured(one, ask));
    for (const int number : launches)
      if (of_graph.count(number)) again.insert(number);
  }
  EXPECT_EQ(again, of_graph);
  for (const cudaGraph_t other_graph : kept) check(cudaGraphDestroy(other_graph));
  delete_stream(one);
  delete_stream(other);
}

// Codes of FP8, or values of BF16, of up to about 2.
Memory random_bytes(int64_t size) {
  Random random(static_cast<uint64_t>(size));
  std::vector<uint8_t> all(static_cast<size_t>(size));
  for (uint8_t& byte : all) byte = static_cast<uint8_t>(random.below(0x40));
  return Memory(all);
}
Memory poisoned(int64_t size) {
  return Memory(std::vector<uint8_t>(static_cast<size_t>(size), 0xFF));
}
std::vector<uint8_t> bytes(const Memory& memory, int64_t size) {
  std::vector<uint8_t> all(static_cast<size_t>(size));
  memory.read(all.data(), size);
  return all;
}

// Products of so many units that a cluster has ten and more, or six over groups along K: all slots
// of the mailbox are used again.
class ManyUnits {
 public:
  // `g` has its scales and a tile; `width` bytes a value.
  template <class G, class Launch>
  void compare(G g, int width, Launch launch) {
    g.a = a_.as<void>(), g.b = b_.as<void>();
    g.m = kM, g.n = kN, g.k = kBytes / width;
    with_both(g, 1, launch);
    g.grouping = Grouping::rows, g.groups = kGroups, g.group_rows = kM;
    for (const auto* ends : {&some_, &all_}) {  // with late tails, too
      g.offsets = ends->template as<void>();
      with_both(g, 1, launch);
    }
    g.grouping = Grouping::contraction, g.groups = 8, g.offsets = along_.as<void>();
    g.m = 1700, g.n = 1600, g.k = g.group_rows = 8 * 128;
    with_both(g, 8, launch);
  }
  const Memory& ones() const { return ones_; }

  static constexpr int64_t kM = 7000, kN = 6700, kBytes = 256, kGroups = 16;

 private:
  template <class G, class Launch>
  static void with_both(G g, int64_t matrices, Launch launch) {
    const int64_t size = matrices * g.m * g.n * 2;
    const Memory fixed = poisoned(size), dynamic = poisoned(size);
    g.d_stride = g.n;
    g.schedule = Schedule::fixed, g.d = fixed.template as<void>();
    check(launch(g, nullptr));
    g.schedule = Schedule::dynamic, g.d = dynamic.template as<void>();
    check(launch(g, nullptr));
    check(cudaDeviceSynchronize());
    EXPECT_TRUE(bytes(dynamic, size) == bytes(fixed, size))
        << "tile " << g.tile << ", grouping " << static_cast<int>(g.grouping);
  }
  static std::vector<int32_t> ends(int64_t group, int64_t count) {
    std::vector<int32_t> all;
    for (int64_t g = 1; g <= count; ++g) all.push_back(static_cast<int32_t>(g * group));
    return all;
  }

  const Memory a_ = random_bytes(kM * kBytes), b_ = random_bytes(kGroups * kN * kBytes);
  const Memory ones_{std::vector<float>(kGroups * kN * kBytes / 128, 1.0f)};
  const Memory all_{ends(kM / kGroups, kGroups)}, along_{ends(100, 8)};
  const Memory some_{std::vector<int32_t>{0, 9, 9, 700, 3000, 3001, 3064, 3100, 4000, 4200, 4900,
                                          5400, 5400, 6100, 6500, 6900}};
};

TEST_F(ScheduleTest, ManyUnitsHaveTheBitsOfAFixedSchedule) {
  ASSERT_GE(sm90::counter_of(nullptr, Previous::any), 0);
  ManyUnits many;
  for (const int tile : {0, 1, 2}) {
    for (const bool square : {true, false}) {
      sm90::Fp8Gemm g;
      g.a_scales = g.b_scales = many.ones().as<float>(), g.b_square = square;
      g.a_scale_line = many.kM;
      g.tile = tile;
      many.compare(g, 1, sm90::fp8_gemm);
    }
    sm90::Bf16Gemm g;
    g.stride = many.kBytes / 2;
    g.tile = tile;
    many.compare(g, 2, sm90::bf16_gemm);
  }
}

// A product of 60 tiles of 64 x 32 with a long K: two of them run at the same time.
class LongProduct {
 public:
  static constexpr int64_t kM = 384, kN = 320, kK = 1 << 15, kBytes = kM * kN * 4;

  LongProduct() {
    const Memory d = poisoned(kBytes);
    multiply(d, Schedule::fixed, nullptr);
    check(cudaDeviceSynchronize());
    want_ = bytes(d, kBytes);
  }
  void multiply(const Memory& d, Schedule schedule, cudaStream_t stream,
                Previous previous = Previous::any) const {
    check(sm90::fp8_gemm(arguments(d, schedule, previous), stream));
  }
  // Takes as long, and writes numbers whose bytes are codes of FP8, none of them NaN.
  void write_codes(const Memory& d, cudaStream_t stream) const {
    sm90::Fp8Gemm g = arguments(d, Schedule::dynamic, Previous::any);
    g.alpha = 0, g.bias = bias_.as<void>();
    check(sm90::fp8_gemm(g, stream));
  }
  bool is_in(const Memory& d) const { return bytes(d, kBytes) == want_; }

 private:
  sm90::Fp8Gemm arguments(const Memory& d, Schedule schedule, Previous previous) const {
    sm90::Fp8Gemm g;
    g.m = kM, g.n = kN, g.k = kK;
    g.a = a_.as<void>(), g.b = b_.as<void>();
    g.a_scales = g.b_scales = ones_.as<float>();
    g.d = d.as<void>(), g.d_stride = kN, g.d_f32 = true;
    g.tile = 5, g.schedule = schedule, g.previous = previous;
    return g;
  }

  const Memory a_ = random_bytes(kM * kK), b_ = random_bytes(kN * kK);
  const Memory bias_ = random_bytes(kN * 4);
  const Memory ones_{std::vector<float>(kM * kK / 128, 1.0f)};
  std::vector<uint8_t> want_;
};

TEST_F(ScheduleTest, StreamsSideBySide) {
  const LongProduct product;
  const std::array streams{new_stream(), new_stream()};
  for (int repeat = 0; repeat < 10; ++repeat) {
    std::vector<Memory> d;
    for (int i = 0; i < 6; ++i) d.push_back(poisoned(product.kBytes));
    for (size_t i = 0; i < d.size(); ++i) product.multiply(d[i], Schedule::dynamic, streams[i % 2]);
    check(cudaDeviceSynchronize());
    for (const Memory& one : d) ASSERT_TRUE(product.is_in(one)) << "repeat " << repeat;
  }
  for (cudaStream_t stream : streams) delete_stream(stream);
}

// Two threads launch on one stream, in any order, products of which those of a promise find room
// beside the ones before them.
TEST_F(ScheduleTest, ThreadsOfOneStreamMakePromises) {
  const LongProduct product;
  cudaStream_t stream = new_stream();
  std::vector<Memory> d;
  for (int i = 0; i < 48; ++i) d.push_back(poisoned(product.kBytes));
  const auto launch = [&](size_t first) {
    for (size_t i = first; i < d.size(); i += 6) {
      product.multiply(d[i], Schedule::dynamic, stream);
      product.multiply(d[i + 2], Schedule::dynamic, stream, Previous::operands);
      product.multiply(d[i + 4], Schedule::dynamic, stream, Previous::nothing);
    }
  };
  for (int repeat = 0; repeat < 5; ++repeat) {
    for (const Memory& one : d) check(cudaMemset(one.as<void>(), 0xFF, product.kBytes));
    check(cudaDeviceSynchronize());
    std::thread other(launch, 1);
    launch(0);
    other.join();
    check(cudaDeviceSynchronize());
    for (const Memory& one : d) ASSERT_TRUE(product.is_in(one)) << "repeat " << repeat;
  }
  delete_stream(stream);
}

// A chain behind a long product: codes of A that it writes, of `operands`; what is written to where
// those codes are read, of `nothing`; a copy of all. Launched at once it has the bits of launches
// one by one.
class Chain {
 public:
  Chain(int tile, Grouping grouping) {
    g_.a = codes_.as<void>(), g_.b = other_.as<void>();
    g_.a_scales = g_.b_scales = ones_.as<float>();
    g_.m = kM, g_.n = kN, g_.k = kK, g_.d_stride = kN, g_.a_scale_line = kM;
    g_.tile = tile, g_.schedule = Schedule::dynamic;
    g_.grouping = grouping, g_.offsets = ends_.as<void>();
    if (grouping != Grouping::dense) g_.groups = 3;
    g_.group_rows = grouping == Grouping::rows ? kM : 256;  // in storage of 384
  }
  std::vector<uint8_t> run(const LongProduct& product, cudaStream_t stream, bool at_once) const {
    const auto meet = [&] {
      if (!at_once) check(cudaDeviceSynchronize());
    };
    const Memory d = poisoned(kBytes), all = poisoned(2 * kBytes);
    check(cudaMemset(codes_.as<void>(), 0, product.kBytes));
    check(cudaDeviceSynchronize());
    product.write_codes(codes_, stream);
    meet();
    sm90::Fp8Gemm g = g_;
    g.d = d.as<void>(), g.previous = Previous::operands;
    check(sm90::fp8_gemm(g, stream));
    meet();
    g.a = other_.as<void>(), g.d = codes_.as<void>(), g.previous = Previous::nothing;
    check(sm90::fp8_gemm(g, stream));
    meet();
    check(cudaMemcpyAsync(all.at(), d.as<void>(), kBytes, cudaMemcpyDeviceToDevice, stream));
    check(cudaMemcpyAsync(all.at(kBytes), codes_.as<void>(), kBytes, cudaMemcpyDeviceToDevice,
                          stream));
    check(cudaDeviceSynchronize());
    return bytes(all, 2 * kBytes);
  }

 private:
  static constexpr int64_t kM = 640, kN = 192, kK = 384, kBytes = 3 * kM * kN * 2;
  static_assert(kM * kK < LongProduct::kBytes && kBytes < 3 * LongProduct::kBytes);

  sm90::Fp8Gemm g_;
  const Memory codes_ = poisoned(3 * LongProduct::kBytes);
  const Memory other_ = random_bytes(3 * kM * kK);
  const Memory ones_{std::vector<float>(3 * kM * kK, 1.0f)};
  const Memory ends_{std::vector<int32_t>{64, 64, 256}};
};

TEST_F(ScheduleTest, ChainsHaveTheBitsOfLaunchesOneByOne) {
  const LongProduct product;
  cudaStream_t stream = new_stream();
  for (const Grouping grouping : {Grouping::dense, Grouping::rows, Grouping::contraction}) {
    for (const int tile : {0, 1, 2, 3, 5, 6}) {
      if (grouping != Grouping::dense && tile == 6) continue;  // which divides K
      const Chain chain(tile, grouping);
      const std::vector<uint8_t> want = chain.run(product, stream, false);
      for (int repeat = 0; repeat < 5; ++repeat)
        ASSERT_TRUE(chain.run(product, stream, true) == want)
            << "tile " << tile << ", grouping " << static_cast<int>(grouping);
    }
  }
  delete_stream(stream);
}

// What comes behind a product that had no work for most of its CTAs comes behind the kernel before
// that one, too.
TEST_F(ScheduleTest, WhatFollowsWaitsForBoth) {
  const LongProduct product;
  cudaStream_t stream = new_stream();
  const Memory slow = poisoned(product.kBytes), beside = poisoned(64 * 64 * 4);
  const Memory copy = poisoned(product.kBytes), none{std::vector<int32_t>{0, 0}};
  for (int repeat = 0; repeat < 10; ++repeat) {
    check(cudaMemset(slow.as<void>(), 0xFF, product.kBytes));
    check(cudaDeviceSynchronize());
    product.multiply(slow, Schedule::fixed, stream);
    sm90::Fp8Gemm empty;  // groups without rows: no unit at all
    empty.m = empty.n = 64, empty.d = beside.as<void>(), empty.d_stride = 64;
    empty.grouping = Grouping::rows, empty.groups = 2, empty.group_rows = 64;
    empty.offsets = none.as<void>(), empty.a_scale_line = 64;
    empty.d_f32 = empty.accumulate = true;
    empty.previous = Previous::nothing;
    check(sm90::fp8_gemm(empty, stream));
    check(cudaMemcpyAsync(copy.as<void>(), slow.as<void>(), product.kBytes,
                          cudaMemcpyDeviceToDevice, stream));
    check(cudaDeviceSynchronize());
    ASSERT_TRUE(product.is_in(copy)) << "repeat " << repeat;
  }
  delete_stream(stream);
}

// Both are captured on one stream, and run on two, beside what is not captured.
TEST_F(ScheduleTest, GraphsSideBySide) {
  const LongProduct product;
  const std::array streams{new_stream(), new_stream(), new_stream()};
  std::vector<Memory> d;
  for (int i = 0; i < 5; ++i) d.push_back(poisoned(product.kBytes));
  std::array<cudaGraphExec_t, 2> runs{};
  for (size_t i = 0; i < 2; ++i) {
    const cudaGraph_t graph = captured(streams[0], [&] {
      product.multiply(d[2 * i], Schedule::dynamic, streams[0]);
      product.multiply(d[2 * i + 1], Schedule::dynamic, streams[0]);
    });
    check(cudaGraphInstantiate(&runs[i], graph, 0));
    check(cudaGraphDestroy(graph));
  }
  for (int repeat = 0; repeat < 10; ++repeat) {
    for (const Memory& one : d) check(cudaMemset(one.as<void>(), 0xFF, product.kBytes));
    check(cudaDeviceSynchronize());
    for (size_t i = 0; i < 2; ++i) check(cudaGraphLaunch(runs[i], streams[i]));
    product.multiply(d[4], Schedule::dynamic, streams[2]);
    check(cudaDeviceSynchronize());
    for (const Memory& one : d) ASSERT_TRUE(product.is_in(one)) << "repeat " << repeat;
  }
  for (cudaGraphExec_t run : runs) check(cudaGraphExecDestroy(run));
  for (cudaStream_t stream : streams) delete_stream(stream);
}

}  // namespace
}  // namespace blockscale::testing
#endif  // BLOCKSCALE_CUDA
