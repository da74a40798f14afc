// max |x| after a spec's transform, one FP32 a matrix.
#include "gpu/launch.h"
#include "gpu/quantize/direct_tiles.h"
#include "gpu/quantize/quantize.h"

namespace blockscale::gpu {
namespace {

template <class Loader>
struct AmaxShared {
  static constexpr int kStages = Loader::kStages;
  typename Loader::Tile tile[kStages];
  typename Loader::Shared loader;
};

// What a warp has found, in all.
BLOCKSCALE_DEVICE void add_to(float* result, uint32_t found) {
  found = warp_max(found > kInfBits ? kNanBits : found);
  // Most warps find that a larger one has been there.
  auto* to = reinterpret_cast<volatile unsigned int*>(result);
  if (threadIdx.x % 32 == 0 && found > *to) atomicMax(const_cast<unsigned int*>(to), found);
}

// `out` holds 0 before, and so does `before`, which takes the maximum before the transform with
// kBoth. The order of bits is that of magnitudes, NaN above all.
template <int kAxis, bool kTransform, bool kBoth, class Loader, bool kGrouped>
__global__ void __launch_bounds__(kThreads, Loader::kBlocks)
    amax_kernel(const __grid_constant__ QuantizeParams p, float* out, float* before) {
  after_previous();
  // The encoder plays no part; the pass says whether values are transformed.
  constexpr Pass kPass{Encoder::e4m3fn, Format::fp32, false, kTransform};
  const Side& side = p.row;
  BLOCKSCALE_DYNAMIC_SHARED(memory);
  auto& shared = *reinterpret_cast<AmaxShared<Loader>*>(memory);
  auto& tile = shared.tile;
  const int thread = static_cast<int>(threadIdx.x);
  Loader loader(shared.loader);
  constexpr int kAhead = Loader::kStages - 1;
  WalkOver<false, kGrouped, true> walk(p), ahead(p);
  int left = walk.count(p);  // tiles
  if constexpr (kGrouped)
    if (p.plan.head->bad)
      for (int g = static_cast<int>(blockIdx.x) * kThreads + thread; g < p.plan.count;
           g += static_cast<int>(gridDim.x) * kThreads)
        out[g] = bit_cast<float>(kNanBits);
  for (int i = 0; i < kAhead; ++i, ahead.advance(p))
    if (left > i) loader.begin(p.x, ahead.source(), tile[i], i);
  uint32_t largest = 0, plain = 0;
  Turn<kAhead + 1> turn;
#pragma unroll 1
  for (; left > 0; --left, turn.advance()) {
    const auto now = walk;
    const int matrix = now.at().batch;
    walk.advance(p);
    loader.finish(tile[turn.stage], turn.stage);
    if (loader.asks()) {
      const int stage = turn.stage == 0 ? kAhead : turn.stage - 1;
      if (left > kAhead) loader.begin(p.x, ahead.source(), tile[stage], stage);
      ahead.advance(p);
    }
    if constexpr (kGrouped) cut(tile[turn.stage], now.rows_left());
    // A tile is given back as soon as it is in registers.
    if constexpr (kAxis == -1) {
      typename Loader::Tile::Run runs[kRowRuns];
#pragma unroll
      for (int i = 0; i < kRowRuns; ++i)
        runs[i] = tile[turn.stage].row(thread / kRunsPerLine + i * kRowStep,
                                       thread % kRunsPerLine * kRun);
      loader.release(turn.stage);
#pragma unroll
      for (const auto& run : runs) {
        RowValues<kPass, typename Loader::Tile> values;
        values.take(run, side);
        largest = max(largest, values.amax);
        if constexpr (kBoth) plain = max(plain, values.plain.amax_bits());
      }
    } else {
      const int warp = thread / 32;
      const auto columns = tile[turn.stage].columns(
          warp % kRunsPerLine * kRun, warp / kRunsPerLine * (kTile / 2) + thread % 32 * 2);
      loader.release(turn.stage);
      ColumnValues<kPass, typename Loader::Tile> values;
      values.take(columns, side);
      largest = max(largest, max(values.amax[0], values.amax[1]));
      if constexpr (kBoth) {
        uint32_t two[2];
        values.plain.amax_bits(two);
        plain = max(plain, max(two[0], two[1]));
      }
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
  const unsigned blocks = set_grid(p, false, Loader::kBlocks * prepare<kKernel>(kBytes));
  start(kKernel, blocks, kThreads, kBytes, stream, p, out, before);
}

// The same down the columns of one tile, which a block of threads loads straight from global
// memory.
template <class In, bool kTransform, bool kBoth>
BLOCKSCALE_DEVICE void amax_of_tile(const Source& x, const Side& side, const TileAt& at, float* out,
                                    float* before) {
  constexpr Pass kPass{Encoder::fp4_nearest, Format::e4m3, false, kTransform};
  const ColumnPart<kPass> part;
  typename In::Tile::Columns in[2];
  part.load(In{}, x, at, in);
  uint32_t largest = 0, plain = 0;
#pragma unroll
  for (const auto& columns : in) {
    ColumnValues<kPass, typename In::Tile> values;
    values.take(columns, side);
    largest = max(largest, max(values.amax[0], values.amax[1]));
    if constexpr (kBoth) {
      uint32_t two[2];
      columns.amax_bits(two);
      plain = max(plain, max(two[0], two[1]));
    }
  }
  add_to(out + at.batch, largest);
  if constexpr (kBoth) add_to(before + at.batch, plain);
}

// FP32 and FP16 with contiguous columns.
template <bool kTransform, bool kBoth>
__global__ void __launch_bounds__(kDirectThreads, 2)
    amax_floats_kernel(const __grid_constant__ QuantizeParams p, float* out, float* before) {
  after_previous();
  const TileAt at = direct_tile(kSidewaysShift);
  if (at.column >= p.x.columns) return;
  amax_of_tile<FloatsIn, kTransform, kBoth>(p.x, p.row, at, out, before);
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

// Two small inputs, a tile for each block of threads; the second without a transform.
struct AmaxTiles {
  Source x;
  Side side;
  float *out, *before;
  Divisor matrix, across;  // tiles of a matrix, and beside each other
  uint32_t tiles;

  BLOCKSCALE_DEVICE TileAt at(uint32_t n) const {
    const uint32_t batch = matrix.divide(n), down = across.divide(n);
    return {static_cast<int>(batch), static_cast<int>(down) * kTile, static_cast<int>(n) * kTile};
  }
};
struct AmaxPair {
  AmaxTiles first, second;
};
template <class In, bool kTransform, bool kBoth>
__global__ void __launch_bounds__(kDirectThreads, 2)
    amax_pair_kernel(const __grid_constant__ AmaxPair p) {
  after_previous();
  const AmaxTiles &a = p.first, &b = p.second;
  if (blockIdx.x < a.tiles)
    amax_of_tile<In, kTransform, kBoth>(a.x, a.side, a.at(blockIdx.x), a.out, a.before);
  else
    amax_of_tile<In, false, false>(b.x, b.side, b.at(blockIdx.x - a.tiles), b.out, nullptr);
}
template <class In>
void launch_pair(const AmaxPair& p, NativeStream stream) {
  const auto run = [&](auto kernel) {
    start(kernel, p.first.tiles + p.second.tiles, kDirectThreads, 0, stream, p);
  };
  if (p.first.side.out.spec.hadamard.dim == 0)
    run(amax_pair_kernel<In, false, false>);
  else if (p.first.before)
    run(amax_pair_kernel<In, true, true>);
  else
    run(amax_pair_kernel<In, true, false>);
}

AmaxTiles tiles_of(const Amax& amax) {
  const int64_t across = ceil_div(amax.x.columns, kTile);
  const int64_t matrix = across * ceil_div(amax.x.rows, kTile);
  AmaxTiles t{};
  t.x = source_of(amax.x);
  t.side.out.spec = amax.spec;
  t.side.set_transform(amax.spec.hadamard);
  t.out = amax.out, t.before = amax.before;
  t.matrix = Divisor(matrix), t.across = Divisor(across);
  t.tiles = static_cast<uint32_t>(matrix * amax.x.batch);
  return t;
}
// Whether one launch reads both: where the device has so little to do that the host is waited for.
bool small_pair(const Amax& a, const Amax& b) {
  constexpr int64_t kTilesEach = 8;  // of a multiprocessor
  const auto tiles = [](const ConstMatrix& x) {
    return ceil_div(x.columns, kTile) * ceil_div(x.rows, kTile) * x.batch;
  };
  const auto direct = [](const Amax& m) {
    const bool down = m.spec.hadamard.dim == 0 || (m.spec.hadamard.dim == kRun && m.axis == -2);
    // Bytes of the rows of a tile are counted in 32 bits.
    const bool near = m.x.row_stride >= 0 && m.x.row_stride < 1 << 22;
    return down && near && !m.groups && m.x.column_stride == 1 &&
           m.x.rows * m.x.columns * m.x.batch != 0 && (m.x.dtype != DType::bf16 || is_aligned(m.x));
  };
  return direct(a) && direct(b) && b.spec.hadamard.dim == 0 &&
         (a.x.dtype == DType::bf16) == (b.x.dtype == DType::bf16) &&
         tiles(a.x) + tiles(b.x) <= kTilesEach * multiprocessors(current_device());
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

}  // namespace

void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, const Groups& groups, float* out,
          const Stream& stream) {
  const int64_t matrices = groups ? groups.count : x.batch;
  if (matrices == 0) return;
  clear_async(out, static_cast<size_t>(matrices) * sizeof(float), native(stream));
  add_amax({x, spec, axis, groups, out, nullptr}, stream);
  check_launch("amax");
}

void add_amax(const Amax& amax, const Stream& stream) {
  const auto& [x, spec, axis, groups, out, before] = amax;
  const bool wide = spec.hadamard.dim > kRun;
  ConstQuantized operand;  // only its shape is of interest
  operand.spec = spec, operand.axis = axis, operand.groups = groups;
  operand.rows = x.rows, operand.columns = x.columns;
  Plan plan;
  const bool positions = groups && wide && axis == -2;
  if (groups)
    plan = make_plan(groups, x.rows, x.columns, positions ? &operand : nullptr, nullptr, positions,
                     stream);
  QuantizeParams p{};
  p.row.out.spec = spec;
  p.row.set_transform(spec.hadamard);
  ConstMatrix y = x;
  if (wide) {
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

void add_amaxes(const Amax& a, const Amax& b, const Stream& stream) {
  if (small_pair(b, a) && !small_pair(a, b)) return add_amaxes(b, a, stream);
  if (!small_pair(a, b)) {
    add_amax(a, stream);
    return add_amax(b, stream);
  }
  const AmaxPair pair{tiles_of(a), tiles_of(b)};
  if (a.x.dtype == DType::bf16)
    launch_pair<Bf16In<true>>(pair, native(stream));
  else
    launch_pair<FloatsIn>(pair, native(stream));
}

}  // namespace blockscale::gpu
