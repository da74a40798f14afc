"""Where random bits come from: seeds of operands, and the offset that a whole model shares.

The rules are in docs/rng.md. In short: bits are a function of (seed, offset, coordinates); the seed
names one operand of one layer, the offset one forward of one optimizer step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import weakref
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import _disable_current_modes

from blockscale import _core as _core  # loads the operators
from blockscale._errors import any_int, fail, fail_type
from blockscale.tensor import check_plain

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: its multiples are far apart
_ROLES: Final = {"x": 1, "w": 2, "dy": 3}
_FORWARD_BITS: Final = 16
# The number that autograd's next node of this thread will have.
_next_node: Final = torch._C._autograd._get_sequence_nr
# What PyTorch's Python calls in the end, as no mode and no compiler is to see it.
_begin_forward: Final = torch.ops.blockscale.begin_forward.default._op


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    if -(1 << 63) <= value < 1 << 63:  # in compiled code perhaps a symbol, which has no `&`
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
    """The key of an operation's random bits. Holds no state: the same Rng gives the same bits.

    Attributes:
        seed: which operand; an int (its low 64 bits count), or an int64 tensor of one element on
            the operand's device. A GPU reads it when the operation runs: nothing waits for it, and
            a captured graph sees it change. Compiled code that is called with one int after
            another takes those below 2^63 alone, as PyTorch's symbols do: pass it tensors.
        offset: which draw of that operand; likewise. Bit 63 is ignored.

    Raises:
        TypeError, ValueError: neither an int nor an int64 tensor of one element.
    """

    seed: int | torch.Tensor
    offset: int | torch.Tensor = 0

    def __post_init__(self) -> None:
        for name in ("seed", "offset"):
            given = getattr(self, name)
            made = _checked(name, given)
            if made is not given:  # NumPy's, whose sums would not wrap
                object.__setattr__(self, name, made)

    def role(self, name: str) -> Rng:
        """The Rng of one operand role of a linear layer: "x", "w" or "dy".

        seed + k · 0x9E3779B97F4A7C15 modulo 2^64, with k = 1, 2, 3.

        Raises:
            TypeError, ValueError: another role.
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


# What torch.load may make: a key is data.
torch.serialization.add_safe_globals([Rng])


def as_tensor(value: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A seed or an offset as an int64 tensor; one that is a tensor already stays where it is."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.full((), _signed(value), dtype=torch.int64, device=device)


def layer_seed(seed: int, name: str) -> int:
    """The seed of the layer with this qualified name, before roles are added.

    The first 8 bytes, little endian, of SHA-256("{seed}:{name}").
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


# A layer's seed and offset as the operators take them, which add the operands' roles.
Key = tuple[torch.Tensor, torch.Tensor]


def layer_key(
    operation: str, rng: Rng | None, stochastic: bool, device: torch.device
) -> Key | None:
    """What a layer with this Rng draws by; none where nothing is `stochastic`, since its tensors
    may cost launches on a GPU."""
    if rng is not None and not isinstance(rng, Rng):
        fail_type(operation, "rng", rng, "bs.Rng(seed, offset)")
    if rng is None or not stochastic:
        return None
    return rng.tensors(device)


# A forward that runs: a copy of its offset, and the number from which on autograd counts its nodes.
Running = tuple[torch.Tensor, int]


class Restore:
    """A hook of a tensor that puts the offset of a forward back."""

    __torch_unserializable__ = True  # no warning where such a tensor is saved

    def __init__(self, state: RngState, offset: torch.Tensor) -> None:
        self.state, self.offset = state, offset

    def __call__(self, _: torch.Tensor) -> None:
        # Through .data: what a compiled block saved of this offset is this very value again, so its
        # version must not move.
        self.state.offset.data.copy_(self.offset)


class RngState:
    """The offset shared by all layers of a converted model: step · 2^16 + forward.

    `offset` belongs to the forward that runs, or is being recomputed in a backward; after a step it
    is that of forward 0, for what may be called past the root's forward. `upcoming` is what the
    next forward gets. Both are device tensors and change in place only, so that captured graphs
    and compiled code see the changes, and nothing waits for the device.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draws = False  # whether any layer does: forwards count only then
        self.root: weakref.ref[object] | None = None  # what counts forwards here (nn.Root)
        self.stepped = False  # whether an optimizer counts its steps here
        self.regions = Regions()
        self.running: list[Running] = []  # forwards within each other, but for compiled ones
        self.sent: tuple[torch.Tensor, torch.Tensor] | None = None  # see __getstate__
        # The device is named: under `with torch.device("meta")` the default is no real memory. And
        # what is made in inference mode could not change in training.
        with torch.inference_mode(False):
            self.offset = torch.zeros((), dtype=torch.int64, device="cpu")
            self.upcoming = torch.zeros((), dtype=torch.int64, device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        # Of a copy, whose root says so if it is copied too. Another process would share the memory
        # of these tensors, and count here as well.
        with torch.inference_mode(False):
            offset, upcoming = self.offset.clone(), self.upcoming.clone()
        # A process that is being started gets their memory by numbers of open files, which are to
        # stay open until it has begun.
        self.sent = offset, upcoming
        own: dict[str, Any] = {"root": None, "stepped": False, "sent": None, "running": []}
        return {**self.__dict__, **own, "offset": offset, "upcoming": upcoming}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        # Which models pickled before they were there do not have.
        self.regions, self.running = Regions(), []
        self.__dict__.update(attributes)

    def has_root(self) -> bool:
        """Whether a module counts its forwards here; none does for a copy of a part of a model."""
        return self.root is not None and self.root() is not None

    def advance(self, skipped: torch.Tensor | None = None) -> None:
        """An optimizer step has ended: next step, forward 0. Unless `skipped` is not 0.

        Within a backward, where optimizers may step parameter by parameter, layers are still
        recomputed with the offset that their forward had.
        """
        following = ((self.upcoming >> _FORWARD_BITS) + 1) << _FORWARD_BITS
        if skipped is not None:
            following = torch.where(skipped.to(following.device) == 0, following, self.upcoming)
        self.upcoming.copy_(following)
        self.running.clear()  # what an interrupt has left
        if _is_outside_backward():
            self.offset.copy_(following >> _FORWARD_BITS << _FORWARD_BITS)

    def set_position(self, step: int, forward: int) -> None:
        """`forward` forwards have begun since the end of `step` steps."""
        begun_last = max(forward - 1, 0)
        self.running.clear()
        self.offset.fill_((step << _FORWARD_BITS) + begun_last)
        self.upcoming.fill_((step << _FORWARD_BITS) + forward)

    def position(self) -> tuple[int, int]:
        """(step, forwards begun in it); waits for the device."""
        value = int(self.upcoming.item())
        return value >> _FORWARD_BITS, value & ((1 << _FORWARD_BITS) - 1)

    def move(self, device: torch.device) -> None:
        if device.type != "meta" and self.offset.device != device:
            self.offset = self.offset.to(device)
            self.upcoming = self.upcoming.to(device)

    def before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook of the root: a forward begins; one that will be differentiated counts.

        An evaluation draws what the next one that counts will: a function of where the run stands,
        so that a resumed run evaluates alike.
        """
        if is_exporting():  # a program has no state that it could count in
            return None
        if not self.draws:
            return None
        if not _is_outside_backward():
            # Through .data, as below.
            self.regions.recall(self.offset.data)
            return None
        compiling = torch.compiler.is_compiling()
        if not compiling and _fake_mode() is not None:  # nothing is computed, and nothing counted
            return None
        if not compiling and torch._C._are_functorch_transforms_active():
            with torch._C._DisableFuncTorch():  # a count is no function's argument
                begun = self._begin()
        else:
            begun = self._begin()
        if begun is None:
            return None
        given = None
        if self.running and torch.is_grad_enabled():  # a root that calls itself
            # What it did before has older nodes than these views, and the forward within younger.
            given = pytree.tree_map(_viewed, (args, kwargs))
            self._restore_before(given, self.running[-1])
        self.running.append((begun, _next_node()))
        self.regions.note(self.offset)
        return given

    def _begin(self) -> torch.Tensor | None:
        """A copy of the offset, if this is not being compiled."""
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
        begun: torch.Tensor = _begin_forward(self.offset, self.upcoming, counts)
        # PyTorch counts no change that another library's operator makes.
        torch.autograd.graph.increment_version((self.offset, self.upcoming))
        return begun

    def after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the root, called after an exception too: make recomputation in its
        backward see this forward's offset.

        Activation checkpointing reruns layers in the backward pass, when later forwards may have
        begun. The gradient of a model's output is computed before any of the model's own nodes
        run, so a hook on it is where the offset is put back. (A region that has the root within
        runs it again before: `Regions`.) Compiled code needs no such help: it recomputes from what
        its own forward read.
        """
        if self.draws and not torch.compiler.is_compiling():
            self._end(output)

    @_disable_dynamo  # torch.compiler.disable, but for importing the compiler here: a second
    def _end(self, output: Any) -> None:
        if is_exporting() or not _is_outside_backward() or not self.running:
            return
        if _fake_mode() is not None:
            return
        ended = self.running.pop()
        if torch.is_grad_enabled():
            self._restore_before(output, ended)
        if self.running:
            with _disable_current_modes():
                self.offset.data.copy_(self.running[-1][0])

    def _restore_before(self, values: Any, forward: Running) -> None:
        """Put the offset of this forward back in a backward, before its nodes behind these tensors
        run. Not behind a tensor that was there before it, such as a parameter or an input that is
        returned as it is: those are other nodes, and it would keep a hook of every forward. Nor
        behind the result of a forward within this one, which has that one's hook."""
        offset, first_node = forward
        tensors = [values] if isinstance(values, torch.Tensor) else pytree.tree_leaves(values)
        restore = None
        for t in tensors:
            node = t.grad_fn if isinstance(t, torch.Tensor) else None
            if node is None or node._sequence_nr() < first_node or self._has_hook(t):
                continue
            if restore is None:
                restore = Restore(self, offset)
            t.register_hook(restore)

    def _has_hook(self, t: torch.Tensor) -> bool:
        hooks = t._backward_hooks
        if not hooks:
            return False
        return any(isinstance(hook, Restore) and hook.state is self for hook in hooks.values())


def _viewed(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, torch.Tensor) and value.grad_fn else value


class Regions:
    """The offsets of forwards that began within regions of activation checkpointing, such as one of
    a model and its loss: where a region is recomputed, its model's forward begins again, and is to
    draw what it drew."""

    def __init__(self) -> None:
        # By the frames that PyTorch keeps of regions; the tensors in the order of the forwards.
        self.offsets: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        # The backward that recomputed one last, and how many of its forwards have begun again.
        self.replayed: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return Regions, ()  # of a copy of the model, which has run nothing

    def note(self, offset: torch.Tensor) -> None:
        """A forward begins with this offset."""
        frame = checkpointed_region()
        if frame is not None:
            with _disable_current_modes():  # selective checkpointing counts the model's own
                self.offsets.setdefault(frame, []).append(offset.clone())

    def recall(self, offset: torch.Tensor) -> None:
        """A forward begins again, within a backward: put its offset back, if it is known."""
        frame = checkpointed_region()
        known = [] if frame is None else self.offsets.get(frame, [])
        if not known:
            return
        backward = torch._C._current_graph_task_id()
        last, count = self.replayed.get(frame, (backward, 0))
        place = count if last == backward else 0
        self.replayed[frame] = (backward, place + 1)
        if place < len(known):
            with _disable_current_modes():
                offset.copy_(known[place])


def checkpointed_region() -> Any:
    """The frame of the innermost region of torch.utils.checkpoint, not reentrant, that runs or is
    recomputed here, or None. PyTorch does not tell: it is read off the hooks that keep the region
    from saving, and not found behind other such hooks."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:  # as in most forwards: to look at nothing takes the host 2 us
        return None
    pack = inspect.unwrap(hooks[0])
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(pack, "__closure__", None) or (), strict=True))
    cell = cells.get("frame") or cells.get("target_frame_ref")
    frame = None if cell is None else cell.cell_contents
    frame = frame() if isinstance(frame, weakref.ref) else frame
    return frame if type(frame).__name__ == "_CheckpointFrame" else None


class Steps:
    """The hooks of an optimizer that count its steps in a state.

    Where a subclass's `step` calls its parent's, PyTorch runs the hooks of both, or of one,
    depending on which classes have had an instance: so that only the first end after a beginning
    counts.
    """

    def __init__(self, state: RngState, optimizer: torch.optim.Optimizer) -> None:
        self.state = state
        state.stepped = True
        self.begun = False
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(self.after_step)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.begun = True

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.begun:
            # A gradient scaler calls a fused optimizer in any case, and tells it what it has found.
            self.state.advance(getattr(optimizer, "found_inf", None))
        self.begun = False


def is_exporting() -> bool:
    """Whether torch.export traces. (torch.compiler.is_exporting() is true in all compiled code
    before PyTorch 2.13.)"""
    return torch.compiler._is_exporting_flag


def _fake_mode() -> Any:
    """The mode of fake tensors that is on, if any; none while a tracer records what it sees."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return None
    modes = torch._C._TorchDispatchModeKey
    traces = torch._C._get_dispatch_mode(modes.PROXY) is not None
    return None if traces else torch._C._get_dispatch_mode(modes.FAKE)


def fake_mode_of(weight: torch.Tensor) -> Any:
    """That of a fake weight, as of `functional_call` with fake parameters."""
    return (
        None
        if torch.compiler.is_compiling()
        else _fake_mode() and getattr(weight, "fake_mode", None)
    )


def _is_outside_backward() -> bool:
    """Not a recomputation: those run inside the autograd engine."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1
