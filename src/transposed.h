// Maps the scales of an operand in square blocks to those of the operand along the other axis.
#pragma once

#include "blockscale/tensor.h"

namespace blockscale {

// For scale (row, column) of `to`, in the padded matrix of its layout: the offset of `from`'s scale
// for the same block, in elements within one matrix of the batch; negative where `to` has padding.
BLOCKSCALE_HD constexpr int64_t transposed_scale(const StorageLayout& from, const StoredShape& f,
                                                 const StoredShape& t, int block, int64_t row,
                                                 int64_t column) {
  if (row >= t.scale_rows || column >= t.scale_columns) return -1;
  return layout_offset(from.scales, f.scale_rows, f.scale_columns, column * block / f.scale_lines,
                       row * t.scale_lines / block);
}

}  // namespace blockscale
