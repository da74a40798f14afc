#include "runner.h"

#include <algorithm>

#include "device.h"

namespace blockscale::testing {
namespace {

class CpuRunner final : public Runner {
 public:
  using Runner::quantize;
  void quantize(const Input&, const ConstMatrix& x, Output& out, const QuantizeOptions& options,
                uint64_t variant) override {
    if (variant % 8 == 0)
      blockscale::quantize(x, out.view, options);
    else if (variant % 8 < 4)
      blockscale::quantize(x, out.view, options, serial_executor());
    else
      blockscale::quantize(x, out.view, options, OddExecutor(variant));
  }
  void quantize_dual(const Input& x, Output& row, Output& column,
                     const QuantizeOptions& row_options, const QuantizeOptions& column_options,
                     uint64_t variant) override {
    blockscale::quantize_dual(x.view(), row.view, column.view, row_options, column_options,
                              OddExecutor(variant));
  }
  void amax(const Input& x, const QuantSpec& spec, int axis, float* out, uint64_t variant,
            const Groups& groups) override {
    blockscale::amax(x.view(), spec, axis, out, OddExecutor(variant), groups);
  }
  void dequantize(const Output& q, const Matrix& x, Guarded&, uint64_t variant) override {
    blockscale::dequantize(as_const(q.view), x, OddExecutor(variant));
  }
  void relayout(const Output& from, Output& to, uint64_t variant) override {
    blockscale::relayout(as_const(from.view), to.view, OddExecutor(variant));
  }
  void transpose(const Output& from, Output& to, uint64_t variant) override {
    blockscale::transpose(as_const(from.view), to.view, OddExecutor(variant));
  }
};

#if defined(BLOCKSCALE_CUDA) || defined(BLOCKSCALE_EMULATE)
// Options whose pointers lead to the device; odd variants keep the key there too.
class DeviceOptions {
 public:
  DeviceOptions(const QuantizeOptions& host, int64_t batch, uint64_t variant)
      : amax_(host.amax, host.amax ? batch * 4 : 0), options(host) {
    if (host.amax) options.amax = amax_.as<float>();
    if (!host.rng || variant % 2 == 0) return;
    options.device_seed_step = variant * 0x9E3779B97F4A7C15;
    const uint64_t key[] = {host.rng->seed - options.device_seed_step, host.rng->offset};
    to_device(key_.at(), key, sizeof(key));
    options.rng.reset();
    options.device_seed = key_.as<int64_t>();
    options.device_offset = options.device_seed + 1;
  }

 private:
  Memory amax_, key_{16};

 public:
  QuantizeOptions options;
};

class DeviceRunner final : public Runner {
 public:
  using Runner::quantize;
  std::string unavailable() const override {
    for (const Backend& b : backends())
      if (b.name == "cuda" && !b.available) return b.reason;
    return "";
  }
  void quantize(const Input& frame, const ConstMatrix& x, Output& out,
                const QuantizeOptions& options, uint64_t variant) override {
    const TestStream stream;
    const DeviceInput in(frame, x);
    const DeviceOutput to(out);
    const DeviceOptions o(options, out.view.matrices(), variant);
    blockscale::quantize(in.view, to.view, o.options, stream);
    stream.wait();
    to.read(out);
  }
  void quantize_dual(const Input& x, Output& row, Output& column,
                     const QuantizeOptions& row_options, const QuantizeOptions& column_options,
                     uint64_t variant) override {
    const TestStream stream;
    const DeviceInput in(x, x.view());
    const DeviceOutput to_row(row);
    DeviceOutput to_column(column);
    to_column.view.groups = to_row.view.groups;
    const DeviceOptions r(row_options, row.view.matrices(), variant),
        c(column_options, row.view.matrices(), variant);
    blockscale::quantize_dual(in.view, to_row.view, to_column.view, r.options, c.options, stream);
    stream.wait();
    to_row.read(row);
    to_column.read(column);
  }
  void amax(const Input& x, const QuantSpec& spec, int axis, float* out, uint64_t,
            const Groups& groups) override {
    const TestStream stream;
    const DeviceInput in(x, x.view());
    const int64_t bytes = (groups ? groups.count : x.view().batch) * 4;
    const Memory to(out, bytes), offsets(groups.offsets, bytes_of(groups));
    Groups on_device = groups;
    on_device.offsets = offsets.at();
    blockscale::amax(in.view, spec, axis, to.as<float>(), stream, on_device);
    stream.wait();
    to.read(out, bytes);
  }
  void dequantize(const Output& q, const Matrix& x, Guarded& storage, uint64_t) override {
    const TestStream stream;
    const DeviceOutput from(q);
    const Memory to(storage.all(), storage.all_size());
    Matrix y = x;
    y.data = to.at(static_cast<uint8_t*>(x.data) - storage.all());
    blockscale::dequantize(as_const(from.view), y, stream);
    stream.wait();
    to.read(storage.all(), storage.all_size());
  }
  void relayout(const Output& from, Output& to, uint64_t) override {
    const TestStream stream;
    const DeviceOutput f(from);
    DeviceOutput t(to);
    t.view.groups = f.view.groups;
    blockscale::relayout(as_const(f.view), t.view, stream);
    stream.wait();
    t.read(to);
  }
  void transpose(const Output& from, Output& to, uint64_t) override {
    const TestStream stream;
    const DeviceOutput f(from), t(to);
    blockscale::transpose(as_const(f.view), t.view, stream);
    stream.wait();
    t.read(to);
  }
#ifdef BLOCKSCALE_EMULATE
  const void* last_kernel() const override { return gpu::emulated::last_kernel; }
#endif
};
#else
class DeviceRunner final : public Runner {
 public:
  using Runner::quantize;
  std::string unavailable() const override { return "this build has no CUDA kernels"; }
  void quantize(const Input&, const ConstMatrix&, Output&, const QuantizeOptions&,
                uint64_t) override {}
  void quantize_dual(const Input&, Output&, Output&, const QuantizeOptions&, const QuantizeOptions&,
                     uint64_t) override {}
  void amax(const Input&, const QuantSpec&, int, float*, uint64_t, const Groups&) override {}
  void dequantize(const Output&, const Matrix&, Guarded&, uint64_t) override {}
  void relayout(const Output&, Output&, uint64_t) override {}
  void transpose(const Output&, Output&, uint64_t) override {}
};
#endif

}  // namespace

std::vector<std::string> test_backends() {
#ifdef BLOCKSCALE_EMULATE
  return {"emulated"};
#else
  return {"cpu", "cuda"};
#endif
}

namespace {
std::vector<Run> runs(size_t most_of_cpu) {
  std::vector<Run> all;
  for (const std::string& backend : test_backends()) {
    std::vector<uint64_t> seeds = test_seeds();
    if (backend == "cpu") seeds.resize(std::min(seeds.size(), most_of_cpu));
    for (const uint64_t seed : seeds) all.emplace_back(backend, seed);
  }
  return all;
}
}  // namespace

std::vector<Run> all_runs() { return runs(SIZE_MAX); }
std::vector<Run> kernel_runs() { return runs(1); }

std::unique_ptr<Runner> make_runner(const std::string& backend) {
  if (backend == "cpu") return std::make_unique<CpuRunner>();
  return std::make_unique<DeviceRunner>();
}

}  // namespace blockscale::testing
