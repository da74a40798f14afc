// wgmma, m64 n k32: D[64, n] (+)= A[64, 32] B[n, 32]^T on FP8 codes in shared memory (k16 on BF16,
// also 32 bytes), with FP32 sums in registers. In d[4g] and d[4g + 1], thread t of the warpgroup
// holds columns 8g + t%4*2 and the next of row t/32*16 + t%32/4; in d[4g + 2] and d[4g + 3], the
// same columns 8 rows below.
#pragma once

#include <cstdint>

#include "gpu/port.h"

namespace blockscale::sm90 {

// Operand lists of the instruction: inline assembly has no other way to name so many registers.
#define BLOCKSCALE_R16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define BLOCKSCALE_R32 \
  BLOCKSCALE_R16       \
  ", "                 \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BLOCKSCALE_R48 \
  BLOCKSCALE_R32       \
  ", "                 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define BLOCKSCALE_R64 \
  BLOCKSCALE_R48       \
  ", "                 \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BLOCKSCALE_R4 "%0, %1, %2, %3"
#define BLOCKSCALE_R8 BLOCKSCALE_R4 ", %4, %5, %6, %7"
#define BLOCKSCALE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BLOCKSCALE_D8(i) BLOCKSCALE_D4(i), BLOCKSCALE_D4(i + 4)
#define BLOCKSCALE_D16(i) BLOCKSCALE_D8(i), BLOCKSCALE_D8(i + 8)
#define BLOCKSCALE_D32(i) BLOCKSCALE_D16(i), BLOCKSCALE_D16(i + 16)
#define BLOCKSCALE_D64(i) BLOCKSCALE_D32(i), BLOCKSCALE_D32(i + 32)
#define BLOCKSCALE_WGMMA(n, k, types, majors, registers, a, b, add)                        \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add                               \
               ", 0;\n"                                                                    \
               "wgmma.mma_async.sync.aligned.m64n" #n "k" #k ".f32." types                 \
               " {" BLOCKSCALE_R##registers "}, %" #a ", %" #b ", add, 1, 1" majors ";\n}" \
               : BLOCKSCALE_D##registers(0)                                                \
               : "l"(a_tile), "l"(b_tile), "r"(add_to))
// All sizes for one pair of formats.
#define BLOCKSCALE_WGMMA_SIZES(types)                                          \
  if constexpr (kN == 16) BLOCKSCALE_WGMMA(16, 32, types, "", 8, 8, 9, 10);    \
  if constexpr (kN == 32) BLOCKSCALE_WGMMA(32, 32, types, "", 16, 16, 17, 18); \
  if constexpr (kN == 64) BLOCKSCALE_WGMMA(64, 32, types, "", 32, 32, 33, 34); \
  if constexpr (kN == 128) BLOCKSCALE_WGMMA(128, 32, types, "", 64, 64, 65, 66);

// `a_tile` and `b_tile` are descriptors (adding 2 advances them by 32 codes); add_to = 0 overwrites
// D.
template <int kN, bool kAE5m2, bool kBE5m2>
BLOCKSCALE_DEVICE void wgmma(float (&d)[kN / 2], uint64_t a_tile, uint64_t b_tile, int add_to) {
  static_assert(kN == 16 || kN == 32 || kN == 64 || kN == 128);
  if constexpr (!kAE5m2 && !kBE5m2) {
    BLOCKSCALE_WGMMA_SIZES("e4m3.e4m3")
  } else if constexpr (kAE5m2 && !kBE5m2) {
    BLOCKSCALE_WGMMA_SIZES("e5m2.e4m3")
  } else if constexpr (!kAE5m2) {
    BLOCKSCALE_WGMMA_SIZES("e4m3.e5m2")
  } else {
    BLOCKSCALE_WGMMA_SIZES("e5m2.e5m2")
  }
}

// m64 n k16 on BF16 in shared memory, added to D; adding 2 to a descriptor advances it by 16
// values.
template <int kN>
BLOCKSCALE_DEVICE void wgmma_bf16(float (&d)[kN / 2], uint64_t a_tile, uint64_t b_tile) {
  static_assert(kN == 16 || kN == 32 || kN == 64 || kN == 128);
  constexpr int add_to = 1;
  if constexpr (kN == 16) BLOCKSCALE_WGMMA(16, 16, "bf16.bf16", ", 0, 0", 8, 8, 9, 10);
  if constexpr (kN == 32) BLOCKSCALE_WGMMA(32, 16, "bf16.bf16", ", 0, 0", 16, 16, 17, 18);
  if constexpr (kN == 64) BLOCKSCALE_WGMMA(64, 16, "bf16.bf16", ", 0, 0", 32, 32, 33, 34);
  if constexpr (kN == 128) BLOCKSCALE_WGMMA(128, 16, "bf16.bf16", ", 0, 0", 64, 64, 65, 66);
}

#undef BLOCKSCALE_WGMMA_SIZES
#undef BLOCKSCALE_WGMMA
#undef BLOCKSCALE_D64
#undef BLOCKSCALE_D32
#undef BLOCKSCALE_D16
#undef BLOCKSCALE_D8
#undef BLOCKSCALE_D4
#undef BLOCKSCALE_R64
#undef BLOCKSCALE_R48
#undef BLOCKSCALE_R32
#undef BLOCKSCALE_R16
#undef BLOCKSCALE_R8
#undef BLOCKSCALE_R4

// A tile of 128-byte rows in the 128-byte swizzle, K contiguous, at a multiple of 1024 bytes of
// shared memory: groups of 8 rows are 1024 bytes apart. The low word of its descriptor holds the
// address in units of 16 bytes. (The shuffle tells the compiler that it is warp-uniform.)
BLOCKSCALE_DEVICE uint32_t tile_low_word(uint32_t shared) {
  return __shfl_sync(~0u, (shared & 0x3FFFF) >> 4 | 1 << 16, 0);
}
BLOCKSCALE_DEVICE uint64_t tile_descriptor(uint32_t low_word) {
  constexpr uint32_t kSwizzle128 = 1, kGroupBytes = 1024;
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(descriptor)
      : "r"(low_word), "n"(kSwizzle128 << 30 | kGroupBytes >> 4));
  return descriptor;
}

BLOCKSCALE_DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
BLOCKSCALE_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kLater of the committed groups are still in flight.
template <int kLater = 0>
BLOCKSCALE_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLater) : "memory");
}
// Keeps the compiler from moving uses of an accumulator across this point.
template <int kCount>
BLOCKSCALE_DEVICE void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

}  // namespace blockscale::sm90
