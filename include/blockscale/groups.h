// Groups: runs of consecutive rows of one matrix [T, C], each quantized as a matrix of its own, and
// where each lies in the operand that holds them all. T and the number of groups fix the size of
// every buffer; the offsets say how much of it is used.
//
// In its layout a group starts on a new tile (`linear`: a new row or block), right after the
// previous group. With n the rows of each group before it:
//   axis -1, rows of the storage:    linear codes and 1xB scales start at the group's first row,
//                                    grids of BxB scales at the sum of ceil(n/B), all others at
//                                    the sum of the padded rows.
//   axis -2, along the contraction:  linear codes start at the sum of n rounded up to whole blocks
//                                    (or whole transforms, if longer), linear and mn_major scales
//                                    at that / B; a tiled layout holds one whole buffer per group,
//                                    one after another.
// Lines that run through all groups (axis -2, `linear` and mn_major) are whole multiples of
// kGroupLine positions, so that tiles of them are aligned. Parts of a buffer that no group uses
// hold the layout's padding; rows of x past the last end belong to no group.
#pragma once

#include "blockscale/layout.h"

namespace blockscale {

// Group g is rows [end(g - 1), end(g)) of x.
struct Groups {
  const void* offsets = nullptr;  // `count` cumulative ends, int32 or int64, never decreasing
  bool int64_offsets = false;     // the offsets are int64
  int64_t count = 0;              // 0: x is one matrix (or a batch), without groups

  BLOCKSCALE_HD explicit operator bool() const { return count != 0; }
  BLOCKSCALE_HD int64_t end(int64_t g) const {
    return int64_offsets ? static_cast<const int64_t*>(offsets)[g]
                         : static_cast<const int32_t*>(offsets)[g];
  }
  BLOCKSCALE_HD int64_t begin(int64_t g) const { return g == 0 ? 0 : end(g - 1); }
  // Whether the end of group g is invalid, where x has `rows` rows.
  BLOCKSCALE_HD bool is_wrong(int64_t g, int64_t rows) const {
    return end(g) < begin(g) || end(g) > rows;
  }
};

// What `count` parts, `total` in all, can add up to at most when each is rounded up to a multiple,
// if `total` is at least `count`; more otherwise.
BLOCKSCALE_HD constexpr int64_t rounded_parts(int64_t total, int64_t count, int64_t multiple) {
  return (total + count * (multiple - 1)) / multiple * multiple;
}

// A group begins after the rows of the groups before it, each rounded up to whole units.
struct GroupUnits {
  // Units in rows of x, powers of two: for the positions that random bits belong to, and for the
  // places of codes and of scales in their buffers.
  int64_t position = 1, codes = 1, scales = 1;
  // Rows of x per row of the layout's matrix of codes or of scales (axis -1); per byte of codes or
  // per scale of a line (axis -2).
  int64_t per_code = 1, per_scale = 1;
};
BLOCKSCALE_HD constexpr GroupUnits group_units(const QuantSpec& spec, const StorageLayout& layout,
                                               int axis) {
  const LayoutTraits codes = traits(layout.codes), scales = traits(layout.scales);
  GroupUnits u;
  if (axis == -1) {
    u.per_scale = stored_shape(spec, layout, axis, 0, 0).scale_lines;
    u.codes = codes.row_multiple;
    u.scales = u.per_scale * scales.row_multiple;
    return u;
  }
  u.per_code = codes_per_byte(spec.element);
  u.per_scale = spec.block;
  u.position = spec.unit();
  const auto whole = [&](int64_t multiple) {
    return multiple > u.position ? multiple : u.position;
  };
  u.codes = whole(codes.column_multiple * u.per_code);
  u.scales = whole(scales.column_multiple * u.per_scale);
  return u;
}

inline constexpr int64_t kGroupLine = 128;

// The shape of the operand that holds `count` groups of the rows of [rows, columns].
BLOCKSCALE_HD constexpr StoredShape grouped_shape(const QuantSpec& spec,
                                                  const StorageLayout& layout, int axis,
                                                  int64_t rows, int64_t columns, int64_t count) {
  StoredShape s = stored_shape(spec, layout, axis, rows, columns);
  const GroupUnits u = group_units(spec, layout, axis);
  if (axis == -1) {
    s.code_rows = rounded_parts(rows, count, u.codes) / u.per_code;
    s.scale_rows = rounded_parts(rows, count, u.scales) / u.per_scale;
    return with_sizes(s, layout);
  }
  const auto room = [&](Layout l, int64_t unit) {
    const int64_t most = rounded_parts(rows, count, unit);
    return traits(l).column_multiple == 1 ? round_up(most, kGroupLine) : most;
  };
  s.extent = s.padded = room(Layout::linear, u.position);
  s.blocks = s.padded / spec.block;
  s.line_bytes = s.padded / u.per_code;
  s.code_columns = room(layout.codes, u.codes) / u.per_code;
  s.scale_columns = room(layout.scales, u.scales) / u.per_scale;
  return with_sizes(s, layout);
}

// Where a group begins, as sums over the groups before it.
struct GroupStart {
  int64_t row = 0;       // in x
  int64_t position = 0;  // axis -2: for random bits along the contraction axis, in any layout
  int64_t codes = 0;     // row (axis -1) or byte column (axis -2) of the codes in their layout
  int64_t scales = 0;    // row or column of the scales in their layout
};
// Where the next group begins, after one of `rows` rows at `at`.
BLOCKSCALE_HD constexpr GroupStart next_group(GroupStart at, const QuantSpec& spec,
                                              const StorageLayout& layout, int axis, int64_t rows) {
  const GroupUnits u = group_units(spec, layout, axis);
  const auto up = [&](int64_t multiple) { return (rows + multiple - 1) & -multiple; };
  at.row += rows;
  if (axis == -2) at.position += up(u.position);
  at.codes += up(u.codes) / u.per_code;
  at.scales += up(u.scales) / u.per_scale;
  return at;
}

// One group as an operand of its own: its extents, within the layouts' matrices that it is part of,
// and where it begins in the buffers of the whole operand.
struct GroupPart {
  StoredShape shape;
  int64_t codes;   // in bytes
  int64_t scales;  // in elements
};
BLOCKSCALE_HD constexpr GroupPart group_part(const QuantSpec& spec, const StorageLayout& layout,
                                             int axis, const StoredShape& whole,
                                             const GroupStart& at, int64_t rows, int64_t columns) {
  GroupPart p{stored_shape(spec, layout, axis, rows, columns), 0, 0};
  StoredShape& s = p.shape;
  if (axis == -1) {
    s.code_rows = whole.code_rows;
    s.scale_rows = whole.scale_rows;
    p.codes = layout_offset(layout.codes, s.code_rows, s.code_columns, at.codes, 0);
    p.scales = layout_offset(layout.scales, s.scale_rows, s.scale_columns, at.scales, 0);
    return p;
  }
  // In `linear`, a line runs through all groups; in the others, whole columns follow one another.
  p.codes = at.codes;
  p.scales = at.scales;
  if (layout.codes == Layout::linear)
    s.code_columns = whole.code_columns;
  else
    p.codes *= padded_rows(layout.codes, s.code_rows);
  if (layout.scales == Layout::linear)
    s.scale_columns = whole.scale_columns;
  else
    p.scales *= padded_rows(layout.scales, s.scale_rows);
  return p;
}

}  // namespace blockscale
