"""The offsets of forwards in regions of activation checkpointing, which run again as a whole."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


class Regions:
    """The offsets of forwards that began within regions of activation checkpointing, such as a
    region of a model and its loss: when it is recomputed, the model's forward begins again and must
    draw the same bits."""

    def __init__(self) -> None:
        # Keyed by the frames that PyTorch keeps for regions; tensors in the order of the forwards.
        self.offsets: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        # The last backward that recomputed the region, and how many of its forwards have begun
        # again.
        self.replayed: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return Regions, ()  # for a copy of the model, which has run nothing

    def note(self, offset: torch.Tensor) -> None:
        """A forward begins with this offset."""
        frame = checkpointed_region()
        if frame is not None:
            with _disable_current_modes():  # hides the clone from selective checkpointing
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
    """The frame of the innermost non-reentrant torch.utils.checkpoint region that is running or
    being recomputed here, or None. PyTorch has no call for it: it is read from the hooks that keep
    the region from saving tensors, and is not found if other such hooks are innermost."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:  # as in most forwards: looking further takes 2 us on the host
        return None
    pack = inspect.unwrap(hooks[0])
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(pack, "__closure__", None) or (), strict=True))
    cell = cells.get("frame") or cells.get("target_frame_ref")
    frame = None if cell is None else cell.cell_contents
    frame = frame() if isinstance(frame, weakref.ref) else frame
    return frame if type(frame).__name__ == "_CheckpointFrame" else None
