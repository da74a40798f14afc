"""`linear`: a differentiable y = x·Wᵀ + bias whose three GEMMs read the operands of a recipe."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from blockscale._errors import fail, fail_type
from blockscale.recipe import Recipe, Spec
from blockscale.recipe import recipe as recipe_named
from blockscale.rng import Rng, as_tensor

_ops = torch.ops.blockscale
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Tensors = tuple[torch.Tensor, ...]


class Keys(NamedTuple):
    """Seeds of the three tensors of a linear layer, and their offset: int64 tensors of one
    element."""

    x: torch.Tensor
    w: torch.Tensor
    dy: torch.Tensor
    offset: torch.Tensor

    @staticmethod
    def of(rng: Rng, device: torch.device) -> Keys:
        x, w, dy = (as_tensor(rng.role(role).seed, device) for role in ("x", "w", "dy"))
        return Keys(x, w, dy, as_tensor(rng.offset, device))


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    recipe: str | Recipe = "nvfp4",
    rng: Rng | None = None,
) -> torch.Tensor:
    """y = x·Wᵀ + bias with the operands of all three GEMMs quantized as `recipe` says.

    The tensors may differ in dtype: each is quantized from the dtype it has. The result has x's
    dtype, or autocast's where it is enabled; gradients have the dtypes of what they belong to.

    Saved for backward: x's wgrad operand (when w needs a gradient) and w's dgrad operand (when x
    does), each quantized, or as it is where the recipe says high precision; and the key of dy's
    random bits. Nothing else. A recipe without quantized operands is `F.linear`.

    Args:
        x: [..., K] float32, bfloat16 or float16.
        w: [N, K], likewise.
        bias: [N], likewise.
        recipe: a Recipe or the name of one.
        rng: the key of the random bits; needed where the recipe rounds stochastically. Its seed is
            the layer's: each operand derives its own (`Rng.role`).

    Returns:
        [..., N].

    Raises:
        TypeError, ValueError: with the argument, what it got and what it needs.
    """
    chosen = recipe_named(recipe)
    if rng is not None and not isinstance(rng, Rng):
        fail_type("linear", "rng", rng, "bs.Rng(seed, offset)")
    keys = None if rng is None else Keys.of(rng, x.device)
    return linear_with_keys(x, w, bias, chosen, keys)


def linear_with_keys(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    keys: Keys | None,
) -> torch.Tensor:
    """`linear` for a caller that has the seeds of the operands at hand."""
    if recipe.high_precision:
        return torch.nn.functional.linear(x, w, bias)
    _check(x, w, bias)
    if x.is_cuda and recipe.cuda_needs:
        remedy = "run it on the CPU, or use a recipe without FP32 scales, such as mxfp8"
        fail("linear", "recipe", f"{recipe} on cuda", recipe.cuda_needs, remedy)
    grad = torch.is_grad_enabled()
    needs = _Needs(
        dx=grad and x.requires_grad,
        dw=grad and w.requires_grad,
        db=grad and bias is not None and bias.requires_grad,
    )
    if keys is None and _draws(recipe, needs):
        fail(
            "linear",
            "rng",
            "None",
            f"a key for random bits: recipe {recipe} rounds stochastically",
            "pass rng=bs.Rng(seed, offset)",
        )
    dtype, device = x.dtype, x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # torch refuses to ask for meta
        dtype = torch.get_autocast_dtype(device)
    y: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        x, w, bias, recipe, needs, dtype, *(keys or (None,) * 4)
    )
    return y


class _Needs(NamedTuple):
    """Which gradients will be asked for."""

    dx: bool
    dw: bool
    db: bool

    @property
    def any(self) -> bool:
        return self.dx or self.dw


def _check(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    for name, tensor in (("x", x), ("w", w), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, torch.Tensor):
            fail_type("linear", name, tensor, "a tensor")
        if tensor.dtype not in _DTYPES:
            fail("linear", f"{name}.dtype", tensor.dtype, "float32, bfloat16 or float16")
        if tensor.device != x.device:
            fail("linear", f"{name}.device", tensor.device, f"{x.device}, where x is")
    if w.dim() != 2:
        fail("linear", "w.shape", list(w.shape), "rank 2, [N, K]")
    if x.dim() < 1 or x.shape[-1] != w.shape[1]:
        fail("linear", "x.shape", list(x.shape), f"[..., {w.shape[1]}] for w {list(w.shape)}")
    if bias is not None and tuple(bias.shape) != (w.shape[0],):
        fail("linear", "bias.shape", list(bias.shape), f"[{w.shape[0]}] for w {list(w.shape)}")


def _stochastic(*specs: Spec | None) -> bool:
    return any(s is not None and s.stochastic for s in specs)


def _draws(recipe: Recipe, needs: _Needs) -> bool:
    """Whether any operand that will be made rounds stochastically."""
    return (
        _stochastic(recipe.fprop_x, recipe.fprop_w)
        or (needs.dx and _stochastic(recipe.dgrad_w, recipe.dgrad_dy))
        or (needs.dw and _stochastic(recipe.wgrad_x, recipe.wgrad_dy))
    )


# --- operands: lines whose last dimension is contracted -------------------------------------------
#
# A quantized operand is (codes, scales, outer) with its Spec; a high-precision one is (tensor,)
# with None. Codes quantized along axis -2 are stored transposed, so that both kinds of axis give
# lines x contraction length; a high-precision operand is a transposed view to the same effect.


def _operands(
    x: torch.Tensor,
    row: Spec | None,
    col: Spec | None,
    want_row: bool,
    want_col: bool,
    seed: torch.Tensor | None,
    offset: torch.Tensor | None,
) -> tuple[Tensors, Tensors]:
    """The row (axis -1) and column (axis -2) operands of `x`, in one pass where both are asked
    for; an operand that is not wanted is ()."""
    if want_row and want_col and row is not None and col is not None:
        out = _ops.quantize_dual(
            x, str(row), str(col), None, None, seed, offset, [], "linear", "linear", 0
        )
        return tuple(out[:3]), tuple(out[3:])
    first: Tensors = _operand(x, row, -1, seed, offset) if want_row else ()
    second: Tensors = _operand(x, col, -2, seed, offset) if want_col else ()
    return first, second


def _operand(
    x: torch.Tensor,
    spec: Spec | None,
    axis: int,
    seed: torch.Tensor | None,
    offset: torch.Tensor | None,
) -> Tensors:
    if spec is None:
        return (x if axis == -1 else x.t(),)
    return tuple(_ops.quantize(x, str(spec), axis, None, seed, offset, [], "linear", 0))


def _values(operand: Tensors, spec: Spec | None, lines: int, k: int, dtype: torch.dtype) -> Any:
    if spec is None:
        return operand[0].to(dtype)
    return _ops.dequantize(*operand, str(spec), -1, [lines, k], "linear", dtype)


def _gemm(
    a: Tensors,
    a_spec: Spec | None,
    b: Tensors,
    b_spec: Spec | None,
    extents: tuple[int, int, int],
    bias: torch.Tensor | None,
    compute: torch.dtype,
    out: torch.dtype,
) -> torch.Tensor:
    """A·Bᵀ + bias as [m, n]; in torch's own GEMM of dtype `compute` unless both are quantized."""
    m, n, k = extents
    if a_spec is None or b_spec is None:
        a_values = _values(a, a_spec, m, k, compute)
        b_values = _values(b, b_spec, n, k, compute)
        bias = None if bias is None else bias.to(compute)
        return _cast(torch.nn.functional.linear(a_values, b_values, bias), out)
    gemm_out = torch.float32 if out == torch.float16 else out
    y: torch.Tensor = _ops.matmul(
        *(*a, str(a_spec), "linear", m, *b, str(b_spec), "linear", n, k, bias, gemm_out)
    )
    return _cast(y, out)


def _cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`t.to(dtype)`, but no operation at all where there is nothing to do: torch 2.11's compiler
    loses the gradient of an output that another traced tensor is."""
    return t if t.dtype == dtype else t.to(dtype)


def _with_shape(matrix: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A fresh matrix with its leading dimensions restored. Not as a view, to autograd: users may
    change the output of a layer in place, and FSDP hangs hooks on it."""
    return matrix if matrix.dim() == len(shape) else torch.ops.aten._unsafe_view(matrix, shape)


class _Linear(torch.autograd.Function):
    """x [..., K], w [N, K] -> y [..., N]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: Recipe,
        needs: _Needs,
        dtype: torch.dtype,
        seed_x: torch.Tensor | None,
        seed_w: torch.Tensor | None,
        seed_dy: torch.Tensor | None,
        offset: torch.Tensor | None,
    ) -> torch.Tensor:
        if offset is not None:
            # The model's offset moves on in place, perhaps before this forward's backward runs.
            # The forward's own operands read the copy too: that keeps compilers from moving it.
            offset = _ops.snapshot(offset)
        shape, (n, k) = x.shape, w.shape
        m = math.prod(shape[:-1])
        x_row, x_col = _operands(
            x.reshape(m, k), recipe.fprop_x, recipe.wgrad_x, True, needs.dw, seed_x, offset
        )
        w_row, w_col = _operands(w, recipe.fprop_w, recipe.dgrad_w, True, needs.dx, seed_w, offset)
        y = _gemm(x_row, recipe.fprop_x, w_row, recipe.fprop_w, (m, n, k), bias, dtype, dtype)

        backward_draws = needs.any and _stochastic(recipe.dgrad_dy, recipe.wgrad_dy)
        key = (seed_dy, offset) if backward_draws else ()
        ctx.save_for_backward(*x_col, *w_col, *key)
        ctx.counts = (len(x_col), len(w_col))
        ctx.recipe, ctx.needs, ctx.extents, ctx.compute = recipe, needs, (m, n, k), dtype
        ctx.shape = tuple(shape)
        ctx.dtypes = (x.dtype, w.dtype, None if bias is None else bias.dtype)
        return _with_shape(y, (*shape[:-1], n))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, (x_count, w_count) = ctx.saved_tensors, ctx.counts
        x_col, rest = saved[:x_count], saved[x_count:]
        w_col, key = rest[:w_count], rest[w_count:]
        seed, offset = key if key else (None, None)
        recipe, needs, (m, n, k) = ctx.recipe, ctx.needs, ctx.extents
        x_dtype, w_dtype, bias_dtype = ctx.dtypes

        dy = dy.reshape(m, n)
        dy_row, dy_col = _operands(
            dy, recipe.dgrad_dy, recipe.wgrad_dy, needs.dx, needs.dw, seed, offset
        )
        dx = dw = db = None
        if needs.dx:
            dgrad = (recipe.dgrad_dy, w_col, recipe.dgrad_w, (m, k, n))
            dx = _with_shape(_gemm(dy_row, *dgrad, None, ctx.compute, x_dtype), ctx.shape)
        if needs.dw:
            wgrad = (recipe.wgrad_dy, x_col, recipe.wgrad_x, (n, k, m))
            dw = _gemm(dy_col, *wgrad, None, ctx.compute, w_dtype)
        if needs.db:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        return (dx, dw, db, *(None,) * 7)
