// One direction of quantization: everything a pass over tiles needs to know besides x.
#pragma once

#include <vector>

#include "cpu/cpu.h"

namespace blockscale::cpu {

// `line` and `pos` are those of numerics section 7, for one matrix of the batch.
struct Direction {
  // Computes the amaxes that are not given and writes the outer scales.
  Direction(const ConstMatrix& x, const Quantized& q, const QuantizeOptions& options,
            const Executor& executor);

  uint32_t global_line(int64_t batch, int64_t line) const {
    return static_cast<uint32_t>(origin_line + batch * shape.lines + line);
  }
  uint32_t global_block(int64_t pos) const {
    return static_cast<uint32_t>((origin_pos + pos) / kElementsPerPhilox);
  }
  bool tensor_finite(int64_t batch) const {
    return outer.empty() || is_finite(outer[static_cast<size_t>(batch)].dec);
  }
  OuterScale tensor_scale(int64_t batch) const {
    return outer.empty() ? OuterScale{1, 1} : outer[static_cast<size_t>(batch)];
  }

  Quantized out;
  StoredShape shape;
  int plane;
  int64_t origin_line, origin_pos;
  Rng rng;
  bool stream;                    // codes are stored past the caches
  std::vector<OuterScale> outer;  // per matrix of the batch; empty when the spec has none
};

}  // namespace blockscale::cpu
