// The API boundary: every argument is checked, once; then the backend runs.
#include <cfenv>

#include "blockscale/ops.h"
#include "checks.h"
#include "cpu/cpu.h"
#include "gpu/gpu.h"
#include "text.h"

namespace blockscale {
namespace {

// Ensures IEEE arithmetic, however the caller's thread is set (e.g. by torch.set_flush_denormal).
class StrictFloat {
 public:
  StrictFloat() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~StrictFloat() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
};

class StrictExecutor final : public Executor {
 public:
  explicit StrictExecutor(const Executor& inner) : inner_(inner) {}
  void parallel_for(int64_t count, const Body& body) const override {
    inner_.parallel_for(count, [&](int64_t begin, int64_t end) {
      if (begin >= end) return;  // an executor may pass empty ranges, too
      const StrictFloat strict;
      body(begin, end);
    });
  }

 private:
  StrictFloat strict_;
  const Executor& inner_;
};

}  // namespace

void quantize(const ConstMatrix& x, const Quantized& out, const QuantizeOptions& options,
              const Executor& executor) {
  check_quantize("quantize", x, out, options, Memory::host);
  const StrictExecutor strict(executor);
  if (out.axis == -1)
    cpu::quantize(x, &out, options, nullptr, {}, strict);
  else
    cpu::quantize(x, nullptr, {}, &out, options, strict);
}
void quantize(const ConstMatrix& x, const Quantized& out, const QuantizeOptions& options,
              const Stream& stream) {
  check_quantize("quantize", x, out, options, Memory::device);
  const Quantization one[] = {out.axis == -1 ? Quantization{x, &out, nullptr, options, {}}
                                             : Quantization{x, nullptr, &out, {}, options}};
  gpu::quantize(one, stream);
}

void quantize_dual(const ConstMatrix& x, const Quantized& row_out, const Quantized& column_out,
                   const QuantizeOptions& row_options, const QuantizeOptions& column_options,
                   const Executor& executor) {
  check_dual(x, row_out, column_out, row_options, column_options, Memory::host);
  cpu::quantize(x, &row_out, row_options, &column_out, column_options, StrictExecutor(executor));
}
void quantize_dual(const ConstMatrix& x, const Quantized& row_out, const Quantized& column_out,
                   const QuantizeOptions& row_options, const QuantizeOptions& column_options,
                   const Stream& stream) {
  check_dual(x, row_out, column_out, row_options, column_options, Memory::device);
  const Quantization one[] = {{x, &row_out, &column_out, row_options, column_options}};
  gpu::quantize(one, stream);
}
void quantize_two(const Quantization& first, const Quantization& second, const Stream& stream,
                  const WordCopy& word) {
  const Quantization both[] = {first, second};
  for (const Quantization& q : both) {
    const auto check_alone = [&](const Quantized& out, int axis, const QuantizeOptions& options) {
      if (out.axis != axis)
        fail("quantize", "axis", out.axis, axis == -1 ? "-1 of row" : "-2 of column");
      check_quantize("quantize", q.x, out, options, Memory::device);
    };
    if (q.row && q.column)
      check_dual(q.x, *q.row, *q.column, q.row_options, q.column_options, Memory::device);
    else if (q.row)
      check_alone(*q.row, -1, q.row_options);
    else if (q.column)
      check_alone(*q.column, -2, q.column_options);
    check_values(q);
  }
  gpu::quantize(both, stream, word);
}

void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, float* out,
          const Executor& executor, const Groups& groups) {
  check_amax_of(x, spec, axis, out, groups, Memory::host);
  cpu::amax(x, spec, axis, groups, out, StrictExecutor(executor));
}
void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, float* out, const Stream& stream,
          const Groups& groups) {
  check_amax_of(x, spec, axis, out, groups, Memory::device);
  gpu::amax(x, spec, axis, groups, out, stream);
}

void dequantize(const ConstQuantized& q, const Matrix& x, const Executor& executor) {
  check_dequantize(q, x, Memory::host);
  cpu::dequantize(q, x, StrictExecutor(executor));
}
void dequantize(const ConstQuantized& q, const Matrix& x, const Stream& stream) {
  check_dequantize(q, x, Memory::device);
  gpu::dequantize(q, x, stream);
}

void relayout(const ConstQuantized& from, const Quantized& to, const Executor& executor) {
  check_relayout(from, to, Memory::host);
  cpu::relayout(from, to, executor);
}
void relayout(const ConstQuantized& from, const Quantized& to, const Stream& stream) {
  check_relayout(from, to, Memory::device);
  gpu::relayout(from, to, stream);
}

void transpose(const ConstQuantized& from, const Quantized& to, const Executor& executor) {
  check_transpose(from, to, Memory::host);
  cpu::transpose(from, to, executor);
}
void transpose(const ConstQuantized& from, const Quantized& to, const Stream& stream) {
  check_transpose(from, to, Memory::device);
  gpu::transpose(from, to, stream);
}

void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options, const Executor& executor) {
  check_gemm(a, b, d, options, Memory::host);
  cpu::gemm(a, b, d, options, StrictExecutor(executor));
}
void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options, const Stream& stream) {
  check_gemm(a, b, d, options, Memory::device);
  gpu::gemm(a, b, d, options, stream);
}

// Of a device's name, such as "cuda:1".
static std::string_view kind_of(std::string_view device) {
  return device.substr(0, device.find(':'));
}

std::string gemm_needs(const QuantSpec& spec, std::string_view device) {
  const std::string_view kind = kind_of(device);
  if (kind != "cpu" && kind != "cuda") return "a device of kind cpu or cuda";
  if (kind == "cpu" || gpu::is_mxfp4(spec)) return "";
  if (spec.scale != Format::fp32)
    return "FP32 scales or mxfp4: the GPU's own GEMM is for fp8_1x128, fp8_128x128 and mxfp4";
  if (spec.element != Format::e4m3fn && spec.element != Format::e5m2)
    return "e4m3fn or e5m2 elements, which NVIDIA's tensor cores read";
  if (spec.hadamard.dim) return "no Hadamard transform";
  return "";
}

std::string explain(std::string_view spec, std::string_view layout, std::string_view device) {
  try {
    validate(parse_spec(spec), parse_layout(layout));
    const std::string_view kind = kind_of(device);
    std::vector<std::string> names;
    for (const Backend& backend : backends()) {
      if (kind == backend.name) return backend.reason;
      names.push_back(backend.name);
    }
    fail("explain", "device", quoted(device), "one of " + join(names, ", "));
  } catch (const Error& error) {
    return error.what();
  }
}

std::vector<Backend> backends() {
  const std::string reason = gpu::unavailable();
  return {{"cpu", true, ""}, {"cuda", reason.empty(), reason}};
}

}  // namespace blockscale
