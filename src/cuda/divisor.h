// Division by a number that the host knows, for kernels: a multiplication and a shift, where an
// integer division is some thirty instructions that every warp of a tile would wait for.
#pragma once

#include <cstdint>

#include "blockscale/formats.h"

namespace blockscale::cuda {

class Divisor {
 public:
  Divisor() = default;
  // Of 1 to 2^31 - 1.
  explicit Divisor(int64_t n) : by_(static_cast<int>(n)) {
    while (int64_t{1} << (shift_ - 31) < n) ++shift_;
    factor_ = static_cast<uint32_t>(((int64_t{1} << shift_) + n - 1) / n);
  }
  BLOCKSCALE_HD int by() const { return by_; }
  // n / by, for n of 0 to 2^31 - 1: the factor is too large by less than n in 2^shift.
  BLOCKSCALE_HD int divide(int n) const {
    return static_cast<int>(uint64_t{static_cast<uint32_t>(n)} * factor_ >> shift_);
  }

 private:
  int by_ = 1;
  int shift_ = 31;
  uint32_t factor_ = 1u << 31;  // 2^shift / by, rounded up
};

}  // namespace blockscale::cuda
