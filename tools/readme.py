"""Fills the README's generated parts: the support matrix from the core's own capability table, the
training tables from docs/, the speed tables and their picture from bench/results. `--check` only
compares the tables."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import blockscale as bs
from blockscale.cli.bench import reached, read
from blockscale.cli.bench_cases import BESIDE, ODD
from blockscale.cli.bench_chart import SHORTER, WIDE, draw

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
GPU_RESULTS = RESULTS / "h200.json"
GPU_PICTURE = ROOT / "docs" / "bench" / "h200.png"

Row = dict[str, Any]
GPU_SHAPE = [16384, 8192]  # of the table of quantizers


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def support() -> str:
    """Which spec can be stored how, and how a GPU multiplies it."""
    facts = bs.describe()
    layouts = [layout["name"] for layout in facts["layouts"]]
    rows = []
    for name in facts["specs"]:
        spec = bs.spec(name)
        stored = [layout for layout in layouts if not bs.explain(name, layout, "cpu")]
        outer = " + FP32 tensor scale" if spec.outer else ""
        block = "x".join(map(str, spec.block))
        # The rule of `matmul` (binding/matmul.cc), whether or not this machine has a GPU.
        fp4 = spec.element == "e2m1" and spec.scale == "e8m0"
        product = "FP8 tensor cores" if spec.scale == "fp32" or fp4 else "decoded to BF16"
        scales = f"{spec.scale}{outer}"
        rows.append([f"`{name}`", spec.element, scales, block, ", ".join(stored), product])
    return table(
        ["spec", "element", "scales", "block", "storage layouts", "GEMM on H100, H200"], rows
    )


def train(folder: str = "docs/train") -> str:
    """The results of a committed run, without its settings."""
    report = (ROOT / folder / "report.md").read_text()
    lines = [line for line in report.splitlines() if line.startswith("|")]
    return "\n".join(lines).partition("\n| setting")[0]


def train_gpu() -> str:
    """The same on a GPU."""
    return train("docs/train_gpu")


def train_gpt() -> str:
    """The same of a larger model in FP8."""
    return train("docs/train_gpt")


# --- speed: many cases in few lines, goals in parentheses, those that are missed in bold ----------


def cell(row: Row | None, key: str) -> str:
    """A share of the copy with its goal; bold where it misses it."""
    if row is None:
        return ""
    share, goal = f"{row[key]:.0%}", row.get("goal")
    if goal is None:
        return share
    return f"{share} ({100 * goal:.0f})" if row[key] >= goal else f"**{share}** ({100 * goal:.0f})"


def short(spec: str) -> str:
    """A spec's text as the picture has it."""
    for long, brief in SHORTER.items():
        spec = spec.replace(long, brief)
    return f"`{spec}`"


def quantizers(rows: Iterable[Row], key: str) -> list[list[str]]:
    """A line a spec: along rows, down columns, and both from one read."""
    cases = {row["case"]: row for row in rows if not row["case"].endswith(WIDE)}
    one = [case.split("/")[1] for case in cases if case.startswith("quantize/")]
    two = [case.split("/")[1] for case in cases if case.startswith("quantize_dual/")]
    lines = []
    for spec in dict.fromkeys(one):
        found = [f"quantize/{spec}/axis:-1", f"quantize/{spec}/axis:-2"]
        found.append(f"quantize_dual/{spec}+{spec}")
        lines.append([short(spec), *(cell(cases.get(case), key) for case in found)])
    for pair in two:
        row, _, column = pair.partition("+")
        if row != column:
            both = cell(cases[f"quantize_dual/{pair}"], key)
            lines.append([f"{short(row)} rows, {short(column)} columns", "", "", both])
    return lines


def beside(rows: Iterable[Row], key: str) -> dict[str, str]:
    """What torchao reaches with the same work, by our case."""
    return {BESIDE[row["case"]]: f"{row[key]:.0%}" for row in rows if row["case"] in BESIDE}


def between(values: Sequence[float], form: str) -> str:
    """The least and the greatest of some figures."""
    least, most = (format(value, form) for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def ratios(rows: Sequence[Row], ours: str, peer: str, inverse: bool = False) -> str:
    """Least, greatest and geometric mean of how many times a peer's speed we have; of times, the
    other way round. Shapes that the peer refuses are only counted."""
    found = [row[ours] / row[peer] for row in rows if not isinstance(row[peer], str)]
    found = [1 / ratio for ratio in found] if inverse else found
    mean = math.exp(sum(map(math.log, found)) / len(found))
    refused = len(rows) - len(found)
    return f"{between(found, '.2f')}, mean {mean:.2f}{f' ({refused} refused)' if refused else ''}"


def where(result: Row) -> str:
    """Machine, versions, date and commit of a run."""
    origin = result.get("provenance", result)
    copy = f"copy {origin['copy_tb_per_s']:.2f} TB/s, " if "copy_tb_per_s" in origin else ""
    machine = origin.get("gpu") or origin.get("cpu") or origin["device"]
    if "gpu" not in origin and "cores" in origin:
        machine += f", {origin['cores']} cores, {origin['instruction_set']}"
    date, commit = origin["date"][:10], origin["commit"][:12]
    return f"{machine}, {copy}torch {origin['torch']}, {date}, commit {commit}."


def goals(rows: Iterable[Row]) -> str:
    """How many goals were reached, shape by shape: none is left out."""
    kinds: dict[str, list[Row]] = {}
    shapes = set()
    for row in rows:
        if row.get("goal") is None:
            continue
        shape = tuple(row.get("shape", ()))
        if "of_empty" in row:
            kind = "of launches at 1024x1024"
        elif not shape:
            kind = "of the products"
        elif shape in ODD:
            kind = f"at the odd shapes {' and '.join('x'.join(map(str, s)) for s in ODD)}"
        elif list(shape) == GPU_SHAPE:
            kind = f"at {'x'.join(map(str, shape))}"
        else:
            kind = "at {} other shapes"
            shapes.add(shape)
        kinds.setdefault(kind, []).append(row)
    parts = (
        f"{sum(map(reached, some))} of {len(some)} {kind.format(len(shapes))}"
        for kind, some in kinds.items()
    )
    launches = [row["of_empty"] for row in kinds.get("of launches at 1024x1024", ())]
    took = f" A launch takes {between(launches, '.1f')} times as long as an empty kernel's."
    return f"Goals reached: {', '.join(parts)}.{took if launches else ''}"


def bench_gpu() -> str:
    """The quantizers at the largest shape, and how many goals were reached anywhere."""
    result = read(GPU_RESULTS)
    rows = [row for row in result["rows"] if row.get("shape") == GPU_SHAPE]
    peers = beside(rows, "of_copy")
    lines = quantizers(rows, "of_copy")
    for line in lines:
        cases = [f"quantize/{line[0].strip('`')}/axis:{axis}" for axis in (-1, -2)]
        line.append(", ".join(peers[case] for case in cases if case in peers))
    header = ["quantize", "along rows", "down columns", "both, one read", "torchao: rows, columns"]
    others = []
    for row in rows:
        what, _, spec = row["case"].partition("/")
        if what in ("amax", "dequantize", "relayout") and not spec.endswith(WIDE):
            name, _, way = spec.partition("/")
            way = {"axis:-1": ", rows", "axis:-2": ", columns"}.get(way, f" to `{way}`")
            others.append(f"{what} {short(name)}{way} {cell(row, 'of_copy')}")
    rest = f"The others: {'; '.join(others)}."
    text = [table(header, lines), rest, goals(result["rows"]), where(result)]
    return "\n\n".join(text)


def products() -> str:
    """The GEMMs and layers of three files beside cuBLASLt and PyTorch's BF16."""
    single = json.loads((RESULTS / "h200_gemm.json").read_text())
    grouped = json.loads((RESULTS / "h200_grouped.json").read_text())
    decoded = {row["case"]: row for row in read(GPU_RESULTS)["rows"]}

    def of(result: Row, kind: str) -> list[Row]:
        return [row for row in result["rows"] if row["kind"].startswith(kind)]

    lines = []
    for kind, what in (
        ("fprop", "FP8, weight in 128x128 blocks (forward, gradient of x)"),
        ("wgrad", "FP8, both in 1x128 blocks (gradient of the weight)"),
        ("few rows", "FP8, 1 to 128 rows"),
    ):
        rows = of(single, kind)
        speed = between([row["blockscale"] for row in rows], ",.0f")
        peers = [ratios(rows, "blockscale", peer) for peer in ("cublaslt_fp8", "bf16")]
        lines.append([f"{what}, {len(rows)} shapes", speed, *peers])
    rows = of(single, "layer")
    for recipe in ("fp8_blockwise", "mxfp4"):
        for ours, what in ((recipe, ""), (f"{recipe} ahead", ", weight quantized ahead")):
            speed = between([row[ours] for row in rows], ",.0f")
            what = f"`linear` in `{recipe}`, forward and backward{what}, {len(rows)} shapes"
            lines.append([what, speed, "", ratios(rows, ours, "bf16")])
    for kind, what in (("rows", "along the rows"), ("contraction", "along the contraction axis")):
        rows = of(grouped, kind)
        speed = between([row["blockscale"] for row in rows], ",.0f")
        what = f"FP8, groups {what}, even and ragged, {len(rows)} cases"
        lines.append([what, speed, "", ratios(rows, "blockscale", "bf16")])
    rows = of(grouped, "layer")
    for recipe in ("fp8_blockwise", "mxfp4", "nvfp4"):
        for ahead in ("", " ahead"):
            what = f"`grouped_linear` in `{recipe}`, forward and backward"
            what += f"{', weight quantized ahead' if ahead else ''}, {len(rows)} shapes"
            ratio = ratios(rows, f"{recipe}{ahead} both", "bf16 both", inverse=True)
            lines.append([what, "", "", ratio])
    for case in (c for c in decoded if c.startswith(("matmul ", "linear "))):
        row = decoded[case]
        aim = f" (goal {row['goal']:.2f})" if row.get("goal") else ""
        lines.append([f"`{case}`", "", "", f"{row['of_bf16']:.2f}{aim}"])
    header = ["product", "TFLOP/s", "of cuBLASLt's FP8", "of PyTorch's BF16"]
    origins = dict.fromkeys(map(where, (single, grouped)))
    return "\n\n".join([table(header, lines), " ".join(origins)])


def host() -> str:
    """The time a call takes from the CPU that launches it, where the GPU does not limit."""
    cases = {row["case"]: row for row in read(GPU_RESULTS)["rows"]}
    ways = ("inference", "forward", "forward+backward")
    recipes = ("fp8_blockwise", "mxfp8", "nvfp4")
    rows = [["`nn.Linear`", *(f"{cases[f'host, nn.Linear, {way}']['us']:.0f}" for way in ways)]]
    for name in recipes:
        found = (cases[f"host, converted layer, {way}, {name}"]["us"] for way in ways)
        rows.append([f"converted, `{name}`", *(f"{took:.0f}" for took in found)])
    return table(["host's time for a small layer, µs", *ways], rows)


def bench() -> str:
    """The CPU's quantizers, products and training steps."""
    result = json.loads((RESULTS / "cpu.json").read_text())
    found: list[Row] = result["rows"]
    cases = {row["case"]: row for row in found}
    lines = quantizers(found, "of_memcpy")
    for line in lines:
        ways = (cases.get(f"dequantize/{line[0].strip('`')}/axis:{axis}") for axis in (-1, -2))
        line.append(", ".join(cell(row, "of_memcpy") for row in ways if row))
    header = ["quantize", "along rows", "down columns", "both, one read", "dequantize"]
    of_mm = [row["gflops"] for row in found if "of_torch_mm" in row]
    steps = [row["of_bf16_step"] for row in found if row.get("goal") and "of_bf16_step" in row]
    peers = [100 * row["of_memcpy"] for row in found if row["case"].startswith("torchao")]
    with_goal = [row for row in found if row.get("goal") is not None]
    text = (
        f"`matmul` at 2048³: {between(of_mm, '.0f')} GFLOP/s in {len(of_mm)} recipes; `torch.mm` "
        f"in float32: {cases['torch.mm float32 2048^3']['gflops']:.0f}. A training step of the "
        f"model above takes {between(steps, '.2f')} times as long as in BF16. torchao's `to_mx` "
        f"runs at {between(peers, '.1f')}% of `memcpy`. Goals reached: "
        f"{sum(map(cpu_reached, with_goal))} of {len(with_goal)}."
    )
    copy = f"memcpy {cases['memcpy']['gb_per_s']:.1f} GB/s; {where(result)}"
    return "\n\n".join([table(header, lines), text, copy])


def cpu_reached(row: Row) -> bool:
    """Whether a case of bench/run.py is there; a training step should take little time."""
    if "of_bf16_step" in row:
        return bool(row["of_bf16_step"] <= row["goal"])
    return bool(row.get("of_torch_mm", row.get("of_memcpy")) >= row["goal"])


PARTS = (
    ("support", support),
    ("train", train),
    ("train_gpu", train_gpu),
    ("train_gpt", train_gpt),
    ("bench_gpu", bench_gpu),
    ("products", products),
    ("host", host),
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
