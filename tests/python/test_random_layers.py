"""`linear` and `grouped_linear` in random recipes, dtypes and extents: the three products of each
are those of the operands that `quantize` makes, in double precision, within the bound of FP32 sums
and of one rounding to the result's dtype."""

from __future__ import annotations

import random as randomness
from typing import Any, NamedTuple

import blockscale as bs
import pytest
import torch

U = 2.0**-24
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float16)
RECIPES = (
    *(name for name in bs.recipe_names() if name != "bf16"),
    "fp8_blockwise[wgrad_x=fp8_128x128]",
    "fp8_blockwise[keep_w=False,keep_x=False]",
    "mxfp8[keep_w=False]",
)
EXTENTS = (0, 1, 2, 7, 8, 16, 63, 64, 128, 130, 200, 256, 385, 513, 1000)
LONG = (8200, 12_008, 16_136)  # sums of many products, of few rows and columns
SPARE = 1 << 21  # products of the largest case


class Layer(NamedTuple):
    recipe: bs.Recipe
    rng: bs.Rng
    x: torch.Tensor
    w: torch.Tensor
    dy: torch.Tensor
    bias: torch.Tensor | None
    ends: list[int] | None  # of groups
    ahead: bool  # the weight is quantized ahead
    into: torch.Tensor | None  # w's gradient is added to it


def draw(r: randomness.Random, device: torch.device, spare: int) -> Layer:
    recipe, dtype = bs.recipe(r.choice(RECIPES)), r.choice(DTYPES)
    groups = r.choice((0, 0, 1, 3, 9))
    while True:
        t, n, k = (r.choice(LONG) if r.random() < 0.05 else r.choice(EXTENTS) for _ in range(3))
        if max(t, 1) * max(n, 1) * max(k, 1) <= spare and n * k * groups <= spare:
            break
    g = torch.Generator().manual_seed(r.getrandbits(60))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(device, dtype)

    # Transforms along a group's rows also fill what lies behind them, which dequantize leaves out.
    whole = recipe.wgrad_x.extent_multiple if recipe.wgrad_x else 1
    ends = sorted(r.randint(0, t) // whole * whole for _ in range(groups)) or None
    if not ends:
        t = t // whole * whole
    w = normal(groups, n, k) if ends else normal(n, k)
    bias = normal(n) if not ends and r.random() < 0.5 else None
    into = torch.randn(w.shape, generator=g).to(device) if r.random() < 0.3 else None
    rng = bs.Rng(r.getrandbits(64), r.getrandbits(40))
    return Layer(
        recipe, rng, normal(t, k), w, normal(t, n), bias, ends, r.random() < 0.4, into
    )  # fmt: skip


def run(layer: Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, dx and dw, or what dw has been added to."""
    x, w = (t.clone().requires_grad_() for t in (layer.x, layer.w))
    into = None if layer.into is None else layer.into.clone()
    ahead = bs.quantize_weight(layer.w, layer.recipe, layer.rng) if layer.ahead else None
    options: dict[str, Any] = {"accumulate_into": into, "quantized_weight": ahead}
    if layer.ends is None:
        y = bs.linear(x, w, layer.bias, layer.recipe, layer.rng, **options)
    else:
        ends = torch.tensor(layer.ends, device=x.device)
        y = bs.grouped_linear(x, w, ends, layer.recipe, layer.rng, **options)
    torch.autograd.backward(y, layer.dy)
    dw = w.grad if into is None else into
    assert x.grad is not None
    assert dw is not None
    return y.detach(), x.grad, dw


def check(
    got: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    wgmma: bool,
    added: torch.Tensor | None,
    what: object,
) -> None:
    """got = a·b (+ added), as `tests/python/matmuls.py` bounds it; `wgmma`: on tensor cores
    that add FP8 products with 13 bits; a quarter of the magnitudes stands for the largest sums."""
    sums, magnitudes = a @ b, a.abs() @ b.abs()
    want = sums if added is None else sums + added.double()
    bound = 2 * (a.shape[1] + 8) * U * magnitudes + 4 * U * (sums.abs() + want.abs()) + 2.0**-126
    if wgmma:
        bound += 4 * 33 * 2.0**-13 * magnitudes / 4
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[got.dtype]
    bound += rounding * (want.abs() + bound) + (2.0**-24 if got.dtype == torch.float16 else 0)
    error = (got.double() - want).abs()
    assert bool((error <= bound).all()), (what, float((error - bound).max()))


def check_layer(layer: Layer) -> None:
    r, grouped = layer.recipe, layer.ends is not None
    ends = torch.tensor(layer.ends, device=layer.x.device) if grouped else None

    def values(t: torch.Tensor, spec: bs.Spec | None, axis: int, role: str) -> torch.Tensor:
        assert spec is not None
        of_groups = {"batch_dims": 1} if t is layer.w else {"offsets": ends}
        made = bs.quantize(
            t, spec, axis, rng=layer.rng.role(role), **(of_groups if grouped else {})
        )
        return bs.dequantize(made, torch.float32).double()

    x, w = values(layer.x, r.fprop_x, -1, "x"), values(layer.w, r.fprop_w, -1, "w")
    dy, dx_w = values(layer.dy, r.dgrad_dy, -1, "dy"), values(layer.w, r.dgrad_w, -2, "w")
    dw_dy, dw_x = values(layer.dy, r.wgrad_dy, -2, "dy"), values(layer.x, r.wgrad_x, -2, "x")
    wgmma = (
        layer.x.is_cuda and r.fprop_w is not None and r.fprop_w.family in ("fp8_128x128", "mxfp4")
    )
    y, dx, dw = run(layer)
    about = (
        str(r),
        layer.rng,
        layer.x.dtype,
        layer.x.shape,
        layer.w.shape,
        layer.ends,
        layer.ahead,
    )
    begin = 0
    for g, end in enumerate(layer.ends if layer.ends is not None else [layer.x.shape[0]]):
        rows, one = slice(begin, end), g if grouped else ...
        begin = end
        check(y[rows], x[rows], w[one].t(), wgmma, layer.bias, ("y", g, about))
        check(dx[rows], dy[rows], dx_w[one], wgmma, None, ("dx", g, about))
        into = None if layer.into is None else layer.into[one]
        check(dw[one], dw_dy[rows].t(), dw_x[rows], wgmma, into, ("dw", g, about))
    for of_no_group in (y[begin:], dx[begin:]):
        assert not of_no_group.any(), about


@pytest.mark.parametrize("part", range(2))
def test_products_of_random_layers(
    part: int, device: torch.device, random: torch.Generator
) -> None:
    r = randomness.Random(int(torch.randint(1 << 60, (), generator=random)) + part)
    on_gpu = device.type == "cuda"
    for _ in range(200 if on_gpu else 60):
        check_layer(draw(r, device, 32 * SPARE if on_gpu else SPARE))
