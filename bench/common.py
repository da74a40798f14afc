"""What the benchmarks of products and layers on a GPU share: options, a clock, and their JSON."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import blockscale as bs
import torch
from blockscale.cli import bench
from blockscale.cli.bench_clock import CudaClock, between_events, captured
from blockscale.cli.provenance import provenance

# FP8 whose gradient of the weight reads x in blocks of 128x128, a scale for many columns; dy stays
# in blocks of 1x128.
SQUARES = "fp8_blockwise squares"


def recipe(name: str) -> bs.Recipe:
    """A named one, or SQUARES."""
    if name == SQUARES:
        return bs.recipe("fp8_blockwise").replace(wgrad_x="fp8_128x128", name=SQUARES)
    return bs.recipe(name)


def options(description: str) -> argparse.Namespace:
    """Where the results go, and of which commit they are."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="what was built, where git cannot say")
    return parser.parse_args()


def seconds(call: Callable[[], Any], runs: int, calls: int) -> float:
    """Median time of a call among `calls` of them in a replayed graph."""
    return replayed(call, runs, calls)[0]


def replayed(call: Callable[[], Any], runs: int, calls: int) -> tuple[float, Callable[[], Any]]:
    """The same, and what replays `calls` calls."""
    call()
    torch.cuda.synchronize()
    replay = captured(lambda i: call(), calls)
    times = []
    for _ in range(runs):
        time.sleep(0.02)  # the same start for everyone: clocks follow the load
        times.append(between_events(replay, 1, 1) / 1e6 / calls)
    return statistics.median(times), replay


def sustained(replay: Callable[[], Any], calls: int, took: float) -> tuple[float, float]:
    """Time of a call, and the multiprocessors' clock in MHz, where calls of about `took` seconds
    follow each other for half a second and more. (A kernel that counts cycles would tell the clock
    at once, but finds no room beside the work, and behind it the clock has risen already.)"""
    device = f"GPU-{torch.cuda.get_device_properties().uuid}"
    ask = ["nvidia-smi", "-i", device, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    seen: list[tuple[float, float]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            clock = float(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)
            seen.append((time.perf_counter(), clock))

    watcher = threading.Thread(target=watch)
    watcher.start()
    repeats = max(1, round(0.5 / (took * calls)))
    begin = time.perf_counter()
    try:
        each = between_events(lambda: [replay() for _ in range(repeats)], 1, 1) / 1e6 / repeats
        end = time.perf_counter()
    finally:
        over.set()
        watcher.join()
    # The first half only warms the device up.
    return each / calls, statistics.median(clock for at, clock in seen if (begin + end) / 2 < at)


def check(got: torch.Tensor, want: torch.Tensor, what: object) -> float:
    """The error of a product relative to its Frobenius norm; exits if it is above 5e-3."""
    difference = (got.double() - want.double()).norm()
    error = float(difference / want.double().norm()) if want.numel() else 0.0
    if not error <= 5e-3:  # also if it is NaN
        raise SystemExit(f"{what}: relative error {error}")
    return error


def speeds(
    ours: Callable[[], Any],
    peers: Mapping[str, Callable[[], Any]],
    work: float,
    runs: int,
    calls: int,
) -> dict[str, Any]:
    """TFLOP/s for `work` of 10^12 operations: ours and the peers' in bursts, or why they refuse;
    then our sustained speed and its clock; last, because that heats the device."""
    took, replay = replayed(ours, runs, calls)
    found: dict[str, Any] = {"blockscale": work / took}
    for name, peer in peers.items():
        try:
            found[name] = work / seconds(peer, runs, calls)
        except RuntimeError as refusal:  # cuBLASLt asks for multiples of 16
            found[name] = str(refusal).splitlines()[0]
    lasting, clock = sustained(replay, calls, took)
    return found | {"sustained": work / lasting, "clock_mhz": clock}


def with_backward(
    forward: Callable[[], torch.Tensor], leaves: tuple[torch.Tensor, ...], dy: torch.Tensor
) -> Callable[[], Any]:
    """A forward and the gradients of its leaves."""
    return lambda: torch.autograd.grad(forward(), leaves, dy)


def write(rows: list[dict[str, Any]], unit: str, given: argparse.Namespace) -> None:
    """One JSON of the rows with where they were measured, if `options` asked for it."""
    where = provenance("cuda") | {
        "multiprocessors": torch.cuda.get_device_properties().multi_processor_count,
        "copy_tb_per_s": CudaClock().copy_speed(),
    }
    if given.commit:
        where["commit"] = given.commit
    if given.out:
        bench.write(given.out, {"provenance": where, "unit": unit, "rows": rows})
