// The GPU backend. Bit-identical to reference::. Arguments have been checked; every pointer is a
// device pointer; nothing here waits for the device.
#pragma once

#include <span>

#include "blockscale/ops.h"

namespace blockscale::gpu {

// Why this build cannot run on a GPU here; empty when it can.
std::string unavailable();
// What an earlier kernel or call has broken, in the driver's words; empty where the current GPU is
// well. To be asked when something has failed.
std::string failure();

inline constexpr int64_t kGpuLimit = int64_t{1} << 31;  // kernels count extents in 31 bits

// *offset = *copy = *upcoming, which then moves on by one if the forward counts: of a model's
// random bits.
void begin_forward(int64_t* offset, int64_t* upcoming, int64_t* copy, bool counts,
                   const Stream& stream);

// Refuses an operand in device memory that kernels could not count, as the core's operators do:
// for who calls what is here without them.
void check_operand(const char* op, const char* name, const ConstQuantized& q);

// One input, or two: amaxes that are not given are found for both at once.
void quantize(std::span<const Quantization> inputs, const Stream& stream,
              const WordCopy& word = {});
void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, const Groups& groups, float* out,
          const Stream& stream);
void dequantize(const ConstQuantized& q, const Matrix& x, const Stream& stream);
// Of two operands; in one launch where their lines have one form, as those of a GEMM mostly have.
void dequantize_two(const ConstQuantized& a, const Matrix& x, const ConstQuantized& b,
                    const Matrix& y, const Stream& stream);
void relayout(const ConstQuantized& from, const Quantized& to, const Stream& stream);
void transpose(const ConstQuantized& from, const Quantized& to, const Stream& stream);

// MXFP4: codes of E2M1 with scales of E8M0.
inline bool is_mxfp4(const QuantSpec& spec) {
  return spec.element == Format::e2m1 && spec.scale == Format::e8m0;
}
// The operands of a GEMM in MXFP4 as operands in FP8, in the workspace. In `a`, 128 codes of a line
// share an FP32 scale. In `b` a whole line shares one, which is in `line_scales` and multiplies the
// sums at the end; its blocks of 128x128 have scales of 1. Values stay what they are, but in blocks
// whose scale is less than 2^-28 of the largest among those that come to share one: there an error
// of at most 2^-31 of the largest value.
//
// Both are linear, of lines of at most 2^31 - 2048 codes, in whole 128, and codes start at
// multiples of 16 bytes. In groups, rows of a lie among its scales as they do among its codes.
struct Wide {
  ConstQuantized q;  // E5M2, scales mn_major; codes and scales of a batch follow each other
  // Of every line of b; along the contraction axis for each group.
  const float* line_scales = nullptr;
};
struct Widened {
  Wide a, b;
};
Widened widen(const ConstQuantized& a, const ConstQuantized& b, const Stream& stream);
// `a` alone, without groups along the contraction axis.
Wide widen_a(const ConstQuantized& a, const Stream& stream);
// A linear `b` without groups alone, which many products may read: into memory of so many bytes
// that starts at a multiple of 16, and where it is there.
int64_t wide_bytes(const ConstQuantized& b);
Wide widen_b(const ConstQuantized& b, uint8_t* memory, const Stream& stream);
Wide wide_in(const ConstQuantized& b, uint8_t* memory);

// Whether gemm takes these operands, in MXFP4, on the current GPU; or any of these specs, where so
// many groups (or 0) divide the rows of a.
bool widens(const ConstQuantized& a, const ConstQuantized& b);
bool widens(const QuantSpec& a, const QuantSpec& b, int64_t groups);
// Whether gemm runs on the current GPU; refuses it if not.
bool has_gemm_device();
void check_gemm_device();
// Operands that gemm_needs has nothing to say about; d with contiguous columns.
void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options, const Stream& stream);
// The same with a b that was widened before.
void gemm(const ConstQuantized& a, const Wide& b, const Matrix& d, const GemmOptions& options,
          const Stream& stream);

// What a kernel that comes after the offsets were looked at needs of groups: where they end, and
// whether the offsets made sense.
struct GroupEnds {
  const int32_t* ends = nullptr;  // `count`; all 0 where offsets are wrong
  const int32_t* wrong = nullptr;
  int64_t count = 0;  // 0: no groups
  // Of the operand whose contraction axis they divide: D is a batch of matrices, one a group. Else
  // they divide the rows of D.
  bool contraction = false;
};
// Writes the ends of groups of `rows` rows in storage where each starts at a multiple of `unit`.
// What reads them stays within the storage, whatever the offsets.
void group_ends(const Groups& groups, int64_t rows, int64_t unit, int32_t* ends, int32_t* wrong,
                const Stream& stream);

// What a GEMM does with its sums S: D = alpha * a_outer * b_outer * S + bias [+ D], rounded once to
// FP32 and then to D's dtype, as the CPU backend does it. With groups there is an outer scale and a
// row of bias for each; what has no sum (rows of no group, an empty group) is 0 or stays as it is,
// and wrong offsets make all of D NaN.
struct Epilogue {
  float alpha = 1.0f;
  const float* a_outer = nullptr;  // outer scales of the operands; none: 1
  const float* b_outer = nullptr;
  const void* bias = nullptr;  // one value a column, of bias_dtype, added to every row
  DType bias_dtype = DType::f32;
  bool accumulate = false;  // add to D, which is FP32 then
  GroupEnds groups{};
};
// `sums` has the extents of D (a batch is one matrix below the other), FP32 or BF16, and starts at
// a multiple of 16 bytes. D is contiguous. An FP32 `d` may be `sums` itself.
void finish(const ConstMatrix& sums, const Matrix& d, const Epilogue& epilogue,
            const Stream& stream);

// A product of [m, k] and [n, k], or of groups that divide m.
struct ProductSize {
  int64_t m, n, k, groups;
  bool f32;  // D
};
// Whether multiply_bf16 runs on the current GPU and is the one to take: where another library's
// GEMM needs a pass after it, if it is likely to be faster than both; where it needs none, if it is
// over before the host has launched the other.
bool multiplies_bf16(const ProductSize& size, bool needs_pass);
// D = alpha * a_outer * b_outer * (A B^T) + bias in one kernel, rounded as finish() does it. A
// [m, k] and B [n, k], or with groups of A's rows [groups, n, k], are BF16; their lines are equally
// far apart, a multiple of 8 elements, and they start at multiples of 16 bytes. Rows of no group
// become 0 unless D is added to, and wrong offsets make all of D NaN; e.groups is not used. What
// was launched before is the kernel of this library that has written A, B or both
// (Previous::operands).
//
// `groups` divide `rows` rows: with a `unit` those of the contraction axis, where each starts at a
// multiple of it, itself one of 16, in the lines of both, and D has a matrix for each.
void multiply_bf16(const ConstMatrix& a, const ConstMatrix& b, const Matrix& d,
                   const Groups& groups, int64_t rows, int64_t unit, const Epilogue& e,
                   const Stream& stream);

// After a GEMM over groups of `rows` rows, or of the contraction axis: with `clear`, rows of D
// behind the last group, or the matrices of empty groups, become 0; where the offsets are wrong,
// all of D becomes NaN. D is FP32 or BF16 with contiguous columns, its batch one matrix below the
// other.
void settle(const Matrix& d, const Groups& groups, int64_t rows, bool contraction, bool clear,
            const Stream& stream);

}  // namespace blockscale::gpu
