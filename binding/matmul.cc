// matmul. On a CPU, and on a GPU for FP32 scales, it is the core's GEMM. For the other specs on a
// GPU: decode to BF16, let PyTorch multiply with FP32 sums, then apply outer scales and bias.
#include "matmul.h"

#include <array>

namespace blockscale::binding {
namespace {

// The first result of one of PyTorch's operators.
template <class... Args>
Tensor call(const char* op, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// scale * code in BF16, [lines, extent], without the outer scale: exact. A product of a code and a
// block scale has at most 4 + 4 significant bits and BF16 holds 8 (NVFP4: 1.5 * 1.875 = 2.8125 =
// 0b10.1101, six bits), with FP32's exponents. The one exception: below 2^-126 BF16 keeps multiples
// of 2^-133 only, so that an E8M0 block whose largest value is below about 2^-117 loses what is
// smaller than 2^-134.
Tensor decoded(const Place& at, const Operand& q, const Stream& stream) {
  const StoredShape s = q.view.shape();
  ConstQuantized view = q.view;
  // Both operands of a GEMM are transformed alike, and the product sums over all that the transform
  // has made of the tail: as an operand of that length without a transform, the codes are the same.
  view.spec.hadamard = {};
  view.spec.outer = false;
  view.outer = nullptr;
  view.columns = s.extent;
  // Rows at multiples of 16 bytes, which the fast kernels of both sides ask for.
  const int64_t stride = (s.extent + 7) / 8 * 8;
  Tensor values = torch::stable::empty(std::vector<int64_t>{s.lines, stride}, ScalarType::BFloat16,
                                       std::nullopt, at.device());
  dequantize(view,
             Matrix{values.mutable_data_ptr(), DType::bf16, s.lines, s.extent, stride, 1, 1,
                    s.lines * stride},
             stream);
  return stride == s.extent ? values : torch::stable::narrow(values, 1, 0, s.extent);
}

// The outer scale of the product; none when neither operand has one.
std::optional<Tensor> outer_of(const Operand& a, const Operand& b) {
  if (!a.view.spec.outer && !b.view.spec.outer) return std::nullopt;
  if (!a.view.spec.outer) return b.outer;
  if (!b.view.spec.outer) return a.outer;
  return call("aten::mul", "Tensor", a.outer, b.outer);
}

void check_pair(const Place& at, const QuantSpec& a, const QuantSpec& b) {
  for (const auto& [name, spec] : {std::pair{"a", a}, std::pair{"b", b}})
    if (const std::string needs = matmul_needs(spec, "cuda"); !needs.empty())
      fail(at.op(), name, to_string(spec) + " on cuda", needs,
           "dequantize both operands and use torch.mm, or run on the CPU");
  if (a.hadamard != b.hadamard)
    fail(at.op(), "b", to_string(b), "the Hadamard transform of a, " + to_string(a),
         "transform both operands of a GEMM or neither");
  if (a.block != b.block)
    fail(at.op(), "b", to_string(b),
         "blocks of " + std::to_string(a.block) + " along the contraction axis, as in a",
         "use one block size for both operands of a GEMM");
}

// The core's GEMM into a fresh tensor.
template <class On>
Tensor core_matmul(const Place& at, const Operand& a, const Operand& b,
                   const std::optional<Tensor>& bias, ScalarType out_dtype, const On& on) {
  const int64_t rows = a.view.rows, columns = b.view.rows;
  GemmOptions options;
  std::optional<Tensor> fp32_bias;  // keeps the memory of options.bias
  if (bias) {
    fp32_bias = torch::stable::contiguous(torch::stable::to(*bias, ScalarType::Float));
    options.bias = static_cast<const float*>(fp32_bias->const_data_ptr());
  }
  Tensor out = torch::stable::empty(std::vector<int64_t>{rows, columns}, out_dtype, std::nullopt,
                                    at.device());
  const DType type = dtype_of(at.op(), "out_dtype", out_dtype);
  const Matrix d{out.mutable_data_ptr(), type, rows, columns, columns, 1, 1, rows * columns};
  try {
    gemm(a.view, b.view, d, options, on);
  } catch (const Error& error) {  // the core's name of this operator is gemm
    const std::string text = error.what();
    throw Error(text.starts_with("gemm:") ? at.op() + text.substr(4) : text);
  }
  return out;
}

}  // namespace

std::string matmul_needs(const QuantSpec& spec, std::string_view device) {
  // An FP32 scale times a code does not fit in BF16: such operands need the core's own GEMM.
  return spec.scale == Format::fp32 ? gemm_needs(spec, device) : "";
}

Tensor matmul_on_gpu(const Place& at, const Operand& a, const Operand& b,
                     const std::optional<Tensor>& bias, ScalarType out_dtype) {
  check_pair(at, a.view.spec, b.view.spec);
  const TorchStream stream(at.device());
  if (a.view.spec.scale == Format::fp32) return core_matmul(at, a, b, bias, out_dtype, stream);
  const StoredShape sa = a.view.shape(), sb = b.view.shape();
  const std::optional<Tensor> outer = outer_of(a, b);
  const ScalarType sum_dtype = outer || bias ? ScalarType::Float : out_dtype;
  Tensor sum = [&] {
    if (sa.lines == 0 || sb.lines == 0 || sa.extent == 0)
      return torch::stable::full(std::vector<int64_t>{sa.lines, sb.lines}, 0.0, sum_dtype,
                                 std::nullopt, at.device());
    Tensor b_values = decoded(at, b, stream);
    // The overload that names the result's dtype; also the one that autocast leaves alone.
    return call("aten::mm", "dtype", decoded(at, a, stream),
                torch::stable::transpose(b_values, 0, 1), sum_dtype);
  }();
  if (outer) sum = call("aten::mul_", "Tensor", sum, *outer);
  // sum + bias: the stable ABI has no other way to pass add's scalar.
  if (bias) sum = torch::stable::subtract(sum, *bias, -1.0);
  return sum.scalar_type() == out_dtype ? sum : torch::stable::to(sum, out_dtype);
}

Tensor matmul_on_cpu(const Place& at, const Operand& a, const Operand& b,
                     const std::optional<Tensor>& bias, ScalarType out_dtype) {
  // A multiply-add costs about 1/16 of quantizing an element.
  const int64_t elements = a.view.rows * b.view.rows / 16 * a.view.columns;
  return core_matmul(at, a, b, bias, out_dtype, executor_for(elements));
}

}  // namespace blockscale::binding
