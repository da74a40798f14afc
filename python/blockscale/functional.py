"""`linear` and `grouped_linear`: a differentiable y = x·Wᵀ whose three GEMMs read the operands of a
recipe."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from blockscale._errors import fail, fail_type
from blockscale.recipe import OPERANDS, Recipe, Spec, spec
from blockscale.recipe import recipe as recipe_named
from blockscale.rng import Rng, as_tensor
from blockscale.tensor import stored_shapes

_ops = torch.ops.blockscale
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Keys(NamedTuple):
    """Seeds of the three tensors of a linear layer, and their offset: int64 tensors of one
    element. None where nothing is drawn."""

    x: torch.Tensor | None
    w: torch.Tensor | None
    dy: torch.Tensor | None
    offset: torch.Tensor | None

    @staticmethod
    def of(rng: Rng, device: torch.device) -> Keys:
        x, w, dy = (as_tensor(rng.role(role).seed, device) for role in ("x", "w", "dy"))
        return Keys(x, w, dy, as_tensor(rng.offset, device))


_NO_KEYS = Keys(None, None, None, None)


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    recipe: str | Recipe = "nvfp4",
    rng: Rng | None = None,
    accumulate_into: torch.Tensor | None = None,
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
        accumulate_into: contiguous float32 of w's shape, such as Megatron's `w.main_grad`: the
            backward adds w's gradient to it, in the GEMM where the kernels can, and w itself gets
            none (hooks on w's gradient do not run). Not for `create_graph`, and not reset here.

    Returns:
        [..., N].

    Raises:
        TypeError, ValueError: with the argument, what it got and what it needs.
    """
    chosen = recipe_named(recipe)
    keys = _keys("linear", rng, x, chosen)
    return linear_with_keys(x, w, bias, chosen, keys, None, accumulate_into)


def grouped_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    recipe: str | Recipe = "nvfp4",
    rng: Rng | None = None,
    accumulate_into: torch.Tensor | None = None,
) -> torch.Tensor:
    """The linear layers of experts in one: each group of x's rows times its own matrix of w.

    y[r] = w[g]·x[r] for the rows r of group g, and its gradients, each as `linear` computes it for
    the group alone: every group has its own outer scales and tiling of blocks (docs/groups.md).
    Random bits are those of `quantize` with `offsets` for x and dy, and with batch_dims=1 for w.

    Rows past the last end belong to no group: y and x's gradient are 0 there, whatever x and dy
    hold. A matrix whose group is empty gets a gradient of 0.

    x, w and dy are each read once a step; what is saved is as for `linear`, and the offsets. On a
    GPU nothing waits for these. Operands in high precision, which are all with recipe "bf16", are
    multiplied there by PyTorch's grouped GEMM, in bfloat16 only.

    Args:
        x: [T, K] float32, bfloat16 or float16, its rows sorted by group.
        w: [E, N, K], likewise.
        offsets: [E] int32 or int64 on x's device: where each group ends, never decreasing, at most
            T. Wrong ones raise on the CPU, and on a GPU make y and the gradients NaN.
        recipe, rng, accumulate_into: as for `linear`.

    Returns:
        [T, N].

    Raises:
        TypeError, ValueError: with the argument, what it got and what it needs.
    """
    chosen = recipe_named(recipe)
    keys = _keys("grouped_linear", rng, x, chosen)
    return linear_with_keys(x, w, None, chosen, keys, offsets, accumulate_into)


def _keys(operation: str, rng: Rng | None, x: torch.Tensor, recipe: Recipe) -> Keys | None:
    if rng is not None and not isinstance(rng, Rng):
        fail_type(operation, "rng", rng, "bs.Rng(seed, offset)")
    # Tensors of keys cost launches on a GPU: none for what draws nothing.
    return Keys.of(rng, x.device) if rng is not None and recipe.stochastic else None


def linear_with_keys(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    keys: Keys | None,
    offsets: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear`, or with offsets `grouped_linear`, for a caller that has the seeds of the operands
    at hand."""
    if recipe.high_precision and offsets is None and into is None:
        return torch.nn.functional.linear(x, w, bias)
    op = "linear" if offsets is None else "grouped_linear"
    _check(op, x, w, bias, offsets, into)
    if recipe.cuda_needs and x.is_cuda:
        remedy = "run it on the CPU, or use a recipe without FP32 scales, such as mxfp8"
        fail(op, "recipe", f"{recipe} on cuda", recipe.cuda_needs, remedy)
    grad = torch.is_grad_enabled()
    needs = _Needs(
        dx=grad and x.requires_grad,
        dw=grad and w.requires_grad,
        db=grad and bias is not None and bias.requires_grad,
    )
    if into is not None and grad and not needs.dw:
        fail(op, "accumulate_into", "given", "none: w needs no gradient", "leave it out")
    if keys is None and recipe.stochastic and _draws(recipe, needs):
        fail(
            op,
            "rng",
            "None",
            f"a key for random bits: recipe {recipe} rounds stochastically",
            "pass rng=bs.Rng(seed, offset)",
        )
    dtype, device = x.dtype, x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # torch refuses to ask for meta
        dtype = torch.get_autocast_dtype(device)
    seeds = keys or _NO_KEYS
    if not any(needs):  # nothing to differentiate: the operator alone
        call = (x, w, bias, recipe.text, False, False, dtype, seeds.x, seeds.w, seeds.offset)
        result: list[torch.Tensor] = _ops.linear.default(*call, offsets)
        return result[0]
    y: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        x, w, bias, recipe, needs, dtype, offsets, into, *seeds
    )
    return y


class _Needs(NamedTuple):
    """Which gradients will be asked for."""

    dx: bool
    dw: bool
    db: bool


def _check(
    op: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    offsets: torch.Tensor | None,
    into: torch.Tensor | None,
) -> None:
    for name, tensor in (("x", x), ("w", w), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, torch.Tensor):
            fail_type(op, name, tensor, "a tensor")
        if tensor.dtype not in _DTYPES:
            fail(op, f"{name}.dtype", tensor.dtype, "float32, bfloat16 or float16")
        if tensor.device != x.device:
            fail(op, f"{name}.device", tensor.device, f"{x.device}, where x is")
    for name, tensor in (("offsets", offsets), ("accumulate_into", into)):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            fail_type(op, name, tensor, "a tensor")
    grouped = offsets is not None
    if w.dim() != 2 + grouped:
        fail(op, "w.shape", list(w.shape), "rank 3, [E, N, K]" if grouped else "rank 2, [N, K]")
    if x.dim() < 1 or (grouped and x.dim() != 2) or x.shape[-1] != w.shape[-1]:
        lead = "T" if grouped else "..."
        fail(op, "x.shape", list(x.shape), f"[{lead}, {w.shape[-1]}] for w {list(w.shape)}")
    if bias is not None and tuple(bias.shape) != (w.shape[0],):
        fail(op, "bias.shape", list(bias.shape), f"[{w.shape[0]}] for w {list(w.shape)}")
    if offsets is not None and tuple(offsets.shape) != (w.shape[0],):
        need = f"[{w.shape[0]}], the end of a group for each matrix of w {list(w.shape)}"
        fail(op, "offsets.shape", list(offsets.shape), need)
    if into is None:
        return
    if (into.shape, into.dtype, into.device) != (w.shape, torch.float32, w.device) or (
        not into.is_contiguous()
    ):
        got = f"{into.dtype}{list(into.shape)} on {into.device}"
        need = f"contiguous torch.float32{list(w.shape)} on {w.device}, as w is"
        fail(op, "accumulate_into", got, need)


def _stochastic(*specs: Spec | None) -> bool:
    return any(s is not None and s.stochastic for s in specs)


def _draws(recipe: Recipe, needs: _Needs) -> bool:
    """Whether any operand that will be made rounds stochastically."""
    return (
        _stochastic(recipe.fprop_x, recipe.fprop_w)
        or (needs.dx and _stochastic(recipe.dgrad_w, recipe.dgrad_dy))
        or (needs.dw and _stochastic(recipe.wgrad_x, recipe.wgrad_dy))
    )


class _Linear(torch.autograd.Function):
    """x [..., K], w [N, K] -> y [..., N]; with offsets x [T, K], w [E, N, K] -> y [T, N]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: Recipe,
        needs: _Needs,
        dtype: torch.dtype,
        offsets: torch.Tensor | None,
        into: torch.Tensor | None,
        seed_x: torch.Tensor | None,
        seed_w: torch.Tensor | None,
        seed_dy: torch.Tensor | None,
        offset: torch.Tensor | None,
    ) -> torch.Tensor:
        made = _ops.linear.default(
            x, w, bias, recipe.text, needs.dx, needs.dw, dtype, seed_x, seed_w, offset, offsets
        )
        # The operator returns what it has made; operands in high precision are the inputs. (Tuples:
        # PyTorch 2.11's compiler does not trace changes of a list here.)
        saved = tuple(made[1:])
        if needs.dw and recipe.wgrad_x is None:
            saved = (x, *saved)
        if needs.dx and recipe.dgrad_w is None:
            saved = (saved[0], w, *saved[1:]) if needs.dw else (w, *saved)
        if len(saved) > needs.dx + needs.dw:  # the offset's copy: dy will draw
            saved = (*saved, seed_dy)
        ctx.save_for_backward(offsets, *saved)
        ctx.needs = needs
        ctx.into = into
        ctx.call = (recipe.text, w.shape[-1], needs.dx, needs.dw, dtype, x.dtype,
                    w.dtype if into is None else torch.float32,
                    bias.dtype if bias is not None and needs.db else None)  # fmt: skip
        return made[0]  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        offsets, *saved = ctx.saved_tensors
        into, needs = ctx.into, ctx.needs
        if into is None or not needs.dw:
            made = iter(_ops.linear_backward.default(dy, saved, *ctx.call, offsets))
            gradients = [next(made) if needed else None for needed in needs]
        else:
            text, k, dx, _, dtype, x_dtype, _, bias_dtype = ctx.call
            call = (text, k, dx, dtype, x_dtype, bias_dtype, offsets, into)
            grad_x, grad_b = _ops.linear_backward_into.default(dy, saved, *call)
            gradients = [grad_x if needs.dx else None, None, grad_b if needs.db else None]
        return (*gradients, *(None,) * 9)


# --- fake kernels: shape, dtype and stride of every result, without data --------------------------


def _specs(recipe: str) -> dict[str, Spec | None]:
    """The operands of a recipe's text."""
    specs = (None if text == "none" else spec(text) for text in recipe.split(" "))
    return dict(zip(OPERANDS, specs, strict=True))


def _fake_operand(x: torch.Tensor, s: Spec, groups: int, batch_dims: int) -> torch.Tensor:
    """The memory of x's operand along axis -2, stored as GEMMs read it."""
    layout = "mn_major" if s.scale == "fp32" else "linear"
    shapes = stored_shapes(s, -2, x.shape, layout, batch_dims, groups)
    outer = math.prod(shapes.outer) * torch.float32.itemsize if s.outer else 0
    scales = math.prod(shapes.scales) * s.scale_bytes
    return x.new_empty(math.prod(shapes.codes) + outer + scales, dtype=torch.uint8)


def _fake_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: str,
    dx: bool,
    dw: bool,
    dtype: torch.dtype,
    seed_x: torch.Tensor | None,
    seed_w: torch.Tensor | None,
    offset: torch.Tensor | None,
    offsets: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    specs = _specs(recipe)
    made = [x.new_empty((*x.shape[:-1], w.shape[-2]), dtype=dtype)]
    groups = 0 if offsets is None else offsets.shape[0]
    for tensor, s, needed, parts, batch in (
        (x, specs["wgrad_x"], dw, groups, 0),
        (w, specs["dgrad_w"], dx, 0, w.dim() - 2),
    ):
        if needed and s is not None:
            made.append(_fake_operand(tensor, s, parts, batch))
    draws = (needed and _stochastic(specs[o]) for needed, o in ((dx, "dgrad_dy"), (dw, "wgrad_dy")))
    if offset is not None and any(draws):
        made.append(torch.empty_like(offset))
    return made


def _fake_linear_backward(
    dy: torch.Tensor,
    saved: list[torch.Tensor],
    recipe: str,
    k: int,
    dx: bool,
    dw: bool,
    dtype: torch.dtype,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    offsets: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    n = dy.shape[-1]
    gradients = []
    if dx:
        gradients.append(dy.new_empty((*dy.shape[:-1], k), dtype=x_dtype))
    if dw:
        batch = () if offsets is None else offsets.shape
        gradients.append(dy.new_empty((*batch, n, k), dtype=w_dtype))
    if bias_dtype is not None:
        gradients.append(dy.new_empty((n,), dtype=bias_dtype))
    return gradients


def _fake_linear_backward_into(
    dy: torch.Tensor,
    saved: list[torch.Tensor],
    recipe: str,
    k: int,
    dx: bool,
    dtype: torch.dtype,
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    offsets: torch.Tensor | None,
    into: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    f32, none = torch.float32, dy.new_empty(0, dtype=torch.float32)
    made = _fake_linear_backward(
        dy, saved, recipe, k, dx, False, dtype, x_dtype, f32, bias_dtype, offsets
    )
    return made[0] if dx else none, made[-1] if bias_dtype is not None else none


torch.library.register_fake("blockscale::linear", _fake_linear)
torch.library.register_fake("blockscale::linear_backward", _fake_linear_backward)
torch.library.register_fake("blockscale::linear_backward_into", _fake_linear_backward_into)
