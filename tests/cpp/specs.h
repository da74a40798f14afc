// Every valid spec, generated from the table of section 9 of the specification and the refusals of
// section 6.
#pragma once

#include <vector>

#include "blockscale/spec.h"
#include "testing.h"

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

// ---- what the GPU backend has kernels of their own for: what recipes ask for ----

// Whether codes of a byte have no encoder of their own, but one that they share.
inline bool shares_encoder(const QuantSpec& s) {
  const bool own = s.element == Format::e4m3fn || s.element == Format::e5m2;
  return s.element != Format::e2m1 && (!own || s.stochastic());
}
// Whether two specs differ in nothing that a kernel is compiled for.
inline bool same_kernel(const QuantSpec& a, const QuantSpec& b) {
  if (shares_encoder(a) && shares_encoder(b)) return a.scale == b.scale && a.square == b.square;
  return a.element == b.element && a.scale == b.scale && a.square == b.square &&
         a.stochastic() == b.stochastic() && (a.hadamard.dim != 0) == (b.hadamard.dim != 0);
}
inline bool is_compiled(const QuantSpec& s) {
#if BLOCKSCALE_SAMPLE > 0  // kernels_*.cu
  const Format kept = s.element != Format::e2m1 ? shares_encoder(s) ? Format::e8m0 : Format::fp32
                      : s.scale == Format::e8m0 ? Format::e8m0
                                                : Format::e4m3;
  if (s.scale != kept || (s.element == Format::e5m2 && !shares_encoder(s))) return false;
#endif
  if (s.element == Format::e2m1)
    return s.hadamard.dim == 0 || (s.hadamard.dim == 16 && !s.square) ? !s.square || !s.stochastic()
                                                                      : false;
  return s.hadamard.dim == 0;
}
// Specs of one kernel each, whatever their rules.
inline const std::vector<std::vector<QuantSpec>>& compiled_specs() {
  static const std::vector<std::vector<QuantSpec>> all = [] {
    std::vector<std::vector<QuantSpec>> list;
    for (const QuantSpec& spec : valid_specs()) {
      if (!is_compiled(spec)) continue;
      auto same = list.begin();
      while (same != list.end() && !same_kernel(same->front(), spec)) ++same;
      if (same == list.end()) same = list.insert(same, std::vector<QuantSpec>{});
      same->push_back(spec);
    }
    return list;
  }();
  return all;
}
// Whether there is one for rows and columns at once.
inline bool is_compiled_pair(const QuantSpec& row, const QuantSpec& column) {
  if (row.scale != column.scale) return false;
  if (row.square != column.square) {
    const auto is_e4m3fn = [](const QuantSpec& s) {
      return s.element == Format::e4m3fn && s.scale == Format::fp32 && !s.stochastic();
    };
    return column.square && is_e4m3fn(row) && is_e4m3fn(column);
  }
  if (shares_encoder(row) || shares_encoder(column))
    return shares_encoder(row) && shares_encoder(column);
  if (row.element != column.element) return false;
  if (row.element != Format::e2m1 || row.square) return true;
  const bool h_row = row.hadamard.dim != 0, h_column = column.hadamard.dim != 0;
  if (column.stochastic()) return row.stochastic() && !h_row && h_column;
  return !h_row && (h_column || !row.stochastic());
}
// A spec for the columns beside these rows, of `columns`. Squares of a whole tile have one kernel
// for both directions, of one spec.
inline QuantSpec beside(Random& random, const QuantSpec& row,
                        const std::vector<QuantSpec>& columns) {
  const bool twins = row.square && row.block == 128 && same_kernel(row, columns.front());
  return twins ? row : random.pick(columns);
}
// Whether there is one for FP32 and FP16.
inline bool is_compiled_of_floats(const QuantSpec* row, const QuantSpec* column) {
  const QuantSpec& one = row ? *row : *column;
  if (one.element == Format::e5m2 && !shares_encoder(one)) return false;
  return (row && column) ||
         (one.hadamard.dim == 0 && !(one.element == Format::e2m1 && one.stochastic()));
}

}  // namespace blockscale::testing
