"""How `blockscale bench` measures time, on a CPU and on a GPU: medians, in microseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """What the cases need from a device."""

    def microseconds(self, call: Callable[[int], Any]) -> float:
        """Median time of a call; `call` receives a counter, to rotate its inputs."""
        ...

    def copy_speed(self) -> float:
        """TB/s, read and written, of copies far larger than the cache: the ceiling."""
        ...


class CpuClock:
    """Times by the host's clock."""

    def __init__(self, least: float = 0.15) -> None:
        """Every case is repeated for at least `least` seconds, and at least five times."""
        self.least = least

    def microseconds(self, call: Callable[[int], Any]) -> float:
        call(0)
        times: list[float] = []
        while sum(times) < self.least or len(times) < 5:
            start = time.perf_counter()
            call(len(times))
            times.append(time.perf_counter() - start)
        return 1e6 * statistics.median(times)

    def copy_speed(self) -> float:
        a = torch.zeros(1 << 28, dtype=torch.uint8)
        b = torch.ones_like(a)
        return 2 * a.nbytes / self.microseconds(lambda i: b.copy_(a)) / 1e6


class CudaClock:
    """Times by the device's clock, over calls captured in one CUDA graph: the host's work between
    launches is not timed."""

    warm_up = 3  # calls before the capture, each with another input

    def microseconds(self, call: Callable[[int], Any], calls: int = 12) -> float:
        for i in range(self.warm_up):
            call(i)
        torch.cuda.synchronize()
        return between_events(captured(call, calls), 1) / calls

    def copy_speed(self) -> float:
        # Not in a graph: there copies use another, slower engine.
        a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
        b = torch.empty_like(a)
        return 2 * a.nbytes / between_events(lambda: b.copy_(a), calls=4) / 1e6


def captured(call: Callable[[int], Any], calls: int) -> Callable[[], Any]:
    """A function that replays `calls` calls, captured in one CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    return graph.replay


def between_events(call: Callable[[], Any], calls: int, rounds: int = 9) -> float:
    """Median time of a call, by the device's clock."""
    call()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / calls)
    return float(statistics.median(times))
