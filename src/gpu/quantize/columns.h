// Quantizing a tile down its columns, which are stored transposed: codes and scales are staged in
// shared memory, so that each line of codes is written in pieces of 64 or 128 bytes.
#pragma once

#include "gpu/quantize/block.h"

namespace blockscale::gpu {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Staging buffer for the codes and scales of a tile's columns.
template <Pass kPass>
struct Stage {
  static constexpr int kCodeBytes = kTile * kTile / (kPass.packs() ? 2 : 1);
  uint4 codes[kCodeBytes / 16];
  uint32_t scales[kTile * kRunsPerLine / 4];  // of scale_bytes each

  template <class Scale>
  BLOCKSCALE_DEVICE Scale& scale(int line, int blocks, int block) {
    return reinterpret_cast<Scale*>(scales)[line * blocks + block];
  }
};

// Where run `g` of a line lies in the stage: 16 bytes (8 for FP4) apart within a line, permuted so
// that writers (every kColumns-th line, the same g) and readers (one line) have no bank conflicts.
template <bool kFp4, int kColumns>
BLOCKSCALE_DEVICE int stage_offset(int line, int g) {
  static_assert(kColumns == 2 || kColumns == 4);
  constexpr int kShift = kColumns / 2;
  const int run = g ^ (line >> kShift & 7);
  return kFp4 ? (line ^ (line >> (kShift + 3) & 1)) * (kTile / 2) + run * 8
              : line * kTile + run * 16;
}

// The first byte of run `g` of a line of FP4.
template <Pass kPass, int kColumns>
BLOCKSCALE_DEVICE uint8_t& staged_fp4(Stage<kPass>& stage, int line, int g) {
  return reinterpret_cast<uint8_t*>(stage.codes)[stage_offset<true, kColumns>(line, g)];
}
// Puts the codes of run `g` of a line into the stage.
template <Pass kPass, int kColumns>
BLOCKSCALE_DEVICE void stage_codes(const Side& s, Stage<kPass>& stage, const Codes& codes, int line,
                                   int g) {
  auto* staged = reinterpret_cast<uint8_t*>(stage.codes);
  if (packs<kPass>(s))
    *reinterpret_cast<uint2*>(staged + stage_offset<true, kColumns>(line, g)) = {codes.word[0],
                                                                                 codes.word[1]};
  else
    *reinterpret_cast<uint4*>(staged + stage_offset<false, kColumns>(line, g)) = {
        codes.word[0], codes.word[1], codes.word[2], codes.word[3]};
}
// Puts the scale of the block that starts at run `g` of a line into the stage.
template <Pass kPass>
BLOCKSCALE_DEVICE void stage_scale(const Side& s, Stage<kPass>& stage, uint32_t scale, int line,
                                   int g) {
  const int block = stored_block_length<kPass>(s);
  if (has_fp32_scales<kPass>(s))
    stage.template scale<uint32_t>(line, kTile / block, g * kRun / block) = scale;
  else
    stage.template scale<uint8_t>(line, kTile / block, g * kRun / block) =
        static_cast<uint8_t>(scale);
}

// Columns c and c + 1 of the tile down one run of rows, and their amaxes. kLater (see Transformed)
// is for callers with enough registers to keep both as they were.
template <Pass kPass, class Tile, bool kMayKeep = false>
struct ColumnValues {
  static constexpr bool kLater = kMayKeep && kPass.two_level();
  typename Tile::Columns plain;
  Transformed<Tile::kBf16, kLater> transformed[2];
  uint32_t amax[2];

  BLOCKSCALE_DEVICE void take(const typename Tile::Columns& columns, const Side& s) {
    plain = columns;
    if (transforms<kPass>(s)) {
      amax[0] = transformed[0].take(s.transform, unpack_plain<0>(), unpack_again<0>());
      amax[1] = transformed[1].take(s.transform, unpack_plain<1>(), unpack_again<1>());
    } else {
      plain.amax_bits(amax);
    }
  }
  template <int kWhich>
  BLOCKSCALE_DEVICE auto unpack_plain() const {
    return [this](float* v) { plain.template unpack<kWhich>(v); };
  }
  // The same, unpacked again: the compiler would keep what was unpacked before for branches that
  // are rarely taken, spilling it if need be.
  template <int kWhich>
  BLOCKSCALE_DEVICE auto unpack_again() const {
    return [this](float* v) {
      typename Tile::Columns same = plain;
      if constexpr (Tile::kBf16) {
        const uint32_t all = in_register(~0u);
        for (auto& pair : same.pair) pair &= all;
      }
      same.template unpack<kWhich>(v);
    };
  }
  // block_of()'s `cut` for one of the columns, as for a run of a row.
  template <int kWhich>
  BLOCKSCALE_DEVICE void cut(const Side& s, Block& b) {
    if constexpr (kPass.fp4()) {
      constexpr bool kLimits = kPass.encoder == Encoder::fp4_nearest;
      if constexpr (kPass.hadamard) {
        auto& run = transformed[kWhich];
        if constexpr (kLater) {
          const auto amax_of = [&](const auto& unpack) {
            return run.settled(s.transform, unpack, amax[kWhich]);
          };
          // Rounding to nearest leaves registers to keep them: unpacking again takes 2% longer.
          if ((kLimits ? amax_of(unpack_plain<kWhich>()) : amax_of(unpack_again<kWhich>())) >=
              kInfBits)
            b = nan_block<kPass.scale>();
        }
        if (kLimits) run.limit(nearest_limit(b.inv));
        run.keep_if(b.inv != 0.0f);
      } else {
        if (kLimits) plain.template limit<kWhich>(nearest_limit(b.inv));
        plain.template keep_if<kWhich>(b.inv != 0.0f);
      }
    }
  }
  // The values of one column.
  template <int kWhich>
  BLOCKSCALE_DEVICE void unpack(const Side& s, float* v) const {
    if (transforms<kPass>(s))
      transformed[kWhich].unpack(v);
    else
      plain.template unpack<kWhich>(v);
  }
  template <int kWhich>
  BLOCKSCALE_DEVICE RunSigns signs(const Side& s) const {
    return transforms<kPass>(s) ? transformed[kWhich].signs() : plain.template signs<kWhich>();
  }
};

// Stores scales of blocks of one run from the stage to lines that are not whole words.
template <Pass kPass, int kCount>
BLOCKSCALE_DEVICE void store_linear_scales(const Side& s, const MatrixAt& m, int tile_line,
                                           int first_block, int lines, Stage<kPass>& stage) {
  constexpr int kBlocks = kTile / kPass.block(), kLines = kCount / kBlocks;
  const int b = static_cast<int>(threadIdx.x) % kBlocks;
  int line = static_cast<int>(threadIdx.x) / kBlocks;
  if (first_block + b >= s.blocks) return;
  uint8_t* to = m.scales + linear_offset(tile_line + line, s.scale_columns, first_block + b);
#pragma unroll 1
  for (; line < lines; line += kLines, to += int64_t{kLines} * s.scale_columns)
    *to = stage.template scale<uint8_t>(line, kBlocks, b);
}

// The same for a whole tile in aiter_scale, which keeps eight blocks of 32 lines together: a word
// holds two blocks of two lines.
template <Pass kPass, int kCount>
BLOCKSCALE_DEVICE void store_aiter_scales(const Side& s, const MatrixAt& m, int tile_line,
                                          int first_block, Stage<kPass>& stage) {
  constexpr int kBlocks = kTile / kPass.block(), kWords = 32 * kBlocks / 4;
  static_assert(kBlocks == 8 && layout_offset(Layout::aiter_scale, 32, 8, 16, 0) == 1 &&
                layout_offset(Layout::aiter_scale, 32, 8, 0, 4) == 2);
#pragma unroll 1
  for (int i = threadIdx.x; i < kTile * kBlocks / 4; i += kCount) {
    const int line = i / kWords * 32 + i % 16, b = i % kWords / 16;
    const auto of = [&](int l, int k) -> uint32_t {
      return stage.template scale<uint8_t>(l, kBlocks, k);
    };
    const uint32_t at = layout_offset_as<uint32_t>(Layout::aiter_scale, s.lines, s.scale_columns,
                                                   tile_line + line, first_block + b);
    *reinterpret_cast<uint32_t*>(m.scales + at) =
        permute_bytes(permute_bytes(of(line, b), of(line + 16, b), 0x0040),
                      permute_bytes(of(line, b + 4), of(line + 16, b + 4), 0x0040), 0x5410);
  }
}

// Stores scales from the stage to memory, with kCount threads.
template <Pass kPass, int kCount>
BLOCKSCALE_DEVICE void store_staged_scales(const Side& s, const MatrixAt& m, int tile_line,
                                           int tile_pos, int lines, Stage<kPass>& stage) {
  const int block = stored_block_length<kPass>(s), blocks = kTile / block;
  const int first_block = static_cast<int>(static_cast<unsigned>(tile_pos) / block);
  if (!has_fp32_scales<kPass>(s) && s.scale_words) {
    const auto words = static_cast<unsigned>(blocks / 4);  // per line
    const auto store = [&](unsigned i) {
      const int line = static_cast<int>(i / words);
      const int b = first_block + static_cast<int>(i % words * 4);
      if (line >= lines || b >= s.blocks) return;
      if (goes_aside<kPass>(s)) return store_aside(s, m, tile_line + line, b / 4, stage.scales[i]);
      const uint32_t at = s.linear_scales
                              ? linear_offset(tile_line + line, s.scale_columns, b)
                              : layout_offset_as<uint32_t>(Layout::nv_128x4, s.lines,
                                                           s.scale_columns, tile_line + line, b);
      *reinterpret_cast<uint32_t*>(m.scales + at) = stage.scales[i];
    };
    // Where the compiler knows the number of words and there are enough threads, one word each.
    constexpr int kWords = kPass.any() ? 0 : kTile * (kTile / kPass.stored_block() / 4);
    if constexpr (kWords != 0 && kWords <= kCount) {
      if (kWords == kCount || threadIdx.x < kWords) store(threadIdx.x);
    } else {
#pragma unroll 1
      for (unsigned i = threadIdx.x; i < kTile * words; i += kCount) store(i);
    }
    return;
  }
  if constexpr (!kPass.any() && !kPass.square && kPass.block() == kRun) {
    if (s.linear_scales)
      return store_linear_scales<kPass, kCount>(s, m, tile_line, first_block, lines, stage);
    if (s.aiter_words && lines >= kTile && first_block + blocks <= s.blocks)
      return store_aiter_scales<kPass, kCount>(s, m, tile_line, first_block, stage);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < kTile * blocks; i += kCount) {
    const int line = i / blocks, b = i % blocks;
    if (line >= lines || first_block + b >= s.blocks) continue;
    store_scale<kPass>(s, m, tile_line + line, first_block + b,
                       has_fp32_scales<kPass>(s) ? stage.template scale<uint32_t>(line, blocks, b)
                                                 : stage.template scale<uint8_t>(line, blocks, b));
  }
}

// Stores codes from the stage to memory, kStep runs of a line at a time: 16 bytes, except for
// single runs of FP4. `lines` and `runs` of the tile exist.
template <Pass kPass, int kColumns, int kCount, bool kFp4, int kStep>
BLOCKSCALE_DEVICE void store_staged_codes(const Side& s, const MatrixAt& m, int tile_line,
                                          int tile_pos, int lines, int runs,
                                          const Stage<kPass>& stage) {
  constexpr int kPerLine = kRunsPerLine / kStep, kLines = kCount / kPerLine;
  const auto* staged = reinterpret_cast<const uint8_t*>(stage.codes);
  const int g = static_cast<int>(threadIdx.x % kPerLine) * kStep;
  int line = static_cast<int>(threadIdx.x / kPerLine);
  if (g >= runs) return;
  // Lines far enough apart are permuted alike: one offset gives those of all of a thread's lines.
  constexpr bool kAlike = kLines % ((kFp4 ? 16 : 8) << (kColumns / 2)) == 0;
  constexpr int kApart = kLines * (kFp4 ? kTile / 2 : kTile);
  const int first = line;
  const auto staged_at = [&](int run, int i) {
    return staged + (kAlike ? stage_offset<kFp4, kColumns>(first, run) + i * kApart
                            : stage_offset<kFp4, kColumns>(line, run));
  };
  const auto store = [&](uint8_t* to, int i) {
    if constexpr (!kFp4) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(staged_at(g, i));
    } else {
      const uint2 low = *reinterpret_cast<const uint2*>(staged_at(g, i));
      if constexpr (kStep == 1) {
        *reinterpret_cast<uint2*>(to) = low;
      } else {
        const uint2 high = *reinterpret_cast<const uint2*>(staged_at(g + 1, i));
        *reinterpret_cast<uint4*>(to) = {low.x, low.y, high.x, high.y};
      }
    }
  };
  const int pos = tile_pos + g * kRun;
  if (s.linear_codes) {
    uint8_t* to = m.codes + static_cast<int64_t>(tile_line + line) * s.line_bytes +
                  (kFp4 ? static_cast<unsigned>(pos) / 2 : static_cast<unsigned>(pos));
#pragma unroll
    for (int i = 0; i < kTile / kLines; ++i, line += kLines, to += int64_t{kLines} * s.line_bytes)
      if (line < lines) store(to, i);
  } else {
#pragma unroll 1
    for (int i = 0; line < lines; ++i, line += kLines)
      store(codes_at<kPass>(s, m, tile_line + line, pos), i);
  }
}

// Stores codes from the stage to memory, with kCount threads; the tile is at (`tile_line`,
// `tile_pos`).
template <Pass kPass, int kColumns, int kCount>
BLOCKSCALE_DEVICE void store_staged_codes(const Side& s, const MatrixAt& m, int tile_line,
                                          int tile_pos, Stage<kPass>& stage) {
  // None for a tile past the end of the matrix, as the second of two can be.
  const int runs = min(kRunsPerLine, (s.padded - tile_pos) / kRun);
  const int lines = min(kTile, s.lines - tile_line);
  auto codes = [&](auto fp4, auto step) {
    store_staged_codes<kPass, kColumns, kCount, decltype(fp4)::value != 0, decltype(step)::value>(
        s, m, tile_line, tile_pos, lines, runs, stage);
  };
  // FP4 is stored in pairs of runs where lines are whole multiples of a pair.
  if (!packs<kPass>(s))
    codes(Constant<0>{}, Constant<1>{});
  else if (s.code_pairs)
    codes(Constant<1>{}, Constant<2>{});
  else
    codes(Constant<1>{}, Constant<1>{});
}
// Stores codes and scales.
template <Pass kPass, int kColumns, int kCount>
BLOCKSCALE_DEVICE void store_stage(const Side& s, const MatrixAt& m, int tile_line, int tile_pos,
                                   Stage<kPass>& stage) {
  store_staged_codes<kPass, kColumns, kCount>(s, m, tile_line, tile_pos, stage);
  store_staged_scales<kPass, kCount>(s, m, tile_line, tile_pos, min(kTile, s.lines - tile_line),
                                     stage);
}

}  // namespace blockscale::gpu
