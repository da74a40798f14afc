// matmul. On a CPU, and on a GPU for FP32 scales, it is the core's GEMM. For the other specs on a
// GPU: decode to BF16, let PyTorch multiply with FP32 sums, then apply outer scales and bias in one
// pass over them.
#include "matmul.h"

#include "gpu/gpu.h"

// In PyTorch's builds for GPUs only: weak, so that one binary loads under every build.
extern "C" __attribute__((weak, visibility("default"))) AOTITorchError aoti_torch_cuda_mm_dtype_out(
    AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2, int32_t out_dtype);

namespace blockscale::binding {
namespace {

using Ints = std::vector<int64_t>;

// a·b with FP32 sums, rounded once to `dtype`. PyTorch's kernel itself, past its dispatcher: less
// work for the host, and autocast has no say.
void multiply(const Tensor& a, const Tensor& b, const Tensor& out, ScalarType dtype) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_cuda_mm_dtype_out(out.get(), a.get(), b.get(), to<int32_t>(from(dtype))));
}

// scale * code in BF16, [lines, extent], without the outer scale: exact. A product of a code and a
// block scale has at most 4 + 4 significant bits and BF16 holds 8 (NVFP4: 1.5 * 1.875 = 2.8125 =
// 0b10.1101, six bits), with FP32's exponents. The one exception: below 2^-126 BF16 keeps multiples
// of 2^-133 only, so that an E8M0 block whose largest value is below about 2^-117 loses what is
// smaller than 2^-134.
//
// With `transposed` the tensor is [extent, lines], over the same memory.
Tensor decoded(const Place& at, const ConstQuantized& q, bool transposed, const Stream& stream) {
  const StoredShape s = q.shape();
  ConstQuantized view = q;
  // Both operands of a GEMM are transformed alike, and the product sums over all that the transform
  // has made of the tail: as an operand of that length without a transform, the codes are the same.
  view.spec.hadamard = {};
  view.spec.outer = false;
  view.outer = nullptr;
  view.axis = -1;
  view.rows = s.lines;
  view.columns = s.extent;
  // Rows at multiples of 16 bytes, which the fast kernels of both sides ask for.
  const int64_t stride = round_up(s.extent, 8);
  Tensor values =
      transposed
          ? empty_strided({s.extent, s.lines}, {1, stride}, ScalarType::BFloat16, at.device())
          : empty_strided({s.lines, s.extent}, {stride, 1}, ScalarType::BFloat16, at.device());
  dequantize(view,
             Matrix{values.mutable_data_ptr(), DType::bf16, s.lines, s.extent, stride, 1, 1,
                    s.lines * stride},
             stream);
  return values;
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

// The core's GEMM, with threads or on a stream.
template <class On>
Tensor core_matmul(const Place& at, const ConstQuantized& a, const ConstQuantized& b,
                   const std::optional<Tensor>& bias, ScalarType out_dtype, const Ints& sizes,
                   const On& on) {
  const int64_t rows = a.shape().lines, columns = b.shape().lines;
  GemmOptions options;
  std::optional<Tensor> fp32_bias;  // keeps the memory of options.bias
  if (bias) {
    fp32_bias = torch::stable::contiguous(torch::stable::to(*bias, ScalarType::Float));
    options.bias = static_cast<const float*>(fp32_bias->const_data_ptr());
  }
  // It writes FP32 and BF16.
  const bool half = out_dtype == ScalarType::Half;
  Tensor out = empty(sizes, half ? ScalarType::Float : out_dtype, at.device());
  const DType type = dtype_of(at.op(), "out_dtype", out.scalar_type());
  const Matrix d{out.mutable_data_ptr(), type, rows, columns, columns, 1, 1, rows * columns};
  try {
    gemm(a, b, d, options, on);
  } catch (const Error& error) {  // the core's name of this operator is gemm
    const std::string text = error.what();
    throw Error(text.starts_with("gemm:") ? at.op() + text.substr(4) : text);
  }
  return half ? torch::stable::to(out, out_dtype) : out;
}

Tensor matmul_on_gpu(const Place& at, const ConstQuantized& a, const ConstQuantized& b,
                     const std::optional<Tensor>& bias, ScalarType out_dtype,
                     const std::vector<int64_t>& sizes) {
  check_pair(at, a.spec, b.spec);
  const TorchStream stream(at.device());
  if (a.spec.scale == Format::fp32) return core_matmul(at, a, b, bias, out_dtype, sizes, stream);
  const StoredShape sa = a.shape(), sb = b.shape();
  // PyTorch's GEMM rounds its sums once, to whatever dtype it writes.
  const bool finished = !a.spec.outer && !b.spec.outer && !bias && out_dtype != ScalarType::Half;
  const ScalarType sum_dtype = finished ? out_dtype : ScalarType::Float;
  const Tensor sums = [&] {
    const Ints shape{sa.lines, sb.lines};
    if (sa.lines == 0 || sb.lines == 0 || sa.extent == 0)
      return torch::stable::full(shape, 0.0, sum_dtype, std::nullopt, at.device());
    Tensor out = empty(shape, sum_dtype, at.device());
    multiply(decoded(at, a, false, stream), decoded(at, b, true, stream), out, sum_dtype);
    return out;
  }();
  if (finished) return with_shape(sums, sizes);
  Tensor out = out_dtype == ScalarType::Float ? with_shape(sums, sizes)
                                              : empty(sizes, out_dtype, at.device());
  gpu::Epilogue epilogue;
  if (a.spec.outer) epilogue.a_outer = a.outer;
  if (b.spec.outer) epilogue.b_outer = b.outer;
  std::optional<Tensor> row;  // keeps the memory of the bias
  if (bias) {
    row = torch::stable::contiguous(*bias);
    epilogue.bias = row->const_data_ptr();
    epilogue.bias_dtype = dtype_of(at.op(), "bias.dtype", row->scalar_type());
  }
  gpu::finish({sums.const_data_ptr(), DType::f32, sa.lines, sb.lines, sb.lines},
              Matrix{out.mutable_data_ptr(), dtype_of(at.op(), "out_dtype", out_dtype), sa.lines,
                     sb.lines, sb.lines, 1, 1, sa.lines * sb.lines},
              epilogue, stream);
  return out;
}

}  // namespace

std::string matmul_needs(const QuantSpec& spec, std::string_view device) {
  // An FP32 scale times a code does not fit in BF16: such operands need the core's own GEMM.
  return spec.scale == Format::fp32 ? gemm_needs(spec, device) : "";
}

Tensor matmul(const Place& at, const ConstQuantized& a, const ConstQuantized& b,
              const std::optional<Tensor>& bias, ScalarType out_dtype,
              const std::vector<int64_t>& sizes) {
  if (bias) {
    at.check("bias", *bias);
    dtype_of(at.op(), "bias.dtype", bias->scalar_type());
    const int64_t lines = b.shape().lines;
    if (bias->dim() != 1 || bias->numel() != lines)
      fail(at.op(), "bias.numel()", bias->numel(),
           "one dimension of " + std::to_string(lines) + ", the rows of b");
  }
  if (at.cuda()) return matmul_on_gpu(at, a, b, bias, out_dtype, sizes);
  // A multiply-add costs about 1/16 of quantizing an element.
  const int64_t work = a.shape().lines * b.shape().lines / 16 * a.shape().extent;
  return core_matmul(at, a, b, bias, out_dtype, sizes, executor_for(work));
}

}  // namespace blockscale::binding
