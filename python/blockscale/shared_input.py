"""An input that several layers read, as those of queries, keys and values do, is quantized once.

Each layer would quantize it for itself, and keep an operand of it for its backward: in FP8 a byte
an element and layer, where PyTorch's layers keep one tensor between them. So the first one hands on
what it has made, and all save the same operand. The bits are the same either way. So it is in a
backward that quantizes x once more (`Recipe.keep_x`).
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any, Final

import torch

_quantize_input = torch.ops.blockscale.quantize_input.default

# Elements from which on quantizing takes longer than one more operator takes to call; x and W of a
# smaller layer share a launch.
LARGE: Final = 1 << 23


@dataclasses.dataclass(eq=False)
class _Made:
    """The operands of a tensor while that lives, and what they depend on besides."""

    state: tuple[Any, ...]
    offsets: torch.Tensor | None
    operands: list[torch.Tensor]

    def forget(self, _: object) -> None:
        self.offsets, self.operands = None, []


class _Last(threading.local):
    """What this thread has made last. Backwards, and what they recompute, have threads of their
    own on a GPU."""

    x: weakref.ref[torch.Tensor] | None = None
    made: _Made | None = None


_last = _Last()


def quantized_input(
    x: torch.Tensor, recipe: str, offsets: torch.Tensor | None
) -> list[torch.Tensor] | None:
    """x's operands for a forward that W's gradient will be asked of: [fprop, wgrad], of those that
    the recipe's text quantizes. None where the layer is to quantize x itself.

    Which of the two it is follows from x's size alone, and not from what has been made before: a
    checkpoint's forward has to save the same tensors when it runs again.

    Operands are handed on from one call of a thread to the next, of one tensor object, as long as
    PyTorch counts no change of it. A kernel that writes to what autograd has made, between two
    layers that read it, and tells PyTorch nothing, would go unseen (the gradients of such a program
    do not know of the change either).
    """
    if torch.compiler.is_compiling():
        return _for_compiler(x, recipe, offsets)
    if x.numel() < LARGE:
        return None
    if not _may_be_handed_on(x):
        alone: list[torch.Tensor] = _quantize_input(x, recipe, True, offsets)
        return alone
    state, made = _state(x, recipe, offsets), _last.made
    served = made is not None and _last.x is not None and _last.x() is x
    if made is None or not served or made.state != state or made.offsets is not offsets:
        made = _Made(state, offsets, _quantize_input(x, recipe, True, offsets))
        _last.x, _last.made = weakref.ref(x, made.forget), made
    return [*made.operands]


def quantized_in_backward(
    x: torch.Tensor, recipe: str, offsets: torch.Tensor | None
) -> torch.Tensor | None:
    """x's operand of W's gradient, the only one that this text quantizes, where the forward has
    kept x itself. None where the layer is to quantize x itself.

    Compiled code has it as an operator in any case, so that the compiler can choose what to keep.
    """
    if torch.compiler.is_compiling():
        made: list[torch.Tensor] | None = _quantize_input(x, recipe, True, offsets)
    else:
        made = quantized_input(x, recipe, offsets)
    return None if made is None else made[0]


def _for_compiler(
    x: torch.Tensor, recipe: str, offsets: torch.Tensor | None
) -> list[torch.Tensor] | None:
    """The compiler keeps one of several calls that are alike. An extent that it does not know is
    not to be bound by a guard: such an x counts as large."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if statically_known_true(x.numel() < LARGE):
        return None
    made: list[torch.Tensor] = _quantize_input(x, recipe, True, offsets)
    return made


def _state(x: torch.Tensor, recipe: str, offsets: torch.Tensor | None) -> tuple[Any, ...]:
    """What operands of x depend on besides the offsets."""
    stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
    ends = 0 if offsets is None else offsets._version
    place = (x._version, x.data_ptr(), x.shape, x.stride(), x.dtype)
    return (recipe, stream, ends, place)


def _may_be_handed_on(x: torch.Tensor) -> bool:
    """Not of a type that may have its memory elsewhere; not where its changes may go uncounted, as
    those of a buffer that every step fills; not out of a graph that is captured, or into one; and
    not where a mode, such as selective checkpointing, expects the same operators when it runs
    again."""
    plain = type(x) is torch.Tensor
    if not plain or x.grad_fn is None or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if not x.is_cuda:
        return True
    with torch.cuda.device(x.device):
        return not torch.cuda.is_current_stream_capturing()
