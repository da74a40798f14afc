"""Programs of torch.export: their gradients, and that nothing of a model is left in them; and what
torch.jit.script and torch.fx say and do."""

from __future__ import annotations

import copy
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


def test_scripts_are_made_of_a_plain_copy() -> None:
    model, x = converted("nvfp4"), normal(19, 70)
    said = r"^torch\.jit\.script: module = a Linear in nvfp4; need .*; script a copy .* bs.revert"
    with pytest.raises(ValueError, match=said):
        torch.jit.script(model)
    with pytest.raises(ValueError, match=r"^torch\.jit\.script: module = a GroupedLinear in mxfp8"):
        torch.jit.script(bs.nn.GroupedLinear(2, 4, 4, recipe="mxfp8"))
    plain = copy.deepcopy(model)
    bs.revert(plain)
    assert torch.equal(torch.jit.script(plain)(x), plain(x))


def test_classes_that_prepare_themselves_for_scripts_are_converted() -> None:
    class Theirs(nn.Linear):
        def __prepare_scriptable__(self) -> nn.Module:
            return self

    model = nn.Sequential(Theirs(70, 40))
    assert bs.convert(model, "mxfp8").skipped == []
    with pytest.raises(ValueError, match=r"^torch\.jit\.script: module = a QuantizedTheirs in m"):
        torch.jit.script(model)


class Leaves(torch.fx.Tracer):
    """What the guide says of graphs."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, bs.nn.Linear) or super().is_leaf_module(module, name)


def test_graphs_have_layers_as_leaves() -> None:
    model, x = converted("mxfp8"), normal(19, 70)
    said = (
        r"linear: x = a Proxy; need a tensor; .* is_leaf_module accepts bs\.nn\.Linear; in torchv"
    )
    of_functions: list[Any] = [
        lambda x: bs.linear(x, x, recipe="mxfp8"),
        lambda x: bs.grouped_linear(x, x, x, "mxfp8"),
    ]
    for traced in (model, *of_functions):
        with pytest.raises(TypeError, match=said):
            torch.fx.symbolic_trace(traced)
    with pytest.raises(TypeError, match=r"^GroupedLinear: offsets = a Proxy; .* is_leaf_module"):
        torch.fx.symbolic_trace(bs.nn.GroupedLinear(2, 4, 4, recipe="mxfp8"))
    graph = torch.fx.GraphModule(model, Leaves().trace(model))
    for got, want in zip(gradients(graph, x), gradients(model, x), strict=True):
        assert got is not None
        assert want is not None
        assert torch.equal(got, want)


def test_graphs_count_if_they_are_converted_themselves() -> None:
    model, x = converted("nvfp4"), normal(19, 70)
    graph = torch.fx.GraphModule(model, Leaves().trace(model))
    assert torch.equal(graph(x), model(x))
    assert bs.rng_state(model)["forward"] == 1  # the model's own
    graph = torch.fx.symbolic_trace(Residual())
    assert len(bs.convert(graph, "nvfp4").converted) == 2
    assert torch.equal(graph(x), model(x))
    assert bs.rng_state(graph)["forward"] == 1
