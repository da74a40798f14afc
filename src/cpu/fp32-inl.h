// Encoding by way of FP32: every element is multiplied by its block's inverse scale. For the cases
// that bf16-inl.h does not cover, and for all stochastic rounding.

#if defined(BLOCKSCALE_FP32_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_FP32_INL
#undef BLOCKSCALE_FP32_INL
#else
#define BLOCKSCALE_FP32_INL
#endif

#include <algorithm>
#include <cstring>

#include "cpu/codec-inl.h"
#include "cpu/direction.h"
#include "cpu/pack-inl.h"
#include "cpu/walk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// ---- along rows ----

// The random bytes of `count` consecutive positions of one line, in order.
HWY_INLINE void random_line(const Direction& d, uint32_t line, int64_t pos, int64_t count,
                            uint8_t* out) {
  const DU du;
  const VU first = hn::Add(hn::Set(du, d.global_block(pos)), hn::Iota(du, 0));
  const int64_t blocks = count / kElementsPerPhilox;
  for (int64_t b = 0; b < blocks; b += lanes()) {
    const VU counter = hn::Add(first, hn::Set(du, static_cast<uint32_t>(b)));
    const RandomWords w = random_words(d.rng, d.plane, hn::Set(du, line), counter);
    HWY_ALIGN uint32_t words[4 * 16];
    hn::StoreInterleaved4(w.word[0], w.word[1], w.word[2], w.word[3], du, words);
    const int64_t bytes = std::min<int64_t>(lanes(), blocks - b) * kElementsPerPhilox;
    std::memcpy(out + b * kElementsPerPhilox, words, bytes);
  }
}

// Whether the values are BF16 and no product exceeds the largest value, except by rounding, so that
// none needs clamping: FP32 scales are exactly those of their blocks.
template <class T>
HWY_INLINE bool is_within(const QuantSpec& spec) {
  return std::is_same_v<T, uint16_t> && spec.scale == Format::fp32 && spec.block == kTile &&
         !spec.stochastic() && traits(spec.element).bits() == 8;
}
// encode_row() for such a spec.
template <int kM>
HWY_INLINE void encode_row_within(const Encoder<kM>& encoder, const Signs& signs, const uint16_t* x,
                                  int64_t count, int block, const float* inv, uint8_t* codes,
                                  Ahead& ahead) {
  const DB db;
  const DH dh;
  [[maybe_unused]] const DU du;
  const int shift = log_block(block);
  for (int64_t i = 0; i < count; i += 2 * kPair) {
    ahead.fetch(2 * kPair * sizeof(uint16_t));
    const VF scale = hn::Set(DF(), inv[i >> shift]);
    const auto bytes = [&](int64_t at) HWY_ATTR {
      const Columns m = magnitudes(hn::LoadU(dh, x + at));
      const VU even = encoder.nearest_within(hn::Mul(m.even, scale));
      const VU odd = encoder.nearest_within(hn::Mul(m.odd, scale));
      return hn::BitCast(
          db, hn::OddEven(hn::BitCast(dh, hn::ShiftLeft<16>(odd)), hn::BitCast(dh, even)));
    };
    const VB raw = hn::ConcatEven(db, bytes(i + kPair), bytes(i));
    hn::StoreU(signs(raw, top_bytes(x + i)), db, codes + i);
  }
}

template <int kM, bool kStochastic, class T>
HWY_INLINE void encode_row(const Encoder<kM>& encoder, const Signs& signs, const T* x,
                           int64_t count, int block, const float* inv, const uint8_t* random,
                           uint8_t* codes, Ahead& ahead) {
  constexpr int kPerByte = kM == 1 ? 2 : 1;
  constexpr int64_t kStep = static_cast<int64_t>(lanes());
  const int shift = log_block(block);
  for (int64_t i = 0; i < count; i += kPackRun) {
    VU raw[kPackWords];
    ahead.fetch(kPackRun * sizeof(T));
#pragma GCC unroll 16
    for (int64_t w = 0; w < kPackWords; ++w) {
      const int64_t at = i + w * kStep;
      const VF y = hn::Mul(load_values(x + at), hn::Set(DF(), inv[at >> shift]));
      if constexpr (kStochastic)
        raw[w] = encoder.stochastic(y, hn::PromoteTo(DU(), hn::LoadU(DU8(), random + at)));
      else
        raw[w] = encoder.nearest(y);
    }
    pack_line<kM>(signs, raw, x + i, codes + i / kPerByte);
  }
}

// ---- down columns ----

// 16 rows of kPair columns: four one-byte codes, or eight nibbles, fill a word.
template <bool kWithin, int kM, bool kStochastic, class T>
HWY_INLINE void encode_16_rows(const ColumnEncoder<kM, kStochastic>& encoder, const T* x,
                               int64_t stride, const Columns& scale, const RandomWords& even_random,
                               const RandomWords& odd_random, VU* even, VU* odd, Ahead& ahead) {
  constexpr int kPerWord = 32 / ColumnEncoder<kM, kStochastic>::kBits;
  const DU du;
#pragma GCC unroll 4
  for (int w = 0; w < 16 / kPerWord; ++w) {
    even[w] = odd[w] = hn::Zero(du);
    ahead.fetch(kPerWord * kPair * sizeof(T));
#pragma GCC unroll 8
    for (int i = kPerWord - 1; i >= 0; --i) {
      const int row = w * kPerWord + i;
      const auto byte = [&](const RandomWords& random) HWY_ATTR {
        return hn::And(hn::ShiftRightSame(random.word[row / 4], 8 * (row % 4)), hn::Set(du, 0xFF));
      };
      if constexpr (kWithin) {
        encoder.append_within(even[w], odd[w], x + row * stride, scale);
        continue;
      }
      const Columns v = load_columns(x + row * stride);
      even[w] = encoder.append(even[w], v.even, scale.even, byte(even_random));
      odd[w] = encoder.append(odd[w], v.odd, scale.odd, byte(odd_random));
    }
    even[w] = encoder.finish(even[w]);
    odd[w] = encoder.finish(odd[w]);
  }
}

// Calls done(column) after each kPair columns, whose codes are then in scratch.
template <int kM, bool kStochastic, bool kWithin, class T, class Done>
HWY_INLINE void encode_columns(const Direction& d, const TileView<T>& x, const TileArea& area,
                               const float* inv, int64_t pitch, Scratch& scratch,
                               const Done& done) {
  constexpr int kRowsPerStore = kM == 1 ? 32 : 16;  // four words: 16 bytes of codes per column
  const DU du;
  const int shift = log_block(d.out.spec.block);
  const ColumnEncoder<kM, kStochastic> encoder(d.out.spec.element);
  for (int64_t c = 0; c < x.columns; c += kPair) {
    const uint32_t first = d.global_line(area.batch, area.column + c);
    const VU even_line = hn::Add(hn::Set(du, first), hn::ShiftLeft<1>(hn::Iota(du, 0)));
    const VU odd_line = hn::Add(even_line, hn::Set(du, 1));
    for (int64_t r = 0; r < x.rows; r += kRowsPerStore) {
      VU even[4], odd[4];
      for (int half = 0; half < kRowsPerStore / 16; ++half) {
        const int64_t row = r + 16 * half;
        const Columns scale = load_columns(inv + (row >> shift) * x.columns + c);
        RandomWords even_random{}, odd_random{};
        if constexpr (kStochastic) {
          const VU block = hn::Set(du, d.global_block(area.row + row));
          even_random = random_words(d.rng, d.plane, even_line, block);
          odd_random = random_words(d.rng, d.plane, odd_line, block);
        }
        encode_16_rows<kWithin>(encoder, x.data + row * x.stride + c, x.stride, scale, even_random,
                                odd_random, even + 2 * half, odd + 2 * half, scratch.ahead);
      }
      uint8_t* out = scratch.codes + r * 16 / kRowsPerStore;
      store_words(even, pitch, out);
      store_words(odd, pitch, out + pitch);
    }
    done(c);
  }
}

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
