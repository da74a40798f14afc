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
from blockscale.cli.bench_clock import CudaClock, between_events, captured


def options(description: str) -> argparse.Namespace:
    """Where the results go, and of which commit they are."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="what was built, where git cannot say")
    return parser.parse_args()


def seconds(call: Callable[[], Any], runs: int, calls: int) -> float:
    """Median time of a call among `calls` of them in a replayed graph."""
    return seconds_and_clock(call, runs, calls, 0)[0]


def seconds_and_clock(
    call: Callable[[], Any], runs: int, calls: int, clocks: int = 3
) -> tuple[float, float]:
    """The same, and the clock of the multiprocessors in Hz, the median of `clocks` more runs."""
    call()
    torch.cuda.synchronize()
    replay = captured(lambda i: call(), calls)
    times = []
    for _ in range(runs):
        time.sleep(0.02)  # the same start for everyone: clocks follow the load
        times.append(between_events(replay, 1, 1) / 1e6)
    took = statistics.median(times)
    seen = [clock_during(replay, took) for _ in range(clocks)]
    return took / calls, statistics.median(seen) if seen else 0.0


def clock_during(work: Callable[[], Any], took: float) -> float:
    """The multiprocessors' clock in Hz while they work: by how long one thread beside it takes to
    count cycles. It falls with the load at once, and behind it rises as fast."""
    least = 2e-3  # what a launch takes does not count then
    repeats = max(1, round(least / took))
    cycles = round(0.8e9 * repeats * took)  # over before the work, above 0.8 GHz
    time.sleep(0.02)
    work()
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(beside):
        begin.record()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        end.record()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return float(cycles / (begin.elapsed_time(end) / 1e3))


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
