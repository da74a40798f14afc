"""Models that are converted, run or copied while their tensors have no data."""

from __future__ import annotations

import copy

import blockscale as bs
import pytest
import torch
from bits import equal
from test_forwards import gradients
from torch import nn
from torch._subclasses import FakeTensorMode

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
