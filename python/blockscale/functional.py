"""`linear`: a differentiable y = x·Wᵀ + bias whose three GEMMs read the operands of a recipe."""

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
    # Tensors of keys cost launches on a GPU: none for what draws nothing.
    keys = Keys.of(rng, x.device) if rng is not None and chosen.stochastic else None
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
    if recipe.cuda_needs and x.is_cuda:
        remedy = "run it on the CPU, or use a recipe without FP32 scales, such as mxfp8"
        fail("linear", "recipe", f"{recipe} on cuda", recipe.cuda_needs, remedy)
    grad = torch.is_grad_enabled()
    needs = _Needs(
        dx=grad and x.requires_grad,
        dw=grad and w.requires_grad,
        db=grad and bias is not None and bias.requires_grad,
    )
    if keys is None and recipe.stochastic and _draws(recipe, needs):
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
    seeds = keys or _NO_KEYS
    if not any(needs):  # nothing to differentiate: the operator alone
        call = (x, w, bias, recipe.text, False, False, dtype, seeds.x, seeds.w, seeds.offset)
        result: list[torch.Tensor] = _ops.linear.default(*call)
        return result[0]
    y: torch.Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        x, w, bias, recipe, needs, dtype, *seeds
    )
    return y


class _Needs(NamedTuple):
    """Which gradients will be asked for."""

    dx: bool
    dw: bool
    db: bool


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
        made = _ops.linear.default(
            x, w, bias, recipe.text, needs.dx, needs.dw, dtype, seed_x, seed_w, offset
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
        ctx.save_for_backward(*saved)
        ctx.needs = needs
        ctx.call = (recipe.text, w.shape[1], needs.dx, needs.dw, dtype, x.dtype, w.dtype,
                    bias.dtype if bias is not None and needs.db else None)  # fmt: skip
        return made[0]  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        made = iter(_ops.linear_backward.default(dy, list(ctx.saved_tensors), *ctx.call))
        gradients = [next(made) if needed else None for needed in ctx.needs]
        return (*gradients, *(None,) * 7)


# --- fake kernels: shape, dtype and stride of every result, without data --------------------------


def _specs(recipe: str) -> dict[str, Spec | None]:
    """The operands of a recipe's text."""
    specs = (None if text == "none" else spec(text) for text in recipe.split(" "))
    return dict(zip(OPERANDS, specs, strict=True))


def _fake_operand(x: torch.Tensor, s: Spec) -> torch.Tensor:
    """The memory of x's operand along axis -2, stored as GEMMs read it."""
    layout = "mn_major" if s.scale == "fp32" and not s.square else "linear"
    shapes = stored_shapes(s, -2, x.shape, layout, 0)
    scales = math.prod(shapes.scales) * s.scale_bytes
    outer = torch.float32.itemsize if s.outer else 0
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
) -> list[torch.Tensor]:
    specs = _specs(recipe)
    made = [x.new_empty((*x.shape[:-1], w.shape[0]), dtype=dtype)]
    for tensor, s, needed in ((x, specs["wgrad_x"], dw), (w, specs["dgrad_w"], dx)):
        if needed and s is not None:
            made.append(_fake_operand(tensor, s))
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
) -> list[torch.Tensor]:
    n = dy.shape[-1]
    gradients = []
    if dx:
        gradients.append(dy.new_empty((*dy.shape[:-1], k), dtype=x_dtype))
    if dw:
        gradients.append(dy.new_empty((n, k), dtype=w_dtype))
    if bias_dtype is not None:
        gradients.append(dy.new_empty((n,), dtype=bias_dtype))
    return gradients


torch.library.register_fake("blockscale::linear", _fake_linear)
torch.library.register_fake("blockscale::linear_backward", _fake_linear_backward)
