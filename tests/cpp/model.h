// An independent model of the number formats and scale rules, in double precision and by search
// instead of bit arithmetic. It restates the tables of the specification (sections 2 to 4)
// and shares no fact with formats.h but the names.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "blockscale/formats.h"

namespace blockscale::testing {

struct Facts {
  Format format;
  std::string name;
  int exponent_bits, mantissa_bits, bias;
  double largest;
  std::vector<int> nan_codes, infinity_codes;  // positive and negative
  bool is_signed, negative_zero;
};

inline const std::vector<Facts>& element_facts() {
  static const std::vector<Facts> table = {
      {Format::e2m1, "e2m1", 2, 1, 1, 6, {}, {}, true, true},
      {Format::e2m3, "e2m3", 2, 3, 1, 7.5, {}, {}, true, true},
      {Format::e3m2, "e3m2", 3, 2, 3, 28, {}, {}, true, true},
      {Format::e4m3fn, "e4m3fn", 4, 3, 7, 448, {0x7F, 0xFF}, {}, true, true},
      {Format::e4m3fnuz, "e4m3fnuz", 4, 3, 8, 240, {0x80}, {}, true, false},
      {Format::e5m2,
       "e5m2",
       5,
       2,
       15,
       57344,
       {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF},
       {0x7C, 0xFC},
       true,
       true},
      {Format::e5m2fnuz, "e5m2fnuz", 5, 2, 16, 57344, {0x80}, {}, true, false},
  };
  return table;
}
inline const std::vector<Facts>& scale_facts() {
  static const std::vector<Facts> table = {
      {Format::e4m3, "e4m3", 4, 3, 7, 448, {0x7F}, {}, false, false},
      {Format::ue5m3, "ue5m3", 5, 3, 15, 114688, {0xFF}, {}, false, false},
  };
  return table;
}
inline const Facts& facts(Format f) {
  for (const auto* table : {&element_facts(), &scale_facts()})
    for (const Facts& row : *table)
      if (row.format == f) return row;
  std::abort();
}

// Value of a code, from the definition of a floating-point number.
inline double model_value(const Facts& f, int code) {
  for (int nan : f.nan_codes)
    if (code == nan) return std::numeric_limits<double>::quiet_NaN();
  const int magnitude_codes = 1 << (f.exponent_bits + f.mantissa_bits);
  const double sign = code >= magnitude_codes ? -1 : 1;
  for (int infinity : f.infinity_codes)
    if (code == infinity) return sign * std::numeric_limits<double>::infinity();
  const int exponent = code % magnitude_codes / (1 << f.mantissa_bits);
  const double fraction = std::ldexp(code % (1 << f.mantissa_bits), -f.mantissa_bits);
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - f.bias)
                               : std::ldexp(1 + fraction, exponent - f.bias));
}

// The finite magnitudes of a format in increasing order: the code is the index.
inline const std::vector<double>& model_magnitudes(Format f) {
  static const auto tables = [] {
    std::vector<std::vector<double>> all(kFormatCount);
    for (const auto* rows : {&element_facts(), &scale_facts()})
      for (const Facts& row : *rows)
        for (int code = 0; code < 1 << (row.exponent_bits + row.mantissa_bits); ++code)
          if (model_value(row, code) <= row.largest)
            all[static_cast<size_t>(row.format)].push_back(model_value(row, code));
    return all;
  }();
  return tables[static_cast<size_t>(f)];
}

// Code of the largest magnitude not above y, which is not above the largest.
inline int model_floor(Format f, double y) {
  const std::vector<double>& v = model_magnitudes(f);
  return static_cast<int>(std::upper_bound(v.begin(), v.end(), y) - v.begin()) - 1;
}
// Nearest, ties to the even code, saturating.
inline int model_nearest(Format f, double y) {
  const std::vector<double>& v = model_magnitudes(f);
  const int low = model_floor(f, y);
  if (low + 1 == static_cast<int>(v.size())) return low;
  const double below = y - v[low], above = v[low + 1] - y;
  if (below != above) return below < above ? low : low + 1;
  return low % 2 == 0 ? low : low + 1;
}
// The next magnitude at or above, saturating.
inline int model_up(Format f, double y) {
  const std::vector<double>& v = model_magnitudes(f);
  const int low = model_floor(f, y);
  return v[low] == y || low + 1 == static_cast<int>(v.size()) ? low : low + 1;
}
// Section 6: P(up) in 1/256 between the code `low` and the next, by positions instead of bits.
struct Chance {
  int low, of_256;
};
inline Chance model_stochastic(Format f, float y) {
  const std::vector<double>& v = model_magnitudes(f);
  const double normal = std::ldexp(1.0, 1 - facts(f).bias);
  double at = std::min<double>(y, v.back());
  // Below the smallest normal, the position is that of the FP32 sum y + n.
  if (at < normal) at = static_cast<double>(static_cast<float>(at + normal)) - normal;
  const int low = model_floor(f, at);
  if (v[low] == at) return {low, 0};
  return {low, static_cast<int>(std::floor((at - v[low]) / (v[low + 1] - v[low]) * 256 + 0.5))};
}

// Rounds a double to FP32 once; beyond the largest, to infinity.
inline float fl(double x) {
  if (std::fabs(x) >= 0x1.ffffffp127)
    return std::copysign(HUGE_VALF, static_cast<float>(x > 0 ? 1 : -1));
  return static_cast<float>(x);
}

}  // namespace blockscale::testing
