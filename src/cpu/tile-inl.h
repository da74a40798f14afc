// Tiles: a rectangle of x as the passes read it, in place or as a zero-padded copy, in FP32 or
// BF16; its Hadamard transform; and the largest magnitudes of its blocks.

#if defined(BLOCKSCALE_TILE_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_TILE_INL
#undef BLOCKSCALE_TILE_INL
#else
#define BLOCKSCALE_TILE_INL
#endif

#include <cstring>

#include "blockscale/tensor.h"
#include "cpu/ahead.h"
#include "cpu/codec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// A multiple of every block and Hadamard size, so that tiles start on whole blocks both ways.
inline constexpr int64_t kTile = 128;
// Tiles for both directions are square: wider ones give longer runs of bytes to read from a row and
// write to a line, each of which lies in its own page. A tile fits in the second-level cache.
inline constexpr int64_t kTileSide = 2 * kTile;
inline constexpr int64_t kTileElements = kTileSide * kTileSide;

// rows x columns values; T is float, or uint16_t for BF16. If `source` is not null, the values are
// still there, in lines of `source_stride`, until row_maxima() or column_maxima() copies them here.
template <class T>
struct TileView {
  const T* data;
  int64_t stride;
  int64_t rows;
  int64_t columns;
  const T* source = nullptr;
  int64_t source_stride = 0;
};

// Where a tile lies in x and how much of it exists.
struct TileArea {
  int64_t batch, row, column, rows, columns;
};

// Where the values of an area start in x.
HWY_INLINE int64_t origin(const ConstMatrix& x, const TileArea& area) {
  return area.batch * x.batch_stride + area.row * x.row_stride + area.column * x.column_stride;
}

// Prefetches an area of x, if its rows are contiguous, during `passes` passes over another area.
inline Ahead ahead_of(const ConstMatrix& x, const TileArea& area, int passes) {
  if (x.column_stride != 1) return {};
  const int64_t bytes = dtype_bytes(x.dtype);
  return {static_cast<const uint8_t*>(x.data) + origin(x, area) * bytes, x.row_stride * bytes,
          area.columns * bytes, area.rows, passes};
}

HWY_INLINE VF load_vector(const ConstMatrix& x, int64_t i) {
  switch (x.dtype) {
    case DType::bf16:
      return load_values(static_cast<const uint16_t*>(x.data) + i);
    case DType::f16:
      return load_fp16(static_cast<const uint16_t*>(x.data) + i);
    case DType::f32_as_bf16:
      return nearest_short(load_values(static_cast<const float*>(x.data) + i));
    default:
      return load_values(static_cast<const float*>(x.data) + i);
  }
}

HWY_INLINE void load_line(const ConstMatrix& x, int64_t start, int64_t count, float* out) {
  const int64_t step = static_cast<int64_t>(lanes());
  int64_t c = 0;
  if (x.column_stride == 1)
    for (; c + step <= count; c += step) hn::StoreU(load_vector(x, start + c), DF(), out + c);
  for (; c < count; ++c) out[c] = load_element(x, start + c * x.column_stride);
}
HWY_INLINE void load_line(const ConstMatrix& x, int64_t start, int64_t count, uint16_t* out) {
  const auto* p = static_cast<const uint16_t*>(x.data) + start;
  if (x.column_stride == 1)
    std::memcpy(out, p, sizeof(uint16_t) * count);
  else
    for (int64_t c = 0; c < count; ++c) out[c] = p[c * x.column_stride];
}

// Copies the area to `out`, zero-padded to rows x columns. The copy also makes walks down columns
// fast: rows of x that lie a power of two apart share few cache sets.
template <class T>
HWY_INLINE TileView<T> load_tile(const ConstMatrix& x, const TileArea& area, int64_t rows,
                                 int64_t columns, T* out) {
  const int64_t start = origin(x, area);
  for (int64_t r = 0; r < area.rows; ++r) {
    T* line = out + r * columns;
    load_line(x, start + r * x.row_stride, area.columns, line);
    std::memset(line + area.columns, 0, sizeof(T) * (columns - area.columns));
  }
  std::memset(out + area.rows * columns, 0, sizeof(T) * (rows - area.rows) * columns);
  return {out, columns, rows, columns};
}

// ---- Hadamard transform (specification, section 8) ----

// Loads values with short NaNs; the transform's NaNs are then short too, as bf16_high() requires.
HWY_INLINE VF load_short(const float* p) { return define_nan(load_values(p)); }
HWY_INLINE VF load_short(const uint16_t* p) { return load_values(p); }
HWY_INLINE VF hadamard_finish(VF x, VF norm) { return hn::Add(hn::Mul(x, norm), hn::Zero(DF())); }

// One stage within a vector: lane i becomes a + b, or a - b where bit `step` of i is set.
struct LaneStage {
  explicit LaneStage(int step) {
    const DU du;
    const VU lane = hn::Iota(du, 0);
    const VU bit = hn::Set(du, static_cast<uint32_t>(step));
    partner = hn::IndicesFromVec(DF(), hn::Xor(lane, bit));
    const auto plus = hn::RebindMask(DF(), hn::Eq(hn::And(lane, bit), hn::Zero(du)));
    factor = hn::IfThenElse(plus, hn::Set(DF(), 1.0f), hn::Set(DF(), -1.0f));
  }
  // The product is exact.
  HWY_INLINE VF operator()(VF x) const {
    return hn::MulAdd(x, factor, hn::TableLookupLanes(x, partner));
  }
  decltype(hn::IndicesFromVec(DF(), VU())) partner;
  VF factor;
};

// Along rows: transforms every block of h.dim values of the tile, into `out`.
template <class T>
HWY_INLINE void hadamard_rows(const Hadamard& h, const TileView<T>& in, uint16_t* out) {
  const DF df;
  constexpr int64_t kStep = static_cast<int64_t>(lanes());
  HWY_ALIGN uint32_t signs[128];
  HWY_ALIGN float block[128];
  for (int i = 0; i < h.dim; ++i) signs[i] = h.negates(i) ? 0x80000000u : 0;
  const LaneStage stage1(1), stage2(2), stage4(4), stage8(8);
  const VF norm = hn::Set(df, hadamard_norm(h.dim));
  const auto within_vector = [&](const T* p, int64_t i) HWY_ATTR {
    const VF v = hn::Xor(load_short(p + i), hn::BitCast(df, hn::LoadU(DU(), signs + i % h.dim)));
    const VF pairs = stage2(stage1(v));
    const VF fours = kStep > 4 ? stage4(pairs) : pairs;
    return kStep > 8 ? stage8(fours) : fours;
  };
  for (int64_t r = 0; r < in.rows; ++r) {
    const T* source = in.data + r * in.stride;
    uint16_t* x = out + r * in.columns;
    if (h.dim == kStep) {  // a block is one vector
      for (int64_t i = 0; i < in.columns; i += 2 * kStep)
        store_pair(hadamard_finish(within_vector(source + i, 0), norm),
                   hadamard_finish(within_vector(source + i + kStep, 0), norm), x + i);
      continue;
    }
    for (int64_t start = 0; start < in.columns; start += h.dim) {
      for (int64_t i = 0; i < h.dim; i += kStep)
        hn::StoreU(within_vector(source + start, i), df, block + i);
      for (int64_t half = kStep; half < h.dim; half *= 2) {
        for (int64_t i = 0; i < h.dim; i += kStep) {
          if (i & half) continue;
          const VF a = hn::LoadU(df, block + i), b = hn::LoadU(df, block + i + half);
          hn::StoreU(hn::Add(a, b), df, block + i);
          hn::StoreU(hn::Sub(a, b), df, block + i + half);
        }
      }
      for (int64_t i = 0; i < h.dim; i += 2 * kStep)
        store_pair(hadamard_finish(hn::LoadU(df, block + i), norm),
                   hadamard_finish(hn::LoadU(df, block + i + kStep), norm), x + start + i);
    }
  }
}

// Down columns, into `out`. kDim: h.dim, or 0 for any; if it is known, a block stays in registers.
template <int kDim, class T>
HWY_INLINE void hadamard_columns(const Hadamard& h, const TileView<T>& in, uint16_t* out) {
  const DF df;
  const DU du;
  constexpr int64_t kStep = static_cast<int64_t>(lanes());
  const int dim = kDim ? kDim : h.dim;
  const VF norm = hn::Set(df, hadamard_norm(dim));
  uint32_t signs[128];
  for (int i = 0; i < dim; ++i) signs[i] = h.negates(i) ? 0x80000000u : 0;
  for (int64_t block = 0; block < in.rows; block += dim) {
    for (int64_t c = 0; c < in.columns; c += kStep) {
      VF v[kDim ? kDim : 128];
      const T* source = in.data + block * in.stride + c;
      uint16_t* x = out + block * in.columns + c;
#pragma GCC unroll 16
      for (int i = 0; i < dim; ++i)
        v[i] = hn::Xor(load_short(source + i * in.stride), hn::BitCast(df, hn::Set(du, signs[i])));
#pragma GCC unroll 4
      for (int half = 1; half < dim; half *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < dim; ++i) {
          if (i & half) continue;
          const VF a = v[i], b = v[i + half];
          v[i] = hn::Add(a, b);
          v[i + half] = hn::Sub(a, b);
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < dim; ++i) store_short(hadamard_finish(v[i], norm), x + i * in.columns);
    }
  }
}

// ---- amax ----

HWY_INLINE constexpr uint32_t abs_mask(float) { return kAbsMask; }
HWY_INLINE constexpr uint16_t abs_mask(uint16_t) { return 0x7FFF; }
template <class T>
using BitsOf = std::conditional_t<std::is_same_v<T, float>, uint32_t, uint16_t>;

// out[i] = max of the kShare masked values in[kShare * i ..], for i < n; `out` may be `in`. Copies
// the unmasked values to `copy`, if given.
template <int kShare, class D, class U = hn::TFromD<D>>
HWY_INLINE void shrink(D d, const U* in, int64_t n, U mask, U* out, U* copy = nullptr) {
  const int64_t step = static_cast<int64_t>(hn::MaxLanes(d));
  const auto bits = hn::Set(d, mask);
  const auto load = [&](const U* p) HWY_ATTR {
    const auto v = hn::LoadU(d, p);
    if (copy) hn::StoreU(v, d, copy + (p - in));
    return hn::And(v, bits);
  };
  const auto halve = [&](hn::Vec<D> low, hn::Vec<D> high) HWY_ATTR {
    return hn::Max(hn::ConcatEven(d, high, low), hn::ConcatOdd(d, high, low));
  };
  const auto pair = [&](const U* p) HWY_ATTR { return halve(load(p), load(p + step)); };
  for (int64_t i = 0; i < n; i += step) {
    const U* p = in + kShare * i;
    if constexpr (kShare == 2)
      hn::StoreU(pair(p), d, out + i);
    else
      hn::StoreU(halve(pair(p), pair(p + 2 * step)), d, out + i);
  }
}

HWY_INLINE uint32_t widen_bits(uint32_t bits) { return bits; }
HWY_INLINE uint32_t widen_bits(uint16_t bf16) { return static_cast<uint32_t>(bf16) << 16; }

// The maxima over rows [first, last) and over the vectors of each block: one vector per block, or
// one for several shorter blocks.
template <class D, class T, class U = hn::TFromD<D>>
HWY_INLINE void shrink_blocks(D d, const TileView<T>& x, int64_t block, int64_t first, int64_t last,
                              U mask, U* out) {
  const int64_t step = static_cast<int64_t>(hn::MaxLanes(d));
  const auto bits = hn::Set(d, mask);
  // Row by row, the best order for memory; the running maxima stay in the L1 cache.
  for (int64_t r = first; r < last; ++r) {
    const U* p = reinterpret_cast<const U*>(x.source ? x.source + r * x.source_stride
                                                     : x.data + r * x.stride);
    U* copy = x.source ? reinterpret_cast<U*>(const_cast<T*>(x.data) + r * x.stride) : nullptr;
    U* to = out;
    for (int64_t c = 0; c < x.columns; c += HWY_MAX(block, step), to += step) {
      auto most = r == first ? hn::Zero(d) : hn::LoadU(d, to);
      for (int64_t i = 0; i < block; i += step) {
        const auto v = hn::LoadU(d, p + c + i);
        if (copy) hn::StoreU(v, d, copy + c + i);
        most = hn::Max(most, hn::And(v, bits));
      }
      hn::StoreU(most, d, to);
    }
  }
}

// most[g * (columns / block) + b]: bits of the largest magnitude of block b in the `lines` rows of
// group g. Magnitudes compare as integers, and NaN > Inf > every number. A block first shrinks to
// one vector (or stays whole, if shorter), then all vectors shrink together until one value per
// block is left. `most` holds 32 values per block; buffers may be overrun by one vector.
template <class T>
HWY_INLINE void row_maxima(const TileView<T>& x, int block, int lines, BitsOf<T>* most) {
  using U = BitsOf<T>;
  const hn::CappedTag<U, 32> d;
  constexpr U kMask = abs_mask(T());
  const int64_t step = static_cast<int64_t>(hn::MaxLanes(d));
  const int64_t groups = ceil_div(x.rows, lines);
  const int64_t count = groups * (x.columns / block);
  int64_t width = HWY_MIN(block, step);  // values of a block that are left
  if (lines == 1 && block <= step) {
    for (int64_t r = 0; r < x.rows; ++r) {
      const U* line = reinterpret_cast<const U*>(x.data + r * x.stride);
      U* to = most + r * (x.columns / 4);
      if (x.source)
        shrink<4>(d, reinterpret_cast<const U*>(x.source + r * x.source_stride), x.columns / 4,
                  kMask, to, const_cast<U*>(line));
      else
        shrink<4>(d, line, x.columns / 4, kMask, to);
    }
    width /= 4;
  } else {
    for (int64_t g = 0; g < groups; ++g)
      shrink_blocks(d, x, block, g * lines, HWY_MIN(x.rows, (g + 1) * lines), kMask,
                    most + g * (x.columns / block * width));
  }
  for (; width > 2; width /= 4) shrink<4>(d, most, width / 4 * count, kMask, most);
  if (width == 2) shrink<2>(d, most, count, kMask, most);
}

// The same, with the bits widened to FP32.
template <class T>
HWY_INLINE void row_amaxes(const TileView<T>& x, int block, int lines, BitsOf<T>* work,
                           uint32_t* amax) {
  row_maxima(x, block, lines, work);
  const int64_t count = ceil_div(x.rows, lines) * (x.columns / block);
  for (int64_t i = 0; i < count; ++i) amax[i] = widen_bits(work[i]);
}

// most[g * columns + c]: the same down columns, one block of `block` rows after another.
template <class T>
HWY_INLINE void column_maxima(const TileView<T>& x, int64_t block, BitsOf<T>* most) {
  using U = BitsOf<T>;
  const hn::CappedTag<U, 32> d;
  const int64_t step = static_cast<int64_t>(hn::MaxLanes(d));
  const auto bits = hn::Set(d, abs_mask(T()));
  constexpr int kVectors = 4;  // at a time: long runs for memory, maxima in registers
  const auto block_maxima = [&](const U* p, int64_t stride, U* copy, U* to) HWY_ATTR {
    auto m0 = hn::Zero(d), m1 = m0, m2 = m0, m3 = m0;
    for (int64_t r = 0; r < block; ++r, p += stride) {
      const auto v0 = hn::LoadU(d, p), v1 = hn::LoadU(d, p + step);
      const auto v2 = hn::LoadU(d, p + 2 * step), v3 = hn::LoadU(d, p + 3 * step);
      if (copy) {
        hn::StoreU(v0, d, copy);
        hn::StoreU(v1, d, copy + step);
        hn::StoreU(v2, d, copy + 2 * step);
        hn::StoreU(v3, d, copy + 3 * step);
        copy += x.stride;
      }
      m0 = hn::Max(m0, hn::And(v0, bits));
      m1 = hn::Max(m1, hn::And(v1, bits));
      m2 = hn::Max(m2, hn::And(v2, bits));
      m3 = hn::Max(m3, hn::And(v3, bits));
    }
    hn::StoreU(m0, d, to);
    hn::StoreU(m1, d, to + step);
    hn::StoreU(m2, d, to + 2 * step);
    hn::StoreU(m3, d, to + 3 * step);
  };
  for (int64_t g = 0; g < x.rows / block; ++g) {
    for (int64_t c = 0; c < x.columns; c += kVectors * step) {
      const auto* p = reinterpret_cast<const U*>(x.data + g * block * x.stride + c);
      U* to = most + g * x.columns + c;
      if (x.source)
        block_maxima(reinterpret_cast<const U*>(x.source + g * block * x.source_stride + c),
                     x.source_stride, const_cast<U*>(p), to);
      else
        block_maxima(p, x.stride, nullptr, to);
    }
  }
}

template <class T>
HWY_INLINE void column_amaxes(const TileView<T>& x, int64_t block, BitsOf<T>* work,
                              uint32_t* amax) {
  column_maxima(x, block, work);
  for (int64_t i = 0; i < x.rows / block * x.columns; ++i) amax[i] = widen_bits(work[i]);
}

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
