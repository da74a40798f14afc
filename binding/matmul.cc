// matmul. On a CPU, and on a GPU for FP32 scales and MXFP4, it is the core's GEMM. The other specs
// on a GPU are decoded to BF16, b within the core's BF16 GEMM where few rows of a meet it. Else
// what needs outer scales, or more than PyTorch's GEMM does after its sums, mostly goes to the
// core's BF16 GEMM where there is one, and so does what takes so little time that the host's
// counts; else (few tiles with a long K) PyTorch multiplies with FP32 sums (over groups it writes
// them in BF16 only), and one pass over them does the rest.
#include "matmul.h"

#include <algorithm>

#include "checks.h"

// In PyTorch's builds for GPUs only: weak, so that one binary loads under every build.
extern "C" __attribute__((weak, visibility("default"))) AOTITorchError aoti_torch_cuda_addmm_out(
    AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1, AtenTensorHandle mat2,
    double beta, double alpha);
extern "C" __attribute__((weak, visibility("default"))) AOTITorchError aoti_torch_cuda_mm_dtype_out(
    AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2, int32_t out_dtype);

namespace blockscale::binding {
namespace {

// a·b, with FP32 sums, + bias, rounded once to `dtype`; a bias is of this dtype, as a and b are.
// PyTorch's kernel itself, past its dispatcher: less work for the host, and autocast has no say.
void multiply(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
              const Tensor& out, ScalarType dtype) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  if (bias) {
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_cuda_addmm_out(out.get(), bias->get(), a.get(), b.get(), 1, 1));
    return;
  }
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_cuda_mm_dtype_out(out.get(), a.get(), b.get(), to<int32_t>(from(dtype))));
}

// An operand as decoding to BF16 reads it: without the outer scale, lines along the contraction
// axis. scale * code is exact in BF16: a product of a code and a block scale has at most 4 + 4
// significant bits and BF16 holds 8 (NVFP4: 1.5 * 1.875 = 2.8125 = 0b10.1101, six bits), with
// FP32's exponents. The one exception: below 2^-126 BF16 keeps multiples of 2^-133 only, so that an
// E8M0 block whose largest value is below about 2^-116 (2^-102 with E5M2) loses what is smaller
// than 2^-134.
ConstQuantized without_outer(const ConstQuantized& q) {
  const StoredShape s = q.shape();
  ConstQuantized view = q;
  // Both operands of a GEMM are transformed alike, and the product sums over all that the transform
  // has made of the tail: as an operand of that length without a transform, the codes are the same.
  // So are those of groups along the contraction axis, where each has whole blocks in every line.
  view.spec.hadamard = {};
  view.spec.outer = false;
  view.outer = nullptr;
  // So are those of groups of rows whose scales lie at the rows of their codes.
  if (q.axis == -2 || (q.layout == StorageLayout{} && !q.spec.square)) view.groups = {};
  view.axis = -1;
  view.rows = s.lines;
  view.columns = s.extent;
  return view;
}

// Memory for the values of both, [lines, extent] and b's as a batch, or without `right` for a's.
// Rows are at multiples of 16 bytes, which the fast kernels of both sides ask for, and both are
// parts of one piece, which costs the host less than two.
Decoded room_for(const Context& at, const ConstQuantized& left, const ConstQuantized* right) {
  const int64_t stride = std::max<int64_t>(round_up(left.columns, 8), 8);
  const int64_t first = round_up(left.rows * stride, 128);
  const int64_t bytes = 2 * (first + (right ? right->batch * right->rows * stride : 0));
  std::optional<Allocation> memory;
  uint8_t* values = at.memory().take_small(bytes);
  if (!values) values = memory.emplace(at.device(), bytes).data();
  const auto view = [&](const ConstQuantized& q, int64_t at_element) {
    return Matrix{values + 2 * at_element, DType::bf16, q.rows, q.columns, stride, 1, q.batch,
                  q.rows * stride};
  };
  return {std::move(memory), view(left, 0), right ? view(*right, first) : Matrix{}};
}
Decoded decoded(const Context& at, const ConstQuantized& a, const ConstQuantized& b,
                const Stream& stream) {
  const ConstQuantized left = without_outer(a), right = without_outer(b);
  check_decodable(at.op(), "a", left);
  check_decodable(at.op(), "b", right);
  Decoded values = room_for(at, left, &right);
  gpu::dequantize_two(left, values.left, right, values.right, stream);
  return values;
}
Decoded left_decoded(const Context& at, const ConstQuantized& a, const Stream& stream) {
  const ConstQuantized left = without_outer(a);
  check_decodable(at.op(), "a", left);
  Decoded values = room_for(at, left, nullptr);
  gpu::dequantize(left, values.left, stream);
  return values;
}
// Whether any product of such operands, such as one of a single row, decodes b itself.
bool may_decode_within(const QuantSpec& spec) {
  constexpr int64_t kSide = 4096;
  const ConstQuantized b{.spec = spec, .rows = kSide, .columns = kSide};
  return gpu::decodes_within(without_outer(b), {1, kSide, kSide, 0, false}, spec.outer);
}
// As PyTorch's products read them: a, [lines, extent], and the transpose of b, with `batched` a
// batch. The core's read the memory itself, as a tensor costs the host more than a microsecond.
Tensor tensor_of(const Context& at, const Matrix& a) {
  return borrowed(a.data, {a.rows, a.columns}, {a.row_stride, 1}, ScalarType::BFloat16,
                  at.device());
}
Tensor transpose_of(const Context& at, const Matrix& b, bool batched) {
  Ints sizes{b.columns, b.rows}, strides{1, b.row_stride};
  if (batched)
    sizes.insert(sizes.begin(), b.batch), strides.insert(strides.begin(), b.batch_stride);
  return borrowed(b.data, sizes, strides, ScalarType::BFloat16, at.device());
}

void check_on_gpu(const char* op, const char* name, const QuantSpec& spec) {
  if (const std::string needs = matmul_needs(spec, "cuda"); !needs.empty())
    fail(op, name, to_string(spec) + " on cuda", needs,
         "dequantize both operands and use torch.mm, or run on the CPU");
}

void check_pair(const Context& at, const QuantSpec& a, const QuantSpec& b) {
  check_on_gpu(at.op(), "a", a);
  check_on_gpu(at.op(), "b", b);
  validate_pair(at.op(), a, b);
}

// The core's name of this operator is gemm.
std::string renamed(const Error& error, const std::string& op) {
  const std::string text = error.what();
  return text.starts_with("gemm:") ? op + text.substr(4) : text;
}

// D in the memory of `out`: as many matrices as the groups ask for.
Matrix result_view(const Context& at, const ConstQuantized& a, const ConstQuantized& b,
                   Tensor& out) {
  return matrices(at, out, a.shape().lines, b.shape().lines, b.groups ? b.groups.count : 1);
}
Matrix result_view(const Context& at, const ConstQuantized& a, const gpu::WidenedOperand& b,
                   Tensor& out) {
  return result_view(at, a, b.q, out);
}

Tensor room_of(const Context& at, const Target& target) {
  return target.into ? *target.into : empty(target.sizes, target.dtype, at.device());
}

// What a GEMM of the core makes for `target`: it writes FP32 and BF16, so FP16 is rounded from FP32
// by another pass. multiply(d) fills D.
Tensor from_core(const Context& at, const Target& target, const auto& multiply) {
  if (target.into || target.dtype != ScalarType::Half) {
    Tensor out = room_of(at, target);
    multiply(out);
    return out;
  }
  Tensor out = empty(target.sizes, ScalarType::Float, at.device());
  multiply(out);
  return torch::stable::to(out, target.dtype);
}

// The core's GEMM, with threads or on a stream; both may be widened before.
template <class B, class On>
Tensor core_matmul(const Context& at, const ConstQuantized& a, const B& b,
                   const std::optional<Tensor>& bias, const Target& target, const On& on) {
  GemmOptions options;
  std::optional<Tensor> row;  // keeps the memory of the bias
  if (bias) {
    row = contiguous_of(at.cuda() ? *bias : torch::stable::to(*bias, ScalarType::Float));
    options.bias = row->const_data_ptr();
    options.bias_dtype = dtype_of(at.op(), "bias.dtype", row->scalar_type());
  }
  options.accumulate = target.into.has_value();
  options.previous = target.previous;
  return from_core(at, target, [&](Tensor& out) {
    try {
      gemm(a, b, result_view(at, a, b, out), options, on);
    } catch (const Error& error) {
      throw Error(renamed(error, at.op()));
    }
  });
}

// The sums of D in PyTorch's GEMM, with `bias` or without, rounded once to `dtype`; over groups
// that is BF16. `given`: the operands' values, where they are there.
Tensor sums_on_gpu(const Context& at, const ConstQuantized& a, const ConstQuantized& b,
                   const std::optional<Tensor>& bias, const std::optional<Ends>& ends,
                   ScalarType dtype, const Decoded* given, const Stream& stream) {
  const StoredShape sa = a.shape(), sb = b.shape();
  if (sa.lines == 0 || sb.lines == 0 || sa.extent == 0) {
    Ints shape{sa.lines, sb.lines};
    if (b.groups) shape.insert(shape.begin(), b.groups.count);
    return torch::stable::full(shape, 0.0, dtype, std::nullopt, at.device());
  }
  std::optional<Decoded> made;
  const Decoded& values = given ? *given : made.emplace(decoded(at, a, b, stream));
  const Tensor left = tensor_of(at, values.left);
  const Tensor right = transpose_of(at, values.right, ends && !b.groups);
  if (ends) return grouped_mm(left, right, *ends);
  Tensor out = empty({sa.lines, sb.lines}, dtype, at.device());
  multiply(left, right, bias, out, dtype);
  return out;
}

// What follows the sums, but for adding to D and what groups ask for. `row` keeps the memory of the
// bias.
gpu::Epilogue epilogue_of(const Context& at, const ConstQuantized& a, const ConstQuantized& b,
                          const std::optional<Tensor>& bias, std::optional<Tensor>& row) {
  gpu::Epilogue epilogue;
  if (a.spec.outer) epilogue.a_outer = a.outer;
  if (b.spec.outer) epilogue.b_outer = b.outer;
  if (bias) {
    row = contiguous_of(*bias);
    epilogue.bias = row->const_data_ptr();
    epilogue.bias_dtype = dtype_of(at.op(), "bias.dtype", row->scalar_type());
  }
  return epilogue;
}

// What the core's BF16 GEMM makes of them, with all that follows the sums: multiply(d, epilogue).
Tensor from_bf16(const Context& at, const ConstQuantized& a, const ConstQuantized& b,
                 const std::optional<Tensor>& bias, const Target& target, const auto& multiply) {
  std::optional<Tensor> row;
  gpu::Epilogue epilogue = epilogue_of(at, a, b, bias, row);
  epilogue.accumulate = target.into.has_value();
  return from_core(at, target,
                   [&](Tensor& out) { multiply(result_view(at, a, b, out), epilogue); });
}
// Both decoded before.
Tensor bf16_matmul(const Context& at, const ConstQuantized& a, const ConstQuantized& b,
                   const std::optional<Tensor>& bias, const Target& target, const Decoded* given,
                   const Stream& stream) {
  std::optional<Decoded> made;
  const Decoded& values = given ? *given : made.emplace(decoded(at, a, b, stream));
  const auto multiply = [&](const Matrix& d, const gpu::Epilogue& epilogue) {
    gpu::multiply_bf16(as_const(values.left), as_const(values.right), d, a.groups, a.rows,
                       b.groups ? a.spec.unit() : 0, epilogue, stream);
  };
  return from_bf16(at, a, b, bias, target, multiply);
}
// Only a.
Tensor coded_matmul(const Context& at, const ConstQuantized& a, const ConstQuantized& b,
                    const std::optional<Tensor>& bias, const Target& target, const Stream& stream) {
  const Decoded values = left_decoded(at, a, stream);
  const auto multiply = [&](const Matrix& d, const gpu::Epilogue& epilogue) {
    gpu::multiply_bf16(as_const(values.left), without_outer(b), d, a.groups, a.rows, epilogue,
                       stream);
  };
  return from_bf16(at, a, b, bias, target, multiply);
}

// Decoded, groups along the contraction axis are read as they lie in linear storage.
void check_layouts(const Context& at, const ConstQuantized& a, const ConstQuantized& b) {
  for (const auto& [name, q] : {std::pair{"a", &a}, std::pair{"b", &b}})
    if (q->groups && q->axis == -2 && q->layout != StorageLayout{})
      fail(at.op(), name, to_string(q->layout) + ", groups along the contraction axis",
           "the linear layout on a GPU", "relayout it first");
}

// Whether PyTorch's GEMM gives the result itself, its sums rounded once: it does where it writes
// FP32, or BF16 in rows of whole 16 bytes. (It adds up parts, and a bias, that are rounded to BF16
// where extents are no multiples of 8.) It adds a bias of its operands' dtype before that rounding.
// Over groups it writes BF16 only.
bool torch_finishes(const ConstQuantized& a, const ConstQuantized& b,
                    const std::optional<Tensor>& bias, const Target& target) {
  if (a.spec.outer || b.spec.outer || target.into) return false;
  const StoredShape sa = a.shape(), sb = b.shape();
  const bool writes_f32 = target.dtype == ScalarType::Float && !a.groups;
  const bool writes_bf16 =
      target.dtype == ScalarType::BFloat16 && sb.lines % 8 == 0 && (a.groups || sa.extent % 8 == 0);
  const bool adds = bias && bias->scalar_type() == ScalarType::BFloat16 && writes_bf16 &&
                    !a.groups && sa.lines * sb.lines * sa.extent != 0;
  return (writes_f32 || writes_bf16) && (!bias || adds);
}

// The result of PyTorch's sums, in a pass of our own.
Tensor finish_sums(const Context& at, const ConstQuantized& a, const ConstQuantized& b,
                   const std::optional<Tensor>& bias, const Target& target,
                   const std::optional<Ends>& ends, const Tensor& sums, const TorchStream& stream) {
  const bool elsewhere = target.into || ends || target.dtype != sums.scalar_type();
  Tensor out = elsewhere ? room_of(at, target) : with_shape(sums, target.sizes);
  std::optional<Tensor> row;
  gpu::Epilogue epilogue = epilogue_of(at, a, b, bias, row);
  epilogue.accumulate = target.into.has_value();
  epilogue.empty = a.shape().extent == 0;
  if (ends) epilogue.groups = ends->view(b.groups.count != 0);
  const Matrix d = result_view(at, a, b, out);
  gpu::finish({sums.const_data_ptr(), dtype_of(at.op(), "sums", sums.scalar_type()), d.rows,
               d.columns, sums.stride(sums.dim() - 2)},
              d, epilogue, stream);
  return out;
}

Tensor matmul_on_gpu(const Context& at, const ConstQuantized& a, const ConstQuantized& b,
                     const std::optional<Tensor>& bias, const Target& target,
                     const Decoded* given) {
  check_pair(at, a.spec, b.spec);
  const TorchStream& stream = at.stream();
  if (multiplies_codes(a, b)) return core_matmul(at, a, b, bias, target, stream);
  check_layouts(at, a, b);
  check_device_operand(at.op(), "a", a);
  check_device_operand(at.op(), "b", b);
  const StoredShape sa = a.shape(), sb = b.shape();
  const bool finished = torch_finishes(a, b, bias, target);
  const bool f32 = target.into || target.dtype != ScalarType::BFloat16;
  if (sa.lines * sb.lines * sa.extent != 0) {
    const gpu::ProductSize size{sa.lines, sb.lines, sa.extent, a.groups.count, f32};
    if (!given && !b.groups && gpu::decodes_within(without_outer(b), size, !finished))
      return coded_matmul(at, a, b, bias, target, stream);
    if (gpu::multiplies_bf16(size, !finished))
      return bf16_matmul(at, a, b, bias, target, given, stream);
  }

  std::optional<Ends> ends;
  if (a.groups) ends = group_ends(at, a.groups, a.rows, b.groups ? a.spec.unit() : 1, stream);
  const ScalarType sum_dtype = ends       ? ScalarType::BFloat16
                               : finished ? target.dtype
                                          : ScalarType::Float;
  const Tensor sums =
      sums_on_gpu(at, a, b, finished ? bias : std::nullopt, ends, sum_dtype, given, stream);
  if (!finished) return finish_sums(at, a, b, bias, target, ends, sums, stream);
  Tensor out = with_shape(sums, target.sizes);
  if (ends)
    gpu::settle(result_view(at, a, b, out), a.groups, a.rows, b.groups.count != 0, true, stream);
  return out;
}

void check_bias(const Context& at, const std::optional<Tensor>& bias, const Groups& groups,
                int64_t lines) {
  if (!bias) return;
  at.check("bias", *bias);
  dtype_of(at.op(), "bias.dtype", bias->scalar_type());
  const int64_t rank = bias->dim();
  const std::string needed = std::to_string(lines);
  if (groups && (rank != 2 || bias->size(0) != groups.count || bias->size(1) != lines))
    fail(at.op(), "bias.shape", shape_text(*bias),
         "[" + std::to_string(groups.count) + ", " + needed + "], a row for each group");
  if (!groups && (rank != 1 || bias->numel() != lines))
    fail(at.op(), "bias.shape", shape_text(*bias), "[" + needed + "], the rows of b");
}

}  // namespace

bool multiplies_codes(const ConstQuantized& a, const ConstQuantized& b) {
  return a.spec.scale == Format::fp32 || gpu::widens(a, b);
}

gpu::GroupEnds Ends::view(bool contraction) const {
  return {static_cast<const int32_t*>(ends.const_data_ptr()),
          static_cast<const int32_t*>(wrong.const_data_ptr()), ends.numel(), contraction};
}

Ends group_ends(const Context& at, const Groups& groups, int64_t rows, int64_t unit,
                const Stream& stream) {
  Ends made{empty({groups.count}, ScalarType::Int, at.device()),
            empty({1}, ScalarType::Int, at.device())};
  gpu::group_ends(groups, rows, unit, static_cast<int32_t*>(made.ends.mutable_data_ptr()),
                  static_cast<int32_t*>(made.wrong.mutable_data_ptr()), stream);
  return made;
}

Tensor grouped_mm(const Tensor& a, const Tensor& b, const Ends& ends) {
  return call("aten::_grouped_mm", "", a, b, std::optional<Tensor>(ends.ends),
              std::optional<Tensor>(), std::optional<ScalarType>());
}

std::string matmul_needs(const QuantSpec& spec, std::string_view device) {
  // An FP32 scale times a code does not fit in BF16: such operands need the core's own GEMM.
  return spec.scale == Format::fp32 ? gemm_needs(spec, device) : "";
}

std::string matmul_path(const std::string& op, const QuantSpec& spec, std::string_view device) {
  const bool grouped = op == "grouped_matmul";
  if (!grouped && op != "matmul")
    return "explain: operation = '" + op + "'; need matmul or grouped_matmul";
  const std::string groups = grouped ? ", one launch for all groups" : "";
  if (device != "cuda")
    return "the CPU's GEMM (" + instruction_set() + ")" + (grouped ? ", group by group" : "");
  const std::string fp8 = "the block-scaled FP8 GEMM for compute capability 9.0";
  try {
    check_on_gpu(op.c_str(), "a", spec);
    if (spec.scale == Format::fp32) {
      gpu::check_gemm_device();
      return fp8 + groups;
    }
    if (gpu::is_mxfp4(spec) && gpu::has_gemm_device())
      return "codes of E5M2 that hold the scales' differences, then " + fp8 + groups;
  } catch (const Error& error) {
    return renamed(error, op);
  }
  const std::string bf16 = "the BF16 GEMM for compute capability 9.0";
  const std::string within =
      may_decode_within(spec) ? "; where few rows meet b, that GEMM decodes b itself" : "";
  if (spec.outer && gpu::has_gemm_device())
    return "decoded to BF16, then " + bf16 +
           ", with outer scales (PyTorch's where that is faster)" + groups + within;
  std::string path = "decoded to BF16, then PyTorch's ";
  path += grouped ? "grouped GEMM, which rounds its sums to BF16" + groups : "GEMM with FP32 sums";
  if (!grouped && gpu::has_gemm_device()) path += ", or where little is multiplied " + bf16;
  if (grouped && !within.empty()) path += ", or " + bf16;
  return path + (spec.outer ? ", then outer scales in one pass" : "") + within;
}

std::optional<Decoded> room_for_values(const Context& at, const ConstQuantized& a,
                                       const ConstQuantized& b) {
  const auto plain = [](const ConstQuantized& q) {
    return q.spec.hadamard.dim == 0 && q.axis == -1 && !q.groups && q.batch == 1 &&
           q.layout == StorageLayout{};
  };
  if (!at.cuda() || !plain(a) || !plain(b) || multiplies_codes(a, b)) return std::nullopt;
  const ConstQuantized right = without_outer(b);
  return room_for(at, without_outer(a), &right);
}

Tensor matmul(const Context& at, const ConstQuantized& a, const ConstQuantized& b,
              const std::optional<Tensor>& bias, const Target& target, const Decoded* values) {
  const StoredShape sa = a.shape(), sb = b.shape();
  check_bias(at, bias, a.groups, sb.lines);
  if (at.cuda()) return matmul_on_gpu(at, a, b, bias, target, values);
  // A multiply-add costs about 1/16 of quantizing an element.
  const int64_t work = sa.lines * sb.lines / 16 * sa.extent;
  return core_matmul(at, a, b, bias, target, executor_for(work));
}

Tensor matmul(const Context& at, const ConstQuantized& a, const gpu::WidenedOperand& b,
              const std::optional<Tensor>& bias, const Target& target) {
  check_bias(at, bias, a.groups, b.q.shape().lines);
  return core_matmul(at, a, b, bias, target, at.stream());
}

}  // namespace blockscale::binding
