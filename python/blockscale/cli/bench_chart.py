"""bench.png: each case's share of the copy speed as a bar, with its goal, other shapes and
peers."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from blockscale.cli.bench_cases import BESIDE, Row
from blockscale.cli.output import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, PEER = COLOURS[2], "0.72"
OTHERS = (*COLOURS[3:], *COLOURS[:2], "#7F3C00", "#8000C0")  # shapes
SHAPES = (*MARKERS, "*")
# Prefixes of case names, with a heading for each group, in drawing order.
WIDE = ", float32"
GROUPS = (
    ("elementwise, PyTorch", "torch.neg", ""),
    ("quantize, along rows", "quantize/", "/axis:-1"),
    ("quantize, down columns", "quantize/", "/axis:-2"),
    ("quantize both ways in one pass", "quantize_dual/", ""),
    ("read back", ("amax/", "dequantize/", "relayout/"), ""),
    ("of FP32", ("quantize", "amax/"), WIDE),
)
SHORTER = {"scale_rounding=up,": "", "rounding=stochastic": "stochastic", "hadamard=16": "Hadamard"}


def draw(found: dict[str, Any]) -> bytes:
    """Bars for the first shape, markers for the others; nothing without a share of a copy."""
    from matplotlib.figure import Figure

    rows = [row for row in found["rows"] if "of_copy" in row]
    if not rows:
        return b""
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    main = {row["case"]: row for row in rows if tuple(row["shape"]) == shapes[0]}
    lines = arranged(main)
    figure = Figure(figsize=(11, 1.7 + 0.235 * len(lines)), dpi=130, layout="constrained")
    axes = figure.subplots()
    bars(axes, lines, main)
    for index, shape in enumerate(shapes[1:]):
        points = {row["case"]: row["of_copy"] for row in rows if tuple(row["shape"]) == shape}
        at = [(100 * points[case], y) for y, case in enumerate(lines) if case in points]
        axes.plot(
            [x for x, _ in at], [y for _, y in at], linestyle="", markerfacecolor="white",
            marker=SHAPES[index % len(SHAPES)], color=OTHERS[index % len(OTHERS)],
            markersize=5.5, markeredgewidth=1.2, label=shape_text(shape, rows), zorder=3,
        )  # fmt: skip
    finish(axes, lines, "x".join(map(str, shapes[0])), found["provenance"])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def shape_text(shape: tuple[int, ...], rows: list[Row]) -> str:
    """A shape in the legend."""
    groups = {row["groups"] for row in rows if tuple(row["shape"]) == shape and "groups" in row}
    return "x".join(map(str, shape)) + "".join(f", {count} groups" for count in groups)


def arranged(cases: dict[str, Row]) -> list[str]:
    """Names from top to bottom: headings (which are no cases), cases, peers below their case."""
    lines: list[str] = []
    for heading, begin, end in GROUPS:
        ours = [case for case in cases if case.startswith(begin) and case.endswith(end)]
        if end != WIDE:
            ours = [case for case in ours if not case.endswith(WIDE)]
        if ours:
            lines.append(heading)
        for case in ours:
            lines += [case, *(peer for peer in cases if BESIDE.get(peer) == case)]
    return lines


def label(line: str) -> str:
    """The name of a case, without what its heading says."""
    text = line.removesuffix(WIDE)
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    if line.startswith(("quantize/", "quantize_dual/")) and not line.endswith(WIDE):
        return text.partition("/")[2].partition("/axis:")[0].replace("+", " + ")
    return text.replace("/axis:-1", ", rows").replace("/axis:-2", ", columns").replace("/", " ")


def bars(axes: Axes, lines: list[str], cases: dict[str, Row]) -> None:
    """The bars with their figures, and a mark at each goal."""
    for y, line in enumerate(lines):
        row = cases.get(line)
        if row is None:
            continue
        share = 100 * row["of_copy"]
        axes.barh(y, share, height=0.78, color=PEER if line in BESIDE else OURS, zorder=2)
        inside = share > 6  # at the foot, where there are no markers
        axes.text(
            0.7 if inside else share + 0.7, y, f"{share:.0f}%", va="center", fontsize=8, zorder=4,
            color="white" if inside and line not in BESIDE else "0.1",
        )  # fmt: skip
        if row.get("goal") is not None:
            goal = 100 * row["goal"]
            axes.plot([goal, goal], [y - 0.42, y + 0.42], color="black", linewidth=2.2, zorder=5)


def finish(axes: Axes, lines: list[str], shape: str, where: dict[str, Any]) -> None:
    """Labels, legend and title."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    axes.set_yticks(range(len(lines)), [label(line) for line in lines], fontsize=8.5)
    for tick, line in zip(axes.get_yticklabels(), lines, strict=True):
        if line in (heading for heading, _, _ in GROUPS):
            tick.set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    style: dict[str, Any] = {"color": "0.4", "linewidth": 1.2, "linestyle": "--"}
    axes.axvline(100, zorder=1, **style)
    copy = Line2D([], [], label="a large copy", **style)
    axes.set_xlim(0, max(105, axes.get_xlim()[1]))
    axes.set_xlabel("bytes read and written a second, % of a large copy's")
    axes.grid(axis="x", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles: list[Any] = [Patch(color=OURS, label=f"blockscale, {shape}")]
    if any(line in BESIDE for line in lines):
        handles.append(Patch(color=PEER, label="torchao, the same data"))
    goal = Line2D([], [], color="black", linestyle="", marker="|", markersize=11)
    goal.set(markeredgewidth=2.2, label="goal")
    if any(isinstance(line, Line2D) and line.get_color() == "black" for line in axes.lines):
        handles.append(goal)
    handles += axes.get_legend_handles_labels()[0]
    handles.append(copy)
    axes.figure.legend(
        handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5
    )
    machine = where.get("gpu") or where["cpu"]
    about = f"{machine}, {copy_text(where)}, {where['date'][:10]}"
    axes.set_title(f"Quantizers: share of a large copy's speed\n{about}", fontsize=11)


def copy_text(where: dict[str, Any]) -> str:
    """The text on a run's ceiling."""
    speed = where["copy_tb_per_s"]
    return f"copy {speed:.2f} TB/s" if speed >= 1 else f"copy {1e3 * speed:.1f} GB/s"
