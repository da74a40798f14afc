"""Models that are converted, run or copied while their tensors have no data."""

from __future__ import annotations

import copy
from typing import Any

import blockscale as bs
import pytest
import torch
from bits import equal
from test_forwards import gradients
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

RECIPE = "nvfp4[fprop_x=nvfp4[rounding=stochastic]]"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 16))


def step(model: nn.Module) -> list[torch.Tensor]:
    x = torch.randn(20, 48, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    return gradients(model)


@pytest.mark.parametrize("copied", [False, True])
def test_what_is_converted_with_fake_tensors_gets_data(copied: bool) -> None:
    with FakeTensorMode():
        model: nn.Module = net()
        bs.convert(model, RECIPE, seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bs.attach(model, optimizer)
        y = model(torch.randn(20, 48))
        y.sum().backward()
        optimizer.step()
        bs.advance(model)
        assert y.shape == (20, 16)
        assert all(p.grad is not None for p in model.parameters())
        # Nothing was computed, so nothing has counted.
        assert bs.rng_state(model) == {"step": 0, "forward": 0, "seed": 3}
        bs.set_step(model, 2)
        if copied:
            model = copy.deepcopy(model)
    model.load_state_dict(net().state_dict(), assign=True)
    model.zero_grad()
    want = net()
    bs.convert(want, RECIPE, seed=3)
    bs.set_step(want, 2)
    assert equal(step(model), step(want))
    assert bs.rng_state(model) == {"step": 2, "forward": 1, "seed": 3}
    bs.convert(model, "mxfp8")
    bs.convert(model, RECIPE)
    assert equal(step(model), step(want))


def test_experts_that_are_converted_with_fake_tensors() -> None:
    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.ones(2, 48, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ends = torch.tensor([12, 20], dtype=torch.int32)
            return torch.nn.functional.grouped_mm(x, self.up, offs=ends)

    def converted() -> nn.Module:
        model = nn.ModuleDict({"experts": Theirs()})
        bs.convert(model, RECIPE, experts=["experts"])
        return model["experts"]

    with FakeTensorMode():
        model = converted()
        model(torch.randn(20, 48)).sum().backward()
    model.load_state_dict(Theirs().state_dict(), assign=True)
    model.zero_grad()
    assert equal(step(model), step(converted()))


class Recursive(nn.Module):
    """Calls itself on the meta device, and with fake tensors, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = net(), nn.Linear(16, 48)
        self.calls = True

    def forward(self, x: torch.Tensor | None = None, *, of: Any = None) -> torch.Tensor:
        if x is None:
            x = torch.ones(2, 48, device=self.last.weight.device) if of is None else of["x"]
        y = checkpoint(self.first, x, use_reentrant=False)
        if self.calls and type(x) is torch.Tensor and not x.is_meta:
            parameters = {name: p.to("meta") for name, p in self.named_parameters()}
            torch.func.functional_call(self, parameters, (x.to("meta"),))
            with FakeTensorMode(allow_non_fake_inputs=True):
                self(torch.ones(2, 48))
        result: torch.Tensor = self.last(y)
        return result


def test_a_forward_on_the_meta_device_does_not_count() -> None:
    with torch.device("meta"):
        model = Recursive()
    bs.convert(model, RECIPE)
    x = torch.empty(2, 48, device="meta", requires_grad=True)
    for y in (model(x), model(of={"x": x}), model()):
        y.sum().backward()
        assert y.is_meta
    assert bs.rng_state(model)["forward"] == 0
    model.to_empty(device="cpu")
    model(torch.ones(2, 48))
    assert bs.rng_state(model)["forward"] == 1
    model()
    assert bs.rng_state(model)["forward"] == 2


def test_a_forward_of_fake_tensors_outside_their_mode_does_not_count() -> None:
    mode = FakeTensorMode()
    with mode:
        model = net()
        x = torch.ones(2, 48)
    bs.convert(model, RECIPE)
    model(x).sum().backward()
    assert bs.rng_state(model)["forward"] == 0


def test_a_forward_without_data_within_another_one() -> None:
    """Layers draw as if it were not there, also those that are recomputed."""

    def trained(calls: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Recursive()
        model.calls = calls
        bs.convert(model, RECIPE)
        xs = [torch.randn(20, 48, generator=torch.Generator().manual_seed(i)) for i in range(2)]
        sums = [model(x).square().sum() for x in xs]
        for loss in sums:
            loss.backward()
        assert bs.rng_state(model)["forward"] == 2
        return gradients(model)

    assert equal(trained(True), trained(False))


def test_a_forward_within_one_without_data() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
            if x.is_meta:
                x = self(x=torch.ones(2, 48) * 1, like=x)
            return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]

    model = Twice(nn.Linear(48, 48))
    bs.convert(model, RECIPE)
    model(torch.empty(2, 48, device="meta")).sum().backward()
    assert bs.rng_state(model)["forward"] == 1  # though not all of its tensors have data
