// The operators that read a quantized operand: dequantize, relayout, gemm.
#include <cstring>

#include "reference.h"

namespace blockscale::reference {

void dequantize(const ConstQuantized& q, const Matrix& x) {
  for (const auto& [part, s, at] : parts_of(q)) {
    for (int64_t b = 0; b < part.batch; ++b) {
      const float outer = q.spec.outer ? part.outer[b] : 1.0f;
      for (int64_t r = 0; r < part.rows; ++r) {
        for (int64_t c = 0; c < x.columns; ++c) {
          const int64_t line = q.axis == -1 ? r : c, pos = q.axis == -1 ? c : r;
          const float scale =
              load_scale(part.scales, q.spec.scale, scale_offset(part, s, b, line, pos));
          const float value = decode(q.spec.element, load_code(part, s, b, line, pos));
          store(x, b, at.row + r, c, (outer * scale) * value);
        }
      }
    }
  }
  clear_rows(x, rows_in(q.groups, x.rows));
}

void relayout(const ConstQuantized& from, const Quantized& to) {
  const int bytes = scale_bytes(to.spec.scale);
  fill_with_padding(to);
  if (to.spec.outer) std::memcpy(to.outer, from.outer, to.matrices() * sizeof(float));
  const auto sources = parts_of(from);
  const auto targets = parts_of(to);
  for (size_t g = 0; g < targets.size(); ++g) {
    const auto& [source, f, source_at] = sources[g];
    const auto& [target, t, target_at] = targets[g];
    for (int64_t b = 0; b < target.batch; ++b) {
      for (int64_t line = 0; line < t.lines; ++line) {
        for (int64_t i = 0; i < t.line_bytes; ++i)
          target.codes[b * t.code_bytes +
                       layout_offset(to.layout.codes, t.code_rows, t.code_columns, line, i)] =
              source.codes[b * f.code_bytes +
                           layout_offset(from.layout.codes, f.code_rows, f.code_columns, line, i)];
        for (int64_t block = 0; block < t.blocks; ++block) {
          const int64_t pos = block * to.spec.block;
          std::memcpy(target.scales + bytes * scale_offset(as_const(target), t, b, line, pos),
                      source.scales + bytes * scale_offset(source, f, b, line, pos), bytes);
        }
      }
    }
  }
}

namespace {

// Sums in double, giving the value that every backend's FP32 sum is compared with.
void multiply(const Product& p, const GemmOptions& options) {
  if (p.empty() && options.accumulate && !p.bias) return;  // even -0 stays as it is
  const auto& [a, sa, a_at] = p.a;
  const auto& [b, sb, b_at] = p.b;
  const double outer = static_cast<double>(a.spec.outer ? a.outer[0] : 1.0f) *
                       static_cast<double>(b.spec.outer ? b.outer[0] : 1.0f);
  for (int64_t m = 0; m < p.d.rows; ++m) {
    for (int64_t n = 0; n < p.d.columns; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < sa.extent; ++k) {
        const double scale =
            static_cast<double>(load_scale(a.scales, a.spec.scale, scale_offset(a, sa, 0, m, k))) *
            load_scale(b.scales, b.spec.scale, scale_offset(b, sb, 0, n, k));
        sum += scale * decode(a.spec.element, load_code(a, sa, 0, m, k)) *
               decode(b.spec.element, load_code(b, sb, 0, n, k));
      }
      double value = p.empty() ? 0.0 : options.alpha * (outer * sum);
      if (p.bias) value += p.bias[n];
      const int64_t at = offset_of(0, m, n, p.d);
      if (options.accumulate) value += static_cast<const float*>(p.d.data)[at];
      store(p.d, 0, m, n, static_cast<float>(value));
    }
  }
}

}  // namespace

void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options) {
  for (const Product& p : products_of(a, b, d, static_cast<const float*>(options.bias)))
    multiply(p, options);
  if (!b.groups && !options.accumulate) clear_rows(d, rows_in(a.groups, d.rows));
}

}  // namespace blockscale::reference
