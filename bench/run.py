"""Speed and memory of the CPU backend beside memcpy, torch.mm and, if installed, torchao.

Runs the C++ benchmark (build/blockscale_bench), then the cases that need PyTorch, in one go, and
writes one JSON with where it was measured. `make bench` calls it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blockscale as bs
import torch
from blockscale.cli.bench import goal, share
from blockscale.cli.bench_clock import CpuClock
from blockscale.cli.model import PRESETS, LanguageModel
from blockscale.cli.provenance import provenance
from blockscale.cli.trainer import make_optimizer, update
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Row = dict[str, Any]

# Share of memcpy that a quantizer should reach: FP4 is bound by instructions, not by bytes.
GOALS = {
    ("quantize", "-1", "byte"): 0.70,
    ("quantize", "-1", "nibble"): 0.50,
    ("quantize", "-2", "byte"): 0.45,
    ("quantize", "-2", "nibble"): 0.45,
    ("dequantize", "-1", "byte"): 0.70,
    ("dequantize", "-1", "nibble"): 0.70,
    ("dequantize", "-2", "byte"): 0.70,
    ("dequantize", "-2", "nibble"): 0.70,
}


def core_rows(binary: Path) -> list[Row]:
    """The C++ cases as shares of memcpy (bytes) and as FLOP/s."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "core.json")
        output = (f"--benchmark_out={out}", "--benchmark_out_format=json")
        # In random order: whatever else the machine does meets every case, memcpy too.
        order = "--benchmark_enable_random_interleaving=true"
        repeats = ("--benchmark_repetitions=9", "--benchmark_min_time=0.25")
        subprocess.run([binary, *output, order, *repeats], check=True)
        report = json.loads(out.read_text())
    listed = subprocess.run(
        [binary, "--benchmark_list_tests"], check=True, capture_output=True, text=True
    ).stdout.split()
    found = {b["run_name"]: b for b in report["benchmarks"] if b.get("aggregate_name") == "median"}
    medians = {name.removesuffix("/real_time"): found[name] for name in listed}
    copy = medians["memcpy"]["bytes_per_second"]
    rows = []
    for name, b in medians.items():
        row: Row = {"case": name, "ms": b["real_time"]}
        if "bytes_per_second" in b:
            row["gb_per_s"] = b["bytes_per_second"] / 1e9
            row["of_memcpy"] = b["bytes_per_second"] / copy
            row["goal"] = goal_of(name)
        else:
            row["gflops"] = b["flops"] / 1e9
        rows.append(row)
    return rows


def goal_of(case: str) -> float | None:
    """What share of memcpy the case should reach, by kind."""
    op, _, rest = case.partition("/")
    changes = ("stochastic" in rest) + ("hadamard" in rest)
    if changes:
        return 0.30 if changes == 1 and op == "quantize" else None
    if op == "quantize_dual":
        return 0.45
    spec, _, axis = rest.rpartition("/axis:")
    if op == "quantize" and spec and bs.spec(spec).block[0] > 1:
        return 0.45
    width = "nibble" if spec and bs.spec(spec).element == "e2m1" else "byte"
    return GOALS.get((op, axis, width))


def seconds(body: Callable[[], Any]) -> float:
    """Median time of a call, over at least half a second and five calls."""
    return CpuClock(0.5).microseconds(lambda _: body()) / 1e6


def matmul_rows(n: int = 2048) -> list[Row]:
    """bs.matmul, decode included, beside torch.mm on the same threads; shares are of its FP32."""
    x, w = torch.randn(n, n), torch.randn(n, n)
    reference = x @ w.t()
    peer = seconds(lambda: x @ w.t())
    x16, w16 = x.bfloat16(), w.bfloat16()
    peer16 = seconds(lambda: x16 @ w16.t())
    rows: list[Row] = [
        {"case": f"torch.mm {dtype} {n}^3", "gflops": 2 * n**3 / took / 1e9}
        for dtype, took in (("float32", peer), ("bfloat16", peer16))
    ]
    for name in bs.recipe_names():
        recipe = bs.recipe(name)
        if recipe.fprop_x is None or recipe.fprop_w is None:
            continue
        a, b = bs.quantize(x, recipe.fprop_x), bs.quantize(w, recipe.fprop_w)
        y = bs.matmul(a, b, out_dtype=torch.float32)
        error = ((y - reference).norm() / reference.norm()).item()
        assert 1e-4 < error < 0.3, f"{name}: relative error {error}"
        took = seconds(lambda a=a, b=b: bs.matmul(a, b, out_dtype=torch.float32))  # type: ignore[misc]
        rows.append(
            {
                "case": f"matmul {name} {n}^3",
                "gflops": 2 * n**3 / took / 1e9,
                "of_torch_mm": peer / took,
                "goal": 0.85,
                "relative_error": error,
            }
        )
    return rows


def step_rows(steps: int = 9) -> list[Row]:
    """One training step of the preset `tiny` in every recipe, interleaved."""
    preset = PRESETS["tiny"]
    batch, length = preset.batch_size, preset.seq_len
    tokens = torch.randint(256, (batch, length + 1))
    runs: dict[str, Callable[[], Any]] = {}
    for name in bs.recipe_names():
        model = LanguageModel(preset, length)
        model.initialize(0)
        bs.convert(model, name, skip=model.kept_in_bf16())
        optimizer = make_optimizer(model, 1e-3)
        bs.attach(model, optimizer)

        runs[name] = functools.partial(update, model, optimizer, tokens[:, :-1], tokens[:, 1:])
        runs[name]()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(steps):
        for name, step in runs.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(t) for name, t in times.items()}
    return [
        {
            "case": f"training step tiny, {name}",
            "ms": 1e3 * t,
            "of_bf16_step": t / medians["bf16"],
            "goal": None if name == "bf16" else 2.0,
        }
        for name, t in medians.items()
    ]


def torchao_rows(copy_gb_per_s: float) -> list[Row]:
    """torchao's MX quantizer, eager, on the same threads; its CPU path has no other."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError:
        return []
    x = torch.randn(2048, 8192, dtype=torch.bfloat16)
    rows: list[Row] = []
    for label, element, bits in (
        ("mxfp8", torch.float8_e4m3fn, 8),
        ("mxfp4", torch.float4_e2m1fn_x2, 4),
    ):
        took = seconds(lambda e=element: to_mx(x, e, 32, ScaleCalculationMode.RCEIL))  # type: ignore[misc]
        moved = x.numel() * (2 + bits / 8 + 1 / 32)
        speed = moved / took / 1e9
        row = {"case": f"torchao to_mx {label}, axis -1", "ms": 1e3 * took, "gb_per_s": speed}
        rows.append({**row, "of_memcpy": speed / copy_gb_per_s})
    return rows


def memory_rows() -> list[Row]:
    """Peak memory of a quantizer beyond its outputs: the kernel's high-water mark, reset before."""
    script = (
        "import re, torch, blockscale as bs\n"
        "def mib(key):\n"
        "    text = open('/proc/self/status').read()\n"
        "    return int(re.search(key + r':\\s+(\\d+)', text).group(1)) / 1024\n"
        "x = torch.ones(8192, 8192, dtype=torch.bfloat16)\n"
        "bs.quantize(x[:512], 'nvfp4')\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"
        "before = mib('VmRSS'); q = bs.quantize(x, 'nvfp4')\n"
        "print(mib('VmHWM') - before - (q.codes.nbytes + q.scales.nbytes) / 2**20)\n"
    )
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return [
        {"case": "quantize nvfp4 8192x8192, MiB beyond outputs", "mib": float(out.stdout.strip())}
    ]


def print_rows(rows: list[Row]) -> None:
    """One line a case: its figure, its share of the peer's, its goal."""
    table = Table("case", "ms", "GB/s", "GFLOP/s", "share", "goal")
    for row in rows:
        if "mib" in row:
            table.add_row(escape(row["case"]), f"{row['mib']:.1f} MiB")
            continue
        figures = [row.get("ms"), row.get("gb_per_s"), row.get("gflops")]
        cells = ["" if figure is None else f"{figure:.2f}" for figure in figures]
        table.add_row(escape(row["case"]), *cells, share(row), goal(row))
    Console(width=120).print(table)


def main() -> None:
    """Measure everything, print it, write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=Path, default=Path("build/blockscale_bench"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    where = provenance("cpu") | {"load_average": os.getloadavg()[0]}
    rows = core_rows(options.core)
    copy = next(row["gb_per_s"] for row in rows if row["case"] == "memcpy")
    rows += matmul_rows() + step_rows() + torchao_rows(copy) + memory_rows()
    print_rows(rows)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"provenance": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
