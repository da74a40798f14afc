// E2M1 to nearest without a product per element: the product of a magnitude and its block's inverse
// scale grows with the magnitude, so its code is the number of thresholds that it has passed.
#pragma once

#include <cstdint>

#include "blockscale/rounding.h"

namespace blockscale::cpu {

// The least BF16 values whose products are above .25 and 1.25, or at least .75 and 1.75 (ties go to
// even codes), for the scales 1, 1.125 .. 1.875 times `dec`, stored as bits less the bits of 1. A
// power of two in the scale moves them by as many binades, and no scale format has other fractions.
struct ThresholdTable {
  static constexpr int kScales = 8;
  // The range of `dec` in which every threshold is normal and none infinite, whatever the scale.
  static constexpr float kLeastDec = 0x1p-60f, kMostDec = 0x1p60f;

  explicit ThresholdTable(float dec) : holds(dec >= kLeastDec && dec <= kMostDec) {
    if (!holds) return;
    for (int i = 0; i < kScales; ++i) {
      const float scale = (1 + static_cast<float>(i) / kScales) * dec;
      above_quarter[i] = least(scale, .25f, false);
      from_three_quarters[i] = least(scale, .75f, true);
      above_5_quarters[i] = least(scale, 1.25f, false);
      from_7_quarters[i] = least(scale, 1.75f, true);
    }
  }

  bool holds;
  alignas(16) uint16_t above_quarter[kScales]{};
  alignas(16) uint16_t from_three_quarters[kScales]{};
  alignas(16) uint16_t above_5_quarters[kScales]{};
  alignas(16) uint16_t from_7_quarters[kScales]{};

 private:
  static uint16_t least(float scale, float t, bool equal) {
    const float inv = 1.0f / scale;
    uint32_t bits = (bit_cast<uint32_t>(t * scale) >> 16) - 1;  // too small, whatever the rounding
    const auto passes = [&] {
      const float y = bit_cast<float>(bits << 16) * inv;
      return equal ? y >= t : y > t;
    };
    while (!passes()) ++bits;
    return static_cast<uint16_t>(bits - 0x3F80);
  }
};

}  // namespace blockscale::cpu
