// The vendor-specific half of the GPU backend: CUDA (port/cuda.h), HIP (port/hip.h), or the host
// (port/host.h: kernels as plain C++, for tests). What is in this file is the same under all of
// them up to a few instructions. The rest of this folder does not know which one it runs on. The
// HIP side is compiled (`make hip`) but has not been run.
//
// A warp is 32 lanes everywhere in this folder. A wavefront of 64 is two of them, which run the
// same code side by side: exchanges stay within 32 lanes, and nothing addresses the whole
// wavefront. What stands in the way of running: the tiles are sized for the shared memory of sm_90,
// while gfx90a and gfx942 give a thread block 64 KiB, and sm_80, sm_89 and sm_120 less than the
// 175 KiB of any_kernel. A launch that asks for more is refused there.
#pragma once

#define BLOCKSCALE_DEVICE __device__ __forceinline__

#if defined(BLOCKSCALE_EMULATE)
#include "gpu/port/host.h"
#elif defined(__HIPCC__)
#include "gpu/port/hip.h"
#else
#include "gpu/port/cuda.h"
#endif
#if !defined(BLOCKSCALE_EMULATE)
// Shared memory of the size that a launch asks for.
#define BLOCKSCALE_DYNAMIC_SHARED(name) extern __shared__ __align__(128) uint8_t name[]
#endif

#include <cstdint>

#include "blockscale/rounding.h"

namespace blockscale::gpu {

// Orders this thread's writes to shared memory before the copy engine's next writes there.
BLOCKSCALE_DEVICE void fence_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Starts copying 16 bytes to shared memory without going through a register; all threads see them
// after wait_for_chunks() and a barrier.
BLOCKSCALE_DEVICE void begin_chunk(void* to, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
#else
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}
// The same where others will soon read what follows: 256 bytes of memory go to L2.
BLOCKSCALE_DEVICE void begin_chunk_and_more(void* to, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_address(to)),
               "l"(from)
               : "memory");
#else
  begin_chunk(to, from);
#endif
}
// The same for 8 bytes.
BLOCKSCALE_DEVICE void begin_half_chunk(void* to, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
#else
  *static_cast<uint2*>(to) = *static_cast<const uint2*>(from);
#endif
}
BLOCKSCALE_DEVICE void wait_for_chunks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Brings a kernel's parameters p, from byte kFrom on, into the constant cache: every warp that has
// time reads a word of each line, as each scheduler has a cache of its own.
template <uint32_t kFrom = 0, class P>
BLOCKSCALE_DEVICE void bring_parameters([[maybe_unused]] const P& p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr uint32_t kLine = 64;
  uint32_t words = 0;
#pragma unroll
  for (uint32_t i = kFrom / kLine; i < sizeof(P) / kLine; ++i)
    words ^= reinterpret_cast<const uint32_t*>(&p)[i * kLine / 4];
  // Something has to depend on the words, or nothing is read.
  asm volatile("{ .reg .pred q; setp.eq.u32 q, %0, 0; @q nanosleep.u32 0; }" ::"r"(words));
#endif
}

// Every kernel begins with this: afterwards the next kernel may be launched, and the preceding ones
// have ended and their writes are visible. Threads that have not passed it must touch no memory but
// parameters, unless more was promised (Previous).
BLOCKSCALE_DEVICE void after_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The same for a kernel with parameters p, which the thread blocks that a device holds at once
// (some hundreds) bring meanwhile. Only parameters are read before the wait. The compiler may move
// a load across it if it takes the memory for constant (load_once()); `make waits` shows that it
// has not.
template <class P>
BLOCKSCALE_DEVICE void after_previous([[maybe_unused]] const P& p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr uint32_t kFirstBlocks = 1024;
  if (blockIdx.x < kFirstBlocks && blockIdx.y == 0 && blockIdx.z == 0) bring_parameters(p);
#endif
  after_previous();
}

// The value of the lane whose index differs in the bits of `mask`. Masks stay below 32, so that a
// wavefront of 64 behaves like two warps.
BLOCKSCALE_DEVICE uint32_t shuffle_xor(uint32_t value, int mask) {
#if defined(__HIPCC__)
  return static_cast<uint32_t>(__shfl_xor(static_cast<int>(value), mask, 32));
#else
  return __shfl_xor_sync(~0u, value, mask);
#endif
}

// The value of the lane `by` lanes before; for the first lanes of a warp their own.
BLOCKSCALE_DEVICE uint32_t shuffle_up(uint32_t value, int by = 1) {
#if defined(__HIPCC__)
  return static_cast<uint32_t>(__shfl_up(static_cast<int>(value), by, 32));
#else
  return __shfl_up_sync(~0u, value, by);
#endif
}

// Waits for the kThreads threads of the caller's row (threadIdx.y) of the thread block. (On HIP no
// kernel calls it, as there is no copy engine.)
template <int kThreads>
BLOCKSCALE_DEVICE void sync_row() {
#if defined(__CUDACC__)
  asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "n"(kThreads) : "memory");
#elif defined(BLOCKSCALE_EMULATE)
  emulated::barrier(threadIdx.y + 1);
#endif
}

BLOCKSCALE_DEVICE void sync_warp() {
#if defined(__HIPCC__)
  __builtin_amdgcn_wave_barrier();
#else
  __syncwarp();
#endif
}

// The largest value among the 32 lanes of a warp.
BLOCKSCALE_DEVICE uint32_t warp_max(uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, value);
#else
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = shuffle_xor(value, step);
    value = value > other ? value : other;
  }
  return value;
#endif
}

// The sum over the 32 lanes of a warp.
BLOCKSCALE_DEVICE uint32_t warp_sum(uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_add_sync(~0u, value);
#else
  for (int step = 1; step < 32; step *= 2) value += shuffle_xor(value, step);
  return value;
#endif
}

// The low word of (high : low) >> n; and the high word of (high : low) << n. n < 32.
BLOCKSCALE_DEVICE uint32_t shift_right_in(uint32_t high, uint32_t low, int n) {
#if defined(__HIPCC__)
  return high << 1 << (31 - n) | low >> n;
#else
  return __funnelshift_r(low, high, static_cast<uint32_t>(n));
#endif
}
BLOCKSCALE_DEVICE uint32_t shift_left_in(uint32_t high, uint32_t low, int n) {
#if defined(__HIPCC__)
  return high << n | low >> 1 >> (31 - n);
#else
  return __funnelshift_l(low, high, static_cast<uint32_t>(n));
#endif
}

// Four bytes of (b : a), selected by the nibbles of `which`, lowest first; a's bytes are 0 to 3.
BLOCKSCALE_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t which) {
  return __byte_perm(a, b, which);
}

// Tells the compiler that p points to global memory, which it cannot see where pointers merge.
BLOCKSCALE_DEVICE void in_global_memory([[maybe_unused]] const void* p) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(p));
#endif
}

// Keeps a pointer into global memory in registers, where the compiler would rather recompute it
// every time.
template <class T>
BLOCKSCALE_DEVICE void keep([[maybe_unused]] T*& p) {
#if defined(__CUDACC__)
  asm("" : "+l"(p));
#endif
  in_global_memory(p);
}

// Keeps what is computed from `value` after this point in place: the compiler would hoist it out of
// loops, even for branches that are not taken.
BLOCKSCALE_DEVICE void keep_here([[maybe_unused]] int& value) {
#if defined(__CUDACC__)
  asm volatile("" : "+r"(value));
#endif
}

// Keeps a value in a register: the compiler would rather rematerialize it every time, for example
// as the second constant of an instruction (which takes one besides registers).
BLOCKSCALE_DEVICE uint32_t in_register(uint32_t constant) {
#if defined(__CUDACC__)
  int lanes;  // mask from this lane on: its top bit is set, unknown to the compiler
  asm("mov.u32 %0, %%lanemask_ge;" : "=r"(lanes));
  return constant & static_cast<uint32_t>(lanes >> 31);
#else
  return constant;
#endif
}
// The same for the address of something in shared memory.
template <class T>
BLOCKSCALE_DEVICE T& in_place(T& shared) {
#if defined(__CUDACC__)
  return *static_cast<T*>(__cvta_shared_to_generic(in_register(shared_address(&shared))));
#else
  return shared;
#endif
}

// Stores 16 bytes at once, where the compiler would rather store word by word than gather them.
BLOCKSCALE_DEVICE void store_vector(void* to, const uint4& v) {
#if defined(__CUDACC__)
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
#else
  *static_cast<uint4*>(to) = v;
#endif
}

// The same for data that is not read again soon: it is evicted from the caches first.
BLOCKSCALE_DEVICE void store_vector_once(void* to, const uint4& v) {
#if defined(__CUDACC__)
  __stcs(static_cast<uint4*>(to), v);
#else
  *static_cast<uint4*>(to) = v;
#endif
}
// Prefetches `bytes` from `from` on, both multiples of 16, into the L2 cache.
BLOCKSCALE_DEVICE void ask_for([[maybe_unused]] const void* from, [[maybe_unused]] int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// Stores a word that will be read soon: it stays in the L2 cache while others may go.
BLOCKSCALE_DEVICE void store_to_stay(uint32_t* to, uint32_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(to), "r"(word), "l"(policy)
               : "memory");
#else
  *to = word;
#endif
}

// Loads data that is not written while the kernel runs.
template <class T>
BLOCKSCALE_DEVICE T load_once(const T* p) {
  return __ldg(p);
}
// The same where others will soon read what surrounds it: 128 bytes of memory go to L2.
BLOCKSCALE_DEVICE uint32_t load_once_and_more(const uint32_t* p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t v;
  asm volatile("ld.global.nc.L2::128B.b32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
#else
  return load_once(p);
#endif
}
BLOCKSCALE_DEVICE uint2 load_once_and_more(const uint2* p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint2 v;
  asm volatile("ld.global.nc.L2::128B.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
#else
  return load_once(p);
#endif
}

// 1 / x, correctly rounded, for x and 1 / x normal and well inside the range; NaN for 0. The Newton
// step is the one that __frcp_rn takes there, without its range check.
BLOCKSCALE_DEVICE float reciprocal_of_normal(float x) {
#if !defined(__CUDACC__)
  return x == 0.0f ? bit_cast<float>(kNanBits) : __frcp_rn(x);
#else
  float r;  // within one ulp, so that one Newton step suffices
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
#endif
}

// The bits of a where `mask` is set, those of b elsewhere: one instruction, which the compiler
// would rather split up where it knows some of the bits.
BLOCKSCALE_DEVICE uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xE2;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
  return d;
#else
  return (mask & a) | (~mask & b);
#endif
}

// a * b + c >= 0, rounded up.
BLOCKSCALE_DEVICE float fma_up(float a, float b, float c) {
#if !defined(__CUDACC__)
  // Round to nearest, then one step up if the exact value is above: the product is exact in double,
  // and Knuth's sum gives the error of the addition.
  const float nearest = __fmaf_rn(a, b, c);
  const double p = static_cast<double>(a) * b, sum = p + c, of_c = sum - p;
  const double error = (p - (sum - of_c)) + (c - of_c);
  return (sum - nearest) + error > 0 ? bit_cast<float>(bit_cast<uint32_t>(nearest) + 1) : nearest;
#else
  return __fmaf_ru(a, b, c);
#endif
}

// a + b, neither negative, rounded towards zero.
BLOCKSCALE_DEVICE float add_to_zero(float a, float b) {
#if !defined(__CUDACC__)
  // Round to nearest, then one step back if that is above; the amount it was rounded up by is
  // exact.
  const float low = min(a, b), high = max(a, b), sum = a + b;
  return sum - high > low ? bit_cast<float>(bit_cast<uint32_t>(sum) - 1) : sum;
#else
  return __fadd_rz(a, b);
#endif
}

// The bits of max(|a|, |b|); NaN wins.
BLOCKSCALE_DEVICE uint32_t max_magnitude(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(fabsf(a)), "f"(fabsf(b)));
  return bit_cast<uint32_t>(d);
#else
  return max(bit_cast<uint32_t>(a) & kAbsMask, bit_cast<uint32_t>(b) & kAbsMask);
#endif
}

// max(|a|, |b|) of two BF16 pairs at once, with meaningless signs; NaN wins.
BLOCKSCALE_DEVICE uint32_t max_magnitude_bf16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t d;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#elif defined(BLOCKSCALE_EMULATE)
  return max_nan_xorsign_abs_bf16x2(a, b);
#else
  const uint32_t x = a & 0x7FFF7FFF, y = b & 0x7FFF7FFF;
  const uint32_t high = (x >> 16) > (y >> 16) ? x : y;
  const uint32_t low = (x & 0xFFFF) > (y & 0xFFFF) ? x : y;
  return (high & 0xFFFF0000) | (low & 0xFFFF);
#endif
}

// min(|a|, |b|) of two BF16 pairs at once, with the signs of a; b is not negative, and neither is
// NaN.
BLOCKSCALE_DEVICE uint32_t min_magnitude_bf16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t d;
  asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  const uint32_t x = a & 0x7FFF7FFF;
  const uint32_t high = (x >> 16) < (b >> 16) ? x : b;
  const uint32_t low = (x & 0xFFFF) < (b & 0xFFFF) ? x : b;
  return (high & 0xFFFF0000) | (low & 0xFFFF) | (a & 0x80008000);
#endif
}

// Two FP32 values to a BF16 pair, round to nearest even.
BLOCKSCALE_DEVICE uint32_t to_bf16x2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
#else
  auto one = [](float x) -> uint32_t {
    const uint32_t bits = bit_cast<uint32_t>(x);
    return (bits & kAbsMask) > kInfBits ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  };
  return one(high) << 16 | one(low);
#endif
}

// Two FP32 values between 0 and FP16's largest to FP16, rounded towards zero.
BLOCKSCALE_DEVICE uint32_t to_fp16x2_to_zero(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t d;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
#else
  auto one = [](float x) -> uint32_t {
    const float unit = exp2i(-24);  // below the smallest normal number, 2^-14
    return x < exp2i(-14) ? static_cast<uint32_t>(x / unit)
                          : (bit_cast<uint32_t>(x) - (112u << 23)) >> 13;
  };
  return one(high) << 16 | one(low);
#endif
}

// Four FP32 values to four FP8 codes, round to nearest even, saturating.
template <bool kE5m2>
BLOCKSCALE_DEVICE uint32_t to_fp8x4(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t low, high;
  if constexpr (kE5m2) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  }
  return static_cast<uint32_t>(high) << 16 | low;
#else
  constexpr Format kFormat = kE5m2 ? Format::e5m2 : Format::e4m3fn;
  return encode(kFormat, a) | encode(kFormat, b) << 8 | encode(kFormat, c) << 16 |
         static_cast<uint32_t>(encode(kFormat, d)) << 24;
#endif
}

// The FP8 codes in the low half of `codes` to FP32, times kFactor, a power of two with which they
// are exact in binary16.
template <bool kE5m2, int kFactor>
BLOCKSCALE_DEVICE void from_fp8x2(uint32_t codes, float* v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  const auto two = static_cast<uint16_t>(codes);
  uint32_t halves;
  if constexpr (kE5m2)
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(two));
  else
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
  if constexpr (kFactor != 1) {
    constexpr uint32_t kHalf = (15 + __builtin_ctz(kFactor)) << 10;
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(halves) : "r"(kHalf << 16 | kHalf));
  }
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(v[0]), "=f"(v[1])
      : "r"(halves));
#else
  for (int i = 0; i < 2; ++i)
    v[i] = decode(kE5m2 ? Format::e5m2 : Format::e4m3fn, codes >> (8 * i) & 0xFF) * kFactor;
#endif
}

BLOCKSCALE_DEVICE float float_of_fp16(uint16_t bits) {
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
#else
  return from_fp16(bits);
#endif
}

}  // namespace blockscale::gpu
