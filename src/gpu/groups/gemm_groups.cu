// Groups around a GEMM: where they end, for any offsets whatsoever, and what no group writes.
#include "gpu/launch.h"

namespace blockscale::gpu {
namespace {

// Whether the offsets make no sense; called by a whole thread block.
BLOCKSCALE_DEVICE bool are_wrong(const Groups& groups, int64_t rows) {
  bool wrong = false;
  for (int64_t g = threadIdx.x; g < groups.count; g += kThreads) wrong |= groups.is_wrong(g, rows);
  return __syncthreads_or(wrong) != 0;
}

// One thread block; each thread takes some consecutive groups.
__global__ void __launch_bounds__(kThreads)
    ends_kernel(Groups groups, int64_t rows, int64_t unit, int32_t* ends, int32_t* is_wrong) {
  after_previous();
  __shared__ int64_t sums[kThreads];
  const bool wrong = are_wrong(groups, rows);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t each = ceil_div(groups.count, kThreads);
  const int64_t first = thread * each, last = min(first + each, groups.count);
  const auto size = [&](int64_t g) {
    return wrong ? 0 : round_up(groups.end(g) - groups.begin(g), unit);
  };
  int64_t own = 0;
  for (int64_t g = first; g < last; ++g) own += size(g);
  sums[thread] = own;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const int64_t before = thread >= step ? sums[thread - step] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  int64_t end = sums[thread] - own;
  for (int64_t g = first; g < last; ++g) ends[g] = static_cast<int32_t>(end += size(g));
  if (thread == 0) *is_wrong = wrong;
}

struct SettleParams {
  void* d;
  DType dtype;
  int64_t rows, columns, row_stride;  // of all matrices of D
  Groups groups;
  int64_t group_rows;   // total rows that the groups divide
  int64_t matrix_rows;  // of D, where each group is one of its matrices, else 0
  bool clear;
};

// Fills rows [first, last) of D, with all thread blocks.
BLOCKSCALE_DEVICE void fill_rows(const SettleParams& p, int64_t first, int64_t last, float value) {
  const int64_t count = (last - first) * p.columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count;
       i += step) {
    const int64_t at = (first + i / p.columns) * p.row_stride + i % p.columns;
    if (p.dtype == DType::f32)
      static_cast<float*>(p.d)[at] = value;
    else
      static_cast<uint16_t*>(p.d)[at] = to_bf16(value);
  }
}

__global__ void __launch_bounds__(kThreads) settle_kernel(const __grid_constant__ SettleParams p) {
  after_previous(p);
  if (are_wrong(p.groups, p.group_rows)) {
    fill_rows(p, 0, p.rows, bit_cast<float>(kNanBits));
  } else if (p.clear && p.matrix_rows == 0) {
    fill_rows(p, p.groups.end(p.groups.count - 1), p.rows, 0.0f);
  } else if (p.clear) {
    for (int64_t g = 0; g < p.groups.count; ++g)
      if (p.groups.end(g) == p.groups.begin(g))
        fill_rows(p, g * p.matrix_rows, (g + 1) * p.matrix_rows, 0.0f);
  }
}

}  // namespace

void group_ends(const Groups& groups, int64_t rows, int64_t unit, int32_t* ends, int32_t* wrong,
                const Stream& stream) {
  start(ends_kernel, 1, kThreads, 0, native(stream), groups, rows, unit, ends, wrong);
  check_launch("gemm");
}

void settle(const Matrix& d, const Groups& groups, int64_t rows, bool contraction, bool clear,
            const Stream& stream) {
  if (d.rows * d.batch * d.columns == 0) return;
  const SettleParams p{d.data, d.dtype, d.rows * d.batch,         d.columns, d.row_stride,
                       groups, rows,    contraction ? d.rows : 0, clear};
  constexpr unsigned kBlocks = 256;
  start(settle_kernel, kBlocks, kThreads, 0, native(stream), p);
  check_launch("gemm");
}

}  // namespace blockscale::gpu
