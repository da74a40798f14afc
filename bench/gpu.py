"""Speed of the GPU backend: the cases of `blockscale bench`, and GEMMs beside BF16.

`python bench/gpu.py --out bench/results/h200.json`; `blockscale bench --from` that file prints and
draws it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import blockscale as bs
import torch
from blockscale.cli.bench import measure, print_tables, write
from blockscale.cli.bench_cases import Row
from blockscale.cli.bench_clock import between_events, captured
from common import options
from rich.console import Console


def in_turn(*calls: Callable[[], Any], repeats: int, rounds: int = 9) -> list[float]:
    """Median times of calls, each replayed from a graph, one round of each after another: they meet
    the same clocks, which fall as the device warms."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    replays = [captured(lambda i, c=call: c(), repeats) for call in calls]  # type: ignore[misc]
    times = [[between_events(replay, 1, 1) for replay in replays] for _ in range(rounds)]
    return [statistics.median(column) / repeats for column in zip(*times, strict=True)]


def eager_in_turn(
    calls: dict[str, Callable[[], Any]], repeats: int, rounds: int = 25
) -> dict[str, float]:
    """Median times of calls on the host, one round of each after another, as a host's pace changes
    too. Launches are waited for between rounds only; a round has less than the device's queue
    holds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 3):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            times[name].append(1e6 * (time.perf_counter() - start) / repeats)
    torch.cuda.synchronize()
    return {name: statistics.median(found[3:]) for name, found in times.items()}


def gemm_rows() -> list[Row]:
    """matmul, and one linear forward and backward, against BF16."""
    rows: list[Row] = []
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for name, square, goal in (
        ("nvfp4", "nvfp4[block=16x16]", 0.85),
        ("mxfp4", "mxfp4", None),
        ("mxfp8", "mxfp8", None),
    ):
        qa, qb = bs.quantize(a, name), bs.quantize(b, square)
        multiply = functools.partial(bs.matmul, qa, qb)
        peer, took = in_turn(lambda: torch.mm(a, b.t()), multiply, repeats=4)
        case = f"matmul {name} {n}^3"
        rows.append({"case": case, "us": took, "of_bf16": peer / took, "goal": goal})
    m, k, n = 8192, 4096, 14336
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    w = torch.randn(n, k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dy = torch.randn(m, n, dtype=torch.bfloat16, device="cuda")
    rng = bs.Rng(*(torch.tensor(n, device="cuda") for n in (1, 2)))

    def step(recipe: str) -> None:
        torch.autograd.backward(bs.linear(x, w, recipe=recipe, rng=rng), dy)
        x.grad = w.grad = None

    recipes = ("mxfp8", "mxfp4", "nvfp4", "amdfp4")
    steps = [functools.partial(step, recipe) for recipe in ("bf16", *recipes)]
    peer, *times = in_turn(*steps, repeats=2)
    for recipe, took in zip(recipes, times, strict=True):
        rows.append(
            {
                "case": f"linear {m},{n},{k} forward+backward {recipe}",
                "us": took,
                "of_bf16": peer / took,
                "goal": 0.75 if recipe == "nvfp4" else None,
            }
        )
    for row in rows:
        print(f"{row['case']:70} {row['us']:8.1f} us {row['of_bf16']:6.2f}x BF16", flush=True)
    return rows


def host_rows() -> list[Row]:
    """What the host spends on tiny layers in eager mode: a layer of a converted stack against
    nn.Linear, and `linear` by itself against F.linear."""
    rows: list[Row] = []

    def add(times: dict[str, float], per: int, peer: str) -> None:
        for what, took in times.items():
            ratio = times[peer] / took
            rows.append({"case": f"host, {what}", "us": took / per, "of_bf16": ratio})

    layers = 8
    recipes = ("fp8_blockwise", "mxfp8", "nvfp4")
    bf16: Any = {"dtype": torch.bfloat16, "device": "cuda"}
    x = torch.randn(16, 16, requires_grad=True, **bf16)
    dy = torch.randn(16, 16, **bf16)
    stacks = {
        recipe: torch.nn.Sequential(*(torch.nn.Linear(16, 16, **bf16) for _ in range(layers)))
        for recipe in ("", *recipes)
    }
    for recipe in recipes:
        bs.convert(stacks[recipe], recipe)

    def forward(recipe: str) -> torch.Tensor:
        y: torch.Tensor = stacks[recipe](x)
        return y

    def inference(recipe: str) -> None:
        with torch.no_grad():
            forward(recipe)

    def both(recipe: str) -> None:
        torch.autograd.backward(forward(recipe), dy)
        stacks[recipe].zero_grad()
        x.grad = None

    ways: dict[str, Callable[[str], Any]] = {
        "inference": inference,
        "forward": forward,
        "forward+backward": both,
    }
    for way, run in ways.items():
        plain = f"nn.Linear, {way}"
        calls: dict[str, Callable[[], Any]] = {plain: functools.partial(run, "")}
        for recipe in recipes:
            calls[f"converted layer, {way}, {recipe}"] = functools.partial(run, recipe)
        add(eager_in_turn(calls, 3), layers, plain)

    w = torch.randn(16, 16, requires_grad=True, **bf16)
    rng = bs.Rng(*(torch.tensor(n, device="cuda") for n in (1, 2)))
    plain = "F.linear, forward"
    alone: dict[str, Callable[[], Any]] = {plain: lambda: torch.nn.functional.linear(x, w)}
    for recipe in recipes:
        kept = bs.quantize_weight(w, recipe)
        for how, ahead in (("", None), (", weight ahead", kept)):
            call = functools.partial(bs.linear, x, w, None, recipe, rng, quantized_weight=ahead)
            alone[f"linear, forward, {recipe}{how}"] = call
    add(eager_in_turn(alone, 16), 1, plain)
    for row in rows:
        print(f"{row['case']:70} {row['us']:8.1f} us {row['of_bf16']:6.2f}x BF16", flush=True)
    return rows


def main() -> None:
    """Run every case and write the JSON."""
    given = options(__doc__)
    console = Console(width=120)
    found = measure("cuda", None, console)
    found["rows"] += gemm_rows() + host_rows()
    if given.commit:
        found["provenance"]["commit"] = given.commit
    print_tables(found, console)
    if given.out:
        write(given.out, found)


if __name__ == "__main__":
    main()
