// Division by a number that the host knows, for kernels: a multiplication and a shift replace an
// integer division of some thirty instructions (Granlund and Montgomery, "Division by invariant
// integers using multiplication", 1994).
#pragma once

#include <cstdint>

#include "blockscale/formats.h"

namespace blockscale {

class Divisor {
 public:
  Divisor() = default;
  // `by` is from 1 to 2^31 - 1.
  explicit Divisor(int64_t by) : by_(static_cast<uint32_t>(by)) {
    while (int64_t{1} << shift_ < by) ++shift_;
    factor_ = static_cast<uint32_t>(((int64_t{1} << (31 + shift_)) + by - 1) / by);
  }
  BLOCKSCALE_HD uint32_t by() const { return by_; }
  // n / by, for n below 2^31: the rounded-up factor makes the result too large by less than
  // n / 2^(31 + shift). Takes the upper half of 2 n factor, so that by = 1 is no exception.
  BLOCKSCALE_HD uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>(uint64_t{2 * n} * factor_ >> 32) >> shift_;
  }
  // The quotient; n becomes the remainder.
  BLOCKSCALE_HD uint32_t divide(uint32_t& n) const {
    const uint32_t q = quotient(n);
    n -= q * by_;
    return q;
  }

 private:
  uint32_t by_ = 1;
  uint32_t shift_ = 0;
  uint32_t factor_ = 1u << 31;  // 2^(31 + shift) / by, rounded up
};

}  // namespace blockscale
