// The GPU backend's GEMMs: turns the core's operands into arguments of the kernels that multiply
// them.
#include "cuda/attribute.h"
#include "cuda/sm90/gemm.h"
#include "gpu/launch.h"

namespace blockscale::gpu {
namespace {

// Lays scales out as the kernel copies them: mn_major, whatever their layout, each repeated for
// `repeat` lines. Goes through shared memory, reading along K and writing along lines; blockIdx.z
// is the matrix of the batch.
__global__ void __launch_bounds__(256)
    spread_scales_kernel(const float* from, float* to, Layout layout, int lines, int blocks,
                         int64_t scale_rows, int repeat) {
  after_previous();
  constexpr int kSide = 32, kDown = 256 / kSide;
  __shared__ float tile[kSide][kSide + 1];
  const int pitch = static_cast<int>(padded_rows(Layout::mn_major, lines));
  from += blockIdx.z * layout_size(layout, scale_rows, blocks);
  to += int64_t{1} * blockIdx.z * pitch * blocks;
  const int first_line = static_cast<int>(blockIdx.x) * kSide;
  const int across = static_cast<int>(threadIdx.x) % kSide;
  const int down = static_cast<int>(threadIdx.x) / kSide;
  for (int first_block = static_cast<int>(blockIdx.y) * kSide; first_block < blocks;
       first_block += static_cast<int>(gridDim.y) * kSide) {
#pragma unroll
    for (int i = down; i < kSide; i += kDown) {
      const int line = first_line + i, block = first_block + across;
      const int row = repeat == 1 ? line : line / repeat;
      tile[i][across] = line < lines && block < blocks
                            ? from[layout_offset(layout, scale_rows, blocks, row, block)]
                            : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int i = down; i < kSide; i += kDown) {
      const int block = first_block + i, line = first_line + across;
      if (block < blocks && line < pitch) to[int64_t{1} * block * pitch + line] = tile[across][i];
    }
    __syncthreads();
  }
}

const float* scales_at(const ConstQuantized& q) { return reinterpret_cast<const float*>(q.scales); }

// `by_line`: one scale per line, even for 128x128 blocks. Where groups of rows begin does not
// change.
const float* mn_major_scales(const ConstQuantized& q, bool by_line, const Stream& stream) {
  const float* scales = scales_at(q);
  const bool aligned = reinterpret_cast<uintptr_t>(scales) % 16 == 0;
  const bool repeated = by_line && q.spec.square;
  if (q.layout.scales == Layout::mn_major && !repeated && aligned) return scales;
  const StoredShape s = q.shape();
  const int64_t lines = repeated ? s.lines : s.scale_rows;
  const int64_t count = layout_size(Layout::mn_major, lines, s.blocks);
  if (count * q.batch == 0) return scales;
  float* spread = static_cast<float*>(stream.workspace(q.batch * count * 4));
  const auto tiles = [](int64_t n) { return static_cast<unsigned>(ceil_div(n, 32)); };
  const dim3 grid(tiles(lines), std::min(tiles(s.blocks), 1u << 15),
                  static_cast<unsigned>(q.batch));
  start(spread_scales_kernel, grid, 256, 0, native(stream), scales, spread, q.layout.scales,
        static_cast<int>(lines), static_cast<int>(s.blocks), s.scale_rows,
        repeated ? q.spec.block : 1);
  check_launch("gemm");
  return spread;
}

void check_groups(const ConstQuantized& a) {
  if (a.groups.count > sm90::kMaxGroups)
    fail("gemm", "groups", a.groups.count, std::to_string(sm90::kMaxGroups) + " or fewer on a GPU");
  if (a.groups && a.axis == -1 && a.spec.square)
    fail("gemm", "a", to_string(a.spec) + ", rows in groups", "blocks of one row on a GPU",
         "quantize it as fp8_1x128 or mxfp4");
}

// The same operand in the linear layout, in the workspace if it is not linear yet.
ConstQuantized in_linear(const ConstQuantized& q, const Stream& stream) {
  if (q.layout == StorageLayout{}) return q;
  Quantized to{.spec = q.spec, .axis = q.axis, .rows = q.rows, .columns = q.columns};
  to.batch = q.batch, to.groups = q.groups;
  const StoredShape s = to.shape();
  to.codes = static_cast<uint8_t*>(stream.workspace(q.batch * s.code_bytes));
  to.scales = static_cast<uint8_t*>(stream.workspace(q.batch * s.scale_count));
  gpu::relayout(q, to, stream);
  return as_const(to);
}

void divide(sm90::Gemm& g, sm90::Grouping grouping, const Groups& groups, int64_t rows) {
  g.grouping = grouping;
  g.groups = static_cast<int>(groups.count);
  g.group_rows = rows;
  g.offsets = groups.offsets;
  g.int64_offsets = groups.int64_offsets;
}

// All but B and the groups.
sm90::Bf16Gemm bf16_arguments(const ConstMatrix& a, const Matrix& d, const Epilogue& e) {
  sm90::Bf16Gemm g;
  g.m = a.rows, g.k = a.columns;
  g.a = a.data, g.stride = a.row_stride;
  g.d = d.data, g.d_stride = d.row_stride, g.d_f32 = d.dtype == DType::f32;
  g.accumulate = e.accumulate;
  g.previous = Previous::operands;
  g.alpha = e.alpha, g.a_outer = e.a_outer, g.b_outer = e.b_outer;
  g.bias = e.bias, g.bias_dtype = e.bias_dtype;
  return g;
}

// FP8 operands; `b_factors` belong to the lines of b, or are null.
void multiply(const ConstQuantized& a, const ConstQuantized& b, const float* b_factors,
              const Matrix& d, const GemmOptions& options, const Stream& stream) {
  const StoredShape sa = a.shape(), sb = b.shape();
  sm90::Fp8Gemm g;
  g.m = sa.lines;
  g.n = sb.lines;
  g.k = sa.extent;
  if (a.groups) {
    divide(g, b.groups ? sm90::Grouping::contraction : sm90::Grouping::rows, a.groups, a.rows);
    g.a_scale_line = padded_rows(Layout::mn_major, sa.scale_rows);
    g.a_scale_unit = a.layout.scales == Layout::mn_major && !b_factors ? 4 : 1;
  }
  g.a = a.codes;
  g.b = b.codes;
  g.a_e5m2 = a.spec.element == Format::e5m2;
  g.b_e5m2 = b.spec.element == Format::e5m2;
  g.a_scales = mn_major_scales(a, true, stream);
  g.b_scales = mn_major_scales(b, false, stream);
  // The kernel that lays scales out has waited for all kernels before it.
  const bool spread = g.a_scales != scales_at(a) || g.b_scales != scales_at(b);
  g.previous = spread ? Previous::operands : options.previous;
  g.b_square = b.spec.square;
  g.b_factors = b_factors;
  g.d = d.data;
  g.d_stride = d.row_stride;
  g.d_f32 = d.dtype == DType::f32;
  g.accumulate = options.accumulate;
  g.alpha = options.alpha;
  g.device_alpha = options.device_alpha;
  g.bias = options.bias;
  g.bias_dtype = options.bias_dtype;
  note_failure(sm90::fp8_gemm(g, native(stream)));
  check_launch("gemm");
}

// Widened codes are operands that the preceding kernel has written, if there are any.
GemmOptions behind_widen(GemmOptions options, const ConstQuantized& a) {
  options.previous = a.shape().extent > 0 ? Previous::operands : Previous::any;
  return options;
}

}  // namespace

bool has_gemm_device() { return cuda::compute_capability(current_device()) == 90; }

void check_gemm_device() {
  const int capability = cuda::compute_capability(current_device());
  if (capability == 90) return;
  fail("gemm", "device", device_text(),
       "a GPU of compute capability 9.0 (H100, H200), whose tensor cores the FP8 GEMM is written "
       "for; this one has " +
           std::to_string(capability / 10) + "." + std::to_string(capability % 10),
       "dequantize both operands and multiply them");
}

bool widens(const QuantSpec& a, const QuantSpec& b, int64_t groups) {
  return is_mxfp4(a) && is_mxfp4(b) && !(groups && a.square) && groups <= sm90::kMaxGroups &&
         has_gemm_device();
}

bool widens(const ConstQuantized& a, const ConstQuantized& b) {
  if (b.groups.count == 0) return widens(a.spec, b.spec, a.groups.count);
  // Where groups along the contraction axis lie depends on the layout.
  return fits_widened(a.shape().extent, a.groups.count) && a.layout == StorageLayout{} &&
         b.layout == StorageLayout{} && a.groups.count <= sm90::kMaxGroups &&
         widens(a.spec, b.spec, 0);
}

void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options, const Stream& stream) {
  check_gemm_device();
  check_groups(a);
  if (!is_mxfp4(a.spec)) return multiply(a, b, nullptr, d, options, stream);
  const WidenedPair widened = widen(in_linear(a, stream), in_linear(b, stream), stream);
  multiply(widened.a.q, widened.b.q, widened.b.line_scales, d, behind_widen(options, a), stream);
}

void gemm(const ConstQuantized& a, const WidenedOperand& b, const Matrix& d,
          const GemmOptions& options, const Stream& stream) {
  check_gemm_device();
  check_groups(a);
  if (a.spec != kWidened)
    fail("gemm", "a", to_string(a.spec), "codes that have been widened, as those of b");
  multiply(a, b.q, b.line_scales, d, options, stream);
}

bool multiplies_bf16(const ProductSize& s, bool needs_pass) {
  // The copy engine counts the bytes of a line in 31 bits.
  if (s.groups > sm90::kMaxGroups || s.k >= int64_t{1} << 30 || !has_gemm_device()) return false;
  if (s.groups) return needs_pass;
  // Of some products that have few tiles, cuBLAS (13.0, H200) leaves out the last k % 64 terms of
  // every sum. Nothing else tells them from others: k was 11528 and more, D up to 1000 x 256.
  constexpr int64_t kTailLost = 8192, kFew = 1 << 20;
  if (s.k % 64 != 0 && s.k >= kTailLost && s.m * s.n <= kFew) return true;
  sm90::Bf16Gemm g;
  g.m = s.m, g.n = s.n, g.k = s.k, g.d_f32 = s.f32;
  return needs_pass ? sm90::pays(g) : sm90::is_brief(g);
}

bool decodes_within(const ConstQuantized& b, const ProductSize& s, bool needs_pass) {
  if (s.groups > sm90::kMaxGroups || s.k >= int64_t{1} << 30 || !has_gemm_device()) return false;
  if (!sm90::takes_coded(b)) return false;
  sm90::CodedGemm g;
  g.m = s.m, g.n = s.n, g.k = s.k, g.d_f32 = s.f32, g.coded = b;
  if (s.groups) g.grouping = sm90::Grouping::rows, g.groups = static_cast<int>(s.groups);
  return sm90::pays(g, needs_pass);
}

void multiply_bf16(const ConstMatrix& a, const ConstMatrix& b, const Matrix& d,
                   const Groups& groups, int64_t rows, int64_t unit, const Epilogue& e,
                   const Stream& stream) {
  sm90::Bf16Gemm g = bf16_arguments(a, d, e);
  g.n = b.rows, g.b = b.data;
  if (groups) divide(g, unit ? sm90::Grouping::contraction : sm90::Grouping::rows, groups, rows);
  if (unit) g.storage_unit = static_cast<int>(unit);
  note_failure(sm90::bf16_gemm(g, native(stream)));
  check_launch("gemm");
}

void multiply_bf16(const ConstMatrix& a, const ConstQuantized& b, const Matrix& d,
                   const Groups& groups, int64_t rows, const Epilogue& e, const Stream& stream) {
  sm90::CodedGemm g{bf16_arguments(a, d, e), b};
  g.n = b.rows;
  if (groups) divide(g, sm90::Grouping::rows, groups, rows);
  note_failure(sm90::coded_gemm(g, native(stream)));
  check_launch("gemm");
}

}  // namespace blockscale::gpu
