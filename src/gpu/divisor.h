// Division by what the host knows.
#pragma once

#include "gpu/port.h"

namespace blockscale::gpu {

// n / divisor for n below 2^31, as a product (Granlund and Montgomery, "Division by invariant
// integers using multiplication", 1994).
struct Divisor {
  uint32_t value, inverse, shift;

  static Divisor of(int64_t d) {
    uint32_t bits = 0;
    while ((1ll << bits) < d) ++bits;
    const uint64_t inverse =
        ((1ull << (31 + bits)) + static_cast<uint64_t>(d) - 1) / static_cast<uint64_t>(d);
    return {static_cast<uint32_t>(d), static_cast<uint32_t>(inverse), bits - 1};
  }
  BLOCKSCALE_DEVICE uint32_t quotient(uint32_t n) const {
    return value == 1 ? n : multiply_high(n, inverse) >> shift;
  }
  // And n becomes the remainder.
  BLOCKSCALE_DEVICE uint32_t divide(uint32_t& n) const {
    const uint32_t q = quotient(n);
    n -= q * value;
    return q;
  }
};

}  // namespace blockscale::gpu
