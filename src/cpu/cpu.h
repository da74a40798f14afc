// The CPU backend: SIMD, one source for every instruction set, chosen at run time (Highway).
// Bit-identical to reference:: for everything but the order of a GEMM's sums. Arguments have been
// checked.
#pragma once

#include "blockscale/ops.h"

namespace blockscale::cpu {

// Outputs of this size are stored past the caches: whoever reads them next would not find them
// there.
inline constexpr int64_t kStreamBytes = 16 << 20;

// Quantizes along rows, columns or both in one pass over x. A null output is not wanted.
void quantize(const ConstMatrix& x, const Quantized* row_out, const QuantizeOptions& row_options,
              const Quantized* column_out, const QuantizeOptions& column_options,
              const Executor& executor);
void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, const Groups& groups, float* out,
          const Executor& executor);
void dequantize(const ConstQuantized& q, const Matrix& x, const Executor& executor);
void relayout(const ConstQuantized& from, const Quantized& to, const Executor& executor);
void transpose(const ConstQuantized& from, const Quantized& to, const Executor& executor);
void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options, const Executor& executor);

}  // namespace blockscale::cpu
