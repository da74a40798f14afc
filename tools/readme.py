"""Fills the generated parts of the README and of the performance notes: the support matrix from the
core's own capability table, the training tables from docs/, the speed tables and their picture from
bench/results. `--check` only compares the tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial

import blockscale as bs
import products
from blockscale.cli.bench import reached
from blockscale.cli.bench_cases import BESIDE, ODD
from blockscale.cli.bench_chart import SHORTER, WIDE, draw
from blockscale.cli.output import own_style
from tables import GPU, ROOT, Row, between, results, table, where

GPU_PICTURE = ROOT / "docs" / "bench" / "h200.png"

GPU_SHAPE = [16384, 8192]  # of the table of quantizers
GPUS = {"H200": GPU, "H100": "h100"}  # and the files of their quantizers


def support() -> str:
    """Which spec can be stored how, and how a GPU multiplies it."""
    facts = bs.describe()
    layouts = [layout["name"] for layout in facts["layouts"]]
    rows = []
    for name in facts["specs"]:
        spec = bs.spec(name)
        stored = [layout for layout in layouts if not bs.explain(name, layout, "cpu")]
        outer = " + FP32 outer scale" if spec.outer else ""
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
    return "|" + report.partition("\n\n|")[2].partition("\n\n")[0]


def train_gpu() -> str:
    """The same on a GPU."""
    return train("docs/train_gpu")


def train_moe() -> str:
    """The same of a model with experts."""
    return train("docs/train_moe")


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
    if row[key] < goal <= round(row[key], 2):  # a miss looks like one
        share = f"{row[key]:.1%}"
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


def goals_on_a_gpu(rows: Iterable[Row]) -> str:
    """How many goals were reached, shape by shape: none is left out."""
    kinds: dict[str, list[Row]] = {}
    shapes = set()
    for row in rows:
        if row.get("goal") is None:
            continue
        shape = tuple(row.get("shape", ()))
        if "of_empty" in row:
            kind = "of launches at 1024x1024"
        elif "of_linear" in row:
            kind = "of the other layouts"
        elif not shape:
            kind = "of the products"
        elif "groups" in row:
            kind = f"in {row['groups']} uneven groups of {'x'.join(map(str, shape))}"
        elif shape in ODD:
            kind = f"at the odd shapes {' and '.join('x'.join(map(str, s)) for s in ODD)}"
        elif list(shape) == GPU_SHAPE:
            kind = f"at {'x'.join(map(str, shape))}"
        else:
            kind = "at {} other shapes"
            shapes.add(shape)
        kinds.setdefault(kind, []).append(row)
    return ", ".join(
        f"{sum(map(reached, some))} of {len(some)} {kind.format(len(shapes))}"
        for kind, some in kinds.items()
    )


def goals() -> str:
    """How many goals of quantizers were reached on each machine, and on a CPU of products."""
    gpus = [f"- {name}: {goals_on_a_gpu(results(file)['rows'])}." for name, file in GPUS.items()]
    aims = [row for row in results("cpu")["rows"] if row.get("goal") is not None]
    count = f"- CPU: {sum(map(reached, aims))} of {len(aims)}"
    goal = "the goal of `matmul` is .85 of `torch.mm`'s speed in float32"
    return "\n".join([*gpus, f"{count} ({goal})."])


def bench_gpu(file: str = GPU) -> str:
    """The quantizers at the largest shape."""
    result = results(file)
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
    other = [100 * row["of_linear"] for row in rows if "of_linear" in row]
    if other:
        others.append(f"into other layouts {between(other, '.0f')}% of the speed in `linear` (97)")
    rest = f"The others: {'; '.join(others)}."
    launches = [row["of_empty"] for row in result["rows"] if "of_empty" in row]
    took = f"At 1024x1024 a launch takes {between(launches, '.1f')} times as long as that of an "
    return "\n\n".join([table(header, lines), rest, f"{took}empty kernel.", where(result)])


def host() -> str:
    """The time a call takes from the CPU that launches it, where the GPU does not limit."""
    result = results(GPU)
    cases = {row["case"]: row for row in result["rows"]}
    ways = ("inference", "forward", "forward+backward")
    recipes = ("fp8_blockwise", "mxfp8", "nvfp4")
    rows = [["`nn.Linear`", *(f"{cases[f'host, nn.Linear, {way}']['us']:.0f}" for way in ways)]]
    for name in recipes:
        found = (cases[f"host, converted layer, {way}, {name}"]["us"] for way in ways)
        rows.append([f"converted, `{name}`", *(f"{took:.0f}" for took in found)])
    timed = table(["host's time for a small layer, µs", *ways], rows)
    return f"{timed}\n\n{where(result, with_copy=False)}"


def bench() -> str:
    """The CPU's quantizers, products and training steps."""
    result = results("cpu")
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
    text = (
        f"`matmul` at 2048³: {between(of_mm, '.0f')} GFLOP/s in {len(of_mm)} recipes; `torch.mm`: "
        f"{cases['torch.mm float32 2048^3']['gflops']:.0f} in float32, "
        f"{cases['torch.mm bfloat16 2048^3']['gflops']:.0f} in bfloat16. A training step of the "
        f"model above took {between(steps, '.2f')} times as long as in BF16 in this run. "
        f"torchao's `to_mx` runs at {between(peers, '.1f')}% of `memcpy`."
    )
    copy = f"memcpy {cases['memcpy']['gb_per_s']:.1f} GB/s; {where(result)}"
    return "\n\n".join([table(header, lines), text, copy])


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "support": support,
        "train": train,
        "train_gpu": train_gpu,
        "train_gpt": train_gpt,
        "train_moe": train_moe,
        "bench_gpu": bench_gpu,
        "products": products.products,
        "model": products.model,
        "fsdp": products.fsdp,
        "host": host,
        "bench": bench,
    },
    "docs/performance.md": {
        "goals": goals,
        "dense": products.dense,
        "groups": products.groups,
        "layers": products.layers,
        "experts": products.experts,
        "host_ratios": products.host,
    },
    "docs/performance/h100.md": {
        "bench_h100": partial(bench_gpu, "h100"),
        "dense_h100": partial(products.dense, "h100_gemm"),
        "groups_h100": partial(products.groups, "h100_grouped"),
        "layers_h100": partial(products.layers, "h100_gemm"),
        "experts_h100": partial(products.experts, "h100_grouped"),
        "model_h100": partial(products.model, "h100_model"),
        "fsdp_h100": partial(products.fsdp, "h100_fsdp"),
    },
}


def filled(page: str, text: str) -> str:
    """A page's text with every generated part made anew."""
    for name, make in PARTS[page].items():
        begin, end = f"<!-- begin: {name} (tools/readme.py) -->", f"<!-- end: {name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"{page}: part {name} is missing; put '{begin}' and '{end}' back")
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def main() -> None:
    """Write the pages, or say that one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for page in PARTS:
        old = (ROOT / page).read_text()
        new = filled(page, old)
        if check and old != new:
            sys.exit(f"{page} is out of date; run: .venv/bin/python tools/readme.py")
        if not check:
            (ROOT / page).write_text(new)
    if not check:
        with own_style():
            GPU_PICTURE.write_bytes(draw(results(GPU)))


if __name__ == "__main__":
    main()
