// A BF16 product of which B is still in its codes: a warpgroup decodes B's tiles where the copy
// engine would bring their values. The math warpgroups see no difference, nor do the bits.
//
// A warp decodes 32 lines of a stage at a time, 64 codes of each. Its lanes load 16 bytes each, of
// as few lines at once as that allows, since the cache takes one line per cycle: the
// multiprocessor's shared memory, of which that cache is a part, is what limits the large tiles.
#pragma once

#include "cuda/sm90/kernel.h"
#include "gpu/dequantize/piece.h"

namespace blockscale::sm90 {

// Loads that stay behind a wait, as load_after() does.
BLOCKSCALE_DEVICE uint4 load_codes(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
// One scale, or two that lie at a multiple of two.
template <int kCount>
BLOCKSCALE_DEVICE uint16_t load_scales(const uint8_t* p) {
  uint16_t v;
  if constexpr (kCount == 2)
    asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  else
    asm volatile("{ .reg .b32 one;\n ld.global.nc.b8 one, [%1];\n cvt.u16.u32 %0, one; }"
                 : "=h"(v)
                 : "l"(p)
                 : "memory");
  return v;
}

// What a lane loads for one line of a stage: 16 bytes of codes, and the scales that belong to them.
template <class T>
struct CodedPiece {
  static constexpr int kCodes = 4 * gpu::codes_per_word(T::kCoded.codec);
  static constexpr int kScales = kCodes > T::kCoded.block ? kCodes / T::kCoded.block : 1;
  static constexpr int kInLine = cuda::kStageValues / kCodes;  // lanes to a line
  static constexpr int kLines = 32 / kInLine;                  // lines that a warp loads at once
  static_assert(kScales <= 2);
  uint4 codes;
  uint16_t scales;
};

// Stores the values of a piece, eight at a time, from the `first` eight of the line on, as the copy
// engine's 128-byte swizzle has them: 16 bytes number x of a line lie at x ^ `swizzle`.
template <class T>
BLOCKSCALE_DEVICE void store_values(const CodedPiece<T>& piece, uint32_t line, int first,
                                    int swizzle) {
  constexpr gpu::Decoder kElement = gpu::Decoder::of(T::kCoded.element);
  constexpr gpu::Decoder kScale = gpu::Decoder::of(T::kCoded.scale);
  constexpr int kEights = CodedPiece<T>::kCodes / gpu::kPiece;
  const uint32_t words[4] = {piece.codes.x, piece.codes.y, piece.codes.z, piece.codes.w};
  uint32_t nans = 0;  // whatever a NaN's bits, products are the same
#pragma unroll
  for (int i = 0; i < kEights; ++i) {
    const int scale = i * gpu::kPiece / T::kCoded.block;
    const float factor = kScale.scale(piece.scales >> 8 * scale & 0xFF);
    uint4 values;
    if constexpr (T::kCoded.codec == gpu::Codec::fp4)
      values = gpu::decode_bf16x8<T::kCoded.codec>(kElement, words[i], factor, nans);
    else
      values = gpu::decode_bf16x8<T::kCoded.codec>(kElement, uint2{words[2 * i], words[2 * i + 1]},
                                                   factor, nans);
    store_shared4(line + ((first + i) ^ swizzle) * 16, values);
  }
}

// Fills B's part of the ring for all units of this CTA; called by a warpgroup, warp `warp` of it.
// All units have equally many blocks, so that no warp is a whole turn of the ring behind, which a
// barrier's parity would not show.
template <class T, bool kSquare>
BLOCKSCALE_DEVICE void decode_tiles(const GemmParams& p, const Shared<T, kSquare>& shared,
                                    const Mailbox& mailbox, int warp) {
  using Piece = CodedPiece<T>;
  // Lines are dealt to the four warps, and where there are fewer than 128, stages, too.
  constexpr int kParts = T::kColumns / 32, kStep = 4 / kParts, kLoads = Piece::kInLine;
  constexpr int kAhead = kLoads == 2 ? 4 : 2;  // stages whose codes are on their way
  static_assert(4 % kParts == 0);
  const CodedLines& b = p.coded;
  const int lane = lane_index(), in_line = lane % Piece::kInLine;
  const int tile_line = warp % kParts * 32 + lane / Piece::kInLine, first = warp / kParts;
  const int first_code = in_line * Piece::kCodes;
  int before = 0;  // stages filled for earlier units
  for (int turn = 0;; ++turn) {
    const Work w = mailbox.read(turn);
    if (w.blocks < 0) break;
    if (turn == 0) before_operands(p.problem);
    const int batch = p.problem.grouping == Grouping::rows ? w.group : 0;
    const uint8_t *codes[kLoads], *scales[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      // Lines past the last one become columns that are not stored.
      const int line = min(w.column + tile_line + i * Piece::kLines, p.problem.n - 1);
      codes[i] = b.codes + batch * b.code_batch + int64_t{1} * line * b.code_line + in_line * 16;
      scales[i] =
          b.scales + batch * b.scale_batch + int64_t{1} * (line >> b.line_shift) * b.scale_line;
    }
    const auto load = [&](Piece(&to)[kLoads], int block) {
      const int scale = (block * cuda::kStageValues + first_code) / T::kCoded.block;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        to[i].codes = load_codes(codes[i] + block * (Piece::kInLine * 16));
        to[i].scales = load_scales<Piece::kScales>(scales[i] + scale);
      }
    };
    Piece ahead[kAhead][kLoads];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (first + i * kStep < w.blocks) load(ahead[i], first + i * kStep);
    for (int block = first; block < w.blocks;) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (block >= w.blocks) break;
        const int filled = before + block, stage = filled % T::kStages;
        barrier_wait(shared.empty(stage), filled / T::kStages % 2 ^ 1);
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          const int line = tile_line + j * Piece::kLines;
          store_values<T>(ahead[i][j], shared.b(stage) + line * kBlock, first_code / gpu::kPiece,
                          tile_line % 8);
        }
        gpu::fence_copies();  // for the tensor cores, which read as the copy engine writes
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.full(stage));
        if (block + kAhead * kStep < w.blocks) load(ahead[i], block + kAhead * kStep);
        block += kStep;
      }
    }
    before += w.blocks;
  }
}

}  // namespace blockscale::sm90
