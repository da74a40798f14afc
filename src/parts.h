// The matrices of an operand in host memory: its groups, or the operand itself with its batch.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "blockscale/tensor.h"

namespace blockscale {

template <class Byte, class Float>
struct Part {
  BasicQuantized<Byte, Float> q;  // not grouped, its buffers those of the part
  StoredShape shape;              // instead of q.shape()
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
    at = next_group(at, q.spec, q.layout, q.axis, rows, q.columns);
  }
  return parts;
}

// `count` rows of x from `row` on.
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

// Pieces of work of several parts, numbered through.
class Pieces {
 public:
  void add(int64_t count) { ends_.push_back(total() + count); }
  int64_t total() const { return ends_.empty() ? 0 : ends_.back(); }
  // The part of piece i, which becomes its number within the part.
  size_t part(int64_t& i) const {
    const auto found = std::upper_bound(ends_.begin(), ends_.end(), i);
    if (found != ends_.begin()) i -= *(found - 1);
    return static_cast<size_t>(found - ends_.begin());
  }

 private:
  std::vector<int64_t> ends_;
};

}  // namespace blockscale
