// Chooses a tile and launches the kernel for it.
#include <array>
#include <utility>

#include "cuda/sm90/gemm.h"
#include "cuda/sm90/instance.h"

namespace blockscale::sm90 {

bool describe(CUtensorMap& map, CUtensorMapDataType type, const void* data, const Extents& extents,
              int box_across, int box_down, bool swizzled) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &result) != cudaSuccess)
      found = nullptr;
    return reinterpret_cast<Encode>(found);
  }();
  if (!encode) return false;
  const auto& [size, stride] = extents;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(size[0]), static_cast<cuuint64_t>(size[1]),
                              static_cast<cuuint64_t>(size[2])};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride[0]),
                                static_cast<cuuint64_t>(stride[1])};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_across), static_cast<cuuint32_t>(box_down),
                            1};
  const cuuint32_t steps[] = {1, 1, 1};
  return encode(&map, type, 3, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

namespace {

using Launch = cudaError_t (*)(const Fp8Gemm&, cudaStream_t);
template <bool kSquare, int... kIndex>
constexpr std::array<Launch, sizeof...(kIndex)> table(std::integer_sequence<int, kIndex...>) {
  return {launch<kIndex, kSquare, false, false>...};
}

}  // namespace

cudaError_t fp8_gemm(const Fp8Gemm& g, cudaStream_t stream) {
  if (g.m == 0 || g.n == 0) return cudaSuccess;
  static constexpr auto square = table<true>(std::make_integer_sequence<int, cuda::kTileCount>());
  static constexpr auto rows = table<false>(std::make_integer_sequence<int, cuda::kTileCount>());
  const int tile = g.tile < 0 ? 0 : g.tile;
  return (g.b_square ? square : rows)[tile](g, stream);
}

}  // namespace blockscale::sm90
