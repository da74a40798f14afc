"""Cases for `bs.linear`: random operands, the call with its gradients, and the same by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import blockscale as bs
import torch
from bits import RNG


class Case(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    dy: torch.Tensor


def make(
    lead: tuple[int, ...] = (2, 11),
    n: int = 37,
    k: int = 70,
    dtype: torch.dtype = torch.float32,
    w_dtype: torch.dtype | None = None,
    bias: bool = True,
    seed: int = 0,
) -> Case:
    """Random operands whose extents no block divides."""
    g = torch.Generator().manual_seed(seed)
    wd = w_dtype or dtype
    return Case(
        torch.randn(*lead, k, generator=g).to(dtype).requires_grad_(),
        torch.randn(n, k, generator=g).to(wd).requires_grad_(),
        torch.randn(n, generator=g).to(wd).requires_grad_() if bias else None,
        torch.randn(*lead, n, generator=g).to(dtype),
    )


def run(case: Case, recipe: str | bs.Recipe, rng: bs.Rng = RNG) -> list[torch.Tensor | None]:
    """[y, dx, dw, db] of bs.linear."""
    y = bs.linear(case.x, case.w, case.bias, recipe, rng=rng)
    inputs = [t for t in case[:3] if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad(y, inputs, case.dy.to(y.dtype)))
    return [y, *(next(grads) if t is not None and t.requires_grad else None for t in case[:3])]


def by_hand(case: Case, recipe: bs.Recipe, out: torch.dtype) -> list[torch.Tensor | None]:
    """The same from quantize and matmul."""

    def product(
        a: torch.Tensor, a_spec: bs.Spec | None, a_axis: int, a_role: str,
        b: torch.Tensor, b_spec: bs.Spec | None, b_axis: int, b_role: str,
        dtype: torch.dtype, bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        assert a_spec is not None
        assert b_spec is not None
        qa = bs.quantize(a, a_spec, a_axis, rng=RNG.role(a_role))
        qb = bs.quantize(b, b_spec, b_axis, rng=RNG.role(b_role))
        wide = torch.float32 if dtype == torch.float16 else dtype
        return bs.matmul(qa, qb, bias, wide).to(dtype)

    x, w = case.x.detach().flatten(0, -2), case.w.detach()
    dy, r = case.dy.flatten(0, -2).to(out), recipe
    y = product(x, r.fprop_x, -1, "x", w, r.fprop_w, -1, "w", out, case.bias)
    dx = product(dy, r.dgrad_dy, -1, "dy", w, r.dgrad_w, -2, "w", case.x.dtype)
    dw = product(dy, r.wgrad_dy, -2, "dy", x, r.wgrad_x, -2, "x", case.w.dtype)
    db = dy.sum(0, dtype=torch.float32).to(case.w.dtype) if case.bias is not None else None
    return [y.reshape(case.dy.shape), dx.reshape(case.x.shape), dw, db]


def assert_same(got: Sequence[torch.Tensor | None], want: Sequence[torch.Tensor | None]) -> None:
    for name, g, w in zip(("y", "dx", "dw", "db"), got, want, strict=True):
        if w is None:
            assert g is None, name
            continue
        assert g is not None, name
        assert (g.dtype, g.shape) == (w.dtype, w.shape), name
        assert torch.equal(g, w), name
