// Relayout moves bytes; there is nothing to vectorize.
#include <algorithm>
#include <cstring>

#include "cpu/direction.h"

namespace blockscale::cpu {
namespace {

// Bytes of a line that every codes layout keeps together.
constexpr int64_t kRun = 16;

using Source = Part<const uint8_t, const float>;
using Target = Part<uint8_t, float>;

void move_codes(const Source& from, const Target& to, int64_t batch, int64_t line) {
  const StoredShape &f = from.shape, &t = to.shape;
  for (int64_t i = 0; i < t.line_bytes; i += kRun)
    std::memcpy(to.q.codes + batch * t.code_bytes +
                    layout_offset(to.q.layout.codes, t.code_rows, t.code_columns, line, i),
                from.q.codes + batch * f.code_bytes +
                    layout_offset(from.q.layout.codes, f.code_rows, f.code_columns, line, i),
                static_cast<size_t>(std::min(kRun, t.line_bytes - i)));
}

void move_scales(const Source& from, const Target& to, int64_t batch, int64_t line) {
  const StoredShape &f = from.shape, &t = to.shape;
  if (line % t.scale_lines != 0) return;  // once per grid row
  const int bytes = scale_bytes(to.q.spec.scale);
  for (int64_t s = 0; s < t.blocks; ++s) {
    const int64_t source =
        layout_offset(from.q.layout.scales, f.scale_rows, f.scale_columns, line / f.scale_lines, s);
    const int64_t target =
        layout_offset(to.q.layout.scales, t.scale_rows, t.scale_columns, line / t.scale_lines, s);
    std::memcpy(to.q.scales + bytes * (batch * t.scale_count + target),
                from.q.scales + bytes * (batch * f.scale_count + source),
                static_cast<size_t>(bytes));
  }
}

}  // namespace

void relayout(const ConstQuantized& from, const Quantized& to, const Executor& executor) {
  fill_padding(to);
  if (to.spec.outer)
    copy_bytes(to.outer, from.outer, to.matrices() * static_cast<int64_t>(sizeof(float)));
  const auto sources = parts_of(from);
  const auto targets = parts_of(to);
  Pieces pieces;
  for (const Target& part : targets)
    pieces.add(part.shape.padded == 0 ? 0 : part.q.batch * part.shape.lines);
  executor.parallel_for(pieces.total(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t within = i;
      const size_t part = pieces.part(within);
      const int64_t lines = targets[part].shape.lines;
      move_codes(sources[part], targets[part], within / lines, within % lines);
      move_scales(sources[part], targets[part], within / lines, within % lines);
    }
  });
}

}  // namespace blockscale::cpu
