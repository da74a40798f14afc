// From an operand in square blocks, makes the operand along the other axis.
#include <algorithm>
#include <cstring>

#include "cpu/direction.h"
#include "parts.h"
#include "transposed.h"

namespace blockscale::cpu {
namespace {

// Lines of `to`, and codes of a line, processed together: 64 x 64 bytes of either operand.
constexpr int64_t kTile = 64;

uint8_t code_at(const uint8_t* line, int64_t i, int per_byte) {
  return per_byte == 1 ? line[i] : static_cast<uint8_t>(line[i / 2] >> (i % 2 * 4) & 15);
}

// Moves the codes of lines [first, last) of one matrix.
void move_codes(const uint8_t* from, uint8_t* to, const StoredShape& f, const StoredShape& t,
                int per_byte, int64_t first, int64_t last) {
  for (int64_t base = 0; base < t.padded; base += kTile)
    for (int64_t line = first; line < last; ++line)
      for (int64_t i = base; i < std::min(base + kTile, t.padded); i += per_byte) {
        const auto code = [&](int64_t at) {
          return at < f.lines ? code_at(from + at * f.line_bytes, line, per_byte) : uint8_t{0};
        };
        uint8_t byte = code(i);
        if (per_byte == 2) byte = static_cast<uint8_t>(byte | code(i + 1) << 4);
        to[line * t.line_bytes + i / per_byte] = byte;
      }
}

void move_scales(const ConstQuantized& from, const Quantized& to, const StoredShape& f,
                 const StoredShape& t, int64_t batch) {
  const int bytes = scale_bytes(to.spec.scale);
  for (int64_t row = 0; row < t.scale_rows; ++row)
    for (int64_t column = 0; column < t.scale_columns; ++column) {
      const int64_t source = transposed_scale(from.layout, f, t, to.spec.block, row, column);
      const int64_t target =
          layout_offset(to.layout.scales, t.scale_rows, t.scale_columns, row, column);
      std::memcpy(to.scales + bytes * (batch * t.scale_count + target),
                  from.scales + bytes * (batch * f.scale_count + source),
                  static_cast<size_t>(bytes));
    }
}

}  // namespace

void transpose(const ConstQuantized& from, const Quantized& to, const Executor& executor) {
  fill_padding(to);
  if (to.spec.outer)
    copy_bytes(to.outer, from.outer, to.batch * static_cast<int64_t>(sizeof(float)));
  const StoredShape f = from.shape(), t = to.shape();
  const int per_byte = codes_per_byte(to.spec.element);
  const int64_t tiles = ceil_div(t.lines, kTile);
  executor.parallel_for(to.batch * tiles, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t batch = i / tiles, first = i % tiles * kTile;
      move_codes(from.codes + batch * f.code_bytes, to.codes + batch * t.code_bytes, f, t, per_byte,
                 first, std::min(first + kTile, t.lines));
      if (first == 0) move_scales(from, to, f, t, batch);
    }
  });
}

}  // namespace blockscale::cpu
