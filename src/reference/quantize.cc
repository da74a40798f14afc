// The definition of quantization, one element at a time. Deliberately slow; read it alongside the
// specification.
#include <algorithm>
#include <cstring>
#include <vector>

#include "reference.h"

namespace blockscale::reference {
namespace {

// x along the contraction axis, after the transform: `lines` rows of `extent` values.
struct Operand {
  std::vector<float> value;
  int64_t lines, extent;
  float at(int64_t line, int64_t pos) const {
    return line < lines && pos < extent ? value[line * extent + pos] : 0.0f;
  }
};

Operand transformed(const ConstMatrix& x, int64_t b, const QuantSpec& spec, int axis) {
  const StoredShape s = stored_shape(spec, {}, axis, x.rows, x.columns);
  Operand out{std::vector<float>(s.lines * s.extent), s.lines, s.extent};
  const int64_t contraction = axis == -1 ? x.columns : x.rows;
  for (int64_t line = 0; line < s.lines; ++line) {
    float* values = out.value.data() + line * s.extent;
    for (int64_t pos = 0; pos < contraction; ++pos)
      values[pos] = axis == -1 ? load(x, b, line, pos) : load(x, b, pos, line);
    if (spec.hadamard.dim)
      for (int64_t pos = 0; pos < s.extent; pos += spec.hadamard.dim)
        hadamard_block(spec.hadamard, values + pos);
  }
  return out;
}

// NaN if any value is NaN, else the largest magnitude.
float amax_of(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i)
    largest = std::max(largest, bit_cast<uint32_t>(values[i]) & kAbsMask);
  return bit_cast<float>(largest > kInfBits ? kNanBits : largest);
}

// The multiplier for one block's elements, and its stored scale.
struct Block {
  bool finite;
  float inv;
  uint32_t scale_bits;  // a code, or FP32 bits
};

Block block_scale(const QuantSpec& spec, float amax, OuterScale outer, bool tensor_finite) {
  if (!is_finite(amax) || !tensor_finite)
    return {false, 0, spec.scale == Format::fp32 ? kNanBits : traits(spec.scale).nan_code()};
  if (spec.two_level()) {
    const BlockScale s = two_level_scale(spec.scale, spec.scale_rounding, amax, outer);
    return {true, s.enc, s.code};
  }
  if (spec.scale == Format::e8m0) {
    const uint8_t byte = e8m0_byte(spec.rule, spec.element, amax);
    return {true, e8m0_inv(byte), byte};
  }
  const float fmax = max_value(spec.element);
  const FloatScale s =
      spec.rule == ScaleRule::pow2 ? pow2_scale(amax, fmax) : amax_scale(amax, fmax);
  return {true, s.inv, bit_cast<uint32_t>(s.scale)};
}

uint32_t element_code(const QuantSpec& spec, float x, float inv, uint32_t random) {
  const FormatTraits t = traits(spec.element);
  const float fmax = max_value(spec.element);
  const float y = x * inv;
  if (!spec.stochastic()) return encode(spec.element, std::clamp(y, -fmax, fmax));
  return with_sign(t, encode_magnitude_stochastic(t, fmax, abs(y), random), y);
}

float amax_of(const Operand& x) {
  return amax_of(x.value.data(), static_cast<int64_t>(x.value.size()));
}

// Quantizes batch element b of x into batch element b of `out`. `origin_line` and `origin_pos` are
// where its random bits begin; `amax` is null if it must be computed.
void quantize_matrix(const ConstMatrix& x, int64_t b, const Quantized& out, const StoredShape& s,
                     const QuantizeOptions& options, const float* amax, int64_t origin_line,
                     int64_t origin_pos) {
  const QuantSpec& spec = out.spec;
  const int per_byte = codes_per_byte(spec.element);
  const Operand operand = transformed(x, b, spec, out.axis);
  OuterScale outer{1, 1};
  bool tensor_finite = true;
  if (spec.outer) {
    const float a = amax ? *amax : amax_of(operand);
    tensor_finite = is_finite(a);
    if (tensor_finite) outer = outer_scale(spec.scale, a);
    out.outer[b] = tensor_finite ? outer.dec : bit_cast<float>(kNanBits);
  }
  const int64_t tile_lines = spec.block_lines();

  for (int64_t line0 = 0; line0 < s.lines; line0 += tile_lines) {
    for (int64_t pos0 = 0; pos0 < s.extent; pos0 += spec.block) {
      std::vector<float> tile;
      for (int64_t line = line0; line < line0 + tile_lines; ++line)
        for (int64_t pos = pos0; pos < pos0 + spec.block; ++pos)
          tile.push_back(operand.at(line, pos));
      const Block block = block_scale(spec, amax_of(tile.data(), static_cast<int64_t>(tile.size())),
                                      outer, tensor_finite);

      for (int64_t line = line0; line < std::min(line0 + tile_lines, s.lines); ++line) {
        const int64_t scale_at = scale_offset(as_const(out), s, b, line, pos0);
        if (spec.scale == Format::fp32)
          std::memcpy(out.scales + 4 * scale_at, &block.scale_bits, 4);
        else
          out.scales[scale_at] = static_cast<uint8_t>(block.scale_bits);
        if (!block.finite) continue;
        for (int64_t pos = pos0; pos < std::min(pos0 + spec.block, s.extent); ++pos) {
          uint32_t random = 0;
          if (spec.stochastic()) {
            const int64_t p = origin_pos + pos;
            random = random_byte(random_block(*options.rng, out.axis == -1 ? 0 : 1,
                                              static_cast<uint32_t>(origin_line + line),
                                              static_cast<uint32_t>(p / kElementsPerPhilox)),
                                 static_cast<uint32_t>(p % kElementsPerPhilox));
          }
          const uint32_t code = element_code(spec, operand.at(line, pos), block.inv, random);
          const int64_t at =
              layout_offset(out.layout.codes, s.code_rows, s.code_columns, line, pos / per_byte);
          out.codes[b * s.code_bytes + at] |= static_cast<uint8_t>(code << (4 * (pos % per_byte)));
        }
      }
    }
  }
}

}  // namespace

void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, float* out, const Groups& groups) {
  for (const ConstMatrix& part : parts_of(x, groups))
    for (int64_t b = 0; b < part.batch; ++b) *out++ = amax_of(transformed(part, b, spec, axis));
}

void quantize(const ConstMatrix& x, const Quantized& out, const QuantizeOptions& options) {
  fill_with_padding(out);
  const bool rows = out.axis == -1;
  const float* amax = options.amax;
  for (const auto& [part, shape, at] : parts_of(out)) {
    const ConstMatrix x_part = rows_of(x, at.row, part.rows);
    for (int64_t b = 0; b < part.batch; ++b) {
      // Lines are numbered consecutively through the batch; positions start at the shard's origin.
      const int64_t line =
          (rows ? options.origin_row + at.row : options.origin_column) + b * shape.lines;
      const int64_t pos = rows ? options.origin_column : options.origin_row + at.position;
      quantize_matrix(x_part, b, part, shape, options, amax, line, pos);
      if (amax) ++amax;
    }
  }
}

}  // namespace blockscale::reference
