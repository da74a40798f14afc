// The GPU backend's GEMM: operands of the core as arguments of the kernel that multiplies them.
#include "cuda/sm90/gemm.h"
#include "gpu/launch.h"

namespace blockscale::gpu {
namespace {

// Scales as the kernel copies them: mn_major, whatever the layout, each repeated for `repeat`
// lines.
__global__ void spread_scales_kernel(const float* from, float* to, Layout layout, int lines,
                                     int blocks, int64_t scale_rows, int repeat) {
  const int64_t pitch = padded_rows(Layout::mn_major, lines);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= pitch * blocks) return;
  const int64_t line = i % pitch, block = i / pitch;
  to[i] =
      line < lines ? from[layout_offset(layout, scale_rows, blocks, line / repeat, block)] : 0.0f;
}

// `by_line`: one a line also for 128x128 blocks.
const float* mn_major_scales(const ConstQuantized& q, bool by_line, const Stream& stream) {
  const float* scales = reinterpret_cast<const float*>(q.scales);
  const bool aligned = reinterpret_cast<uintptr_t>(scales) % 16 == 0;
  const bool repeated = by_line && q.spec.square;
  if (q.layout.scales == Layout::mn_major && !repeated && aligned) return scales;
  const StoredShape s = q.shape();
  const int64_t lines = repeated ? s.lines : s.scale_rows;
  const int64_t count = layout_size(Layout::mn_major, lines, s.blocks);
  if (count == 0) return scales;
  float* spread = static_cast<float*>(stream.workspace(count * 4));
  spread_scales_kernel<<<static_cast<unsigned>(ceil_div(count, 256)), 256, 0, native(stream)>>>(
      scales, spread, q.layout.scales, static_cast<int>(lines), static_cast<int>(s.blocks),
      s.scale_rows, repeated ? q.spec.block : 1);
  return spread;
}

// What the current device lacks, in words; empty when it runs the kernel.
std::string device_needs() {
  int device = current_device(), major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (major == 9 && minor == 0) return "";
  return "a GPU of compute capability 9.0 (H100, H200), whose tensor cores the FP8 GEMM is written "
         "for; this one has " +
         std::to_string(major) + "." + std::to_string(minor);
}

}  // namespace

void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options, const Stream& stream) {
  if (const std::string needs = device_needs(); !needs.empty())
    fail("gemm", "device", device_text(), needs, "dequantize both operands and multiply them");
  const StoredShape sa = a.shape(), sb = b.shape();
  sm90::Fp8Gemm g;
  g.m = sa.lines;
  g.n = sb.lines;
  g.k = sa.extent;
  g.a = a.codes;
  g.b = b.codes;
  g.a_e5m2 = a.spec.element == Format::e5m2;
  g.b_e5m2 = b.spec.element == Format::e5m2;
  g.a_scales = mn_major_scales(a, true, stream);
  g.b_scales = mn_major_scales(b, false, stream);
  g.b_square = b.spec.square;
  g.d = d.data;
  g.d_stride = d.row_stride;
  g.d_f32 = d.dtype == DType::f32;
  g.accumulate = options.accumulate;
  g.alpha = options.alpha;
  g.device_alpha = options.device_alpha;
  g.bias = options.bias;
  if (const Error_t e = sm90::fp8_gemm(g, native(stream)); e != kSuccess)
    fail("gemm", "device", error_text(e), "a GPU that this build has kernels for",
         "see `blockscale doctor`");
}

}  // namespace blockscale::gpu
