"""What the command refuses: one line that names the option, what it got and the remedy; exit 2;
nothing written."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import blockscale as bs
import pytest
import torch
from blockscale.cli import bench_read
from blockscale.cli.main import SUBCOMMANDS, main
from commands import refusal

H200 = Path(__file__).resolve().parents[2] / "bench" / "results" / "h200.json"
PRESETS = "tiny, small, gpt-124m, tiny-moe, small-moe"
NONE = "leave the option out for its default"
WHOLE = f"need a whole number from 1 to 2^63 - 1; {NONE}"
SEEDS = f"need a whole number from 1 to 1000; {NONE}"

OPTIONS = [
    (["--steps", "-3"], f"--steps = -3; {WHOLE}"),
    (["--steps", "0"], f"--steps = 0; {WHOLE}"),
    (["--steps", "many"], f"--steps = many; {WHOLE}"),
    (["--steps", str(2**63)], f"--steps = {2**63}; {WHOLE}"),
    (["--seeds", "0"], f"--seeds = 0; {SEEDS}"),
    (["--seeds", "100000000000"], f"--seeds = 100000000000; {SEEDS}"),  # too many to list
    (["--seeds", "1001"], f"--seeds = 1001; {SEEDS}"),
    (["--batch-size", "0"], f"--batch-size = 0; {WHOLE}"),
    (["--eval-every", "-1"], f"--eval-every = -1; {WHOLE}"),
    (["--checkpoint-every", "0"], f"--checkpoint-every = 0; {WHOLE}"),
    (["--seq-len", "1"], f"--seq-len = 1; need a whole number from 2 to 2^63 - 1; {NONE}"),
    (["--seed", "-1"], f"--seed = -1; need a whole number from 0 to 2^63 - 1; {NONE}"),
    (["--lr", "0"], f"--lr = 0; need a finite number above 0; {NONE}"),
    (["--lr", "nan"], f"--lr = nan; need a finite number above 0; {NONE}"),
    (["--lr", "inf"], f"--lr = inf; need a finite number above 0; {NONE}"),
    (["--preset", "tinny"],
     f"--preset = tinny; need one of {PRESETS}; did you mean tiny?"),
    (["--preset", ""],
     f"--preset = ; need one of {PRESETS}; choose one of these"),
    (["--preset", "TINNY"],
     f"--preset = TINNY; need one of {PRESETS}; did you mean tiny?"),
    (["--preset", "huge"],
     f"--preset = huge; need one of {PRESETS}; choose one of these"),
    (["--data", ""], "--data = ''; need an existing file or folder; check the path"),
    (["--recipes", "bf16,nvpf4"],
     "--recipes = nvpf4; need names among bf16, fp8_blockwise, mxfp8, mxfp4, nvfp4, amdfp4; did "
     "you mean nvfp4?"),
    (["--recipes", "bf16,,nvfp4"],
     "--recipes = 'bf16,,nvfp4' (an empty name); need names among bf16, fp8_blockwise, mxfp8, "
     "mxfp4, nvfp4, amdfp4; choose one of these"),
    (["--recipes", ""],
     "--recipes = '' (an empty name); need names among bf16, fp8_blockwise, mxfp8, mxfp4, nvfp4, "
     "amdfp4; choose one of these"),
    (["--recipes", "bf16,bf16"],
     "--recipes = bf16 twice; need each recipe once; drop one of them"),
    (["--recipes", "nvfp4[keep_w=True,wgrad_y=none]"],
     "--recipes = nvfp4[keep_w=True,wgrad_y=none]: recipe: operand = 'wgrad_y'; need one of "
     "fprop_x, fprop_w, dgrad_dy, dgrad_w, wgrad_dy, wgrad_x, keep_w or keep_x; "
     "did you mean 'wgrad_dy'?"),
    (["--recipes", "mxfp8[keep_w=False],mxfp8[ keep_w=False ]"],
     "--recipes = mxfp8[ keep_w=False ] twice; need each recipe once; drop one of them"),
    (["--recipes", "mxfp8,mxfp8[keep_w=True]"],
     "--recipes = mxfp8[keep_w=True] twice; need each recipe once; drop one of them"),
    (["--device", "cudaa"], "--device = cudaa; need cpu or cuda; did you mean cuda?"),
    (["--device", "GPU"], "--device = GPU; need cpu or cuda; did you mean cuda?"),
    (["--device", "gpu:0"], "--device = gpu:0; need cpu or cuda; did you mean cuda?"),
    (["--device", "CPU"], "--device = CPU; need cpu or cuda; did you mean cpu?"),
    (["--device", "mps"], "--device = mps; need cpu or cuda; choose one of these"),
    (["--stepps", "3"], "unrecognized arguments: --stepps 3; did you mean --steps?"),
    (["--stepps=3"], "unrecognized arguments: --stepps=3; did you mean --steps?"),
    (["--fast"],
     "unrecognized arguments: --fast; `blockscale train --help` lists the options"),
    (["twice"],
     "unrecognized arguments: twice; `blockscale train --help` lists the options"),
    (["--steps"],
     "argument --steps: expected one argument; `blockscale train --help` lists the options"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), OPTIONS, ids=[" ".join(w) for w, _ in OPTIONS])
def test_absurd_options(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert refusal(capsys, "train", "--out", str(out), *words) == f"blockscale train: {message}"
    assert not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "train", "--device", "cuda", "--out", str(tmp_path / "run"))
    assert line == (
        "blockscale train: --device = cuda; need a CUDA device and a PyTorch built for it; use "
        "--device cpu, or see `blockscale doctor`"
    )
    assert not (tmp_path / "run").exists()


def data_cases(folder: Path) -> dict[str, tuple[Path, str]]:
    """name -> (path for --data, what follows it in the message)."""
    (folder / "empty.txt").write_bytes(b"")
    (folder / "binary.txt").write_bytes(b"text\0more")
    (folder / "short.txt").write_bytes(b"a" * 50)
    (folder / "nothing").mkdir()
    (folder / "only_binary").mkdir()
    (folder / "only_binary" / "a.bin").write_bytes(b"\0\1")
    (folder / "only_binary" / ".hidden").write_bytes(b"text")
    (folder / "dangling").symlink_to(folder / "gone")
    text = "need text; name text files or folders"
    files = "need text files; hidden, empty and binary files do not count"
    existing = "need an existing file or folder; check the path"
    return {
        "missing": (folder / "gone", f"; {existing}"),
        "dangling link": (folder / "dangling", f"; {existing}"),
        "device": (Path("/dev/zero"), f" (neither a file nor a folder); {existing}"),
        "empty": (folder / "empty.txt", f" (an empty file); {text}"),
        "binary": (folder / "binary.txt", f" (a binary file); {text}"),
        "empty folder": (folder / "nothing", f"; {files}"),
        "binary folder": (folder / "only_binary", f"; {files}"),
        # Fails on read, even for root, whom permissions do not stop.
        "unreadable": (
            Path("/proc/self/mem"),
            " (Input/output error); need a readable file; check its permissions",
        ),
    }


@pytest.mark.parametrize(
    "case",
    ["missing", "dangling link", "device", "empty", "binary", "empty folder", "binary folder",
     "unreadable"],
)  # fmt: skip
def test_bad_data(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, message = data_cases(tmp_path)[case]
    out = tmp_path / "run"
    line = refusal(capsys, "train", "--data", str(path), "--out", str(out))
    assert line == f"blockscale train: --data = {path}{message}"
    assert not out.exists()


def test_data_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_cases(tmp_path)
    short = str(tmp_path / "short.txt")
    line = refusal(capsys, "train", "--data", short, "--seq-len", "8", "--out", str(tmp_path / "o"))
    assert line == (
        "blockscale train: --data = 5 bytes of validation text; need at least 10 for --seq-len 8; "
        "give more text or a smaller --seq-len"
    )
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("out", "reason"), [("file/run", "Not a directory"), ("file", "Not a directory")]
)
def test_out_that_cannot_be_a_folder(
    out: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    line = refusal(capsys, "train", "--out", str(tmp_path / out))
    assert line == (
        f"blockscale train: --out = {tmp_path / out} ({reason}); need a folder that can be "
        "written; choose another"
    )
    assert (tmp_path / "file").read_text() == "kept"


def test_folders_made_for_one_that_cannot_be_are_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "er" / ("x" * 300)
    assert refusal(capsys, "train", "--out", str(out)) == (
        f"blockscale train: --out = {out} (File name too long); need a folder that can be written; "
        "choose another"
    )
    assert os.listdir(tmp_path) == []


def test_out_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    """/proc refuses new folders to everyone."""
    line = refusal(capsys, "train", "--out", "/proc/run")
    assert line.startswith("blockscale train: --out = /proc/run (")
    assert line.endswith("); need a folder that can be written; choose another")


@pytest.mark.parametrize("words", [["train"], ["train", "--resume"], ["bench"], ["inspect", "x"]])
def test_an_empty_path_is_not_the_working_directory(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert refusal(capsys, *words, "--out", "") == (
        f"blockscale {words[0]}: --out = ''; need a path; name one, or leave the option out"
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", ["train", "bench"])
def test_a_path_that_is_not_utf8(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, command, "--out", os.fsdecode(b"o\xff"))
    assert line == f"blockscale {command}: --out = 'o\\udcff'; need a path in UTF-8; rename it"


def test_bench_into_a_folder_that_takes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before anything is measured."""
    line = refusal(capsys, "bench", "--out", "/proc/self")
    assert line.startswith("blockscale bench: --out = /proc/self (")
    assert line.endswith("); need a folder that can be written; choose another")


def test_out_with_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("thesis.tex", "notes", ".hidden"):
        (tmp_path / name).write_text("kept")
        assert refusal(capsys, "train", "--out", str(tmp_path)) == (
            f"blockscale train: --out = {tmp_path} (holds {name}); need a new or empty folder; "
            "choose another"
        )
    assert sorted(os.listdir(tmp_path)) == [".hidden", "notes", "thesis.tex"]


SHAPE = (
    "need rows x columns such as 16384x8192, or matrices x rows x columns, of fewer than 2^31 "
    f"elements; {NONE}"
)
BENCH_OPTIONS = [
    (["--device", "cudaa"], "--device = cudaa; need cpu or cuda; did you mean cuda?"),
    (["--device", "gpu"], "--device = gpu; need cpu or cuda; did you mean cuda?"),
    (["--device", "nvidia"], "--device = nvidia; need cpu or cuda; did you mean cuda?"),
    (["--shape", "128"], f"--shape = 128; {SHAPE}"),
    (["--shape", "0x128"], f"--shape = 0x128; {SHAPE}"),
    (["--shape", "4x-3"], f"--shape = 4x-3; {SHAPE}"),
    (["--shape", "-1x5"], f"--shape = -1x5; {SHAPE}"),  # not an option
    (["--shape", "65536x65536"], f"--shape = 65536x65536; {SHAPE}"),
    (["--from", "none.json"],
     "--from = none.json (No such file or directory); need a file; check the path"),
    (["--from", "none.json", "--shape", "2x2"],
     "--shape with --from; need one or the other, nothing is measured again; leave --shape out"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), BENCH_OPTIONS)
def test_bench_refusals(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert refusal(capsys, "bench", "--out", str(out), *words) == f"blockscale bench: {message}"
    assert not out.exists()


ON_A_CPU: dict[str, Any] = {
    **dict.fromkeys(("blockscale", "torch", "date", "commit", "cpu"), ""),
    **dict.fromkeys(("copy_tb_per_s", "threads"), 1),
}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no JSON"),
        ("[" * 99999, "no JSON"),
        ("[]", "not an object"),
        ("{}", "provenance is not an object"),
        ('{"provenance": {}}', "rows is not a list"),
        ('{"rows": [], "provenance": {"torch": "2"}}', "provenance: blockscale is not a text"),
        (json.dumps({"provenance": ON_A_CPU, "rows": []}), "rows is empty"),
        (json.dumps({"provenance": ON_A_CPU, "rows": [1]}), "rows[0]: not an object"),
        (
            json.dumps({"provenance": ON_A_CPU | {"threads": ""}, "rows": []}),
            "provenance: threads is not a number",
        ),
    ],
    ids=lambda text: text[:50],
)
def test_bench_from_another_file(
    text: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    file.write_text(text)
    assert refusal(capsys, "bench", "--from", str(file)) == (
        f"blockscale bench: --from = {file} ({fault}); need a results.json that `blockscale bench` "
        "wrote; measure again"
    )
    assert os.listdir(tmp_path) == [file.name]
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("name", "tool"),
    [("cpu", "bench/run.py"), ("h200_gemm", "bench/gemm.py, grouped.py, model.py or fsdp.py")],
)
def test_bench_from_the_file_of_another_benchmark(
    name: str, tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = H200.with_name(f"{name}.json")
    assert refusal(capsys, "bench", "--from", str(file), "--out", str(tmp_path / "out")) == (
        f"blockscale bench: --from = {file} (written by {tool}); need a results.json that "
        "`blockscale bench` wrote; measure again"
    )


ABSENT = object()
# Where in a results.json, what is put there, and what is said of it.
EDITS: list[tuple[str, str, Any, str]] = [
    ("where", "commit", ABSENT, "provenance: commit is not a text"),
    ("where", "date", 5, "provenance: date is not a text"),
    ("where", "torch", 2, "provenance: torch is not a text"),
    ("where", "gpu", None, "provenance: gpu is not a text"),
    ("where", "copy_tb_per_s", "4", "provenance: copy_tb_per_s is not a number"),
    ("row", "case", 3, "rows[1]: case is not a text"),
    ("row", "us", ABSENT, "rows[1]: us is not a number"),
    ("row", "us", True, "rows[1]: us is not a number"),
    ("row", "us", -1, "rows[1]: us is not a number"),
    ("row", "us", 10**400, "rows[1]: us is not a number"),
    ("row", "of_copy", math.nan, "rows[1]: of_copy is not a number"),
    ("row", "of_copy", math.inf, "rows[1]: of_copy is not a number"),
    ("row", "tb_per_s", None, "rows[1]: tb_per_s is not a number"),
    ("row", "groups", [], "rows[1]: groups is not a number"),
    ("row", "goal", "0.9", "rows[1]: goal is not a number"),
    ("row", "of_copy", ABSENT,
     f"rows[1]: goal without any of {', '.join(bench_read.MEASURES)}"),
    *(("row", "shape", shape, "rows[1]: shape is not a list of sizes")
      for shape in (ABSENT, 5, [], ["4"], [[4]], [0], [True])),
]  # fmt: skip


@pytest.mark.parametrize(("part", "key", "value", "fault"), EDITS)
def test_bench_from_an_edited_file(
    part: str, key: str, value: Any, fault: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found = json.loads(H200.read_text())
    edited = found["provenance"] if part == "where" else found["rows"][1]
    edited[key] = value
    if value is ABSENT:
        del edited[key]
    file = tmp_path / "results.json"
    file.write_text(json.dumps(found))
    out = tmp_path / "out"
    assert refusal(capsys, "bench", "--from", str(file), "--out", str(out)) == (
        f"blockscale bench: --from = {file} ({fault}); need a results.json that `blockscale bench` "
        "wrote; measure again"
    )
    assert not out.exists()


def test_bench_into_the_folder_of_an_earlier_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "of bench"
    folder.mkdir()
    earlier = folder / "results.json"
    earlier.write_text("kept")
    assert refusal(capsys, "bench", "--device", "cpu", "--out", str(folder)) == (
        f"blockscale bench: --out = {folder} (holds results.json); need a folder without an "
        f"earlier run; choose another, or print that run by --from '{earlier}'"
    )
    assert earlier.read_text() == "kept"


def test_bench_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert refusal(capsys, "bench", "--device", "cpu", "--out", str(file)) == (
        f"blockscale bench: --out = {file} (File exists); need a folder that can be made; choose "
        "another"
    )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("trian", "did you mean train?"),
        ("benchmark", "did you mean bench?"),
        ("explain", "choose one of these"),  # half of its letters are train's
        ("run", "choose one of these"),
    ],
)
def test_unknown_command(name: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, name) == (
        f"blockscale: command = {name!r}; need one of {', '.join(SUBCOMMANDS)}; {remedy}"
    )


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in SUBCOMMANDS)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_says_what_a_command_does(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"blockscale.cli.{name}")
    about = module.__doc__ or ""
    for text in (about, SUBCOMMANDS[name]):
        assert main([name, "--help"]) == 0
        assert " ".join(text.split()) in " ".join(capsys.readouterr().out.split())
        monkeypatch.setattr(module, "__doc__", None)  # as under python -OO


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"blockscale {bs.__version__}\n"
    words = [sys.executable, "-m", "blockscale", "--version"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert said == f"blockscale {bs.__version__}\n"


def test_the_process_exits_with_the_status() -> None:
    words = [sys.executable, "-m", "blockscale", "train", "--steps", "-3"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"blockscale train: --steps = -3; {WHOLE}\n"
