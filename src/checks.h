// What the operators ask of their arguments: each function throws an Error unless they are met.
#pragma once

#include "blockscale/ops.h"

namespace blockscale {

// Throws Error, naming the operator `op` and its argument `name`, if the buffers of an operand of
// these extents, with the padding of any layout, could reach 2^62 bytes, so that sizes would
// overflow; or if the number of groups is negative.
void check_sizes(const char* op, const char* name, int64_t rows, int64_t columns, int64_t batch,
                 int64_t groups);

// Where the data of a call lies. Device memory is not inspected: that would mean waiting for the
// device.
enum class Memory { host, device };

void check_quantize(const char* op, const ConstMatrix& x, const Quantized& out,
                    const QuantizeOptions& options, Memory memory);
void check_dual(const ConstMatrix& x, const Quantized& row_out, const Quantized& column_out,
                const QuantizeOptions& row_options, const QuantizeOptions& column_options,
                Memory memory);
void check_amax_of(const ConstMatrix& x, const QuantSpec& spec, int axis, const float* out,
                   const Groups& groups, Memory memory);
void check_dequantize(const ConstQuantized& q, const Matrix& x, Memory memory);
void check_relayout(const ConstQuantized& from, const Quantized& to, Memory memory);
void check_transpose(const ConstQuantized& from, const Quantized& to, Memory memory);
void check_gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
                const GemmOptions& options, Memory memory);
void check_values(const Quantization& q);
// Refuse an operand in device memory whose extents kernels, or those that decode, could not count,
// as the operators above do: for callers that go to kernels without them.
void check_device_operand(const char* op, const char* name, const ConstQuantized& q);
void check_decodable(const char* op, const char* name, const ConstQuantized& q);

}  // namespace blockscale
