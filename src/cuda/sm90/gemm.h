// The FP8 GEMM of Hopper (sm_90a) as a plain function: device pointers, sizes, a stream. Launches
// one kernel, allocates nothing, waits for nothing; the same bits from run to run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "blockscale/tensor.h"

namespace blockscale::sm90 {

inline constexpr int kBlock = 128;  // contraction length of one scale and of one pipeline stage
inline constexpr int kMaxGroups = 1024;  // the table of a launch's groups lies in shared memory

// Which dimension the groups divide.
enum class Grouping : int { dense, rows, contraction };

// D = alpha * (A B^T) [* b_factors] [+ bias] [+ D].
//   dense        A [m, k],    B [n, k],    D [m, n]
//   rows         A [m, k],    B [g, n, k], D [m, n]: rows of A by group
//   contraction  A [m, k],    B [n, k],    D [g, m, n]: group i's part of the storage starts where
//                the one before ends, rounded up to 128; k is the length of the whole storage
// Codes have rows of `k` rounded up to 128 bytes, zero padded; scales are mn_major: for every block
// of 128 along K a line of one value a row (1x128) or one every 128 rows (128x128, B only), padded
// to 4; B's groups follow each other. All start at multiples of 16 bytes. Groups of rows lie among
// the scales of A as they do among its rows, or each starts at a multiple of 4.
//
// Rows of no group become 0 unless D is accumulated; offsets that decrease or pass the end make all
// of D NaN.
struct Fp8Gemm {
  int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  const float* a_scales = nullptr;
  const float* b_scales = nullptr;
  bool a_e5m2 = false, b_e5m2 = false;
  bool b_square = true;  // blocks of 128x128
  void* d = nullptr;     // FP32 or BF16
  int64_t d_stride = 0;  // elements between its rows; its groups follow each other
  bool d_f32 = false;
  bool accumulate = false;  // FP32 only
  float alpha = 1;
  const float* device_alpha = nullptr;  // one more factor, in device memory
  const float* b_factors = nullptr;     // one more factor for each row of B, powers of two
  const void* bias = nullptr;           // n values, for each group
  DType bias_dtype = DType::f32;
  Grouping grouping = Grouping::dense;
  int groups = 1;
  int64_t group_rows = 0;         // that the groups divide
  int64_t a_scale_line = 0;       // rows: values of a line of A's scales
  int a_scale_unit = 1;           // rows: 4 where groups start at multiples of 4 there
  const void* offsets = nullptr;  // cumulative ends of the groups, in device memory
  bool wide_offsets = false;      // int64 instead of int32
  int tile = -1;                  // index into kTiles; chosen when negative
  int band = 0;                   // tiles along M that are walked together; chosen when 0
};

// Returns cudaSuccess, or why the launch failed.
cudaError_t fp8_gemm(const Fp8Gemm& g, cudaStream_t stream);

}  // namespace blockscale::sm90
