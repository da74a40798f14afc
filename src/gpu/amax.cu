// max |x| after a spec's transform, one FP32 a matrix; and transforms wider than a run.
#include "gpu/launch.h"
#include "gpu/quantize.h"

namespace blockscale::gpu {
namespace {

template <class Loader>
struct AmaxShared {
  static constexpr int kStages = Loader::kStages;
  typename Loader::Tile tile[kStages];
  typename Loader::Shared loader;
};

// `out` holds 0 before. The order of bits is that of magnitudes, NaN above all.
template <int kAxis, bool kTransform, class Loader>
__global__ void __launch_bounds__(kThreads, Loader::kBlocks)
    amax_kernel(const __grid_constant__ QuantizeParams p, float* out) {
  // The encoder plays no part; the pass says whether values are transformed.
  constexpr Pass kPass{Encoder::e4m3fn, Format::fp32, false, kTransform};
  const Side& side = p.row;
  BLOCKSCALE_DYNAMIC_SHARED(memory);
  auto& shared = *reinterpret_cast<AmaxShared<Loader>*>(memory);
  auto& tile = shared.tile;
  const int thread = static_cast<int>(threadIdx.x);
  Loader loader(shared.loader);
  constexpr int kAhead = Loader::kStages - 1;
  Walk<false> walk(p), ahead(p);
  const int grid = static_cast<int>(gridDim.x);
  int left = p.tiles - static_cast<int>(blockIdx.x);
  for (int i = 0; i < kAhead; ++i, ahead.advance(p))
    if (left > i * grid) loader.begin(p.x, ahead.at(), tile[i], i);
  uint32_t largest = 0;
  Turn<kAhead + 1> turn;
#pragma unroll 1
  for (; left > 0; left -= grid, turn.advance()) {
    const TileAt at = walk.at();
    walk.advance(p);
    loader.finish(tile[turn.stage], turn.stage);
    if (loader.asks()) {
      const int stage = turn.stage == 0 ? kAhead : turn.stage - 1;
      if (left > kAhead * grid) loader.begin(p.x, ahead.at(), tile[stage], stage);
      ahead.advance(p);
    }
    if constexpr (kAxis == -1) {
#pragma unroll
      for (int i = 0; i < kRowRuns; ++i) {
        RowValues<kPass, typename Loader::Tile> values;
        values.take(tile[turn.stage].row(thread / kRunsPerLine + i * kRowStep,
                                         thread % kRunsPerLine * kRun),
                    side);
        largest = max(largest, values.amax);
      }
    } else {
      ColumnValues<kPass, typename Loader::Tile> values;
      const int warp = thread / 32;
      values.take(tile[turn.stage].columns(warp % kRunsPerLine * kRun,
                                           warp / kRunsPerLine * (kTile / 2) + thread % 32 * 2),
                  side);
      largest = max(largest, max(values.amax[0], values.amax[1]));
    }
    loader.release(turn.stage);
    if (left <= grid || walk.batch != at.batch) {
      largest = warp_max(largest > kInfBits ? kNanBits : largest);
      if (thread % 32 == 0 && largest != 0)
        atomicMax(reinterpret_cast<unsigned int*>(out + at.batch), largest);
      largest = 0;
    }
  }
}

template <int kAxis, bool kTransform, class Loader>
void launch(QuantizeParams& p, float* out, NativeStream stream) {
  constexpr int kBytes = sizeof(AmaxShared<Loader>);
  constexpr auto kKernel = amax_kernel<kAxis, kTransform, Loader>;
  const unsigned blocks = set_grid(p, false, Loader::kBlocks * prepare<kKernel>(kBytes));
  start(kKernel, blocks, kThreads, kBytes, stream, p, out);
}

template <class Loader>
void launch_on_axis(QuantizeParams& p, int axis, float* out, NativeStream stream) {
  if (p.row.out.spec.hadamard.dim == 0)
    launch<-1, false, Loader>(p, out, stream);  // the order of a maximum does not matter
  else if (axis == -1)
    launch<-1, true, Loader>(p, out, stream);
  else
    launch<-2, true, Loader>(p, out, stream);
}

// One warp transforms one block of kDim elements, element lane + 32 j in lane's value[j].
template <int kDim>
__global__ void __launch_bounds__(kThreads)
    hadamard_kernel(const __grid_constant__ Source source, Hadamard h, int axis, int64_t lines,
                    int64_t blocks, uint16_t* y, int64_t line_stride, int64_t pos_stride,
                    int64_t batch_stride) {
  constexpr int kEach = kDim / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t block = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / 32;
  if (block >= lines * blocks) return;
  const int line = static_cast<int>(block / blocks);
  const int pos = static_cast<int>(block % blocks) * kDim;
  const int64_t batch = blockIdx.y;
  float v[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = lane + 32 * j;
    v[j] = axis == -1 ? AnyLoader::load(source, batch, line, pos + i)
                      : AnyLoader::load(source, batch, pos + i, line);
    if (h.negates(i)) v[j] = -v[j];
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const float other = bit_cast<float>(shuffle_xor(bit_cast<uint32_t>(v[j]), step));
      v[j] = lane & step ? __fsub_rn(other, v[j]) : __fadd_rn(v[j], other);
    }
  }
#pragma unroll
  for (int step = 1; step < kEach; step *= 2) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (j & step) continue;
      const float a = v[j], b = v[j + step];
      v[j] = __fadd_rn(a, b);
      v[j + step] = __fsub_rn(a, b);
    }
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    y[batch * batch_stride + line * line_stride + (pos + lane + 32 * j) * pos_stride] =
        to_bf16(__fadd_rn(__fmul_rn(v[j], hadamard_norm(kDim)), 0.0f));
}

}  // namespace

void hadamard(const ConstMatrix& x, const Hadamard& h, int axis, const ConstMatrix& y,
              const Stream& stream) {
  const int64_t lines = axis == -1 ? y.rows : y.columns;
  const int64_t blocks = (axis == -1 ? y.columns : y.rows) / h.dim;
  if (lines * blocks * y.batch == 0) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(lines * blocks * 32, kThreads)),
                  static_cast<unsigned>(y.batch));
  auto* to = static_cast<uint16_t*>(const_cast<void*>(y.data));
  auto run = [&](auto kernel) {
    start(kernel, grid, kThreads, 0, native(stream), source_of(x), h, axis, lines, blocks, to,
          axis == -1 ? y.row_stride : y.column_stride, axis == -1 ? y.column_stride : y.row_stride,
          y.batch_stride);
  };
  if (h.dim == 32)
    run(hadamard_kernel<32>);
  else if (h.dim == 64)
    run(hadamard_kernel<64>);
  else
    run(hadamard_kernel<128>);
  check_launch("quantize");
}

void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, float* out, const Stream& stream) {
  if (x.batch == 0) return;
  clear_async(out, static_cast<size_t>(x.batch) * sizeof(float), native(stream));
  QuantizeParams p{};
  p.row.out.spec = spec;
  ConstMatrix y = x;
  if (spec.hadamard.dim > kRun) {
    y = transformed(x, spec.hadamard, axis, stream);
    p.row.out.spec.hadamard = {};
  }
  set_input(p, y);
  if (p.tiles == 0) return;
  if (!is_bf16_rows(y))
    launch_on_axis<AnyLoader>(p, axis, out, native(stream));
  else if (p.copies)
    launch_on_axis<AlignedLoader>(p, axis, out, native(stream));
  else
    launch_on_axis<UnalignedLoader>(p, axis, out, native(stream));
  check_launch("amax");
}

}  // namespace blockscale::gpu
