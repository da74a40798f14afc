// Shared by the reference operators: element access, written for clarity.
#pragma once

#include <cstring>

#include "blockscale/ops.h"
#include "parts.h"

namespace blockscale::reference {

inline int64_t offset_of(int64_t b, int64_t r, int64_t c, const auto& x) {
  return b * x.batch_stride + r * x.row_stride + c * x.column_stride;
}

inline float load(const ConstMatrix& x, int64_t b, int64_t r, int64_t c) {
  return load_element(x, offset_of(b, r, c, x));
}
inline void store(const Matrix& x, int64_t b, int64_t r, int64_t c, float value) {
  store_element(x, offset_of(b, r, c, x), value != value ? bit_cast<float>(kNanBits) : value);
}

// One stored scale as the FP32 number it represents; `s` is its offset in the scales buffer.
inline float load_scale(const uint8_t* scales, Format format, int64_t s) {
  if (format != Format::fp32) return decode(format, scales[s]);
  float value;
  std::memcpy(&value, scales + 4 * s, 4);
  return value;
}

// One element's code; `line` and `pos` count along the stored operand.
inline uint32_t load_code(const ConstQuantized& q, const StoredShape& s, int64_t b, int64_t line,
                          int64_t pos) {
  const int per_byte = codes_per_byte(q.spec.element);
  const int64_t at =
      layout_offset(q.layout.codes, s.code_rows, s.code_columns, line, pos / per_byte);
  const uint8_t byte = q.codes[b * s.code_bytes + at];
  return per_byte == 1 ? byte : byte >> (4 * (pos % 2)) & 15;
}

// Fills all of an operand with padding, which codes and scales then overwrite.
inline void fill_with_padding(const Quantized& q) {
  const StoredShape s = q.shape();
  fill_bytes(q.codes, 0, q.batch * s.code_bytes);
  fill_bytes(q.scales, padding_fill(q.layout.scales, q.spec.scale),
             q.batch * s.scale_count * scale_bytes(q.spec.scale));
}

// The offset of the scale that covers (line, pos).
inline int64_t scale_offset(const ConstQuantized& q, const StoredShape& s, int64_t b, int64_t line,
                            int64_t pos) {
  return b * s.scale_count + layout_offset(q.layout.scales, s.scale_rows, s.scale_columns,
                                           line / s.scale_lines, pos / q.spec.block);
}

}  // namespace blockscale::reference
