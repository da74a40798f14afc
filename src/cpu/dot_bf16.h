// Dot products of BF16 values, which Highway 1.0.3 does not offer: microkernels of the GEMM.
//
// Each computes c[kRows][kColumns] = or += (a b) * row_scales * column_scales. A word of a panel
// holds two consecutive BF16 values of k, the first in the low half. b is [pairs][kColumns]; in a,
// kTogether words of a row lie side by side: [pairs / kTogether][kRows][kTogether], with `pairs` a
// multiple of kTogether.
//
// The instructions treat subnormals as zero and never return one: do not pass operands whose
// products or sums could be subnormal.
#pragma once

#include <cstdint>

namespace blockscale::cpu {

// Whether this processor has AVX-512 BF16: a dot product, and an instruction that rounds FP32 to
// BF16.
bool has_bf16();

// AVX-512's instruction: 24 accumulators of 16 lanes, two vectors of b, one broadcast of a.
struct Avx512Dot {
  static constexpr int64_t kRows = 12, kColumns = 32, kTogether = 1;
  struct Session {};

  static void multiply(const uint32_t* a, const uint32_t* b, int64_t pairs, const float* row_scales,
                       const float* column_scales, bool accumulate, float* c, int64_t c_stride);
};

// AMX's instruction: four tiles of 16 x 16 sums, two tiles of each operand.
struct AmxDot {
  static constexpr int64_t kRows = 32, kColumns = 32, kTogether = 16;
  // While one lives, this thread may call multiply().
  struct Session {
    Session();
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // Whether this processor has it and the operating system lets this process use its registers,
  // for which the first call asks.
  static bool available();
  static void multiply(const uint32_t* a, const uint32_t* b, int64_t pairs, const float* row_scales,
                       const float* column_scales, bool accumulate, float* c, int64_t c_stride);
};

}  // namespace blockscale::cpu
