// What the tests share: a seeded generator, threads over a range, and shorthand for bits.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "blockscale/formats.h"

namespace blockscale::testing {

inline uint32_t bits_of(float x) { return bit_cast<uint32_t>(x); }
inline float float_of(uint32_t bits) { return bit_cast<float>(bits); }

// Under sanitizers and emulators tests are ten and more times slower: the sweeps over all floats
// then take every 1021st.
#ifdef BLOCKSCALE_QUICK
inline constexpr uint32_t kSweepStep = 1021;
#else
inline constexpr uint32_t kSweepStep = 1;
#endif

// SplitMix64: the same numbers everywhere, whatever the standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t n) { return next() % n; }
  bool one_in(uint64_t n) { return below(n) == 0; }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  // Roughly Gaussian: the sum of twelve uniforms, centred.
  double normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }
  template <class Container>
  auto pick(const Container& c) {
    return *(std::begin(c) + static_cast<std::ptrdiff_t>(below(std::size(c))));
  }

 private:
  uint64_t state_;
};

// body(begin, end) over [begin, end) in many chunks, on all cores.
template <class Body>
void for_chunks(uint64_t begin, uint64_t end, uint64_t chunk, const Body& body) {
  const unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> pool;
  for (unsigned t = 0; t < threads; ++t) {
    pool.emplace_back([=, &body] {
      for (uint64_t at = begin + t * chunk; at < end; at += threads * chunk)
        body(at, at + chunk < end ? at + chunk : end);
    });
  }
  for (std::thread& thread : pool) thread.join();
}

}  // namespace blockscale::testing
