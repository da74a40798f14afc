// Prefetches the next data while other data is processed.
#pragma once

#include <cstdint>

#include "hwy/cache_control.h"

namespace blockscale::cpu {

// Prefetches a rectangle, a few cache lines at a time. Its rows are too far apart for the hardware
// prefetcher.
class Ahead {
 public:
  Ahead() = default;
  // The stride and the width are in bytes. `passes`: how many times over fetch() is called for the
  // full number of bytes.
  Ahead(const void* data, int64_t stride, int64_t width, int64_t rows, int passes = 1)
      : row_(static_cast<const uint8_t*>(data)),
        stride_(stride),
        width_(width),
        rows_(rows),
        line_(64 * passes) {}
  void fetch(int64_t bytes) {
    for (; bytes > 0 && rows_ > 0; bytes -= line_) {
      hwy::Prefetch(row_ + at_ + 63);  // if unaligned, the line before was just read
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
