#include "cpu/direction.h"

namespace blockscale::cpu {
namespace {

// Clears the rows of a matrix in `linear` after the last one used.
void clear_rows(uint8_t* data, int64_t used, int64_t rows, int64_t row_bytes) {
  fill_bytes(data + used * row_bytes, 0, (rows - used) * row_bytes);
}

}  // namespace

void fill_padding(const Quantized& q) {
  const StoredShape whole = q.shape();
  const int bytes = scale_bytes(q.spec.scale);
  const bool linear_codes = q.layout.codes == Layout::linear,
             linear_scales = q.layout.scales == Layout::linear;
  // Along the contraction axis, groups leave gaps in every line.
  const bool gaps = q.groups && q.axis == -2;
  if (!linear_codes || gaps) fill_bytes(q.codes, 0, q.batch * whole.code_bytes);
  if (!linear_scales || gaps)
    fill_bytes(q.scales, padding_fill(q.layout.scales, q.spec.scale),
               q.batch * whole.scale_count * bytes);
  if (!q.groups || gaps) return;
  GroupStart end;
  for (int64_t g = 0; g < q.groups.count; ++g)
    end = next_group(end, q.spec, q.layout, q.axis, q.groups.end(g) - end.row);
  if (linear_codes) clear_rows(q.codes, end.codes, whole.code_rows, whole.code_columns);
  if (linear_scales)
    clear_rows(q.scales, end.scales, whole.scale_rows, whole.scale_columns * bytes);
}

Direction::Direction(const Part<uint8_t, float>& part, const QuantizeOptions& options,
                     const float* amaxes, bool streams)
    : out(part.q), shape(part.shape), rng(options.rng.value_or(Rng{})), stream(streams) {
  const bool rows = out.axis == -1;
  plane = rows ? 0 : 1;
  origin_line = rows ? options.origin_row + part.at.row : options.origin_column;
  origin_pos = rows ? options.origin_column : options.origin_row + part.at.position;
  const bool counts = out.spec.element == Format::e2m1 && !out.spec.stochastic();
  if (!out.spec.outer) {
    if (counts) thresholds.emplace_back(1.0f);
    return;
  }
  const float nan = bit_cast<float>(kNanBits);
  for (int64_t b = 0; b < out.batch; ++b) {
    outer.push_back(is_finite(amaxes[b]) ? outer_scale(out.spec.scale, amaxes[b])
                                         : OuterScale{nan, nan});
    out.outer[b] = outer.back().dec;
    if (counts) thresholds.emplace_back(outer.back().dec);
  }
}

std::vector<Direction> directions(const ConstMatrix& x, const Quantized& q,
                                  const QuantizeOptions& options, const Executor& executor) {
  fill_padding(q);
  std::vector<float> computed;
  const float* amaxes = options.amax;
  if (q.spec.outer && !amaxes) {
    computed.resize(static_cast<size_t>(q.matrices()));
    cpu::amax(x, q.spec, q.axis, q.groups, computed.data(), executor);
    amaxes = computed.data();
  }
  std::vector<Direction> all;
  const bool streams = q.batch * q.shape().code_bytes >= kStreamBytes;
  for (const auto& part : parts_of(q)) {
    all.emplace_back(part, options, amaxes, streams);
    if (amaxes) amaxes += part.q.batch;
  }
  return all;
}

}  // namespace blockscale::cpu
