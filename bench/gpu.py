"""Speed of the GPU backend beside a large copy, torch.mm in BF16 and, if installed, torchao.

Every quantizer checks its answer against the CPU first, then is timed on rotating inputs in a
replayed CUDA graph; bytes are one read of the input and the outputs. Writes one JSON with where it
was measured: `python bench/gpu.py --out bench/results/h200.json`.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import blockscale as bs
import torch

Row = dict[str, Any]

STOCHASTIC = "[scale_rounding=up,rounding=stochastic]"
BOTH = "[scale_rounding=up,rounding=stochastic,hadamard=16]"
SHAPES = ((16384, 8192), (32768, 4096), (10007, 2880), (4099, 5003))
INPUTS = 3  # of 64 MiB and more each: the cache holds none when its turn comes

# Share of the copy that each kind of work should reach, on even shapes.
ROWS_AND_COLUMNS = {
    "fp8_1x128": 0.94,
    "fp8_128x128": 0.94,
    "mxfp8": 0.94,
    "mxfp4": 0.92,
    "nvfp4": 0.92,
    "nvfp4[block=16x16]": 0.92,
    "amdfp4": 0.92,
    f"nvfp4{STOCHASTIC}": 0.82,
    "nvfp4[hadamard=16]": 0.82,
    f"nvfp4{BOTH}": 0.70,
}
DUAL = {
    ("fp8_1x128", "fp8_1x128"): 0.90,
    ("fp8_128x128", "fp8_128x128"): 0.90,
    ("nvfp4", "nvfp4"): 0.75,
    (f"nvfp4{STOCHASTIC}", f"nvfp4{BOTH}"): 0.55,
}


def captured(call: Callable[[int], Any], calls: int) -> Callable[[], Any]:
    """`calls` calls in one CUDA graph: what the host does between launches is not timed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    return graph.replay


def microseconds(call: Callable[[int], Any], rounds: int = 9, calls: int = 12) -> float:
    """Median time of a call, replayed from a graph; `call` is given a counter, to rotate its
    inputs."""
    for i in range(INPUTS):
        call(i)
    torch.cuda.synchronize()
    replay = captured(call, calls)
    return between_events(replay, 1, rounds) / calls


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


def in_turn(*calls: Callable[[], Any], repeats: int, rounds: int = 9) -> list[float]:
    """Median times of calls, each replayed from a graph, one round of each after another: they meet
    the same clocks, which fall as the device warms."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    replays = [captured(lambda i, c=call: c(), repeats) for call in calls]  # type: ignore[misc]
    times = [[between_events(replay, 1, 1) for replay in replays] for _ in range(rounds)]
    return [statistics.median(column) / repeats for column in zip(*times, strict=True)]


def eager_microseconds(call: Callable[[], Any], calls: int, rounds: int = 25) -> float:
    """Median time of a call on the host: launches are waited for between rounds only, and a round
    launches less than the device's queue holds."""
    times = []
    for _ in range(rounds + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return statistics.median(times[3:])


def size(*operands: bs.QuantizedTensor) -> int:
    """Bytes of codes and scales."""
    return sum(q.codes.nbytes + q.scales.nbytes for q in operands)


class Bench:
    """Inputs of one shape, and the cases on them."""

    def __init__(self, shape: tuple[int, int], copy: float):
        generator = torch.Generator("cuda").manual_seed(1)
        self.x = [
            torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)
            for _ in range(INPUTS)
        ]
        self.shape, self.copy = shape, copy
        self.rng = bs.Rng(*(torch.tensor(n, device="cuda") for n in (7, 1)))
        self.rows: list[Row] = []

    def add(self, case: str, took: float, moved: int, goal: float | None) -> None:
        """One result; odd shapes have goals of their own."""
        speed = moved / took / 1e6
        share = speed / self.copy
        self.rows.append(
            {
                "case": case,
                "shape": list(self.shape),
                "us": took,
                "tb_per_s": speed,
                "of_copy": share,
                "goal": goal,
            }
        )
        print(f"{case:70} {self.shape!s:14} {took:8.1f} us {100 * share:6.1f}% of copy", flush=True)

    def amax(self, spec: str, axis: int) -> torch.Tensor | None:
        """What a spec with an outer scale is given."""
        return bs.amax(self.x[0], spec, axis) if bs.spec(spec).outer else None

    def check(self, spec: str, axis: int, amax: torch.Tensor | None) -> None:
        """128 lines of the result against the CPU's, bit for bit."""
        x = self.x[0]
        q = bs.quantize(x, spec, axis=axis, amax=amax, rng=self.rng)
        part = (x[:128] if axis == -1 else x[:, :128]).cpu()
        given = None if amax is None else amax.cpu()
        want = bs.quantize(part, spec, axis=axis, amax=given, rng=bs.Rng(7, 1))
        for got, expected in ((q.codes, want.codes), (q.scales, want.scales)):
            lines = got[: expected.shape[0]].cpu().contiguous()
            assert torch.equal(lines.view(torch.uint8), expected.view(torch.uint8)), spec

    def quantizers(self) -> None:
        """Every spec along both axes, and pairs in one pass."""
        for spec, goal in ROWS_AND_COLUMNS.items():
            for axis in (-1, -2):
                amax = self.amax(spec, axis)
                self.check(spec, axis, amax)
                call = functools.partial(bs.quantize, spec=spec, axis=axis, amax=amax, rng=self.rng)
                moved = self.x[0].nbytes + size(call(self.x[0]))
                took = microseconds(lambda i, c=call: c(self.x[i % INPUTS]))  # type: ignore[misc]
                self.add(f"quantize/{spec}/axis:{axis}", took, moved, goal)
        for (row, col), goal in DUAL.items():
            dual = functools.partial(
                bs.quantize_dual,
                row_spec=row,
                col_spec=col,
                rng=self.rng,
                row_amax=self.amax(row, -1),
                col_amax=self.amax(col, -2),
            )
            moved = self.x[0].nbytes + size(*dual(self.x[0]))
            took = microseconds(lambda i, c=dual: c(self.x[i % INPUTS]))  # type: ignore[misc]
            self.add(f"quantize_dual/{row}+{col}", took, moved, goal)

    def readers(self) -> None:
        """Amax, dequantize and relayout."""
        for spec, axis, goal in (("nvfp4", -1, 0.95), ("nvfp4[hadamard=16]", -2, 0.90)):
            took = microseconds(lambda i, s=spec, a=axis: bs.amax(self.x[i % INPUTS], s, a))  # type: ignore[misc]
            self.add(f"amax/{spec}/axis:{axis}", took, self.x[0].nbytes, goal)
        for spec in ("fp8_1x128", "nvfp4"):
            for axis in (-1, -2):
                q = [bs.quantize(x, spec, axis=axis) for x in self.x]
                took = microseconds(lambda i, q=q: bs.dequantize(q[i % INPUTS]))  # type: ignore[misc]
                moved = self.x[0].nbytes + size(q[0])
                self.add(f"dequantize/{spec}/axis:{axis}", took, moved, 0.92)
        q = [bs.quantize(x, "nvfp4") for x in self.x]
        took = microseconds(lambda i: bs.relayout(q[i % INPUTS], "nv_128x4"))
        self.add("relayout/nvfp4/nv_128x4", took, 2 * size(q[0]), 0.85)

    def torchao(self) -> None:
        """torchao's Triton quantizers of FP8 and its compiled ones of MX, where it is installed."""
        try:
            from torchao.prototype.blockwise_fp8_training import kernels
            from torchao.prototype.mx_formats.config import ScaleCalculationMode
            from torchao.prototype.mx_formats.mx_tensor import to_mx
        except ImportError as missing:
            print(f"torchao is left out: {missing}")
            return
        peers: dict[str, Callable[[torch.Tensor], Sequence[torch.Tensor]]] = {}
        for name in ("act_quant_lhs", "act_quant_transposed_lhs", "weight_quant_rhs"):
            kernel = getattr(kernels, f"triton_fp8_blockwise_{name}", None)
            if kernel is not None:
                peers[f"torchao fp8 {name}"] = kernel
        for label, element in (
            ("mxfp8", torch.float8_e4m3fn),
            ("mxfp4", torch.float4_e2m1fn_x2),
        ):
            mode = ScaleCalculationMode.RCEIL
            compiled = torch.compile(
                functools.partial(to_mx, elem_dtype=element, block_size=32, scaling_mode=mode)
            )
            peers[f"torchao compiled to_mx {label}"] = compiled
        for case, peer in peers.items():
            try:
                outputs = peer(self.x[0])
                moved = self.x[0].nbytes + sum(t.nbytes for t in outputs)
                took = microseconds(lambda i, p=peer: p(self.x[i % INPUTS]))  # type: ignore[misc]
                self.add(case, took, moved, None)
            except Exception as error:  # a peer that cannot run here is no failure of ours
                print(f"{case}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")


def copy_speed() -> float:
    """TB/s, read and written, of copies far larger than the cache, one after another: the best that
    the memory does. (Copies in a graph go to another engine, which is slower.)"""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    return 2 * a.nbytes / between_events(lambda: b.copy_(a), calls=4) / 1e6


def gemm_rows() -> list[Row]:
    """matmul by decode, and one linear forward and backward, against BF16."""
    rows: list[Row] = []
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    qa, qb = bs.quantize(a, "nvfp4"), bs.quantize(b, "nvfp4[block=16x16]")
    peer, took = in_turn(lambda: torch.mm(a, b.t()), lambda: bs.matmul(qa, qb), repeats=4)
    rows.append({"case": f"matmul nvfp4 {n}^3", "us": took, "of_bf16": peer / took, "goal": 0.85})
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
    """What the host spends on tiny layers in eager mode, a layer of a stack, against nn.Linear."""
    rows: list[Row] = []
    layers = 8
    bf16: Any = {"dtype": torch.bfloat16, "device": "cuda"}
    x = torch.randn(16, 16, requires_grad=True, **bf16)
    dy = torch.randn(16, 16, **bf16)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, **bf16) for _ in range(layers)))

    def both() -> None:
        torch.autograd.backward(model(x), dy)
        model.zero_grad()
        x.grad = None

    def inference() -> None:
        with torch.no_grad():
            model(x)

    def measure() -> dict[str, float]:
        calls = {"inference": inference, "forward": lambda: model(x), "forward+backward": both}
        return {what: eager_microseconds(call, 3) / layers for what, call in calls.items()}

    plain = measure()
    for recipe in ("mxfp8", "nvfp4"):
        bs.convert(model, recipe)
        for what, took in measure().items():
            case = f"host, converted layer, {what}, {recipe}"
            rows.append({"case": case, "us": took, "of_bf16": plain[what] / took})
    for row in rows:
        print(f"{row['case']:70} {row['us']:8.1f} us {row['of_bf16']:6.2f}x BF16", flush=True)
    return rows


def provenance(copy: float) -> dict[str, Any]:
    """Where and from what the numbers come."""

    def run(*words: str) -> str:
        try:
            return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
        except FileNotFoundError:
            return ""

    clocks = run(
        "nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,driver_version", "--format=csv,noheader"
    )
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": run("git", "rev-parse", "HEAD"),
        "gpu": torch.cuda.get_device_name(),
        "clocks_after_and_driver": clocks,
        "copy_tb_per_s": copy,
        "blockscale": bs.describe()["version"],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def main() -> None:
    """Run every case and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="what was built, where git cannot say")
    options = parser.parse_args()
    copy = copy_speed()
    print(f"copy {copy:.3f} TB/s")
    rows: list[Row] = []
    for i, shape in enumerate(SHAPES):
        bench = Bench(shape, copy)
        bench.quantizers()
        if i == 0:
            bench.readers()
            bench.torchao()
        rows += bench.rows
        del bench
        torch.cuda.empty_cache()
    rows += gemm_rows()
    rows += host_rows()
    where = provenance(copy)
    where["commit"] = options.commit or where["commit"]
    options.out.write_text(json.dumps({"provenance": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
