// The default executors: one runs in the calling thread, one has a pool of one thread per logical
// processor.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "blockscale/ops.h"

namespace blockscale {
namespace {

class SerialExecutor final : public Executor {
 public:
  void parallel_for(int64_t count, const Body& body) const override {
    if (count > 0) body(0, count);
  }
};

// Workers and the caller take chunks from one counter until it runs out.
class PoolExecutor final : public Executor {
 public:
  explicit PoolExecutor(unsigned threads) : process_(getpid()) {
    workers_.reserve(threads);
    try {
      for (unsigned i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (const std::exception&) {
      // The system provides no more threads; use those already started.
    }
  }

  void parallel_for(int64_t count, const Body& body) const override {
    if (count <= 0) return;
    const auto threads = static_cast<int64_t>(workers_.size()) + 1;
    // One call at a time uses the pool. Nested and concurrent calls run in the calling thread, and
    // so do all calls in a forked process, which has none of the pool's threads.
    if (threads == 1 || count == 1 || getpid() != process_ || busy_.exchange(true))
      return body(0, count);
    const Release release{busy_};

    Job job{&body, count, std::max<int64_t>(1, count / (4 * threads))};
    {
      std::lock_guard lock(mutex_);
      job_ = &job;
      ++generation_;
      active_ = static_cast<int>(workers_.size());
    }
    wake_.notify_all();
    job.run();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return active_ == 0; });
    job_ = nullptr;
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  struct Job {
    const Body* body;
    int64_t count, chunk;
    std::atomic<int64_t> next{0};
    std::mutex error_mutex{};
    std::exception_ptr error{};

    Job(const Body* b, int64_t n, int64_t c) : body(b), count(n), chunk(c) {}
    void run() {
      for (int64_t begin; (begin = next.fetch_add(chunk)) < count;) {
        try {
          (*body)(begin, std::min(begin + chunk, count));
        } catch (...) {
          std::lock_guard lock(error_mutex);
          error = std::current_exception();
        }
      }
    }
  };

  struct Release {
    std::atomic<bool>& busy;
    ~Release() { busy = false; }
  };

  void work() {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      Job* job = job_;
      lock.unlock();
      job->run();
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  const pid_t process_;
  std::vector<std::thread> workers_;
  mutable std::atomic<bool> busy_{false};
  mutable std::mutex mutex_;
  mutable std::condition_variable wake_, done_;
  mutable Job* job_ = nullptr;
  mutable uint64_t generation_ = 0;
  mutable int active_ = 0;
};

}  // namespace

const Executor& serial_executor() {
  static const SerialExecutor executor;
  return executor;
}

const Executor& default_executor() {
  // Never destroyed: a forked process has none of its threads, and would wait for them.
  static const auto& executor =
      *new PoolExecutor(std::max(1u, std::thread::hardware_concurrency()));
  return executor;
}

}  // namespace blockscale
