// Non-owning views: a high-precision matrix and a quantized operand.
#pragma once

#include <cstdint>

#include "blockscale/layout.h"
#include "blockscale/spec.h"

namespace blockscale {

enum class DType : uint8_t { f32, bf16, f16 };
constexpr int dtype_bytes(DType t) { return t == DType::f32 ? 4 : 2; }

// A batch of `batch` matrices [rows, columns] of f32, bf16 or f16. Strides are in elements, may be
// anything (0 and negative included), and say where (b, r, c) lies.
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

// A quantized operand (numerics section 1) of a batch of logical matrices [rows, columns]. Each
// matrix of the batch is its own: its own outer scale and its own scale tiling.
template <class Byte, class Float>
struct BasicQuantized {
  Byte* codes = nullptr;   // batch x code_bytes
  Byte* scales = nullptr;  // batch x scale_count elements of scale_bytes(spec.scale), aligned
  Float* outer = nullptr;  // batch; only when spec.outer
  QuantSpec spec{};
  StorageLayout layout{};
  int axis = -1;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t batch = 1;

  constexpr StoredShape shape() const { return stored_shape(spec, layout, axis, rows, columns); }
};
using Quantized = BasicQuantized<uint8_t, float>;
using ConstQuantized = BasicQuantized<const uint8_t, const float>;

constexpr ConstQuantized as_const(const Quantized& q) {
  return {q.codes, q.scales, q.outer, q.spec, q.layout, q.axis, q.rows, q.columns, q.batch};
}

}  // namespace blockscale
