"""What runs the code now: a backward, a compiler, `torch.export`; and whether tensors are fake."""

from __future__ import annotations

from typing import Any

import torch


def is_exporting() -> bool:
    """Whether torch.export is tracing. (Before PyTorch 2.13, torch.compiler.is_exporting() is true
    in all compiled code.)"""
    return torch.compiler._is_exporting_flag


def fake_mode() -> Any:
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


def is_outside_backward() -> bool:
    """Whether this is no recomputation: those run inside the autograd engine."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1


def is_compiling_a_transform() -> bool:
    """Whether a transform of torch.func is active; only for code that is being compiled."""
    return torch._C._are_functorch_transforms_active()


# torch.compiler.assume_constant_result without importing the compiler: its graphs keep no call.
is_compiling_a_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]
