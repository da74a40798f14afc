"""Processes that meet: what tests of torch.distributed run in."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import CONTEXT
from torch.multiprocessing.spawn import start_processes


def devices(ranks: int) -> list[Any]:
    """The CPU and, if there are enough, one GPU per rank: NCCL lets no two ranks share one."""
    lacking = torch.cuda.device_count() < ranks
    skip = pytest.mark.skipif(lacking, reason=f"needs {ranks} CUDA devices")
    return ["cpu", pytest.param("cuda", marks=skip)]


DEVICES = devices(2)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums as on a rank, whose results are compared with those of this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run(
    rank: int,
    function: Callable[..., None],
    device: str,
    meeting: str,
    ranks: int,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    function(*args)
    # Leave only when all are done, and then at once: as the group was destroyed, or the interpreter
    # ended, threads of Gloo's aborted the process in one run of eight.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def on_ranks(
    function: Callable[..., None], folder: Path, *args: Any, device: str = "cpu", ranks: int = 2
) -> None:
    """Call a function of a module with these arguments in so many processes, one thread each; fails
    where it raises."""
    call = (function, device, str(folder / "meeting"), ranks, args)
    method = CONTEXT.get_start_method()
    start_processes(_run, args=call, nprocs=ranks, start_method=method)  # type: ignore[no-untyped-call]
