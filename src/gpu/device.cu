// What this build can run on; kernels of one thread.
#include "gpu/launch.h"

namespace blockscale::gpu {
namespace {

// Stands for every kernel of the build: where it loads, all of them do.
__global__ void probe_kernel() {}  // never launched

__global__ void copy_kernel(WordCopy word) {
  after_previous();
  *word.to = *word.from;
}

__global__ void begin_forward_kernel(int64_t* offset, int64_t* upcoming, int64_t* copy,
                                     int64_t step) {
  after_previous();
  const int64_t now = *upcoming;
  *offset = *copy = now;
  *upcoming = now + step;
}

}  // namespace

std::string unavailable() {
  int devices = 0;
  if (device_count(&devices) != kSuccess || devices == 0) {
    (void)last_error();  // a failed query is no error of the next launch
    return "no GPU is visible; every spec runs on the CPU";
  }
  if (has_kernel(probe_kernel)) return "";
  (void)last_error();
  return std::string("this build has GPU code for ") + BLOCKSCALE_GPU_TARGETS + ", the GPU is a " +
         device_text() + "; build for it with -DCMAKE_CUDA_ARCHITECTURES=...";
}

std::string failure() {
  const Error_t error = ask_for_memory();
  if (error == kSuccess) return "";
  (void)last_error();
  return error_text(error);
}

int lines_of_a_thread(int64_t runs, int most) {
  const int64_t threads = static_cast<int64_t>(multiprocessors(current_device())) * 256;
  int lines = most;
  while (lines > 1 && runs < 4 * threads * lines) lines /= 2;
  return lines;
}

void copy(const WordCopy& word, const Stream& stream) {
  start(copy_kernel, 1, 1, 0, native(stream), word);
}

void begin_forward(int64_t* offset, int64_t* upcoming, int64_t* copy, bool counts,
                   const Stream& stream) {
  start(begin_forward_kernel, 1, 1, 0, native(stream), offset, upcoming, copy, int64_t{counts});
  check_launch("begin_forward");
}

}  // namespace blockscale::gpu
