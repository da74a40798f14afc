// Stubs for NVIDIA's GEMMs in a build without nvcc.
#include "blockscale/status.h"
#include "gpu/gpu.h"

namespace blockscale::gpu {

void gemm(const ConstQuantized&, const ConstQuantized&, const Matrix&, const GemmOptions&,
          const Stream&) {
  fail("gemm", "device", "cuda", "cpu", unavailable());
}
void gemm(const ConstQuantized&, const WidenedOperand&, const Matrix&, const GemmOptions&,
          const Stream&) {
  fail("gemm", "device", "cuda", "cpu", unavailable());
}

bool widens(const ConstQuantized&, const ConstQuantized&) { return false; }
bool widens(const QuantSpec&, const QuantSpec&, int64_t) { return false; }

bool has_gemm_device() { return false; }

void check_gemm_device() { fail("gemm", "device", "cuda", "cpu", unavailable()); }

bool multiplies_bf16(const ProductSize&, bool) { return false; }

bool decodes_within(const ConstQuantized&, const ProductSize&, bool) { return false; }

void multiply_bf16(const ConstMatrix&, const ConstMatrix&, const Matrix&, const Groups&, int64_t,
                   int64_t, const Epilogue&, const Stream&) {
  fail("gemm", "device", "cuda", "cpu", unavailable());
}

void multiply_bf16(const ConstMatrix&, const ConstQuantized&, const Matrix&, const Groups&, int64_t,
                   const Epilogue&, const Stream&) {
  fail("gemm", "device", "cuda", "cpu", unavailable());
}

}  // namespace blockscale::gpu
