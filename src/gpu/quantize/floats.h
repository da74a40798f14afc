// FP32 and FP16 rows, processed as FP32: the counterpart of load.h and kept.h, which are for BF16.
// FP32 may be f32_as_bf16.
#pragma once

#include "gpu/quantize/kept.h"

namespace blockscale::gpu {

// Rows in memory; sizes are in bytes.
struct FloatMemory {
  bool half;      // FP16
  bool shortens;  // rounds FP32 to the nearest BF16
  int size;       // of an element
  int64_t pitch;

  BLOCKSCALE_DEVICE explicit FloatMemory(const Source& x)
      : half(x.dtype == DType::f16),
        shortens(x.dtype == DType::f32_as_bf16),
        size(half ? 2 : 4),
        pitch(x.row_stride * size) {}
  BLOCKSCALE_DEVICE const uint8_t* at(const Source& x, int64_t batch, int64_t row,
                                      int64_t column) const {
    return static_cast<const uint8_t*>(x.data) +
           (batch * x.batch_stride + row * x.row_stride + column) * size;
  }
  // Whether a row at p and those below it start at multiples of `to` bytes.
  BLOCKSCALE_DEVICE bool aligned(const uint8_t* p, int to) const {
    return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(pitch)) % to == 0;
  }
  BLOCKSCALE_DEVICE float element(const uint8_t* row, int i) const {
    if (half) return float_of_fp16(reinterpret_cast<const uint16_t*>(row)[i]);
    const float value = reinterpret_cast<const float*>(row)[i];
    return shortens ? nearest_bf16(value) : value;
  }
};
BLOCKSCALE_DEVICE void unpack_fp16(uint32_t pair, float* two) {
  two[0] = float_of_fp16(static_cast<uint16_t>(pair));
  two[1] = float_of_fp16(static_cast<uint16_t>(pair >> 16));
}

// Rounds two values to the nearest BF16.
BLOCKSCALE_DEVICE void shorten(float& a, float& b) {
  const uint32_t pair = to_bf16x2(a, b);
  a = bit_cast<float>(pair << 16), b = bit_cast<float>(pair & 0xFFFF0000);
}

// A run being loaded.
struct RunOfFloats {
  uint4 chunk[4];
  bool half;      // two chunks of FP16
  bool shortens;  // to the nearest BF16; elements loaded singly already are

  BLOCKSCALE_DEVICE FloatRun elements() const {
    FloatRun run;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word[4] = {chunk[i].x, chunk[i].y, chunk[i].z, chunk[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) run.value[4 * i + j] = bit_cast<float>(word[j]);
    }
    if (half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t pair[4] = {chunk[i].x, chunk[i].y, chunk[i].z, chunk[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) unpack_fp16(pair[j], run.value + 8 * i + 2 * j);
      }
    }
    if (shortens) {
#pragma unroll
      for (int i = 0; i < kRun; i += 2) shorten(run.value[i], run.value[i + 1]);
    }
    return run;
  }
};

// The counterpart of LineReader, which is for BF16.
struct FloatReader {
  using Tile = FloatTile;
  using Run = RunOfFloats;
  FloatMemory memory;
  const uint8_t* at;
  int count, left;
  bool chunks;

  BLOCKSCALE_DEVICE FloatReader(const Source& x, int batch, int line, int pos, int lines)
      : memory(x),
        at(memory.at(x, batch, lines > 0 ? line : 0, pos)),
        count(x.columns - pos),
        left(lines),
        chunks(count >= kRun && memory.aligned(at, 16)) {
    keep(at);
  }
  BLOCKSCALE_DEVICE Run next() {
    Run run{{}, memory.half && chunks, memory.shortens && chunks};
    if (left <= 0) return run;  // reading some line again would cost as much as another line
    if (chunks) {
      const auto* p = reinterpret_cast<const uint4*>(at);
      run.chunk[0] = load_once(p);
      run.chunk[1] = load_once(p + 1);
      if (!memory.half) {
        run.chunk[2] = load_once(p + 2);
        run.chunk[3] = load_once(p + 3);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          word[j] =
              4 * i + j < count ? bit_cast<uint32_t>(memory.element(at, 4 * i + j)) : uint32_t{0};
        run.chunk[i] = {word[0], word[1], word[2], word[3]};
      }
    }
    if (--left > 0) at += memory.pitch;
    return run;
  }
};

template <int kWords>
struct Words {
  uint32_t word[kWords];
};
BLOCKSCALE_DEVICE Words<4> words_of(const uint4& v) { return {{v.x, v.y, v.z, v.w}}; }
BLOCKSCALE_DEVICE Words<2> words_of(const uint2& v) { return {{v.x, v.y}}; }
BLOCKSCALE_DEVICE Words<1> words_of(uint32_t v) { return {{v}}; }
// Loads kRows rows of kColumns columns into place(row, column); `rows` and `count` of them exist.
template <int kColumns, int kRows, class Place>
BLOCKSCALE_DEVICE void load_columns(const FloatMemory& memory, const uint8_t* row, int rows,
                                    int count, const Place& place) {
  const bool whole =
      rows >= kRows && count >= kColumns && memory.aligned(row, kColumns * memory.size);
  using Wider = std::conditional_t<kColumns == 4, uint4, uint2>;
  using Narrow = std::conditional_t<kColumns == 4, uint2, uint32_t>;
  if (whole && !memory.half) {
#pragma unroll
    for (int i = 0; i < kRows; ++i, row += memory.pitch) {
      const auto wider = words_of(load_once(reinterpret_cast<const Wider*>(row)));
#pragma unroll
      for (int c = 0; c < kColumns; ++c) place(i, c) = bit_cast<float>(wider.word[c]);
    }
    if (memory.shortens) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int c = 0; c < kColumns; c += 2) shorten(place(i, c), place(i, c + 1));
      }
    }
  } else if (whole) {
    Narrow raw[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i, row += memory.pitch)
      raw[i] = load_once(reinterpret_cast<const Narrow*>(row));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const auto pairs = words_of(raw[i]);
#pragma unroll
      for (int c = 0; c < kColumns; c += 2) {
        float two[2];
        unpack_fp16(pairs.word[c / 2], two);
        place(i, c) = two[0];
        place(i, c + 1) = two[1];
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRows; ++i, row += memory.pitch) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        place(i, c) = i < rows && c < count ? memory.element(row, c) : 0.0f;
    }
  }
}

// A tile that threads read by columns and keep in shared memory for its rows: rows of 32 chunks of
// 16 bytes. Chunks trade places within each group of 8, so that eight threads reading every fourth
// chunk have no bank conflicts.
struct KeptFloats {
  static constexpr int kChunks = kTile / 4;
  uint4 chunk[kTile * kChunks];

  BLOCKSCALE_DEVICE static int place(int chunk) { return chunk ^ chunk >> 3; }
  BLOCKSCALE_DEVICE float* at(int row, int column) {
    return reinterpret_cast<float*>(&chunk[row * kChunks + place(column / 4)]) + column % 4;
  }
};
struct KeptFloatReader {
  using Tile = FloatTile;
  using Run = RunOfFloats;
  const uint4* at;
  int turn, left = kKeptLines;

  BLOCKSCALE_DEVICE KeptFloatReader(const KeptFloats& tile, int line, int run)
      : at(&tile.chunk[line * KeptFloats::kChunks + 4 * run]), turn(run >> 1) {}
  BLOCKSCALE_DEVICE Run next() {
    const Run run{{at[turn], at[1 ^ turn], at[2 ^ turn], at[3 ^ turn]}, false, false};
    if (--left > 0) at += KeptFloats::kChunks;
    return run;
  }
};

}  // namespace blockscale::gpu
