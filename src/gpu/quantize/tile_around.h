// A tile of BF16 rows that start anywhere, kept in shared memory as the whole 32-byte sectors
// around its rows: loading it takes no registers, and readers do the shifting.
#pragma once

#include "gpu/quantize/direct.h"

namespace blockscale::gpu {

struct TileAround {
  static constexpr int kInside = kTile / 8, kMore = 2;  // 16-byte chunks: of a row, and after it
  static constexpr int kChunks = kInside + kMore, kPitch = kChunks * 16;
  uint4 chunk[kTile * kChunks];

  // Starts loading the tile, which is there after wait_for_chunks() and a barrier. Of chunks partly
  // outside the matrix, loads what lies in it; elements of other rows come as they are.
  BLOCKSCALE_DEVICE void begin(const Source& x, const TileAt& at) {
    const Place place(x, at);
    const int thread = static_cast<int>(threadIdx.x);
    if (place.whole) {
      constexpr int kStep = kDirectThreads / kInside;  // rows a multiple of 32 bytes apart
      const int row = thread / kInside, which = thread % kInside;
      const uint16_t* from = place.row(row) + 8 * which;
      uint4* to = &chunk[row * kChunks + which];
      keep(from);
#pragma unroll
      for (int i = 0; i < kTile / kStep; ++i, from += kStep * x.row_stride)
        begin_chunk(to + i * kStep * kChunks, from);
      static_assert(kTile * kMore == kDirectThreads);
      const int last = kInside + thread % kMore;
      begin_chunk(&chunk[thread / kMore * kChunks + last], place.row(thread / kMore) + 8 * last);
    } else {
#pragma unroll 1
      for (int i = thread; i < min(kTile, x.rows - at.row) * kChunks; i += kDirectThreads)
        bring(place, i, i / kChunks, i % kChunks);
    }
  }
  // Bytes before the tile's row `row` in its first sector.
  BLOCKSCALE_DEVICE static uint32_t skew(const Source& x, const TileAt& at, int row) {
    return skew_of(Place(x, at).first + row * x.row_stride);
  }

 private:
  BLOCKSCALE_DEVICE static uint32_t skew_of(const uint16_t* p) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) % 32;
  }
  struct Place {
    const uint16_t *matrix, *end;  // the first element, and past the last one
    const uint16_t* first;         // of the tile
    int64_t stride;
    int count;   // elements of a row of the matrix from the tile's first column on
    bool whole;  // all of the tile's chunks are in the matrix

    BLOCKSCALE_DEVICE Place(const Source& x, const TileAt& at)
        : matrix(static_cast<const uint16_t*>(x.data) + at.batch * x.batch_stride),
          end(matrix + (x.rows - 1) * x.row_stride + x.columns),
          first(matrix + at.row * x.row_stride + at.column),
          stride(x.row_stride),
          count(x.columns - at.column),
          whole(x.rows - at.row >= kTile && count >= 8 * kChunks && first >= matrix + 16) {}
    // The first sector of a row.
    BLOCKSCALE_DEVICE const uint16_t* row(int row) const {
      const uint16_t* p = first + row * stride;
      return p - skew_of(p) / 2;
    }
  };
  BLOCKSCALE_DEVICE void bring(const Place& place, int to, int row, int which) {
    const uint16_t* from = place.row(row) + 8 * which;
    if (from >= place.first + row * place.stride + place.count) return;
    if (from >= place.matrix && from + 8 <= place.end) {
      begin_chunk(&chunk[to], from);
    } else {
      auto* element = reinterpret_cast<uint16_t*>(&chunk[to]);
#pragma unroll 1
      for (int i = 0; i < 8; ++i)
        if (from + i >= place.matrix && from + i < place.end) element[i] = from[i];
    }
  }
};

}  // namespace blockscale::gpu
