// max |x| after a spec's transform, one FP32 value per matrix.
#include "gpu/quantize/direct_tiles.h"
#include "gpu/quantize/host.h"
#include "gpu/quantize/loaders.h"

namespace blockscale::gpu {
namespace {

template <class Loader>
struct AmaxShared {
  static constexpr int kStages = Loader::kStages;
  typename Loader::Tile tile[kStages];
  typename Loader::Shared loader;
};

// max |x| of a run, and of two columns, after the transform or as they are.
template <bool kTransform, class Run>
BLOCKSCALE_DEVICE uint32_t amax_of_run(const Run& run, const TransformSigns& signs) {
  if constexpr (kTransform)
    return transformed_amax(signs, [&](float* v) { run.unpack(v); });
  else
    return run.amax_bits();
}
template <bool kTransform, class Columns>
BLOCKSCALE_DEVICE uint32_t amax_of_columns(const Columns& columns, const TransformSigns& signs) {
  uint32_t two[2];
  if constexpr (kTransform) {
    two[0] = transformed_amax(signs, [&](float* v) { columns.template unpack<0>(v); });
    two[1] = transformed_amax(signs, [&](float* v) { columns.template unpack<1>(v); });
  } else {
    columns.amax_bits(two);
  }
  return max(two[0], two[1]);
}

// Updates the result with the maximum that a whole warp has found.
BLOCKSCALE_DEVICE void add_to(float* result, uint32_t found) {
  found = warp_max(found > kInfBits ? kNanBits : found);
  // Most warps find a larger value already there.
  auto* to = reinterpret_cast<volatile unsigned int*>(result);
  if (threadIdx.x % 32 == 0 && found > *to) atomicMax(const_cast<unsigned int*>(to), found);
}

// `out` holds 0 beforehand, as does `before`, which with kBoth receives the maximum before the
// transform. Bits are ordered like magnitudes, NaN above all.
template <int kAxis, bool kTransform, bool kBoth, class Loader, bool kGrouped>
__global__ void __launch_bounds__(kThreads, Loader::kBlocks)
    amax_kernel(const __grid_constant__ QuantizeParams p, float* out, float* before) {
  after_previous();
  const TransformSigns& signs = p.row.transform;
  BLOCKSCALE_DYNAMIC_SHARED(memory);
  auto& shared = *reinterpret_cast<AmaxShared<Loader>*>(memory);
  auto& tile = shared.tile;
  const int thread = static_cast<int>(threadIdx.x);
  Loader loader(shared.loader);
  constexpr int kAhead = Loader::kStages - 1;
  WalkOver<false, kGrouped, true> walk(p), ahead(p);
  int left = walk.count(p);  // tiles
  if constexpr (kGrouped)
    if (p.plan.head->wrong)
      for (int g = static_cast<int>(blockIdx.x) * kThreads + thread; g < p.plan.count;
           g += static_cast<int>(gridDim.x) * kThreads)
        out[g] = bit_cast<float>(kNanBits);
  for (int i = 0; i < kAhead; ++i, ahead.advance(p))
    if (left > i) loader.begin(p.x, ahead.source(), tile[i], i);
  uint32_t largest = 0, plain = 0;
  Ring<kAhead + 1> ring;
#pragma unroll 1
  for (; left > 0; --left, ring.advance()) {
    const auto now = walk;
    const int matrix = now.at().batch;
    walk.advance(p);
    loader.finish(tile[ring.stage], ring.stage);
    if (loader.asks()) {
      const int stage = ring.stage == 0 ? kAhead : ring.stage - 1;
      if (left > kAhead) loader.begin(p.x, ahead.source(), tile[stage], stage);
      ahead.advance(p);
    }
    if constexpr (kGrouped) cut(tile[ring.stage], now.rows_left());
    // A tile's stage is released as soon as the tile is in registers.
    if constexpr (kAxis == -1) {
      typename Loader::Tile::Run runs[kRowRuns];
#pragma unroll
      for (int i = 0; i < kRowRuns; ++i)
        runs[i] = tile[ring.stage].row(thread / kRunsPerLine + i * kRowStep,
                                       thread % kRunsPerLine * kRun);
      loader.release(ring.stage);
#pragma unroll
      for (const auto& run : runs) {
        largest = max(largest, amax_of_run<kTransform>(run, signs));
        if constexpr (kBoth) plain = max(plain, run.amax_bits());
      }
    } else {
      const int warp = thread / 32;
      const auto columns = tile[ring.stage].columns(
          warp % kRunsPerLine * kRun, warp / kRunsPerLine * (kTile / 2) + thread % 32 * 2);
      loader.release(ring.stage);
      largest = max(largest, amax_of_columns<kTransform>(columns, signs));
      if constexpr (kBoth) plain = max(plain, amax_of_columns<false>(columns, signs));
    }
    if (left == 1 || walk.at().batch != matrix) {
      add_to(out + matrix, largest);
      if constexpr (kBoth) add_to(before + matrix, plain);
      largest = plain = 0;
    }
  }
}

template <int kAxis, bool kTransform, bool kBoth, class Loader, bool kGrouped>
void launch(QuantizeParams& p, float* out, float* before, NativeStream stream) {
  constexpr int kBytes = sizeof(AmaxShared<Loader>);
  constexpr auto kKernel = amax_kernel<kAxis, kTransform, kBoth, Loader, kGrouped>;
  const unsigned blocks = set_grid(p, false, Loader::kBlocks * multiprocessors(current_device()));
  start_with_shared<kKernel>(blocks, kThreads, kBytes, stream, p, out, before);
}

// Down the columns of one tile, which a thread block loads straight from global memory.
struct Found {
  uint32_t largest = 0, before = 0;
};
template <class In, bool kTransform, bool kBoth>
BLOCKSCALE_DEVICE Found amax_of_tile(const Source& x, const TransformSigns& signs,
                                     const TileAt& at) {
  const ColumnPart<Pass{Encoder::fp4_nearest, Format::e4m3}> part;
  typename In::Tile::Columns in[2];
  part.load(In{}, x, at, in);
  Found found;
#pragma unroll
  for (const auto& columns : in) {
    found.largest = max(found.largest, amax_of_columns<kTransform>(columns, signs));
    if constexpr (kBoth) found.before = max(found.before, amax_of_columns<false>(columns, signs));
  }
  return found;
}

// FP32 and FP16 with contiguous columns.
template <bool kTransform, bool kBoth>
__global__ void __launch_bounds__(kDirectThreads, 2)
    amax_floats_kernel(const __grid_constant__ QuantizeParams p, float* out, float* before) {
  after_previous();
  const TileAt at = direct_tile(kSidewaysShift);
  if (at.column >= p.x.columns) return;
  const Found found = amax_of_tile<FloatsIn, kTransform, kBoth>(p.x, p.row.transform, at);
  add_to(out + at.batch, found.largest);
  if constexpr (kBoth) add_to(before + at.batch, found.before);
}
void launch_floats(QuantizeParams& p, float* out, float* before, NativeStream stream) {
  const auto run = [&](auto kernel) {
    start(kernel, tiles_grid(p.tiles_down, p, kSidewaysShift), kDirectThreads, 0, stream, p, out,
          before);
  };
  if (p.row.out.spec.hadamard.dim == 0)
    run(amax_floats_kernel<false, false>);
  else if (before)
    run(amax_floats_kernel<true, true>);
  else
    run(amax_floats_kernel<true, false>);
}

// Small inputs, one tile per thread block; the second input has no transform.
struct AmaxTiles {
  Source x;
  TransformSigns signs;
  int transforms;
  float *out, *before;
  int parts;               // whether each tile has its own words
  Divisor matrix, across;  // tiles per matrix, and side by side
  uint32_t tiles;

  BLOCKSCALE_DEVICE TileAt at(uint32_t n) const {
    const uint32_t batch = matrix.divide(n), down = across.divide(n);
    return {static_cast<int>(batch), static_cast<int>(down) * kTile, static_cast<int>(n) * kTile};
  }
};
struct AmaxPair {
  AmaxTiles first, second;
};

// The maximum that a whole thread block has found.
BLOCKSCALE_DEVICE uint32_t block_max(uint32_t found, uint32_t* of_warps) {
  found = warp_max(found > kInfBits ? kNanBits : found);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
  __syncthreads();
  uint32_t largest = of_warps[0];
#pragma unroll
  for (int i = 1; i < kDirectThreads / 32; ++i) largest = max(largest, of_warps[i]);
  return largest;
}
template <class In, bool kTransform, bool kBoth>
BLOCKSCALE_DEVICE void take_tile(const AmaxTiles& p, uint32_t n) {
  __shared__ uint32_t of_warps[2][kDirectThreads / 32];
  const TileAt at = p.at(n);
  const Found found = amax_of_tile<In, kTransform, kBoth>(p.x, p.signs, at);
  if (!p.parts) {
    add_to(p.out + at.batch, found.largest);
    if constexpr (kBoth) add_to(p.before + at.batch, found.before);
    return;
  }
  const uint32_t largest = block_max(found.largest, of_warps[0]);
  if (threadIdx.x == 0) p.out[n] = bit_cast<float>(largest);
  if constexpr (kBoth) {
    const uint32_t before = block_max(found.before, of_warps[1]);
    if (threadIdx.x == 0) p.before[n] = bit_cast<float>(before);
  }
}
template <class In, bool kTransform, bool kBoth>
__global__ void __launch_bounds__(kDirectThreads, 2)
    amax_pair_kernel(const __grid_constant__ AmaxPair p) {
  after_previous();
  const AmaxTiles &a = p.first, &b = p.second;
  if (blockIdx.x < a.tiles)
    take_tile<In, kTransform, kBoth>(a, blockIdx.x);
  else
    take_tile<In, false, false>(b, blockIdx.x - a.tiles);
}
template <class In>
void launch_pair(const AmaxPair& p, NativeStream stream) {
  const auto run = [&](auto kernel) {
    start(kernel, p.first.tiles + p.second.tiles, kDirectThreads, 0, stream, p);
  };
  if (!p.first.transforms)
    run(amax_pair_kernel<In, false, false>);
  else if (p.first.before)
    run(amax_pair_kernel<In, true, true>);
  else
    run(amax_pair_kernel<In, true, false>);
}

AmaxTiles tiles_of(const Amax& amax) {
  const int64_t across = ceil_div(amax.x.columns, kTile);
  AmaxTiles t{};
  t.x = source_of(amax.x);
  t.signs = signs_of(amax.spec.hadamard);
  t.transforms = amax.spec.hadamard.dim != 0;
  t.out = amax.out, t.before = amax.before, t.parts = amax.parts;
  t.matrix = Divisor(across * ceil_div(amax.x.rows, kTile)), t.across = Divisor(across);
  t.tiles = static_cast<uint32_t>(tiles_in(amax.x));
  return t;
}
// Whether the kernel above can read this input as its first; as its second only without a
// transform.
bool by_tiles(const Amax& m) {
  const bool down = m.spec.hadamard.dim == 0 || (m.spec.hadamard.dim == kRun && m.axis == -2);
  return down && rows_are_near(m.x) && !m.groups && m.x.column_stride == 1 && tiles_in(m.x) != 0 &&
         (m.x.dtype != DType::bf16 || is_aligned(m.x));
}
// Tiles per multiprocessor up to which that kernel is the faster one, and up to which one launch
// reads two inputs: there the device has so little to do that it waits for the host.
constexpr int64_t kTilesAlone = 4, kTilesOfTwo = 8;
bool small_alone(const Amax& a) {
  return by_tiles(a) && tiles_in(a.x) <= kTilesAlone * multiprocessors(current_device());
}
bool small_pair(const Amax& a, const Amax& b) {
  return by_tiles(a) && by_tiles(b) && b.spec.hadamard.dim == 0 &&
         (a.x.dtype == DType::bf16) == (b.x.dtype == DType::bf16) &&
         tiles_in(a.x) + tiles_in(b.x) <= kTilesOfTwo * multiprocessors(current_device());
}
void launch_tiles(const AmaxPair& pair, DType dtype, NativeStream stream) {
  if (dtype == DType::bf16)
    launch_pair<Bf16In<true>>(pair, stream);
  else
    launch_pair<FloatsIn>(pair, stream);
}

template <class Loader, bool kGrouped>
void launch_on_axis(QuantizeParams& p, int axis, float* out, float* before, NativeStream stream) {
  if (p.row.out.spec.hadamard.dim == 0)  // the order of a maximum does not matter
    return launch<-1, false, false, Loader, kGrouped>(p, out, before, stream);
  if constexpr (!kGrouped) {
    if (before)
      return axis == -1 ? launch<-1, true, true, Loader, false>(p, out, before, stream)
                        : launch<-2, true, true, Loader, false>(p, out, before, stream);
  }
  axis == -1 ? launch<-1, true, false, Loader, kGrouped>(p, out, before, stream)
             : launch<-2, true, false, Loader, kGrouped>(p, out, before, stream);
}
template <class Loader>
void launch_on_axis(QuantizeParams& p, int axis, float* out, float* before, NativeStream stream) {
  if (p.plan.head)
    launch_on_axis<Loader, true>(p, axis, out, before, stream);
  else
    launch_on_axis<Loader, false>(p, axis, out, before, stream);
}

void add_one(const Amax& amax, const Stream& stream) {
  const auto& [x, spec, axis, groups, out, before, parts] = amax;
  const bool hadamard_pass = spec.hadamard.dim > kRun;
  ConstQuantized operand;  // only its shape matters
  operand.spec = spec, operand.axis = axis, operand.groups = groups;
  operand.rows = x.rows, operand.columns = x.columns;
  Plan plan;
  const bool positions = groups && hadamard_pass && axis == -2;
  if (groups)
    plan = make_plan(groups, x.rows, x.columns, positions ? &operand : nullptr, nullptr, positions,
                     stream);
  QuantizeParams p{};
  p.row.out.spec = spec;
  p.row.transform = signs_of(spec.hadamard);
  ConstMatrix y = x;
  if (hadamard_pass) {
    const StoredShape s = operand.shape();
    y = transformed(x, spec.hadamard, axis, positions ? s.padded : s.extent,
                    positions ? &plan : nullptr, stream);
    p.row.out.spec.hadamard = {};
  }
  set_input(p, y, groups ? &plan : nullptr);
  if (p.tiles == 0 && !groups) return;
  const bool down = p.row.out.spec.hadamard.dim == 0 || axis == -2;
  if (y.dtype != DType::bf16 && y.column_stride == 1 && !groups && down && fits_grid(p))
    launch_floats(p, out, before, native(stream));
  else if (!is_bf16_rows(y))
    launch_on_axis<AnyLoader>(p, axis, out, before, native(stream));
  else if (p.copies)
    launch_on_axis<AlignedLoader>(p, axis, out, before, native(stream));
  else
    launch_on_axis<UnalignedLoader>(p, axis, out, before, native(stream));
}

}  // namespace

void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, const Groups& groups, float* out,
          const Stream& stream) {
  const int64_t matrices = groups ? groups.count : x.batch;
  if (matrices == 0) return;
  const ForgetsFailure at_end;
  clear_async(out, static_cast<size_t>(matrices) * sizeof(float), native(stream));
  const Amax one{x, spec, axis, groups, out, nullptr, false};
  add_amaxes({&one, 1}, stream);
  check_launch("amax");
}

// Every thread block that quantizes a tile reads all the words, so there must not be many.
bool come_in_parts(std::span<const Amax> amaxes) {
  for (const Amax& a : amaxes)
    if (a.x.batch != 1) return false;
  if (amaxes.size() == 1) return small_alone(amaxes[0]);
  if (amaxes.size() != 2) return false;
  const Amax &a = amaxes[0], &b = amaxes[1];
  return tiles_in(a.x) + tiles_in(b.x) <= kTilesAlone * multiprocessors(current_device()) &&
         (small_pair(a, b) || small_pair(b, a));
}

void add_amaxes(std::span<const Amax> amaxes, const Stream& stream) {
  if (amaxes.size() == 2) {
    const Amax &a = amaxes[0], &b = amaxes[1];
    const bool in_order = small_pair(a, b);
    if (in_order || small_pair(b, a)) {
      const Amax &first = in_order ? a : b, &second = in_order ? b : a;
      return launch_tiles({tiles_of(first), tiles_of(second)}, a.x.dtype, native(stream));
    }
  }
  for (const Amax& a : amaxes)
    if (small_alone(a))
      launch_tiles({tiles_of(a), {}}, a.x.dtype, native(stream));
    else
      add_one(a, stream);
}

}  // namespace blockscale::gpu
