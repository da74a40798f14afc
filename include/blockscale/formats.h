// Number formats: one traits table and one generic encode/decode (specification, sections 2 and 3).
//
// Every fact about a format lives in the table below; everything else (largest value, NaN code,
// smallest normal) is derived from it. All functions are constexpr, allocation-free and usable on
// host and device.
#pragma once

#include <cstdint>
#include <utility>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define BLOCKSCALE_HD __host__ __device__
#else
#define BLOCKSCALE_HD
#endif

namespace blockscale {

template <class To, class From>
BLOCKSCALE_HD constexpr To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

// Entry i of a constexpr table. On a GPU this compares i with constants: indexing would write the
// table to the thread's stack at every look-up.
template <const auto& kTable, int kIndex>
BLOCKSCALE_HD constexpr auto entry() {
  constexpr auto found = kTable[kIndex];
  return found;
}
template <const auto& kTable, int... kIndex>
BLOCKSCALE_HD constexpr auto look_up(int i, std::integer_sequence<int, kIndex...>) {
  auto found = entry<kTable, 0>();
  ((i == kIndex ? static_cast<void>(found = entry<kTable, kIndex>()) : void()), ...);
  return found;
}
template <const auto& kTable, int kCount>
BLOCKSCALE_HD constexpr auto look_up(int i) {
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
  return look_up<kTable>(i, std::make_integer_sequence<int, kCount>());
#else
  return kTable[i];
#endif
}

// 2^e for -149 <= e <= 127, exact (FP32 subnormals included).
BLOCKSCALE_HD constexpr float exp2i(int e) {
  return e >= -126 ? bit_cast<float>(static_cast<uint32_t>(e + 127) << 23)
                   : bit_cast<float>(uint32_t{1} << (e + 149));
}

inline constexpr uint32_t kAbsMask = 0x7FFFFFFF;
inline constexpr uint32_t kInfBits = 0x7F800000;
inline constexpr uint32_t kNanBits = 0x7FC00000;
// Whether x < 0, even where the processor treats subnormals as 0.
BLOCKSCALE_HD constexpr bool is_negative(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), magnitude = bits & kAbsMask;
  return bits != magnitude && magnitude != 0 && magnitude <= kInfBits;
}
inline constexpr float kFloatMax = 3.40282346638528859812e+38f;

BLOCKSCALE_HD constexpr bool is_finite(float x) {
  return (bit_cast<uint32_t>(x) & kAbsMask) < kInfBits;
}
BLOCKSCALE_HD constexpr float abs(float x) {
  return bit_cast<float>(bit_cast<uint32_t>(x) & kAbsMask);
}

enum class Format : uint8_t {
  // elements
  e2m1,
  e2m3,
  e3m2,
  e4m3fn,
  e4m3fnuz,
  e5m2,
  e5m2fnuz,
  // scales
  e8m0,
  e4m3,
  ue5m3,
  fp32,
};

// Which codes are not numbers.
enum class Special : uint8_t {
  none,          // every code is finite
  all_ones,      // all exponent and mantissa bits set: NaN; no Inf
  ieee,          // top exponent: Inf (mantissa 0) and NaN
  negative_zero  // the code of -0 is NaN ("fnuz"); no Inf, no -0
};

struct FormatTraits {
  const char* name;
  int exponent_bits;
  int mantissa_bits;
  int bias;
  Special special;
  bool is_signed;
  bool is_element;

  BLOCKSCALE_HD constexpr int bits() const { return is_signed + exponent_bits + mantissa_bits; }
  BLOCKSCALE_HD constexpr uint32_t magnitude_mask() const {
    return (1u << (exponent_bits + mantissa_bits)) - 1;
  }
  BLOCKSCALE_HD constexpr uint32_t sign_bit() const {
    return is_signed ? 1u << (exponent_bits + mantissa_bits) : 0;
  }
  // Code of the largest finite magnitude.
  BLOCKSCALE_HD constexpr uint32_t max_code() const {
    return special == Special::ieee       ? (magnitude_mask() >> mantissa_bits << mantissa_bits) - 1
           : special == Special::all_ones ? magnitude_mask() - 1
                                          : magnitude_mask();
  }
  // The NaN that quantizers write; meaningless for Special::none.
  BLOCKSCALE_HD constexpr uint32_t nan_code() const {
    return special == Special::negative_zero ? sign_bit() : magnitude_mask();
  }
  // A format without a fraction has no subnormals and no zero: code 0 is 2^-bias (E8M0).
  BLOCKSCALE_HD constexpr bool has_zero() const { return mantissa_bits > 0; }
  // Exponent of the smallest normal number.
  BLOCKSCALE_HD constexpr int min_exponent() const { return 1 - bias; }
};

inline constexpr FormatTraits kFormats[] = {
    //  name       e  m  bias special               signed element
    {"e2m1", 2, 1, 1, Special::none, true, true},
    {"e2m3", 2, 3, 1, Special::none, true, true},
    {"e3m2", 3, 2, 3, Special::none, true, true},
    {"e4m3fn", 4, 3, 7, Special::all_ones, true, true},
    {"e4m3fnuz", 4, 3, 8, Special::negative_zero, true, true},
    {"e5m2", 5, 2, 15, Special::ieee, true, true},
    {"e5m2fnuz", 5, 2, 16, Special::negative_zero, true, true},
    {"e8m0", 8, 0, 127, Special::all_ones, false, false},
    {"e4m3", 4, 3, 7, Special::all_ones, false, false},
    {"ue5m3", 5, 3, 15, Special::all_ones, false, false},
    {"fp32", 8, 23, 127, Special::ieee, true, false},
};
inline constexpr int kFormatCount = sizeof(kFormats) / sizeof(kFormats[0]);

BLOCKSCALE_HD constexpr FormatTraits traits(Format f) {
  return look_up<kFormats, kFormatCount>(static_cast<int>(f));
}

// Codes in a stored byte: FP4 packs two; in every other narrow format each code has its own byte.
BLOCKSCALE_HD constexpr int codes_per_byte(Format f) { return traits(f).bits() == 4 ? 2 : 1; }
BLOCKSCALE_HD constexpr int scale_bytes(Format f) { return f == Format::fp32 ? 4 : 1; }

// Value of a code of any format of at most 8 bits. Exact: every value is an FP32 number.
BLOCKSCALE_HD constexpr float decode(Format f, uint32_t code) {
  const FormatTraits t = traits(f);
  const uint32_t magnitude = code & t.magnitude_mask();
  const bool negative = (code & t.sign_bit()) != 0;
  const bool is_nan = t.special == Special::negative_zero ? code == t.nan_code()
                      : t.special == Special::none        ? false
                      : t.special == Special::ieee        ? magnitude > t.max_code() + 1
                                                          : magnitude == t.magnitude_mask();
  if (is_nan) return bit_cast<float>(kNanBits);
  const uint32_t sign = negative ? 0x80000000u : 0;
  if (t.special == Special::ieee && magnitude == t.max_code() + 1)
    return bit_cast<float>(sign | kInfBits);
  const int exponent = static_cast<int>(magnitude >> t.mantissa_bits);
  const uint32_t fraction = magnitude & ((1u << t.mantissa_bits) - 1);
  float value = 0;
  if (!t.has_zero()) {
    value = exp2i(exponent - t.bias);
  } else if (exponent == 0) {
    value = static_cast<float>(fraction) * exp2i(t.min_exponent() - t.mantissa_bits);
  } else {
    value = bit_cast<float>(static_cast<uint32_t>(exponent - t.bias + 127) << 23 |
                            fraction << (23 - t.mantissa_bits));
  }
  return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
}

BLOCKSCALE_HD constexpr float max_value(Format f) {
  return f == Format::fp32 ? kFloatMax : decode(f, traits(f).max_code());
}

// How `encode_magnitude` resolves a magnitude between two neighbours.
enum class RoundingDirection : uint8_t { nearest_even, up };

// Code of a finite magnitude, saturating at the largest value.
//
// One formula covers normals, subnormals and the carry into the next binade. Let E be the exponent
// of the value, at least that of the smallest normal, and r the magnitude in units of 2^(E-m),
// rounded to an integer; the code is ((E - Emin) << m) + r. A normal r includes its implicit bit,
// which is exactly what increments the exponent field from 0.
BLOCKSCALE_HD constexpr uint32_t encode_magnitude(const FormatTraits& t, float magnitude,
                                                  RoundingDirection direction) {
  const uint32_t bits = bit_cast<uint32_t>(magnitude) & kAbsMask;
  const int field = static_cast<int>(bits >> 23);
  const int exponent = field > 0 ? field - 127 : -126;
  const uint64_t significand = (bits & 0x7FFFFF) | (field > 0 ? 0x800000u : 0);
  const int e = exponent > t.min_exponent() ? exponent : t.min_exponent();
  // Beyond 32 bits the whole significand lies far below half a unit.
  const int wanted = 23 - t.mantissa_bits + (e - exponent);
  const int shift = wanted < 32 ? wanted : 32;
  const uint64_t one = uint64_t{1} << shift;
  const uint64_t bump =
      direction == RoundingDirection::up ? one - 1 : (one >> 1) - 1 + (significand >> shift & 1);
  const uint32_t r = static_cast<uint32_t>((significand + bump) >> shift);
  const uint32_t code = (static_cast<uint32_t>(e - t.min_exponent()) << t.mantissa_bits) + r;
  return code < t.max_code() ? code : t.max_code();
}

// Attaches the sign; a format without -0 gives +0.
BLOCKSCALE_HD constexpr uint32_t with_sign(const FormatTraits& t, uint32_t magnitude_code,
                                           float x) {
  const bool negative = (bit_cast<uint32_t>(x) >> 31) != 0;
  const bool signless_zero = t.special == Special::negative_zero && magnitude_code == 0;
  return magnitude_code | (negative && !signless_zero ? t.sign_bit() : 0);
}

// Rounds to nearest, ties to the even code, saturating; NaN becomes the format's NaN (+0 where the
// format has none). For formats of at most 8 bits with a fraction.
BLOCKSCALE_HD constexpr uint8_t encode(Format f, float x) {
  const FormatTraits t = traits(f);
  if ((bit_cast<uint32_t>(x) & kAbsMask) > kInfBits)
    return static_cast<uint8_t>(t.special == Special::none ? 0 : t.nan_code());
  const uint32_t magnitude = encode_magnitude(t, x, RoundingDirection::nearest_even);
  return static_cast<uint8_t>(with_sign(t, magnitude, x));
}

}  // namespace blockscale
