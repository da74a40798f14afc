// The counter RNG (Philox4x32-7, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011) and how coordinates become counters (specification, section 7).
#pragma once

#include <cstdint>

#include "blockscale/formats.h"

namespace blockscale {

struct PhiloxBlock {
  uint32_t word[4];
};

inline constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;
inline constexpr uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;
inline constexpr int kPhiloxRounds = 7;
inline constexpr int kElementsPerPhilox = 16;  // one byte each

// Both halves of a product. On a GPU, inline PTX makes it one instruction: for plain C++ the
// compiler emits a second one, which adds zero to the upper half.
struct PhiloxProduct {
  uint32_t low, high;
};
BLOCKSCALE_HD constexpr PhiloxProduct philox_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  if (!__builtin_is_constant_evaluated()) {
    PhiloxProduct p{};
    asm("{ .reg .b64 p; mul.wide.u32 p, %2, %3; mov.b64 {%0, %1}, p; }"
        : "=r"(p.low), "=r"(p.high)
        : "r"(a), "r"(b));
    return p;
  }
#endif
  const uint64_t p = uint64_t{a} * b;
  return {static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32)};
}

template <int kRounds = kPhiloxRounds>
BLOCKSCALE_HD constexpr PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t k0, uint32_t k1) {
  PhiloxBlock c = counter;
  for (int round = 0; round < kRounds; ++round) {
    const PhiloxProduct p0 = philox_product(kPhiloxM0, c.word[0]);
    const PhiloxProduct p1 = philox_product(kPhiloxM1, c.word[2]);
    c = {{p1.high ^ c.word[1] ^ k0, p1.low, p0.high ^ c.word[3] ^ k1, p0.low}};
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return c;
}

// The key of one operand's random bits: seed and offset by value. Bit 63 of offset is ignored.
struct Rng {
  uint64_t seed = 0;
  uint64_t offset = 0;
};

// What the counter, in its last two words, and the key hold for all elements of an operand
// (specification, section 7).
//
// plane 0: blocks along a row (line = global row, pos = global column);
// plane 1: blocks down a column (line = global column, pos = global row).
struct RandomKey {
  uint32_t word2, word3, k0, k1;
};
BLOCKSCALE_HD constexpr RandomKey random_key(Rng rng, int plane) {
  const uint32_t high = static_cast<uint32_t>(rng.offset >> 32) & 0x7FFFFFFF;
  return {static_cast<uint32_t>(rng.offset), high | static_cast<uint32_t>(plane) << 31,
          static_cast<uint32_t>(rng.seed), static_cast<uint32_t>(rng.seed >> 32)};
}
BLOCKSCALE_HD constexpr PhiloxBlock random_block(Rng rng, int plane, uint32_t line,
                                                 uint32_t pos_div_16) {
  const RandomKey key = random_key(rng, plane);
  return philox4x32({{pos_div_16, line, key.word2, key.word3}}, key.k0, key.k1);
}

// random_block() for one pos_div_16 and many lines. The line is one word of the counter and needs
// three rounds to reach all four words: values that do not depend on it are computed once.
class RandomLines {
 public:
  RandomLines() = default;
  BLOCKSCALE_HD constexpr RandomLines(Rng rng, int plane, uint32_t pos_div_16) {
    const auto [w2, w3, k0, k1] = random_key(rng, plane);
    const PhiloxProduct a = philox_product(kPhiloxM0, pos_div_16);
    const PhiloxProduct b = philox_product(kPhiloxM1, w2);
    const PhiloxProduct c = philox_product(kPhiloxM1, a.high ^ w3 ^ k1);
    const PhiloxProduct d = philox_product(kPhiloxM0, c.high ^ b.low ^ (k0 + kPhiloxW0));
    first_ = b.high ^ k0;
    second_ = a.low ^ (k1 + kPhiloxW1);
    third_[0] = c.low ^ (k0 + 2 * kPhiloxW0);
    third_[1] = d.high ^ (k1 + 2 * kPhiloxW1);
    fourth_ = d.low;
    k0_ = k0 + 3 * kPhiloxW0;
    k1_ = k1 + 3 * kPhiloxW1;
  }
  BLOCKSCALE_HD constexpr PhiloxBlock block(uint32_t line) const {
    const PhiloxProduct p = philox_product(kPhiloxM0, line ^ first_);
    const PhiloxProduct q = philox_product(kPhiloxM1, p.high ^ second_);
    return philox4x32<kPhiloxRounds - 3>({q.high ^ third_[0], q.low, p.low ^ third_[1], fourth_},
                                         k0_, k1_);
  }

 private:
  uint32_t first_, second_, third_[2], fourth_, k0_, k1_;
};

// The 8 bits of one element: byte i%4 (little end first) of word i/4, where i = pos % 16.
BLOCKSCALE_HD constexpr uint32_t random_byte(const PhiloxBlock& block, uint32_t i) {
  return block.word[i / 4] >> (8 * (i % 4)) & 0xFF;
}

}  // namespace blockscale
