// Hopper (sm_90a) GEMMs as plain functions of device pointers, sizes and a stream. They launch one
// kernel, allocate nothing, wait for nothing, and give the same bits in every run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "blockscale/ops.h"

namespace blockscale::sm90 {

// Codes along K that share a scale, and bytes of a line in a pipeline stage: 64 values in BF16.
inline constexpr int kBlock = 128;
inline constexpr int kMaxGroups = 1024;  // a launch's table of groups is in shared memory

// Which dimension the groups divide.
enum class Grouping : int { dense, rows, contraction };

// How clusters get their tiles: each has a fixed share from the start, or draws its next tile when
// it has finished one. A dynamic schedule becomes fixed where no counter is available for it
// (counters.h). No bit of the result depends on the schedule.
enum class Schedule : int { chosen, fixed, dynamic };

// D = alpha * (A B^T) [+ bias] [+ D].
//   dense        A [m, k],    B [n, k],    D [m, n]
//   rows         A [m, k],    B [g, n, k], D [m, n]: rows of A by group
//   contraction  A [m, k],    B [n, k],    D [g, m, n]: group i's part of the storage starts where
//                the one before ends, rounded up to 128 (BF16: to `storage_unit`); k is the length
//                of the whole storage
// Rows of no group become 0 unless D is accumulated; offsets that decrease or pass the end make all
// of D NaN.
struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;     // FP32 or BF16
  int64_t d_stride = 0;  // elements between its rows; groups are contiguous
  bool d_f32 = false;
  bool accumulate = false;  // FP32 only
  float alpha = 1;
  const void* bias = nullptr;  // n values per group
  DType bias_dtype = DType::f32;
  Grouping grouping = Grouping::dense;
  int groups = 1;
  int64_t group_rows = 0;         // total rows that the groups divide
  const void* offsets = nullptr;  // cumulative ends of the groups, in device memory
  bool int64_offsets = false;     // int64 instead of int32
  int band = 0;  // tiles along M that are walked together; set once there is a tile
  Schedule schedule = Schedule::chosen;
  Previous previous = Previous::any;
};

// Rows of codes are `k` rounded up to 128 bytes, zero padded. Scales are mn_major: per block of 128
// along K one line of a value per row (1x128) or per 128 rows (128x128, B only), padded to 4; B's
// groups are contiguous. All start at multiples of 16 bytes. Groups of rows lie among A's scales as
// they do among its rows, or each starts at a multiple of 4.
struct Fp8Gemm : Gemm {
  const float* a_scales = nullptr;
  const float* b_scales = nullptr;
  bool a_e5m2 = false, b_e5m2 = false;
  bool b_square = true;                 // blocks of 128x128
  const float* device_alpha = nullptr;  // one more factor, in device memory
  const float* b_factors = nullptr;     // one more factor per row of B, a power of two
  int64_t a_scale_line = 0;             // rows: values in a line of A's scales
  int a_scale_unit = 1;                 // rows: 4 where groups start at multiples of 4 in it
  int tile = -1;                        // index into kTiles; negative: chosen
};

// Rows of both operands are `stride` elements apart, a multiple of 8; the operands start at
// multiples of 16 bytes. D = fl(alpha * a_outer * b_outer * (A B^T) + bias), with the group's outer
// scales in device memory, or null; the product of an empty group is 0 whatever its scales.
struct Bf16Gemm : Gemm {
  int64_t stride = 0;
  int storage_unit = 16;  // contraction: groups start at multiples of it; multiple of 16
  const float* a_outer = nullptr;
  const float* b_outer = nullptr;
  int tile = -1;  // index into kBf16Tiles; negative: chosen
};

// The same with B in its codes, which the kernel decodes: `b` is not used, `tile` is an index into
// kCodedTiles, and groups are of rows. The product is that of B decoded to BF16, to the bit.
struct CodedGemm : Bf16Gemm {
  ConstQuantized coded;
};
// Whether coded_gemm takes this B: a format that it decodes, linear, with whole stages of 64 codes
// in every line, from multiples of 16 bytes on.
bool takes_coded(const ConstQuantized& b);
// Whether that is likely to be faster than what it replaces, see cuda::pays_to_decode().
bool pays(const CodedGemm& g, bool needs_pass);

// Whether this GEMM is likely to be faster than another library's plus a pass over its sums; and
// whether it finishes before the host has launched the other.
bool pays(const Bf16Gemm& g);
bool is_brief(const Bf16Gemm& g);
// Return cudaSuccess, or why the launch failed.
cudaError_t fp8_gemm(const Fp8Gemm& g, cudaStream_t stream);
cudaError_t bf16_gemm(const Bf16Gemm& g, cudaStream_t stream);
cudaError_t coded_gemm(const CodedGemm& g, cudaStream_t stream);

}  // namespace blockscale::sm90
