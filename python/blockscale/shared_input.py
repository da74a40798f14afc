"""An input that several layers read, as those of queries, keys and values do, is quantized once.

Each layer would quantize it for itself, and keep an operand of it for its backward: in FP8 a byte
an element and layer, where PyTorch's layers keep one tensor between them. So the first one hands on
what it has made, and all save the same operand. The bits are the same either way.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Final

import torch

from blockscale.recipe import Recipe

_quantize_input = torch.ops.blockscale.quantize_input.default

# Elements from which on quantizing takes longer than one more operator takes to call; x and W of a
# smaller layer share a launch.
LARGE: Final = 1 << 23


@dataclasses.dataclass(eq=False)
class _Made:
    """What has been made of a tensor, while that lives."""

    recipe: str
    version: int
    offsets: torch.Tensor | None
    offsets_version: int
    stream: torch.Stream | None
    operands: list[torch.Tensor]

    def forget(self, _: object) -> None:
        self.operands = []


class _Last(threading.local):
    """The last one of this thread. Backwards, and what they recompute, have their own threads."""

    x: weakref.ref[torch.Tensor] | None = None
    made: _Made | None = None


_last = _Last()


def quantized_input(
    x: torch.Tensor, recipe: Recipe, offsets: torch.Tensor | None
) -> list[torch.Tensor] | None:
    """x's operands for a forward that W's gradient will be asked of: [fprop, wgrad], of those that
    the recipe quantizes. None where the layer is to quantize x itself.

    Which of the two it is does not depend on what has been made before: a checkpoint's forward has
    to save the same tensors when it runs again.
    """
    if not recipe.quantizes_x or x.numel() < LARGE:
        return None
    if torch.compiler.is_compiling():  # which keeps one of several calls that are alike
        alone: list[torch.Tensor] = _quantize_input(x, recipe.text, True, offsets)
        return alone
    # PyTorch itself relies on counting the changes of what autograd has made; a buffer that is
    # filled for every step may be changed by somebody who does not count. And what a captured graph
    # reads has to be made in it.
    if x.grad_fn is None or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
    made = _last.made
    if (
        made is None
        or _last.x is None
        or _last.x() is not x
        or not _serves(made, x, recipe, offsets, stream)
    ):
        version = 0 if offsets is None else offsets._version
        operands = _quantize_input(x, recipe.text, True, offsets)
        made = _Made(recipe.text, x._version, offsets, version, stream, operands)
        _last.x, _last.made = weakref.ref(x, made.forget), made
    return [*made.operands]


def _serves(
    made: _Made,
    x: torch.Tensor,
    recipe: Recipe,
    offsets: torch.Tensor | None,
    stream: torch.Stream | None,
) -> bool:
    """Whether it would be made alike: of x, offsets and a stream as they are now."""
    same_groups = made.offsets is offsets and (
        offsets is None or made.offsets_version == offsets._version
    )
    same_x = made.version == x._version and made.recipe == recipe.text
    return same_x and same_groups and made.stream == stream
