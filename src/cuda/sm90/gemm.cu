// Chooses a tile for FP8 operands and launches its kernel.
#include <array>
#include <utility>

#include "cuda/sm90/gemm.h"
#include "cuda/sm90/instance.h"

namespace blockscale::sm90 {

namespace {

using Launch = cudaError_t (*)(const Fp8Gemm&, int device, int multiprocessors, cudaStream_t);
using Table = std::array<Launch, cuda::kTileCount>;

// Every tile's kernel for one kind of operands; null where it is not compiled.
template <int kIndex, bool kSquare, bool kAE5m2, bool kBE5m2>
constexpr Launch entry() {
  if constexpr (cuda::kTiles[kIndex].compiled(kSquare, kAE5m2, kBE5m2))
    return launch<Tile<Fp8Shape<kIndex, kSquare>, true>, kSquare, kAE5m2, kBE5m2, Fp8Gemm>;
  return nullptr;
}
template <bool kSquare, bool kAE5m2, bool kBE5m2, int... kIndex>
constexpr Table table(std::integer_sequence<int, kIndex...>) {
  return {entry<kIndex, kSquare, kAE5m2, kBE5m2>()...};
}
template <bool kSquare>
const Table& table_for(bool a_e5m2, bool b_e5m2) {
  constexpr auto kAll = std::make_integer_sequence<int, cuda::kTileCount>();
  static constexpr Table tables[] = {
      table<kSquare, false, false>(kAll), table<kSquare, false, true>(kAll),
      table<kSquare, true, false>(kAll), table<kSquare, true, true>(kAll)};
  return tables[2 * a_e5m2 + b_e5m2];
}

}  // namespace

cudaError_t fp8_gemm(const Fp8Gemm& g, cudaStream_t stream) {
  if (g.m == 0 || g.n == 0 || g.groups == 0) return cudaSuccess;
  if (g.groups > kMaxGroups) return cudaErrorInvalidValue;
  int device = 0, multiprocessors = 0;
  if (const cudaError_t e = current(device, multiprocessors); e != cudaSuccess) return e;
  cuda::GemmSize size = size_of(g, kBlock, multiprocessors);
  size.square = g.b_square;
  size.a_e5m2 = g.a_e5m2, size.b_e5m2 = g.b_e5m2;
  Fp8Gemm chosen = g;
  if (g.tile < 0) chosen.tile = cuda::choose_tile(size);
  if (size.grouped && cuda::kTiles[chosen.tile].split) return cudaErrorInvalidValue;
  choose_order(chosen, cuda::kTiles[chosen.tile], size);
  const Table& launches =
      g.b_square ? table_for<true>(g.a_e5m2, g.b_e5m2) : table_for<false>(g.a_e5m2, g.b_e5m2);
  const Launch launch = launches[chosen.tile];
  if (!launch) return cudaErrorInvalidValue;  // a tile of the caller's, not compiled for E5M2
  return launch(chosen, device, multiprocessors, stream);
}

}  // namespace blockscale::sm90
