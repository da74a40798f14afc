// Fetching what comes next while something is worked on.
#pragma once

#include <cstdint>

#include "hwy/cache_control.h"

namespace blockscale::cpu {

// Fetches a rectangle, a few cache lines at a time. Its rows are too far apart for the hardware to
// foresee.
class Ahead {
 public:
  Ahead() = default;
  // Distances and the width are in bytes. `passes`: how often fetch() is told of as many bytes as
  // there are.
  Ahead(const void* data, int64_t stride, int64_t width, int64_t rows, int passes = 1)
      : row_(static_cast<const uint8_t*>(data)),
        stride_(stride),
        width_(width),
        rows_(rows),
        line_(64 * passes) {}
  void fetch(int64_t bytes) {
    for (; bytes > 0 && rows_ > 0; bytes -= line_) {
      hwy::Prefetch(row_ + at_ + 63);  // unaligned, the line before has just been read
      at_ += 64;
      if (at_ < width_) continue;
      at_ = 0;
      row_ += stride_;
      --rows_;
    }
  }

 private:
  const uint8_t* row_ = nullptr;
  int64_t stride_ = 0, width_ = 0, rows_ = 0, at_ = 0, line_ = 64;
};

}  // namespace blockscale::cpu
