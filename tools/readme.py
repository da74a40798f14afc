"""Fills the README's generated parts: the support matrix from the core's own capability table, the
training tables from docs/, the speed tables and their picture from bench/results. `--check` only
compares the tables."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import blockscale as bs
from blockscale._core import matmul_needs
from blockscale.cli.bench import goal, read, share
from blockscale.cli.bench_chart import draw

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
GPU_RESULTS = ROOT / "bench" / "results" / "h200.json"
GPU_PICTURE = ROOT / "docs" / "bench" / "h200.png"

# The cases of bench/results/cpu.json that the README shows; docs/performance.md has them all.
SHOWN = (
    "memcpy",
    "quantize/fp8_1x128/axis:-1",
    "quantize/mxfp8/axis:-1",
    "quantize/mxfp4/axis:-1",
    "quantize/nvfp4/axis:-1",
    "quantize/nvfp4[rounding=stochastic]/axis:-1",
    "quantize/nvfp4[hadamard=16]/axis:-1",
    "quantize/fp8_1x128/axis:-2",
    "quantize/nvfp4/axis:-2",
    "quantize/fp8_128x128/axis:-1",
    "quantize_dual/fp8_1x128+fp8_1x128",
    "quantize_dual/nvfp4+nvfp4",
    "dequantize/fp8_1x128/axis:-1",
    "dequantize/nvfp4/axis:-1",
    "matmul fp8_blockwise 2048^3",
    "matmul nvfp4 2048^3",
    "torch.mm float32 2048^3",
    "training step tiny, bf16",
    "training step tiny, fp8_blockwise",
    "training step tiny, mxfp4",
    "training step tiny, nvfp4",
    "torchao to_mx mxfp8, axis -1",
    "torchao to_mx mxfp4, axis -1",
)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def support() -> str:
    """Which spec can be stored how and runs where."""
    facts = bs.describe()
    layouts = [layout["name"] for layout in facts["layouts"]]
    rows = []
    for name in facts["specs"]:
        spec = bs.spec(name)
        stored = [layout for layout in layouts if not bs.explain(name, layout, "cpu")]
        # Not whether this machine has a GPU: what a build with nvcc does on one.
        gpu = "quantizers only" if matmul_needs(str(spec), "cuda") else "yes"
        outer = " + FP32 tensor scale" if spec.outer else ""
        block = "x".join(map(str, spec.block))
        rows.append(
            [
                f"`{name}`",
                spec.element,
                f"{spec.scale}{outer}",
                block,
                ", ".join(stored),
                "yes",
                gpu,
            ]
        )
    header = ["spec", "element", "scales", "block", "storage layouts", "CPU", "H100, H200"]
    return table(header, rows)


def train(folder: str = "docs/train") -> str:
    """The tables of a committed run."""
    report = (ROOT / folder / "report.md").read_text()
    lines = [line for line in report.splitlines() if line.startswith("|")]
    return "\n".join(lines).replace("\n| setting", "\n\n| setting")  # two tables


def train_gpu() -> str:
    """The results of the committed run on a GPU, without its settings."""
    return train("docs/train_gpu").partition("\n\n| setting")[0]


def train_gpt() -> str:
    """The same of a larger model in FP8."""
    return train("docs/train_gpt").partition("\n\n| setting")[0]


def number(value: float | None, form: str) -> str:
    """A figure, or nothing."""
    return "" if value is None else form.format(value)


def bench() -> str:
    """The shown cases, with their share of the peer and the goal."""
    result = json.loads((ROOT / "bench/results/cpu.json").read_text())
    found = {row["case"]: row for row in result["rows"]}
    rows = []
    for case in SHOWN:
        row = found[case]
        if "of_bf16_step" in row:
            peer = f"{row['of_bf16_step']:.2f}x the BF16 step"
            aim = number(row["goal"], "≤ {:.0f}x")
        elif "of_torch_mm" in row:
            peer, aim = f"{row['of_torch_mm']:.2f} of torch.mm", number(row["goal"], "≥ {:.2f}")
        elif "of_memcpy" in row:
            peer = f"{100 * row['of_memcpy']:.0f}% of memcpy"
            aim = "" if row.get("goal") is None else f"≥ {100 * row['goal']:.0f}%"
        else:
            peer = aim = ""
        speed = (
            f"{row['gb_per_s']:.1f} GB/s"
            if "gb_per_s" in row
            else f"{row['gflops']:.0f} GFLOP/s"
            if "gflops" in row
            else f"{row['ms']:.0f} ms"
        )
        rows.append([f"`{case}`", speed, peer, aim])
    where = result["provenance"]
    origin = (
        f"{where['cpu']}, {where['cores']} cores, {where['instruction_set']}, "
        f"torch {where['torch']}, {where['date'][:10]}, commit {where['commit'][:12]}."
    )
    return table(["case", "speed", "share", "goal"], rows) + "\n\n" + origin


def bench_gpu() -> str:
    """The largest shape of the GPU benchmark, and the GEMMs."""
    result = read(GPU_RESULTS)
    rows = []
    for row in result["rows"]:
        if row.get("shape", [16384, 8192]) != [16384, 8192] and "of_copy" in row:
            continue
        took = f"{row['us']:.{0 if row['us'] >= 10 else 1}f} µs"
        rows.append([f"`{row['case']}`", took, share(row), goal(row)])
    where = result["provenance"]
    origin = (
        f"{where['gpu']}, copy {where['copy_tb_per_s']:.2f} TB/s, torch {where['torch']}, "
        f"{where['date'][:10]}, commit {where['commit'][:12]}."
    )
    return table(["case", "time", "share", "goal"], rows) + "\n\n" + origin


PARTS = (
    ("support", support),
    ("train", train),
    ("train_gpu", train_gpu),
    ("train_gpt", train_gpt),
    ("bench_gpu", bench_gpu),
    ("bench", bench),
)


def filled(text: str) -> str:
    """The README with every generated part made anew."""
    for name, make in PARTS:
        begin, end = f"<!-- begin: {name} (tools/readme.py) -->", f"<!-- end: {name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"readme: part {name} is missing; put '{begin}' and '{end}' back")
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def main() -> None:
    """Write the README, or say that it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    old = README.read_text()
    new = filled(old)
    if check and old != new:
        sys.exit("README.md is out of date; run: .venv/bin/python tools/readme.py")
    if not check:
        README.write_text(new)
        GPU_PICTURE.write_bytes(draw(read(GPU_RESULTS)))


if __name__ == "__main__":
    main()
