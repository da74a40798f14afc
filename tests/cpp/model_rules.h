// The scale rules (specification, section 4) transcribed to double precision: products of two
// floats are exact in double, and a double quotient or sum rounded to float is the correctly
// rounded one.
#pragma once

#include <algorithm>
#include <cfloat>

#include "blockscale/rounding.h"
#include "model.h"

namespace blockscale::testing {

// Exponents by logarithm of the value instead of the fields of its bits.
inline int model_e8m0(ScaleRule rule, const Facts& f, float a) {
  if (a == 0) return 0;
  const int p = std::ilogb(f.largest);
  double e = 0;
  if (rule == ScaleRule::rceil) {
    const double d = fl(static_cast<double>(a) * static_cast<double>(fl(1 / f.largest)));
    if (d == 0) return 0;
    e = std::ilogb(d) + (std::ldexp(1.0, std::ilogb(d)) < d);
  } else if (rule == ScaleRule::even) {
    const int exponent = std::ilogb(a);
    e = std::ilogb(a + std::ldexp(1.0, exponent - f.mantissa_bits - 1)) - p;
  } else {
    const int exponent = std::ilogb(a);
    e = exponent - p;
    if (rule == ScaleRule::ceil && std::ldexp(1.0, exponent) < a) ++e;
  }
  return static_cast<int>(std::clamp(e + 127, 0.0, 254.0));
}

inline FloatScale model_amax(const Facts& f, float a) {
  const double floored = std::max(a, 1e-12f);
  const float inv = fl(f.largest / floored);
  return {fl(1.0 / inv), inv};
}
inline FloatScale model_pow2(const Facts& f, float a) {
  const double floored = std::max(a, 1e-12f);
  int e = -140;
  while (std::ldexp(f.largest, e) < floored) ++e;
  return {fl(std::ldexp(1.0, e)), fl(std::ldexp(1.0, -e))};
}

inline OuterScale model_outer(Format scale, float tensor_amax) {
  if (tensor_amax == 0) return {1, 1};
  const float quotient = fl(6 * facts(scale).largest / static_cast<double>(tensor_amax));
  float enc = std::min(quotient, FLT_MAX);
  if (enc == 0) enc = 1;
  return {enc, fl(1.0 / enc)};
}
inline BlockScale model_two_level(Format scale, ScaleRounding rounding, float a, OuterScale outer) {
  const float sixth = fl(1.0 / 6.0);
  const float factor = fl(static_cast<double>(outer.enc) * sixth);
  const double wanted = std::min<double>(fl(static_cast<double>(a) * factor), facts(scale).largest);
  const int code =
      rounding == ScaleRounding::up ? model_up(scale, wanted) : model_nearest(scale, wanted);
  const double decoded = fl(model_magnitudes(scale)[code] * static_cast<double>(outer.dec));
  const float enc = decoded == 0 ? FLT_MAX : std::min(fl(1.0 / decoded), FLT_MAX);
  return {static_cast<uint8_t>(code), enc};
}

}  // namespace blockscale::testing
