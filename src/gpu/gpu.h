// The GPU backend. Bit-identical to reference::. Arguments have been checked; every pointer is a
// device pointer; nothing here waits for the device.
#pragma once

#include <span>

#include "blockscale/ops.h"

namespace blockscale::gpu {

// Why this build cannot run on a GPU here; empty when it can.
std::string unavailable();
// What an earlier kernel or call has broken, in the driver's words; empty if the current GPU is
// well. To be called when something has failed.
std::string failure();

// Kernels count extents, and threads, in 31 bits. Those that quantize take x in tiles of so many
// rows and columns, with at most so many threads each; of those that decode, a thread takes so many
// rows of a piece, the values that it stores at once: 16 bytes of BF16.
inline constexpr int64_t kGpuLimit = int64_t{1} << 31;
inline constexpr int kTile = 128, kThreads = 512;
inline constexpr int kPieceRows = 4, kPiece = 8;

// For a model's random bits: *offset = *copy = *upcoming, which then advances by one if the forward
// counts.
void begin_forward(int64_t* offset, int64_t* upcoming, int64_t* copy, bool counts,
                   const Stream& stream);

// One input or two: amaxes that are not given are found for both at once.
void quantize(std::span<const Quantization> inputs, const Stream& stream,
              const WordCopy& word = {});
void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, const Groups& groups, float* out,
          const Stream& stream);
void dequantize(const ConstQuantized& q, const Matrix& x, const Stream& stream);
// Two operands, in one launch where their lines have the same form, as those of a GEMM mostly do.
void dequantize_two(const ConstQuantized& a, const Matrix& x, const ConstQuantized& b,
                    const Matrix& y, const Stream& stream);
void relayout(const ConstQuantized& from, const Quantized& to, const Stream& stream);
void transpose(const ConstQuantized& from, const Quantized& to, const Stream& stream);

// MXFP4: E2M1 codes with E8M0 scales.
inline bool is_mxfp4(const QuantSpec& spec) {
  return spec.element == Format::e2m1 && spec.scale == Format::e8m0;
}
// The spec of what MXFP4 operands become on the left of a GEMM.
inline constexpr QuantSpec kWidened{.element = Format::e5m2};
// A GEMM's MXFP4 operands as FP8 operands, in the workspace. In `a`, 128 codes of a line share an
// FP32 scale. In `b` a whole line shares one, which is in `line_scales` and multiplies the sums at
// the end; its 128x128 blocks have scales of 1. Values are unchanged, except in blocks whose scale
// is less than 2^-28 of the largest among those that come to share one: there the error is at most
// 2^-31 of the largest value.
//
// Both are linear, with lines of at most kMostWidened codes, in whole multiples of 128; codes start
// at multiples of 16 bytes. With groups, the rows of a lie among its scales as they do among its
// codes.
inline constexpr int64_t kMostWidened = kGpuLimit - 2048;
struct WidenedOperand {
  ConstQuantized q;  // E5M2, scales mn_major; codes and scales of a batch are contiguous
  // One per line of b; with groups along the contraction axis, one per line and group.
  const float* line_scales = nullptr;
};
struct WidenedPair {
  WidenedOperand a, b;
};
WidenedPair widen(const ConstQuantized& a, const ConstQuantized& b, const Stream& stream);
WidenedOperand widen_right(const ConstQuantized& b, const Stream& stream);
// `a` to where a quantizer would write it (QuantizeOptions::widened), whose spec is kWidened.
void widen_to(const ConstQuantized& a, const Quantized& to, const Stream& stream);
// Whether a contraction axis of `extent` in so many groups, each of which starts at a multiple of
// 128 once it is widened, can be counted.
constexpr bool fits_widened(int64_t extent, int64_t groups) {
  return extent + groups * kWidened.block < kGpuLimit;
}
// Only a linear `b` without groups, which many products may read: widen_right() writes it to
// widened_bytes() of memory that starts at a multiple of 16; widened_in() says where it is there.
int64_t widened_bytes(const ConstQuantized& b);
WidenedOperand widen_right(const ConstQuantized& b, uint8_t* memory, const Stream& stream);
WidenedOperand widened_in(const ConstQuantized& b, uint8_t* memory);

// Whether gemm takes these MXFP4 operands on the current GPU; or any of these specs, where that
// many groups (or 0) divide the rows of a. A quantizer can then write the left one as gemm reads
// it.
bool widens(const ConstQuantized& a, const ConstQuantized& b);
bool widens(const QuantSpec& a, const QuantSpec& b, int64_t groups);
// Whether gemm runs on the current GPU; the second function refuses it if not.
bool has_gemm_device();
void check_gemm_device();
// For operands that gemm_needs has nothing to say about; d has contiguous columns.
void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options, const Stream& stream);
// The same of two that have been widened before.
void gemm(const ConstQuantized& a, const WidenedOperand& b, const Matrix& d,
          const GemmOptions& options, const Stream& stream);

// What a kernel needs to know of groups whose offsets have been checked before: where they end, and
// whether the offsets made sense.
struct GroupEnds {
  const int32_t* ends = nullptr;  // `count` of them; all 0 where offsets are wrong
  const int32_t* wrong = nullptr;
  int64_t count = 0;  // 0: no groups
  // They divide the operands' contraction axis, and D is a batch of matrices, one per group. Else
  // they divide the rows of D.
  bool contraction = false;
};
// Writes the ends of groups of `rows` rows in storage where each starts at a multiple of `unit`. A
// kernel that reads them stays within the storage, whatever the offsets.
void group_ends(const Groups& groups, int64_t rows, int64_t unit, int32_t* ends, int32_t* wrong,
                const Stream& stream);

// What a GEMM does with its sums S: D = alpha * a_outer * b_outer * S + bias [+ D], rounded once to
// FP32 and then to D's dtype, like the CPU backend. With groups there are an outer scale and a row
// of bias per group; elements without a sum (rows of no group, an empty group) become 0 or stay as
// they are, and wrong offsets make all of D NaN. Whatever the outer scales, no sum is no NaN.
struct Epilogue {
  float alpha = 1.0f;
  const float* a_outer = nullptr;  // outer scales of the operands; null: 1
  const float* b_outer = nullptr;
  const void* bias = nullptr;  // one value per column, of bias_dtype, added to every row
  DType bias_dtype = DType::f32;
  bool accumulate = false;  // add to D, which must be FP32
  bool empty = false;       // no element has a sum: the contraction axis is empty
  GroupEnds groups{};
};
// `sums` has the extents of D (a batch is one matrix below the other), is FP32 or BF16, and starts
// at a multiple of 16 bytes. D is contiguous. An FP32 `d` may be `sums` itself.
void finish(const ConstMatrix& sums, const Matrix& d, const Epilogue& epilogue,
            const Stream& stream);

// A product of [m, k] and [n, k], possibly with groups that divide m or k.
struct ProductSize {
  int64_t m, n, k, groups;
  bool f32;  // D
};
// Whether multiply_bf16 runs on the current GPU and is the one to use: where another library's GEMM
// needs a pass after it, if it is likely to be faster than both; where it needs none, if it
// finishes before the host has launched the other; and where the other may be wrong.
bool multiplies_bf16(const ProductSize& size, bool needs_pass);
// D = alpha * a_outer * b_outer * (A B^T) + bias in one kernel, rounded like finish(). A [m, k] and
// B [n, k], or with groups of A's rows [groups, n, k], are BF16; their lines are equally far apart,
// by a multiple of 8 elements, and they start at multiples of 16 bytes. Rows of no group become 0
// unless D is added to, and wrong offsets make all of D NaN; e.groups is not used. The preceding
// launch is the kernel of this library that has written A, B or both (Previous::operands).
//
// `groups` divide `rows` rows. With a `unit` these are along the contraction axis: each group
// starts at a multiple of it, itself a multiple of 16, in the lines of both operands, and D has a
// matrix per group.
void multiply_bf16(const ConstMatrix& a, const ConstMatrix& b, const Matrix& d,
                   const Groups& groups, int64_t rows, int64_t unit, const Epilogue& e,
                   const Stream& stream);
// The same with a B that is decoded as it is multiplied, without its outer scale and its transform:
// [n, k], or a batch of them. D is the same to the bit, and B's values are written nowhere. The
// preceding launch has written A alone.
void multiply_bf16(const ConstMatrix& a, const ConstQuantized& b, const Matrix& d,
                   const Groups& groups, int64_t rows, const Epilogue& e, const Stream& stream);
// Whether that runs on the current GPU and is clearly faster than decoding B before; `needs_pass`
// as for multiplies_bf16().
bool decodes_within(const ConstQuantized& b, const ProductSize& size, bool needs_pass);

// After a GEMM over groups of `rows` rows, or of the contraction axis: with `clear`, the rows of D
// behind the last group, or the matrices of empty groups, become 0; where the offsets are wrong,
// all of D becomes NaN. D is FP32 or BF16 with contiguous columns, its batch one matrix below the
// other.
void settle(const Matrix& d, const Groups& groups, int64_t rows, bool contraction, bool clear,
            const Stream& stream);

}  // namespace blockscale::gpu
