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
void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, const Groups& groups, float* out,
          const Stream& stream);
void dequantize(const ConstQuantized& q, const Matrix& x, const Stream& stream);
void relayout(const ConstQuantized& from, const Quantized& to, const Stream& stream);
// Operands that gemm_needs has nothing to say about; d with contiguous columns.
void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options, const Stream& stream);

// What a GEMM does with its FP32 sums S: D = alpha * a_outer * b_outer * S + bias [+ D], rounded
// once to FP32 and then to D's dtype, as the CPU backend does it.
struct Epilogue {
  float alpha = 1.0f;
  const float* a_outer = nullptr;  // outer scales of the operands; none: 1
  const float* b_outer = nullptr;
  const void* bias = nullptr;  // one value a column, of bias_dtype, added to every row
  DType bias_dtype = DType::f32;
  bool accumulate = false;  // add to D, which is FP32 then
};
// `sums` and `d` are contiguous matrices at multiples of 16 bytes; an FP32 `d` may be `sums`
// itself.
void finish(const float* sums, const Matrix& d, const Epilogue& epilogue, const Stream& stream);

// One word within the device, by a kernel: the copy engine takes longer, most of all in graphs.
void copy(int64_t* to, const int64_t* from, const Stream& stream);

}  // namespace blockscale::gpu
