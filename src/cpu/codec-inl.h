// Vector forms of formats.h, rounding.h and philox.h: each lane holds one element. Included once
// per instruction set; the constants come from the traits table, so no format fact is repeated.

#if defined(BLOCKSCALE_CODEC_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_CODEC_INL
#undef BLOCKSCALE_CODEC_INL
#else
#define BLOCKSCALE_CODEC_INL
#endif

#include <bit>

#include "blockscale/philox.h"
#include "blockscale/rounding.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Every block is a multiple of 16 elements, so vectors of at most 16 lanes never straddle one.
using DF = hn::CappedTag<float, 16>;
using DU = hn::RebindToUnsigned<DF>;
using DU16 = hn::Rebind<uint16_t, DU>;
using DU8 = hn::Rebind<uint8_t, DU>;
using DB = hn::Repartition<uint8_t, DU>;  // as many bytes as DU's vectors hold
using DH = hn::Repartition<uint16_t, DU>;
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;
using VB = hn::Vec<DB>;
using VH = hn::Vec<DH>;
HWY_INLINE constexpr size_t lanes() { return hn::MaxLanes(DF()); }
inline constexpr int64_t kPair = 2 * static_cast<int64_t>(lanes());  // BF16 values per vector
HWY_INLINE constexpr int log_block(int64_t block) {
  return std::countr_zero(static_cast<uint64_t>(block));
}

// What code with mantissa bits as a template argument assumes of the table: elements have 1 to 3,
// and 1 means FP4, whose codes are packed in pairs; scales have 3, or none (E8M0).
static_assert([] {
  for (int i = 0; i < kFormatCount; ++i) {
    const FormatTraits& t = kFormats[i];
    const bool packed = codes_per_byte(static_cast<Format>(i)) == 2;
    if (t.is_element && (t.mantissa_bits < 1 || t.mantissa_bits > 3)) return false;
    if (t.is_element && packed != (t.mantissa_bits == 1)) return false;
    if (!t.is_element && t.mantissa_bits % 3 != 0 && static_cast<Format>(i) != Format::fp32)
      return false;
  }
  return true;
}());

// ---- high-precision elements ----

HWY_INLINE VF load_values(const float* p) { return hn::LoadU(DF(), p); }
HWY_INLINE VF load_values(const uint16_t* bf16) {
  return hn::BitCast(DF(), hn::ShiftLeft<16>(hn::PromoteTo(DU(), hn::LoadU(DU16(), bf16))));
}
// IEEE binary16. Rebias the exponent; Inf and NaN need it twice; subnormals are small integers.
HWY_INLINE VF load_fp16(const uint16_t* fp16) {
  const DU du;
  const DF df;
  const VU bits = hn::PromoteTo(du, hn::LoadU(DU16(), fp16));
  const VU magnitude = hn::And(bits, hn::Set(du, 0x7FFF));
  const VU sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000)));
  const VU rebias = hn::Set(du, 112u << 23);
  const VU normal = hn::Add(hn::ShiftLeft<13>(magnitude), rebias);
  const VU special = hn::IfThenElseZero(hn::Gt(magnitude, hn::Set(du, 0x7BFF)), rebias);
  const VF subnormal = hn::Mul(hn::ConvertTo(df, hn::BitCast(hn::RebindToSigned<DU>(), magnitude)),
                               hn::Set(df, exp2i(-24)));
  const VU value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 0x400)), hn::BitCast(du, subnormal),
                                  hn::Add(normal, special));
  return hn::BitCast(df, hn::Or(value, sign));
}

// FP32 to BF16 in the high half of each lane (the low half is undefined), round to nearest even.
// Done in integers: the hardware conversion flushes subnormals. A NaN must be short, that is, have
// a zero low half, as NaNs from BF16 or from arithmetic on numbers do.
HWY_INLINE VU bf16_high(VF x) {
  const DU du;
  const VU bits = hn::BitCast(du, x);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  return hn::Add(hn::Add(bits, hn::Set(du, 0x7FFF)), odd);
}
// Turns any NaN into the definition's, which bf16_high() accepts.
HWY_INLINE VF define_nan(VF x) {
  return hn::IfThenElse(hn::IsNaN(x), hn::BitCast(DF(), hn::Set(DU(), kNanBits)), x);
}
// The nearest BF16.
HWY_INLINE VF nearest_short(VF x) {
  return hn::BitCast(DF(), hn::And(bf16_high(define_nan(x)), hn::Set(DU(), 0xFFFF0000u)));
}
HWY_INLINE void store_values(VF x, float* p) { hn::StoreU(x, DF(), p); }
HWY_INLINE void store_short(VF x, uint16_t* bf16) {
  hn::StoreU(hn::TruncateTo(DU16(), hn::ShiftRight<16>(bf16_high(x))), DU16(), bf16);
}
HWY_INLINE void store_values(VF x, uint16_t* bf16) { store_short(define_nan(x), bf16); }
// Stores 2 * lanes() consecutive values; NaNs must be short.
HWY_INLINE void store_pair(VF a, VF b, float* p) {
  store_values(a, p);
  store_values(b, p + lanes());
}
HWY_INLINE void store_pair(VF a, VF b, uint16_t* bf16) {
  const DH dh;
  hn::StoreU(hn::ConcatOdd(dh, hn::BitCast(dh, bf16_high(b)), hn::BitCast(dh, bf16_high(a))), dh,
             bf16);
}

// Whether the processor may have an instruction that rounds FP32 to BF16, which Highway 1.0.3 does
// not offer.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
inline constexpr bool kMayRound = true;
#else
inline constexpr bool kMayRound = false;
#endif
// store_pair() with that instruction, which treats subnormals as zero and never returns one. No
// value may be a NaN.
HWY_INLINE void store_rounded_pair([[maybe_unused]] VF a, [[maybe_unused]] VF b,
                                   [[maybe_unused]] uint16_t* bf16) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  VH both;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both.raw) : "v"(a.raw), "v"(b.raw));
  hn::StoreU(both, DH(), bf16);
#endif
}

// ---- element codes ----

// Magnitude codes of one element format; constants are broadcast once per loop. kM: its mantissa
// bits. The members return 0 in the sign bit; the bits above are undefined, and packing masks them.
template <int kM>
struct Encoder {
  explicit Encoder(Format element) {
    const FormatTraits t = traits(element);
    largest = hn::Set(DF(), max_value(element));
    const uint32_t min_normal = bit_cast<uint32_t>(exp2i(t.min_exponent()));
    smallest_normal = hn::Set(DU(), min_normal);
    // bits(a + magic) = bits(magic) + r, r in the low bits and the exponent E + 23 - m at bit 23;
    // adding the two fields gives (E << m) + r, and the low bits of magic subtract Emin << m.
    const uint32_t exponent_field = (min_normal >> 23) + 23 - kM;
    const uint32_t minus_min = (0u - (exponent_field << kM)) & (2 * t.magnitude_mask() + 1);
    magic = hn::Set(DF(), bit_cast<float>(((127u + 23 - kM) << 23) + minus_min));
    // Stochastic: half of 1/256, less the exponent below Emin, where code 0 starts.
    up = hn::Set(DU(), (1u << (14 - kM)) - (min_normal - (1u << 23)));
    half_normal = hn::Set(DF(), 0.5f * exp2i(t.min_exponent()));
  }

  // Rounds to nearest even; the magnitude must not be a number beyond the largest, except by
  // rounding. See encode_magnitude() for the formula: binade * magic is 2^(E + 23 - m), so that the
  // addition rounds a to a multiple of 2^(E-m). The product is exact.
  HWY_INLINE VU nearest_within(VF a) const {
    const DU du;
    const DF df;
    const VU binade = hn::Max(hn::And(hn::BitCast(du, a), hn::Set(du, kInfBits)), smallest_normal);
    const VU t = hn::BitCast(du, hn::MulAdd(hn::BitCast(df, binade), magic, a));
    return hn::Add(t, hn::ShiftRight<23 - kM>(t));
  }
  // Saturates; `x` is not NaN.
  HWY_INLINE VU nearest(VF x) const { return nearest_within(hn::Min(hn::Abs(x), largest)); }

  // `random`: the element's byte in the low 8 bits of each lane. A subnormal y becomes (y + n) / 2,
  // section 6's w one binade lower, so that codes continue from there without a special case.
  HWY_INLINE VU stochastic(VF x, VU random) const {
    const DU du;
    const DF df;
    const VF y = hn::Min(hn::Abs(x), largest);
    const VF z = hn::Max(y, hn::MulAdd(y, hn::Set(df, 0.5f), half_normal));
    const VU bump = hn::Add(up, hn::ShiftLeft<15 - kM>(random));
    return hn::ShiftRight<23 - kM>(hn::Add(hn::BitCast(du, z), bump));
  }

  VF largest, half_normal, magic;
  VU smallest_normal, up;
};

// The value of the code in the low bits of each lane (no other bits may be set).
template <int kM>
struct Decoder {
  explicit Decoder(Format format) {
    const FormatTraits t = traits(format);
    magnitude_mask = hn::Set(DU(), t.magnitude_mask());
    sign_bit = hn::Set(DU(), t.sign_bit());
    sign_shift = 31 - (t.exponent_bits + t.mantissa_bits);
    rebias = hn::Set(DU(), static_cast<uint32_t>(127 - t.bias) << 23);
    normal = hn::Set(DF(), exp2i(t.min_exponent()));
    special = t.special;
    max_code = hn::Set(DU(), t.max_code());
    inf_code = hn::Set(DU(), t.max_code() + 1);
    nan_code = hn::Set(DU(), t.nan_code());
  }

  HWY_INLINE VF operator()(VU code) const {
    const DU du;
    const DF df;
    const VU magnitude = hn::And(code, magnitude_mask);
    const VU sign = hn::ShiftLeftSame(hn::And(code, sign_bit), sign_shift);
    // A subnormal decodes as the normal number with an implicit bit, less that bit's value.
    const auto subnormal = hn::Lt(magnitude, hn::Set(du, 1u << kM));
    const VU implied = hn::Add(magnitude, hn::IfThenElseZero(subnormal, hn::Set(du, 1u << kM)));
    const VF raw = hn::BitCast(df, hn::Add(hn::ShiftLeft<23 - kM>(implied), rebias));
    const VF value = hn::Sub(raw, hn::IfThenElseZero(hn::RebindMask(df, subnormal), normal));
    VU bits = hn::Or(hn::BitCast(du, value), sign);
    if (special == Special::none) return hn::BitCast(df, bits);
    const VU nan = hn::Set(du, kNanBits);
    if (special == Special::negative_zero) {
      bits = hn::IfThenElse(hn::Eq(code, nan_code), nan, bits);
    } else {
      bits = hn::IfThenElse(hn::Gt(magnitude, max_code), nan, bits);
      if (special == Special::ieee)
        bits =
            hn::IfThenElse(hn::Eq(magnitude, inf_code), hn::Or(sign, hn::Set(du, kInfBits)), bits);
    }
    return hn::BitCast(df, bits);
  }

  VU magnitude_mask, sign_bit, rebias, max_code, inf_code, nan_code;
  VF normal;
  int sign_shift;
  Special special;
};

// Values of scales (E8M0, or with three mantissa bits) from their codes, as BF16 bits. They are
// correct for codes from least() to most(), and have only eight fractions: everything that a block
// derives from its scale follows from the fraction, up to a power of two.
struct ScaleValues {
  explicit ScaleValues(Format scale) : t(traits(scale)) {
    HWY_ALIGN uint16_t bits[8] = {0x3F80};
    for (int i = 1; i < 8; ++i)
      bits[i] = to_bf16(static_cast<float>(i) * exp2i(t.min_exponent() - t.mantissa_bits));
    subnormal = hn::LoadDup128(DH(), bits);
    rebias = hn::Set(DH(), static_cast<uint16_t>((127 - t.bias) << 7));
  }
  HWY_INLINE VH operator()(VH code) const {
    const DH dh;
    if (t.mantissa_bits == 0) return hn::Max(hn::ShiftLeft<7>(code), hn::Set(dh, kLeastE8m0 << 7));
    const VH normal = hn::Add(hn::ShiftLeft<4>(code), rebias);
    const VH at = hn::Add(hn::Mul(code, hn::Set(dh, 0x0202)), hn::Set(dh, 0x0100));
    return hn::IfThenElse(hn::Lt(code, hn::Set(dh, 8)), hn::TableLookupBytes(subnormal, at),
                          normal);
  }
  // E8M0: far enough from the ends that no derived value is subnormal or infinite.
  static constexpr int kLeastE8m0 = 27, kMostE8m0 = 227;
  uint16_t least() const { return static_cast<uint16_t>(t.mantissa_bits == 0 ? kLeastE8m0 : 1); }
  uint16_t most() const {
    return static_cast<uint16_t>(t.mantissa_bits == 0 ? kMostE8m0 : t.max_code());
  }

  FormatTraits t;
  VH subnormal, rebias;
};

// Indices of scales' fractions for TableLookupBytes() in a table of the eight fractions.
HWY_INLINE VH scale_fractions(VH value) {
  const DH dh;
  const VH low = hn::And(hn::ShiftRight<3>(value), hn::Set(dh, 0x000E));
  return hn::Or(hn::Or(low, hn::ShiftLeft<8>(low)), hn::Set(dh, 0x0100));
}

// Calls body with the element's mantissa bits as a compile-time constant.
template <class Body>
HWY_INLINE void with_mantissa_bits(Format element, const Body& body) {
  switch (traits(element).mantissa_bits) {
    case 1:
      return body(std::integral_constant<int, 1>());
    case 2:
      return body(std::integral_constant<int, 2>());
    default:
      return body(std::integral_constant<int, 3>());
  }
}

// ---- random bits ----

// High and low halves of 32x32-bit products with a constant.
HWY_INLINE void multiply_wide(VU a, VU m, VU& high, VU& low) {
  const DU du;
  const hn::Repartition<uint64_t, DU> du64;
  const auto even = hn::MulEven(a, m);
  const auto odd = hn::MulEven(hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(du64, a))), m);
  low = hn::OddEven(hn::BitCast(du, hn::ShiftLeft<32>(odd)), hn::BitCast(du, even));
  high = hn::OddEven(hn::BitCast(du, odd), hn::BitCast(du, hn::ShiftRight<32>(even)));
}

struct RandomWords {
  VU word[4];
};

// One Philox call per lane.
HWY_INLINE RandomWords random_words(Rng rng, int plane, VU line, VU pos_div_16) {
  const DU du;
  auto [w2, w3, k0, k1] = random_key(rng, plane);
  VU c0 = pos_div_16, c1 = line;
  VU c2 = hn::Set(du, w2), c3 = hn::Set(du, w3);
  const VU m0 = hn::Set(du, kPhiloxM0), m1 = hn::Set(du, kPhiloxM1);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    VU high0, low0, high1, low1;
    multiply_wide(c0, m0, high0, low0);
    multiply_wide(c2, m1, high1, low1);
    c0 = hn::Xor(hn::Xor(high1, c1), hn::Set(du, k0));
    c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(du, k1));
    c1 = low1;
    c3 = low0;
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
