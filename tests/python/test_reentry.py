"""Roots that give back what they were given, and roots that call themselves: each layer recomputes
with the bits of its own forward."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import blockscale as bs
import pytest
import torch
from bits import equal
from test_forwards import gradients
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

RECIPE = bs.recipe("nvfp4").replace(fprop_x="nvfp4[rounding=stochastic]")


class Again(nn.Module):
    """Its blocks are recomputed, or not."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = again
        self.first, self.second = (nn.Sequential(nn.Linear(48, 48), nn.GELU()) for _ in range(2))

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return y


class HiddenStates(Again):
    """The first of them is the input."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        states = [x]
        for block in (self.first, self.second):
            states.append(self.run(block, states[-1]))
        return states


class Memory(Again):
    """Encodes, and then decodes beside what was encoded."""

    def forward(self, x: torch.Tensor, memory: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        if memory is None:
            return x, self.run(self.first, x)
        return self.run(self.second, x + memory), memory


class Twins(Again):
    """Calls itself, between layers of its own."""

    def forward(self, a: torch.Tensor, b: Any = None) -> Any:
        if b is None:
            return self.run(self.second, a)
        a = torch.tanh(self.run(self.first, a))
        beside = self.run(self.second, a)  # reads what the calls read
        u, v = self(a), self(a=b + a)
        return self.run(self.first, u - v + beside + a), v


class Region(Again):
    """Its only node is that of the region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.again:
            return self.first(x)  # type: ignore[no-any-return]
        y: torch.Tensor = checkpoint(self.first, x, use_reentrant=True)
        return y


class Around(Again):
    """Its result is that of another model, which counts for itself."""

    def __init__(self, again: bool) -> None:
        super().__init__(again)
        self.others = [nn.Sequential(nn.Linear(48, 48))]
        bs.convert(self.others[0], RECIPE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.others[0](self.run(self.first, x))
        return y


def of_result(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(x)
    return y


def of_states(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(model(x)[-1])[-1]
    return y


def of_memory(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(*model(x))[0]
    return y


def of_twins(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y, v = model(x, 2 * x)
    return y + v  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        (HiddenStates, of_states),
        (Memory, of_memory),
        (Twins, of_twins),
        (Region, of_result),
        (Around, of_result),
    ],
)
def test_recomputed_layers_draw_what_they_drew(
    kind: type[Again], use: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> None:
    def trained(again: bool) -> list[torch.Tensor]:
        model = kind(again)
        bs.convert(model, RECIPE)
        x = torch.randn(20, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
        losses = [use(model, x).square().mean() for _ in range(2)]
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
        return [*gradients(model), x.grad]  # type: ignore[list-item]

    assert equal(trained(True), trained(False))
    with FlopCounterMode(display=False):
        assert equal(trained(True), trained(False))


class Scores(Again):
    """Its result is a view of what it has computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.second, self.run(self.first, x))[:, ::2]


class Heads(Again):
    """So are its results, two of one tensor; it may pass them through as other views."""

    def forward(self, x: torch.Tensor, through: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        if not through:
            x = self.run(self.second, self.run(self.first, x))
        return x[:, 3:], x.view(-1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [Scores, Heads])
def test_a_result_that_is_changed_in_place(kind: type[Again], compiled: bool) -> None:
    """PyTorch gives a view another node then, and the hooks stay with the one it had."""

    def trained(again: bool) -> list[torch.Tensor]:
        model = kind(again)
        bs.convert(model, RECIPE)
        if compiled:
            for block in (model.first, model.second):
                block.compile(backend="eager")
        x = torch.randn(20, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
        losses = []
        for i in range(3):
            y = model(x * i)
            if kind is Heads:
                base = y[1]._base  # of this forward: the next one passes it through
                y = model(base, True)[i % 2]
            y -= 1
            losses.append(y.square().mean())
            with torch.no_grad():
                model(x)
        for loss in losses:
            loss.backward()
        return [*gradients(model), x.grad]  # type: ignore[list-item]

    assert equal(trained(True), trained(False))


def test_a_root_that_calls_itself_goes_on_with_its_own_bits() -> None:
    """A layer behind the call draws as one before it, also where the call failed."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(48, 48)

        def forward(self, x: torch.Tensor, depth: int = 0, fails: bool = False) -> list[Any]:
            if fails:
                raise RuntimeError("within")
            before = self.layer(x)
            within = []
            if depth > 0:
                within = self(x, depth - 1)
                with pytest.raises(RuntimeError, match="within"):
                    self(x, fails=True)
            return [before, *within, self.layer(x)]

    model = Halves()
    bs.convert(model, RECIPE)
    x = torch.randn(20, 48)
    a, b, again, last = model(x, 1)
    assert torch.equal(a, last)
    assert torch.equal(b, again)
    assert not torch.equal(a, b)
    assert bs.rng_state(model)["forward"] == 3
    with pytest.raises(RuntimeError, match="within"):
        model(x, fails=True)
    alone = model(x)
    assert torch.equal(alone[0], alone[1])
    assert bs.rng_state(model)["forward"] == 5
    deep = model(x, 2)
    assert equal(deep, deep[::-1])


@pytest.mark.parametrize("pack", ["builtin", "no closure", "another frame"])
def test_a_forward_within_hooks_of_others(pack: str) -> None:
    """Which keep what is saved as a region of checkpointing does, and may look like one."""
    frame = [0]
    hooks: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "builtin": torch.clone,
        "no closure": lambda t: t,
        "another frame": lambda t: t if frame else torch.zeros_like(t),
    }
    model = Memory(False)
    bs.convert(model, RECIPE)
    with torch.autograd.graph.saved_tensors_hooks(hooks[pack], lambda t: t):
        y = model(torch.randn(2, 48))[1]
    y.sum().backward()
    assert bs.rng_state(model)["forward"] == 1


def test_what_is_passed_through_collects_no_hooks() -> None:
    memory = nn.Linear(48, 48)(torch.randn(2, 48))
    model = Memory(False)
    bs.convert(model, RECIPE)
    for _ in range(3):
        model(torch.randn(2, 48), memory)[0].sum().backward(retain_graph=True)
    assert not memory._backward_hooks


def test_a_result_is_saved_without_a_word() -> None:
    model = Memory(False)
    bs.convert(model, RECIPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(model(torch.randn(2, 48, requires_grad=True)), io.BytesIO())
