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
  // Distances and the width are in bytes.
  Ahead(const void* data, int64_t stride, int64_t width, int64_t rows)
      : row_(static_cast<const uint8_t*>(data)), stride_(stride), width_(width), rows_(rows) {}
  void fetch(int64_t bytes) {
    for (; bytes > 0 && rows_ > 0; bytes -= 64) {
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
  int64_t stride_ = 0, width_ = 0, rows_ = 0, at_ = 0;
};

}  // namespace blockscale::cpu
