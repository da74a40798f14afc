"""Experts of other libraries: which are converted, left alone, refused or warned about."""

from __future__ import annotations

import copy
import functools
import re
import warnings

import blockscale as bs
import pytest
import torch
from bits import assert_same
from expert_models import ENDS, GROUPS, WIDTH, Block, ManyExperts, gradients, model, rows
from torch import nn
from torch.utils.checkpoint import checkpoint


def test_the_report_and_the_names() -> None:
    torch.manual_seed(0)
    made = Block()
    plain = copy.deepcopy(made)
    hint = "ManyExperts is not nn.Linear; experts= converts what it multiplies"
    assert dict(bs.convert(plain, "mxfp8").skipped)["experts"] == hint
    report = bs.convert(made, "nvfp4", rules={"experts": "mxfp8"}, experts=["experts"])
    assert {name: str(r) for name, r in report.converted} == {"gate": "nvfp4", "experts": "mxfp8"}
    assert str(report).startswith("2 layers converted, 0 modules not")
    assert list(made.state_dict()) == list(plain.state_dict())
    assert isinstance(made.experts, ManyExperts)
    assert bs.convert(made, "mxfp4").converted  # and they stay converted
    assert str(made.experts.recipe) == "mxfp4"
    assert bs.revert(made) == ["gate", "experts"]
    assert type(made.experts) is ManyExperts
    assert vars(made.experts).keys() == vars(ManyExperts()).keys()


def test_skipping_them_makes_them_plain_again() -> None:
    made = model()
    bs.convert(made, "nvfp4", skip=["experts"])
    assert type(made.experts) is ManyExperts


class Falls(ManyExperts):
    """Multiplies as Transformers does where PyTorch's own product does not compile."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        product = torch.ops.transformers.grouped_mm_fallback
        h = product(x, self.up.transpose(1, 2), offs=ends).relu()
        y: torch.Tensor = product(h, self.down.transpose(1, 2), offs=ends)
        return y


def test_the_product_of_transformers_is_known() -> None:
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        schema = "(Tensor input, Tensor weight, Tensor offs) -> Tensor"
        torch.library.define("transformers::grouped_mm_fallback", schema)
    torch._dynamo.reset()
    plain = model("mxfp8").experts
    falls = Falls()
    bs.convert(nn.ModuleDict({"experts": falls}), "mxfp8", experts=["experts"])
    falls.load_state_dict(plain.state_dict())
    want = gradients(plain, lambda: plain(rows(), ENDS))
    for call in (falls, torch.compile(falls, fullgraph=True, backend="aot_eager")):
        assert_same(gradients(falls, functools.partial(call, rows(), ENDS)), want)


class Loops(ManyExperts):
    """Multiplies one by one."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return x @ self.up[0].t() @ self.down[0].t()


@pytest.mark.parametrize("compiled", [False, True])
def test_what_does_not_multiply_by_grouped_mm_is_told_in_training(compiled: bool) -> None:
    made = Loops()
    holder = nn.ModuleDict({"experts": made})
    bs.convert(holder, "mxfp8", experts=["experts"])
    torch._dynamo.reset()
    call = torch.compile(made, fullgraph=True, backend="aot_eager") if compiled else made
    said = (
        "Loops: experts = a forward without grouped_mm; need grouped_mm where experts have rows; "
        "choose the implementation that does .*, or name it in skip="
    )
    with pytest.warns(UserWarning, match=said):
        call(rows(), ENDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            assert call(rows(), ENDS).shape == (20, WIDTH)
        made.requires_grad_(False)  # frozen, so that nothing is to be learned
        assert call(rows(), ENDS).shape == (20, WIDTH)
        made.requires_grad_(True)
        bs.convert(holder, "bf16")  # which quantizes nothing
        call(rows(), ENDS).float().sum().backward()


def why(module: nn.Module, recipe: str = "mxfp8") -> dict[str, str]:
    """Why modules in a model with these experts are left alone."""
    whole = nn.ModuleDict({"gate": nn.Linear(4, 4), "experts": module})
    return dict(bs.convert(whole, recipe, experts=["experts"]).skipped)


def refused(module: nn.Module, why: str) -> None:
    """Experts that are named and cannot be converted."""
    whole = nn.ModuleDict({"gate": nn.Linear(4, 4), "experts": module})
    need = "experts = 'experts', which finds experts; need at least one layer that can be converted"
    with pytest.raises(ValueError, match=re.escape(f"{need}; experts: {why}")):
        bs.convert(whole, "mxfp8", experts=["experts"])
    assert type(whole["gate"]) is nn.Linear


class Outer(ManyExperts):
    """Experts around experts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ManyExperts()


class Passive(nn.Module):
    """Read by others."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 4, 4))


class Choosy(ManyExperts):
    def __init_subclass__(cls, *, key: int) -> None:
        super().__init_subclass__()


def test_what_is_left_alone_and_why() -> None:
    named = ManyExperts()
    named.plain = nn.Identity()
    refused(named, "ManyExperts has attributes of ours: plain")
    named = ManyExperts()
    named.register_buffer("_seed", torch.zeros(2))
    refused(named, "ManyExperts has attributes of ours: _seed")
    outer = Outer()
    assert why(outer) == {
        "experts": "Outer has experts inside, which multiply by themselves",
    }
    assert isinstance(outer.inner, bs.nn.Layer)
    refused(Passive(), "Passive has no forward")
    refused(Choosy(), "Choosy cannot be subclassed: ")
    made = ManyExperts()
    nn.utils.parametrize.register_parametrization(made, "up", nn.Identity())
    refused(made, "ParametrizedManyExperts is parametrized: convert it first, then parametrize it")
    mixed = ManyExperts()
    mixed.add_module("conv", nn.Conv1d(2, 2, 3))
    assert why(mixed) == {"experts.conv": "Conv1d is not nn.Linear"}
    held = nn.ParameterDict({"up": torch.randn(2, 4, 4)})
    with pytest.raises(ValueError, match="experts = 'experts'; need a module that holds matrices"):
        why(held)


def test_what_they_leave_behind() -> None:
    made = model("mxfp8")
    with bs.quantized_weights(made):
        made(rows())
        bs.revert(made)
    made(rows())
    assert vars(made.experts).keys() == vars(ManyExperts()).keys()
    assert bs.convert(made, "mxfp8", experts=["experts"]).skipped == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_is_refused(reentrant: bool) -> None:
    class Inside(ManyExperts):
        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(super().forward, x, ends, use_reentrant=reentrant)
            return y

    made = Inside()
    bs.convert(nn.ModuleDict({"experts": made}), "mxfp8", experts=["experts"])
    said = (
        "from outside, or put" if reentrant else "outside of one; checkpoint the whole module from"
    )
    with pytest.raises(ValueError, match=said):
        made(rows().requires_grad_(), ENDS)
    bs.convert(nn.ModuleDict({"experts": made}), "bf16")  # what nothing is taken from
    made(rows().requires_grad_(), ENDS).float().sum().backward()


def test_the_overload_of_grouped_mm_is_known() -> None:
    class Overload(ManyExperts):
        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            multiply = torch.ops.aten._grouped_mm.default
            hidden: torch.Tensor = multiply(x, self.weights()[0].transpose(-2, -1), ends)
            return hidden

    plain, made = Overload(), Overload()
    made.load_state_dict(plain.state_dict())
    bs.convert(nn.ModuleDict({"experts": made}), "mxfp8", experts=["experts"])
    want = bs.grouped_linear(rows(), plain.weights()[0], ENDS, "mxfp8")
    assert torch.equal(made(rows(), ENDS), want)


def test_saved_tensors_on_the_cpu_are_no_checkpoint() -> None:
    class Offloads(ManyExperts):
        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu():
                y: torch.Tensor = super().forward(x, ends)
            return y

    made = Offloads()
    bs.convert(nn.ModuleDict({"experts": made}), "mxfp8", experts=["experts"])
    y = checkpoint(made, rows().requires_grad_(), ENDS, use_reentrant=False)
    y.float().sum().backward()


def test_no_rows_are_no_mistake() -> None:
    class Returns(ManyExperts):
        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return super().forward(x, ends) if len(x) else x

    made = Returns()
    bs.convert(nn.ModuleDict({"experts": made}), "mxfp8", experts=["experts"])
    assert made(torch.empty(0, WIDTH), torch.zeros(GROUPS, dtype=torch.int32)).shape == (0, WIDTH)


def test_bad_names() -> None:
    with pytest.raises(ValueError, match="experts = 'expert'; need the name of a module; did you"):
        bs.convert(Block(), "nvfp4", experts=["expert"])
    with pytest.raises(ValueError, match="experts = 'gate'; need a module that holds matrices"):
        bs.convert(Block(), "nvfp4", experts=["gate"])
    with pytest.raises(TypeError, match=r"experts = a str; need a list of names; write experts=\["):
        bs.convert(Block(), "nvfp4", experts="experts")
