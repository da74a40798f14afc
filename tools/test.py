"""Run every test, C++ and Python, and end in one line: N passed, N failed, N skipped.

A runner that dies without a report, that reports success and no test, or whose exit status
contradicts its report, counts as one failure: nothing is lost silently.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Count:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped
        )

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def count_gtest(report: Path) -> Count:
    """What a GoogleTest JSON report says; a disabled test counts as skipped."""
    total = Count()
    for suite in json.loads(report.read_text())["testsuites"]:
        for test in suite["testsuite"]:
            if "failures" in test:
                total += Count(failed=1)
            elif test["result"] == "COMPLETED":
                total += Count(passed=1)
            else:
                total += Count(skipped=1)
    return total


def count_pytest(report: Path) -> Count:
    """What a JUnit report of pytest says; errors in setup or collection are failures."""
    total = Count()
    for case in ET.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            total += Count(failed=1)
        elif case.find("skipped") is not None:
            total += Count(skipped=1)
        else:
            total += Count(passed=1)
    return total


def read(report: Path, count: Callable[[Path], Count]) -> Count | None:
    """What a report says; none where there is no whole one."""
    try:
        return count(report)
    except (OSError, ValueError, KeyError, ET.ParseError):
        return None


def verdict(name: str, status: int, count: Count | None, shards: int = 1) -> Count:
    """The count to believe, given the exit status of the runner; one shard of many may be empty."""
    if count is None:
        print(f"{name}: exit status {status} and no readable report", file=sys.stderr)
        return Count(failed=1)
    if count == Count() and shards == 1:
        print(f"{name}: ran no test", file=sys.stderr)
        return Count(failed=1)
    if status != 0 and count.failed == 0:
        print(f"{name}: exit status {status}, though no test failed", file=sys.stderr)
        return count + Count(failed=1)
    return count


def run_gtest(binary: Path, folder: Path, shards: int, under: Sequence[str] = ()) -> Count:
    """The binary's tests in as many processes as `shards`, `under` a program such as an emulator;
    what each says is printed whole."""
    print(f"C++ tests: {binary}", flush=True)
    if not binary.exists():
        return verdict("C++ tests", 127, None)
    running = []
    for shard in range(shards):
        report, log = (folder / f"{binary.name}.{shard}.{end}" for end in ("json", "log"))
        environment = {"GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)}
        with log.open("w") as output:
            process = subprocess.Popen(
                [*under, binary, "--gtest_brief=1", f"--gtest_output=json:{report}"],
                cwd=ROOT, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        running.append((process, report, log))
    total = Count()
    for process, report, log in running:
        status = process.wait()
        print(log.read_text(errors="replace"), end="", flush=True)
        total += verdict("C++ tests", status, read(report, count_gtest), shards)
    return total if total != Count() else verdict("C++ tests", 0, total)


def run_pytest(report: Path, workers: int) -> Count:
    """The Python tests, a file to a worker, since fixtures of a module are costly."""
    print("Python tests: tests/python", flush=True)
    options = ["-n", str(workers), "--dist=loadfile", f"--junitxml={report}"]
    status = subprocess.call([sys.executable, "-m", "pytest", *options], cwd=ROOT)
    return verdict("Python tests", status, read(report, count_pytest))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--gtest", type=Path, action="append", default=[], metavar="BINARY", help="C++ test binary"
    )
    parser.add_argument("--pytest", action="store_true", help="run the Python tests")
    under = "a program that runs the C++ tests, such as an emulator"
    parser.add_argument("--under", type=shlex.split, default=[], metavar="COMMAND", help=under)
    options = parser.parse_args()

    cores = os.cpu_count() or 1
    total = Count()
    with tempfile.TemporaryDirectory() as folder:
        for binary in options.gtest:
            total += run_gtest(binary, Path(folder), cores, options.under)
        if options.pytest:
            total += run_pytest(Path(folder, "python.xml"), min(cores, 8))
    print(total, flush=True)
    return 0 if total.failed == 0 and total.passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
