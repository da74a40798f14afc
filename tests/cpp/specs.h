// Every valid spec, generated from the table of numerics section 9 and the refusals of section 6.
#pragma once

#include <vector>

#include "blockscale/spec.h"

namespace blockscale::testing {

struct FamilyRow {
  const char* name;
  std::vector<Format> elements;
  Format scale;
  uint16_t block;
  bool squares_too;  // BxB is a change within the family (FP8's is a family of its own)
  bool square;
  std::vector<ScaleRule> rules;  // the default first
};

inline const std::vector<FamilyRow>& family_rows() {
  using enum ScaleRule;
  static const std::vector<Format> fp8 = {Format::e4m3fn, Format::e4m3fnuz, Format::e5m2,
                                          Format::e5m2fnuz};
  static const std::vector<FamilyRow> rows = {
      {"fp8_1x128", fp8, Format::fp32, 128, false, false, {amax, pow2}},
      {"fp8_128x128", fp8, Format::fp32, 128, false, true, {amax, pow2}},
      {"mxfp8", fp8, Format::e8m0, 32, true, false, {rceil, floor, ceil, even}},
      {"mxfp6",
       {Format::e2m3, Format::e3m2},
       Format::e8m0,
       32,
       true,
       false,
       {rceil, floor, ceil, even}},
      {"mxfp4", {Format::e2m1}, Format::e8m0, 32, true, false, {even, floor, ceil, rceil}},
      {"nvfp4", {Format::e2m1}, Format::e4m3, 16, true, false, {two_level}},
      {"amdfp4", {Format::e2m1}, Format::ue5m3, 16, true, false, {two_level}},
  };
  return rows;
}

inline const std::vector<Hadamard>& some_hadamards() {
  static const std::vector<Hadamard> list = {{},
                                             {16, 0, 0},
                                             {16, 0xD7E8, 0},
                                             {32, 0x80000001, 0},
                                             {64, 0, 0},
                                             {64, ~uint64_t{0}, 0},
                                             {128, 0, 0},
                                             {128, 0x123456789, 0},
                                             {128, 1, uint64_t{1} << 63}};
  return list;
}

// A spec as somebody could write it down, sensible or not.
inline std::vector<QuantSpec> combinations(const FamilyRow& row) {
  std::vector<QuantSpec> all;
  for (Format element : row.elements)
    for (bool square : {false, true})
      for (ScaleRule rule : row.rules)
        for (ScaleRounding up : {ScaleRounding::nearest, ScaleRounding::up})
          for (Rounding rounding : {Rounding::nearest, Rounding::stochastic})
            for (bool outer : {false, true})
              for (const Hadamard& h : some_hadamards())
                if (square == row.square || row.squares_too)
                  all.push_back(
                      {element, row.scale, row.block, square, rule, up, rounding, outer, h});
  return all;
}
inline bool means_something(const QuantSpec& s) {
  const bool two_level = s.rule == ScaleRule::two_level;
  const bool saturating = s.rule == ScaleRule::floor || s.rule == ScaleRule::even;
  if (!two_level && (s.outer || s.scale_rounding == ScaleRounding::up)) return false;
  return !(s.rounding == Rounding::stochastic && saturating);
}

inline const std::vector<QuantSpec>& valid_specs() {
  static const std::vector<QuantSpec> all = [] {
    std::vector<QuantSpec> list;
    for (const FamilyRow& row : family_rows())
      for (const QuantSpec& spec : combinations(row))
        if (means_something(spec)) list.push_back(spec);
    return list;
  }();
  return all;
}

}  // namespace blockscale::testing
