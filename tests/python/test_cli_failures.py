"""What the command says and leaves when disk, memory or output fail: one line, exit 1."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from blockscale.cli import trainer
from blockscale.cli.errors import out_of_memory
from blockscale.cli.main import main
from commands import Command, Done, refusal
from safetensors.torch import save_file

H200 = Path(__file__).resolve().parents[2] / "bench" / "results" / "h200.json"
SMALL = ["--recipes", "bf16", "--seq-len", "16", "--batch-size", "1", "--steps", "4"]


def blockscale(*words: str, limit: int | None = None) -> Done:
    return Command(*words, limit=limit).end()


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    return str(path)


def names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    ("every", "file"), [("2", "bf16-seed0.pt"), ("4", "bf16-seed0.safetensors")]
)
def test_a_full_disk_at_a_checkpoint(every: str, file: str, text: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["train", "--out", str(out), "--data", text, *SMALL, "--checkpoint-every", every]
    done = blockscale(*words, limit=5_000_000)
    assert (done.returncode, done.stderr) == (
        1,
        f"blockscale train: {out / 'checkpoints' / file}: File too large; the run is kept up to "
        "its last checkpoint; when that is mended, continue with: blockscale train --out "
        f"{out} --resume\n",
    )
    assert names(out) == ["metrics.jsonl", "settings.json"]
    assert blockscale("train", "--out", str(out), "--resume").returncode == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train_loss" in row] == [1, 2, 3, 4]


def test_a_full_disk_at_a_metric(text: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["train", "--out", str(out), "--data", text, *SMALL, "--steps", "60"]
    done = blockscale(*words, limit=2_000)  # which the settings fit into
    line = f"blockscale train: {out / 'metrics.jsonl'}: File too large; the run is kept"
    assert done.returncode == 1
    assert done.stderr.startswith(line)


def test_a_full_disk_at_the_report(text: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert blockscale("train", "--out", str(out), "--data", text, *SMALL).returncode == 0
    done = blockscale("train", "--out", str(out), "--resume", limit=1000)
    assert (done.returncode, done.stderr) == (
        1,
        f"blockscale train: {out / 'report.md'}: File too large; all is trained; when that is "
        f"mended, write the report with: blockscale train --out {out} --resume\n",
    )
    assert "gap to BF16" in done.stdout


def test_a_picture_that_cannot_be_drawn(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures are printed, and written first."""
    save_file({"x": torch.ones(16, 32)}, tmp_path / "x.safetensors")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it fails
    run, bench, picture = tmp_path / "run", tmp_path / "bench", tmp_path / "x.png"
    mended = "when that is mended,"
    commands = {
        f"train --out {run} --data {text}": (
            run / "loss.png",
            f"all is trained; {mended} write the report with: blockscale train --out {run} "
            "--resume",
        ),
        f"inspect {tmp_path / 'x.safetensors'} --out {picture}": (
            picture,
            f"{mended} run the command again",
        ),
        f"bench --from {H200} --out {bench}": (
            bench / "bench.png",
            f"{mended} draw it with: blockscale bench --from {H200} --out {bench}",
        ),
    }
    for command, (path, remedy) in commands.items():
        words = command.split()
        assert main([*words, *(SMALL if words[0] == "train" else [])]) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith(f"blockscale {words[0]}: {path} (not drawn, ")
        assert printed.err.endswith(f"); need matplotlib; {remedy}\n")
        assert printed.err.count("\n") == 1
        assert "┃" in printed.out  # a table
        assert not path.exists()
    assert (run / "report.md").exists()


def test_letters_that_the_output_lacks(tmp_path: Path) -> None:
    save_file({"\u6743": torch.ones(16, 32)}, tmp_path / "x.safetensors")
    done = subprocess.run(
        [sys.executable, "-m", "blockscale", "inspect", str(tmp_path / "x.safetensors"),
         "--out", str(tmp_path / "x.png")],
        capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "mxfp8" in done.stdout


def test_a_picture_does_not_depend_on_the_output(tmp_path: Path) -> None:
    save_file({"x": torch.ones(16, 32)}, tmp_path / "x.safetensors")
    words = ["inspect", str(tmp_path / "x.safetensors"), "--out", str(tmp_path / "x.png")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "blockscale", *words], stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert (tmp_path / "x.png").exists()


def test_a_full_disk_at_the_beginning(text: str, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "run"
    done = blockscale("train", "--out", str(out), "--data", text, *SMALL, limit=10)
    assert (done.returncode, done.stderr) == (
        2,
        f"blockscale train: --out = {out} (File too large); need a folder that can be written; "
        "choose another\n",
    )
    assert not (tmp_path / "runs").exists()


def test_a_full_disk_at_a_picture(tmp_path: Path) -> None:
    save_file({"x": torch.ones(16, 32)}, tmp_path / "x.safetensors")
    plot = tmp_path / "x.png"
    words = ["inspect", str(tmp_path / "x.safetensors"), "--spec", "mxfp8", "--out", str(plot)]
    done = blockscale(*words, limit=1000)
    assert (done.returncode, done.stderr) == (1, f"blockscale inspect: {plot}: File too large\n")
    assert "mxfp8" in done.stdout  # the figures are not lost
    out = tmp_path / "new" / "out"
    done = blockscale("bench", "--from", str(H200), "--out", str(out), limit=1000)
    line = f"blockscale bench: {out / 'bench.png'}: File too large\n"
    assert (done.returncode, done.stderr) == (1, line)
    assert "quantize/mxfp8/axis:-1" in done.stdout
    assert names(tmp_path) == ["x.safetensors"]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "unbuffered"),  # text may be held back until the interpreter ends
    [("--version", ""), ("--version", "1"), ("train --help", ""), ("doctor", "")],
)
def test_an_output_that_takes_nothing(words: str, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "blockscale", *words.split()],
            stdout=full, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    prog = f"blockscale {words.split()[0]}".removesuffix(" --version")
    assert (done.returncode, done.stderr) == (1, f"{prog}: output: No space left on device\n")


@pytest.mark.parametrize("size", [2**62, 2**55, 2**48])
def test_what_pytorch_cannot_allocate(size: int) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(size)
    assert out_of_memory(raised.value)
    assert not out_of_memory(RuntimeError("shapes differ"))
    assert out_of_memory(torch.OutOfMemoryError())
    assert out_of_memory(MemoryError())


REMEDY = "give a smaller --batch-size or --seq-len"


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("batch", [2**62, 2**45])
def test_a_batch_that_memory_does_not_hold(
    batch: int, there: bool, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs" / "run"
    if there:
        out.mkdir(parents=True)
    words = ["--out", str(out), "--data", text, *SMALL, "--batch-size", str(batch)]
    assert main(["train", *words]) == 1
    assert capsys.readouterr().err == (
        f"blockscale train: --batch-size = {batch} with --seq-len 16 (out of memory on cpu); need "
        f"a training step that fits in memory; {REMEDY}\n"
    )
    assert (tmp_path / "runs").exists() == there
    assert not there or list(out.iterdir()) == []


def test_memory_that_runs_out_later_costs_no_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    right = trainer.update
    calls = iter(range(9))

    def once(*args: Any) -> Any:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return right(*args)

    monkeypatch.setattr(trainer, "update", once)
    words = ["--out", str(out), "--data", text, *SMALL, "--checkpoint-every", "1"]
    assert main(["train", *words]) == 1
    again = f"blockscale train --out {out} --resume"
    assert capsys.readouterr().err == (
        "blockscale train: --batch-size = 1 with --seq-len 16 (out of memory on cpu); need a "
        "training step that fits in memory; start another run with a smaller --batch-size or "
        f"--seq-len, or continue: {again}\n"
    )
    copy = shutil.copytree(out, tmp_path / "copy")  # the run itself is locked by this process
    assert main(["train", "--out", str(copy), "--resume"]) == 0


def test_other_failures_keep_their_traceback(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(trainer, "update", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["train", "--out", str(tmp_path / "run"), "--data", text, *SMALL])


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), OSError("full"), ValueError("other")])
def test_no_file_stays_open(
    error: BaseException | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python says so of a file that it has to close itself."""
    right = trainer.update
    calls = iter(range(9))

    def second_fails(*args: Any) -> Any:
        if next(calls) == 1 and error is not None:
            raise error
        return right(*args)

    monkeypatch.setattr(trainer, "update", second_fails)
    words = ["train", "--out", str(tmp_path / "run"), "--data", text, *SMALL]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        with contextlib.suppress(ValueError):
            main(words)
        if error is not None:
            error.__traceback__ = None  # which holds the file
        gc.collect()
    assert [str(warning.message) for warning in said] == []
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == (5 if not error else 1)


@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_is_full_after_the_settings(
    there: bool,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = Path.mkdir

    def mkdir(path: Path, *args: Any, **options: Any) -> None:
        if path.name == "checkpoints":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        right(path, *args, **options)

    out = tmp_path / "new" / "run"
    if there:
        out.mkdir(parents=True)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    for _ in range(2):  # the first leaves nothing behind
        assert refusal(capsys, "train", "--out", str(out), "--data", text, *SMALL) == (
            f"blockscale train: --out = {out} ({os.strerror(errno.ENOSPC)}); need a folder that "
            "can be written; choose another"
        )
        assert out.parent.exists() == there
        assert not there or list(out.iterdir()) == []


def test_a_folder_whose_files_cannot_be_locked(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a network's file system without locks: no other process is the reason."""

    def flock(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    out = tmp_path / "new" / "run"
    for _ in range(2):  # the first leaves nothing behind
        assert refusal(capsys, "train", "--out", str(out), "--data", text, *SMALL) == (
            f"blockscale train: --out = {out} ({os.strerror(errno.ENOLCK)}); need a file system "
            "that can lock files; choose a folder on another one"
        )
        assert not out.parent.exists()
