"""An input that several layers read, such as those of queries, keys and values, is quantized once.

Otherwise each layer would quantize it separately and keep its own operand for the backward: in FP8
a byte per element and layer, where PyTorch's layers share one tensor. So the first layer passes on
what it has made, and all save the same operand. The bits are the same either way. The same holds in
a backward that quantizes x again (`Recipe.keep_x`).
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any, Final

import torch

_quantize_input = torch.ops.blockscale.quantize_input.default

# The number of elements from which quantizing takes longer than calling another operator; x and W
# of a smaller layer share a launch.
LARGE: Final = 1 << 23


@dataclasses.dataclass(eq=False)
class _Made:
    """The operands of a tensor while it is alive, and what else they depend on."""

    state: tuple[Any, ...]
    offsets: torch.Tensor | None
    operands: list[torch.Tensor]

    def forget(self, _: object) -> None:
        self.offsets, self.operands = None, []


class _Last(threading.local):
    """What this thread made last. On a GPU, backwards and what they recompute run in threads of
    their own."""

    x: weakref.ref[torch.Tensor] | None = None
    made: _Made | None = None


_last = _Last()


def quantized_input(
    x: torch.Tensor, recipe: str, offsets: torch.Tensor | None
) -> list[torch.Tensor] | None:
    """x's operands for a forward that needs W's gradient: of [fprop, wgrad], those that the
    recipe's text quantizes. None if the layer is to quantize x itself.

    Which of the two is decided by x's size alone, not by what has been made before: a checkpointed
    forward must save the same tensors when it is recomputed.

    Operands are passed on from one call in a thread to the next, for the same tensor object, as
    long as PyTorch counts no change of it. If a kernel writes to a tensor that autograd has made,
    between two layers that read it, without telling PyTorch, that goes unnoticed (the gradients of
    such a program miss the change too).
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
    """x's operand for W's gradient, the only one that this text quantizes, if the forward has kept
    x itself. None if the layer is to quantize x itself.

    In compiled code it is always an operator, so that the compiler can choose what to keep.
    """
    if torch.compiler.is_compiling():
        made: list[torch.Tensor] | None = _quantize_input(x, recipe, True, offsets)
    else:
        made = quantized_input(x, recipe, offsets)
    return None if made is None else made[0]


def _for_compiler(
    x: torch.Tensor, recipe: str, offsets: torch.Tensor | None
) -> list[torch.Tensor] | None:
    """The compiler merges identical calls. An extent that it does not know must not get a guard:
    such an x counts as large."""
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
    """Whether x's operands may be passed on. Not if its type may have its memory elsewhere; if its
    changes may go uncounted, as those of a buffer that every step fills; out of or into a captured
    graph; or where a mode, such as selective checkpointing, expects the same operators when it
    reruns."""
    plain = type(x) is torch.Tensor
    if not plain or x.grad_fn is None or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if not x.is_cuda:
        return True
    with torch.cuda.device(x.device):
        return not torch.cuda.is_current_stream_capturing()
