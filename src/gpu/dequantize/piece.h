// Eight codes of a row, decoded at once.
#pragma once

#include "gpu/dequantize/decode.h"
#include "gpu/dequantize/store.h"

namespace blockscale::gpu {

template <Codec kCodec, class Codes>
BLOCKSCALE_DEVICE void decode_piece(const Decoder& element, const Codes& codes, float factor,
                                    float* v) {
  constexpr int kPerWord = codes_per_word(kCodec), kPairs = kPerWord / 2;
#pragma unroll
  for (int i = 0; i < kPiece / 2; ++i) {
    const int word = i / kPairs, pair = i % kPairs;
    float two[2];
    decode_pair<kCodec>(element, as_fp8<kCodec>(word_of(codes, word), pair / 2), pair, two);
    for (int j = 0; j < 2; ++j)
      v[word * kPerWord + code_of(kCodec, pair, j)] = __fmul_rn(factor, two[j]);
  }
}
// The same as BF16, with the conversion's NaN; a half of `largest` is NaN then.
template <Codec kCodec, class Codes>
BLOCKSCALE_DEVICE uint4 decode_bf16x8(const Decoder& element, const Codes& codes, float factor,
                                      uint32_t& largest) {
  if constexpr (kCodec == Codec::fp4) {
    const Fp4Products products(factor);
    largest = max_magnitude_bf16x2(largest, products.first());
    const uint2 low = products(codes), high = products(codes >> 16);
    return {low.x, low.y, high.x, high.y};
  } else {
    float v[kPiece];
    decode_piece<kCodec>(element, codes, factor, v);
    return convert_bf16x8(v, largest);
  }
}

}  // namespace blockscale::gpu
