// QuantSpec: everything that decides the bits of a quantized operand (specification, section 9).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "blockscale/formats.h"
#include "blockscale/hadamard.h"
#include "blockscale/rounding.h"

namespace blockscale {

enum class Rounding : uint8_t { nearest, stochastic };

// A structural type: usable as `template <QuantSpec kSpec>`.
struct QuantSpec {
  Format element = Format::e4m3fn;
  Format scale = Format::fp32;
  uint16_t block = 128;  // elements along the contraction axis that share a scale
  bool square = false;   // block x block tiles instead of 1 x block
  ScaleRule rule = ScaleRule::amax;
  ScaleRounding scale_rounding = ScaleRounding::nearest;
  Rounding rounding = Rounding::nearest;
  bool outer = false;  // an FP32 scale for the whole tensor on top of the block scales
  Hadamard hadamard{};

  BLOCKSCALE_HD constexpr int block_lines() const { return square ? block : 1; }
  // The indivisible length along the contraction axis: whole blocks and whole transforms.
  BLOCKSCALE_HD constexpr int unit() const { return block > hadamard.dim ? block : hadamard.dim; }
  BLOCKSCALE_HD constexpr bool stochastic() const { return rounding == Rounding::stochastic; }
  BLOCKSCALE_HD constexpr bool two_level() const { return rule == ScaleRule::two_level; }
  constexpr bool operator==(const QuantSpec&) const = default;
};

inline constexpr QuantSpec kFp8_1x128{};
inline constexpr QuantSpec kFp8_128x128{.square = true};
inline constexpr QuantSpec kMxfp8{.scale = Format::e8m0, .block = 32, .rule = ScaleRule::rceil};
inline constexpr QuantSpec kMxfp6{
    .element = Format::e2m3, .scale = Format::e8m0, .block = 32, .rule = ScaleRule::rceil};
inline constexpr QuantSpec kMxfp4{
    .element = Format::e2m1, .scale = Format::e8m0, .block = 32, .rule = ScaleRule::even};
inline constexpr QuantSpec kNvfp4{.element = Format::e2m1,
                                  .scale = Format::e4m3,
                                  .block = 16,
                                  .rule = ScaleRule::two_level,
                                  .outer = true};
inline constexpr QuantSpec kAmdfp4{.element = Format::e2m1,
                                   .scale = Format::ue5m3,
                                   .block = 16,
                                   .rule = ScaleRule::two_level,
                                   .outer = true};

// A family is a named spec together with the changes it allows. To add a format family, add a row
// to the table in families() (spec.cc).
struct Family {
  const char* name;
  QuantSpec spec;
  std::vector<Format> elements;
  std::vector<ScaleRule> rules;
};
const std::vector<Family>& families();
// The family of a valid spec: the row with its element, its scale format and (for FP8, whose two
// block shapes have separate names) its block.
const Family& family_of(const QuantSpec& spec);

// Throws Error, with the reason and the remedy, for a meaningless combination.
void validate(const QuantSpec& spec);
// Throws Error, naming `operation`, if no GEMM can multiply operands a and b of these specs.
void validate_pair(const char* operation, const QuantSpec& a, const QuantSpec& b);

// The canonical text: the family's name, then the differences from the family's spec in a fixed
// order, e.g. "nvfp4[block=16x16]". parse_spec(to_string(s)) == s for every valid s.
//   element=e5m2  block=16x16  scale_rule=floor  rounding=nearest|stochastic
//   scale_rounding=nearest|up  outer=true|false  hadamard=none|16|32|64|128|16:0xd7e8
// Stochastic two-level specs always state their scale_rounding, and transforms their mask.
// A transform given without a mask has the specification's: 0xd7e8 for size 16, else 0.
std::string to_string(const QuantSpec& spec);
// Parses and validates a family's name, with or without changes in brackets. The error for an
// unknown name suggests the nearest one, if any is close. rounding=stochastic sets the
// scale_rounding of a two-level spec to `up` unless it is given.
QuantSpec parse_spec(std::string_view text);
// `spec` with `changes`, in the bracket syntax without the brackets.
QuantSpec with_changes(const QuantSpec& spec, std::string_view changes);

const char* to_string(ScaleRule rule);
const char* to_string(ScaleRounding rounding);
const char* to_string(Rounding rounding);
// The sign mask as written in the text of a spec: "0xd7e8".
std::string mask_text(const Hadamard& hadamard);

// For n >= 0: n rounded up to a multiple, and n / d rounded up.
BLOCKSCALE_HD constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}
BLOCKSCALE_HD constexpr int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

}  // namespace blockscale
