"""Backwards that are asked for a part of the gradients: nothing else is computed, or added to a
buffer. Pipelines that put the weights' gradients off ask twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import blockscale as bs
import pytest
import torch
import torch.distributed as dist
from blockscale._collectives import largest_of_ranks
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

RNG = bs.Rng(7, 1 << 16)
T, N, K = 40, 32, 64
PRODUCT = 2 * T * N * K
Inputs = dict[str, torch.Tensor]


def case(
    recipe: str, grouped: bool, into: bool, device: torch.device
) -> tuple[Inputs, Callable[[], torch.Tensor]]:
    """The inputs and what computes y from them; `into` has the buffer among them."""
    g = torch.Generator().manual_seed(3)
    shape = (2, N, K) if grouped else (N, K)
    made = {"x": torch.randn(T, K, generator=g), "w": torch.randn(shape, generator=g)}
    if not grouped:
        made["bias"] = torch.randn(N, generator=g)
    inputs = {n: t.to(device, torch.bfloat16).requires_grad_() for n, t in made.items()}
    buffer = torch.zeros(shape, device=device) if into else None
    ends = torch.tensor([13, T], device=device)

    def call() -> torch.Tensor:
        x, w = inputs["x"], inputs["w"]
        if grouped:
            return bs.grouped_linear(x, w, ends, recipe, RNG, buffer)
        return bs.linear(x, w, inputs["bias"], recipe, RNG, buffer)

    return inputs | ({"into": buffer} if buffer is not None else {}), call


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8_blockwise", "amdfp4"])
def test_gradients_one_by_one_are_those_of_one_backward(
    recipe: str, grouped: bool, device: torch.device
) -> None:
    """Random bits of dy and what was saved included."""
    inputs, call = case(recipe, grouped, False, device)
    dy = torch.ones(T, N, dtype=torch.bfloat16, device=device)
    want = torch.autograd.grad(call(), list(inputs.values()), dy)
    for (name, tensor), gradient in zip(inputs.items(), want, strict=True):
        got = torch.autograd.grad(call(), tensor, dy)[0]
        assert torch.equal(got, gradient), name
        call().backward(dy, inputs=[tensor])  # type: ignore[no-untyped-call]
        assert tensor.grad is not None, name
        assert torch.equal(tensor.grad, gradient), name
        assert all(t.grad is None for t in inputs.values() if t is not tensor), name
        tensor.grad = None


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8_blockwise", "amdfp4"])
def test_a_buffer_is_added_to_where_its_gradient_is_asked_for(
    recipe: str, grouped: bool, device: torch.device
) -> None:
    inputs, call = case(recipe, grouped, True, device)
    dy = torch.ones(T, N, dtype=torch.bfloat16, device=device)
    call().backward(dy)  # type: ignore[no-untyped-call]
    x, w, into = inputs["x"], inputs["w"], inputs["into"]
    want, want_x = into.clone(), x.grad
    assert want_x is not None
    assert want.abs().max() > 0
    into.zero_()
    y, version = call(), into._version
    made = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
    assert torch.equal(made, want_x)
    y.backward(dy, inputs=[x], retain_graph=True)  # type: ignore[no-untyped-call]
    assert (into == 0).all()
    assert into._version == version
    assert torch.autograd.grad(y, w, dy, allow_unused=True)[0] is None
    assert torch.equal(into, want)


@pytest.mark.parametrize("into", [False, True])
def test_what_is_not_asked_for_is_not_computed(into: bool) -> None:
    inputs, call = case("nvfp4", False, into, torch.device("cpu"))
    for names, products in ((("x",), 1), (("w",), 1), (("bias",), 0), (("x", "w"), 2)):
        y = call()
        with FlopCounterMode(display=False) as mode:
            tensors = [inputs[name] for name in names]
            torch.autograd.grad(y.sum(), tensors, allow_unused=into)
        assert mode.get_total_flops() == products * PRODUCT, names


def maxima_of_what_is_made() -> None:
    """Ranks exchange no largest values for a gradient that nobody needs or, in the backward, asks
    for."""
    mesh, sent = init_device_mesh("cpu", (2,)), [0]

    def count(amax: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        sent[-1] += 1
        return largest_of_ranks(amax, group)

    plain = bs.recipe("bf16")
    dgrad = plain.replace(dgrad_dy="nvfp4", dgrad_w="nvfp4")
    wgrad = plain.replace(wgrad_x="nvfp4", wgrad_dy="nvfp4")
    # Cut along 0, w and dy are pieces; along 1, x and w. Then what needs a gradient, what is asked
    # for, and how often ranks meet in the forward and in the backward.
    for recipe, cut, needs, asked, exchanged in (
        (dgrad, 0, "xw", "xw", [1, 1]),
        (dgrad, 0, "xw", "w", [1, 0]),
        (dgrad, 0, "w", "w", [0, 0]),
        (dgrad, 1, "xw", "xw", [1, 0]),
        (dgrad, 1, "xw", "", [0, 0]),  # without gradients at all
        (wgrad, 0, "xw", "xw", [0, 1]),
        (wgrad, 0, "xw", "x", [0, 0]),
        (wgrad, 1, "xw", "xw", [1, 0]),
        (wgrad, 1, "x", "x", [0, 0]),
    ):
        tensors = {
            "x": distribute_tensor(torch.randn(8, 64), mesh, [Replicate()]),
            "w": distribute_tensor(torch.randn(64, 64), mesh, [Shard(cut)]),
        }
        for name in needs:
            tensors[name].requires_grad_()
        sent[:] = [0]
        with mock.patch("blockscale.distributed.largest_of_ranks", count):
            with torch.set_grad_enabled(bool(asked)):
                y = bs.linear(tensors["x"], tensors["w"], recipe=recipe)
            sent.append(0)
            assert isinstance(y, DTensor)
            if asked:
                torch.autograd.grad(y.full_tensor().sum(), [tensors[name] for name in asked])
        assert sent == exchanged, (recipe, cut, needs, asked)


def test_maxima_of_what_is_made(tmp_path: Path) -> None:
    on_ranks(maxima_of_what_is_made, tmp_path)
