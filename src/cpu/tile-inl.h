// Tiles: a rectangle of x as the passes read it, either in place or as an FP32 copy that is
// zero-padded and transformed.

#if defined(BLOCKSCALE_TILE_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_TILE_INL
#undef BLOCKSCALE_TILE_INL
#else
#define BLOCKSCALE_TILE_INL
#endif

#include <cstring>

#include "blockscale/tensor.h"
#include "cpu/codec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// A multiple of every block and Hadamard size: tiles start on whole blocks in both directions.
inline constexpr int64_t kTile = 128;
inline constexpr int64_t kTileElements = kTile * kTile;

// rows x columns values; T is float, or uint16_t for BF16 read in place.
template <class T>
struct TileView {
  const T* data;
  int64_t stride;
  int64_t rows;
  int64_t columns;
};

// Where a tile lies in x and how much of it exists.
struct TileArea {
  int64_t batch, row, column, rows, columns;
};

HWY_INLINE float load_scalar(const ConstMatrix& x, int64_t i) {
  switch (x.dtype) {
    case DType::bf16:
      return from_bf16(static_cast<const uint16_t*>(x.data)[i]);
    case DType::f16:
      return from_fp16(static_cast<const uint16_t*>(x.data)[i]);
    default:
      return static_cast<const float*>(x.data)[i];
  }
}

HWY_INLINE VF load_vector(const ConstMatrix& x, int64_t i) {
  switch (x.dtype) {
    case DType::bf16:
      return load_values(static_cast<const uint16_t*>(x.data) + i);
    case DType::f16:
      return load_fp16(static_cast<const uint16_t*>(x.data) + i);
    default:
      return load_values(static_cast<const float*>(x.data) + i);
  }
}

// Copies the area to `out`, row length `stride`, and fills it with zeros to rows x stride.
HWY_INLINE void load_tile(const ConstMatrix& x, const TileArea& area, int64_t rows, int64_t stride,
                          float* out) {
  const int64_t origin =
      area.batch * x.batch_stride + area.row * x.row_stride + area.column * x.column_stride;
  const int64_t step = static_cast<int64_t>(lanes());
  for (int64_t r = 0; r < area.rows; ++r) {
    const int64_t start = origin + r * x.row_stride;
    int64_t c = 0;
    if (x.column_stride == 1)
      for (; c + step <= area.columns; c += step)
        hn::StoreU(load_vector(x, start + c), DF(), out + r * stride + c);
    for (; c < area.columns; ++c)
      out[r * stride + c] = load_scalar(x, start + c * x.column_stride);
    std::memset(out + r * stride + c, 0, sizeof(float) * (stride - c));
  }
  std::memset(out + area.rows * stride, 0, sizeof(float) * (rows - area.rows) * stride);
}

// ---- Hadamard transform (numerics section 8) ----

HWY_INLINE VF hadamard_finish(VF x, VF norm) {
  return round_to_bf16(hn::Add(hn::Mul(x, norm), hn::Zero(DF())));
}

// One stage within a vector: lane i becomes a + b or, where bit `step` of i is set, a - b.
struct LaneStage {
  explicit LaneStage(int step) {
    const DU du;
    const VU lane = hn::Iota(du, 0);
    const VU bit = hn::Set(du, static_cast<uint32_t>(step));
    partner = hn::IndicesFromVec(DF(), hn::Xor(lane, bit));
    sign = hn::IfThenElseZero(hn::Ne(hn::And(lane, bit), hn::Zero(du)), hn::Set(du, 0x80000000u));
  }
  HWY_INLINE VF operator()(VF x) const {
    const VF signed_x = hn::Xor(x, hn::BitCast(DF(), sign));
    return hn::Add(hn::TableLookupLanes(x, partner), signed_x);
  }
  decltype(hn::IndicesFromVec(DF(), VU())) partner;
  VU sign;
};

// Along rows: `count` values, a multiple of h.dim, each block of h.dim transformed in place.
HWY_INLINE void hadamard_rows(const Hadamard& h, float* values, int64_t count) {
  const DF df;
  const DU du;
  const int64_t step = static_cast<int64_t>(lanes());
  HWY_ALIGN uint32_t signs[128];
  for (int i = 0; i < h.dim; ++i) signs[i] = h.negates(i) ? 0x80000000u : 0;
  const LaneStage stage1(1), stage2(2), stage4(4), stage8(8);
  const VF norm = hn::Set(df, hadamard_norm(h.dim));
  for (int64_t block = 0; block < count; block += h.dim) {
    float* x = values + block;
    const bool whole = h.dim == step;  // the block is one vector
    for (int64_t i = 0; i < h.dim; i += step) {
      VF v = hn::Xor(hn::LoadU(df, x + i), hn::BitCast(df, hn::LoadU(du, signs + i)));
      v = stage2(stage1(v));
      if (step > 4) v = stage4(v);
      if (step > 8) v = stage8(v);
      hn::StoreU(whole ? hadamard_finish(v, norm) : v, df, x + i);
    }
    if (whole) continue;
    for (int64_t half = step; half < h.dim; half *= 2) {
      for (int64_t i = 0; i < h.dim; i += step) {
        if (i & half) continue;
        const VF a = hn::LoadU(df, x + i), b = hn::LoadU(df, x + i + half);
        hn::StoreU(hn::Add(a, b), df, x + i);
        hn::StoreU(hn::Sub(a, b), df, x + i + half);
      }
    }
    for (int64_t i = 0; i < h.dim; i += step)
      hn::StoreU(hadamard_finish(hn::LoadU(df, x + i), norm), df, x + i);
  }
}

// Down columns: rows x stride values, rows a multiple of h.dim, in place.
HWY_INLINE void hadamard_columns(const Hadamard& h, float* values, int64_t rows, int64_t stride) {
  const DF df;
  const DU du;
  const int64_t step = static_cast<int64_t>(lanes());
  const VF norm = hn::Set(df, hadamard_norm(h.dim));
  for (int64_t block = 0; block < rows; block += h.dim) {
    for (int64_t c = 0; c < stride; c += step) {
      VF v[128];
      float* x = values + block * stride + c;
      for (int i = 0; i < h.dim; ++i) {
        const VU sign = hn::Set(du, h.negates(i) ? 0x80000000u : 0);
        v[i] = hn::Xor(hn::LoadU(df, x + i * stride), hn::BitCast(df, sign));
      }
      for (int half = 1; half < h.dim; half *= 2) {
        for (int i = 0; i < h.dim; ++i) {
          if (i & half) continue;
          const VF a = v[i], b = v[i + half];
          v[i] = hn::Add(a, b);
          v[i + half] = hn::Sub(a, b);
        }
      }
      for (int i = 0; i < h.dim; ++i)
        hn::StoreU(hadamard_finish(v[i], norm), df, x + i * stride);
    }
  }
}

// ---- amax ----

HWY_INLINE uint32_t abs_mask(float) { return kAbsMask; }
HWY_INLINE uint16_t abs_mask(uint16_t) { return 0x7FFF; }
template <class T>
using BitsOf = std::conditional_t<std::is_same_v<T, float>, uint32_t, uint16_t>;

// Replaces 2n values by the maxima of neighbours, n times.
template <class U>
HWY_INLINE void halve(U* values, int64_t n) {
  const hn::ScalableTag<U> d;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < n; i += step) {
    const auto low = hn::LoadU(d, values + 2 * i), high = hn::LoadU(d, values + 2 * i + step);
    hn::StoreU(hn::Max(hn::ConcatEven(d, high, low), hn::ConcatOdd(d, high, low)), d, values + i);
  }
}

HWY_INLINE uint32_t widen_bits(uint32_t bits) { return bits; }
HWY_INLINE uint32_t widen_bits(uint16_t bf16) { return static_cast<uint32_t>(bf16) << 16; }

// amax[g * (columns / block) + b]: bits of the largest magnitude of block b in the `lines` rows of
// group g. Magnitudes compare as integers, and NaN > Inf > every number. `work` holds 16 values a
// block, and both buffers may be written one vector past their end.
template <class T>
HWY_INLINE void row_amaxes(const TileView<T>& x, int block, int lines, BitsOf<T>* work,
                           uint32_t* amax) {
  using U = BitsOf<T>;
  const hn::CappedTag<U, 16> d;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  const auto mask = hn::Set(d, abs_mask(T()));
  const int64_t blocks = x.columns / block;
  const int64_t groups = (x.rows + lines - 1) / lines;
  U* out = work;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t last = HWY_MIN(x.rows, (g + 1) * lines);
    for (int64_t b = 0; b < blocks; ++b, out += 16) {
      for (int64_t j = 0; j < 16; j += step) {
        auto most = hn::Zero(d);
        for (int64_t r = g * lines; r < last; ++r) {
          const U* p = reinterpret_cast<const U*>(x.data + r * x.stride + b * block) + j;
          for (int64_t i = 0; i < block; i += 16)
            most = hn::Max(most, hn::And(hn::LoadU(d, p + i), mask));
        }
        hn::StoreU(most, d, out + j);
      }
    }
  }
  const int64_t count = groups * blocks;
  for (int64_t n = 8 * count; n >= count && n > 0; n /= 2) halve(work, n);
  for (int64_t i = 0; i < count; ++i) amax[i] = widen_bits(work[i]);
}

// amax[g * columns + c]: the same down columns, one block of `block` rows after another.
template <class T>
HWY_INLINE void column_amaxes(const TileView<T>& x, int block, uint32_t* amax) {
  using U = BitsOf<T>;
  const hn::CappedTag<U, 16> d;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  const auto mask = hn::Set(d, abs_mask(T()));
  for (int64_t g = 0; g < x.rows / block; ++g) {
    for (int64_t c = 0; c < x.columns; c += step) {
      auto most = hn::Zero(d);
      for (int64_t r = g * block; r < (g + 1) * block; ++r) {
        const U* p = reinterpret_cast<const U*>(x.data + r * x.stride + c);
        most = hn::Max(most, hn::And(hn::LoadU(d, p), mask));
      }
      HWY_ALIGN U bits[16];
      hn::StoreU(most, d, bits);
      for (int64_t i = 0; i < step; ++i) amax[g * x.columns + c + i] = widen_bits(bits[i]);
    }
  }
}

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
