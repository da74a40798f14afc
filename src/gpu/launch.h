// Host side of the GPU backend: streams, launches, and what went wrong with them.
#pragma once

#include <algorithm>
#include <utility>

#include "blockscale/status.h"
#include "gpu/gpu.h"
#include "gpu/port.h"
#include "per_device.h"

namespace blockscale::gpu {

inline NativeStream native(const Stream& stream) {
  return static_cast<NativeStream>(stream.handle());
}

// Starts a kernel with these parameters, and may first fill in those that only it knows.
template <class Params>
using Launcher = void (*)(Params&, NativeStream);

// The first failure of this thread's launches since check_launch() was called. The runtime has a
// record of its own, but there it may be that of somebody else's call.
inline Error_t& launch_failure() {
  static thread_local Error_t failure = kSuccess;
  return failure;
}
inline void note_failure(Error_t e) {
  if (launch_failure() == kSuccess) launch_failure() = e;
}
template <class... Params, class... Args>
void start(void (*kernel)(Params...), const dim3& grid, const dim3& threads, size_t shared_bytes,
           NativeStream stream, const Args&... args) {
  note_failure(launch_kernel(kernel, grid, threads, shared_bytes, stream, args...));
}
inline void clear_async(void* p, size_t bytes, NativeStream stream) {
  note_failure(set_zero(p, bytes, stream));
}

// Takes the failure away, from the runtime's record too: it is no error of the next launch.
inline Error_t take_failure() {
  const Error_t e = std::exchange(launch_failure(), kSuccess);
  if (e != kSuccess) (void)last_error();
  return e;
}
// Every operator ends with this: it checks that none of its launches has failed.
inline void check_launch(const char* op) {
  const Error_t e = take_failure();
  if (e == kSuccess) return;
  // failure() launches nothing: where it fails alike, an earlier kernel has failed.
  if (failure() == error_text(e))
    fail(op, "device", error_text(e), "a GPU on which no earlier kernel has failed",
         "start a new process, and find that kernel with compute-sanitizer");
  fail(op, "device", error_text(e),
       "a GPU that this build has kernels for, with the shared memory that they take",
       "see `blockscale doctor`");
}
// In an operator that may throw between a launch and check_launch(), such as where the stream has
// no more workspace: a launch that failed before would be reported by this thread's next operator.
struct ForgetsFailure {
  ~ForgetsFailure() { (void)take_failure(); }
};

// Shared memory per multiprocessor that kernels plan with, less what each thread block takes for
// itself.
inline constexpr int kSharedBytes = 225 * 1024;

// Starts a kernel that takes dynamic shared memory, which it has to be allowed: once per device, or
// again where that failed.
template <auto kKernel, class... Args>
void start_with_shared(const dim3& grid, const dim3& threads, int shared_bytes, NativeStream stream,
                       const Args&... args) {
  static PerDevice allowed;
  allowed.get(current_device(), [&] {
    const Error_t e = allow_shared(reinterpret_cast<const void*>(kKernel), shared_bytes);
    note_failure(e);
    return e == kSuccess;
  });
  start(kKernel, grid, threads, static_cast<size_t>(shared_bytes), stream, args...);
}

// Copies with a kernel: the copy engine takes longer, most of all in graphs.
void copy(const WordCopy& word, const Stream& stream);

// Lines per thread, `most` or a power of two below it, for a kernel with `runs` runs to process:
// few where more would leave multiprocessors without work.
int lines_of_a_thread(int64_t runs, int most);

// Whether x is BF16 with contiguous columns; and whether its rows also start at multiples of 16
// bytes.
inline bool is_bf16_rows(const ConstMatrix& x) {
  return x.dtype == DType::bf16 && x.column_stride == 1;
}
inline bool is_aligned(const ConstMatrix& x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.row_stride % 8 == 0 &&
         x.batch_stride % 8 == 0;
}

// Thread blocks for `count` small pieces of work: a thread takes more than one where there are very
// many.
inline unsigned grid_for(int64_t count) {
  return static_cast<unsigned>(std::min<int64_t>(ceil_div(count, 256), 1 << 16));
}

}  // namespace blockscale::gpu
