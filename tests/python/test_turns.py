"""bench/turns.py compares two builds of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python"


def turns(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "bench" / "turns.py", *words]
    return subprocess.run(command, text=True, capture_output=True)


def test_each_folder_is_measured_with_its_own_package(tmp_path: Path) -> None:
    """`after` has a case less, by its name: only those that both have are compared."""
    after = tmp_path / "after"
    shutil.copytree(PACKAGE, after, ignore=shutil.ignore_patterns("__pycache__"))
    cases = after / "blockscale" / "cli" / "bench_cases.py"
    cases.write_text(cases.read_text().replace('name = f"amax/', 'name = f"amax/of another, '))
    words = ["--device", "cpu", "--shape", "40x64", "--only", "mxfp8/axis|^amax", "--rounds", "1"]
    done = turns(PACKAGE, after, *words)
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["µs", "before", "after", "after", "/", "before"]
    names = [line.split()[1] for line in lines]
    assert names == ["quantize/mxfp8/axis:-1", "quantize/mxfp8/axis:-2"]
    for line in lines:
        shape, _, before, _, _, now, _, _, ratio = line.replace("±", "± ").split()
        assert shape == "40x64"
        times = [float(word.replace(",", "")) for word in (before, now)]
        assert abs(float(ratio) - times[1] / times[0]) < 0.01 * float(ratio) + 0.001


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    done = turns(tmp_path, PACKAGE)
    assert done.returncode == 2
    assert "argument BEFORE" in done.stderr
    assert "need a folder like python/" in done.stderr
    done = turns(PACKAGE, PACKAGE, "--rounds", "0")
    assert done.returncode == 2
    assert "argument --rounds: 0; need a whole number from 1 to 2^63 - 1" in done.stderr
    words = ("--device", "cpu", "--shape", "40x64", "--only", "of no case")
    done = turns(PACKAGE, PACKAGE, *words)
    assert done.returncode == 1
    assert "--only = of no case (found in no case's name)" in done.stderr
