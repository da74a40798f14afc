// What follows a GEMM's sums: D = alpha * a_outer * b_outer * S + bias [+ D], in one pass, with the
// outer scales and the bias of each row's group.
#include "gpu/launch.h"

namespace blockscale::gpu {
namespace {

// A thread takes kVectors vectors of kWidth neighbours, a whole thread block apart: every load and
// store of a warp covers one contiguous piece of memory, and kVectors loads are in flight at once.
constexpr int kWidth = 4, kVectors = 4;
constexpr int kBlockValues = kThreads * kWidth * kVectors;

struct FinishParams {
  const void* sums;
  DType sums_dtype;
  int64_t sums_stride;  // between its rows
  void* d;
  DType dtype;
  int64_t count;
  int64_t columns;
  int64_t matrix_rows;  // of D, where each group is a matrix
  bool vectors;         // kWidth elements of D may be stored at once
  Epilogue e;
};

// The row of D that holds an element: in 32 bits where they suffice, since those divide much
// faster.
BLOCKSCALE_DEVICE int64_t row_of(const FinishParams& p, int64_t at) {
  return p.count >> 32 ? at / p.columns
                       : static_cast<uint32_t>(at) / static_cast<uint32_t>(p.columns);
}

BLOCKSCALE_DEVICE void load(const FinishParams& p, int64_t at, int count, float* v) {
  const bool joined = p.sums_stride == p.columns;
  if (count == kWidth && joined && p.sums_dtype == DType::f32) {
    const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(p.sums) + at);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    return;
  }
  if (count == kWidth && joined) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.sums) + at);
    v[0] = from_bf16(static_cast<uint16_t>(pairs.x));
    v[1] = from_bf16(static_cast<uint16_t>(pairs.x >> 16));
    v[2] = from_bf16(static_cast<uint16_t>(pairs.y));
    v[3] = from_bf16(static_cast<uint16_t>(pairs.y >> 16));
    return;
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (i >= count) break;
    const int64_t row = joined ? 0 : row_of(p, at + i);
    const int64_t from = at + i + row * (p.sums_stride - p.columns);
    v[i] = p.sums_dtype == DType::f32 ? static_cast<const float*>(p.sums)[from]
                                      : from_bf16(static_cast<const uint16_t*>(p.sums)[from]);
  }
}

// What all elements of a group's rows have in common.
struct RowGroup {
  int64_t until = 0;  // the first row after them
  int64_t group = 0;
  bool outside = false;  // of all groups
  bool empty = false;    // without a sum
  double factor = 0;
};
BLOCKSCALE_DEVICE double factor_of(const Epilogue& e, int64_t group) {
  return static_cast<double>(e.alpha) * (e.a_outer ? e.a_outer[group] : 1.0f) *
         (e.b_outer ? e.b_outer[group] : 1.0f);
}
BLOCKSCALE_DEVICE RowGroup rows_at(const FinishParams& p, int64_t row) {
  const GroupEnds& groups = p.e.groups;
  const auto begin = [&](int64_t g) { return g == 0 ? 0 : groups.ends[g - 1]; };
  RowGroup r;
  r.empty = p.e.empty;
  if (groups.contraction) {
    r.group = row / p.matrix_rows;
    r.until = (r.group + 1) * p.matrix_rows;
    r.empty |= groups.ends[r.group] == begin(r.group);
  } else {
    int64_t high = groups.count;  // the first group that ends behind the row
    while (r.group < high) {
      const int64_t middle = (r.group + high) / 2;
      if (groups.ends[middle] > row)
        high = middle;
      else
        r.group = middle + 1;
    }
    r.outside = r.group == groups.count;
    r.until = r.outside ? p.count : groups.ends[r.group];
  }
  if (!r.outside) r.factor = factor_of(p.e, r.group);
  return r;
}

BLOCKSCALE_DEVICE float bias_at(const Epilogue& e, int64_t at) {
  if (e.bias_dtype == DType::f32) return static_cast<const float*>(e.bias)[at];
  const uint16_t bits = static_cast<const uint16_t*>(e.bias)[at];
  return e.bias_dtype == DType::bf16 ? from_bf16(bits) : from_fp16(bits);
}

// The finished element at `at` of D, in column `column` of one of these rows.
BLOCKSCALE_DEVICE float finished(const FinishParams& p, const RowGroup& row, int64_t at,
                                 int64_t column, float sum) {
  const float before = p.e.accumulate ? static_cast<const float*>(p.d)[at] : 0.0f;
  if (row.outside || (row.empty && p.e.accumulate && !p.e.bias)) return before;
  double value = row.empty ? 0.0 : row.factor * static_cast<double>(sum);
  if (p.e.bias) value += static_cast<double>(bias_at(p.e, row.group * p.columns + column));
  if (p.e.accumulate) value += static_cast<double>(before);
  return static_cast<float>(value);
}

BLOCKSCALE_DEVICE void store(const FinishParams& p, int64_t at, int count, const float* v) {
  if (p.dtype == DType::f32) {
    float* to = static_cast<float*>(p.d) + at;
    if (count == kWidth && p.vectors) {
      *reinterpret_cast<float4*>(to) = {v[0], v[1], v[2], v[3]};
      return;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      if (i < count) to[i] = v[i];
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(p.d) + at;
  uint2 pairs;
  if (p.dtype == DType::bf16) {
    pairs = {to_bf16x2(v[0], v[1]), to_bf16x2(v[2], v[3])};
  } else {
    const auto pair = [](float low, float high) {
      return static_cast<uint32_t>(to_fp16(high)) << 16 | to_fp16(low);
    };
    pairs = {pair(v[0], v[1]), pair(v[2], v[3])};
  }
  if (count == kWidth && p.vectors) {
    *reinterpret_cast<uint2*>(to) = pairs;
    return;
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    if (i < count) to[i] = static_cast<uint16_t>((i < 2 ? pairs.x : pairs.y) >> 16 * (i % 2));
}

// In double, like the CPU backend: no product of outer scales leaves the range, and equal sums give
// equal bits. Two conversions per element take less than its share of the memory time.
template <bool kGrouped>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ FinishParams p) {
  after_previous(p);
  const Epilogue& e = p.e;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockValues + threadIdx.x * kWidth;
  const auto at = [&](int vector) { return first + vector * kThreads * kWidth; };
  const auto left = [&](int vector) {
    return static_cast<int>(min(static_cast<int64_t>(kWidth), p.count - at(vector)));
  };
  float v[kVectors][kWidth]{};
#pragma unroll
  for (int j = 0; j < kVectors; ++j) load(p, at(j), left(j), v[j]);
  const bool by_row = kGrouped || e.bias;
  const bool wrong = kGrouped && *e.groups.wrong;
  const bool plain = !wrong && !e.bias && !e.accumulate;
  RowGroup rows;
  rows.empty = e.empty;
  if (!kGrouped) rows.factor = factor_of(e, 0);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (left(j) <= 0) return;
    int64_t row = by_row ? row_of(p, at(j)) : 0;
    int64_t column = by_row ? at(j) - row * p.columns : 0;
    if (kGrouped && row >= rows.until) rows = rows_at(p, row);
    const bool whole = left(j) == kWidth && (!by_row || column + kWidth <= p.columns);
    if (whole && plain && !rows.outside && !rows.empty) {  // nothing but the factor
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        v[j][i] = static_cast<float>(rows.factor * static_cast<double>(v[j][i]));
      store(p, at(j), kWidth, v[j]);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i >= left(j)) break;
      if (by_row && column == p.columns) column = 0, ++row;
      if (kGrouped && row >= rows.until) rows = rows_at(p, row);
      v[j][i] = wrong ? bit_cast<float>(kNanBits) : finished(p, rows, at(j) + i, column++, v[j][i]);
    }
    store(p, at(j), left(j), v[j]);
  }
}

}  // namespace

void finish(const ConstMatrix& sums, const Matrix& d, const Epilogue& e, const Stream& stream) {
  const int64_t count = d.batch * d.rows * d.columns;
  if (count == 0) return;
  const auto address = reinterpret_cast<uintptr_t>(d.data);
  const FinishParams p{sums.data, sums.dtype, sums.row_stride,
                       d.data,    d.dtype,    count,
                       d.columns, d.rows,     address % (kWidth * dtype_bytes(d.dtype)) == 0,
                       e};
  const auto blocks = static_cast<unsigned>(ceil_div(count, kBlockValues));
  if (e.groups.count > 0)
    start(finish_kernel<true>, blocks, kThreads, 0, native(stream), p);
  else
    start(finish_kernel<false>, blocks, kThreads, 0, native(stream), p);
  check_launch("gemm");
}

}  // namespace blockscale::gpu
