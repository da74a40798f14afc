// What the tests of Hopper's two GEMMs share: the device they need, a D with guards, biases,
// groups.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "blockscale/ops.h"
#include "device.h"
#include "testing.h"

namespace blockscale::testing {

class HopperTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0) != cudaSuccess ||
        major != 9 || minor != 0)
      GTEST_SKIP() << "no GPU of compute capability 9.0";
  }
};

// D in poisoned memory with guards, FP32 or BF16: `lines` of `n` elements, `pad` before the first
// and between them.
class GuardedD {
 public:
  static constexpr float kBefore = 3.5f;  // what D holds where it is accumulated

  GuardedD(int64_t lines, int64_t n, int64_t pad, bool f32, bool accumulate)
      : lines_(lines), n_(n), pad_(pad), size_(f32 ? 4 : 2) {
    before_.assign(static_cast<size_t>((2 * kGuard + lines * stride()) * size_), kPoison);
    for (int64_t i = 0; accumulate && i < lines * stride(); ++i)
      std::memcpy(&before_[static_cast<size_t>((kGuard + pad + i) * 4)], &kBefore, 4);
  }
  int64_t stride() const { return n_ + pad_; }

  // `launch` gets the place of D on the device, and what to promise; it has to write the same bits
  // whatever that is.
  template <class Launch>
  void run(const Launch& launch) {
    for (const Previous previous : {Previous::any, Previous::operands, Previous::nothing}) {
      const Memory d(before_);
      ASSERT_EQ(launch(d.at((kGuard + pad_) * size_), previous), cudaSuccess);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      std::vector<uint8_t> got(before_.size());
      d.read(got.data(), static_cast<int64_t>(got.size()));
      if (previous == Previous::any) got_ = got;
      ASSERT_EQ(got_, got) << "not the same bits again";
    }
  }
  float value(int64_t line, int64_t column) const {
    uint32_t bits = 0;
    std::memcpy(&bits, &got_[at(line, column)], static_cast<size_t>(size_));
    return size_ == 4 ? float_of(bits) : float_of(bits << 16);
  }
  // Nothing but D was written.
  void check_guards() const {
    std::vector<bool> of_d(got_.size());
    for (int64_t line = 0; line < lines_; ++line)
      for (int64_t i = 0; i < n_ * size_; ++i) of_d[at(line, 0) + static_cast<size_t>(i)] = true;
    for (size_t i = 0; i < got_.size(); ++i) {
      if (of_d[i]) continue;
      ASSERT_EQ(got_[i], before_[i]) << "byte " << i << " outside of D";
    }
  }

 private:
  static constexpr int64_t kGuard = 64;
  static constexpr uint8_t kPoison = 0xFF;  // NaN

  size_t at(int64_t line, int64_t column) const {
    return static_cast<size_t>((kGuard + pad_ + line * stride() + column) * size_);
  }

  int64_t lines_, n_, pad_, size_;
  std::vector<uint8_t> before_, got_;
};

// A bias of the same values in every dtype.
class BiasValues {
 public:
  void add(float v) {
    bf16_.push_back(to_bf16(v));
    f32_.push_back(from_bf16(bf16_.back()));
    fp16_.push_back(to_fp16(f32_.back()));
  }
  double operator[](int64_t i) const { return f32_[static_cast<size_t>(i)]; }
  Memory on_device(DType dtype) const {
    return dtype == DType::f32 ? Memory(f32_) : Memory(dtype == DType::bf16 ? bf16_ : fp16_);
  }

 private:
  std::vector<float> f32_;
  std::vector<uint16_t> bf16_, fp16_;
};

// Sizes of groups: empty ones, short ones, and some with rows of the second and third 64 and a tile
// with a tail.
inline std::vector<int64_t> drawn_groups(Random& random) {
  std::vector<int64_t> sizes;
  const uint64_t count = random.one_in(2) ? 9 : 3;
  for (uint64_t g = 0; g < count; ++g)
    sizes.push_back(random.one_in(4)   ? 0
                    : random.one_in(3) ? 1
                                       : static_cast<int64_t>(random.below(40)));
  sizes[random.below(count)] = 180;
  sizes[random.below(count)] = 300;
  return sizes;
}
// Enough of them and long enough for tails to come late.
inline std::vector<int64_t> many_groups() {
  std::vector<int64_t> sizes;
  for (int g = 0; g < 4; ++g) sizes.insert(sizes.end(), {620, 0, 1100, 436});
  return sizes;
}

}  // namespace blockscale::testing
