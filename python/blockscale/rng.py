"""Where random bits come from: seeds and offsets, as values and as tensors.

The rules are in docs/rng.md; forwards.py counts the offset of a whole model. In short: bits are a
function of (seed, offset, coordinates); the seed names one operand of one layer, the offset one
forward of one optimizer step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any, Final

import torch

from blockscale._errors import any_int, fail, fail_type
from blockscale._plain import check_plain
from blockscale._tracing import fake_mode_of

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: its multiples are far apart
_ROLES: Final = {"x": 1, "w": 2, "dy": 3}


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
