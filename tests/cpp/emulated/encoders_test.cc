// The device functions that find codes and scales another way than the definitions do, against the
// definitions, by exhaustion.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <vector>

#include "../testing.h"
#include "blockscale/rounding.h"
#include "gpu/dequantize/decode.h"
#include "gpu/quantize/columns.h"
#include "gpu/quantize/rows.h"

namespace blockscale::testing {
namespace {

using namespace gpu;

constexpr uint32_t kBf16End = 0x7F80;  // of finite magnitudes

TEST(Emulated, Fp4NearestIsTheDefinitionForEveryMagnitudeItIsUsedFor) {
  const uint32_t end = bits_of(kNearestSafe) + 1, dense = bits_of(0x1p-6f);
  constexpr FormatTraits t = traits(Format::e2m1);
  std::atomic<uint32_t> wrong{0}, example{0};
  auto check = [&](uint32_t bits) {
    const float y = float_of(bits);
    const uint32_t want = encode_magnitude(t, y, RoundingDirection::nearest_even);
    // The code alone in the low twelve bits, as join_nibbles() needs it.
    if ((fp4_nearest(-y, 1.0f) & 0xFFF) != want) ++wrong, example = bits;
  };
  for_chunks(0, dense, 1 << 20, [&](uint64_t begin, uint64_t stop) {
    for (uint64_t b = begin; b < stop; b += 1021) check(static_cast<uint32_t>(b));
  });
  for_chunks(dense, end, 1 << 20, [&](uint64_t begin, uint64_t stop) {
    for (uint64_t b = begin; b < stop; b += kSweepStep) check(static_cast<uint32_t>(b));
  });
  EXPECT_EQ(wrong, 0u) << "e.g. " << float_of(example);
}

// A block of that amax, as block_with() has it. Of small 1 / scale, powers of two lose no bits.
template <Encoder kEncoder>
Block block_of_inv(uint32_t amax, float inv) {
  constexpr bool kStochastic = kEncoder == Encoder::fp4_stochastic;
  const bool power = (bits_of(inv) & 0x7FFFFF) == 0;
  const bool far = float_of(amax) * inv > (kStochastic ? kStochasticSafe : kNearestSafe) ||
                   (kStochastic && inv < kStochasticLeast && !power);
  return {inv, 0, far};
}

// Codes of 16 BF16 values by what kernels do with a run along a row and with two columns, and by
// the definition.
template <Encoder kEncoder>
void expect_run(const float* v, float inv, const Rng& rng, uint32_t position) {
  constexpr Pass kPass{kEncoder, Format::e8m0};
  constexpr bool kStochastic = kEncoder == Encoder::fp4_stochastic;
  constexpr FormatTraits t = traits(Format::e2m1);
  const Side side{};
  PairRun run{};
  PairColumns columns{};  // the second upside down
  for (int i = 0; i < kRun; ++i) {
    const uint32_t bits = bits_of(v[i]) >> 16;
    run.pair[i / 2] |= bits << (16 * (i % 2));
    columns.pair[i] |= bits;
    columns.pair[kRun - 1 - i] |= bits << 16;
  }
  MatrixAt at{};
  at.rng = rng;
  RowValues<kPass, Bf16Tile> row;
  row.take(run, side);
  ColumnValues<kPass, Bf16Tile> both;
  both.take(columns, side);
  const uint32_t amax = row.amax;
  Block block = block_of_inv<kEncoder>(amax, inv);
  if (block.far) {
    row.cut(side, block);
    both.template cut<0>(side, block);
    both.template cut<1>(side, block);
  }
  const RandomRuns random_of = random_runs<kPass>(side, at, 1, 16 * position);
  auto encode = [&](const auto& unpack, const RunSigns& signs) {
    float values[kRun];
    const float multiplier = unpack_for<kPass>(block, unpack, values);
    return encode_run<kPass>(side, values, signs, multiplier, random_of, 7);
  };
  const Codes along = encode([&](float* to) { row.unpack(side, to); }, row.signs(side));
  const Codes down =
      encode([&](float* to) { both.template unpack<0>(side, to); }, both.template signs<0>(side));
  const Codes up =
      encode([&](float* to) { both.template unpack<1>(side, to); }, both.template signs<1>(side));
  const PhiloxBlock random = random_block(rng, 1, 7, position);
  for (int i = 0; i < kRun; ++i) {
    const auto want = [&](float x) {
      const float y = std::fmin(std::fabs(x) * inv, 6.0f);
      const uint32_t byte = random.word[i / 4] >> (8 * (i % 4)) & 0xFF;
      return with_sign(t,
                       kStochastic ? encode_magnitude_stochastic(t, 6.0f, y, byte)
                                   : encode_magnitude(t, y, RoundingDirection::nearest_even),
                       x);
    };
    const auto code = [&](const Codes& codes) { return codes.word[i / 8] >> (4 * (i % 8)) & 15; };
    ASSERT_EQ(code(along), want(v[i])) << v[i] << " * " << inv << " largest " << float_of(amax);
    ASSERT_EQ(code(down), want(v[i])) << v[i] << " * " << inv << " largest " << float_of(amax);
    ASSERT_EQ(code(up), want(v[kRun - 1 - i])) << v[kRun - 1 - i] << " * " << inv;
  }
}

template <Encoder kEncoder>
void expect_every_bf16(const std::vector<float>& invs) {
  for (const float inv : invs) {
    for (uint32_t first = 0; first < kBf16End; first += kRun) {
      float v[kRun];
      for (int i = 0; i < kRun; ++i)
        v[i] = from_bf16(static_cast<uint16_t>((first + i) | (first / 16 + i) % 2 << 15));
      expect_run<kEncoder>(v, inv, {first, 5}, first);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}
std::vector<float> many_multipliers() {
  std::vector<float> list;
  Random random(11);
  constexpr int kStep = kSweepStep > 1 ? 60 : 5;
  for (int e = -126; e < 127; e += kStep) {
    list.push_back(exp2i(e));
    list.push_back(float_of(static_cast<uint32_t>(e + 127) << 23 |
                            static_cast<uint32_t>(random.below(1 << 23))));
  }
  list.push_back(kFloatMax);
  return list;
}
TEST(Emulated, EveryBf16MagnitudeToTheNearestE2m1) {
  expect_every_bf16<Encoder::fp4_nearest>(many_multipliers());
}
TEST(Emulated, EveryBf16MagnitudeToE2m1Stochastically) {
  expect_every_bf16<Encoder::fp4_stochastic>(many_multipliers());
}

// Every byte of random bits, at every place of a run.
void expect_every_random_byte(float y) {
  constexpr FormatTraits t = traits(Format::e2m1);
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const float v[8] = {y, y, y, y, y, y, y, y};
    const uint32_t random[2] = {byte * 0x01010101, (byte ^ 0x55) * 0x01010101};
    const uint32_t got =
        fp4_stochastic_of_8(v, 1.0f, {0x7F7F7F7F, 0x7F7F7F7F}, random, kBesideRandom);
    const uint32_t low = encode_magnitude_stochastic(t, 6.0f, y, byte),
                   high = encode_magnitude_stochastic(t, 6.0f, y, byte ^ 0x55);
    ASSERT_EQ(got, low * 0x1111 | high * 0x11110000) << y << " random " << byte;
  }
}
TEST(Emulated, Fp4StochasticIsTheDefinitionForEveryRandomByte) {
  const uint32_t end = bits_of(kStochasticSafe) + 1;
  const uint32_t step = kSweepStep > 1 ? 65537 * 31 : 1021;  // odd: all low bits come up
  for (uint32_t b = 0; b < end; b += b < bits_of(0x1p-12f) ? 64 * step : step) {
    expect_every_random_byte(float_of(b));
    if (::testing::Test::HasFatalFailure()) return;
  }
  // Around what the random bits add up to, and where y + 1 rounds up to that.
  for (int unit = 1; unit<6 * 1024; unit += kSweepStep> 1 ? 31 : 1) {
    const float edge = static_cast<float>(unit) / 1024;
    for (uint32_t more = 0; more < 7; ++more) {
      expect_every_random_byte(float_of(bits_of(edge) - 3 + more));
      expect_every_random_byte(float_of(bits_of(edge - 0x1p-24f) - 3 + more));
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

// Random bits by line are those of the coordinates.
TEST(Emulated, RandomBitsOfManyLinesAreThoseOfEach) {
  Random random(5);
  for (int n = 0; n < 1000; ++n) {
    const Rng rng{random.next(), random.next()};
    const auto pos = static_cast<uint32_t>(random.next()),
               line = static_cast<uint32_t>(random.next());
    const PhiloxBlock got = RandomLines(rng, n % 2, pos).block(line),
                      want = random_block(rng, n % 2, line, pos);
    for (int i = 0; i < 4; ++i) ASSERT_EQ(got.word[i], want.word[i]);
  }
}

// ---- the transform ----

// Runs of every kind of magnitude: amaxes and codes are the definition's.
template <Encoder kEncoder>
void expect_transform(const float* x, const Hadamard& h, float inv) {
  constexpr Pass kPass{kEncoder, Format::e4m3, false, true};
  constexpr FormatTraits t = traits(Format::e2m1);
  Side side{};
  side.out.spec.hadamard = h;
  side.transform = signs_of(h);
  float want[kRun], largest = 0;
  PairRun run{};
  for (int i = 0; i < kRun; ++i) {
    want[i] = x[i];
    run.pair[i / 2] |= bits_of(x[i]) >> 16 << (16 * (i % 2));
  }
  hadamard_block(h, want);
  bool finite = true;
  for (const float y : want) {
    largest = std::fmax(largest, std::fabs(y));
    finite = finite && std::fabs(y) <= kFloatMax;
  }
  RowValues<kPass, Bf16Tile> row;
  row.take(run, side);
  const uint32_t amax = row.transformed.settled(side.transform, row.unpack_plain(), row.amax);
  if (!finite) {
    EXPECT_GE(amax, kInfBits);
    return;
  }
  ASSERT_EQ(amax, bits_of(largest));
  Block block = block_of_inv<kEncoder>(row.amax, inv);
  if (block.far) row.cut(side, block);
  float values[kRun];
  const float multiplier = unpack_for<kPass>(
      block, [&](float* to) { row.unpack(side, to); }, values);
  const RandomRuns runs{{{1, 2}, 0, 3}, kBesideRandom};
  const Codes got = encode_run<kPass>(side, values, row.signs(side), multiplier, runs, 4);
  const PhiloxBlock random = random_block({1, 2}, 0, 4, 3);
  for (int i = 0; i < kRun; ++i) {
    const float y = std::fmin(std::fabs(want[i]) * inv, 6.0f);
    const uint32_t code =
        kEncoder == Encoder::fp4_stochastic
            ? encode_magnitude_stochastic(t, 6.0f, y, random_byte(random, static_cast<uint32_t>(i)))
            : encode_magnitude(t, y, RoundingDirection::nearest_even);
    ASSERT_EQ(got.word[i / 8] >> (4 * (i % 8)) & 15, with_sign(t, code, want[i]))
        << want[i] << " * " << inv << " largest " << largest;
  }
}
TEST(Emulated, TransformedRunsAreTheDefinitions) {
  Random random(17);
  const int count = kSweepStep > 1 ? 2000 : 200000;
  for (int n = 0; n < count; ++n) {
    const int exponent = static_cast<int>(random.below(262)) - 134,
              spread = 1 + static_cast<int>(random.below(n % 3 == 0 ? 60 : 4));
    float x[kRun];
    for (float& v : x) {
      const int e = std::min(127, exponent - static_cast<int>(random.below(spread)));
      const double m = n % 5 == 0 ? static_cast<double>(random.below(3)) / 2 : random.uniform();
      v = from_bf16(to_bf16(static_cast<float>(std::ldexp(1.98 * m, e))));
      if (random.below(2) != 0) v = -v;
      if (n % 97 == 0) v = std::copysign(0.0f, v);
    }
    const Hadamard h{16, n % 2 == 0 ? kDefaultSigns16 : random.next() & 0xFFFF, 0};
    const int e =
        n % 7 == 0 ? 127 : std::clamp(static_cast<int>(random.below(6)) - exponent, -120, 127);
    const auto inv = static_cast<float>(std::ldexp(1 + .9 * random.uniform(), e));
    expect_transform<Encoder::fp4_nearest>(x, h, inv);
    expect_transform<Encoder::fp4_stochastic>(x, h, inv);
    if (HasFatalFailure()) return;
  }
}

// ---- scales ----

template <Format kScale>
void expect_two_level() {
  std::vector<float> amaxes = {0, 0x1p-149f, 0x1p-126f, 1e-30f, 3.4e38f, 2688.0f, 688128.0f, 1.0f};
  Random random(3);
  for (int i = 0; i < (kSweepStep > 1 ? 4 : 100); ++i)
    amaxes.push_back(static_cast<float>(
        std::ldexp(1 + random.uniform(), static_cast<int>(random.below(254)) - 127)));
  for (size_t i = 0; i <= amaxes.size(); ++i) {
    // The last one is no outer scale at all.
    float amax = i < amaxes.size() ? amaxes[i] : 0.0f;
    Side s{};
    s.out.spec.scale = kScale;
    s.out.spec.outer = i < amaxes.size();
    s.amax = &amax;
    const Outer outer = outer_of(s, 0);
    const OuterScale want_outer =
        s.out.spec.outer ? outer_scale(kScale, amax) : OuterScale{1.0f, 1.0f};
    ASSERT_EQ(bits_of(outer.dec), bits_of(want_outer.dec));
    for (const bool up : {false, true}) {
      s.scales_up = up;
      for (uint32_t b = 0; b < kBf16End; ++b) {
        const float a = from_bf16(static_cast<uint16_t>(b));
        const Block got = block_with<kScale>(s, outer, bits_of(a), kNearestSafe, [](Block&) {});
        const BlockScale want =
            two_level_scale(kScale, up ? ScaleRounding::up : ScaleRounding::nearest, a, want_outer);
        ASSERT_EQ(got.stored & 0xFF, want.code) << a << " up " << up << " tensor " << amax;
        ASSERT_EQ(bits_of(got.inv), bits_of(want.enc)) << a << " up " << up << " tensor " << amax;
      }
    }
  }
}
TEST(Emulated, TwoLevelScalesOfEveryBf16AmaxAreTheDefinitions) {
  expect_two_level<Format::e4m3>();
  if (!HasFatalFailure()) expect_two_level<Format::ue5m3>();
}

TEST(Emulated, E8m0ScalesOfEveryBf16AmaxAreTheDefinitions) {
  for (const Format element : {Format::e2m1, Format::e4m3fn, Format::e5m2}) {
    const ElementFacts facts(element);
    for (const ScaleRule rule :
         {ScaleRule::floor, ScaleRule::ceil, ScaleRule::even, ScaleRule::rceil}) {
      for (uint32_t b = 0; b < kBf16End; ++b) {
        const float a = from_bf16(static_cast<uint16_t>(b));
        const Block got = e8m0_block(rule, facts, a);
        const uint8_t want = e8m0_byte(rule, element, a);
        ASSERT_EQ(got.stored, want) << a;
        ASSERT_EQ(bits_of(got.inv), bits_of(e8m0_inv(want))) << a;
      }
    }
  }
}

TEST(Emulated, EveryElementIsEncodedAsTheDefinitionSays) {
  for (const Format element : {Format::e2m1, Format::e2m3, Format::e3m2, Format::e4m3fn,
                               Format::e4m3fnuz, Format::e5m2, Format::e5m2fnuz}) {
    const FormatTraits t = traits(element);
    const ElementFacts facts(element);
    const uint32_t end = bits_of(max_value(element)) + 1;
    constexpr uint32_t kStep = kSweepStep > 1 ? 65521 : 509;
    for (uint32_t b = 0; b < end; b += kStep) {
      for (const uint32_t bits : {b, b & 0xFFFE0000, (b & 0xFFFE0000) + 1}) {  // halves, too
        const float y = float_of(bits);
        ASSERT_EQ(encode_nearest(facts, y) & 0xFF,
                  encode_magnitude(t, y, RoundingDirection::nearest_even))
            << y;
        for (const uint32_t random : {b & 0xFF, ~b & 0xFF, 0u, 255u})
          ASSERT_EQ(encode_stochastic(facts, y, random),
                    encode_magnitude_stochastic(t, facts.largest, y, random))
              << y << " random " << random;
      }
    }
    ASSERT_EQ(encode_nearest(facts, facts.largest) & 0xFF, t.max_code());
  }
}

// The signs of 16 values stand at the tops of nibbles, whatever the values.
TEST(Emulated, SignsOfARunAreGatheredInOrder) {
  Random random(9);
  for (int n = 0; n < 2000; ++n) {
    PairRun run;
    SplitRun split;
    PairColumns columns;
    for (uint32_t& pair : run.pair) pair = static_cast<uint32_t>(random.next());
    for (uint32_t& pair : columns.pair) pair = static_cast<uint32_t>(random.next());
    FloatRun floats;
    for (float& value : floats.value) value = float_of(static_cast<uint32_t>(random.next()));
    float values[kRun];
    run.unpack(values);
    for (int j = 0; j < kRun / 2; ++j) {
      const float* two = values + SplitRun::first(j);
      split.pair[j] = bits_of(two[0]) >> 16 | (bits_of(two[2]) & 0xFFFF0000);
    }
    uint32_t want[4][2] = {};
    for (int i = 0; i < kRun; ++i) {
      const int at = 4 * (i % 8) + 3;
      want[0][i / 8] |= (run.pair[i / 2] >> (16 * (i % 2) + 15) & 1) << at;
      want[1][i / 8] |= (columns.pair[i] >> 15 & 1) << at;
      want[2][i / 8] |= columns.pair[i] >> 31 << at;
      want[3][i / 8] |= bits_of(floats.value[i]) >> 31 << at;
    }
    const RunSigns got[] = {run.signs(), columns.signs<0>(), columns.signs<1>(), floats.signs()};
    for (int i = 0; i < 2; ++i) {
      for (int which = 0; which < 4; ++which) ASSERT_EQ(got[which].of_8[i].with(0), want[which][i]);
      ASSERT_EQ(split.signs().of_8[i].with(~0u), want[0][i] | 0x77777777);
    }
  }
}

// Special values too: quantizers write none among elements, but published checkpoints may.
TEST(Emulated, EveryCodeDecodesToItsValue) {
  for (int i = 0; i < kFormatCount; ++i) {
    const auto format = static_cast<Format>(i);
    if (format == Format::fp32) continue;
    const FormatTraits t = traits(format);
    const auto decoder = gpu::Decoder::of(format);
    for (uint32_t code = 0; code < 1u << t.bits(); ++code) {
      const float want = decode(format, code);
      if (t.is_element) {
        ASSERT_EQ(bits_of(decoder(code)), bits_of(want)) << t.name << " " << code;
      } else {
        ASSERT_EQ(bits_of(decoder.scale(code)), bits_of(want)) << t.name << " " << code;
      }
    }
  }
}

}  // namespace
}  // namespace blockscale::testing
