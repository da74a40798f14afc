// From codes back to values. Lines that are rows are decoded run by run; columns, in tiles of as
// many rows as a cache line holds codes. Both use the processor's own rounding to BF16 if it has
// one.
#include "cpu/cpu.h"
#include "cpu/dot_bf16.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/dequantize.cc"
#include "hwy/foreach_target.h"
//
#include <algorithm>
#include <type_traits>

#include "cpu/decode-inl.h"
#include "cpu/pack-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "parts.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// Writes `count` values to x from (b, r, c) on, along the row.
HWY_INLINE void store_row(const Matrix& x, int64_t b, int64_t r, int64_t c, int64_t count,
                          const float* values) {
  const int64_t at = b * x.batch_stride + r * x.row_stride + c * x.column_stride;
  for (int64_t i = 0; i < count; ++i) store_element(x, at + i * x.column_stride, values[i]);
}

// Whether rows of x are contiguous arrays of T.
template <class T>
HWY_INLINE bool is_plain(const Matrix& x) {
  return x.column_stride == 1 && x.dtype == (sizeof(T) == 4 ? DType::f32 : DType::bf16);
}

// Stores `count` values of a row of x. T is the type in x, or float for any dtype.
template <class T>
HWY_INLINE void copy_row(const Matrix& x, int64_t b, int64_t r, int64_t c, int64_t count,
                         bool stream, const T* values) {
  if constexpr (std::is_same_v<T, float>)
    if (!is_plain<float>(x)) return store_row(x, b, r, c, count, values);
  auto* to = static_cast<T*>(x.data) + b * x.batch_stride + r * x.row_stride + c;
  copy_run(values, count, stream, to);
}

inline constexpr int64_t kTileColumns = 256;
inline constexpr int64_t kAhead = 256;  // bytes of a line fetched together
inline constexpr int64_t kRun = 1024;   // positions of a line decoded at a time

// Whether products of a scale with values and HalfDecoder::factor are neither subnormal nor
// infinite: the scale is 0, or within 2^±100.
HWY_INLINE bool is_moderate(VF scale) {
  const DF df;
  const VF a = hn::Abs(scale);
  const auto within =
      hn::And(hn::Ge(a, hn::Set(df, exp2i(-100))), hn::Le(a, hn::Set(df, exp2i(100))));
  return hn::AllTrue(df, hn::Or(within, hn::Eq(a, hn::Zero(df))));
}

// Values of 2 * lanes() codes times their scales. The scales are as they are if `exact`, else
// moderate and multiplied by the decoder's factor. kRounds: the processor rounds to BF16 itself.
template <int kM, bool kRounds, class T>
HWY_INLINE void decode_pair(const HalfDecoder<kM>& decoder, VH top, bool exact, VF scale_a,
                            VF scale_b, T* out) {
  VF a, b;
  if (HWY_UNLIKELY(exact)) {
    decoder.exact(top, a, b);
    // Scales may be any NaN, and a product of 0 and Inf is the processor's.
    return store_pair(define_nan(hn::Mul(scale_a, a)), define_nan(hn::Mul(scale_b, b)), out);
  }
  decoder.fast(top, a, b);
  a = hn::Mul(scale_a, a), b = hn::Mul(scale_b, b);
  if constexpr (kRounds && sizeof(T) == 2)
    store_rounded_pair(a, b, out);
  else
    store_pair(a, b, out);
}

// Lines that are rows of x: a run of positions is decoded, then stored.
template <int kM, bool kRounds, class T>
HWY_INLINE void dequantize_line(const Reader& reader, const Matrix& x, int64_t b, int64_t line,
                                bool stream) {
  constexpr int kPerByte = kM == 1 ? 2 : 1;
  const HalfDecoder<kM> decoder(reader.q.spec.element);
  const int64_t block = reader.q.spec.block;
  const int shift = log_block(block);
  HWY_ALIGN uint8_t copy[kRun + 64];
  HWY_ALIGN T values[kRun];
  HWY_ALIGN float scales[kRun / 16];
  const VF outer = hn::Set(DF(), reader.outer);
  for (int64_t pos = 0; pos < x.columns; pos += kRun) {
    const int64_t count = std::min(kRun, reader.s.padded - pos);
    const uint8_t* codes = reader.codes + line * reader.s.code_columns + pos / kPerByte;
    if (count < kRun || reader.q.layout.codes != Layout::linear) {
      for (int64_t i = 0; i < count / kPerByte; i += 16)
        reader.bytes16(line, pos / kPerByte + i, copy + i);
      std::memset(copy + count / kPerByte, 0, 64);
      codes = copy;
    }
    bool exact = decoder.has_special(codes, count / kPerByte);
    for (int64_t i = 0; i < count / block; i += lanes()) {
      const VF scale = hn::Mul(outer, reader.block_scales(line, pos / block + i));
      exact |= !is_moderate(scale);
      hn::StoreU(scale, DF(), scales + i);
    }
    const VF factor = hn::Set(DF(), exact ? 1.0f : decoder.factor);
    for (int64_t i = 0; i < count / block; i += lanes())
      hn::StoreU(hn::Mul(hn::LoadU(DF(), scales + i), factor), DF(), scales + i);
    for (int64_t i = 0; i < count; i += kPair) {
      const VH top = load_tops<kM>(codes + i / kPerByte);
      const VF scale_a = hn::Set(DF(), scales[i >> shift]);
      const VF scale_b = hn::Set(DF(), scales[(i + kPair / 2) >> shift]);
      decode_pair<kM, kRounds>(decoder, top, exact, scale_a, scale_b, values + i);
    }
    copy_row(x, b, line, pos, std::min(count, x.columns - pos), stream, values);
  }
}

// Lines that are columns of x: codes of 2 * lanes() lines at a time become rows of a tile. Lines
// may lie a power of two apart and share few cache sets, so each is read only once.
template <int kM, bool kRounds, class T>
HWY_INLINE void dequantize_columns(const Reader& reader, const Matrix& x, int64_t b, int64_t line,
                                   int64_t lines, bool stream) {
  constexpr int64_t kRows = LineBytes::kBytes * (kM == 1 ? 2 : 1);
  const HalfDecoder<kM> decoder(reader.q.spec.element);
  const int64_t block = reader.q.spec.block;
  const int64_t blocks = std::max<int64_t>(1, kRows / block);
  const int shift = log_block(block);
  [[maybe_unused]] const NarrowDecoder narrow_decoder(reader.q.spec, reader.outer);
  HWY_ALIGN T tile[kRows * kTileColumns];
  LineBytes bytes;
  Ahead ahead, scales_ahead;
  const int64_t fetched = 64 / scale_bytes(reader.q.spec.scale) * block;  // rows per scale fetch
  const VF outer = hn::Set(DF(), reader.outer);
  for (int64_t pos = 0; pos < x.rows; pos += kRows) {
    const int64_t at = pos / kRows * LineBytes::kBytes;
    if (at % kAhead == 0) ahead = ahead_of(reader, line, lines, at + kAhead, kAhead);
    if (pos % fetched == 0)
      scales_ahead = scales_ahead_of(reader, line, lines, (pos + fetched) / block);
    for (int64_t c = 0; c < lines; c += kPair) {
      bytes.load(reader, line + c, at);
      scales_ahead.fetch(4 * 64);
      if constexpr (kM == 1 && sizeof(T) == 2 && NarrowDecoder::kFits) {
        VH codes[8];
        scale_codes_of_lines(reader, line + c, pos / block, blocks, codes);
        bool narrow = true;
        NarrowDecoder::Scales scales[8];
        for (int64_t i = 0; i < blocks; ++i) {
          narrow &= narrow_decoder.takes(codes[i]);
          scales[i] = narrow_decoder.scales(codes[i]);
        }
        if (HWY_LIKELY(narrow)) {
          for (int part = 0; part < LineBytes::kBytes / 16; ++part) {
            ahead.fetch(16 * kPair);
            for_line_nibbles(bytes, part, [&](int i, VH nibbles) HWY_ATTR {
              hn::Store(narrow_decoder(nibbles, scales[i >> shift]), DH(),
                        tile + i * kTileColumns + c);
            });
          }
          continue;
        }
      }
      bool exact = decoder.has_special(bytes.bytes, sizeof bytes.bytes);
      VF scale_a[16], scale_b[16];
      for (int64_t i = 0; i < blocks; ++i) {
        const VF a = reader.line_scales(line + c, pos / block + i);
        const VF b = reader.line_scales(line + c + kPair / 2, pos / block + i);
        scale_a[i] = hn::Mul(outer, a);
        scale_b[i] = hn::Mul(outer, b);
        exact |= !is_moderate(scale_a[i]) || !is_moderate(scale_b[i]);
      }
      const VF factor = hn::Set(DF(), exact ? 1.0f : decoder.factor);
      for (int64_t i = 0; i < blocks; ++i)
        scale_a[i] = hn::Mul(scale_a[i], factor), scale_b[i] = hn::Mul(scale_b[i], factor);
      for (int part = 0; part < LineBytes::kBytes / 16; ++part) {
        ahead.fetch(16 * kPair);
        for_line_tops<kM>(bytes, part, [&](int i, VH top) HWY_ATTR {
          decode_pair<kM, kRounds>(decoder, top, exact, scale_a[i >> shift], scale_b[i >> shift],
                                   tile + i * kTileColumns + c);
        });
      }
    }
    for (int64_t r = 0; r < std::min(kRows, x.rows - pos); ++r)
      copy_row(x, b, pos + r, line, lines, stream, tile + r * kTileColumns);
  }
}

template <bool kRounds, class T>
HWY_INLINE void dequantize_lines(const ConstQuantized& q, const StoredShape& shape, const Matrix& x,
                                 int64_t b, int64_t line, bool stream) {
  const int64_t lines = std::min(kTileColumns, x.columns - line);
  const Reader reader(q, shape, b);
  with_mantissa_bits(q.spec.element, [&](auto m) HWY_ATTR {
    if (q.axis == -1)
      dequantize_line<m, kRounds, T>(reader, x, b, line, stream);
    else
      dequantize_columns<m, kRounds, T>(reader, x, b, line, lines, stream);
  });
}

void dequantize_all(const ConstQuantized& q, const Matrix& x, const Executor& executor) {
  const bool along_rows = q.axis == -1;
  const int64_t unit = along_rows ? 1 : kTileColumns;  // lines per task
  const auto per_matrix = [&](int64_t rows) {
    if (rows == 0 || x.columns == 0) return int64_t{0};
    return along_rows ? rows : ceil_div(x.columns, unit);
  };
  const bool stream = x.batch * x.rows * x.columns * dtype_bytes(x.dtype) >= kStreamBytes;
  const bool rounds = has_bf16();
  const auto parts = parts_of(q);
  Pieces pieces;
  for (const auto& part : parts) pieces.add(part.q.batch * per_matrix(part.q.rows));
  executor.parallel_for(pieces.total(), [&](int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t i = begin; i < end; ++i) {
      int64_t within = i;
      const auto& part = parts[pieces.part(within)];
      const Matrix to = rows_of(x, part.at.row, part.q.rows);
      const int64_t each = per_matrix(part.q.rows);
      const int64_t b = within / each, line = within % each * unit;
      if (kMayRound && rounds && is_plain<uint16_t>(x))
        dequantize_lines<kMayRound, uint16_t>(part.q, part.shape, to, b, line, stream);
      else if (is_plain<uint16_t>(x))
        dequantize_lines<false, uint16_t>(part.q, part.shape, to, b, line, stream);
      else
        dequantize_lines<false, float>(part.q, part.shape, to, b, line, stream);
    }
    hwy::FlushStream();
  });
  clear_rows(x, rows_in(q.groups, x.rows));
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
