"""How a model's forwards are counted: the state that its layers share, and the hooks of its root.

The rules are in docs/rng.md.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import _disable_current_modes

from blockscale import _core as _core  # loads the operators
from blockscale._errors import fail
from blockscale._tracing import (
    fake_mode,
    is_compiling_a_transform,
    is_exporting,
    is_fake,
    is_outside_backward,
)
from blockscale.regions import Regions
from blockscale.rng import Sent, moved, own_tensors, received

_FORWARD_BITS: Final = 16
# The sequence number of this thread's next autograd node.
_next_node: Final = torch._C._autograd._get_sequence_nr
# What PyTorch's Python calls in the end: no mode and no compiler must see it.
_begin_forward: Final = torch.ops.blockscale.begin_forward.default._op

# A running forward: a copy of its offset, and the sequence number of its first autograd node; None
# if it does not count, as its tensors have no data.
Running = tuple[torch.Tensor, int] | None
_CALL: Final = torch.nn.Module._call_impl.__code__


class RunningForwards(threading.local):
    """The forwards of a model that are running in a thread, nested ones last; compiled ones are not
    among them."""

    def __init__(self) -> None:
        self.stack: list[Running] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return RunningForwards, ()  # for a copy of the model, which is running nothing

    def forget_interrupted(self, root: torch.nn.Module) -> None:
        """Drop forwards that have ended without their hook, which PyTorch does not call after a
        KeyboardInterrupt; called as another one of `root` begins."""
        if self.stack:
            del self.stack[max(0, _calls_of(root) - 1) :]


def _calls_of(module: torch.nn.Module) -> int:
    """How many calls of the module are on this thread's stack."""
    frame, count = inspect.currentframe(), 0
    while frame is not None:
        count += frame.f_code is _CALL and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


class Restore:
    """A tensor hook that restores the offset of a forward."""

    __torch_unserializable__ = True  # no warning when such a tensor is saved

    def __init__(self, state: RngState, offset: torch.Tensor) -> None:
        self.state, self.offset = state, offset

    def __call__(self, _: torch.Tensor) -> None:
        # Through .data: what a compiled block has saved of this offset is this same value, so the
        # version must not change.
        self.state.offset.data.copy_(self.offset)


class RngState:
    """The offset shared by all layers of a converted model: step · 2^16 + forward.

    `offset` belongs to the forward that is running, or being recomputed in a backward; after a step
    it is that of forward 0, for layers called outside the root's forward. `upcoming` is what the
    next forward gets. Both are device tensors and change in place only, so captured graphs and
    compiled code see the changes, and nothing synchronizes with the device.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draws = False  # whether any layer draws bits: forwards count only then
        self.follows = False  # whether seeds were moved to their layers' weights: _follow_weights
        self.root: weakref.ref[Root] | None = None  # what counts forwards here
        # The hooks of the optimizer that counts its steps here (counting.Steps), which go with it.
        self.steps: weakref.ref[Any] | None = None
        self.regions = Regions()
        self.running = RunningForwards()
        # The device is explicit: under `with torch.device("meta")` the default has no real memory.
        with own_tensors():
            self.offset = torch.zeros((), dtype=torch.int64, device="cpu")
            self.upcoming = torch.zeros((), dtype=torch.int64, device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        # The state of a copy; its root registers itself if it is copied too.
        own: dict[str, Any] = {"root": None, "steps": None, "follows": False}
        return {
            **self.__dict__,
            **own,
            "offset": Sent(self.offset),
            "upcoming": Sent(self.upcoming),
        }

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self.offset, self.upcoming = received(self.offset), received(self.upcoming)

    def counted_by(self) -> Root | None:
        """The root that counts its forwards here; None for a copy of a part of a model."""
        return None if self.root is None else self.root()

    def advance(self, skipped: torch.Tensor | None = None) -> None:
        """An optimizer step has ended: next step, forward 0.

        If `skipped` is nonzero the count stays, and what draws without a forward of the model
        begins again with the step's first bits.

        Within a backward, where optimizers may step parameter by parameter, layers are still
        recomputed with the offset that their forward had.
        """
        if not torch.compiler.is_compiling() and fake_mode() is not None:  # as in before_forward
            return
        following = ((self.upcoming >> _FORWARD_BITS) + 1) << _FORWARD_BITS
        if skipped is not None:
            skips = skipped.to(following.device).reshape(()) != 0  # FSDP1's scaler has a [1]
            following = torch.where(skips, self.upcoming, following)
        self.upcoming.copy_(following)
        if is_outside_backward():
            self.offset.copy_(following >> _FORWARD_BITS << _FORWARD_BITS)

    def set_position(self, step: int, forward: int) -> None:
        """`forward` forwards have begun since the end of `step` steps."""
        begun_last = max(forward - 1, 0)
        with own_tensors():
            self.offset.fill_((step << _FORWARD_BITS) + begun_last)
            self.upcoming.fill_((step << _FORWARD_BITS) + forward)

    def position(self) -> tuple[int, int]:
        """(step, forwards begun in it); synchronizes with the device."""
        with own_tensors():
            value = int(self.upcoming.item())
        return value >> _FORWARD_BITS, value & ((1 << _FORWARD_BITS) - 1)

    def move(self, device: torch.device) -> None:
        if self.offset.device != device:
            self.offset, self.upcoming = moved(self.offset, device), moved(self.upcoming, device)

    def before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook of the root: a forward begins; one that will be differentiated counts.

        An evaluation draws what the next forward that counts will draw: it depends only on the
        position of the run, so a resumed run evaluates identically.
        """
        if is_exporting():  # an exported program has no state to count in
            return None
        if not self.draws:
            return None
        if not is_outside_backward():
            # Through .data, as below.
            self.regions.recall(self.offset.data)
            return None
        compiling = torch.compiler.is_compiling()
        if not compiling:
            if fake_mode() is not None:  # nothing is computed, so nothing is counted
                return None
            self.running.forget_interrupted(module)
            if _has_no_data(module, args, kwargs):
                self.running.stack.append(None)
                return None
            if not self.follows:
                self._follow_weights(module)
        if compiling and is_compiling_a_transform():  # which compiled code cannot step out of
            got = f"{type(module).__name__} within torch.func, compiled"
            remedy = "compile nothing that torch.func transforms"
            fail("forward", "model", got, "eager code, where its forwards can count", remedy)
        if not compiling and torch._C._are_functorch_transforms_active():
            with torch._C._DisableFuncTorch():  # a count is not an argument of the function
                begun = self._begin()
        else:
            begun = self._begin()
        if begun is None:
            return None
        given = None
        running = self.running.stack
        if running and running[-1] and torch.is_grad_enabled():  # the root calls itself
            # Nodes from before this point are older than these views; those of the inner forward
            # are younger.
            given = pytree.tree_map(_viewed, (args, kwargs))
            self._restore_before(given, running[-1])
        running.append((begun, _next_node()))
        self.regions.note(self.offset)
        return given

    def _follow_weights(self, root: torch.nn.Module) -> None:
        """Before the first forward: fully_shard, for one, has moved weights to the GPU unnoticed. A
        compiled layer cannot move its seed if checkpointing is compiled around it."""
        self.follows = True
        for module in root.modules():
            if hasattr(type(module), "_move_rng"):  # a Layer; wrappers pass on what they lack
                layer: Any = module
                layer._move_rng()

    def _begin(self) -> torch.Tensor | None:
        """Begin a forward; returns a copy of its offset, or None in compiled code."""
        counts = torch.is_grad_enabled()
        compiling = torch.compiler.is_compiling()
        if compiling or torch._C._len_torch_dispatch_stack() > 0:
            self.offset.copy_(self.upcoming)
            if counts:
                self.upcoming.add_(1)
            if compiling:
                return None
            with _disable_current_modes():
                return self.offset.clone()
        # The operator leaves the offset's version as it is: a compiled block that recomputes has
        # saved the offset, and finds it restored (`after_forward`) whatever forwards came between.
        begun: torch.Tensor = _begin_forward(self.offset, self.upcoming, counts)
        return begun

    def after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the root, called after an exception too: make recomputation in its
        backward see this forward's offset.

        Activation checkpointing reruns layers in the backward pass, when later forwards may have
        begun. The gradient of a model's output is computed before any of the model's own nodes run,
        so a hook on it restores the offset. (A region that contains the root reruns it earlier:
        `Regions`.) Compiled code needs no such help: it recomputes from what its own forward read.
        """
        if self.draws and not torch.compiler.is_compiling():
            self._end(output)

    @_disable_dynamo  # torch.compiler.disable without importing the compiler: a second
    def _end(self, output: Any) -> None:
        running = self.running.stack
        if is_exporting() or not is_outside_backward() or not running:
            return
        if fake_mode() is not None:
            return
        ended = running.pop()
        if ended and torch.is_grad_enabled():
            self._restore_before(output, ended)
        if running and running[-1]:
            with _disable_current_modes():
                self.offset.data.copy_(running[-1][0])

    def _restore_before(self, values: Any, forward: tuple[torch.Tensor, int]) -> None:
        """Register hooks on these tensors that restore this forward's offset in a backward, before
        the forward's nodes behind them run. Tensors that existed before the forward, such as a
        parameter or an input returned as it is, get none: the nodes behind them are not this
        forward's, and they would accumulate a hook per forward. Nor does the result of a nested
        forward, which has that forward's hook."""
        offset, first_node = forward
        leaves = [values] if isinstance(values, torch.Tensor) else pytree.tree_leaves(values)
        tensors: list[torch.Tensor] = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # A view that is changed in place, such as logits[:, -1], gets another node, behind which
        # are those of its base, but not the one with its hook.
        tensors += [t._base for t in tensors if t._base is not None]
        restore = None
        for t in tensors:
            node = t.grad_fn
            if node is None or node._sequence_nr() < first_node or self._has_hook(t):
                continue
            if restore is None:
                restore = Restore(self, offset)
            t.register_hook(restore)  # type: ignore[no-untyped-call]

    def _has_hook(self, t: torch.Tensor) -> bool:
        hooks = t._backward_hooks
        if not hooks:
            return False
        return any(isinstance(hook, Restore) and hook.state is self for hook in hooks.values())


def _viewed(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, torch.Tensor) and value.grad_fn else value


def _has_no_data(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether nothing is computed in a forward: its tensors are on the meta device, or fake."""
    if args and type(args[0]) is torch.Tensor and not args[0].is_meta:  # as in most forwards
        return False
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    tensors = given or list(itertools.islice(module.parameters(), 1))
    return bool(tensors) and all(t.is_meta or is_fake(t) for t in tensors)


class Root:
    """The hooks that count a model's forwards, and the state they count in."""

    def __init__(self, module: torch.nn.Module, state: RngState) -> None:
        self.state = state
        self.module: Callable[[], torch.nn.Module | None] = weakref.ref(module)
        self.handles = (
            module.register_forward_pre_hook(state.before_forward, with_kwargs=True),
            module.register_forward_hook(state.after_forward, always_call=True),
        )
        state.root = weakref.ref(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "module": self.module()}  # what is being copied

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)  # of a copy, whose state is a copy too
        module = attributes["module"]  # None if it was gone by then
        self.module = (lambda: None) if module is None else weakref.ref(module)
        self.state.root = weakref.ref(self)

    def counts_for(self, model: torch.nn.Module) -> bool:
        """Whether `model` is the module, contains it, or is a part of it."""
        module = self.module()
        inside = module is None or any(part is model for part in module.modules())
        return inside or any(part is module for part in model.modules())


def make_root(module: torch.nn.Module, state: RngState) -> None:
    """Let `module`, and no module inside it, count forwards in `state`."""
    for inner in module.modules():
        drop_root(inner)
    module.__dict__["_blockscale_root"] = Root(module, state)


def drop_root(module: torch.nn.Module) -> None:
    """Undo `make_root`."""
    root: Root | None = module.__dict__.pop("_blockscale_root", None)
    for handle in root.handles if root else ():
        handle.remove()


def root_state(module: torch.nn.Module) -> RngState | None:
    """The state in which `module` counts forwards, or None."""
    root: Root | None = module.__dict__.get("_blockscale_root")
    return root.state if root else None
