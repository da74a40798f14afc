// The backends that the property tests run on, behind one interface over host memory.
#pragma once

#include <memory>
#include <string>

#include "buffers.h"

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

  // The kernel that ran last, where that is known.
  virtual const void* last_kernel() const { return nullptr; }

  void quantize(const Input& x, Output& out, const QuantizeOptions& options, uint64_t variant = 0) {
    quantize(x, x.view(), out, options, variant);
  }
};

// "cpu" and "cuda"; or "emulated" alone, in the executable whose GPU kernels run on the host.
std::vector<std::string> test_backends();
std::unique_ptr<Runner> make_runner(const std::string& backend);

}  // namespace blockscale::testing
