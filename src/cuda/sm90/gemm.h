// The GEMMs of Hopper (sm_90a) as plain functions: device pointers, sizes, a stream. They launch
// one kernel, allocate nothing, wait for nothing; the same bits from run to run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "blockscale/ops.h"

namespace blockscale::sm90 {

inline constexpr int kBlock = 128;  // contraction length of one scale and of one pipeline stage
inline constexpr int kMaxGroups = 1024;  // the table of a launch's groups lies in shared memory

// Which dimension the groups divide.
enum class Grouping : int { dense, rows, contraction };

// How clusters come to their tiles: each has its share from the start, or draws the next when it
// has done one. A dynamic schedule is fixed where there is no counter for it (counters.h). No bit
// depends on it.
enum class Schedule : int { chosen, fixed, dynamic };

// D = alpha * (A B^T) [+ bias] [+ D].
//   dense        A [m, k],    B [n, k],    D [m, n]
//   rows         A [m, k],    B [g, n, k], D [m, n]: rows of A by group
//   contraction  A [m, k],    B [n, k],    D [g, m, n]: group i's part of the storage starts where
//                the one before ends, rounded up to 128; k is the length of the whole storage
// Rows of no group become 0 unless D is accumulated; offsets that decrease or pass the end make all
// of D NaN.
struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;     // FP32 or BF16
  int64_t d_stride = 0;  // elements between its rows; its groups follow each other
  bool d_f32 = false;
  bool accumulate = false;  // FP32 only
  float alpha = 1;
  const void* bias = nullptr;  // n values, for each group
  DType bias_dtype = DType::f32;
  Grouping grouping = Grouping::dense;
  int groups = 1;
  int64_t group_rows = 0;         // that the groups divide
  const void* offsets = nullptr;  // cumulative ends of the groups, in device memory
  bool wide_offsets = false;      // int64 instead of int32
  int band = 0;                   // tiles along M that are walked together; chosen when 0
  Schedule schedule = Schedule::chosen;
  Previous previous = Previous::any;
};

// Codes have rows of `k` rounded up to 128 bytes, zero padded; scales are mn_major: for every block
// of 128 along K a line of one value a row (1x128) or one every 128 rows (128x128, B only), padded
// to 4; B's groups follow each other. All start at multiples of 16 bytes. Groups of rows lie among
// the scales of A as they do among its rows, or each starts at a multiple of 4.
struct Fp8Gemm : Gemm {
  const float* a_scales = nullptr;
  const float* b_scales = nullptr;
  bool a_e5m2 = false, b_e5m2 = false;
  bool b_square = true;                 // blocks of 128x128
  const float* device_alpha = nullptr;  // one more factor, in device memory
  const float* b_factors = nullptr;     // one more factor for each row of B, powers of two
  int64_t a_scale_line = 0;             // rows: values of a line of A's scales
  int a_scale_unit = 1;                 // rows: 4 where groups start at multiples of 4 there
  int tile = -1;                        // index into kTiles; chosen when negative
};

// `stride` elements between rows of both operands, a multiple of 8, which start at multiples of 16
// bytes. D = fl(alpha * a_outer * b_outer * (A B^T) + bias), with outer scales of the group in
// device memory, or null; the product of an empty group is 0 whatever its scales.
struct Bf16Gemm : Gemm {
  int64_t stride = 0;
  int storage_unit = 16;  // contraction: groups start at multiples of it; a multiple of 16
  const float* a_outer = nullptr;
  const float* b_outer = nullptr;
  int tile = -1;  // index into kBf16Tiles; chosen when negative
};

// Whether it is likely to be faster than another library's and a pass over its sums; and whether it
// is over before the host has launched that.
bool pays(const Bf16Gemm& g);
bool is_brief(const Bf16Gemm& g);
// Return cudaSuccess, or why the launch failed.
cudaError_t fp8_gemm(const Fp8Gemm& g, cudaStream_t stream);
cudaError_t bf16_gemm(const Bf16Gemm& g, cudaStream_t stream);

}  // namespace blockscale::sm90
