"""Programs of torch.export: their gradients, and that nothing of a model is left in them."""

from __future__ import annotations

import io
from typing import Any

import blockscale as bs
import pytest
import torch
from bits import normal
from torch import nn


class Residual(nn.Module):
    """A residual model: a gradient that is lost on one path still arrives by the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(70, 40), nn.Linear(40, 70, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return y


class Experts(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.w, self.recipe = nn.Parameter(normal(3, 40, 70)), recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([2, 2, 19])
        return bs.grouped_linear(x, self.w, offsets, self.recipe, bs.Rng(1, 2))


def gradients(model: Any, x: torch.Tensor) -> list[torch.Tensor | None]:
    x = x.clone().requires_grad_()
    loss = model(x).square().sum()
    return list(torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True))


def converted(recipe: str) -> Residual:
    model = Residual()
    bs.convert(model, recipe)
    return model


RECIPES = ["mxfp8", "nvfp4", "fp8_blockwise"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_have_the_models_gradients(recipe: str, strict: bool) -> None:
    """Also once they were in a file. (What is drawn is that of the first step.)"""
    model, x = converted(recipe), normal(19, 70)
    program = torch.export.export(model, (x.clone().requires_grad_(),), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    want = gradients(model, x)
    for run in (program.module(), torch.export.load(file).module()):
        for got, expected in zip(gradients(run, x), want, strict=True):
            assert got is not None
            assert expected is not None
            assert torch.equal(got, expected)


def test_experts_too() -> None:
    model, x = Experts("nvfp4"), normal(19, 70)
    program = torch.export.export(model, (x.clone().requires_grad_(),)).module()
    for got, want in zip(gradients(program, x), gradients(model, x), strict=True):
        assert got is not None
        assert want is not None
        assert torch.equal(got, want)


def test_a_gradient_that_the_program_has_not_kept_is_refused() -> None:
    x = normal(19, 70)
    with torch.no_grad():
        layer = torch.export.export(bs.nn.Linear(70, 40, recipe="mxfp8"), (x,)).module()
    loss = layer(x).square().sum()
    with pytest.raises(ValueError, match=r"^linear: w = a tensor that requires a gradient; need "):
        loss.backward()
    plain_x = torch.export.export(converted("mxfp8"), (x,)).module()
    with pytest.raises(ValueError, match=r"^linear: x = .*; export it in grad mode, with x that"):
        gradients(plain_x, x)


@pytest.mark.parametrize("name", ["linear", "grouped_linear"])
def test_second_derivatives_are_refused(name: str) -> None:
    model = converted("nvfp4") if name == "linear" else Experts("nvfp4")
    x = normal(19, 70).requires_grad_()
    program = torch.export.export(model, (x,)).module()
    with pytest.raises(ValueError, match=f"^{name}: create_graph = True; need False: second"):
        torch.autograd.grad(program(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_exported_programs_are_lowered(recipe: str, grad: bool) -> None:
    """No state of random bits is changed in them: lowering refuses that."""
    model, x = converted(recipe).eval(), normal(19, 70)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(model, (x,))
    lowered = program.run_decompositions()
    assert torch.equal(lowered.module()(x), model(x))
    # The eager call alone counts.
    assert bs.rng_state(model)["forward"] == int(bs.recipe(recipe).stochastic)


def test_accumulating_is_refused() -> None:
    class Accumulating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(normal(40, 70))
            self.sum: torch.Tensor = torch.nn.Buffer(torch.zeros(40, 70))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return bs.linear(x, self.w, recipe="mxfp8", accumulate_into=self.sum)

    with pytest.raises(Exception, match="linear: accumulate_into = given; need none in a program"):
        torch.export.export(Accumulating(), (normal(3, 70),))
