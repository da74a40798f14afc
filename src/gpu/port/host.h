// A third vendor for port.h, for tests: kernels as C++ on the host, under CUDA's own names. The
// threads of a thread block are fibers of the calling thread, and one block runs after another;
// shared memory is static. A kernel that does something forbidden ends the program with a message:
// an exchange that not all lanes of the warp reach, a barrier that some threads never reach,
// unaligned vector reads.
//
// It shows which bits kernels compute from which, and that they stay within their buffers. It shows
// neither what the hardware's own instructions do nor every race: threads run from barrier to
// barrier, first to last in one launch and last to first in the next.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define BLOCKSCALE_DYNAMIC_SHARED(name) \
  uint8_t* const name = ::blockscale::gpu::emulated::dynamic_shared

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace blockscale::gpu {

// ---- threads ----

namespace emulated {

inline constexpr size_t kSharedBytes = 227 * 1024;  // per thread block, as on sm_90
extern uint8_t dynamic_shared[kSharedBytes];

extern const void* last_kernel;  // the kernel launched last

// Runs body() as every thread of every block of the grid.
void run(const dim3& grid, const dim3& threads, size_t shared_bytes,
         const std::function<void()>& body);
// Called in a kernel: waits until all threads of the thread block are there, or those of row
// `number` - 1.
void barrier(unsigned number = 0);
// Lets the other threads run; some of them have to, until one calls progress().
void yield();
void progress();
// The value of lane `from` of the warp, once all 32 lanes are there.
uint32_t exchange(uint32_t value, unsigned from);
[[noreturn]] void misuse(const std::string& what);

}  // namespace emulated

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

using NativeStream = void*;
enum Error_t { kSuccess };
template <class... Params, class... Args>
Error_t launch_kernel(void (*kernel)(Params...), const dim3& grid, const dim3& threads,
                      size_t shared_bytes, NativeStream, const Args&... args) {
  emulated::last_kernel = reinterpret_cast<const void*>(kernel);
  const std::tuple<std::remove_const_t<Params>...> given(args...);
  emulated::run(grid, threads, shared_bytes, [&] { std::apply(kernel, given); });
  return kSuccess;
}

inline void __syncthreads() { emulated::barrier(); }
// Whether `here` is nonzero in any thread.
inline int __syncthreads_or(int here) {
  static bool any = false;
  any |= here != 0;
  emulated::barrier();
  const bool result = any;
  emulated::barrier();
  any = false;
  emulated::barrier();
  return result;
}
inline void __syncwarp() { emulated::exchange(0, threadIdx.x % 32); }
inline uint32_t __shfl_xor_sync(uint32_t lanes, uint32_t value, int mask) {
  if (lanes != ~0u) emulated::misuse("an exchange of less than a warp");
  return emulated::exchange(value, threadIdx.x % 32 ^ static_cast<unsigned>(mask));
}
inline uint32_t __shfl_up_sync(uint32_t lanes, uint32_t value, unsigned by) {
  if (lanes != ~0u) emulated::misuse("an exchange of less than a warp");
  const unsigned lane = threadIdx.x % 32;
  return emulated::exchange(value, lane < by ? lane : lane - by);
}
inline uint32_t atomicMax(uint32_t* p, uint32_t value) {
  const uint32_t before = *p;
  *p = std::max(before, value);
  return before;
}

inline uint32_t atomicAdd(uint32_t* p, uint32_t value) {
  const uint32_t before = *p;
  *p += value;
  return before;
}

// ---- the copy engine: copies complete at once ----

inline constexpr bool kCopyEngine = true;
struct CopyMap {
  const uint16_t* data;
  int64_t rows, columns, row_stride, batch_stride;
  int box;
};
inline bool describe(CopyMap& map, const void* data, int64_t rows, int64_t columns, int64_t,
                     int64_t row_stride, int64_t batch_stride, int box) {
  map = {static_cast<const uint16_t*>(data), rows, columns, row_stride, batch_stride, box};
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride % 8 == 0 &&
         batch_stride % 8 == 0 && row_stride >= columns;
}
struct CopyBarrier {
  int arrivals, left;
  uint32_t phase;
};
inline void init(CopyBarrier& b, int arrivals) { b = {arrivals, arrivals, 0}; }
inline void arrive(CopyBarrier& b) {
  if (--b.left > 0) return;
  b.left = b.arrivals;
  b.phase ^= 1;
  emulated::progress();
}
inline void wait(const CopyBarrier& b, uint32_t parity) {
  while (b.phase == (parity & 1)) emulated::yield();
}
inline void copy_tile(void* to, int bytes, const CopyMap& map, int column, int row, int batch,
                      CopyBarrier& done) {
  if (reinterpret_cast<uintptr_t>(to) % 128 != 0 || bytes != 2 * map.box * map.box)
    emulated::misuse("a copy that the engine would not make");
  auto* out = static_cast<uint16_t*>(to);
  for (int64_t r = row; r < row + map.box; ++r)
    for (int64_t c = column; c < column + map.box; ++c)
      *out++ = r < map.rows && c < map.columns
                   ? map.data[batch * map.batch_stride + r * map.row_stride + c]
                   : uint16_t{0};
  arrive(done);
}

// ---- arithmetic; the file is compiled without contraction ----

using std::max;
using std::min;

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float x) { return 1.0f / x; }

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t n) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (n & 31));
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t n) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) << (n & 31) >> 32);
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t which) {
  if (which & 0xFFFF8888) emulated::misuse("a permutation that replicates signs");
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i)
    out |= static_cast<uint32_t>(bytes >> (8 * (which >> (4 * i) & 7)) & 0xFF) << (8 * i);
  return out;
}
inline uint32_t max_nan_xorsign_abs_bf16x2(uint32_t a, uint32_t b) {
  uint32_t out = (a ^ b) & 0x80008000;
  for (int half = 0; half < 32; half += 16) {
    const uint32_t larger = std::max(a >> half & 0x7FFF, b >> half & 0x7FFF);
    out |= (larger > 0x7F80 ? 0x7FFF : larger) << half;  // one NaN for all
  }
  return out;
}
template <class T>
T __ldg(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0) emulated::misuse("a load that is unaligned");
  return *p;
}

// ---- the device ----

inline Error_t last_error() { return kSuccess; }
inline const char* error_text(Error_t) { return "no error"; }
inline Error_t set_zero(void* p, size_t bytes, NativeStream) {
  std::memset(p, 0, bytes);
  return kSuccess;
}
inline int current_device() { return 0; }
inline int multiprocessors(int) { return 2; }  // few, so that thread blocks have to walk over tiles
inline int shared_limit(int) { return static_cast<int>(emulated::kSharedBytes); }
inline Error_t allow_shared(const void*, int) { return kSuccess; }
inline Error_t device_count(int* count) {
  *count = 1;
  return kSuccess;
}
inline Error_t ask_for_memory() { return kSuccess; }
inline bool has_kernel(void (*)()) { return true; }
inline std::string device_text() { return "emulated"; }

}  // namespace blockscale::gpu
