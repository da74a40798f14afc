"""Reads a results.json for `blockscale bench --from`; it may be any file, or an edited one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blockscale.cli.errors import CliError

# What a case is measured against, its share and its goal in words, and whether more is better.
MEASURES = {
    "of_copy": ("{:.0%} of copy", "≥ {:.0%}", True),
    "of_linear": ("{:.0%} of linear", "≥ {:.0%}", True),
    "of_bf16": ("{:.2f}x BF16", "≥ {:.2f}x", True),
    "of_empty": ("{:.1f}x an empty kernel", "≤ {:.0f}x", False),
    # Of the source tree's bench/run.py, which says them in the same form.
    "of_memcpy": ("{:.0%} of memcpy", "≥ {:.0%}", True),
    "of_torch_mm": ("{:.2f}x torch.mm", "≥ {:.2f}x", True),
    "of_bf16_step": ("{:.2f}x BF16's step", "≤ {:.0f}x", False),
}


def read(path: Path) -> dict[str, Any]:
    """A results.json; CliError with the reason if it is not one."""
    try:
        found = json.loads(path.read_text())
        fault = fault_of(found)
    except OSError as error:
        raise CliError(f"--from = {path} ({error.strerror}); need a file; check the path") from None
    except (ValueError, RecursionError):
        fault = "no JSON"
    if fault:
        raise CliError(
            f"--from = {path} ({fault}); need a results.json that `blockscale bench` wrote; "
            "measure again"
        )
    return dict(found)


def fault_of(found: Any) -> str:
    """What `print_tables` and `draw` need and the file lacks; empty if nothing."""
    if not isinstance(found, dict):
        return "not an object"
    where, rows = found.get("provenance"), found.get("rows")
    if tool := other_tool(found, rows):
        return f"written by {tool}"
    if not isinstance(where, dict):
        return "provenance is not an object"
    if not isinstance(rows, list):
        return "rows is not a list"
    wants = ["blockscale", "torch", "date", "commit", "gpu" if "gpu" in where else "cpu"]
    for key in wants:
        if not isinstance(where.get(key), str):
            return f"provenance: {key} is not a text"
    for key in ("copy_tb_per_s", *([] if "gpu" in where else ["threads"])):
        if not is_figure(where.get(key)):
            return f"provenance: {key} is not a number"
    for index, row in enumerate(rows):
        fault = fault_of_row(row)
        if fault:
            return f"rows[{index}]: {fault}"
    return "" if rows else "rows is empty"


def other_tool(found: dict[str, Any], rows: Any) -> str:
    """Which of the source tree's benchmarks writes files of this kind; empty if none does."""
    if "unit" in found:
        return "bench/gemm.py, grouped.py, model.py or fsdp.py"
    if isinstance(rows, list) and any(isinstance(row, dict) and "ms" in row for row in rows):
        return "bench/run.py"
    return ""


def fault_of_row(row: Any) -> str:
    """The same of one row."""
    if not isinstance(row, dict):
        return "not an object"
    if not isinstance(row.get("case"), str):
        return "case is not a text"
    measures = [key for key in MEASURES if key in row]
    optional = [key for key in ("tb_per_s", "groups") if key in row]
    for key in ("us", *measures, *optional):
        if not is_figure(row.get(key)):
            return f"{key} is not a number"
    if ("shape" in row or "of_copy" in row) and not is_shape(row.get("shape")):
        return "shape is not a list of sizes"
    if row.get("goal") is not None and not is_figure(row["goal"]):
        return "goal is not a number"
    if row.get("goal") is not None and not measures:
        return f"goal without any of {', '.join(MEASURES)}"
    return ""


def is_figure(value: Any) -> bool:
    """Whether a value can be measured and drawn: Python's JSON reader also accepts NaN and
    Infinity."""
    return type(value) in (int, float) and 0 <= value < 1e15


def is_shape(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int and v > 0 for v in value)
