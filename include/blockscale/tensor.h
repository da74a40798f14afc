// Non-owning views: a high-precision matrix and a quantized operand.
#pragma once

#include <cstdint>

#include "blockscale/groups.h"

namespace blockscale {

// f32_as_bf16 is FP32 in memory that is read as the nearest BF16, as if it had been cast first: for
// inputs of quantizers and amax.
enum class DType : uint8_t { f32, bf16, f16, f32_as_bf16 };
BLOCKSCALE_HD constexpr int dtype_bytes(DType t) {
  return t == DType::bf16 || t == DType::f16 ? 2 : 4;
}

// A batch of `batch` matrices [rows, columns] of a DType; data begins at a multiple of its size.
// Strides, in elements, say where (b, r, c) lies and may have any value: negative ones are allowed,
// and 0 (the default below) reads the same elements again. An output has no stride of 0 along an
// extent above 1.
template <class Pointer>
struct BasicMatrix {
  Pointer data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 1;
  int64_t batch = 1;
  int64_t batch_stride = 0;
};
using ConstMatrix = BasicMatrix<const void*>;
using Matrix = BasicMatrix<void*>;

constexpr ConstMatrix as_const(const Matrix& x) {
  return {x.data,       x.dtype,         x.rows,  x.columns,
          x.row_stride, x.column_stride, x.batch, x.batch_stride};
}

// Element `i` (in elements, from data) as FP32: exactly, or rounded as its dtype says. And back,
// rounded to nearest even.
inline float load_element(const ConstMatrix& x, int64_t i) {
  switch (x.dtype) {
    case DType::bf16:
      return from_bf16(static_cast<const uint16_t*>(x.data)[i]);
    case DType::f16:
      return from_fp16(static_cast<const uint16_t*>(x.data)[i]);
    case DType::f32_as_bf16:
      return nearest_bf16(static_cast<const float*>(x.data)[i]);
    default:
      return static_cast<const float*>(x.data)[i];
  }
}
inline void store_element(const Matrix& x, int64_t i, float value) {
  switch (x.dtype) {
    case DType::bf16:
      static_cast<uint16_t*>(x.data)[i] = to_bf16(value);
      break;
    case DType::f16:
      static_cast<uint16_t*>(x.data)[i] = to_fp16(value);
      break;
    default:
      static_cast<float*>(x.data)[i] = value;
  }
}

// A quantized operand (specification, section 1) of a batch of logical matrices [rows, columns].
// Each matrix of the batch has its own outer scale and its own scale tiling. With groups the
// operand is one matrix [rows, columns], and each group is quantized as a matrix of its own. FP32
// scales begin at a multiple of 4 bytes and, on a GPU, codes at a multiple of 16.
template <class Byte, class Float>
struct BasicQuantized {
  Byte* codes = nullptr;   // batch x code_bytes
  Byte* scales = nullptr;  // batch x scale_count elements of scale_bytes(spec.scale)
  Float* outer = nullptr;  // batch, or one per group; only when spec.outer
  QuantSpec spec{};
  StorageLayout layout{};
  int axis = -1;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t batch = 1;
  Groups groups{};  // if set, batch is 1

  // The shape of one matrix of the batch, or of the buffers that hold all groups.
  StoredShape shape() const {
    return groups ? grouped_shape(spec, layout, axis, rows, columns, groups.count)
                  : stored_shape(spec, layout, axis, rows, columns);
  }
  // The number of matrices that have their own outer scale.
  int64_t matrices() const { return groups ? groups.count : batch; }
};

using Quantized = BasicQuantized<uint8_t, float>;
using ConstQuantized = BasicQuantized<const uint8_t, const float>;

constexpr ConstQuantized as_const(const Quantized& q) {
  return {q.codes, q.scales, q.outer,   q.spec,  q.layout,
          q.axis,  q.rows,   q.columns, q.batch, q.groups};
}

}  // namespace blockscale
