"""The run of `blockscale bench`: every case of bench_cases.py, checked and then timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from blockscale.cli.bench_cases import (
    BESIDE,
    GPU_SHAPES,
    GROUPED_SHAPE,
    GROUPS,
    LAUNCH_GOAL,
    LAUNCH_SHAPE,
    LAUNCH_SPECS,
    Case,
    Data,
    Row,
    Shape,
    torchao,
)
from blockscale.cli.bench_clock import Clock, CpuClock, CudaClock

Wanted = Callable[[str], object]  # true for the name of a case to measure


def run(
    device: str, shapes: Sequence[Shape], say: Callable[[str], None], wanted: Wanted
) -> tuple[float, list[Row]]:
    """Runs every wanted case; returns the copy's TB/s and the results. The first shape has the most
    cases.

    `say` receives what comes next, and which peers are left out. Raises WrongAnswer.
    """
    clock: Clock = CudaClock() if device == "cuda" else CpuClock()
    say("copy")
    copy = clock.copy_speed()
    rows: list[Row] = []
    for index, shape in enumerate(shapes):
        data = Data(shape, device)
        where = "x".join(map(str, shape))

        def measure(case: Case, shape: Shape = shape, where: str = where) -> None:
            if not wanted(case.name):
                return
            say(f"{where} {case.name}")
            case.check()
            rows.append(result(case, shape, clock.microseconds(case.call), copy))

        for case in data.quantizers():
            measure(case)
        if index == 0:
            for case in data.readers():
                measure(case)
            if len(shape) == 2 and any(map(wanted, BESIDE)):
                measure_peers(data, measure, say, wanted)
            if device == "cuda":
                for case in Data(shape, device, torch.float32).wide_quantizers():
                    measure(case)
    if device == "cuda":
        rows += layouts(clock, Data(shapes[0], device), say, wanted)
        if tuple(shapes) == GPU_SHAPES:
            rows += grouped(clock, copy, say, wanted)
        say("launches")
        rows += launches(wanted)
    return copy, rows


def layouts(clock: Clock, data: Data, say: Callable[[str], None], wanted: Wanted) -> list[Row]:
    """Quantizers into other layouts, beside `linear`, in turn."""
    rows: list[Row] = []
    for case, linear in data.layouts():
        if not wanted(case.name):
            continue
        say(case.name)
        case.check()
        took = clock.microseconds(case.call)
        of_linear = clock.microseconds(linear.call) / took
        shape = list(data.shape)
        row = {"case": case.name, "shape": shape, "us": took, "of_linear": of_linear}
        rows.append(row | {"goal": case.goal})
    return rows


def grouped(clock: Clock, copy: float, say: Callable[[str], None], wanted: Wanted) -> list[Row]:
    """Quantizers of rows in groups."""
    data = Data(GROUPED_SHAPE, "cuda", groups=GROUPS)
    rows: list[Row] = []
    for case in data.quantizers():
        if not wanted(case.name):
            continue
        say(f"{GROUPS} groups, {case.name}")
        case.check()
        row = result(case, GROUPED_SHAPE, clock.microseconds(case.call), copy)
        rows.append(row | {"groups": GROUPS})
    return rows


def measure_peers(
    data: Data, measure: Callable[[Case], None], say: Callable[[str], None], wanted: Wanted
) -> None:
    """torchao, if it is installed. A peer that cannot run here is not our failure."""
    for name, call in torchao(data.device).items():
        if not wanted(name):
            continue
        try:
            measure(data.peer(name, call))
        except Exception as error:
            reason = str(error).splitlines()[0][:100]
            say(f"note: {name} is left out: {type(error).__name__}: {reason}")


def result(case: Case, shape: Shape, took: float, copy: float) -> Row:
    """One row of results.json."""
    speed = case.moved / took / 1e6
    return {
        "case": case.name,
        "shape": list(shape),
        "us": took,
        "tb_per_s": speed,
        "of_copy": speed / copy,
        "goal": case.goal,
    }


def launches(wanted: Wanted) -> list[Row]:
    """A small quantizer beside an empty kernel, both replayed from a graph of many."""
    time = functools.partial(CudaClock().microseconds, calls=200)
    empty = time(lambda i: torch.cuda._sleep(0))  # type: ignore[no-untyped-call]
    data = Data(LAUNCH_SHAPE, "cuda")
    small = list(LAUNCH_SHAPE)
    plain = time(data.elementwise().call)
    rows: list[Row] = [
        {"case": "launch, empty kernel", "shape": small, "us": empty},
        {"case": "launch, 1024x1024, torch.neg", "shape": small, "us": plain},
    ]
    for spec in LAUNCH_SPECS:
        case = data.quantize(spec, -1, None)
        case.check()
        took = time(case.call)
        rows.append(
            {
                "case": f"launch, 1024x1024, {spec}",
                "shape": small,
                "us": took,
                "of_empty": took / empty,
                "goal": LAUNCH_GOAL,
            }
        )
    return [row for row in rows if wanted(row["case"])]
