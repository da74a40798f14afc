// Hadamard transforms wider than a run, as a separate pass: see transformed() in host.h.
#include "gpu/quantize/host.h"
#include "gpu/quantize/loaders.h"

namespace blockscale::gpu {
namespace {

// The group at position `pos` along the contraction axis; past the last group, one without rows.
BLOCKSCALE_DEVICE const GroupAt& group_of(const Plan& plan, int64_t pos) {
  const GroupAt* at = plan.side[plan.side[0] ? 0 : 1];
  int low = 0, high = plan.count + 1;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (at[middle].position <= pos ? low : high) = middle;
  }
  return at[low];
}

// One warp transforms one block of kDim elements; element lane + 32 j is in the lane's v[j].
template <int kDim>
__global__ void __launch_bounds__(kThreads)
    hadamard_kernel(const __grid_constant__ Source source, Hadamard h, int axis, int64_t lines,
                    int64_t blocks, uint16_t* y, int64_t line_stride, int64_t pos_stride,
                    int64_t batch_stride, const __grid_constant__ Plan plan) {
  after_previous();
  constexpr int kEach = kDim / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t block = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / 32;
  if (block >= lines * blocks) return;
  const int line = static_cast<int>(block / blocks);
  const int pos = static_cast<int>(block % blocks) * kDim;
  const int64_t batch = blockIdx.y;
  int source_pos = pos, end = axis == -1 ? source.columns : source.rows;
  if (plan.head) {
    const GroupAt& g = group_of(plan, pos);
    source_pos = pos - static_cast<int>(g.position) + g.row;
    end = g.row + g.rows;
  }
  float v[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = lane + 32 * j;
    const int at = source_pos + i;
    v[j] = at >= end    ? 0.0f
           : axis == -1 ? AnyLoader::load(source, batch, line, at)
                        : AnyLoader::load(source, batch, at, line);
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
              const Plan* plan, const Stream& stream) {
  const int64_t lines = axis == -1 ? y.rows : y.columns;
  const int64_t blocks = (axis == -1 ? y.columns : y.rows) / h.dim;
  if (lines * blocks * y.batch == 0) return;
  constexpr int64_t kMost = 65535;  // matrices per grid
  auto run = [&](auto kernel) {
    for (int64_t first = 0; first < y.batch; first += kMost) {
      const dim3 grid(static_cast<unsigned>(ceil_div(lines * blocks * 32, kThreads)),
                      static_cast<unsigned>(std::min(y.batch - first, kMost)));
      ConstMatrix from = x;
      from.data =
          static_cast<const uint8_t*>(x.data) + first * x.batch_stride * dtype_bytes(x.dtype);
      auto* to = static_cast<uint16_t*>(const_cast<void*>(y.data)) + first * y.batch_stride;
      start(kernel, grid, kThreads, 0, native(stream), source_of(from), h, axis, lines, blocks, to,
            axis == -1 ? y.row_stride : y.column_stride,
            axis == -1 ? y.column_stride : y.row_stride, y.batch_stride, plan ? *plan : Plan{});
    }
  };
  if (h.dim == 32)
    run(hadamard_kernel<32>);
  else if (h.dim == 64)
    run(hadamard_kernel<64>);
  else
    run(hadamard_kernel<128>);
}

}  // namespace blockscale::gpu
