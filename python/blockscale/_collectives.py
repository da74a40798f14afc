"""What ranks find together."""

from __future__ import annotations

import torch
import torch.distributed as dist


def largest_of_ranks(amax: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Elementwise maximum of `amax` over the ranks; NaN where any rank has NaN. May overwrite
    `amax`."""
    bits = amax.view(torch.int32)  # orders the same way, with NaN largest
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0:
        dist.all_reduce(bits, dist.ReduceOp.MAX, group)
        return amax
    # A compiler can trace this one, and selective checkpointing can save and restore it. It takes
    # several times as long on the host.
    from torch.distributed._functional_collectives import all_reduce, wait_tensor

    found: torch.Tensor = wait_tensor(all_reduce(bits, "max", group))  # type: ignore[no-untyped-call]
    return found.view(torch.float32)
