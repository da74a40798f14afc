"""Files and names around the command that are the user's own, and readers that go away."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from blockscale.cli import bench_chart
from blockscale.cli.bench import print_tables
from blockscale.cli.bench_read import fault_of
from blockscale.cli.files import write_atomically
from blockscale.cli.inspect import Result, as_table
from blockscale.cli.output import Output
from blockscale.cli.progress import LiveProgress
from commands import Command, refusal
from rich.console import Console
from safetensors.torch import save_file

SMALL = ["--recipes", "bf16", "--seq-len", "16", "--batch-size", "1", "--steps", "2"]
FOX = "The quick brown fox jumps over the lazy dog.\n" * 20


def test_a_run_within_its_text_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(FOX)
    for words in (
        ["--data", ".", "--out", "runs/one", *SMALL],
        ["--out", "runs/one", "--resume"],
        ["--data", ".", "--out", "two", *SMALL],
    ):
        done = Command("train", *words, cwd=tmp_path).end()
        assert (done.returncode, done.stderr) == (0, "")
    hashes = [
        json.loads((tmp_path / run / "settings.json").read_text())["data_sha256"]
        for run in ("runs/one", "two")
    ]
    assert hashes[0] == hashes[1]


def test_text_that_would_be_left_out_or_counted_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, elsewhere = tmp_path / "given", tmp_path / "elsewhere"
    for folder in (given, elsewhere):
        folder.mkdir()
        (folder / "a.txt").write_text(FOX)
    train = ["train", "--out", str(tmp_path / "run"), *SMALL, "--data", str(given)]
    assert "(given twice)" in refusal(capsys, *train, f"{given}/../given")
    link = given / "link"
    link.symlink_to(elsewhere / "a.txt")
    link.unlink()
    link.symlink_to(elsewhere)
    assert refusal(capsys, *train) == (
        f"blockscale train: --data = {link} (a link to a folder); need files and folders "
        "themselves; remove the link and give its target as another --data path"
    )
    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    assert refusal(capsys, *train) == (
        f"blockscale train: --data = {link} (a link to nothing); need files and folders "
        "themselves; remove the link, or restore its target"
    )
    assert not (tmp_path / "run").exists()


def test_files_beside_a_picture_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a user's own settings of matplotlib do not matter, nor a notebook's backend that it
    cannot find."""
    save_file({"w": torch.ones(32, 32)}, tmp_path / "a.safetensors")
    own = {".probe": "mine", "p.png.tmp": "too", "matplotlibrc": "text.usetex: True\n"}
    for name, text in own.items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "MATPLOTLIBRC": str(tmp_path / "matplotlibrc")}
    environment["MPLBACKEND"] = "a notebook's"
    longest = f"{'p' * 240}.png"
    for picture in ("p.png", longest):
        words = ["inspect", "a.safetensors", "--spec", "mxfp8", "--out", picture]
        done = subprocess.run(
            [sys.executable, "-m", "blockscale", *words],
            cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
    held = {path.name for path in tmp_path.iterdir()}
    assert held == {*own, "a.safetensors", "p.png", longest}
    assert {name: (tmp_path / name).read_text() for name in own} == own


def test_files_written_at_the_same_time_stay_apart(tmp_path: Path) -> None:
    """As by two commands with pictures in one folder."""

    def write_both(file: BinaryIO) -> None:
        file.write(b"outer")
        write_atomically(tmp_path / "inner", lambda other: other.write(b"inner"))

    write_atomically(tmp_path / "outer", write_both)
    held = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert held == {"inner": "inner", "outer": "outer"}


def test_names_are_printed_as_they_are() -> None:
    name = "model.layers.10.self_attn.q_proj :key: [b]"
    spec = "nvfp4[block=16x16,outer=false]"
    file = io.StringIO()
    console = Output(width_in_a_file=60)
    console.file = file
    console.print(as_table([Result(name, (4096, 16384), spec, 1.25e-12, 20.0, 0.0, 0.0)]))
    rows = [line.split("│")[1:-1] for line in file.getvalue().splitlines() if "│" in line]
    tensor, shape, amax, text, *_ = (
        "".join(cell.strip() for cell in c) for c in zip(*rows, strict=True)
    )
    assert "…" not in file.getvalue()
    assert tensor.replace(" ", "") == name.replace(" ", "")
    assert (shape, amax, text) == ("4096x16384", "1.25e-12", spec)


@pytest.mark.parametrize("width", [40, 60])
def test_narrow_tables_lose_nothing(width: int) -> None:
    where = {"blockscale": "0", "torch": "2", "date": "2026-01-01", "commit": "c", "gpu": "g"}
    row = {"case": "quantize/nvfp4/axis:-1", "shape": [16384, 8192], "us": 1234.5, "goal": 0.92}
    row |= {"tb_per_s": 4.211, "of_copy": 0.99}
    file = io.StringIO()
    console = Output(width_in_a_file=width, markup=True)
    console.file = file
    console.print(as_table([Result("layers.0.weight", (128, 64), "nvfp4", 2.5, 20, 0.5, 0.25)]))
    inspected = cells(file.getvalue())
    assert inspected == ["layers.0.weight", "128x64", "2.5", "nvfp4", "20.00", "50.000%", "25.000%"]
    file = console.file = io.StringIO()
    print_tables({"provenance": {**where, "copy_tb_per_s": 1.0}, "rows": [row]}, console)
    assert cells(file.getvalue()) == [row["case"], "1,234.5", "4,211", "99%ofcopy", "≥92%"]


def shown(width: int, name: str, steps: int) -> list[str]:
    """Both lines of a training's progress halfway, without the seconds left."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    progress = LiveProgress(console, 2 * steps, 0)
    progress.start(name, 0, steps)
    progress.done = steps // 2 - 1
    progress.step(steps // 2, steps, 5.5453, 12345.6)
    with console.capture() as captured:
        console.print(progress.bars.get_renderable())
    return re.sub(r"[0-9-]:[0-9-]{2}:[0-9-]{2}", "H:MM:SS", captured.get()).splitlines()


def test_progress_fits_in_a_narrow_terminal() -> None:
    assert shown(40, "bf16-seed0", 12) == [
        "all        ━     6/24            H:MM:SS",
        "bf16-seed0 ━━╸   6/12 loss 5.545 H:MM:SS",
    ]
    names = ("bf16-seed0", "fp8_blockwise-seed0", "nvfp4[keep_w=false,wgrad_x=mxfp8]-seed0")
    for name, width, steps in itertools.product(names, range(40, 80), (12, 400)):
        whole, current = shown(width, name, steps)
        assert "━" in current
        assert f"{steps // 2}/{2 * steps}" in whole
        assert current.endswith(f" {steps // 2}/{steps} loss 5.545 H:MM:SS")
        assert len(current) <= width
    assert shown(60, "fp8_blockwise-seed0", 12)[1].startswith("fp8_blockwise-seed0 ━")


def test_progress_in_80_columns() -> None:
    assert shown(80, "bf16-seed0", 12) == [
        "all                    ━━╸         6/24                             H:MM:SS left",
        "bf16-seed0             ━━━━━╸      6/12 loss 5.545  12,346 tokens/s H:MM:SS left",
    ]


def cells(table: str) -> list[str]:
    """The only row of a table, put together from its lines."""
    lines = [line.split("│")[1:-1] for line in table.splitlines() if "│" in line]
    return [
        "".join(cell.replace(" ", "") for cell in column) for column in zip(*lines, strict=True)
    ]


def test_a_reader_that_goes_away_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(FOX)
    out = tmp_path / "run"
    words = [sys.executable, "-m", "blockscale", "train", "--data", str(tmp_path / "a.txt")]
    words += ["--out", str(out), *SMALL, "--eval-every", "1"]
    reader = f"set -o pipefail; {shlex.join(words)} | true"
    done = subprocess.run(["bash", "-c", reader], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Broken pipe" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_benchmark_without_a_share_of_a_copy() -> None:
    where = {"blockscale": "0", "torch": "2", "date": "2026-01-01", "commit": "c", "gpu": "g"}
    row = {"case": "launch, empty kernel", "shape": [1024, 1024], "us": 1.0}
    found = {"provenance": {**where, "copy_tb_per_s": 1.0}, "rows": [row]}
    assert fault_of(found) == ""
    assert bench_chart.draw(found) == b""
