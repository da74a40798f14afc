// The GPU backend's GEMM: operands of the core as arguments of the kernel that multiplies them.
#include "cuda/sm90/gemm.h"
#include "gpu/launch.h"

namespace blockscale::gpu {
namespace {

// Scales as the kernel copies them: mn_major lines of one value a row, whatever the layout, and
// 128x128 blocks repeated for each of their rows. A matrix of the batch for each blockIdx.y.
__global__ void spread_scales_kernel(const float* from, float* to, Layout layout, int lines,
                                     int blocks, int64_t scale_rows, int block_lines) {
  const int64_t pitch = padded_rows(Layout::mn_major, lines);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= pitch * blocks) return;
  from += blockIdx.y * layout_size(layout, scale_rows, blocks);
  const int64_t line = i % pitch, block = i / pitch;
  to[blockIdx.y * pitch * blocks + i] =
      line < lines ? from[layout_offset(layout, scale_rows, blocks, line / block_lines, block)]
                   : 0.0f;
}

// Groups of rows lie as the kernel reads them where a row of scales lies at the row of its codes.
bool rows_by_group(const ConstQuantized& q) { return q.groups && q.axis == -1; }

const float* line_scales(const ConstQuantized& q, const Stream& stream) {
  const float* scales = reinterpret_cast<const float*>(q.scales);
  const bool aligned = reinterpret_cast<uintptr_t>(scales) % 16 == 0;
  if (q.layout.scales == Layout::mn_major && !q.spec.square && aligned) return scales;
  const StoredShape s = q.shape();
  const int64_t count = layout_size(Layout::mn_major, s.lines, s.blocks);
  if (count * q.batch == 0) return scales;
  float* spread = static_cast<float*>(stream.workspace(q.batch * count * 4));
  const dim3 grid(static_cast<unsigned>(ceil_div(count, 256)), static_cast<unsigned>(q.batch));
  spread_scales_kernel<<<grid, 256, 0, native(stream)>>>(
      scales, spread, q.layout.scales, static_cast<int>(s.lines), static_cast<int>(s.blocks),
      s.scale_rows, q.spec.block_lines());
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

void check(const ConstQuantized& a) {
  if (const std::string needs = device_needs(); !needs.empty())
    fail("gemm", "device", device_text(), needs, "dequantize both operands and multiply them");
  if (a.groups.count > sm90::kMaxGroups)
    fail("gemm", "groups", a.groups.count, std::to_string(sm90::kMaxGroups) + " or fewer on a GPU");
  if (rows_by_group(a) && (a.spec.square || a.layout.scales != Layout::linear))
    fail("gemm", "a", to_string(a.spec) + " as " + to_string(a.layout) + ", rows in groups",
         "blocks of 1x128 with linear scales on a GPU", "relayout a, or quantize it as fp8_1x128");
}

}  // namespace

void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options, const Stream& stream) {
  check(a);
  const StoredShape sa = a.shape(), sb = b.shape();
  sm90::Fp8Gemm g;
  g.m = sa.lines;
  g.n = sb.lines;
  g.k = sa.extent;
  if (a.groups) {
    g.grouping = b.groups ? sm90::Grouping::contraction : sm90::Grouping::rows;
    g.groups = static_cast<int>(a.groups.count);
    g.offsets = a.groups.offsets;
    g.wide_offsets = a.groups.wide;
  }
  g.a = a.codes;
  g.b = b.codes;
  g.a_e5m2 = a.spec.element == Format::e5m2;
  g.b_e5m2 = b.spec.element == Format::e5m2;
  g.a_scales = line_scales(a, stream);
  g.b_square = b.spec.square;
  if (g.b_square) {
    const bool major = b.layout.scales == Layout::mn_major;
    g.b_scales = reinterpret_cast<const float*>(b.scales);
    g.b_scale_n = major ? 1 : sb.blocks;
    g.b_scale_k = major ? padded_rows(Layout::mn_major, sb.scale_rows) : 1;
    g.b_scale_group = sb.scale_count;
  } else {
    g.b_scales = line_scales(b, stream);
  }
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
  if (a.groups) settle(d, a.groups, a.rows, !b.groups && !options.accumulate, stream);
}

}  // namespace blockscale::gpu
