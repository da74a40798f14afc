// GEMM: decodes both operands into panels, block by block, which a microkernel multiplies. Outer
// scales, alpha and bias are applied once, at the end.
//
// If the processor has a dot product of BF16 values (dot_bf16.h) and the operands are exact in
// BF16, panels hold pairs of BF16 values: scale * code for E4M3, UE5M3 (6 significant bits) and
// E8M0 scales; the codes alone for FP32 scales, which are multiplied into the sum of each block.
// Otherwise panels hold fl(scale * code) in FP32. Either way every product is exact or rounded
// once, and the error bound of the specification (section 10) holds with c = 1 + 4/K.
#include "cpu/cpu.h"
#include "cpu/dot_bf16.h"
#include "parts.h"

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

// A microkernel's tile: kTileM rows by two vectors, which together with the loads fill the
// registers.
inline constexpr int64_t kTileM = HWY_TARGET <= HWY_AVX3 ? 12 : HWY_TARGET <= HWY_AVX2 ? 6 : 4;
HWY_INLINE constexpr int64_t tile_n() { return 2 * static_cast<int64_t>(lanes()); }

// Block sizes of the surrounding loops: a panel of B (kBlockK x tile_n) and a block of A (kBlockM x
// kBlockK) stay in the L2 cache together.
inline constexpr int64_t kBlockK = 512;
inline constexpr int64_t kBlockM = 96;  // a multiple of every Dot::kRows
inline constexpr int64_t kBlockN = 1024;

// The microkernel of FP32 words, beside those of dot_bf16.h, whose words are pairs of BF16 values.
struct Fp32Dot {
  static constexpr int64_t kRows = kTileM, kTogether = 1;
  struct Session {};
};
template <class Dot>
inline constexpr bool kPairs = !std::is_same_v<Dot, Fp32Dot>;
template <class Dot>
using Word = std::conditional_t<kPairs<Dot>, uint32_t, float>;
template <class Dot>
inline constexpr int64_t kPositions = kPairs<Dot> ? 2 : 1;  // per word

// Stores one word of each of `lanes()` lines from `w` on into a panel of `width` lines, where
// kTogether words of a line lie side by side.
template <int64_t kTogether, class V, class T>
HWY_INLINE void store_words(V words, int64_t at, int64_t width, int64_t w, T* panel) {
  if constexpr (kTogether == 1) {
    hn::StoreU(words, hn::DFromV<V>(), panel + at * width + w);
  } else {
    const hn::RebindToSigned<DU> di;
    const auto apart = hn::Mul(hn::Iota(di, 0), hn::Set(di, kTogether));
    hn::ScatterIndex(words, hn::DFromV<V>(),
                     panel + (at / kTogether * width + w) * kTogether + at % kTogether, apart);
  }
}

// Decodes positions [k0, k0 + depth) of the `width` lines from `line` on into a panel. Whole
// vectors are stored in order of k, so that values past the width are overwritten next; the panel
// needs room for one more vector. depth is a multiple of 16.
template <int kM, class Dot, int64_t kTogether>
HWY_INLINE void pack_panel(const Reader& reader, const Decoder<kM>& decoder, int64_t line,
                           int64_t width, int64_t k0, int64_t depth, Word<Dot>* panel) {
  constexpr int64_t kRun = kM == 1 ? 32 : 16;
  const DF df;
  const DU du;
  const int64_t block = reader.q.spec.block;
  const bool scaled = !kPairs<Dot> || reader.q.spec.scale != Format::fp32;
  HWY_ALIGN float scales[2 * 16];
  for (int i = 0; i < 2 * 16; ++i) scales[i] = 1.0f;
  for (int64_t k = 0; k < depth; k += kRun) {
    for (int64_t w = 0; w < width; w += lanes()) {
      for (int64_t half = 0; scaled && half < kRun; half += 16)
        hn::StoreU(reader.line_scales(line + w, (k0 + k + half) / block), df, scales + half);
      VU low = hn::Zero(du);
      for_line_codes<kM>(reader, line + w, k0 + k, [&](int i, VU code) HWY_ATTR {
        if (k + i >= depth) return;
        const VF value = hn::Mul(hn::LoadU(df, scales + i / 16 * 16), decoder(code));
        if constexpr (kPairs<Dot>) {  // exact in BF16: the upper half of the FP32 word is the value
          const VU bits = hn::BitCast(du, value);
          if (i % 2 == 0)
            low = hn::ShiftRight<16>(bits);
          else
            store_words<kTogether>(hn::OrAnd(low, bits, hn::Set(du, 0xFFFF0000u)), (k + i) / 2,
                                   width, w, panel);
        } else {
          store_words<kTogether>(value, k + i, width, w, panel);
        }
      });
    }
  }
  for (int64_t at = depth / kPositions<Dot>; at % Dot::kTogether != 0; ++at)
    for (int64_t w = 0; w < width; w += lanes())
      store_words<kTogether>(hn::Zero(hn::ScalableTag<Word<Dot>>()), at, width, w, panel);
}

// The number of positions whose sum is multiplied by one scale per line, in panels of pairs.
HWY_INLINE int64_t scaled_depth(const QuantSpec& spec) {
  return spec.scale == Format::fp32 ? spec.block : kBlockK;
}

// Packs the scales of a panel's lines, one row of `width` for each scaled_depth() positions.
HWY_INLINE void pack_scales(const Reader& reader, int64_t line, int64_t width, int64_t k0,
                            int64_t depth, float* out) {
  const bool separate = reader.q.spec.scale == Format::fp32;
  const int64_t step = scaled_depth(reader.q.spec);
  for (int64_t k = 0; k < depth; k += step, out += width)
    for (int64_t w = 0; w < width; w += lanes())
      hn::StoreU(separate ? reader.line_scales(line + w, (k0 + k) / reader.q.spec.block)
                          : hn::Set(DF(), 1.0f),
                 DF(), out + w);
}

// Whether the product of any two scales is sure to be a normal number, 0 or NaN: Inf times a sum of
// zeros would be NaN, and a subnormal product has lost bits that the sum may make large again.
HWY_INLINE bool fp32_scales_fit(const Reader& reader) {
  const uint32_t least = bit_cast<uint32_t>(exp2i(-60)), most = bit_cast<uint32_t>(exp2i(60));
  for (int64_t line = 0; line < reader.s.lines; line += reader.s.scale_lines)
    for (int64_t b = 0; b < reader.s.blocks; ++b) {
      const uint32_t bits = reader.raw_scale(reader.scale_at(line, b)) & kAbsMask;
      if (bits != 0 && bits <= kInfBits && (bits < least || bits > most)) return false;
    }
  return true;
}

// Whether scale * code (code alone for FP32 scales) is exact in BF16, and products are 0 or normal.
// Only E8M0 and FP32 scales have the range to fail. Values that are multiples of 2^-63 have
// products that are multiples of 2^-126, so an E8M0 scale may be as small as the element's own unit
// allows; up to 2^60 it does not overflow. A block of zeros may have any E8M0 scale, and NaN stays
// NaN.
HWY_INLINE bool fits_bf16(const Reader& reader) {
  if (reader.q.spec.scale == Format::fp32) return fp32_scales_fit(reader);
  if (reader.q.spec.scale != Format::e8m0) return true;
  const FormatTraits element = traits(reader.q.spec.element);
  const int unit = element.min_exponent() - element.mantissa_bits;
  const auto least = static_cast<uint32_t>(traits(Format::e8m0).bias - 63 - unit);
  const uint32_t most = traits(Format::e8m0).bias + 60;
  const auto fits = [=](uint32_t byte) {
    return byte - least <= most - least || byte == traits(Format::e8m0).nan_code();
  };
  // A line of a group along the contraction axis is part of a longer line.
  const StoredShape& s = reader.s;
  const bool part = reader.q.layout.scales == Layout::linear && s.scale_columns != s.blocks;
  const int64_t runs = part ? s.scale_rows : 1, length = part ? s.blocks : s.scale_count;
  bool all = true;
  for (int64_t r = 0; r < runs; ++r)
    for (int64_t i = 0; i < length; ++i) all &= fits(reader.scales[r * s.scale_columns + i]);
  if (all) return true;
  const int64_t block_bytes = reader.q.spec.block / codes_per_byte(reader.q.spec.element);
  for (int64_t line = 0; line < reader.s.lines; ++line)
    for (int64_t b = 0; b < reader.s.blocks; ++b)
      if (!fits(reader.scales[reader.scale_at(line, b)]) &&
          !reader.is_zero(line, b * block_bytes, block_bytes))
        return false;
  return true;
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

// Turns a finished sum into output; in double, where no product of outer scales is out of range.
struct Epilogue {
  Epilogue(const Product& p, const GemmOptions& options)
      : d(p.d), bias_row(p.bias), accumulate(options.accumulate) {
    const double outer = static_cast<double>(options.alpha) *
                         (p.a.q.spec.outer ? p.a.q.outer[0] : 1.0f) *
                         (p.b.q.spec.outer ? p.b.q.outer[0] : 1.0f);
    factor = p.empty() ? 0.0 : outer;
  }
  // Stores `count` sums of row m from column n on, at most kBlockN.
  void store(int64_t m, int64_t n, int64_t count, const float* sums) const {
    HWY_ALIGN float row[kBlockN];
    const int64_t step = static_cast<int64_t>(lanes());
    const int64_t at = m * d.row_stride + n * d.column_stride;
    const float* bias = bias_row ? bias_row + n : nullptr;
    const float* before = accumulate ? static_cast<const float*>(d.data) + at : nullptr;
    for (int64_t i = 0; i < count; ++i) {
      double value = factor * static_cast<double>(sums[i]);
      if (bias) value += static_cast<double>(bias[i]);
      if (before) value += static_cast<double>(before[i * d.column_stride]);
      row[i] = static_cast<float>(value);
    }
    int64_t i = 0;
    if (d.dtype == DType::bf16) {
      auto* out = static_cast<uint16_t*>(d.data) + at;
      for (; d.column_stride == 1 && i + step <= count; i += step)
        store_values(hn::Load(DF(), row + i), out + i);
      for (; i < count; ++i) out[i * d.column_stride] = to_bf16(row[i]);
    } else {
      auto* out = static_cast<float*>(d.data) + at;
      for (; i < count; ++i) out[i * d.column_stride] = row[i];
    }
  }
  const Matrix& d;
  const float* bias_row;
  bool accumulate;
  double factor;
};

// Panels of consecutive lines over one block of k, with kTogether words of a line side by side,
// and, for pairs, their scales.
template <class Dot, int64_t kTogether>
struct Panels {
  Panels(const Reader& r, int64_t panel_width, int64_t count, int64_t block_depth)
      : reader(r),
        width(panel_width),
        words(width * round_up(block_depth / kPositions<Dot>, Dot::kTogether)),
        rows(width * ceil_div(block_depth, scaled_depth(r.q.spec))),
        values(std::make_unique_for_overwrite<Word<Dot>[]>(count * words + lanes())),
        scales(kPairs<Dot> ? std::make_unique_for_overwrite<float[]>(count * rows + lanes())
                           : nullptr) {}

  void pack(int64_t first_line, int64_t begin, int64_t end, int64_t k0, int64_t depth) {
    with_mantissa_bits(reader.q.spec.element, [&](auto m) HWY_ATTR {
      const Decoder<m> decoder(reader.q.spec.element);
      for (int64_t p = begin; p < end; ++p) {
        const int64_t line = first_line + p * width;
        pack_panel<m, Dot, kTogether>(reader, decoder, line, width, k0, depth,
                                      values.get() + p * words);
        if (kPairs<Dot>) pack_scales(reader, line, width, k0, depth, scales.get() + p * rows);
      }
    });
  }

  const Reader& reader;
  int64_t width, words, rows;
  std::unique_ptr<Word<Dot>[]> values;
  std::unique_ptr<float[]> scales;
};

template <class Dot>
using RowPanels = Panels<Dot, Dot::kTogether>;  // of A
template <class Dot>
using ColumnPanels = Panels<Dot, 1>;  // of B

template <class Dot>
HWY_INLINE void multiply(const RowPanels<Dot>& a, int64_t pa, const ColumnPanels<Dot>& b,
                         int64_t pb, int64_t depth, bool accumulate, float* c, int64_t c_stride) {
  const Word<Dot>* a_words = a.values.get() + pa * a.words;
  const Word<Dot>* b_words = b.values.get() + pb * b.words;
  if constexpr (kPairs<Dot>) {
    const int64_t step = scaled_depth(a.reader.q.spec);  // b's too, whose blocks are as long
    const float* a_scales = a.scales.get() + pa * a.rows;
    const float* b_scales = b.scales.get() + pb * b.rows;
    for (int64_t k = 0; k < depth; k += step) {
      const int64_t pairs = round_up(std::min(step, depth - k) / 2, Dot::kTogether);
      Dot::multiply(a_words + k / 2 * a.width, b_words + k / 2 * b.width, pairs,
                    a_scales + k / step * a.width, b_scales + k / step * b.width,
                    accumulate || k > 0, c, c_stride);
    }
  } else {
    multiply_panels(a_words, b_words, depth, accumulate, c, c_stride);
  }
}

template <class Dot>
void gemm_panels(const Reader& ra, const Reader& rb, const Matrix& d, const Epilogue& epilogue,
                 const Executor& executor) {
  static_assert(kBlockM % Dot::kRows == 0);
  const int64_t m_blocks = ceil_div(d.rows, kBlockM), n_blocks = ceil_div(d.columns, kBlockN);
  const int64_t n_panels = ceil_div(d.columns, tile_n());
  const int64_t depth_all = ra.s.padded, block_depth = std::min(kBlockK, depth_all);
  const int64_t c_stride = round_up(d.columns, tile_n());
  // Sums over the blocks of k so far.
  const auto c = std::make_unique_for_overwrite<float[]>(round_up(d.rows, kBlockM) * c_stride);
  ColumnPanels<Dot> b(rb, tile_n(), n_panels, block_depth);

  for (int64_t k0 = 0; k0 == 0 || k0 < depth_all; k0 += kBlockK) {
    const int64_t depth = std::min(kBlockK, depth_all - k0);
    executor.parallel_for(
        n_panels, [&](int64_t begin, int64_t end) HWY_ATTR { b.pack(0, begin, end, k0, depth); });
    executor.parallel_for(m_blocks * n_blocks, [&](int64_t begin, int64_t end) HWY_ATTR {
      [[maybe_unused]] const typename Dot::Session session;
      RowPanels<Dot> a(ra, Dot::kRows, kBlockM / Dot::kRows, block_depth);
      int64_t packed = -1;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t m0 = i / n_blocks * kBlockM, n0 = i % n_blocks * kBlockN;
        const int64_t m_end = std::min(m0 + kBlockM, d.rows);
        const int64_t n_end = std::min(n0 + kBlockN, d.columns);
        if (packed != m0) a.pack(m0, 0, ceil_div(m_end - m0, Dot::kRows), k0, depth);
        packed = m0;
        for (int64_t n = n0; n < n_end; n += tile_n())
          for (int64_t r = m0; r < m_end; r += Dot::kRows)
            multiply<Dot>(a, (r - m0) / Dot::kRows, b, n / tile_n(), depth, k0 > 0,
                          c.get() + r * c_stride + n, c_stride);
        if (k0 + kBlockK < depth_all) continue;
        for (int64_t r = m0; r < m_end; ++r)
          epilogue.store(r, n0, n_end - n0, c.get() + r * c_stride + n0);
      }
    });
  }
}

void gemm_blocks(const Product& p, const GemmOptions& options, const Executor& executor) {
  if (p.d.rows == 0 || p.d.columns == 0) return;
  if (p.empty() && options.accumulate && !p.bias) return;  // even -0 stays as it is
  const Reader ra(p.a.q, p.a.shape, 0), rb(p.b.q, p.b.shape, 0);
  const Epilogue epilogue(p, options);
  if constexpr (tile_n() == Avx512Dot::kColumns && tile_n() == AmxDot::kColumns) {
    if (has_bf16() && !p.empty() && fits_bf16(ra) && fits_bf16(rb))
      return AmxDot::available() ? gemm_panels<AmxDot>(ra, rb, p.d, epilogue, executor)
                                 : gemm_panels<Avx512Dot>(ra, rb, p.d, epilogue, executor);
  }
  gemm_panels<Fp32Dot>(ra, rb, p.d, epilogue, executor);
}

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace blockscale::cpu {
HWY_EXPORT(gemm_blocks);

void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options, const Executor& executor) {
  for (const Product& p : products_of(a, b, d, static_cast<const float*>(options.bias)))
    HWY_DYNAMIC_DISPATCH(gemm_blocks)(p, options, executor);
  if (!b.groups && !options.accumulate) clear_rows(d, rows_in(a.groups, d.rows));
}

}  // namespace blockscale::cpu
#endif
