// Sections 1, 4, 5, 6, 7 and 8 of the specification, written down a second time, for one small
// matrix: in double precision, with the models of the formats and rules, and nothing of the library
// but Philox.
#pragma once

#include <optional>
#include <vector>

#include "blockscale/philox.h"
#include "blockscale/spec.h"
#include "model_rules.h"

namespace blockscale::testing {

// Sylvester's construction by halves, H_2d = [H H; H -H]: the same sums in the same order as
// stages 1, 2, 4, ..., so that the roundings are those of the specification.
inline void transform_by_halves(float* x, int dim) {
  if (dim == 1) return;
  const int half = dim / 2;
  transform_by_halves(x, half);
  transform_by_halves(x + half, half);
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a + b;
    x[i + half] = a - b;
  }
}
// BF16 keeps the upper half of an FP32 number, rounded to nearest even.
inline float model_bf16(float x) {
  if (!std::isfinite(x) || x == 0) return x;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(x), -126) - 7);
  return fl(std::nearbyint(x / unit) * unit);
}
inline bool negates(const Hadamard& h, int i) {
  return ((i < 64 ? h.mask_lo : h.mask_hi) >> (i % 64)) % 2 != 0;
}
// One line, already zero-extended.
inline void model_transform(const Hadamard& h, std::vector<float>& line) {
  for (size_t block = 0; h.dim && block < line.size(); block += h.dim) {
    float* x = line.data() + block;
    for (int i = 0; i < h.dim; ++i) x[i] = negates(h, i) ? -x[i] : x[i];
    transform_by_halves(x, h.dim);
    for (int i = 0; i < h.dim; ++i)
      x[i] = model_bf16(
          fl(x[i] * static_cast<double>(fl(1 / std::sqrt(static_cast<double>(h.dim))))) + 0.0f);
  }
}

struct ModelOperand {
  std::vector<std::vector<int>> codes;        // [line][position], padded with 0 to whole blocks
  std::vector<std::vector<uint32_t>> scales;  // [line][block]: codes, or the bits of FP32 scales
  float outer = 1;
};

struct ModelOptions {
  std::optional<float> amax;
  Rng rng;
  int64_t origin_line = 0, origin_position = 0;
};

// The multiplier of a block and its stored scale; no multiplier for a non-finite block.
struct ModelScale {
  std::optional<double> multiplier;
  uint32_t stored;
};
inline ModelScale model_scale(const QuantSpec& spec, float amax, OuterScale outer, bool finite) {
  const Facts& f = facts(spec.element);
  if (spec.scale == Format::fp32) {
    if (!finite) return {{}, 0x7FC00000};
    const FloatScale s = spec.rule == ScaleRule::pow2 ? model_pow2(f, amax) : model_amax(f, amax);
    return {s.inv, bit_cast<uint32_t>(s.scale)};
  }
  if (spec.scale == Format::e8m0) {
    if (!finite) return {{}, 0xFF};
    const int byte = model_e8m0(spec.rule, f, amax);
    return {std::ldexp(1.0, 127 - byte), static_cast<uint32_t>(byte)};
  }
  if (!finite) return {{}, spec.scale == Format::ue5m3 ? 0xFFu : 0x7Fu};
  const BlockScale s = model_two_level(spec.scale, spec.scale_rounding, amax, outer);
  return {s.enc, s.code};
}

inline int model_code(const QuantSpec& spec, float x, double multiplier, int random) {
  const Facts& f = facts(spec.element);
  const float y = std::min(fl(std::fabs(x * multiplier)), static_cast<float>(f.largest));
  int code = 0;
  if (spec.rounding == Rounding::stochastic) {
    const Chance chance = model_stochastic(spec.element, y);
    code = chance.low + (chance.of_256 + random >= 256);
  } else {
    code = model_nearest(spec.element, y);
  }
  const bool negative = std::signbit(x) && (code != 0 || f.negative_zero);
  return code + (negative ? 1 << (f.exponent_bits + f.mantissa_bits) : 0);
}

inline int model_random(const ModelOptions& o, int axis, int64_t line, int64_t position) {
  const uint32_t plane = axis == -1 ? 0 : 0x80000000u;
  const auto low = [](uint64_t v) { return static_cast<uint32_t>(v); };
  const PhiloxBlock words =
      philox4x32<7>({{low(static_cast<uint64_t>(position / 16)), low(static_cast<uint64_t>(line)),
                      low(o.rng.offset), (low(o.rng.offset >> 32) & 0x7FFFFFFF) | plane}},
                    low(o.rng.seed), low(o.rng.seed >> 32));
  const int64_t i = position % 16;
  return static_cast<int>(words.word[i / 4] >> (8 * (i % 4))) & 255;
}

// `lines`: x along the contraction axis, one vector a line.
inline ModelOperand model_quantize(std::vector<std::vector<float>> lines, int64_t contraction,
                                   const QuantSpec& spec, int axis, const ModelOptions& options) {
  const int64_t block = spec.block, step = spec.hadamard.dim ? spec.hadamard.dim : 1;
  const int64_t extent = (contraction + step - 1) / step * step;
  const int64_t blocks = (extent + block - 1) / block, count = static_cast<int64_t>(lines.size());
  double largest = 0;
  bool all_finite = true;
  for (std::vector<float>& line : lines) {
    line.resize(static_cast<size_t>(extent), 0.0f);
    model_transform(spec.hadamard, line);
    for (float v : line) {
      all_finite = all_finite && std::isfinite(v);
      largest = std::max<double>(largest, std::fabs(v));
    }
    line.resize(static_cast<size_t>(blocks * block), 0.0f);
  }

  ModelOperand out;
  OuterScale outer{1, 1};
  bool tensor_finite = true;
  if (spec.outer) {
    tensor_finite = options.amax ? std::isfinite(*options.amax) : all_finite;
    outer = model_outer(spec.scale, options.amax.value_or(static_cast<float>(largest)));
    out.outer = tensor_finite ? outer.dec : std::nanf("");
  }
  out.codes.assign(lines.size(), std::vector<int>(static_cast<size_t>(blocks * block), 0));
  out.scales.assign(lines.size(), std::vector<uint32_t>(static_cast<size_t>(blocks), 0));
  for (int64_t line = 0; line < count; ++line) {
    const int64_t first = spec.square ? line / block * block : line;
    const int64_t last = spec.square ? std::min(count, first + block) : line + 1;
    for (int64_t b = 0; b < blocks; ++b) {
      float amax = 0;
      bool finite = tensor_finite;
      for (int64_t l = first; l < last; ++l)
        for (int64_t i = b * block; i < (b + 1) * block; ++i) {
          finite = finite && std::isfinite(lines[l][i]);
          amax = std::max(amax, std::fabs(lines[l][i]));
        }
      const ModelScale scale = model_scale(spec, amax, outer, finite);
      out.scales[line][b] = scale.stored;
      for (int64_t i = b * block; scale.multiplier && i < std::min((b + 1) * block, extent); ++i)
        out.codes[line][i] = model_code(
            spec, lines[line][i], *scale.multiplier,
            model_random(options, axis, options.origin_line + line, options.origin_position + i));
    }
  }
  return out;
}

}  // namespace blockscale::testing
