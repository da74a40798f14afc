// From codes back to values: x^ = fl(fl(outer * scale) * code), rounded to the output's dtype.
#include "gpu/launch.h"
#include "gpu/quantize.h"

namespace blockscale::gpu {
namespace {

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
  int rows, columns, tiles_down, tiles_across;
  Plan plan;  // of groups: tiles_down is the most rows of tiles that there can be
};

// The parameters of a kernel, or a copy of them that becomes those of one group.
template <bool kGrouped>
using Params = std::conditional_t<kGrouped, DequantizeParams, const DequantizeParams&>;
// Goes on to the group of a row of tiles, of which `tile_r` becomes the first row within the group;
// false where there are no more.
BLOCKSCALE_DEVICE bool enter_group(DequantizeParams& p, int tile_row, int& tile_r) {
  if (tile_row >= p.plan.head->tile_rows) return false;
  const TileRow row = p.plan.tile_rows[tile_row];
  const GroupAt at = p.plan.side[0][row.group];
  tile_r = row.row;
  p.q.codes += at.codes;
  p.q.scales += at.scales * (p.q.spec.scale == Format::fp32 ? 4 : 1);
  p.q.outer += row.group;
  p.shape.padded = at.padded;
  p.shape.code_columns = at.code_columns;
  p.shape.scale_columns = at.scale_columns;
  p.rows = at.rows;
  const int64_t skipped = at.row * p.x.row_stride;
  if (p.x.dtype == DType::f32)
    p.x.data = static_cast<float*>(p.x.data) + skipped;
  else
    p.x.data = static_cast<uint16_t*>(p.x.data) + skipped;
  return true;
}

BLOCKSCALE_DEVICE float scale_at(const DequantizeParams& p, int64_t batch, int line, int pos) {
  const QuantSpec& spec = p.q.spec;
  const StoredShape& s = p.shape;
  const int row = s.scale_lines == 1 ? line : line / spec.block;
  const int block = pos / spec.block;
  const int64_t at = batch * s.scale_count + (p.q.layout.scales == Layout::linear
                                                  ? row * s.scale_columns + block
                                                  : layout_offset(p.q.layout.scales, s.scale_rows,
                                                                  s.scale_columns, row, block));
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

// The bytes of the run at (line, pos): 16, or 8 for FP4.
BLOCKSCALE_DEVICE const uint8_t* codes_from(const DequantizeParams& p, int64_t batch, int line,
                                            int pos) {
  const StoredShape& s = p.shape;
  const int byte = p.four_bits ? pos / 2 : pos;
  const uint8_t* base = p.q.codes + batch * s.code_bytes;
  if (p.q.layout.codes == Layout::linear) return base + line * s.code_columns + byte;
  return base + layout_offset(p.q.layout.codes, s.code_rows, s.code_columns, line, byte);
}

template <bool kFp4>
using RunBytes = std::conditional_t<kFp4, uint2, uint4>;

BLOCKSCALE_DEVICE void decode_run(const DequantizeParams&, const uint2& bytes, float scale,
                                  float* v) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const uint32_t word = i < 8 ? bytes.x : bytes.y;
    const int at = 4 * (i % 8);
    // E2M1 has no special codes; its magnitude goes to bits 22..24.
    const uint32_t magnitude = (at < 22 ? word << (22 - at) : word >> (at - 22)) & 0x01C00000;
    const uint32_t sign = word << (28 - at) & 0x80000000;
    v[i] = __fmul_rn(scale, __fmul_rn(bit_cast<float>(magnitude | sign), exp2i(126)));
  }
}
BLOCKSCALE_DEVICE void decode_run(const DequantizeParams& p, const uint4& bytes, float scale,
                                  float* v) {
  const uint32_t word[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  const Format element = p.q.spec.element;
  if (kHardwareFp8 && (element == Format::e4m3fn || element == Format::e5m2)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (element == Format::e5m2)
        from_fp8x4<true>(word[i], v + 4 * i);
      else
        from_fp8x4<false>(word[i], v + 4 * i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) v[i] = p.decoder(word[i / 4] >> (8 * (i % 4)) & 0xFF);
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) v[i] = __fmul_rn(scale, v[i]);
}

// Pairs (low[i], high[i]) as BF16. The conversion's NaN is 0x7FFF, the definition's 0x7FC0; one
// maximum tells whether there is any.
template <int kCount>
BLOCKSCALE_DEVICE void to_bf16_pairs(const float* low, const float* high, int step,
                                     uint32_t* pair) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    pair[i] = to_bf16x2(low[step * i], high[step * i]);
    largest = max_magnitude_bf16x2(largest, pair[i]);
  }
  if ((largest & 0x7FFF) <= 0x7F80 && (largest >> 16 & 0x7FFF) <= 0x7F80) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if ((pair[i] & 0x7FFF) > 0x7F80) pair[i] = (pair[i] & 0xFFFF0000) | 0x7FC0;
    if ((pair[i] >> 16 & 0x7FFF) > 0x7F80) pair[i] = (pair[i] & 0xFFFF) | 0x7FC00000;
  }
}

BLOCKSCALE_DEVICE void store_value(const Matrix& x, int64_t at, float value) {
  if (value != value) value = bit_cast<float>(kNanBits);  // the definition's, not the processor's
  if (x.dtype == DType::f32)
    static_cast<float*>(x.data)[at] = value;
  else
    static_cast<uint16_t*>(x.data)[at] = x.dtype == DType::bf16 ? to_bf16(value) : to_fp16(value);
}

// kWide: BF16 with rows at multiples of 16 bytes.
template <bool kFp4, bool kWide, bool kGrouped>
__global__ void __launch_bounds__(kThreads)
    dequantize_rows_kernel(const __grid_constant__ DequantizeParams given) {
  Params<kGrouped> p = given;
  const int tiles = p.tiles_down * p.tiles_across;
  const int64_t batch = blockIdx.x / tiles;
  const int tile = static_cast<int>(blockIdx.x % tiles);
  int tile_r = tile / p.tiles_across * kTile;
  if constexpr (kGrouped)
    if (!enter_group(p, tile / p.tiles_across, tile_r)) return;
  const int c = tile % p.tiles_across * kTile + static_cast<int>(threadIdx.x) % kRunsPerLine * kRun;
  const int first = tile_r + static_cast<int>(threadIdx.x) / kRunsPerLine;
  if (c >= p.columns) return;
  RunBytes<kFp4> bytes[kRowRuns];
  float scale[kRowRuns];
#pragma unroll
  for (int i = 0; i < kRowRuns; ++i) {
    const int r = min(first + i * kRowStep, p.rows - 1);  // all loads first, within the matrix
    bytes[i] = *reinterpret_cast<const RunBytes<kFp4>*>(codes_from(p, batch, r, c));
    scale[i] = scale_at(p, batch, r, c);
  }
#pragma unroll
  for (int i = 0; i < kRowRuns; ++i) {
    const int r = first + i * kRowStep;
    if (r >= p.rows) break;
    float v[kRun];
    decode_run(p, bytes[i], scale[i], v);
    const int64_t at = batch * p.x.batch_stride + r * p.x.row_stride + c * p.x.column_stride;
    if (kWide && c + kRun <= p.columns) {
      uint4* to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.x.data) + at);
      uint32_t pair[kRun / 2];
      to_bf16_pairs<kRun / 2>(v, v + 1, 2, pair);
      to[0] = {pair[0], pair[1], pair[2], pair[3]};
      to[1] = {pair[4], pair[5], pair[6], pair[7]};
    } else {
#pragma unroll
      for (int j = 0; j < kRun; ++j)
        if (c + j < p.columns) store_value(p.x, at + j * p.x.column_stride, v[j]);
    }
  }
}

// Lines of codes come in as they lie, through shared memory; a warp decodes 64 of them along one
// run of rows, so that it stores whole pieces of rows.
template <bool kFp4, bool kWide, bool kGrouped>
__global__ void __launch_bounds__(kThreads)
    dequantize_columns_kernel(const __grid_constant__ DequantizeParams given) {
  Params<kGrouped> p = given;
  __shared__ uint4 stage[kTile * kTile / 16 / (kFp4 ? 2 : 1)];
  auto* staged = reinterpret_cast<uint8_t*>(stage);
  const int tiles = p.tiles_down * p.tiles_across;
  const int64_t batch = blockIdx.x / tiles;
  const int tile = static_cast<int>(blockIdx.x % tiles);
  int tile_r = tile % p.tiles_down * kTile;
  const int tile_c = tile / p.tiles_down * kTile;
  if constexpr (kGrouped)
    if (!enter_group(p, tile % p.tiles_down, tile_r)) return;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = thread; i < kTile * kRunsPerLine; i += kThreads) {
    const int line = i / kRunsPerLine, g = i % kRunsPerLine;
    if (tile_c + line >= p.columns || tile_r + g * kRun >= p.shape.padded) continue;
    *reinterpret_cast<RunBytes<kFp4>*>(staged + stage_offset<kFp4, 4>(line, g)) =
        *reinterpret_cast<const RunBytes<kFp4>*>(
            codes_from(p, batch, tile_c + line, tile_r + g * kRun));
  }
  const int warp = thread / 32, g = warp % kRunsPerLine;
  const int first = warp / kRunsPerLine * (kTile / 2) + thread % 32 * 2;
  const int r = tile_r + g * kRun, c = tile_c + first;
  const bool inside = r < p.rows && c < p.columns, both = c + 1 < p.columns;
  float scale[2] = {};
  if (inside) scale[0] = scale_at(p, batch, c, r);
  if (inside && both) scale[1] = scale_at(p, batch, c + 1, r);
  __syncthreads();
  if (!inside) return;
  float v[2][kRun];
#pragma unroll
  for (int which = 0; which < 2; ++which)
    decode_run(
        p,
        *reinterpret_cast<const RunBytes<kFp4>*>(staged + stage_offset<kFp4, 4>(first + which, g)),
        scale[which], v[which]);
  int64_t at = batch * p.x.batch_stride + r * p.x.row_stride + c * p.x.column_stride;
  uint32_t pair[kRun];
  if (kWide && both) to_bf16_pairs<kRun>(v[0], v[1], 1, pair);
#pragma unroll
  for (int i = 0; i < kRun; ++i, at += p.x.row_stride) {
    if (r + i >= p.rows) break;
    if (kWide && both) {
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.x.data) + at) = pair[i];
    } else {
      store_value(p.x, at, v[0][i]);
      if (both) store_value(p.x, at + p.x.column_stride, v[1][i]);
    }
  }
}

// Rows of no group are 0; where offsets are wrong, everything is NaN.
__global__ void __launch_bounds__(kThreads)
    clear_rows_kernel(const __grid_constant__ DequantizeParams p) {
  const float value = p.plan.head->bad ? bit_cast<float>(kNanBits) : 0.0f;
  const int first = p.plan.side[0][p.plan.count].row;
  const int64_t count = static_cast<int64_t>(p.rows - first) * p.columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count; i += step)
    store_value(p.x, (first + i / p.columns) * p.x.row_stride + i % p.columns * p.x.column_stride,
                value);
}

template <bool kFp4, bool kWide, bool kGrouped>
void launch(const DequantizeParams& p, NativeStream stream) {
  const auto blocks = static_cast<unsigned>(p.x.batch * p.tiles_down * p.tiles_across);
  if (p.q.axis == -1)
    start(dequantize_rows_kernel<kFp4, kWide, kGrouped>, blocks, kThreads, 0, stream, p);
  else
    start(dequantize_columns_kernel<kFp4, kWide, kGrouped>, blocks, kThreads, 0, stream, p);
  if (kGrouped) start(clear_rows_kernel, 512, kThreads, 0, stream, p);
}
template <bool kFp4, bool kWide>
void launch(const DequantizeParams& p, NativeStream stream) {
  p.plan.head ? launch<kFp4, kWide, true>(p, stream) : launch<kFp4, kWide, false>(p, stream);
}

}  // namespace

void dequantize(const ConstQuantized& q, const Matrix& x, const Stream& stream) {
  if (x.rows * x.columns * x.batch == 0) return;
  DequantizeParams p{q,
                     q.shape(),
                     Decoder::of(q.spec.element),
                     codes_per_byte(q.spec.element) == 2,
                     x,
                     static_cast<int>(x.rows),
                     static_cast<int>(x.columns),
                     static_cast<int>(ceil_div(x.rows, kTile)),
                     static_cast<int>(ceil_div(x.columns, kTile)),
                     {}};
  if (q.groups) {
    p.plan = make_plan(q.groups, x.rows, x.columns, &q, nullptr, false, stream);
    p.tiles_down = p.plan.most_tile_rows;
  }
  const bool wide = is_bf16_rows(as_const(x)) && is_aligned(as_const(x));
  const auto run = p.four_bits ? (wide ? launch<true, true> : launch<true, false>)
                               : (wide ? launch<false, true> : launch<false, false>);
  run(p, native(stream));
  check_launch("dequantize");
}

}  // namespace blockscale::gpu
