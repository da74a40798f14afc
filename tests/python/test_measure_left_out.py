"""`measure` names the layers whose forward has not run: the model may read their weight past it."""

from __future__ import annotations

from typing import Any

import blockscale as bs
import pytest
import torch
from bits import normal
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

REASON = "its forward has not run: not used, or its weight is read directly"


class Attention(nn.Module):
    """Reads the weight of `qkv` as Swin does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(functional.linear(x, self.qkv.weight, self.qkv.bias))
        return y


class Parts(nn.Module):
    """Two parts that are called one by one, or both by its forward."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False) if self.recompute else self.first(x)
        y: torch.Tensor = self.second(x)
        return y


def converted(model: nn.Module, **options: Any) -> Any:
    bs.convert(model, "mxfp8", **options)
    return model


@pytest.mark.parametrize("how", ["eager", "compiled", "compiled in place", "recomputed"])
def test_layers_that_are_read_past_their_forward_are_named(how: str) -> None:
    made, x = converted(Parts(how == "recomputed")), normal(8, 64)
    called: Any = torch.compile(made, backend="aot_eager") if how == "compiled" else made
    if how == "compiled in place":
        made.compile(backend="aot_eager")
    with bs.measure(called) as found:
        for _ in range(2):
            called(x).sum().backward()
    assert found.left_out == {"first.qkv": REASON, "second.qkv": REASON}
    assert {product.layer for product in found.products} == {"first.out", "second.out"}
    assert str(found).endswith(f"\nleft out: first.qkv, second.qkv: {REASON}")


def test_layers_outside_what_has_run_are_not_named() -> None:
    made, x = converted(Parts()), normal(8, 64)
    with bs.measure(made) as found:
        pass
    assert found.left_out == {}
    with bs.measure(made) as found:
        made.second(x)
    assert found.left_out == {"second.qkv": REASON}
    with bs.measure(made) as found:
        made.first.out(x)
    assert found.left_out == {}
    # What runs in one of several forwards has run.
    with bs.measure(made) as found:
        made(x)
        made.first.qkv(x)
    assert found.left_out == {"second.qkv": REASON}


def test_a_forward_that_ends_early_names_none() -> None:
    made, x = converted(Parts()), normal(8, 64)

    def stop(*_: Any) -> None:
        raise InterruptedError

    handle = made.second.register_forward_pre_hook(stop)
    with bs.measure(made) as found, pytest.raises(InterruptedError):
        made(x)
    assert found.left_out == {"first.qkv": REASON}
    handle.remove()
    # Nor does a recomputation, which ends once the backward has what it needs.
    inner = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    y = checkpoint(converted(inner), x, use_reentrant=False)
    with bs.measure(inner) as found:
        y.sum().backward()
    assert found.left_out == {}


def test_layers_in_high_precision_are_not_named() -> None:
    made = converted(Parts(), skip=["first"], rules={r"second\.qkv": "bf16"})
    with bs.measure(made) as found:
        made(normal(8, 64))
    assert found.left_out == {}


def test_layers_that_are_called_past_the_hooks_have_run() -> None:
    class Direct(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.out(self.qkv.forward(x))
            return y

    with bs.measure(made := converted(nn.Sequential(Direct()))) as found:
        made(normal(8, 64))
    assert found.left_out == {}
    assert {product.layer for product in found.products} == {"0#0", "0.out"}


def test_layers_that_share_a_weight_have_run_if_one_has() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.first.forward(x)
            return y

    with bs.measure(made := converted(Tied())) as found:
        made(normal(8, 64))
    assert found.left_out == {}
    assert len(found.products) == 1


def test_experts_that_are_not_used_are_named() -> None:
    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(normal(2, 64, 64).bfloat16())

        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return functional.grouped_mm(x, self.up, offs=ends)

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(64, 2), Theirs()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.router(x)
            return y

    made = converted(Routed(), experts=["experts"])
    with bs.measure(made) as found:
        made(normal(8, 64))
    assert found.left_out == {"experts": REASON}


def test_a_table_of_many_layers_has_a_line_for_each_reason() -> None:
    blocks = nn.Sequential(*(Attention() for _ in range(20)))
    with bs.measure(converted(blocks)) as found, torch.no_grad():
        blocks(normal(8, 64))
    assert len(found.left_out) == 20
    last = str(found).split("\n")[-2:]
    names = ", ".join(f"{i}.qkv" for i in range(6))
    assert last[0].startswith("19.out ")
    assert last[1] == f"left out: {names} and 14 more: {REASON}"
