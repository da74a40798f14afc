"""What `bs.linear` keeps for its backward, and what the backward quantizes again."""

from __future__ import annotations

from collections.abc import Callable

import blockscale as bs
import pytest
import torch
from bits import QUANTIZED, RNG
from blockscale import shared_input
from linears import Case, assert_same, make, run


def saved_tensors(case: Case, recipe: str | bs.Recipe) -> list[torch.Tensor]:
    """What the forward keeps for its backward."""
    kept: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        bs.linear(case.x, case.w, case.bias, recipe, rng=RNG)
    return kept


def size(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def test_saves_the_quantized_operands_and_nothing_else() -> None:
    m, n, k = 256, 128, 64
    case = make(lead=(m,), n=n, k=k, bias=False)
    x = k * m // 2 + k * (m // 16) + 4  # codes, scales, outer of x's wgrad operand
    w = k * n // 2 + (k // 16) * (n // 16) + 4  # of w's dgrad operand, square blocks
    assert size(saved_tensors(case, "nvfp4")) == x + w + 16  # and seed and offset
    frozen = Case(case.x, case.w.detach(), None, case.dy)
    assert size(saved_tensors(frozen, "nvfp4")) == w + 16
    first = Case(case.x.detach(), case.w, None, case.dy)
    assert size(saved_tensors(first, "nvfp4")) == x + 16
    assert size(saved_tensors(first, "mxfp8")) == k * m + k * (m // 32)
    with torch.no_grad():
        assert saved_tensors(case, "nvfp4") == []
    exact = bs.recipe("mxfp8").replace(wgrad_x=None, wgrad_dy=None)
    assert size(saved_tensors(first, exact)) == 4 * m * k


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_a_weight_that_the_backward_quantizes_again(name: str, wanted: tuple[bool, bool]) -> None:
    """The same bits, and nothing of W is saved but W."""
    full = make()
    x, w = (t.detach().requires_grad_(on) for t, on in zip(full[:2], wanted, strict=True))
    case = Case(x, w, full.bias, full.dy)
    again = bs.recipe(name).replace(keep_w=False)
    assert_same(run(case, again), run(case, bs.recipe(name)))
    saved = saved_tensors(case, again)
    assert [t.data_ptr() for t in saved if t.shape == w.shape] == [w.data_ptr()] * wanted[0]
    # And of x its operand, with the offset where random bits are drawn.
    of_x = saved_tensors(Case(x.detach(), full.w, None, full.dy), name)[:1]
    want = size(of_x) if wanted[1] else 8 if again.stochastic else 0
    assert size([t for t in saved if t.numel() > 1 and t.shape != w.shape]) == want


@pytest.mark.parametrize("keep_w", [True, False])
@pytest.mark.parametrize("name", QUANTIZED)
def test_an_input_that_the_backward_quantizes_again(name: str, keep_w: bool) -> None:
    """The same bits, and nothing of x is saved but x."""
    case, recipe = make(), bs.recipe(name).replace(keep_w=keep_w)
    again = recipe.replace(keep_x=False)
    want = run(case, recipe)
    assert_same(run(case, again), want)
    saved = saved_tensors(case, again)
    assert [t.data_ptr() for t in saved].count(case.x.data_ptr()) == 1
    of_w = saved_tensors(Case(case.x, case.w.detach(), None, case.dy), recipe)
    assert size([t for t in saved if t.numel() > 1 and t.shape != case.x.shape]) == size(
        [t for t in of_w if t.numel() > 1]
    )
    # Each gradient by itself.
    y = bs.linear(case.x, case.w, case.bias, again, rng=RNG)
    parts = [
        torch.autograd.grad(y, t, case.dy, retain_graph=True)[0] for t in case[:3] if t is not None
    ]
    assert_same([y, *parts], want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "recipe", ["mxfp8", "mxfp8[keep_x=False]", "mxfp8[wgrad_x=none]", "bf16[fprop_x=mxfp8]"]
)
def test_an_input_that_compiled_code_changes_afterwards(recipe: str, backend: str) -> None:
    """Compiled code counts no changes; the backward reads what x was."""
    case = make(bias=False)

    def run(change: bool) -> torch.Tensor:
        torch._dynamo.reset()

        def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            h = x * 2
            y = bs.linear(h, w, recipe=recipe)
            if change:
                h[..., :35].zero_()
            return y

        y = torch.compile(f, backend=backend, fullgraph=True)(case.x, case.w)
        return torch.autograd.grad(y, case.w, case.dy)[0]

    assert torch.equal(run(True), run(False))


def test_the_operator_refuses_pairs_of_specs_that_no_recipe_has() -> None:
    """On an H100 these are the specs of an operand in MXFP4 that has become FP8."""
    x, w = torch.ones(4, 64), torch.ones(8, 64)
    recipe = "fp8_1x128[element=e5m2] mxfp4 none none none none"
    with pytest.raises(ValueError, match=r"^linear: b = mxfp4; need "):
        torch.ops.blockscale.linear(x, w, None, recipe, False, False)


def test_a_weight_in_high_precision_is_as_the_forward_had_it() -> None:
    recipe = bs.recipe("mxfp8[dgrad_dy=none,dgrad_w=none]").text
    dy, ends = torch.ones(5, 9), torch.tensor([5])
    for offsets, shapes in (
        (None, [(9, 69), (9, 71), (8, 70), (630,)]),
        (ends, [(9, 70), (1, 9, 69), (1, 8, 70), (2, 9, 70)]),
    ):
        for shape in shapes:
            call = (dy, [torch.ones(shape)], recipe, 70, True, False, False, offsets)
            with pytest.raises(ValueError, match=r"linear: saved = \[[\d, ]+\]; need x and w as"):
                torch.ops.blockscale.linear_backward(*call)


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize(
    "recipe", ["mxfp8[keep_x=False]", "mxfp8[keep_w=False]", "mxfp8[wgrad_x=none,wgrad_dy=none]"]
)
def test_saved_values_that_are_others(
    recipe: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks for saved tensors may hand back anything."""
    monkeypatch.setattr(shared_input, "LARGE", 1 if large else 1 << 60)
    case = make(lead=(20,), bias=False)
    values = case.w if "keep_w" in recipe else case.x

    def backward(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        def unpack(t: torch.Tensor) -> torch.Tensor:
            return change(t) if t.shape == values.shape else t

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = bs.linear(case.x, case.w, recipe=recipe)
        torch.autograd.grad(y, (case.x, case.w), case.dy)

    backward(torch.clone)
    with pytest.raises(ValueError, match=r"^linear: saved = \[\d+, 14000\]; need x and w as"):
        backward(lambda t: torch.cat([t] * 200, 1))
    with pytest.raises(ValueError, match=r"^linear: saved = \[\d+, 40\]; need x and w as"):
        backward(lambda t: t[:, :40])
    with pytest.raises(ValueError, match=r"^linear: saved = \[\d+, 70\]; need x and w as"):
        backward(lambda t: t[1:])
    with pytest.raises(ValueError, match=r"saved.device = meta; need cpu"):
        backward(lambda t: t.to("meta"))


def test_an_input_that_changes_before_it_is_quantized_again() -> None:
    case = make()
    x = case.x * 2
    y = bs.linear(x, case.w, recipe="mxfp8[keep_x=False]")
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(case.dy)  # type: ignore[no-untyped-call]
