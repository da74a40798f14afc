// Relayout moves bytes; there is nothing to vectorize.
#include <algorithm>
#include <cstring>

#include "cpu/cpu.h"

namespace blockscale::cpu {
namespace {

// Bytes of a line that every layout of codes keeps together.
constexpr int64_t kRun = 16;

void move_codes(const ConstQuantized& from, const Quantized& to, const StoredShape& s,
                int64_t batch, int64_t line) {
  const StoredShape f = from.shape(), t = to.shape();
  for (int64_t i = 0; i < s.line_bytes; i += kRun)
    std::memcpy(to.codes + batch * t.code_bytes +
                    layout_offset(to.layout.codes, s.lines, s.line_bytes, line, i),
                from.codes + batch * f.code_bytes +
                    layout_offset(from.layout.codes, s.lines, s.line_bytes, line, i),
                static_cast<size_t>(std::min(kRun, s.line_bytes - i)));
}

}  // namespace

void relayout(const ConstQuantized& from, const Quantized& to, const Executor& executor) {
  const StoredShape f = from.shape(), t = to.shape();
  const int bytes = scale_bytes(to.spec.scale);
  // The row of a scale matrix that holds a line: a grid of square blocks has one for many.
  const auto scale_row = [&](const StoredShape& s, int64_t line) {
    return s.scale_rows == s.lines ? line : line / to.spec.block;
  };
  std::memset(to.scales, padding_fill(to.layout.scales, to.spec.scale),
              static_cast<size_t>(to.batch * t.scale_count * bytes));
  std::memset(to.codes, 0, static_cast<size_t>(to.batch * t.code_bytes));
  if (to.spec.outer && to.batch)
    std::memcpy(to.outer, from.outer, static_cast<size_t>(to.batch) * sizeof(float));
  executor.parallel_for(from.batch * t.lines, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / t.lines, line = i % t.lines;
      move_codes(from, to, t, b, line);
      const int64_t row = scale_row(t, line);
      if (t.scale_rows != t.lines && line % to.spec.block != 0) continue;  // once a grid row
      for (int64_t s = 0; s < t.blocks; ++s) {
        const int64_t source =
            layout_offset(from.layout.scales, f.scale_rows, f.blocks, scale_row(f, line), s);
        const int64_t target = layout_offset(to.layout.scales, t.scale_rows, t.blocks, row, s);
        std::memcpy(to.scales + bytes * (b * t.scale_count + target),
                    from.scales + bytes * (b * f.scale_count + source), static_cast<size_t>(bytes));
      }
    }
  });
}

}  // namespace blockscale::cpu
