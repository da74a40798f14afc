// One compiled kernel: its launch, and the tensor maps it reads.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "blockscale/spec.h"
#include "cuda/attribute.h"
#include "cuda/sm90/counters.h"
#include "cuda/sm90/gemm.h"
#include "cuda/sm90/multiply.h"
#include "cuda/tensor_map.h"
#include "cuda/tiles.h"

namespace blockscale::sm90 {

// Boxes lie in shared memory as wgmma reads them and store_boxes() writes them.
inline bool make_map(CUtensorMap& map, CUtensorMapDataType type, const void* data,
                     const cuda::Extents& extents, int across, int down) {
  return cuda::make_tensor_map(map, type, data, extents, across, down, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

// The current device, and its number of multiprocessors.
inline cudaError_t current(int& device, int& multiprocessors) {
  const cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) multiprocessors = cuda::multiprocessors(device);
  return e;
}

// The input of the tile choice, for either kind of operands. `block`: elements of K per block.
inline cuda::GemmSize size_of(const Gemm& g, int block, int multiprocessors) {
  const bool by_contraction = g.grouping == Grouping::contraction;
  cuda::GemmSize s;
  s.grouped = g.grouping != Grouping::dense;
  s.groups = s.grouped ? g.groups : 1;
  s.rows = g.grouping == Grouping::rows ? ceil_div(g.m, s.groups) : g.m;
  s.columns = g.n;
  s.blocks = ceil_div(ceil_div(g.k, block), by_contraction ? s.groups : 1);
  s.f32 = g.d_f32;
  s.multiprocessors = multiprocessors;
  return s;
}

// Chooses the rest once there is a tile.
inline void choose_order(Gemm& g, const cuda::TileShape& tile, const cuda::GemmSize& size) {
  g.band = cuda::choose_band(tile, size);
  if (g.schedule == Schedule::chosen)
    g.schedule = cuda::wants_dynamic(tile, size) ? Schedule::dynamic : Schedule::fixed;
}

// The shapes of the tables as types: kernels take no values of a class (docs/decisions.md).
template <int kIndex, bool kSquare>
struct Fp8Shape {
  static constexpr cuda::TileShape kShape = cuda::kTiles[kIndex].with_scales(kSquare);
  static constexpr CodedFormat kCoded{};
};
template <int kIndex>
struct Bf16Shape {
  static constexpr cuda::TileShape kShape = cuda::kBf16Tiles[kIndex];
  static constexpr CodedFormat kCoded{};
};

// Describes operands as bytes: lines of `extent`, `row` apart. False where the copy engine cannot
// read them.
template <class T>
bool set_maps(GemmParams& p, const Gemm& g, int64_t extent, int64_t row) {
  const int64_t batch = g.grouping == Grouping::rows ? g.groups : 1;
  const int a_rows = static_cast<int>(std::min<int64_t>(T::kRows, round_up(g.m, 8)));
  p.stage_bytes = static_cast<uint32_t>(a_rows * kBlock + (T::kDecodes ? 0 : T::kBBytes));
  if (extent == 0) return true;
  const auto bytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return make_map(p.a, bytes, g.a, {{extent, g.m, 1}, {row, row * g.m}}, kBlock, a_rows) &&
         (T::kDecodes ||
          make_map(p.b, bytes, g.b, {{extent, g.n, batch}, {row, row * g.n}}, kBlock, T::kColumns));
}

template <class T, bool kSquare>
bool set_operands(GemmParams& p, const Fp8Gemm& g) {
  const int64_t padded = round_up(g.k, kBlock), blocks = padded / kBlock;
  p.a_scales = g.a_scales;
  p.b_scales = g.b_scales;
  p.a_scale_line =
      static_cast<int>(g.grouping == Grouping::rows ? g.a_scale_line : round_up(g.m, 4));
  p.b_scale_group = blocks * round_up(kSquare ? ceil_div(g.n, kBlock) : g.n, 4);
  p.out.device_alpha = g.device_alpha;
  p.out.factors = g.b_factors;
  p.problem.scale_unit = g.a_scale_unit;
  return set_maps<T>(p, g, padded, padded);
}

// A block of 128 bytes is 64 values of K.
template <class T, bool kSquare>
bool set_operands(GemmParams& p, const Bf16Gemm& g) {
  p.out.a_outer = g.a_outer;
  p.out.b_outer = g.b_outer;
  p.problem.storage_unit = g.storage_unit;
  return set_maps<T>(p, g, 2 * g.k, 2 * g.stride);
}

// B's codes are read where they lie.
template <class T, bool kSquare>
bool set_operands(GemmParams& p, const CodedGemm& g) {
  const ConstQuantized& b = g.coded;
  const StoredShape s = b.shape();
  p.coded = {.codes = b.codes,
             .scales = b.scales,
             .code_batch = s.code_bytes,
             .scale_batch = s.scale_count,
             .code_line = static_cast<int>(s.code_columns),
             .scale_line = static_cast<int>(s.scale_columns),
             .line_shift = std::countr_zero(static_cast<uint64_t>(s.scale_lines))};
  return set_operands<T, kSquare>(p, static_cast<const Bf16Gemm&>(g));
}

template <class T>
void set_problem(Problem& p, const Gemm& g) {
  p.m = static_cast<int>(g.m);
  p.n = static_cast<int>(g.n);
  p.k_blocks = static_cast<int>(ceil_div(T::kScaled ? g.k : 2 * g.k, kBlock));
  p.grouping = g.grouping;
  p.groups = g.grouping == Grouping::dense ? 1 : g.groups;
  p.group_rows = static_cast<int>(g.group_rows);
  // Run far from the other tiles of its group, a tail reads its part of B again: that pays only
  // where groups are many and not short.
  const bool late = g.groups >= 16 && g.group_rows >= int64_t{2} * T::kUnitRows * g.groups;
  p.tail_rows = late ? T::kUnitRows / 2 : 0;
  p.previous = g.previous;
  p.offsets = g.offsets;
  p.int64_offsets = g.int64_offsets;
  const int64_t across = ceil_div(g.n, T::kUnitColumns), down = ceil_div(g.m, T::kUnitRows);
  const int64_t band = std::min<int64_t>(g.band, down);
  p.units_across = Divisor(across);
  p.units_down = static_cast<int>(down);
  p.band = Divisor(band);
  p.band_units = Divisor(band * across);
  p.group_units = Divisor(down * across);
}

template <class T>
void set_output(GemmParams& p, const Gemm& g) {
  Output& out = p.out;
  out.d = g.d;
  out.row_stride = g.d_stride;
  out.group_stride = g.m * g.d_stride;
  out.alpha = g.alpha;
  out.bias = g.bias;
  out.bias_dtype = g.bias_dtype;
  out.f32 = g.d_f32;
  out.add = g.accumulate;
  const int64_t size = g.d_f32 ? 4 : 2, row = g.d_stride * size;
  const int64_t matrices = g.grouping == Grouping::contraction ? g.groups : 1;
  const auto type = g.d_f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto address = reinterpret_cast<uintptr_t>(g.d);
  out.pairs = address % (2 * size) == 0 && g.d_stride % 2 == 0;
  out.boxes = T::kStaged && address % 16 == 0 && row % 16 == 0 &&
              make_map(p.d, type, g.d, {{g.n, g.m, matrices}, {row, g.m * row}},
                       static_cast<int>(128 / size), 64);
}

// Clusters of one launch: as many as the device holds at once or, where the host knows of fewer
// units or K is split, one per unit.
template <class T>
int cluster_count(const Problem& p, int multiprocessors) {
  const int most = multiprocessors / T::kCluster;
  if (p.grouping == Grouping::rows) return most;
  const int64_t units = static_cast<int64_t>(p.group_units.by()) * p.groups;
  return units < most || T::kSplit ? static_cast<int>(units) : most;
}

// Allows a kernel its shared memory, once per device.
template <auto kKernel, int kBytes>
cudaError_t prepare(int device) {
  static PerDevice prepared;
  cudaError_t e = cudaSuccess;
  prepared.get(device, [&] {
    e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    return e == cudaSuccess;
  });
  return e;
}

// `Arguments`: Fp8Gemm, Bf16Gemm or CodedGemm.
template <class T, bool kSquare, bool kAE5m2, bool kBE5m2, class Arguments>
cudaError_t launch(const Arguments& g, int device, int multiprocessors, cudaStream_t stream) {
  constexpr auto kKernel = gemm_kernel<T, kSquare, kAE5m2, kBE5m2>;
  constexpr int kMostBytes = shared_bytes<T, kSquare>(kMaxGroups);
  static_assert(kMostBytes <= cuda::kMostSharedBytes);
  if (const cudaError_t e = prepare<kKernel, kMostBytes>(device); e != cudaSuccess) return e;

  GemmParams p{};
  if (!set_operands<T, kSquare>(p, g)) return cudaErrorInvalidValue;
  set_problem<T>(p.problem, g);
  set_output<T>(p, g);

  cudaLaunchConfig_t config{};
  const int clusters = cluster_count<T>(p.problem, multiprocessors);
  p.out.early = p.problem.grouping == Grouping::dense &&
                static_cast<int>(p.problem.group_units.by()) <= clusters;
  if (g.schedule == Schedule::dynamic) {
    p.problem.counter = counter_of(stream, g.previous);
    // None left, or none to be had for this stream or graph.
    if (p.problem.counter < 0 && g.previous != Previous::any)
      p.problem.counter = counter_of(stream, p.problem.previous = Previous::any);
  }
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
  return cudaLaunchKernelEx(&config, kKernel, p);
}

}  // namespace blockscale::sm90
