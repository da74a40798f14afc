"""Where random bits come from: the operands' seeds, and the offset that a whole model shares.

The rules are in docs/rng.md. In short: bits are a function of (seed, offset, coordinates); the seed
names one operand of one layer, the offset one forward of one optimizer step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import _disable_current_modes

from blockscale import _core as _core  # loads the operators
from blockscale._errors import any_int, fail, fail_type
from blockscale.regions import Regions
from blockscale.tensor import check_plain

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: its multiples are far apart
_ROLES: Final = {"x": 1, "w": 2, "dy": 3}
_FORWARD_BITS: Final = 16
# The sequence number of this thread's next autograd node.
_next_node: Final = torch._C._autograd._get_sequence_nr
# What PyTorch's Python calls in the end: no mode and no compiler must see it.
_begin_forward: Final = torch.ops.blockscale.begin_forward.default._op


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    if -(1 << 63) <= value < 1 << 63:  # may be a symbol in compiled code, which has no `&`
        return value
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _checked(name: str, value: int | torch.Tensor) -> int | torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.dtype != torch.int64 or value.numel() != 1:
            got = f"{value.dtype}{list(value.shape)}"
            fail("rng", name, got, "an int64 tensor of one element, or an int")
        return check_plain("rng", name, value)
    return any_int("rng", name, value, "an int, or an int64 tensor of one element")


@dataclasses.dataclass(frozen=True, eq=False)
class Rng:
    """The key of an operation's random bits. Holds no state: the same Rng gives the same bits. Two
    are equal if their ints are, and their tensors are the same objects.

    Attributes:
        seed: which operand; an int (its low 64 bits count), or an int64 tensor of one element on
            the operand's device. A GPU reads the tensor when the operation runs, without
            synchronizing, and a captured graph sees it change. Compiled code called with varying
            ints accepts only those below 2^63, as PyTorch's symbols do: pass it tensors.
        offset: which draw of that operand; likewise. Bit 63 is ignored.

    Raises:
        TypeError, ValueError: neither an int nor an int64 tensor of one element.
    """

    seed: int | torch.Tensor
    offset: int | torch.Tensor = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rng) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[object, ...]:
        # A tensor's value may change, and reading it would synchronize.
        parts = (self.seed, self.offset)
        return tuple(("at", id(p)) if isinstance(p, torch.Tensor) else p for p in parts)

    def __post_init__(self) -> None:
        for name in ("seed", "offset"):
            given = getattr(self, name)
            made = _checked(name, given)
            if made is not given:  # a NumPy integer, whose sums would not wrap
                object.__setattr__(self, name, made)

    def role(self, name: str) -> Rng:
        """The Rng of one operand role of a linear layer: "x", "w" or "dy".

        seed + k · 0x9E3779B97F4A7C15 modulo 2^64, with k = 1, 2, 3.

        Raises:
            TypeError, ValueError: any other role.
        """
        if not isinstance(name, str):
            fail_type("rng", "role", name, "'x', 'w' or 'dy'")
        if name not in _ROLES:
            fail("rng", "role", repr(name), f"one of {', '.join(_ROLES)}")
        step = _signed(_ROLES[name] * _GOLDEN)
        if isinstance(self.seed, torch.Tensor):
            return Rng(self.seed + step, self.offset)  # int64 wraps
        return Rng(_signed(self.seed + step), self.offset)

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Seed and offset as the operators take them."""
        return as_tensor(self.seed, device), as_tensor(self.offset, device)


# What torch.load may construct: a key is data.
torch.serialization.add_safe_globals([Rng])


def as_tensor(value: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A seed or an offset as an int64 tensor; a tensor is returned as it is, on its own device."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.full((), _signed(value), dtype=torch.int64, device=device)


def layer_seed(seed: int, name: str) -> int:
    """The seed of the layer with this qualified name, before roles are added.

    The first 8 bytes, little endian, of SHA-256("{seed}:{name}").
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


# A layer's seed and offset, as passed to the operators, which add the operands' roles.
Key = tuple[torch.Tensor, torch.Tensor]


def tensors_beside(rng: Rng, x: torch.Tensor) -> Key:
    """`rng.tensors` for an operation on x: fake if x is, also outside its fake mode."""
    mode = fake_mode_of(x)
    if mode is None:
        return rng.tensors(x.device)
    with mode:
        return rng.tensors(x.device)


def layer_key(operation: str, rng: Rng | None, stochastic: bool, x: torch.Tensor) -> Key | None:
    """The key that a layer with this Rng draws with; None unless `stochastic`, since its tensors
    may cost launches on a GPU."""
    if rng is not None and not isinstance(rng, Rng):
        fail_type(operation, "rng", rng, "bs.Rng(seed, offset)")
    if rng is None or not stochastic:
        return None
    return tensors_beside(rng, x)


@contextlib.contextmanager
def own_tensors() -> Iterator[None]:
    """Makes real tensors that training can change, also in inference mode and where a mode makes
    fake ones: the keys of a model's bits outlive what it is converted, copied or loaded within."""
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        yield


def moved(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """One of `own_tensors` on another device. (It may move in compiled code, which knows no such
    context.)"""
    if torch.compiler.is_compiling():
        return t.to(device)
    with own_tensors():
        return t.to(device)


class Sent:
    """One of `own_tensors` in the state of a copy. `copy.deepcopy` would copy the tensor by what a
    fake mode forbids; `received` clones it. A pickle holds its numbers: as a tensor it would follow
    `map_location` to the meta device, and share memory with another process."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Sent:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        with own_tensors():
            return _of_numbers, (self.tensor.tolist(),)


def _of_numbers(numbers: int | list[int]) -> torch.Tensor:
    with own_tensors():
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def received(value: Sent | torch.Tensor) -> torch.Tensor:
    """A tensor of a copy's own."""
    with own_tensors():
        return (value.tensor if isinstance(value, Sent) else value).clone()


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
        self.root: weakref.ref[object] | None = None  # what counts forwards here (nn.Root)
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
        self.running = RunningForwards()
        self.offset, self.upcoming = received(self.offset), received(self.upcoming)

    def has_root(self) -> bool:
        """Whether a module counts its forwards here; false for a copy of a part of a model."""
        return self.root is not None and self.root() is not None

    def advance(self, skipped: torch.Tensor | None = None) -> None:
        """An optimizer step has ended: next step, forward 0.

        If `skipped` is nonzero the count stays, and what draws without a forward of the model
        begins again with the step's first bits.

        Within a backward, where optimizers may step parameter by parameter, layers are still
        recomputed with the offset that their forward had.
        """
        if not torch.compiler.is_compiling() and _fake_mode() is not None:  # as in before_forward
            return
        following = ((self.upcoming >> _FORWARD_BITS) + 1) << _FORWARD_BITS
        if skipped is not None:
            skips = skipped.to(following.device).reshape(()) != 0  # FSDP1's scaler has a [1]
            following = torch.where(skips, self.upcoming, following)
        self.upcoming.copy_(following)
        if _is_outside_backward():
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
        if device.type != "meta" and self.offset.device != device:
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
        if not _is_outside_backward():
            # Through .data, as below.
            self.regions.recall(self.offset.data)
            return None
        compiling = torch.compiler.is_compiling()
        if not compiling:
            if _fake_mode() is not None:  # nothing is computed, so nothing is counted
                return None
            self.running.forget_interrupted(module)
            if _has_no_data(module, args, kwargs):
                self.running.stack.append(None)
                return None
            if not self.follows:
                self._follow_weights(module)
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
        if is_exporting() or not _is_outside_backward() or not running:
            return
        if _fake_mode() is not None:
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


def is_exporting() -> bool:
    """Whether torch.export is tracing. (Before PyTorch 2.13, torch.compiler.is_exporting() is true
    in all compiled code.)"""
    return torch.compiler._is_exporting_flag


def _fake_mode() -> Any:
    """The active fake tensor mode, if any; None while a tracer records."""
    if torch._C._len_torch_dispatch_stack() == 0 or _is_recording():
        return None
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def is_fake(t: torch.Tensor) -> bool:
    """Whether it has no data: not in compiled code, which sees to its fake tensors."""
    return not torch.compiler.is_compiling() and hasattr(t, "fake_mode")


def fake_mode_of(t: torch.Tensor) -> Any:
    """A fake tensor's mode, which need not be active, as in `functional_call` with fake parameters;
    None in compiled code and while a tracer records, which see to theirs."""
    return t.fake_mode if is_fake(t) and not _is_recording() else None  # type: ignore[attr-defined]


def _is_recording() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _is_outside_backward() -> bool:
    """Whether this is no recomputation: those run inside the autograd engine."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1
