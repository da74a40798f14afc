#include "cpu/direction.h"

#include <cstring>

namespace blockscale::cpu {

Direction::Direction(const ConstMatrix& x, const Quantized& q, const QuantizeOptions& options,
                     const Executor& executor)
    : out(q), shape(q.shape()) {
  const bool rows = q.axis == -1;
  plane = rows ? 0 : 1;
  origin_line = rows ? options.origin_row : options.origin_column;
  origin_pos = rows ? options.origin_column : options.origin_row;
  rng = options.rng.value_or(Rng{});
  stream = q.batch * shape.code_bytes >= kStreamBytes;

  // Layouts with padding hold a fixed fill there; passes write what is inside.
  const auto batch = static_cast<size_t>(q.batch);
  if (q.layout.scales != Layout::linear)
    std::memset(q.scales, padding_fill(q.layout.scales, q.spec.scale),
                batch * static_cast<size_t>(shape.scale_count * scale_bytes(q.spec.scale)));
  if (q.layout.codes != Layout::linear)
    std::memset(q.codes, 0, batch * static_cast<size_t>(shape.code_bytes));

  if (!q.spec.outer) return;
  std::vector<float> computed(batch);
  if (!options.amax) cpu::amax(x, q.spec, q.axis, computed.data(), executor);
  const float* amaxes = options.amax ? options.amax : computed.data();
  const float nan = bit_cast<float>(kNanBits);
  for (size_t b = 0; b < batch; ++b) {
    outer.push_back(is_finite(amaxes[b]) ? outer_scale(q.spec.scale, amaxes[b])
                                         : OuterScale{nan, nan});
    q.outer[b] = outer[b].dec;
  }
}

}  // namespace blockscale::cpu
