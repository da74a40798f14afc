// The operators that read a quantized operand: dequantize, relayout, gemm.
#include <cstring>
#include <vector>

#include "reference.h"

namespace blockscale::reference {

void dequantize(const ConstQuantized& q, const Matrix& x) {
  const StoredShape s = q.shape();
  for (int64_t b = 0; b < q.batch; ++b) {
    const float outer = q.spec.outer ? q.outer[b] : 1.0f;
    for (int64_t r = 0; r < x.rows; ++r) {
      for (int64_t c = 0; c < x.columns; ++c) {
        const int64_t line = q.axis == -1 ? r : c, pos = q.axis == -1 ? c : r;
        const float scale = load_scale(q.scales, q.spec.scale, scale_offset(q, s, b, line, pos));
        const float value = decode(q.spec.element, load_code(q, s, b, line, pos));
        store(x, b, r, c, (outer * scale) * value);
      }
    }
  }
}

void relayout(const ConstQuantized& from, const Quantized& to) {
  const StoredShape f = from.shape(), t = to.shape();
  const int bytes = scale_bytes(to.spec.scale);
  std::memset(to.codes, 0, to.batch * t.code_bytes);
  std::memset(to.scales, padding_fill(to.layout.scales, to.spec.scale),
              to.batch * t.scale_count * bytes);
  for (int64_t b = 0; b < from.batch; ++b) {
    if (to.spec.outer) to.outer[b] = from.outer[b];
    for (int64_t line = 0; line < t.lines; ++line) {
      for (int64_t i = 0; i < t.line_bytes; ++i)
        to.codes[b * t.code_bytes +
                 layout_offset(to.layout.codes, t.lines, t.line_bytes, line, i)] =
            from.codes[b * f.code_bytes +
                       layout_offset(from.layout.codes, f.lines, f.line_bytes, line, i)];
      for (int64_t block = 0; block < t.blocks; ++block) {
        const int64_t pos = block * to.spec.block;
        std::memcpy(to.scales + bytes * scale_offset(as_const(to), t, b, line, pos),
                    from.scales + bytes * scale_offset(from, f, b, line, pos), bytes);
      }
    }
  }
}

// Sums in double: the value every backend's FP32 sum is compared with.
void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options) {
  const StoredShape sa = a.shape(), sb = b.shape();
  const double outer = static_cast<double>(a.spec.outer ? a.outer[0] : 1.0f) *
                       static_cast<double>(b.spec.outer ? b.outer[0] : 1.0f);
  for (int64_t m = 0; m < d.rows; ++m) {
    for (int64_t n = 0; n < d.columns; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < sa.extent; ++k) {
        const double scale =
            static_cast<double>(load_scale(a.scales, a.spec.scale, scale_offset(a, sa, 0, m, k))) *
            load_scale(b.scales, b.spec.scale, scale_offset(b, sb, 0, n, k));
        sum += scale * decode(a.spec.element, load_code(a, sa, 0, m, k)) *
               decode(b.spec.element, load_code(b, sb, 0, n, k));
      }
      double value = options.alpha * (outer * sum);
      if (options.bias) value += options.bias[n];
      const int64_t at = offset_of(0, m, n, d);
      if (options.accumulate) value += static_cast<const float*>(d.data)[at];
      store(d, 0, m, n, static_cast<float>(value));
    }
  }
}

}  // namespace blockscale::reference
