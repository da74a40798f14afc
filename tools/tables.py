"""What the generated tables of the pages are made of."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockscale.cli.doctor import processor_name

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

# Files in RESULTS.
GPU, DENSE, GROUPED, MODEL = "h200", "h200_gemm", "h200_grouped", "h200_model"
FSDP = "h200_fsdp"

Row = dict[str, Any]


def results(name: str) -> Row:
    """A committed file of results."""
    found: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def between(values: Sequence[float], form: str) -> str:
    """The least and the greatest of some figures."""
    least, most = (format(value, form) for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def times(rows: Sequence[Row], ours: str, peer: str) -> list[float]:
    """How many times a peer's figure ours is, without shapes that the peer refuses."""
    return [row[ours] / row[peer] for row in rows if not isinstance(row[peer], str)]


def ratios(rows: Sequence[Row], ours: str, peer: str) -> str:
    """Their least, greatest and geometric mean. Shapes that the peer refuses are only counted."""
    found = times(rows, ours, peer)
    refused = len(rows) - len(found)
    rest = f" (which refuses {refused})" if refused else ""
    return f"{between(found, '.2f')}, mean {mean(found):.2f}{rest}"


def where(result: Row, with_copy: bool = True) -> str:
    """Machine, versions, date and commit of a run."""
    origin = result["provenance"]
    copied = with_copy and "copy_tb_per_s" in origin
    copy = f"copy {origin['copy_tb_per_s']:.2f} TB/s, " if copied else ""
    machine = origin.get("gpu") or origin.get("cpu")
    if "gpu" not in origin and "cores" in origin:
        machine += f", {origin['cores']} cores, {processor_name(origin['instruction_set'])}"
    date, (commit, changes, _) = origin["date"][:10], origin["commit"].partition("+")
    commit = commit[:12] + (" with changes" if changes else "")
    return f"{machine}, {copy}torch {origin['torch']}, {date}, commit {commit}."
