// Whose failures an operator reports: those of its own launches, once, and nobody else's.
#ifdef BLOCKSCALE_CUDA
#include <cstdio>
#include <cstdlib>
#include <new>

#include "device.h"
#include "throws.h"

namespace blockscale::testing {
namespace {

struct LaunchTest : public DeviceTest<::testing::Test> {
  LaunchTest() { reference::quantize(x.view(), want.view, {}); }
  void expect_right() {
    const TestStream stream;
    const DeviceInput in(x, x.view());
    Output got(kMxfp8, {}, -1, 300, 200);
    const DeviceOutput to(got);
    quantize(in.view, to.view, {}, stream);
    stream.wait();
    to.read(got);
    EXPECT_TRUE(same_operand(got, want));
  }
  Input x{DType::bf16, 1, 300, 200, Strides::row_major, [](int64_t, int64_t r, int64_t c) {
            return static_cast<float>(r - 2 * c);
          }};
  Output want{kMxfp8, {}, -1, 300, 200};
};

TEST_F(LaunchTest, AnErrorThatIsPendingInTheProcessIsSomebodyElses) {
  const cudaError_t theirs = cudaSetDevice(1 << 20);
  ASSERT_NE(theirs, cudaSuccess);
  expect_right();
  EXPECT_EQ(cudaGetLastError(), theirs) << "their error was taken away";
}

// While it lives, the stream refuses every launch: it has a capture that was broken off.
class Broken {
 public:
  explicit Broken(const Stream& stream) : handle_(static_cast<cudaStream_t>(stream.handle())) {
    check(cudaStreamBeginCapture(handle_, cudaStreamCaptureModeRelaxed));
    EXPECT_NE(cudaStreamSynchronize(handle_), cudaSuccess);
    (void)cudaGetLastError();
  }
  ~Broken() {
    cudaGraph_t graph = nullptr;
    EXPECT_NE(cudaStreamEndCapture(handle_, &graph), cudaSuccess);
    (void)cudaGetLastError();
  }

 private:
  cudaStream_t handle_;
};

TEST_F(LaunchTest, AFailureIsReportedOnceAndTheNextCallWorks) {
  const TestStream stream;
  const DeviceInput in(x, x.view());
  Output out(kMxfp8, {}, -1, 300, 200);
  const DeviceOutput to(out);
  {
    const Broken broken(stream);
    EXPECT_ERROR(quantize(in.view, to.view, {}, stream), "quantize: device = ", "doctor");
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "ours is left behind for others";
  }
  expect_right();
}

// A kernel that reads address 16 breaks the device for the whole process, so this is another one.
TEST_F(LaunchTest, AfterAKernelHasFailedTheErrorNamesThat) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto fails = [this] {
    const TestStream stream;
    DeviceInput in(x, x.view());
    Output out(kMxfp8, {}, -1, 300, 200);
    const DeviceOutput to(out);
    in.view.data = reinterpret_cast<const void*>(uintptr_t{16});
    quantize(in.view, to.view, {}, stream);
    (void)cudaDeviceSynchronize();
    try {
      quantize(in.view, to.view, {}, stream);
    } catch (const Error& e) {
      std::fputs(e.what(), stderr);
      std::_Exit(7);
    }
  };
  EXPECT_EXIT(fails(), ::testing::ExitedWithCode(7),
              "quantize: device = .*illegal.*; need a GPU on which no earlier kernel has failed");
}

// It has memory for so many requests, all small.
class LimitedStream final : public Stream {
 public:
  explicit LimitedStream(int requests) : left_(requests) {}
  void* handle() const override { return stream_.handle(); }
  void* workspace(int64_t bytes) const override {
    if (left_-- == 0 || bytes > kBytes) throw std::bad_alloc();
    return memory_.at();
  }

 private:
  static constexpr int64_t kBytes = 1024;
  TestStream stream_;
  Memory memory_{kBytes};
  mutable int left_;
};

// amax clears its result, and quantize what it finds the amax in, before they ask for a copy of x.
TEST_F(LaunchTest, AFailureBeforeAnotherErrorIsNotTheNextCalls) {
  const QuantSpec spec = parse_spec("nvfp4[hadamard=64]");
  const DeviceInput in(x, x.view());
  Output out(spec, {}, -1, 300, 200);
  const DeviceOutput to(out);
  const Memory largest(sizeof(float));
  const auto fails = [](int requests, const auto& call) {
    const LimitedStream stream(requests);
    const Broken broken(stream);
    EXPECT_THROW(call(stream), std::bad_alloc);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "ours is left behind for others";
  };
  fails(0, [&](const Stream& s) { amax(in.view, spec, -1, largest.as<float>(), s); });
  expect_right();
  fails(1, [&](const Stream& s) { quantize(in.view, to.view, {}, s); });
  expect_right();
}

}  // namespace
}  // namespace blockscale::testing
#endif  // BLOCKSCALE_CUDA
