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
from blockscale.cli.bench_clock import between_events, captured


def options(description: str) -> argparse.Namespace:
    """Where the results go, and of which commit they are."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="what was built, where git cannot say")
    return parser.parse_args()


def seconds(call: Callable[[], Any], runs: int, calls: int) -> float:
    """Median time of a call among `calls` of them in a replayed graph."""
    call()
    torch.cuda.synchronize()
    replay = captured(lambda i: call(), calls)
    times = []
    for _ in range(runs):
        time.sleep(0.02)  # the same start for everyone: clocks follow the load
        times.append(between_events(replay, 1, 1) / 1e6 / calls)
    return statistics.median(times)


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
        "unit": unit,
        "rows": rows,
    }
    if given.out:
        bench.write(given.out, result)
