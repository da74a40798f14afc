// Whose failures an operator reports: those of its own launches, once, and nobody else's.
#ifdef BLOCKSCALE_CUDA
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

TEST_F(LaunchTest, AFailureIsReportedOnceAndTheNextCallWorks) {
  const TestStream stream;
  const DeviceInput in(x, x.view());
  Output out(kMxfp8, {}, -1, 300, 200);
  const DeviceOutput to(out);
  // A capture that was broken off refuses every launch.
  auto* handle = static_cast<cudaStream_t>(stream.handle());
  check(cudaStreamBeginCapture(handle, cudaStreamCaptureModeRelaxed));
  ASSERT_NE(cudaStreamSynchronize(handle), cudaSuccess);
  (void)cudaGetLastError();
  EXPECT_ERROR(quantize(in.view, to.view, {}, stream), "quantize: device = ", "doctor");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "ours is left behind for others";
  cudaGraph_t graph = nullptr;
  EXPECT_NE(cudaStreamEndCapture(handle, &graph), cudaSuccess);
  (void)cudaGetLastError();
  expect_right();
}

}  // namespace
}  // namespace blockscale::testing
#endif  // BLOCKSCALE_CUDA
