// One compiled kernel: its launch, and the tensor maps it reads.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "blockscale/spec.h"
#include "cuda/sm90/gemm.h"
#include "cuda/sm90/multiply.h"
#include "cuda/tiles.h"

namespace blockscale::sm90 {

// The sizes of an array of three dimensions, the innermost first; strides in bytes.
struct Extents {
  int64_t size[3];
  int64_t stride[2];
};
bool describe(CUtensorMap& map, CUtensorMapDataType type, const void* data, const Extents& extents,
              int box_across, int box_down, bool swizzled);

// Two waves of a warpgroup become four of half the columns where every column has a scale: two of
// them fit in registers beside the sums, and all four share their scales.
template <int kIndex, bool kSquare>
struct TileOf {
  static constexpr cuda::TileShape s = cuda::kTiles[kIndex];
  static constexpr bool kInTurn = !kSquare && s.waves == 2;
  using type =
      Tile<s.groups, kInTurn || s.side_by_side, kInTurn ? 4 : s.waves, kInTurn ? s.n / 2 : s.n,
           kSquare ? s.stages : s.line_stages, s.cluster, s.split, s.chunks(kSquare)>;
};

template <int kIndex, bool kSquare, bool kAE5m2, bool kBE5m2>
cudaError_t launch(const Fp8Gemm& g, int device, int multiprocessors, cudaStream_t stream) {
  using T = typename TileOf<kIndex, kSquare>::type;
  static_assert(shared_bytes<T, kSquare>(kMaxGroups) <= 227 * 1024);
  const auto kernel = fp8_gemm_kernel<T, kSquare, kAE5m2, kBE5m2>;
  constexpr int kDevices = 64;
  static std::atomic<bool> prepared[kDevices];
  if (device >= kDevices || !prepared[device]) {
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               shared_bytes<T, kSquare>(kMaxGroups));
    if (e != cudaSuccess) return e;
    if (device < kDevices) prepared[device] = true;
  }

  GemmParams p{};
  const int64_t padded = round_up(g.k, kBlock), blocks = padded / kBlock;
  const bool by_rows = g.grouping == Grouping::rows;
  const bool by_contraction = g.grouping == Grouping::contraction;
  const int64_t batch = by_rows ? g.groups : 1;
  const int a_rows = static_cast<int>(std::min<int64_t>(T::kRows, round_up(g.m, 8)));
  p.stage_bytes = static_cast<uint32_t>(a_rows * kBlock + T::kBBytes);
  if (blocks > 0) {
    const auto bytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
    const bool ok = describe(p.a, bytes, g.a, {{padded, g.m, 1}, {padded, padded * g.m}}, kBlock,
                             a_rows, true) &&
                    describe(p.b, bytes, g.b, {{padded, g.n, batch}, {padded, padded * g.n}},
                             kBlock, T::kColumns, true);
    if (!ok) return cudaErrorInvalidValue;
  }
  p.a_scales = g.a_scales;
  p.b_scales = g.b_scales;
  p.a_scale_line = static_cast<int>(by_rows ? g.a_scale_line : round_up(g.m, 4));
  p.b_scale_group = blocks * round_up(kSquare ? ceil_div(g.n, kBlock) : g.n, 4);

  Problem& problem = p.problem;
  problem.m = static_cast<int>(g.m);
  problem.n = static_cast<int>(g.n);
  problem.k_blocks = static_cast<int>(blocks);
  problem.grouping = g.grouping;
  problem.groups = g.grouping == Grouping::dense ? 1 : g.groups;
  problem.group_rows = static_cast<int>(g.group_rows);
  problem.scale_unit = g.a_scale_unit;
  // Far from the other tiles of its group a tail reads its part of B again: that pays where groups
  // are many, and not short.
  const bool late = g.groups >= 16 && g.group_rows >= int64_t{2} * T::kUnitRows * g.groups;
  problem.tail_rows = late ? T::kUnitRows / 2 : 0;
  problem.offsets = g.offsets;
  problem.wide_offsets = g.wide_offsets;
  const int64_t across = ceil_div(g.n, T::kUnitColumns), down = ceil_div(g.m, T::kUnitRows);
  const int64_t band = std::min<int64_t>(g.band, down);
  problem.units_across = Divisor(across);
  problem.units_down = static_cast<int>(down);
  problem.band = Divisor(band);
  problem.band_units = Divisor(band * across);
  problem.group_units = Divisor(down * across);

  Output& out = p.out;
  const int64_t size = g.d_f32 ? 4 : 2;
  out.d = g.d;
  out.row_stride = g.d_stride;
  out.group_stride = g.m * g.d_stride;
  out.alpha = g.alpha;
  out.device_alpha = g.device_alpha;
  out.factors = g.b_factors;
  out.bias = g.bias;
  out.bias_dtype = g.bias_dtype;
  out.f32 = g.d_f32;
  out.add = g.accumulate;
  const auto address = reinterpret_cast<uintptr_t>(g.d);
  out.pairs = address % (2 * size) == 0 && g.d_stride % 2 == 0;
  out.boxes =
      T::kStaged && address % 16 == 0 && g.d_stride * size % 16 == 0 &&
      describe(
          p.d, g.d_f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, g.d,
          {{g.n, g.m, by_contraction ? g.groups : 1}, {g.d_stride * size, g.m * g.d_stride * size}},
          static_cast<int>(128 / size), 64, true);

  int clusters = multiprocessors / T::kCluster;
  if (!by_rows) {
    const int64_t units = down * across * problem.groups;
    if (units < clusters || T::kSplit) clusters = static_cast<int>(units);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters * T::kCluster));
  config.blockDim = dim3(T::kThreads);
  config.dynamicSmemBytes = shared_bytes<T, kSquare>(g.grouping == Grouping::dense ? 0 : g.groups);
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {T::kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;  // see after_previous()
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace blockscale::sm90
