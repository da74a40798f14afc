// Philox4x32 against Random123's published answers, and coordinates to counters (specification,
// section 7).
#include "blockscale/philox.h"

#include <gtest/gtest.h>

#include <array>

namespace blockscale::testing {
namespace {

using Words = std::array<uint32_t, 4>;

Words words(const PhiloxBlock& b) { return {b.word[0], b.word[1], b.word[2], b.word[3]}; }

struct KnownAnswer {
  Words counter;
  uint32_t k0, k1;
  Words seven, ten;
};

// Random123's kat_vectors: zeros, ones, and the digits of pi.
constexpr KnownAnswer kKnown[] = {
    {{0, 0, 0, 0},
     0,
     0,
     {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48},
     {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     0xffffffff,
     0xffffffff,
     {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     0xa4093822,
     0x299f31d0,
     {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

PhiloxBlock block(const Words& c) { return {{c[0], c[1], c[2], c[3]}}; }

TEST(Philox, Random123KnownAnswersSevenAndTenRounds) {
  for (const KnownAnswer& k : kKnown) {
    EXPECT_EQ(words(philox4x32<7>(block(k.counter), k.k0, k.k1)), k.seven);
    EXPECT_EQ(words(philox4x32<10>(block(k.counter), k.k0, k.k1)), k.ten);
  }
}

TEST(Philox, SevenRoundsIsWhatTheOperatorsUse) {
  EXPECT_EQ(kPhiloxRounds, 7);
  EXPECT_EQ(words(philox4x32(block(kKnown[2].counter), kKnown[2].k0, kKnown[2].k1)),
            kKnown[2].seven);
}

// The known answers again, reached through seed, offset, plane, line and position: the counter is
// (pos/16, line, low half of offset, 31 bits of its high half | plane << 31), the key is the seed.
TEST(Philox, CoordinatesBecomeTheCounter) {
  const Rng ones{~uint64_t{0}, ~uint64_t{0}};
  EXPECT_EQ(words(random_block(ones, 1, 0xffffffff, 0xffffffff)), kKnown[1].seven);
  EXPECT_EQ(words(random_block({0, 0}, 0, 0, 0)), kKnown[0].seven);
  const Rng pi{uint64_t{0x299f31d0} << 32 | 0xa4093822, uint64_t{0x03707344} << 32 | 0x13198a2e};
  EXPECT_EQ(words(random_block(pi, 0, 0x85a308d3, 0x243f6a88)), kKnown[2].seven);
}

TEST(Philox, PlaneIsBit31OfTheLastCounterWordAndBit63OfOffsetIsIgnored) {
  const uint64_t offset = 0x1234567890ABCDEF;
  const Rng rng{0xDEADBEEF01234567, offset};
  for (int plane : {0, 1}) {
    const uint32_t last = 0x12345678u | static_cast<uint32_t>(plane) << 31;
    const Words want = words(philox4x32<7>({{77, 5, 0x90ABCDEF, last}}, 0x01234567, 0xDEADBEEF));
    EXPECT_EQ(words(random_block(rng, plane, 5, 77)), want);
    const Rng bit63{rng.seed, offset | uint64_t{1} << 63};
    EXPECT_EQ(words(random_block(bit63, plane, 5, 77)), want);
  }
  EXPECT_NE(words(random_block(rng, 0, 5, 77)), words(random_block(rng, 1, 5, 77)));
}

TEST(Philox, EveryCoordinateAndKeyBitMatters) {
  const Words base = words(random_block({0, 0}, 0, 0, 0));
  for (int bit = 0; bit < 64; ++bit) {
    const uint64_t one = uint64_t{1} << bit;
    EXPECT_NE(words(random_block({one, 0}, 0, 0, 0)), base) << "seed bit " << bit;
    if (bit < 63) {
      EXPECT_NE(words(random_block({0, one}, 0, 0, 0)), base) << "offset bit " << bit;
    }
    if (bit < 32) {
      EXPECT_NE(words(random_block({0, 0}, 0, static_cast<uint32_t>(one), 0)), base);
      EXPECT_NE(words(random_block({0, 0}, 0, 0, static_cast<uint32_t>(one))), base);
    }
  }
}

TEST(Philox, ElementsTakeBytesLittleEndFirst) {
  const PhiloxBlock b{{0x03020100, 0x07060504, 0x0B0A0908, 0x0F0E0D0C}};
  for (uint32_t i = 0; i < kElementsPerPhilox; ++i) EXPECT_EQ(random_byte(b, i), i);
  const PhiloxBlock high{{0xFFFFFF80, 0, 0, 0xFF000000}};
  EXPECT_EQ(random_byte(high, 0), 0x80u);
  EXPECT_EQ(random_byte(high, 15), 0xFFu);
  EXPECT_EQ(random_byte(high, 14), 0u);
}

}  // namespace
}  // namespace blockscale::testing
