// Rows of results, in pieces of eight held by neighbouring lanes.
#pragma once

#include "blockscale/tensor.h"
#include "gpu/gpu.h"
#include "gpu/port.h"

namespace blockscale::gpu {

// How a kernel stores rows: BF16 starting at multiples of 16 bytes, BF16 starting anywhere, or any
// dtype and strides.
enum class Rows : uint8_t { aligned, anywhere, any };

BLOCKSCALE_DEVICE void store_value(const Matrix& x, int64_t at, float value) {
  if (value != value) value = bit_cast<float>(kNanBits);  // the definition's, not the processor's
  if (x.dtype == DType::f32)
    static_cast<float*>(x.data)[at] = value;
  else
    static_cast<uint16_t*>(x.data)[at] = x.dtype == DType::bf16 ? to_bf16(value) : to_fp16(value);
}

// Whether a maximum from max_magnitude_bf16x2() is NaN in either half.
BLOCKSCALE_DEVICE bool has_nan(uint32_t largest) {
  return (largest & 0x7FFF) > 0x7F80 || (largest >> 16 & 0x7FFF) > 0x7F80;
}
// The conversion's NaN is 0x7FFF, the definition's 0x7FC0.
BLOCKSCALE_DEVICE uint32_t define_nan(uint32_t pair) {
  if ((pair & 0x7FFF) > 0x7F80) pair = (pair & 0xFFFF0000) | 0x7FC0;
  if ((pair >> 16 & 0x7FFF) > 0x7F80) pair = (pair & 0xFFFF) | 0x7FC00000;
  return pair;
}
BLOCKSCALE_DEVICE uint4 define_nan(const uint4& v) {
  return {define_nan(v.x), define_nan(v.y), define_nan(v.z), define_nan(v.w)};
}
// Eight values as BF16, with the conversion's NaN; `largest` becomes the maximum of itself and
// their magnitudes.
BLOCKSCALE_DEVICE uint4 convert_bf16x8(const float* v, uint32_t& largest) {
  uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pair[i] = to_bf16x2(v[2 * i], v[2 * i + 1]);
    largest = max_magnitude_bf16x2(largest, pair[i]);
  }
  return {pair[0], pair[1], pair[2], pair[3]};
}
// The same with the definition's NaN.
BLOCKSCALE_DEVICE uint4 to_bf16x8(const float* v) {
  uint32_t largest = 0;
  const uint4 piece = convert_bf16x8(v, largest);
  return has_nan(largest) ? define_nan(piece) : piece;
}

// Stores elements [begin, end) of the eight in `words`, the first of which belongs at `to`.
BLOCKSCALE_DEVICE void store_some(uint16_t* to, const uint4& words, int begin, int end) {
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    if (i >= begin && i < end) to[i] = static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16));
}

// A piece's place in its row, for store_shifted(): how many of its elements exist, and whether a
// piece precedes it, which the previous lane then holds.
struct PieceAt {
  int count;
  bool follows;
};
// Stores pieces that start anywhere as whole aligned 16-byte chunks: a lane stores up to the last
// boundary within its piece, starting at the boundary before, which lies in the previous lane's
// piece. All lanes of a warp must come here; those without a piece to store have a count of 0.
BLOCKSCALE_DEVICE void store_shifted(uint16_t* to, const uint4& own, const PieceAt& at) {
  const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(to) / 2 % kPiece);
  const uint32_t w[8] = {shuffle_up(own.x),
                         shuffle_up(own.y),
                         shuffle_up(own.z),
                         shuffle_up(own.w),
                         own.x,
                         own.y,
                         own.z,
                         own.w};
  if (at.count <= 0) return;
  // The eight elements that start 8 - skew further on: shifted by 4, by 2, and by 2 or 1.
  uint32_t by_4[6], by_2[5], out[4];
#pragma unroll
  for (int i = 0; i < 6; ++i) by_4[i] = skew & 4 ? w[i] : w[i + 2];
#pragma unroll
  for (int i = 0; i < 5; ++i) by_2[i] = skew & 2 ? by_4[i] : by_4[i + 1];
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = shift_left_in(by_2[i + 1], by_2[i], skew % 2 * 16);
  const uint4 chunk = {out[0], out[1], out[2], out[3]};
  if ((at.follows || skew == 0) && at.count + skew >= kPiece)
    store_vector(to - skew, chunk);
  else
    store_some(to - skew, chunk, at.follows ? 0 : skew, at.count + skew);
  if (at.count <= kPiece && skew != 0) store_some(to, own, kPiece - skew, at.count);
}

}  // namespace blockscale::gpu
