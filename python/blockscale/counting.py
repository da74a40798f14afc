"""The position of a converted model's random bits: counting its optimizer's steps, and resuming."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from blockscale._errors import any_int, check_int, fail, fail_type, message
from blockscale.forwards import RngState
from blockscale.nn import Layer, check_model


def states_of(model: torch.nn.Module) -> list[RngState]:
    """The states that the converted layers of `model` draw from, each once."""
    layers = (module for module in model.modules() if isinstance(module, Layer))
    return list({id(layer._rng_state): layer._rng_state for layer in layers}.values())


def _state(operation: str, model: torch.nn.Module) -> RngState:
    """The one state of all converted layers of `model`."""
    check_model(operation, model)
    states = states_of(model)
    if len(states) != 1:
        got = f"{type(model).__name__} with {len(states)} separately counted parts"
        need = "a model that counts as one"
        remedy = "call bs.convert(model, recipe, rules=...), which sets the recipe of every layer"
        if not states:
            got = f"{type(model).__name__}, which is not converted"
            need, remedy = "a converted model", "call bs.convert(model, recipe) first"
        fail(operation, "model", got, need, remedy)
    return states[0]


def _counting_state(operation: str, model: torch.nn.Module) -> RngState:
    """The state of a model whose forwards are counted, or of a part of one."""
    state = _state(operation, model)
    root = state.counted_by()
    if root is None:
        got = f"{type(model).__name__}, a copy or a rest of a part of a converted model"
        need = "a model whose forward counts"
        fail(operation, "model", got, need, "call bs.convert(model, recipe): the count goes on")
    if not root.counts_for(model):
        whole = type(root.module()).__name__
        got = f"{type(model).__name__} with layers of a converted {whole}, which counts for them"
        remedy = "bs.revert this one, then convert it: its layers count here"
        fail(operation, "model", got, f"that {whole}, what contains it, or a part of it", remedy)
    return state


def attach(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Count `optimizer`'s steps as the model's: each step advances the offset of its random bits.

    If there are several optimizers, attach one: a second one takes the place of the first, with a
    warning unless that is gone. Attaching the same one again changes nothing. Steps that a gradient
    scaler skips do not count.

    Args:
        model: a converted model, or one in DistributedDataParallel.
        optimizer: the optimizer whose `step` is called once per update, or any object with it as
            its attribute `optimizer`, `optim`, `base_optimizer` or `base`, with or without a
            leading `_`. Of optimizers that step within the backward, pass that of the parameter
            whose gradient comes last.

    Raises:
        TypeError, ValueError: not an optimizer, or one whose steps call no hooks; the model is not
            converted, is a copy of a part of a converted one, or another one made of its layers:
            `convert` it, so that its forwards are counted.
    """
    state = _counting_state("attach", model)
    remedy = "call bs.advance(model) after each step instead"
    # A wrapper of an optimizer, such as Accelerate's, may have no hooks and need not be an
    # optimizer itself; its steps are those of the wrapped one.
    while inner := _wrapped(optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        fail_type("attach", "optimizer", optimizer, "a torch.optim.Optimizer", remedy)
    # A class that does not call Optimizer.__init__ has none, or its step calls none.
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", None)
    if hooks is None or not getattr(type(optimizer).step, "hooked", False):
        got = f"{type(optimizer).__name__}, whose step calls no hooks"
        fail("attach", "optimizer", got, "one that has called Optimizer.__init__", remedy)
    counters = (getattr(hook, "__self__", None) for hook in hooks.values())
    if any(isinstance(c, Steps) and c.state is state for c in counters):
        return
    before: Steps | None = None if state.steps is None else state.steps()
    # The last one counts, not the first, which is perhaps only waiting to be collected.
    made = Steps(state, optimizer)
    if before is not None:
        before.remove()
        got = f"{made.kind}, after another one ({before.kind})"
        remedy = "only the steps of the last one count from now on: attach it alone"
        text = message("attach", "optimizer", got, "one optimizer for a model", remedy)
        warnings.warn(text, stacklevel=2)


class Steps:
    """The hooks of an optimizer that count its steps in a state.

    If a subclass's `step` calls its parent's, PyTorch runs the hooks of both or of one, depending
    on which classes have had an instance. So only the first end after a beginning counts.
    """

    def __init__(self, state: RngState, optimizer: torch.optim.Optimizer) -> None:
        self.state = state
        state.steps = weakref.ref(self)
        self.kind = type(optimizer).__name__
        self.begun = False
        self.handles = (
            optimizer.register_step_pre_hook(self.before_step),
            optimizer.register_step_post_hook(self.after_step),
        )

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.begun = True

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.begun:
            # A gradient scaler always calls a fused optimizer, and passes it `found_inf`.
            self.state.advance(getattr(optimizer, "found_inf", None))
        self.begun = False


def _wrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    for name in ("optimizer", "optim", "base_optimizer", "base"):
        for key in (name, f"_{name}"):
            inner = getattr(optimizer, key, None)
            if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
                return inner
    return None


def advance(model: torch.nn.Module) -> None:
    """An optimizer step has ended: the next forward is forward 0 of the next step.

    For loops whose optimizer cannot be attached; call it once after each step.

    Args:
        model: a converted model.

    Raises:
        TypeError, ValueError: not a model, or not converted, or a copy of a part of a converted
            one, or another one made of its layers.
    """
    _counting_state("advance", model).advance()


def rng_state(model: torch.nn.Module) -> dict[str, int]:
    """The position of a model's random bits. Synchronizes with the device.

    Args:
        model: a converted model.

    Returns:
        {"step": optimizer steps ended, "forward": forwards with gradients begun since then (0 if
        the recipe draws no bits; beyond 65535, every 65536 count as a step), "seed": that of
        `convert`}.

    Raises:
        TypeError, ValueError: not a model, or not converted, or converted in parts that count for
            themselves.
    """
    state = _state("rng_state", model)
    step, forward = state.position()
    return {"step": step, "forward": forward, "seed": state.seed}


def set_step(model: torch.nn.Module, step: int, forward: int = 0, seed: int | None = None) -> None:
    """Continue as if `step` optimizer steps had ended, and `forward` forwards had begun since.

    `set_step(model, **state)` with the `rng_state` of another run continues it, and checks that the
    model has its seed.

    Args:
        model: a converted model.
        step: `rng_state(model)["step"]` of the run to continue, 0 or more, below 2^47.
        forward: and its ["forward"], below 2^16; 0 if a step has just ended.
        seed: and its ["seed"], which the model must have; None for any.

    Raises:
        TypeError, ValueError: not ints, out of range, the model has another seed, or is not
            converted, or was converted in parts that count for themselves.
    """
    state = _state("set_step", model)
    numbers = []
    for name, value, bits in (("step", step, 47), ("forward", forward, 16)):
        number = check_int("set_step", name, value)
        if not 0 <= number < 1 << bits:
            fail("set_step", name, number, f"0 or more, below 2^{bits}")
        numbers.append(number)
    if seed is not None and any_int("set_step", "seed", seed) != state.seed:
        remedy = f"call bs.convert(model, recipe, seed={seed}) first"
        fail("set_step", "seed", seed, f"{state.seed}, the model's", remedy)
    state.set_position(*numbers)
