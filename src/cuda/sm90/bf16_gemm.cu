// Chooses a tile for BF16 operands and launches its kernel.
#include <array>
#include <utility>

#include "cuda/sm90/gemm.h"
#include "cuda/sm90/instance.h"

namespace blockscale::sm90 {
namespace {

using Launch = cudaError_t (*)(const Bf16Gemm&, int device, int multiprocessors, cudaStream_t);

template <int... kIndex>
constexpr auto table(std::integer_sequence<int, kIndex...>) {
  return std::array<Launch, sizeof...(kIndex)>{
      launch<Tile<Bf16Shape<kIndex>, false>, true, false, false, Bf16Gemm>...};
}

cuda::GemmSize bf16_size(const Bf16Gemm& g, int multiprocessors) {
  cuda::GemmSize size = size_of(g, cuda::kStageValues, multiprocessors);
  size.scaled = false;
  return size;
}

}  // namespace

bool pays(const Bf16Gemm& g) {
  int device = 0, multiprocessors = 0;
  return current(device, multiprocessors) == cudaSuccess &&
         cuda::pays(bf16_size(g, multiprocessors));
}
bool is_brief(const Bf16Gemm& g) {
  int device = 0, multiprocessors = 0;
  return current(device, multiprocessors) == cudaSuccess &&
         cuda::is_brief(bf16_size(g, multiprocessors));
}

cudaError_t bf16_gemm(const Bf16Gemm& g, cudaStream_t stream) {
  static constexpr auto kLaunches = table(std::make_integer_sequence<int, cuda::kBf16TileCount>());
  if (g.m == 0 || g.n == 0 || g.groups == 0) return cudaSuccess;
  if (g.groups > kMaxGroups || g.storage_unit % (kStepBytes / 2) != 0) return cudaErrorInvalidValue;
  int device = 0, multiprocessors = 0;
  if (const cudaError_t e = current(device, multiprocessors); e != cudaSuccess) return e;
  const cuda::GemmSize size = bf16_size(g, multiprocessors);
  Bf16Gemm chosen = g;
  if (g.tile < 0) chosen.tile = cuda::choose_tile(size);
  choose_order(chosen, cuda::kBf16Tiles[chosen.tile], size);
  return kLaunches[static_cast<size_t>(chosen.tile)](chosen, device, multiprocessors, stream);
}

}  // namespace blockscale::sm90
