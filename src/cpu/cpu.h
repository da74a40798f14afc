// The CPU backend: SIMD from one source for all instruction sets, chosen at run time (Highway).
// Bit-identical to reference:: except for the order of a GEMM's sums. Its arguments have already
// been checked.
#pragma once

#include "blockscale/ops.h"

namespace blockscale::cpu {

// Outputs of at least this size bypass the caches when stored: they would be evicted before the
// next read.
inline constexpr int64_t kStreamBytes = 16 << 20;

// Quantizes along rows, columns or both in one pass over x. A null output is skipped.
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
