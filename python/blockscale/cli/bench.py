"""Measure the quantizers on this machine against the speed of a large copy, beside torchao where it
is installed: a table, results.json and bench.png. Every answer is checked before it is timed: on a
GPU against the CPU, bit for bit."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import blockscale as bs
from blockscale._errors import counted
from blockscale.cli import bench_cases, bench_run
from blockscale.cli.bench_cases import Row, Shape, WrongAnswer
from blockscale.cli.bench_chart import copy_text, draw
from blockscale.cli.bench_read import MEASURES, read
from blockscale.cli.errors import CliError, Failure, device_name, out_of_memory, path_text
from blockscale.cli.files import check_writable, make_folder, remove_empty, write_json
from blockscale.cli.output import Output, write_picture
from blockscale.cli.provenance import provenance

LIMIT = 1 << 31  # elements of an input; three inputs are held


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    where = "cpu or cuda (default: cuda where it can be used)"
    add("--device", type=device_name, metavar="NAME", help=where)
    add(
        "--shape", action="append", type=shape, metavar="RxC",
        help="rows x columns, or ExRxC for a batch of E; may be repeated (default: large, odd and "
        "batched ones)",
    )  # fmt: skip
    add(
        "--only", type=pattern, metavar="REGEX",
        help="the cases whose names it is found in, such as '^quantize/nvfp4' (default: all)",
    )  # fmt: skip
    out = "new folder, or one without results.json (default runs/bench-<date>-<time>)"
    add("--out", type=path_text, metavar="FOLDER", help=out)
    add(
        "--from", dest="source", type=path_text, metavar="results.json",
        help="measure nothing; print and draw an earlier run: this file, or its folder (default "
        "--out: its folder)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measures or reads, then prints and draws."""
    console = Output(width_in_a_file=120, markup=True)
    if args.source is not None:
        refuse_with_source(args)
        if Path(args.source).is_dir():
            args.source = str(Path(args.source) / "results.json")
        found = read(Path(args.source))
        folder = Path(args.out or Path(args.source).parent)
    else:
        folder = Path(args.out or time.strftime("runs/bench-%Y%m%d-%H%M%S"))
        refuse_earlier_run(folder)
        device = args.device or ("cpu" if why_no_cuda() else "cuda")
        check_device(device)
    try:
        made = make_folder(folder)
    except OSError as error:
        raise CliError(
            f"--out = {folder} ({error.strerror}); need a folder that can be made; choose another"
        ) from None
    try:
        if args.source is None:
            check_writable("--out", folder)
            found = measure(device, args.shape, console, args.only)
        written = write_and_print(folder, found, args.source, console)
    finally:
        remove_empty(made)
    console.print(f"wrote {written} to {folder}", highlight=False, markup=False, soft_wrap=True)
    return 0


def refuse_with_source(args: argparse.Namespace) -> None:
    """CliError for options of a measurement together with --from."""
    for name in ("device", "shape", "only"):
        if getattr(args, name) is not None:
            raise CliError(
                f"--{name} with --from; need one or the other, nothing is measured again; "
                f"leave --{name} out"
            )


def refuse_earlier_run(folder: Path) -> None:
    """CliError if the figures of an earlier run would be replaced."""
    earlier = folder / "results.json"
    if earlier.exists():
        raise CliError(
            f"--out = {folder} (holds results.json); need a folder without an earlier run; choose "
            f"another, or print that run by --from {shlex.quote(str(earlier))}"
        )


def write(path: Path, found: dict[str, Any]) -> None:
    """results.json, whole or not at all."""
    write_json(path, found, indent=1)


def write_and_print(
    folder: Path, found: dict[str, Any], source: str | None, console: Console
) -> str:
    """Writes results.json, unless `source` is one, and bench.png. Always prints the tables: a full
    disk must not cost the figures. Returns what is written."""
    results = str(folder / "results.json") if source is None else source
    try:
        if source is None:
            write(Path(results), found)
        again = shlex.join(["blockscale", "bench", "--from", results, "--out", str(folder)])
        remedy = f"when that is mended, draw it with: {again}"
        drawn = write_picture(folder / "bench.png", lambda: draw(found), remedy)
    finally:
        print_tables(found, console)
    files = ["results.json"] * (source is None) + ["bench.png"] * drawn
    return " and ".join(files) or "no picture, as nothing is a share of a copy,"


def shape(text: str) -> Shape:
    """An argparse type: 16384x8192 or 8x2048x7168."""
    parts = text.lower().split("x")
    sizes = tuple(int(part) for part in parts if part.isdecimal() and part.isascii())
    good = len(sizes) == len(parts) and len(sizes) in (2, 3) and all(sizes)
    if not good or math.prod(sizes) >= LIMIT:
        raise argparse.ArgumentTypeError(
            f"{text}; need rows x columns such as 16384x8192, or matrices x rows x columns, of "
            "fewer than 2^31 elements; leave the option out for its default"
        )
    return sizes


def pattern(text: str) -> re.Pattern[str]:
    """An argparse type: a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{text} ({error}); need a regular expression; write \\[ and \\+ for [ and +"
        ) from None


def why_no_cuda() -> str:
    """Why nothing can be measured on a GPU here; empty if it can."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    reason: str = next(b["reason"] for b in bs.describe()["backends"] if b["name"] == "cuda")
    return reason


def check_device(device: str) -> None:
    """CliError unless cases can run there."""
    if device == "cuda" and (reason := why_no_cuda()):
        raise CliError(
            f"--device = cuda ({reason}); need a GPU that this build has kernels for; use --device "
            "cpu, or see `blockscale doctor`"
        )


def measure(
    device: str,
    shapes: Sequence[Shape] | None,
    console: Console,
    only: re.Pattern[str] | None = None,
) -> dict[str, Any]:
    """Measure; returns the contents of results.json."""
    only = only or re.compile("")  # matches everything
    default = bench_cases.GPU_SHAPES if device == "cuda" else bench_cases.CPU_SHAPES
    load = os.getloadavg()[0]
    if device == "cpu" and load > 0.5 * (os.cpu_count() or 1):
        console.print(
            f"note: load average {load:.1f} on {os.cpu_count()} cores; other processes share the "
            "machine, and the figures come out low",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    with console.status("") as status:

        def say(text: str) -> None:
            if text.startswith("note: "):
                console.print(text, highlight=False, markup=False, soft_wrap=True)
            else:
                status.update(escape(text))

        try:
            copy, rows = bench_run.run(device, shapes or default, say, only.search)
        except WrongAnswer as error:
            raise Failure(f"{error}; nothing is written") from None
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise Failure(
                f"--shape (out of memory on {device}); need room for {bench_cases.INPUTS} inputs "
                "and what becomes of them; give a smaller --shape"
            ) from None
    if not rows:
        raise CliError(
            f"--only = {only.pattern} (found in no case's name); need some case; names are those "
            "of the table, such as quantize/fp8_1x128/axis:-1"
        )
    where = provenance(device) | {"load_average": load, "copy_tb_per_s": copy}
    return {"provenance": where, "rows": rows}


def measure_of(row: Row) -> str | None:
    """The one of MEASURES that a case has, if any."""
    return next((name for name in MEASURES if name in row), None)


def share(row: Row) -> str:
    """How a case compares with what it is measured against."""
    name = measure_of(row)
    return MEASURES[name][0].format(row[name]) if name else ""


def goal(row: Row) -> str:
    """The goal of a case, as text."""
    name = measure_of(row)
    return MEASURES[name][1].format(row["goal"]) if name and row.get("goal") is not None else ""


def reached(row: Row) -> bool:
    """Whether a case with a goal has reached it."""
    name = measure_of(row)
    assert name is not None
    return bool(row[name] >= row["goal"] if MEASURES[name][2] else row[name] <= row["goal"])


def origin(where: dict[str, Any]) -> str:
    """Machine, versions, date and commit of a run, in one line."""
    machine = where.get("gpu") or f"{where['cpu']}, {counted(where['threads'], 'thread')}"
    parts = [
        machine,
        copy_text(where),
        f"blockscale {where['blockscale']}",
        f"torch {where['torch']}",
        where["date"][:10],
    ]
    if where["commit"]:
        parts.append(f"commit {where['commit'][:12]}{'+' if '+' in where['commit'] else ''}")
    return ", ".join(parts)


def print_tables(found: dict[str, Any], console: Console) -> None:
    """One table per shape, and one for cases without a shape."""
    groups: dict[str, list[Row]] = {}
    for row in found["rows"]:
        groups.setdefault("x".join(map(str, row.get("shape", ["other"]))), []).append(row)
    for title, rows in groups.items():
        table = Table(title=title)
        table.add_column("case", overflow="fold")
        for heading in ("µs", "GB/s", "share", "goal"):
            table.add_column(heading, justify="right", overflow="fold")
        for row in rows:
            style = "" if row.get("goal") is None else "green" if reached(row) else "yellow"
            speed = f"{1e3 * row['tb_per_s']:,.4g}" if "tb_per_s" in row else ""
            cells = (
                f"{row['us']:,.1f}",
                speed,
                share(row),
                f"[{style}]{goal(row)}" if style else "",
            )
            table.add_row(escape(row["case"]), *cells)
        console.print(table)
    where = origin(found["provenance"])
    console.print(where, highlight=False, markup=False, soft_wrap=True)
