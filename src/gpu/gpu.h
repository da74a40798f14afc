// The GPU backend. Bit-identical to reference::. Arguments have been checked; every pointer is a
// device pointer; nothing here waits for the device.
#pragma once

#include "blockscale/ops.h"

namespace blockscale::gpu {

// Why this build cannot run on a GPU here; empty when it can.
std::string unavailable();

void quantize(const ConstMatrix& x, const Quantized* row_out, const QuantizeOptions& row_options,
              const Quantized* column_out, const QuantizeOptions& column_options,
              const Stream& stream);
void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, float* out, const Stream& stream);
void dequantize(const ConstQuantized& q, const Matrix& x, const Stream& stream);
void relayout(const ConstQuantized& from, const Quantized& to, const Stream& stream);
// Operands that gemm_needs has nothing to say about; d with contiguous columns.
void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options, const Stream& stream);

}  // namespace blockscale::gpu
