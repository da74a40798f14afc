// From codes back to values: x^ = fl(fl(outer * scale) * code), rounded to the output's dtype.
#include "gpu/launch.h"
#include "gpu/quantize.h"

namespace blockscale::gpu {
namespace {

constexpr int kBlock = 256;  // threads

// How codes of a format become FP32: the magnitude bits, moved to the top of the fraction, are the
// value times 2^(bias - 127), subnormals included; one exact multiplication puts it right.
struct Decoder {
  uint32_t magnitude_mask, sign_bit;
  int shift;
  float factor;
  uint32_t nan_from;   // magnitudes from here on are NaN
  uint32_t inf;        // the magnitude of Inf, or none (~0)
  bool negative_zero;  // NaN is the code of -0

  static Decoder of(Format f) {
    const FormatTraits t = traits(f);
    Decoder d{t.magnitude_mask(),
              t.sign_bit(),
              23 - t.mantissa_bits,
              exp2i(127 - t.bias),
              ~0u,
              ~0u,
              t.special == Special::negative_zero};
    if (t.special == Special::all_ones) d.nan_from = t.magnitude_mask();
    if (t.special == Special::ieee) {
      d.inf = t.max_code() + 1;
      d.nan_from = t.max_code() + 2;
    }
    return d;
  }
  BLOCKSCALE_DEVICE float operator()(uint32_t code) const {
    const uint32_t magnitude = code & magnitude_mask;
    const uint32_t sign = code & sign_bit ? 0x80000000u : 0;
    float value = __fmul_rn(bit_cast<float>(magnitude << shift), factor);
    if (magnitude == inf) value = bit_cast<float>(kInfBits);
    if (magnitude >= nan_from || (negative_zero && magnitude == 0 && sign))
      return bit_cast<float>(kNanBits);
    return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
  }
};

struct DequantizeParams {
  ConstQuantized q;
  StoredShape shape;
  Decoder decoder;
  bool four_bits;
  Matrix x;
  int tiles_down, tiles_across;
};

BLOCKSCALE_DEVICE float scale_at(const DequantizeParams& p, int64_t batch, int line, int pos) {
  const QuantSpec& spec = p.q.spec;
  const int row = p.shape.scale_rows == p.shape.lines ? line : line / spec.block;
  const int64_t at =
      batch * p.shape.scale_count +
      layout_offset(p.q.layout.scales, p.shape.scale_rows, p.shape.blocks, row, pos / spec.block);
  float scale;
  if (spec.scale == Format::fp32)
    scale = reinterpret_cast<const float*>(p.q.scales)[at];
  else if (spec.scale == Format::e8m0)
    scale = decode(Format::e8m0, p.q.scales[at]);
  else if (spec.scale == Format::e4m3)
    scale = decode(Format::e4m3, p.q.scales[at]);
  else
    scale = decode(Format::ue5m3, p.q.scales[at]);
  return __fmul_rn(spec.outer ? p.q.outer[batch] : 1.0f, scale);
}

// The values of the run at (line, pos).
BLOCKSCALE_DEVICE void decode_run(const DequantizeParams& p, int64_t batch, int line, int pos,
                                  float* v) {
  const StoredShape& s = p.shape;
  const uint8_t* from =
      p.q.codes + batch * s.code_bytes +
      layout_offset(p.q.layout.codes, s.lines, s.line_bytes, line, p.four_bits ? pos / 2 : pos);
  const float scale = scale_at(p, batch, line, pos);
  if (p.four_bits) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const uint32_t word = i < 8 ? words.x : words.y;
      const int at = 4 * (i % 8);
      // E2M1 has no special codes; its magnitude goes to bits 22..24.
      const uint32_t magnitude = (at < 22 ? word << (22 - at) : word >> (at - 22)) & 0x01C00000;
      const uint32_t sign = word << (28 - at) & 0x80000000;
      v[i] = __fmul_rn(scale, __fmul_rn(bit_cast<float>(magnitude | sign), exp2i(126)));
    }
  } else {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      v[i] = __fmul_rn(scale, p.decoder(word[i / 4] >> (8 * (i % 4)) & 0xFF));
  }
}

// The conversion's NaN is 0x7FFF; the definition's 0x7FC0.
BLOCKSCALE_DEVICE uint32_t bf16_pair(float low, float high) {
  uint32_t pair = to_bf16x2(low, high);
  if (low != low) pair = (pair & 0xFFFF0000) | 0x7FC0;
  if (high != high) pair = (pair & 0xFFFF) | 0x7FC00000;
  return pair;
}

BLOCKSCALE_DEVICE void store_value(const Matrix& x, int64_t at, float value) {
  if (value != value) value = bit_cast<float>(kNanBits);  // the definition's, not the processor's
  if (x.dtype == DType::f32)
    static_cast<float*>(x.data)[at] = value;
  else
    static_cast<uint16_t*>(x.data)[at] = x.dtype == DType::bf16 ? to_bf16(value) : to_fp16(value);
}

// kWide: BF16 with rows at multiples of 16 bytes.
template <bool kWide>
__global__ void __launch_bounds__(kBlock)
    dequantize_rows_kernel(const __grid_constant__ DequantizeParams p) {
  const int64_t tiles = static_cast<int64_t>(p.tiles_down) * p.tiles_across;
  const int64_t batch = blockIdx.x / tiles;
  const int tile = static_cast<int>(blockIdx.x % tiles);
  const int tile_r = tile / p.tiles_across * kTile, tile_c = tile % p.tiles_across * kTile;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kRunsPerLine; i += kBlock) {
    const int r = tile_r + i / kRunsPerLine, c = tile_c + i % kRunsPerLine * kRun;
    if (r >= p.x.rows || c >= p.x.columns) continue;
    float v[kRun];
    decode_run(p, batch, r, c, v);
    const int64_t at = batch * p.x.batch_stride + r * p.x.row_stride + c * p.x.column_stride;
    if (kWide && c + kRun <= p.x.columns) {
      uint4* to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.x.data) + at);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        to[j] = {bf16_pair(v[8 * j], v[8 * j + 1]), bf16_pair(v[8 * j + 2], v[8 * j + 3]),
                 bf16_pair(v[8 * j + 4], v[8 * j + 5]), bf16_pair(v[8 * j + 6], v[8 * j + 7])};
    } else {
#pragma unroll
      for (int j = 0; j < kRun; ++j)
        if (c + j < p.x.columns) store_value(p.x, at + j * p.x.column_stride, v[j]);
    }
  }
}

template <bool kWide>
__global__ void __launch_bounds__(kBlock)
    dequantize_columns_kernel(const __grid_constant__ DequantizeParams p) {
  const int64_t tiles = static_cast<int64_t>(p.tiles_down) * p.tiles_across;
  const int64_t batch = blockIdx.x / tiles;
  const int tile = static_cast<int>(blockIdx.x % tiles);
  const int tile_r = tile % p.tiles_down * kTile, tile_c = tile / p.tiles_down * kTile;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
  for (int half = 0; half < kTile; half += 64) {
    const int r = tile_r + g * kRun, c = tile_c + half + 2 * lane;
    if (r >= p.x.rows || c >= p.x.columns) continue;
    float a[kRun], b[kRun];
    const bool both = c + 1 < p.x.columns;
    decode_run(p, batch, c, r, a);
    if (both) decode_run(p, batch, c + 1, r, b);
    int64_t at = batch * p.x.batch_stride + r * p.x.row_stride + c * p.x.column_stride;
#pragma unroll
    for (int i = 0; i < kRun; ++i, at += p.x.row_stride) {
      if (r + i >= p.x.rows) break;
      if (kWide && both) {
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.x.data) + at) = bf16_pair(a[i], b[i]);
      } else {
        store_value(p.x, at, a[i]);
        if (both) store_value(p.x, at + p.x.column_stride, b[i]);
      }
    }
  }
}

}  // namespace

void dequantize(const ConstQuantized& q, const Matrix& x, const Stream& stream) {
  if (x.rows * x.columns * x.batch == 0) return;
  const DequantizeParams p{q,
                           q.shape(),
                           Decoder::of(q.spec.element),
                           codes_per_byte(q.spec.element) == 2,
                           x,
                           static_cast<int>(ceil_div(x.rows, kTile)),
                           static_cast<int>(ceil_div(x.columns, kTile))};
  const bool wide = is_bf16_rows(as_const(x)) && is_aligned(as_const(x));
  const auto blocks = static_cast<unsigned>(x.batch * p.tiles_down * p.tiles_across);
  auto run = [&](auto kernel) { kernel<<<blocks, kBlock, 0, native(stream)>>>(p); };
  if (q.axis == -1)
    run(wide ? dequantize_rows_kernel<true> : dequantize_rows_kernel<false>);
  else
    run(wide ? dequantize_columns_kernel<true> : dequantize_columns_kernel<false>);
  check_launch("dequantize");
}

}  // namespace blockscale::gpu
