"""Whether a change is faster: two builds of the package by turns, case by case.

`python bench/turns.py BEFORE AFTER --only '^quantize/nvfp4'` runs `blockscale bench` in one folder
and in the other, so often that both meet the same clocks. Each holds `blockscale` with its library,
as `python/` does after `make build`; a copy made before a change is BEFORE.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from blockscale.cli.errors import Whole

Times = dict[str, list[float]]  # of a case on a shape, a median a round, in microseconds


def folder(text: str) -> Path:
    """An argparse type: a folder that holds the package and its library."""
    found = Path(text).resolve()
    if not (found / "blockscale" / "lib" / "libblockscale_torch.so").is_file():
        raise argparse.ArgumentTypeError(
            f"{text} (no blockscale/lib/libblockscale_torch.so in it); need a folder like python/ "
            "after `make build`; build it, or copy it from where it was built"
        )
    return found


def run_once(package: Path, words: list[str], times: Times) -> None:
    """One `blockscale bench` in that folder, whose package `-m` finds first; adds a time to every
    case."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "blockscale", "bench", "--out", out, *words]
        done = subprocess.run(
            command, cwd=package, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode != 0:
            sys.exit(f"{package}: {done.stdout[-2000:]}")
        rows = json.loads(Path(out, "results.json").read_text())["rows"]
    for row in rows:
        groups = f" in {row['groups']} groups" if "groups" in row else ""
        name = f"{'x'.join(map(str, row['shape']))}{groups} {row['case']}"
        times.setdefault(name, []).append(row["us"])


def table(before: Times, after: Times) -> list[str]:
    """A line for every case that both have: medians, how far the rounds lie apart, the ratio."""

    def spread(times: list[float]) -> str:
        middle = statistics.median(times)
        return f"{middle:12,.2f} ±{50 * (max(times) - min(times)) / middle:5.1f}%"

    lines = [f"{'µs':70} {'before':>20} {'after':>20}   after / before"]
    for name in before:
        if name in after:
            ratio = statistics.median(after[name]) / statistics.median(before[name])
            lines.append(f"{name:70} {spread(before[name])} {spread(after[name])}   {ratio:.3f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=folder, metavar="BEFORE")
    parser.add_argument("after", type=folder, metavar="AFTER")
    parser.add_argument("--rounds", type=Whole(1).parse, default=3, help="of both (default 3)")
    parser.add_argument("--only", metavar="REGEX", help="as that of `blockscale bench`")
    parser.add_argument("--shape", action="append", default=[], metavar="RxC", help="likewise")
    parser.add_argument("--device", metavar="NAME", help="likewise")
    given = parser.parse_args()
    words = [word for shape in given.shape for word in ("--shape", shape)]
    for name in ("only", "device"):
        if (value := getattr(given, name)) is not None:
            words += [f"--{name}", value]
    before: Times = {}
    after: Times = {}
    for _ in range(given.rounds):
        run_once(given.before, words, before)
        run_once(given.after, words, after)
    print("\n".join(table(before, after)))


if __name__ == "__main__":
    main()
