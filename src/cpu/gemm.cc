// GEMM: both operands are decoded, scales included, into FP32 panels, block by block; an FP32
// microkernel multiplies panels. Outer scales, alpha and bias are applied once, at the end.
//
// A product scale * code is exact for E8M0, E4M3 and UE5M3 scales and rounded once for FP32 ones,
// so the error bound of numerics section 10 holds with c = 1 + 2/K for the sums.
#include "cpu/cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gemm.cc"
#include "hwy/foreach_target.h"
//
#include <algorithm>
#include <memory>

#include "cpu/decode-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// A microkernel's tile: kTileM rows by two vectors, which with the loads fills the registers.
inline constexpr int64_t kTileM = HWY_TARGET <= HWY_AVX3 ? 12 : HWY_TARGET <= HWY_AVX2 ? 6 : 4;
HWY_INLINE constexpr int64_t tile_n() { return 2 * static_cast<int64_t>(lanes()); }

// Blocks of the loops around it: a panel of B (kBlockK x tile_n) and a block of A (kBlockM x
// kBlockK) stay in the L2 cache together.
inline constexpr int64_t kBlockK = 512;
inline constexpr int64_t kBlockM = 96;  // a multiple of every kTileM
inline constexpr int64_t kBlockN = 1024;

// Decodes positions [k0, k0 + depth) of the `width` lines from `line` on into panel[k][width].
// Whole vectors are stored in order of k, so what runs over the width is overwritten next; the
// panel needs room for one vector more. depth is a multiple of 16.
template <int kM>
HWY_INLINE void pack_panel(const Reader& reader, const Decoder<kM>& decoder, int64_t line,
                           int64_t width, int64_t k0, int64_t depth, float* panel) {
  constexpr int64_t kRun = kM == 1 ? 32 : 16;
  const DF df;
  const int64_t block = reader.q.spec.block;
  for (int64_t k = 0; k < depth; k += kRun) {
    for (int64_t w = 0; w < width; w += lanes()) {
      HWY_ALIGN float scales[2 * 16];
      for (int64_t half = 0; half < kRun; half += 16)
        hn::StoreU(reader.line_scales(line + w, (k0 + k + half) / block), df, scales + half);
      for_line_codes<kM>(reader, line + w, k0 + k, [&](int i, VU code) HWY_ATTR {
        if (k + i >= depth) return;
        const VF value = hn::Mul(hn::LoadU(df, scales + i / 16 * 16), decoder(code));
        hn::StoreU(value, df, panel + (k + i) * width + w);
      });
    }
  }
}

// c[kTileM][tile_n] = or += a[depth][kTileM]^T b[depth][tile_n].
HWY_INLINE void multiply_panels(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b,
                                int64_t depth, bool accumulate, float* HWY_RESTRICT c,
                                int64_t c_stride) {
  const DF df;
  const int64_t half = static_cast<int64_t>(lanes());
  VF sum[kTileM][2];
  for (int64_t i = 0; i < kTileM; ++i) sum[i][0] = sum[i][1] = hn::Zero(df);
  for (int64_t k = 0; k < depth; ++k, a += kTileM, b += 2 * half) {
    const VF b0 = hn::LoadU(df, b), b1 = hn::LoadU(df, b + half);
#pragma GCC unroll 12
    for (int64_t i = 0; i < kTileM; ++i) {
      const VF value = hn::Set(df, a[i]);
      sum[i][0] = hn::MulAdd(value, b0, sum[i][0]);
      sum[i][1] = hn::MulAdd(value, b1, sum[i][1]);
    }
  }
#pragma GCC unroll 12
  for (int64_t i = 0; i < kTileM; ++i) {
    float* row = c + i * c_stride;
    if (accumulate) {
      sum[i][0] = hn::Add(sum[i][0], hn::LoadU(df, row));
      sum[i][1] = hn::Add(sum[i][1], hn::LoadU(df, row + half));
    }
    hn::StoreU(sum[i][0], df, row);
    hn::StoreU(sum[i][1], df, row + half);
  }
}

// What happens to a finished sum; in double, where no product of outer scales leaves the range.
struct Epilogue {
  Epilogue(const ConstQuantized& a, const ConstQuantized& b, const Matrix& out,
           const GemmOptions& o)
      : d(out), options(o) {
    factor = static_cast<double>(o.alpha) * (a.spec.outer ? a.outer[0] : 1.0f) *
             (b.spec.outer ? b.outer[0] : 1.0f);
  }
  void store(int64_t m, int64_t n, int64_t count, const float* sums) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = m * d.row_stride + (n + i) * d.column_stride;
      double value = factor * static_cast<double>(sums[i]);
      if (options.bias) value += options.bias[n + i];
      if (d.dtype == DType::f32) {
        float* out = static_cast<float*>(d.data) + at;
        *out = static_cast<float>(options.accumulate ? value + *out : value);
      } else {
        static_cast<uint16_t*>(d.data)[at] = to_bf16(static_cast<float>(value));
      }
    }
  }
  const Matrix& d;
  const GemmOptions& options;
  double factor;
};

void gemm_blocks(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
                 const GemmOptions& options, const Executor& executor) {
  const Reader ra(a, 0), rb(b, 0);
  const Epilogue epilogue(a, b, d, options);
  const int64_t m_blocks = ceil_div(d.rows, kBlockM), n_blocks = ceil_div(d.columns, kBlockN);
  const int64_t depth_all = std::min(ra.s.padded, rb.s.padded);
  const int64_t n_panels = ceil_div(d.columns, tile_n());
  const int64_t block_depth = std::min(kBlockK, depth_all);
  const int64_t c_stride = round_up(d.columns, tile_n());
  // Sums of the blocks of k so far, and B's panels of the block at hand.
  const auto c = std::make_unique_for_overwrite<float[]>(round_up(d.rows, kBlockM) * c_stride);
  const auto b_panels =
      std::make_unique_for_overwrite<float[]>(n_panels * tile_n() * block_depth + lanes());

  for (int64_t k0 = 0; k0 == 0 || k0 < depth_all; k0 += kBlockK) {
    const int64_t depth = std::min(kBlockK, depth_all - k0);
    executor.parallel_for(n_panels, [&](int64_t begin, int64_t end) HWY_ATTR {
      with_mantissa_bits(b.spec.element, [&](auto m) HWY_ATTR {
        const Decoder<m> decoder(b.spec.element);
        for (int64_t p = begin; p < end; ++p)
          pack_panel<m>(rb, decoder, p * tile_n(), tile_n(), k0, depth,
                        b_panels.get() + p * tile_n() * depth);
      });
    });
    executor.parallel_for(m_blocks * n_blocks, [&](int64_t begin, int64_t end) HWY_ATTR {
      const auto a_panels = std::make_unique_for_overwrite<float[]>(kBlockM * depth + lanes());
      int64_t packed = -1;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t m0 = i / n_blocks * kBlockM, n0 = i % n_blocks * kBlockN;
        const int64_t m_end = std::min(m0 + kBlockM, d.rows);
        if (packed != m0) {
          with_mantissa_bits(a.spec.element, [&](auto m) HWY_ATTR {
            const Decoder<m> decoder(a.spec.element);
            for (int64_t r = m0; r < m_end; r += kTileM)
              pack_panel<m>(ra, decoder, r, kTileM, k0, depth, a_panels.get() + (r - m0) * depth);
          });
          packed = m0;
        }
        for (int64_t n = n0; n < std::min(n0 + kBlockN, d.columns); n += tile_n())
          for (int64_t r = m0; r < m_end; r += kTileM)
            multiply_panels(a_panels.get() + (r - m0) * depth, b_panels.get() + n * depth, depth,
                            k0 > 0, c.get() + r * c_stride + n, c_stride);
        if (k0 + kBlockK < depth_all) continue;
        const int64_t count = std::min(kBlockN, d.columns - n0);
        for (int64_t r = m0; r < m_end; ++r)
          epilogue.store(r, n0, count, c.get() + r * c_stride + n0);
      }
    });
  }
}

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace blockscale::cpu {
HWY_EXPORT(gemm_blocks);

void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(gemm_blocks)(a, b, d, options, executor);
}

}  // namespace blockscale::cpu
#endif
