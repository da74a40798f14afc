#include "product.h"

#include <algorithm>

namespace blockscale::binding {
namespace {

// The values of an operand in a dtype: [lines, k], with `batched` [E, lines, k].
Tensor values(const Context& at, const GemmOperand& side, bool batched, ScalarType dtype) {
  const auto transposed = [&](const Tensor& t, int axis) {
    return axis == -1 ? t : torch::stable::transpose(t, -2, -1);
  };
  if (!side.view) return transposed(torch::stable::to(*side.memory, dtype), side.axis);
  ConstQuantized q = *side.view;
  if (q.axis == -2 && !q.groups) {  // the same in memory as along axis -1, which is read faster
    q.axis = -1;
    std::swap(q.rows, q.columns);
  }
  Ints sizes{q.rows, q.columns};
  if (batched) sizes.insert(sizes.begin(), q.batch);
  Tensor out = empty(sizes, dtype, at.device());
  const Matrix view = matrices(at, out, q.rows, q.columns, q.batch);
  run(at, out.numel(), [&](const auto& on) { dequantize(q, view, on); });
  return transposed(out, q.axis);
}

// BF16 as PyTorch's grouped GEMM takes it: rows at multiples of 16 bytes, or columns. With `along`,
// columns: groups along the contraction axis then start there too.
Tensor aligned(const Context& at, const Tensor& t, bool along) {
  const int64_t rank = t.dim();
  const bool transposed = along || t.stride(rank - 1) != 1;
  const Tensor x = transposed ? torch::stable::transpose(t, -2, -1) : t;
  const int64_t rows = x.size(rank - 2), columns = x.size(rank - 1);
  const int64_t pitch = std::max<int64_t>(round_up(columns, 8), 8);
  const bool batch_fits = rank == 2 || x.stride(0) == rows * columns;
  if (x.stride(rank - 1) == 1 && x.stride(rank - 2) == columns && columns == pitch && batch_fits &&
      reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0)
    return t;
  Ints sizes{rows, columns}, strides{pitch, 1};
  if (rank == 3) {
    sizes.insert(sizes.begin(), x.size(0));
    strides.insert(strides.begin(), rows * pitch);
  }
  Tensor copy = empty_strided(sizes, strides, ScalarType::BFloat16, at.device());
  torch::stable::copy_(copy, x);
  return transposed ? torch::stable::transpose(copy, -2, -1) : copy;
}

// A·Bᵀ by group in BF16 on a GPU: PyTorch's grouped GEMM, and what it leaves undefined.
Tensor grouped_on_gpu(const Context& at, const Tensor& a, const Tensor& b, const Groups& groups,
                      int64_t rows, bool along, ScalarType out_dtype, const Ints& sizes) {
  if (a.scalar_type() != ScalarType::BFloat16)
    fail(at.op(), "dtype", dtype_text(a.scalar_type()),
         "bfloat16 where an operand is in high precision: PyTorch's grouped GEMM",
         "cast x, or quantize all operands");
  if (rows >= int64_t{1} << 31)
    fail(at.op(), "x", std::to_string(rows) + " rows in groups", "fewer than 2^31",
         "multiply parts of them");
  const TorchStream& stream = at.stream();
  const size_t rank = sizes.size();
  const int64_t m = sizes[rank - 2], n = sizes[rank - 1];
  Tensor out = empty(sizes, out_dtype, at.device());
  const Matrix d = matrices(at, out, m, n, along ? groups.count : 1);
  if (a.numel() == 0 || b.numel() == 0) {
    torch::stable::zero_(out);
    gpu::settle(d, groups, rows, along, false, stream);
    return out;
  }
  const Ends ends = group_ends(at, groups, rows, 1, stream);
  const Tensor sums = grouped_mm(aligned(at, a, along),
                                 torch::stable::transpose(aligned(at, b, along), -2, -1), ends);
  gpu::Epilogue epilogue;
  epilogue.groups = ends.view(along);
  gpu::finish({sums.const_data_ptr(), DType::bf16, m, n, sums.stride(sums.dim() - 2)}, d, epilogue,
              stream);
  return out;
}

Tensor grouped_on_cpu(const Context& at, const Tensor& a, const Tensor& b, const Groups& groups,
                      bool along, ScalarType out_dtype, const Ints& sizes) {
  Tensor out = empty(sizes, out_dtype, at.device());
  torch::stable::zero_(out);
  int64_t start = 0;
  for (int64_t g = 0; g < groups.count; start = groups.end(g++)) {
    const auto part = [&](Tensor t, int64_t dim) {
      return torch::stable::narrow(t, dim, start, groups.end(g) - start);
    };
    const Tensor right = along ? part(b, 1) : torch::stable::select(b, 0, g);
    Tensor to = along ? torch::stable::select(out, 0, g) : part(out, 0);
    torch::stable::copy_(
        to, call("aten::linear", "", part(a, along ? 1 : 0), right, std::optional<Tensor>()));
  }
  return out;
}

// Whether `a` has been made as the GEMM reads it, where `b` has not.
bool is_widened(const ConstQuantized& a, const ConstQuantized& b) {
  return a.spec == gpu::kWidened && gpu::is_mxfp4(b.spec);
}

}  // namespace

bool multiplies_codes(const GemmOperand& a, const GemmOperand& b) {
  return a.view && (b.widened || (b.view && multiplies_codes(*a.view, *b.view)));
}

Tensor product(const Context& at, const GemmOperand& a, const GemmOperand& b,
               const std::optional<Tensor>& bias, ScalarType compute, const Target& target,
               const Groups& groups, int64_t rows, const Decoded* decoded) {
  if (a.view && b.widened) return matmul(at, *a.view, *b.widened, bias, target);
  if (a.view && b.view && is_widened(*a.view, *b.view)) {
    const gpu::WidenedOperand right = gpu::widen_right(*b.view, at.stream());
    Target behind = target;
    // The kernel before is the one that widens, if there is anything to.
    const StoredShape s = b.view->shape();
    behind.previous = s.lines * s.extent > 0 ? Previous::operands : Previous::any;
    return matmul(at, *a.view, right, bias, behind);
  }
  if (a.view && b.view) return matmul(at, *a.view, *b.view, bias, target, decoded);
  const Tensor left = values(at, a, false, compute);
  const Tensor right = values(at, b, groups && a.axis == -1, compute);
  Tensor y;
  if (groups) {
    const ScalarType type = target.into ? ScalarType::Float : target.dtype;
    y = at.cuda() ? grouped_on_gpu(at, left, right, groups, rows, a.axis == -2, type, target.sizes)
                  : grouped_on_cpu(at, left, right, groups, a.axis == -2, type, target.sizes);
  } else {
    std::optional<Tensor> row;
    if (bias) row = torch::stable::to(*bias, compute);
    y = with_shape(torch::stable::to(call("aten::linear", "", left, right, row), target.dtype),
                   target.sizes);
  }
  if (!target.into) return y;
  Tensor sum = *target.into;  // the stable ABI has no addition in place
  return torch::stable::copy_(sum, torch::stable::subtract(sum, y, -1.0));
}

}  // namespace blockscale::binding
