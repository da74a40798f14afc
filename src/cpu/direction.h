// One direction of quantization: everything that a pass over tiles needs besides x, for one matrix,
// a batch of matrices or a group.
#pragma once

#include <vector>

#include "cpu/cpu.h"
#include "cpu/thresholds.h"
#include "parts.h"

namespace blockscale::cpu {

// `line` and `pos` are as in section 7 of the specification, for one matrix of the batch.
struct Direction {
  // Writes the outer scales. `amaxes`: those of the part's matrices; `streams`: whether stores of
  // the whole output bypass the caches.
  Direction(const Part<uint8_t, float>& part, const QuantizeOptions& options, const float* amaxes,
            bool streams);

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
  // Only where E2M1 is rounded to nearest.
  const ThresholdTable& tensor_thresholds(int64_t batch) const {
    return thresholds[outer.empty() ? 0 : static_cast<size_t>(batch)];
  }

  Quantized out;
  StoredShape shape;
  int plane;
  int64_t origin_line, origin_pos;
  Rng rng;
  bool stream;                             // stores of codes bypass the caches
  std::vector<OuterScale> outer;           // per matrix of the batch; empty when the spec has none
  std::vector<ThresholdTable> thresholds;  // one per outer scale, or one
};

// One per part of q. Computes amaxes that are not given, and fills bytes that no pass writes.
std::vector<Direction> directions(const ConstMatrix& x, const Quantized& q,
                                  const QuantizeOptions& options, const Executor& executor);
// Fills everything that the layouts hold outside the matrices themselves (or more) with padding.
void fill_padding(const Quantized& q);

// A part of x with its one or two directions: `along`, whose lines are the rows of x, and `down`,
// whose lines are its columns.
struct Job {
  ConstMatrix x;
  const Direction* along = nullptr;
  const Direction* down = nullptr;
};

}  // namespace blockscale::cpu
