// Chooses a tile for a product of BF16 and coded values and launches its kernel.
#include <algorithm>
#include <array>
#include <utility>

#include "cuda/sm90/gemm.h"
#include "cuda/sm90/instance.h"

namespace blockscale::sm90 {
namespace {

using Launch = cudaError_t (*)(const CodedGemm&, int device, int multiprocessors, cudaStream_t);
using Launches = std::array<Launch, cuda::kCodedTileCount>;

constexpr CodedFormat coded(const QuantSpec& spec, gpu::Codec codec) {
  return {codec, spec.element, spec.scale, spec.block};
}
constexpr CodedFormat kFormats[] = {
    coded(kNvfp4, gpu::Codec::fp4),
    coded(kAmdfp4, gpu::Codec::fp4),
    coded(kMxfp8, gpu::Codec::e4m3fn),
    coded(kMxfp6, gpu::Codec::e2m3),
};
constexpr int kFormatCount = sizeof(kFormats) / sizeof(kFormats[0]);

template <int kIndex, int kFormat>
struct CodedShape {
  static constexpr cuda::TileShape kShape = cuda::kCodedTiles[kIndex].that_decodes();
  static constexpr CodedFormat kCoded = kFormats[kFormat];
};

template <int kFormat, int... kIndex>
constexpr Launches launches(std::integer_sequence<int, kIndex...>) {
  return {launch<Tile<CodedShape<kIndex, kFormat>, false>, true, false, false, CodedGemm>...};
}
template <int... kFormat>
constexpr std::array<Launches, kFormatCount> table(std::integer_sequence<int, kFormat...>) {
  return {launches<kFormat>(std::make_integer_sequence<int, cuda::kCodedTileCount>())...};
}

// Index into kFormats, or kFormatCount.
int format_of(const QuantSpec& spec) {
  return static_cast<int>(std::ranges::find_if(kFormats,
                                               [&](const CodedFormat& f) {
                                                 return f.element == spec.element &&
                                                        f.scale == spec.scale &&
                                                        f.block == spec.block;
                                               }) -
                          kFormats);
}

cuda::GemmSize coded_size(const CodedGemm& g, int multiprocessors) {
  cuda::GemmSize size = size_of(g, cuda::kStageValues, multiprocessors);
  size.scaled = false;
  size.code_bytes = 1.0 / codes_per_byte(g.coded.spec.element);
  return size;
}

}  // namespace

bool takes_coded(const ConstQuantized& b) {
  const StoredShape s = b.shape();
  const auto starts_at = [](const void* p, uintptr_t multiple) {
    return reinterpret_cast<uintptr_t>(p) % multiple == 0;
  };
  // Lines of scales, one to a byte, then hold whole pairs where a block has 16 codes.
  return format_of(b.spec) < kFormatCount && b.layout == StorageLayout{} && !b.groups &&
         s.extent % cuda::kStageValues == 0 && starts_at(b.codes, 16) && starts_at(b.scales, 2);
}

bool pays(const CodedGemm& g, bool needs_pass) {
  int device = 0, multiprocessors = 0;
  return current(device, multiprocessors) == cudaSuccess &&
         cuda::pays_to_decode(coded_size(g, multiprocessors), needs_pass);
}

cudaError_t coded_gemm(const CodedGemm& g, cudaStream_t stream) {
  if (g.m == 0 || g.n == 0 || g.groups == 0) return cudaSuccess;
  if (g.groups > kMaxGroups || g.grouping == Grouping::contraction || !takes_coded(g.coded))
    return cudaErrorInvalidValue;
  int device = 0, multiprocessors = 0;
  if (const cudaError_t e = current(device, multiprocessors); e != cudaSuccess) return e;
  const cuda::GemmSize size = coded_size(g, multiprocessors);
  CodedGemm chosen = g;
  if (g.tile < 0) chosen.tile = cuda::choose_tile(size);
  choose_order(chosen, cuda::kCodedTiles[chosen.tile], size);
  static constexpr auto kTable = table(std::make_integer_sequence<int, kFormatCount>());
  const Launches& of_format = kTable[static_cast<size_t>(format_of(g.coded.spec))];
  return of_format[static_cast<size_t>(chosen.tile)](chosen, device, multiprocessors, stream);
}

}  // namespace blockscale::sm90
