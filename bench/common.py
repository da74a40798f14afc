"""What the benchmarks of products and layers on a GPU share: options, a clock, and their JSON."""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from blockscale.cli import bench
from blockscale.cli.bench_clock import CudaClock, captured

SPIN = 1_000_000  # cycles, half a millisecond: long beside a launch, short for a change of clocks


def options(description: str) -> argparse.Namespace:
    """Where the results go, and of which commit they are."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="what was built, where git cannot say")
    return parser.parse_args()


def seconds(call: Callable[[], Any], runs: int, calls: int) -> float:
    """Median time of a call among `calls` of them in a replayed graph."""
    return seconds_and_clock(call, runs, calls)[0]


def seconds_and_clock(call: Callable[[], Any], runs: int, calls: int) -> tuple[float, float]:
    """The same, and the multiprocessors' clock in Hz right behind them: by how long a kernel takes
    that counts SPIN cycles."""
    call()
    torch.cuda.synchronize()
    replay = captured(lambda i: call(), calls)
    times, clocks = [], []
    for _ in range(runs):
        time.sleep(0.02)  # the same start for everyone: clocks follow the load
        replay()
        begin, end, after = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
        begin.record()
        replay()
        end.record()
        torch.cuda._sleep(SPIN)  # type: ignore[no-untyped-call]
        after.record()
        after.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
        clocks.append(SPIN / (end.elapsed_time(after) / 1e3))
    return statistics.median(times), statistics.median(clocks)


def with_backward(
    forward: Callable[[], torch.Tensor], leaves: tuple[torch.Tensor, ...], dy: torch.Tensor
) -> Callable[[], Any]:
    """A forward and the gradients of its leaves."""
    return lambda: torch.autograd.grad(forward(), leaves, dy)


def write(rows: list[dict[str, Any]], unit: str, given: argparse.Namespace) -> None:
    """One JSON of the rows with where they were measured, if `options` asked for it."""
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": given.commit or bench.commit(),
        "multiprocessors": torch.cuda.get_device_properties().multi_processor_count,
        "copy_tb_per_s": CudaClock().copy_speed(),
        "unit": unit,
        "rows": rows,
    }
    if given.out:
        bench.write(given.out, result)
