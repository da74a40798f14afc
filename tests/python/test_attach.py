"""`attach`: which optimizers count a model's steps, and which steps count (docs/rng.md)."""

from __future__ import annotations

import copy
import gc
import warnings
from types import SimpleNamespace
from typing import Any

import blockscale as bs
import pytest
import torch
from torch import nn


def net(seed: int = 0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 33))
    bs.convert(model, "nvfp4", seed=seed)
    return model


def test_an_attached_optimizer_advances() -> None:
    model = net(seed=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    bs.attach(model, optimizer)
    bs.attach(model, optimizer)  # changes nothing
    for step in range(3):
        assert bs.rng_state(model) == {"step": step, "forward": 0, "seed": 4}
        model(torch.randn(20, 48)).sum().backward()
        optimizer.step()


def test_an_optimizer_around_another_is_attached() -> None:
    """As Accelerate's, which is no more of an Optimizer than this one."""

    class Prepared(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None:  # type: ignore[override]
            self.optimizer.step()

    model = net()
    optimizer = Prepared(torch.optim.SGD(model.parameters(), lr=1e-3))
    bs.attach(model, optimizer)
    bs.attach(model, optimizer.optimizer)  # changes nothing
    optimizer.step()
    assert bs.rng_state(model)["step"] == 1


def test_pytorchs_own_wrapper_is_attached() -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    class NoAverager(PeriodicModelAverager):
        def __init__(self) -> None:
            pass

        def average_parameters(self, params: object) -> None:
            pass

    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = PostLocalSGDOptimizer(inner, NoAverager())
    bs.attach(model, optimizer)
    optimizer.step()  # type: ignore[no-untyped-call]
    assert bs.rng_state(model)["step"] == 1


def test_a_second_optimizer_takes_the_place_of_the_first() -> None:
    """With both attached, every update would count twice."""
    model = net()
    first, second = (
        kind([layer.weight for layer in model if isinstance(layer, nn.Linear)], lr=1e-3)
        for kind in (torch.optim.SGD, torch.optim.AdamW)
    )
    bs.attach(model, first)
    first.step()
    said = r"^attach: optimizer = AdamW, after another one \(SGD\); need one optimizer for a model"
    with pytest.warns(UserWarning, match=said) as told:
        bs.attach(model, second)
    assert told[0].filename == __file__  # the line that attaches
    for step in (2, 3):
        first.step()
        second.step()
        assert bs.rng_state(model)["step"] == step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bs.attach(model, second)  # changes nothing
        bs.attach(copy.deepcopy(model), first)  # nor has a copy an optimizer
        bs.attach(net(), second)  # one may count for several models
        del second
        gc.collect()
        bs.attach(model, first)  # the second one is gone
    first.step()
    assert bs.rng_state(model)["step"] == 4


class Passes(torch.optim.AdamW):
    """A subclass whose step is its parent's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_optimizer_with_hooks_of_others_is_attached() -> None:
    model = net()
    seen: list[str] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
    bs.attach(model, optimizer)
    optimizer.step()
    assert bs.rng_state(model)["step"] == 1
    assert seen == ["stepped"]


def test_a_step_of_a_subclass_counts_once() -> None:
    """PyTorch gives hooks to `step` of each class that has had an instance."""
    for _ in range(2):
        model = net()
        optimizer = Passes(model.parameters())
        bs.attach(model, optimizer)
        for step in (1, 2):
            optimizer.step()
            assert bs.rng_state(model)["step"] == step
        torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # now the parent's has hooks too


def test_a_step_that_raised_does_not_stop_the_count() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    bs.attach(model, optimizer)

    def closure() -> float:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        optimizer.step(closure)
    optimizer.step()
    assert bs.rng_state(model)["step"] == 1


class Lookahead(torch.optim.Optimizer):
    """As these are often written: without a call of Optimizer.__init__."""

    def __init__(self, base: torch.optim.Optimizer, name: str) -> None:
        setattr(self, name, base)
        self.param_groups = base.param_groups
        self.step_of_base = base.step

    def step(self, closure: Any = None) -> Any:
        return self.step_of_base(closure)


def test_wrappers_of_optimizers() -> None:
    # The last as schedule_free's ScheduleFreeWrapper has it.
    for name in ("base_optimizer", "_base_optimizer", "_optimizer", "base"):
        model = net()
        optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=1e-3), name)
        bs.attach(model, optimizer)
        optimizer.step()
        assert bs.rng_state(model)["step"] == 1
    # Around each other.
    model = net()
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    bs.attach(model, Lookahead(Lookahead(base, "optimizer"), "optimizer"))
    base.step()
    assert bs.rng_state(model)["step"] == 1
    # Or without being optimizers themselves.
    model = net()
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    bs.attach(model, SimpleNamespace(optimizer=base))  # type: ignore[arg-type]
    base.step()
    assert bs.rng_state(model)["step"] == 1
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=1e-3), "elsewhere")
    said = r"^attach: optimizer = Lookahead, whose step calls no hooks; need .*; call bs.advance"
    with pytest.raises(ValueError, match=said):
        bs.attach(model, optimizer)
    # Attributes of those names may be something else.
    for other in (torch.ones(2), optimizer):
        optimizer.base = other  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=said):
            bs.attach(model, optimizer)


def test_optimizers_whose_steps_call_no_hooks() -> None:
    """Each lacks one half of what it takes: the hooks, or a `step` that calls them."""

    class NeverBegun(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters)}]

    class StepsOnItsOwn(torch.optim.SGD):
        pass

    model = net()
    torch.optim.SGD(model.parameters(), lr=1e-3)  # whose `step`, now hooked, the first inherits
    begun = StepsOnItsOwn(model.parameters(), lr=1e-3)
    StepsOnItsOwn.step = lambda self, closure=None: None  # type: ignore[method-assign]
    for optimizer in (NeverBegun(model.parameters()), begun):
        said = f"^attach: optimizer = {type(optimizer).__name__}, whose step calls no hooks; need"
        with pytest.raises(ValueError, match=said):
            bs.attach(model, optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_gradient_scaler_skips_does_not_count(fused: bool) -> None:
    """A fused optimizer is called even for a skipped step; it reads `found_inf` on the device."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    bs.attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    steps = []
    for factor in (1.0, torch.inf, 1.0):
        scaler.scale(model(torch.randn(20, 48)).mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        state = bs.rng_state(model)
        steps.append((state["step"], state["forward"]))
        assert optimizer.state[next(model.parameters())]["step"] == state["step"]
    assert steps == [(1, 0), (1, 1), (2, 0)]


def test_a_scaler_of_fsdp1_counts_as_any() -> None:
    """ShardedGradScaler's `found_inf` has one dimension, which fused SGD takes."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    bs.attach(model, optimizer)
    optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]
    for found_inf, step in ((1.0, 0), (0.0, 1)):
        optimizer.found_inf = torch.full((1,), found_inf)  # type: ignore[attr-defined]
        model(torch.randn(20, 48)).sum().backward()
        optimizer.step()
        assert bs.rng_state(model)["step"] == step
