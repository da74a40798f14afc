"""What FlopCounterMode counts: the products of the layer that a converted one stands for."""

from __future__ import annotations

from collections.abc import Callable

import blockscale as bs
import torch
from torch.utils.flop_counter import FlopCounterMode


def counted(step: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as mode:
        step()
    return int(mode.get_total_flops())


def test_a_converted_model_counts_as_before() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.GELU(), torch.nn.Linear(48, 32))
    x = torch.randn(3, 5, 64)

    def step() -> None:
        model(x).sum().backward()

    want = counted(step)
    assert want == 2 * 15 * (2 * 64 * 48 + 3 * 48 * 32)  # x needs no gradient
    for recipe in bs.recipe_names():
        bs.convert(model, recipe)
        assert counted(step) == want, recipe


def test_products_of_operands_and_groups() -> None:
    a = bs.quantize(torch.randn(20, 64), "nvfp4")
    b = bs.quantize(torch.randn(30, 64), "nvfp4")
    assert counted(lambda: bs.matmul(a, b)) == 2 * 20 * 30 * 64
    w = torch.randn(3, 30, 64, requires_grad=True)
    x, ends = torch.randn(20, 64), torch.tensor([5, 5, 20])
    into = torch.zeros(3, 30, 64)
    for given in (None, into):

        def step(given: torch.Tensor | None = given) -> None:
            y = bs.grouped_linear(x, w, ends, "mxfp8", accumulate_into=given)
            y.sum().backward()  # type: ignore[no-untyped-call]

        assert counted(step) == 2 * 2 * 20 * 30 * 64
