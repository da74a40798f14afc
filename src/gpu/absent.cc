// Stubs for the GPU backend in a build without a GPU compiler.
#include "blockscale/status.h"
#include "gpu/gpu.h"

namespace blockscale::gpu {
namespace {

[[noreturn]] void refuse(const char* op) { fail(op, "device", "cuda", "cpu", unavailable()); }

}  // namespace

std::string unavailable() {
  return "this build has no CUDA kernels: nvcc was not found; every spec runs on the CPU";
}

std::string failure() { return ""; }

void begin_forward(int64_t*, int64_t*, int64_t*, bool, const Stream&) { refuse("begin_forward"); }
void quantize(std::span<const Quantization>, const Stream&, const WordCopy&) { refuse("quantize"); }
void amax(const ConstMatrix&, const QuantSpec&, int, const Groups&, float*, const Stream&) {
  refuse("amax");
}
void dequantize(const ConstQuantized&, const Matrix&, const Stream&) { refuse("dequantize"); }
void dequantize_two(const ConstQuantized&, const Matrix&, const ConstQuantized&, const Matrix&,
                    const Stream&) {
  refuse("dequantize");
}
void relayout(const ConstQuantized&, const Quantized&, const Stream&) { refuse("relayout"); }
void transpose(const ConstQuantized&, const Quantized&, const Stream&) { refuse("transpose"); }
int64_t widened_bytes(const ConstQuantized&) { refuse("gemm"); }
WidenedOperand widen_right(const ConstQuantized&, uint8_t*, const Stream&) { refuse("gemm"); }
WidenedOperand widen_right(const ConstQuantized&, const Stream&) { refuse("gemm"); }
WidenedOperand widened_in(const ConstQuantized&, uint8_t*) { refuse("gemm"); }
void group_ends(const Groups&, int64_t, int64_t, int32_t*, int32_t*, const Stream&) {
  refuse("gemm");
}
void finish(const ConstMatrix&, const Matrix&, const Epilogue&, const Stream&) { refuse("gemm"); }
void settle(const Matrix&, const Groups&, int64_t, bool, bool, const Stream&) { refuse("gemm"); }

}  // namespace blockscale::gpu
