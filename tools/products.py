"""Tables of products and layers on a GPU: in short for the README, case by case, beside what the
machine could do, for docs/performance.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import blockscale as bs
from tables import (
    DENSE,
    FSDP,
    GPU,
    GROUPED,
    MODEL,
    Row,
    between,
    mean,
    ratios,
    results,
    table,
    times,
    where,
)

FLOPS_A_CYCLE = 8192  # of a multiprocessor's FP8 tensor cores: 132 of them at 1.83 GHz have 1979e12


# The recipes of layers, in `linear` and over experts, as they are called in the tables.
LAYERS = (
    ("fp8_blockwise", "`fp8_blockwise`"),
    ("fp8_blockwise squares", '`fp8_blockwise` with `wgrad_x="fp8_128x128"`'),
    ("mxfp4", "`mxfp4`"),
)
EXPERTS = (*LAYERS, ("nvfp4", "`nvfp4`"))
# Suffix of a column's name, the peer's column, and the words for it.
WAYS = (
    ("", "bf16", ""),
    (" ahead", "bf16", ", weight quantized ahead"),
    (" bias", "bf16 bias", ", with a bias"),
)


def rows_of_kind(result: Row, kind: str) -> list[Row]:
    """The rows whose kind starts with `kind`."""
    return [row for row in result["rows"] if row["kind"].startswith(kind)]


def products() -> str:
    """The GEMMs and layers of three files beside cuBLASLt and PyTorch's BF16, by kind."""
    single, grouped = results(DENSE), results(GROUPED)
    by_name = results(GPU)
    decoded = {row["case"]: row for row in by_name["rows"]}
    lines = []
    for kind, what in (
        ("fprop", "FP8, weight in 128x128 blocks (forward, gradient of x)"),
        ("wgrad", "FP8, both in 1x128 blocks (gradient of the weight)"),
        ("few rows", "FP8, 1 to 128 rows"),
    ):
        rows = rows_of_kind(single, kind)
        speed = between([row["blockscale"] for row in rows], ",.0f")
        peers = [ratios(rows, "blockscale", peer) for peer in ("cublaslt_fp8", "bf16")]
        lines.append([f"{what}, {len(rows)} shapes", speed, *peers])
    rows = rows_of_kind(single, "layer")
    for recipe, named in LAYERS:
        for after, peer, what in WAYS:
            ours = recipe + after
            if ours not in rows[0]:
                continue
            speed = between([row[ours] for row in rows], ",.0f")
            what = f"`linear` in {named}, forward and backward{what}, {len(rows)} shapes"
            lines.append([what, speed, "", ratios(rows, ours, peer)])
    for kind, what in (("rows", "along the rows"), ("contraction", "along the contraction axis")):
        rows = rows_of_kind(grouped, kind)
        speed = between([row["blockscale"] for row in rows], ",.0f")
        what = f"FP8, groups {what}, even and ragged, {len(rows)} cases"
        lines.append([what, speed, "", ratios(rows, "blockscale", "bf16")])
    rows = rows_of_kind(grouped, "layer")
    for recipe, named in EXPERTS:
        for after, _, what in WAYS:
            ours = f"{recipe}{after} both"
            if ours not in rows[0]:
                continue
            what = f"`grouped_linear` in {named}, forward and backward{what}, {len(rows)} shapes"
            lines.append([what, "", "", ratios(rows, "bf16 both", ours)])  # of times
    named_cases = [case for case in decoded if case.startswith(("matmul ", "linear "))]
    for case in named_cases:
        row = decoded[case]
        aim = f" (goal {row['goal']:.2f})" if row.get("goal") else ""
        lines.append([f"`{case}`", "", "", f"{row['of_bf16']:.2f}{aim}"])
    header = ["product", "TFLOP/s", "of cuBLASLt's FP8", "of PyTorch's BF16"]
    origins = {"Products": single, "groups": grouped, f"from `{named_cases[0]}` on": by_name}
    return "\n\n".join([table(header, lines), slower_experts(grouped), origin(origins)])


def slower_experts(result: Row) -> str:
    """At how many shapes experts are slower than in BF16."""
    rows = rows_of_kind(result, "layer")

    def count(recipe: str) -> int:
        return sum(row[f"{recipe} both"] > row["bf16 both"] for row in rows)

    now = [f"{count(ours)} in {named}" for ours, named in EXPERTS]
    ahead = [str(count(f"{ours} ahead")) for ours, _ in EXPERTS]
    return (
        f"Of {len(rows)} shapes of experts, this many are slower than in BF16, forward and "
        f"backward: with everything quantized in each call, {listed(now)}; with the weight "
        f"quantized ahead, {listed(ahead)}."
    )


def listed(items: Sequence[str]) -> str:
    """As a sentence has them."""
    return f"{', '.join(items[:-1])} and {items[-1]}"


def origin(of: dict[str, Row]) -> str:
    """Machine and versions of runs once, where they are the same; the date and commit of each."""
    told = {what: where(result, with_copy=False) for what, result in of.items()}
    machine, *others = dict.fromkeys(text.rsplit(", ", 2)[0] for text in told.values())
    if others:
        return " ".join(f"{what}: {text}" for what, text in told.items())
    runs = (f"{what}: {text.removeprefix(f'{machine}, ')[:-1]}" for what, text in told.items())
    return f"{machine}. {'; '.join(runs)}."


# --- goals ---------------------------------------------------------------------------------------


class Aim(NamedTuple):
    """A goal, and the figure measured for it."""

    what: str
    reached: float
    goal: float
    most: bool = False  # the goal is the most that it may be, not the least
    digits: int = 2

    @property
    def hit(self) -> bool:
        return self.reached <= self.goal if self.most else self.reached >= self.goal

    def __str__(self) -> str:
        shown = f"{self.reached:.{self.digits}f}"
        return f"{self.what} {shown if self.hit else f'**{shown}**'} ({self.goal:g})"


def of_dense(result: Row) -> list[Aim]:
    """Of the FP8 GEMM."""

    def beside(kind: str, peer: str) -> list[float]:
        return times(rows_of_kind(result, kind), "blockscale", peer)

    forward = beside("fprop", "cublaslt_fp8")
    few = [*beside("few rows", "cublaslt_fp8"), *beside("few rows", "bf16")]
    return [
        Aim("forward, of cuBLASLt's speed, geometric mean", mean(forward), 1.16, digits=3),
        Aim("least", min(forward), 1.05, digits=3),
        Aim("of BF16's, geometric mean", mean(beside("fprop", "bf16")), 1.8),
        Aim(
            "gradient of the weight, of cuBLASLt's, geometric mean",
            mean(beside("wgrad", "cublaslt_fp8")),
            1.2,
            digits=3,
        ),
        Aim("few rows, of the better of both, least", min(few), 1),
    ]


def of_groups(result: Row) -> list[Aim]:
    """Of products over groups of rows."""
    even, ragged = rows_of_kind(result, "rows, even"), rows_of_kind(result, "rows, ragged")
    pairs = zip(even, ragged, strict=True)
    slower = [100 * (1 - b["blockscale"] / a["blockscale"]) for a, b in pairs]
    return [
        Aim(
            "even groups, of BF16's, geometric mean", mean(times(even, "blockscale", "bf16")), 2.05
        ),
        Aim("ragged ones, percent slower, most", max(slower), 5, most=True, digits=0),
    ]


def of_layers(result: Row) -> list[Aim]:
    """Of `linear`, everything quantized in each call."""
    found = times(rows_of_kind(result, "layer"), "fp8_blockwise", "bf16")
    return [Aim("`linear` forward and backward, of BF16's, least", min(found), 1.65)]


def of_experts(result: Row) -> list[Aim]:
    """Of `grouped_linear`, of which w is quantized once before."""
    found = [
        times(rows_of_kind(result, "layer"), f"bf16 {way}", f"fp8_blockwise ahead {way}")
        for way in ("forward", "both")
    ]
    return [Aim("experts with w quantized ahead, of BF16's, least", min(map(min, found)), 1)]


def of_host(result: Row) -> list[Aim]:
    """Of what the host takes in whichever recipe takes longest, as multiples of PyTorch's time."""
    calls = {row["case"]: row for row in result["rows"]}

    def beside(what: str) -> float:
        recipes = ("fp8_blockwise", "mxfp8", "nvfp4")
        return max(1 / float(calls[f"host, {what}, forward, {n}"]["of_bf16"]) for n in recipes)

    return [
        Aim(
            "host of a layer's forward, of `nn.Linear`'s, most",
            beside("converted layer"),
            2,
            most=True,
        ),
        Aim("host of `linear`, of `F.linear`'s, most", beside("linear"), 1.5, most=True),
    ]


def told(aims: Sequence[Aim]) -> str:
    """Aims in one sentence."""
    return f"Reached (goal): {'; '.join(map(str, aims))}."


# --- case by case --------------------------------------------------------------------------------


def shape_of(row: Row) -> str:
    """Its extents, as far as it has them."""
    extents = ("groups", "rows", "m", "n", "k")
    return ", ".join(str(row[extent]) for extent in extents if extent in row)


def stored(spec: str) -> float:
    """Bytes an element: its code and its share of a scale."""
    s = bs.spec(spec)
    return 1 + s.scale_bytes / math.prod(s.block)


def bytes_of(row: Row) -> float:
    """What a product must read and write: both operands, and BF16 results or FP32 ones of weights'
    gradients."""
    n, k = int(row["n"]), int(row["k"])
    kind, groups = row["kind"].partition(",")[0], int(row.get("groups", 1))
    lines, square = stored("fp8_1x128"), stored("fp8_128x128")
    if kind == "contraction":  # T rows of dy [T, N] and of x [T, K]; a gradient for each group
        return int(row["rows"]) * (n + k) * lines + 4 * groups * n * k
    m = int(row["rows" if kind == "rows" else "m"])
    if kind == "wgrad":
        return (m + n) * k * lines + 4 * m * n
    return m * k * lines + groups * n * k * square + 2 * m * n


def against_roofline(result: Row, row: Row) -> list[str]:
    """Work, bytes, the speed in a burst; then the sustained speed, the clock it comes to, and what
    the tensor cores could do at that clock, or the memory, if that is less."""
    work = 2 * row["rows" if "rows" in row else "m"] * row["n"] * row["k"]
    machine = result["provenance"]
    tensor = machine["multiprocessors"] * FLOPS_A_CYCLE * row["clock_mhz"] / 1e6
    memory = work / bytes_of(row) * machine["copy_tb_per_s"]
    limit = min(tensor, memory)
    return [
        f"{work / 1e9:,.1f}" if work < 1e10 else f"{work / 1e9:,.0f}",
        f"{bytes_of(row) / 1e6:,.0f}",
        f"{row['blockscale']:,.0f}",
        f"{row['sustained']:,.0f}",
        f"{row['clock_mhz'] / 1e3:.2f}",
        f"{limit:,.0f}{'' if tensor < memory else ' (memory)'}",
        f"{row['sustained'] / limit:.0%}",
    ]


WORK = ["GFLOP", "MB", "TFLOP/s", "sustained", "GHz", "roofline", "of it"]


def dense(file: str = DENSE) -> str:
    """The FP8 GEMM, one matrix by one."""
    result = results(file)
    names = {"fprop": "forward", "wgrad": "gradient of the weight", "few rows": "few rows"}
    lines = []
    for row in result["rows"]:
        if row["kind"] not in names:
            continue
        peers = []
        for peer in ("cublaslt_fp8", "bf16"):
            refused = isinstance(row[peer], str)
            peers.append("refused" if refused else f"{row['blockscale'] / row[peer]:.2f}")
        lines.append([names[row["kind"]], shape_of(row), *against_roofline(result, row), *peers])
    header = ["product", "M, N, K", *WORK, "x cuBLASLt's FP8", "x BF16"]
    return "\n\n".join([table(header, lines), told(of_dense(result)), where(result)])


def groups(file: str = GROUPED) -> str:
    """Products over groups, beside PyTorch's grouped GEMM in BF16."""
    result = results(file)
    lines = []
    for row in result["rows"]:
        if "blockscale" not in row:
            continue
        ratio = f"{row['blockscale'] / row['bf16']:.2f}"
        lines.append([row["kind"], shape_of(row), *against_roofline(result, row), ratio])
    header = ["groups along", "G, T, N, K", *WORK, "x BF16"]
    return "\n\n".join([table(header, lines), told(of_groups(result)), where(result)])


def layers(file: str = DENSE) -> str:
    """`linear` forward and backward, everything quantized in each call or the weight ahead."""
    result = results(file)
    rows = rows_of_kind(result, "layer")
    columns = {
        "fp8_blockwise": "FP8 (x BF16)",
        "fp8_blockwise ahead": "W ahead",
        "fp8_blockwise squares": "x in squares",
        "fp8_blockwise squares ahead": "W ahead",
        "mxfp4": "MXFP4",
        "mxfp4 ahead": "W ahead",
    }
    lines = []
    for row in rows:
        ours = [f"{row[name]:,.0f} ({row[name] / row['bf16']:.2f})" for name in columns]
        lines.append([shape_of(row), f"{row['bf16']:,.0f}", *ours])
    header = ["M, N, K", "BF16", *columns.values()]
    text = [table(header, lines), told(of_layers(result))]
    if "bf16 lasting" in rows[0]:
        said = [
            f"{named} {between(times(rows, f'{name} lasting', 'bf16 lasting'), '.2f')}"
            for name, named in (
                ("fp8_blockwise", "FP8"),
                ("fp8_blockwise ahead", "with W ahead"),
                ("fp8_blockwise squares", "x in squares"),
                ("mxfp4", "MXFP4"),
            )
        ]
        text.append("Sustained for half a second, of BF16: " + ", ".join(said) + ".")
    return "\n\n".join([*text, where(result)])


def experts(file: str = GROUPED) -> str:
    """`grouped_linear`, forward / forward and backward."""
    result = results(file)
    ways = ("forward", "both")
    lines = []
    short = {
        "fp8_blockwise": "FP8, µs (x BF16)",
        "fp8_blockwise squares": "x in squares",
        "mxfp4": "MXFP4",
        "nvfp4": "NVFP4",
    }
    for row in rows_of_kind(result, "layer"):
        line = [shape_of(row), " / ".join(f"{row[f'bf16 {way}']:,.0f}" for way in ways)]
        for recipe in short:
            for ahead in ("", " ahead"):
                name = recipe + ahead
                took = " / ".join(f"{row[f'{name} {way}']:,.0f}" for way in ways)
                speedups = " / ".join(f"{row[f'bf16 {w}'] / row[f'{name} {w}']:.2f}" for w in ways)
                line.append(f"{took} ({speedups})")
        lines.append(line)
    header = ["G, T, N, K", "BF16, µs"]
    for recipe in short:
        header += [short[recipe], "w ahead"]

    def faster(name: str) -> str:
        counts = (
            sum(row[f"{name} {way}"] < row[f"bf16 {way}"] for row in rows_of_kind(result, "layer"))
            for way in ways
        )
        return " and ".join(map(str, counts))

    reached = (
        f"Faster than BF16, of {len(lines)}, forward and with backward: FP8 with w quantized ahead "
        f"{faster('fp8_blockwise ahead')}, in each call {faster('fp8_blockwise')}; "
        f"MXFP4 {faster('mxfp4 ahead')}, and {faster('mxfp4')}."
    )
    text = [table(header, lines), reached, told(of_experts(result)), where(result)]
    return "\n\n".join(text)


def host() -> str:
    """The host's time for small layers as multiples of PyTorch's."""
    result = results(GPU)
    cases = {row["case"]: row for row in result["rows"] if row["case"].startswith("host, ")}
    lines = []
    for recipe in ("fp8_blockwise", "mxfp8", "nvfp4"):
        line = [f"`{recipe}`"]
        for way in ("inference", "forward", "forward+backward"):
            line.append(f"{1 / cases[f'host, converted layer, {way}, {recipe}']['of_bf16']:.2f}")
        for ahead in ("", ", weight ahead"):
            line.append(f"{1 / cases[f'host, linear, forward, {recipe}{ahead}']['of_bf16']:.2f}")
        lines.append(line)
    header = ["x PyTorch's time", "layer, inference", "forward", "forward and backward"]
    header += ["`linear`, forward", "weight ahead"]
    return "\n\n".join([table(header, lines), told(of_host(result)), where(result)])


def model(name: str = MODEL) -> str:
    """A training step of a model in every recipe: time, and memory besides parameters."""
    result = results(name)
    by_way = {(row["model"], row["compiled"]): row for row in result["rows"]}
    lines = []
    said = dict(LAYERS)
    for variant, row in ((key[0], row) for key, row in by_way.items() if key[1]):
        eager = by_way.get((variant, False))
        line = [said.get(variant, f"`{variant}`"), f"{row['ms']:.1f}", f"{row['tokens_per_s']:,}"]
        line += [f"{row['x_bf16']:.2f}", f"{row['gb_held']:.2f}", f"{row['gb_most']:.2f}"]
        lines.append([*line, "" if eager is None else f"{eager['ms']:.1f} ({eager['x_bf16']:.2f})"])
    header = ["compiled", "ms", "tokens/s", "x BF16", "GB kept for the backward", "GB at most"]
    made = table([*header, "eager, ms (x BF16)"], lines)
    return f"{made}\n\n{where(result, with_copy=False)}"


def fsdp(name: str = FSDP) -> str:
    """A training step under FSDP2, for each number of tokens a rank."""
    result = results(name)
    sizes = sorted({row["tokens"] for row in result["rows"]}, reverse=True)
    of_case: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(result["rows"], key=lambda row: -row["tokens"]):
        of_case.setdefault((row["model"], row["gathers"]), []).append(row)
    said = dict(LAYERS)
    lines = []
    for (variant, gathers), rows in of_case.items():
        line = [said.get(variant, f"`{variant}`"), gathers]
        for row in rows:
            line += [f"{row['ms']:.1f} ({row['x_bf16']:.2f})"]
            line += [f"{row['gb_held']:.2f}, {row['gb_most']:.2f}"]
        lines.append(line)
    header = ["compiled", "gathered"]
    for tokens in sizes:
        header += [f"{tokens:,} tokens a rank, ms (x BF16)", "GB kept, GB at most"]
    ranks = result["rows"][0]["ranks"]
    return f"{table(header, lines)}\n\n{ranks} ranks; {where(result, with_copy=False)}"
