// A kernel's threads as fibers: each has a stack, and the scheduler below resumes them in turn.
#include "gpu/port/host.h"

#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace blockscale::gpu::emulated {

alignas(128) uint8_t dynamic_shared[kSharedBytes];
const void* last_kernel = nullptr;

namespace {

constexpr unsigned kWarp = 32, kMaxThreads = 1024;
constexpr size_t kStackBytes = 256 * 1024;

enum class State { ready, at_exchange, at_barrier, yielding, done };

// One of the contexts that the calling thread switches between. It is entered first by ucontext,
// then by the cheaper longjmp; AddressSanitizer is told about every switch of stacks.
struct Context {
  ucontext_t entry;
  void* at[5];  // where it resumes: GCC's and Clang's built-in jump
  bool entered = false;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* shadow = nullptr;
};

struct Fiber {
  Context context;
  State state = State::done;
  uint32_t value = 0;  // passed to an exchange, and received from it
  unsigned from = 0;
  unsigned barrier = 0;  // its number
  std::unique_ptr<uint8_t[]> stack{new uint8_t[kStackBytes]};
};

struct Machine {
  std::vector<std::unique_ptr<Fiber>> fibers;
  Context scheduler;
  unsigned current = 0, threads = 0;
  dim3 shape;  // of the thread block
  bool progress = false;
  const std::function<void()>* body = nullptr;
  bool backwards = false;
};
Machine machine;

void begin_switch(Context& from, const Context& to) {
  __sanitizer_start_switch_fiber(&from.shadow, to.stack, to.stack_bytes);
}
void end_switch(Context& now, Context* learn) {
  __sanitizer_finish_switch_fiber(now.shadow, learn ? &learn->stack : nullptr,
                                  learn ? &learn->stack_bytes : nullptr);
}

// Not instrumented: before a call that does not return, AddressSanitizer clears the shadow of a
// whole stack, which takes longer than the kernels.
__attribute__((noinline, no_sanitize_address)) void enter(Context& to) {
  if (!to.entered) {
    to.entered = true;
    setcontext(&to.entry);
  }
  __builtin_longjmp(to.at, 1);
}
__attribute__((noinline, no_sanitize_address)) void change(Context& from, Context& to,
                                                           Context* learn) {
  begin_switch(from, to);
  if (__builtin_setjmp(from.at) == 0) enter(to);
  end_switch(from, learn);
}

// A fiber's whole life: runs the body of one thread block after another.
void live() {
  Fiber& self = *machine.fibers[machine.current];
  end_switch(self.context, &machine.scheduler);
  for (;;) {
    (*machine.body)();
    self.state = State::done;
    change(self.context, machine.scheduler, nullptr);
  }
}

void make_fibers(unsigned count) {
  machine.scheduler.entered = true;
  while (machine.fibers.size() < count) {
    machine.fibers.push_back(std::make_unique<Fiber>());
    Fiber& f = *machine.fibers.back();
    f.context.stack = f.stack.get(), f.context.stack_bytes = kStackBytes;
    getcontext(&f.context.entry);
    f.context.entry.uc_stack.ss_sp = f.stack.get();
    f.context.entry.uc_stack.ss_size = kStackBytes;
    f.context.entry.uc_link = nullptr;
    makecontext(&f.context.entry, live, 0);
  }
}

void resume(unsigned thread) {
  machine.current = thread;
  threadIdx = dim3(thread % machine.shape.x, thread / machine.shape.x, 0);
  change(machine.scheduler, machine.fibers[thread]->context, nullptr);
}

void pause(State state) {
  Fiber& self = *machine.fibers[machine.current];
  self.state = state;
  change(self.context, machine.scheduler, nullptr);
}

// The i-th of `count` in this launch's order.
unsigned turn(unsigned i, unsigned count) { return machine.backwards ? count - 1 - i : i; }

unsigned count_in(State state, unsigned first, unsigned end) {
  unsigned count = 0;
  for (unsigned t = first; t < end; ++t) count += machine.fibers[t]->state == state;
  return count;
}

void complete_exchange(unsigned first) {
  uint32_t got[kWarp];
  for (unsigned lane = 0; lane < kWarp; ++lane)
    got[lane] = machine.fibers[first + machine.fibers[first + lane]->from]->value;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    machine.fibers[first + lane]->value = got[lane];
    machine.fibers[first + lane]->state = State::ready;
  }
}

// Runs a warp until every lane is at a barrier of the thread block, has yielded, or is done.
void run_warp(unsigned first) {
  const unsigned end = std::min(first + kWarp, machine.threads);
  for (;;) {
    for (unsigned i = 0; i < end - first; ++i) {
      const unsigned thread = first + turn(i, end - first);
      if (machine.fibers[thread]->state == State::ready) resume(thread);
    }
    const unsigned waiting = count_in(State::at_exchange, first, end);
    if (waiting == 0) return;
    if (waiting < kWarp && count_in(State::yielding, first, end) > 0) return;
    if (waiting < kWarp)
      misuse("warp " + std::to_string(first / kWarp) + ": " + std::to_string(waiting) +
             " lanes at an exchange, " + std::to_string(count_in(State::at_barrier, first, end)) +
             " at a barrier, " + std::to_string(count_in(State::done, first, end)) + " returned");
    complete_exchange(first);
  }
}

// Lets threads [first, end) continue if all of them are at barrier `number`.
bool release(unsigned number, unsigned first, unsigned end) {
  for (unsigned t = first; t < end; ++t) {
    const Fiber& f = *machine.fibers[t];
    if (f.state != State::at_barrier || f.barrier != number) return false;
  }
  for (unsigned t = first; t < end; ++t) machine.fibers[t]->state = State::ready;
  return true;
}

void run_block() {
  const unsigned threads = machine.threads, warps = (threads + kWarp - 1) / kWarp;
  const dim3& shape = machine.shape;
  for (unsigned t = 0; t < threads; ++t) machine.fibers[t]->state = State::ready;
  for (;;) {
    machine.progress = false;
    for (unsigned i = 0; i < warps; ++i) run_warp(turn(i, warps) * kWarp);
    if (count_in(State::done, 0, threads) == threads) return;
    bool released = release(0, 0, threads);
    for (unsigned row = 0; row < shape.y; ++row)
      released |= release(row + 1, row * shape.x, (row + 1) * shape.x);
    if (!released && !machine.progress)
      misuse(std::to_string(count_in(State::at_barrier, 0, threads)) + " of " +
             std::to_string(threads) + " threads at a barrier, " +
             std::to_string(count_in(State::yielding, 0, threads)) +
             " waiting for a copy, the others returned");
    for (unsigned t = 0; t < threads; ++t)
      if (machine.fibers[t]->state == State::yielding) machine.fibers[t]->state = State::ready;
  }
}

}  // namespace

void misuse(const std::string& what) {
  std::fprintf(stderr, "emulated kernel, block (%u, %u, %u), thread %u: %s\n", blockIdx.x,
               blockIdx.y, blockIdx.z, threadIdx.x, what.c_str());
  std::abort();
}

void barrier(unsigned number) {
  machine.fibers[machine.current]->barrier = number;
  pause(State::at_barrier);
}
void yield() { pause(State::yielding); }
void progress() { machine.progress = true; }

uint32_t exchange(uint32_t value, unsigned from) {
  Fiber& self = *machine.fibers[machine.current];
  self.value = value, self.from = from;
  pause(State::at_exchange);
  return self.value;
}

void run(const dim3& grid, const dim3& shape, size_t shared_bytes,
         const std::function<void()>& body) {
  const unsigned threads = shape.x * shape.y;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y >= 1 << 16 || grid.z >= 1 << 16 ||
      threads == 0 || threads > kMaxThreads || shared_bytes > kSharedBytes)
    misuse("a launch that no GPU would take");
  make_fibers(threads);
  machine.threads = threads;
  machine.shape = shape;
  machine.body = &body;
  machine.backwards = !machine.backwards;
  gridDim = grid, blockDim = shape;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        std::memset(dynamic_shared, 0xFF, shared_bytes);  // NaN, whatever the type
        run_block();
      }
}

}  // namespace blockscale::gpu::emulated
