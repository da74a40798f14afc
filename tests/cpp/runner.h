// The backends that the property tests run on, behind one interface over host memory.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "buffers.h"
#include "cases.h"

namespace blockscale::testing {

class Runner {
 public:
  virtual ~Runner() = default;
  // Why the backend cannot run here; empty when it can.
  virtual std::string unavailable() const { return ""; }
  // `x` is a view into `frame`; `variant` chooses among ways to run that must not matter (how work
  // is split over threads, where keys lie).
  virtual void quantize(const Input& frame, const ConstMatrix& x, Output& out,
                        const QuantizeOptions& options, uint64_t variant) = 0;
  virtual void quantize_dual(const Input& x, Output& row, Output& column,
                             const QuantizeOptions& row_options,
                             const QuantizeOptions& column_options, uint64_t variant) = 0;
  virtual void amax(const Input& x, const QuantSpec& spec, int axis, float* out, uint64_t variant,
                    const Groups& groups = {}) = 0;
  // `x` points into `storage`.
  virtual void dequantize(const Output& q, const Matrix& x, Guarded& storage, uint64_t variant) = 0;
  virtual void relayout(const Output& from, Output& to, uint64_t variant) = 0;
  virtual void transpose(const Output& from, Output& to, uint64_t variant) = 0;

  // The kernel that ran last, where that is known.
  virtual const void* last_kernel() const { return nullptr; }

  void quantize(const Input& x, Output& out, const QuantizeOptions& options, uint64_t variant = 0) {
    quantize(x, x.view(), out, options, variant);
  }
};

// "cpu" and "cuda"; or "emulated" alone, in the executable whose GPU kernels run on the host.
std::vector<std::string> test_backends();
std::unique_ptr<Runner> make_runner(const std::string& backend);

// A backend, and a seed of a test's random cases.
using Run = std::tuple<std::string, uint64_t>;
// All of both; and for tests of what is compiled for GPUs, which has no meaning on a CPU, one seed
// there.
std::vector<Run> all_runs(), kernel_runs();

// A property test of one backend and one seed: BLOCKSCALE_BACKEND_TESTS(Name, all_runs())
// instantiates it. Skipped where the backend cannot run.
class BackendTest : public ::testing::TestWithParam<Run> {
 protected:
  void SetUp() override {
    runner = make_runner(std::get<0>(GetParam()));
    if (const std::string reason = runner->unavailable(); !reason.empty()) GTEST_SKIP() << reason;
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed()));
  }
  static uint64_t seed() { return std::get<1>(GetParam()); }
  std::unique_ptr<Runner> runner;
};
#define BLOCKSCALE_BACKEND_TESTS(name, runs)                                                 \
  INSTANTIATE_TEST_SUITE_P(Backends, name, ::testing::ValuesIn(runs), [](const auto& info) { \
    return std::get<0>(info.param) + std::to_string(info.index);                             \
  })

}  // namespace blockscale::testing
