// The parts of an operand in host memory: its groups, or the operand itself with its batch.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "blockscale/tensor.h"

namespace blockscale {

// Without elements a pointer may be null, which memset and memcpy do not take.
inline void fill_bytes(void* to, int value, int64_t bytes) {
  if (bytes > 0) std::memset(to, value, static_cast<size_t>(bytes));
}
inline void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

template <class Byte, class Float>
struct Part {
  BasicQuantized<Byte, Float> q;  // not grouped; its buffers are those of the part
  StoredShape shape;              // use this instead of q.shape()
  GroupStart at;
};

template <class Byte, class Float>
std::vector<Part<Byte, Float>> parts_of(const BasicQuantized<Byte, Float>& q) {
  const StoredShape whole = q.shape();
  if (!q.groups) return {{q, whole, {}}};
  std::vector<Part<Byte, Float>> parts;
  GroupStart at;
  for (int64_t g = 0; g < q.groups.count; ++g) {
    const int64_t rows = q.groups.end(g) - at.row;
    const GroupPart place = group_part(q.spec, q.layout, q.axis, whole, at, rows, q.columns);
    BasicQuantized<Byte, Float> part = q;
    part.groups = {};
    part.rows = rows;
    part.codes += place.codes;
    part.scales += place.scales * scale_bytes(q.spec.scale);
    if (part.outer) part.outer += g;
    parts.push_back({part, place.shape, at});
    at = next_group(at, q.spec, q.layout, q.axis, rows);
  }
  return parts;
}

// `count` rows of x, starting at `row`.
template <class Pointer>
BasicMatrix<Pointer> rows_of(BasicMatrix<Pointer> x, int64_t row, int64_t count) {
  using Byte =
      std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const uint8_t, uint8_t>;
  x.data = static_cast<Byte*>(x.data) + row * x.row_stride * dtype_bytes(x.dtype);
  x.rows = count;
  return x;
}
// The groups of x, or x itself.
inline std::vector<ConstMatrix> parts_of(const ConstMatrix& x, const Groups& groups) {
  if (!groups) return {x};
  std::vector<ConstMatrix> parts;
  int64_t row = 0;
  for (int64_t g = 0; g < groups.count; ++g) {
    parts.push_back(rows_of(x, row, groups.end(g) - row));
    row = groups.end(g);
  }
  return parts;
}
// The first row of x that belongs to no group.
inline int64_t rows_in(const Groups& groups, int64_t rows) {
  return groups ? groups.end(groups.count - 1) : rows;
}

// Sets the rows of x from `row` on, which belong to no group, to 0.
inline void clear_rows(const Matrix& x, int64_t row) {
  for (; row < x.rows && x.columns != 0; ++row)
    for (int64_t c = 0; c < x.columns; ++c)
      store_element(x, row * x.row_stride + c * x.column_stride, 0.0f);
}

// The products of a GEMM, one per group. Groups along the rows divide A, D and the batch B; groups
// along the contraction axis divide A and B, and D is a batch.
struct Product {
  Part<const uint8_t, const float> a, b;
  Matrix d;
  const float* bias;  // or null
  // There is nothing to sum, so the product is 0 whatever the outer scales are.
  bool empty() const { return a.shape.padded == 0; }
};
inline std::vector<Product> products_of(const ConstQuantized& a, const ConstQuantized& b,
                                        const Matrix& d, const float* bias) {
  const auto as = parts_of(a), bs = parts_of(b);
  if (!a.groups) return {{as[0], bs[0], d, bias}};
  std::vector<Product> products;
  for (size_t g = 0; g < as.size(); ++g) {
    const auto i = static_cast<int64_t>(g);
    Product p{as[g], b.groups ? bs[g] : bs[0], d, bias ? bias + i * d.columns : nullptr};
    if (b.groups) {
      p.d.data = static_cast<uint8_t*>(d.data) + i * d.batch_stride * dtype_bytes(d.dtype);
      p.d.batch = 1;
    } else {
      p.b.q.codes += i * p.b.shape.code_bytes;
      p.b.q.scales += i * p.b.shape.scale_count * scale_bytes(b.spec.scale);
      if (b.spec.outer) p.b.q.outer += i;
      p.d = rows_of(d, as[g].at.row, as[g].q.rows);
    }
    products.push_back(p);
  }
  return products;
}

// Pieces of work from several parts, numbered consecutively.
class Pieces {
 public:
  void add(int64_t count) { ends_.push_back(total() + count); }
  int64_t total() const { return ends_.empty() ? 0 : ends_.back(); }
  // The part that piece i belongs to; i becomes the piece's number within it.
  size_t part(int64_t& i) const {
    const auto found = std::upper_bound(ends_.begin(), ends_.end(), i);
    if (found != ends_.begin()) i -= *(found - 1);
    return static_cast<size_t>(found - ends_.begin());
  }

 private:
  std::vector<int64_t> ends_;
};

}  // namespace blockscale
