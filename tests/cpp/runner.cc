#include "runner.h"

#ifdef BLOCKSCALE_CUDA
#include <cuda_runtime_api.h>
#endif

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
};

#ifdef BLOCKSCALE_CUDA
void check(cudaError_t e) {
  if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
}

class Memory {
 public:
  explicit Memory(int64_t size) {
    check(cudaMalloc(&data_, static_cast<size_t>(std::max<int64_t>(size, 1))));
  }
  Memory(const void* from, int64_t size) : Memory(size) {
    check(cudaMemcpy(data_, from, static_cast<size_t>(size), cudaMemcpyHostToDevice));
    check(cudaDeviceSynchronize());  // small copies may return before they arrive
  }
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  ~Memory() { cudaFree(data_); }
  uint8_t* at(int64_t offset = 0) const { return static_cast<uint8_t*>(data_) + offset; }
  void read(void* to, int64_t size) const {
    check(cudaMemcpy(to, data_, static_cast<size_t>(size), cudaMemcpyDeviceToHost));
  }

 private:
  void* data_ = nullptr;
};

class TestStream final : public Stream {
 public:
  TestStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~TestStream() override { cudaStreamDestroy(stream_); }
  void* handle() const override { return stream_; }
  void* workspace(int64_t bytes) const override {
    pieces_.emplace_back(bytes);
    return pieces_.back().at();
  }
  void wait() const { check(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
  mutable std::vector<Memory> pieces_;
};

int64_t bytes_of(const Groups& groups) { return groups.count * (groups.wide ? 8 : 4); }

// An Output's buffers on the device, guards and poison included; copied back when it goes.
class DeviceOutput {
 public:
  explicit DeviceOutput(const Output& out)
      : codes_(out.codes.all(), out.codes.all_size()),
        scales_(out.scales.all(), out.scales.all_size()),
        outer_(out.outer.all(), out.outer.all_size()),
        offsets_(out.view.groups.offsets, bytes_of(out.view.groups)),
        view(out.view) {
    if (view.groups) view.groups.offsets = offsets_.at();
    view.codes = codes_.at(Guarded::kGuard);
    view.scales = scales_.at(Guarded::kGuard);
    if (view.outer) view.outer = reinterpret_cast<float*>(outer_.at(Guarded::kGuard));
  }
  void read(Output& out) const {
    codes_.read(out.codes.all(), out.codes.all_size());
    scales_.read(out.scales.all(), out.scales.all_size());
    outer_.read(out.outer.all(), out.outer.all_size());
  }

 private:
  Memory codes_, scales_, outer_, offsets_;

 public:
  Quantized view;
};

class DeviceInput {
 public:
  DeviceInput(const Input& frame, const ConstMatrix& x)
      : storage_(frame.storage().data(), static_cast<int64_t>(frame.storage().size())), view(x) {
    view.data = storage_.at(static_cast<const uint8_t*>(x.data) - frame.storage().data());
  }

 private:
  Memory storage_;

 public:
  ConstMatrix view;
};

// Options whose pointers lead to the device; odd variants keep the key there too.
class DeviceOptions {
 public:
  DeviceOptions(const QuantizeOptions& host, int64_t batch, uint64_t variant)
      : amax_(host.amax, host.amax ? batch * 4 : 0), options(host) {
    if (host.amax) options.amax = reinterpret_cast<const float*>(amax_.at());
    if (!host.rng || variant % 2 == 0) return;
    const uint64_t key[] = {host.rng->seed, host.rng->offset};
    check(cudaMemcpy(key_.at(), key, sizeof(key), cudaMemcpyHostToDevice));
    check(cudaDeviceSynchronize());
    options.rng.reset();
    options.device_seed = reinterpret_cast<const int64_t*>(key_.at());
    options.device_offset = options.device_seed + 1;
  }

 private:
  Memory amax_, key_{16};

 public:
  QuantizeOptions options;
};

class CudaRunner final : public Runner {
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
    blockscale::amax(in.view, spec, axis, reinterpret_cast<float*>(to.at()), stream, on_device);
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
};
#else
class CudaRunner final : public Runner {
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
};
#endif

}  // namespace

std::unique_ptr<Runner> make_runner(const std::string& backend) {
  if (backend == "cuda") return std::make_unique<CudaRunner>();
  return std::make_unique<CpuRunner>();
}

}  // namespace blockscale::testing
