#include "cpu/cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/dequantize.cc"
#include "hwy/foreach_target.h"
//
#include <algorithm>

#include "cpu/decode-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// Writes `count` FP32 values to x at (b, r, c...) going along the row.
HWY_INLINE void store_row(const Matrix& x, int64_t b, int64_t r, int64_t c, int64_t count,
                          const float* values) {
  const int64_t at = b * x.batch_stride + r * x.row_stride + c * x.column_stride;
  int64_t i = 0;
  if (x.column_stride == 1 && x.dtype != DType::f16) {
    for (; i + static_cast<int64_t>(lanes()) <= count; i += lanes()) {
      const VF v = hn::LoadU(DF(), values + i);
      if (x.dtype == DType::f32)
        store_values(v, static_cast<float*>(x.data) + at + i);
      else
        store_values(v, static_cast<uint16_t*>(x.data) + at + i);
    }
  }
  for (; i < count; ++i) {
    const int64_t to = at + i * x.column_stride;
    if (x.dtype == DType::f32)
      static_cast<float*>(x.data)[to] = values[i];
    else if (x.dtype == DType::bf16)
      static_cast<uint16_t*>(x.data)[to] = to_bf16(values[i]);
    else
      static_cast<uint16_t*>(x.data)[to] = to_fp16(values[i]);
  }
}

inline constexpr int64_t kRunLength = 512;  // positions decoded at a time

// Lines that are rows of x: decode a run of blocks, then store it.
template <int kM>
HWY_INLINE void dequantize_line(const Reader& reader, const Matrix& x, int64_t b, int64_t line) {
  constexpr int kPerByte = kM == 1 ? 2 : 1;
  const Decoder<kM> decoder(reader.q.spec.element);
  const int64_t block = reader.q.spec.block;
  HWY_ALIGN uint8_t codes[kRunLength + 64];
  HWY_ALIGN float values[kRunLength];
  HWY_ALIGN float scales[16];
  const VF outer = hn::Set(DF(), reader.outer);
  const int64_t positions = std::min(reader.s.padded, round_up(x.columns, block));
  for (int64_t pos = 0; pos < positions; pos += kRunLength) {
    const int64_t count = std::min(kRunLength, positions - pos);
    for (int64_t i = 0; i < count / kPerByte; i += 16)
      reader.bytes16(line, pos / kPerByte + i, codes + i);
    for (int64_t start = 0; start < count; start += block) {
      const int64_t index = start / block % lanes();
      if (index == 0)
        hn::StoreU(hn::Mul(outer, reader.block_scales(line, (pos + start) / block)), DF(), scales);
      const VF scale = hn::Set(DF(), scales[index]);
      for (int64_t i = start; i < start + block; i += lanes())
        hn::StoreU(hn::Mul(scale, decoder(load_codes<kM>(codes, i))), DF(), values + i);
    }
    store_row(x, b, line, pos, std::min(count, x.columns - pos), values);
  }
}

// Lines that are columns of x: 16 bytes of codes of a vector of lines become rows of a tile.
template <int kM>
HWY_INLINE void dequantize_columns(const Reader& reader, const Matrix& x, int64_t b, int64_t line,
                                   int64_t lines) {
  constexpr int64_t kRows = kM == 1 ? 32 : 16;
  const DF df;
  const Decoder<kM> decoder(reader.q.spec.element);
  const int64_t block = reader.q.spec.block;
  HWY_ALIGN float tile[kRows * 64];
  HWY_ALIGN float scales[32];
  const VF outer = hn::Set(df, reader.outer);
  for (int64_t pos = 0; pos < x.rows; pos += kRows) {
    for (int64_t c = 0; c < lines; c += lanes()) {
      for (int64_t half = 0; half < kRows; half += 16) {
        const VF scale = reader.line_scales(line + c, (pos + half) / block);
        hn::StoreU(hn::Mul(outer, scale), df, scales + half);
      }
      for_line_codes<kM>(reader, line + c, pos, [&](int i, VU code) HWY_ATTR {
        const VF scale = hn::LoadU(df, scales + i / 16 * 16);
        hn::StoreU(hn::Mul(scale, decoder(code)), df, tile + i * 64 + c);
      });
    }
    for (int64_t r = 0; r < std::min(kRows, x.rows - pos); ++r)
      store_row(x, b, pos + r, line, lines, tile + r * 64);
  }
}

void dequantize_all(const ConstQuantized& q, const Matrix& x, const Executor& executor) {
  const bool along_rows = q.axis == -1;
  const int64_t unit = along_rows ? 1 : 64;  // lines a task handles
  const int64_t per_matrix = ceil_div(along_rows ? x.rows : x.columns, unit);
  executor.parallel_for(q.batch * per_matrix, [&](int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / per_matrix, line = i % per_matrix * unit;
      const Reader reader(q, b);
      with_mantissa_bits(q.spec.element, [&](auto m) HWY_ATTR {
        if (along_rows)
          dequantize_line<m>(reader, x, b, line);
        else
          dequantize_columns<m>(reader, x, b, line, std::min(unit, x.columns - line));
      });
    }
  });
}

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace blockscale::cpu {
HWY_EXPORT(dequantize_all);

void dequantize(const ConstQuantized& q, const Matrix& x, const Executor& executor) {
  HWY_DYNAMIC_DISPATCH(dequantize_all)(q, x, executor);
}

}  // namespace blockscale::cpu
#endif
