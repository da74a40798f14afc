// What follows the sums of a GEMM: D = alpha * a_outer * b_outer * S + bias [+ D], in one pass.
#include "gpu/launch.h"

namespace blockscale::gpu {
namespace {

// A thread takes kVectors vectors of kWidth neighbours, a whole block of threads apart: every load
// and store of a warp is one piece of memory, and kVectors loads are under way at once.
constexpr int kWidth = 4, kVectors = 4;
constexpr int kBlockValues = kThreads * kWidth * kVectors;

struct FinishParams {
  const float* sums;
  void* d;
  DType dtype;
  int64_t count;
  int64_t columns;
  Epilogue e;
};

BLOCKSCALE_DEVICE float bias_at(const Epilogue& e, int64_t column) {
  if (e.bias_dtype == DType::f32) return static_cast<const float*>(e.bias)[column];
  const uint16_t bits = static_cast<const uint16_t*>(e.bias)[column];
  return e.bias_dtype == DType::bf16 ? from_bf16(bits) : from_fp16(bits);
}

BLOCKSCALE_DEVICE void store(const FinishParams& p, int64_t at, int count, const float* v) {
  if (p.dtype == DType::f32) {
    float* to = static_cast<float*>(p.d) + at;
    if (count == kWidth) {
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
  if (count == kWidth) {
    *reinterpret_cast<uint2*>(to) = pairs;
    return;
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    if (i < count) to[i] = static_cast<uint16_t>((i < 2 ? pairs.x : pairs.y) >> 16 * (i % 2));
}

// In double, like the CPU backend: no product of outer scales leaves the range, and equal sums give
// equal bits. Two conversions an element are less than its share of the memory's time.
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ FinishParams p) {
  const Epilogue& e = p.e;
  const double factor = static_cast<double>(e.alpha) * (e.a_outer ? *e.a_outer : 1.0f) *
                        (e.b_outer ? *e.b_outer : 1.0f);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockValues + threadIdx.x * kWidth;
  const auto at = [&](int vector) { return first + vector * kThreads * kWidth; };
  const auto left = [&](int vector) {
    return static_cast<int>(min(static_cast<int64_t>(kWidth), p.count - at(vector)));
  };
  float v[kVectors][kWidth];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float4 four{};
    if (left(j) == kWidth) {
      four = *reinterpret_cast<const float4*>(p.sums + at(j));
    } else {
      if (left(j) > 0) four.x = p.sums[at(j)];
      if (left(j) > 1) four.y = p.sums[at(j) + 1];
      if (left(j) > 2) four.z = p.sums[at(j) + 2];
    }
    v[j][0] = four.x, v[j][1] = four.y, v[j][2] = four.z, v[j][3] = four.w;
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (left(j) <= 0) return;
    int64_t column = e.bias ? at(j) % p.columns : 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i >= left(j)) break;
      double value = factor * static_cast<double>(v[j][i]);
      if (e.bias) {
        value += static_cast<double>(bias_at(e, column));
        if (++column == p.columns) column = 0;
      }
      if (e.accumulate) value += static_cast<double>(static_cast<const float*>(p.d)[at(j) + i]);
      v[j][i] = static_cast<float>(value);
    }
    store(p, at(j), left(j), v[j]);
  }
}

}  // namespace

void finish(const float* sums, const Matrix& d, const Epilogue& e, const Stream& stream) {
  const int64_t count = d.rows * d.columns;
  if (count == 0) return;
  const FinishParams p{sums, d.data, d.dtype, count, d.columns, e};
  const auto blocks = static_cast<unsigned>(ceil_div(count, kBlockValues));
  start(finish_kernel, blocks, kThreads, 0, native(stream), p);
  check_launch("gemm");
}

}  // namespace blockscale::gpu
