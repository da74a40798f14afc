"""What the command refuses: one line that names the option, what it got and the remedy; exit 2;
nothing written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import blockscale as bs
import pytest
import torch
from blockscale.cli.main import SUBCOMMANDS, main
from commands import refusal

NONE = "leave the option out for its default"
WHOLE = f"need a whole number of at least 1; {NONE}"

OPTIONS = [
    (["--steps", "-3"], f"--steps = -3; {WHOLE}"),
    (["--steps", "0"], f"--steps = 0; {WHOLE}"),
    (["--steps", "many"], f"--steps = many; {WHOLE}"),
    (["--steps", str(2**63)], f"--steps = {2**63}; {WHOLE}"),
    (["--seeds", "0"], f"--seeds = 0; {WHOLE}"),
    (["--batch-size", "0"], f"--batch-size = 0; {WHOLE}"),
    (["--eval-every", "-1"], f"--eval-every = -1; {WHOLE}"),
    (["--checkpoint-every", "0"], f"--checkpoint-every = 0; {WHOLE}"),
    (["--seq-len", "1"], f"--seq-len = 1; need a whole number of at least 2; {NONE}"),
    (["--seed", "-1"], f"--seed = -1; need a whole number of at least 0; {NONE}"),
    (["--lr", "0"], f"--lr = 0; need a finite number above 0; {NONE}"),
    (["--lr", "nan"], f"--lr = nan; need a finite number above 0; {NONE}"),
    (["--lr", "inf"], f"--lr = inf; need a finite number above 0; {NONE}"),
    (["--preset", "tinny"],
     "--preset = tinny; need one of tiny, small, gpt-124m; did you mean tiny?"),
    (["--preset", ""],
     "--preset = ; need one of tiny, small, gpt-124m; choose one of these"),
    (["--preset", "TINNY"],
     "--preset = TINNY; need one of tiny, small, gpt-124m; did you mean tiny?"),
    (["--preset", "huge"],
     "--preset = huge; need one of tiny, small, gpt-124m; choose one of these"),
    (["--data", ""], "--data = ''; need an existing file or folder; check the path"),
    (["--recipes", "bf16,nvpf4"],
     "--recipes = nvpf4; need names among bf16, fp8_blockwise, mxfp8, mxfp4, nvfp4, amdfp4; did "
     "you mean nvfp4?"),
    (["--recipes", ""],
     "--recipes = ; need names among bf16, fp8_blockwise, mxfp8, mxfp4, nvfp4, amdfp4; choose "
     "one of these"),
    (["--recipes", "bf16,bf16"],
     "--recipes = bf16 twice; need each recipe once; drop one of them"),
    (["--device", "cudaa"], "--device = cudaa; need cpu or cuda; did you mean cuda?"),
    (["--stepps", "3"],
     "unrecognized arguments: --stepps 3; `blockscale train --help` lists the options"),
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


def test_out_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    """/proc refuses new folders to everyone."""
    line = refusal(capsys, "train", "--out", "/proc/run")
    assert line.startswith("blockscale train: --out = /proc/run (")
    assert line.endswith("); need a folder that can be written; choose another")


def test_out_with_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("kept")
    line = refusal(capsys, "train", "--out", str(tmp_path))
    assert line == (
        f"blockscale train: --out = {tmp_path} (holds thesis.tex); need a new or empty folder; "
        "choose another"
    )
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_resume_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    assert refusal(capsys, "train", "--resume") == (
        "blockscale train: --out = nothing; need the folder of the run to --resume; add --out "
        "FOLDER"
    )
    assert refusal(capsys, "train", "--resume", "--out", str(gone)) == (
        f"blockscale train: --resume = {gone} (holds no run); need the --out folder of an earlier "
        "run; leave --resume out to start one"
    )
    assert not gone.exists()


SMALL = ["--recipes", "bf16", "--seq-len", "16", "--batch-size", "1", "--steps", "4"]


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after step 2 of 4, as its folder looks."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "text").mkdir()
    for name in "abcdef":
        (folder / "text" / name).write_text(f"{name} is a letter of the alphabet.\n" * 9)
    script = (
        "import sys\n"
        "from blockscale.cli import main, trainer\n"
        "save = trainer.Trainer._save\n"
        "def stop(self):\n"
        "    save(self)\n"
        "    raise KeyboardInterrupt\n"
        "trainer.Trainer._save = stop\n"
        "sys.exit(main.main(sys.argv[1:]))\n"
    )
    words = ["train", "--out", str(folder / "run"), "--data", str(folder / "text"), *SMALL]
    words += ["--checkpoint-every", "2"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    return folder


@pytest.fixture
def run_folder(stopped_run: Path, tmp_path: Path) -> Path:
    """A copy of that run to damage."""
    return Path(shutil.copytree(stopped_run / "run", tmp_path / "run"))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_run_is_not_overwritten(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(run_folder)
    line = refusal(capsys, "train", "--out", str(run_folder))
    assert line == (
        f"blockscale train: --out = {run_folder} (holds a run); need a new or empty folder; add "
        "--resume to continue that run, or choose another folder"
    )
    assert tree(run_folder) == before


@pytest.mark.parametrize(
    ("words", "got", "need"),
    [
        (["--steps", "9"], "9", "4"),
        (["--recipes", "bf16,mxfp4"], "bf16,mxfp4", "bf16"),
        (["--preset", "small"], "small", "tiny"),
        (["--seed", "1"], "1", "0"),
        (["--lr", "0.5"], "0.5", "0.001"),
        (["--batch-size", "2"], "2", "1"),
    ],
)
def test_resume_with_a_changed_setting(
    words: list[str], got: str, need: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(run_folder)
    line = refusal(capsys, "train", "--out", str(run_folder), "--resume", *words)
    assert line == (
        f"blockscale train: {words[0]} = {got}; need {need}, as the run to resume has it; leave "
        f"{words[0]} out, or start another run in another folder"
    )
    assert tree(run_folder) == before


def test_resume_with_changed_text(
    stopped_run: Path, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = stopped_run / "text" / "g"
    extra.write_text("g came later")
    line = refusal(capsys, "train", "--out", str(run_folder), "--resume")
    extra.unlink()
    assert line == (
        "blockscale train: --data = text that has changed since the run began; need the same "
        "text; restore it, or start again in another folder"
    )


def damaged_checkpoint(kind: str, path: Path) -> str:
    """Damages a checkpoint; returns what the message says is wrong with it."""
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-5000])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("not a checkpoint")
    elif kind == "tensor":
        torch.save(torch.zeros(3), path)
        return "(format 'Tensor')"
    elif kind == "pickle":  # weights_only refuses to run code from a file
        torch.save({"format": Path}, path)
    elif kind == "other run":
        state = torch.load(path, weights_only=True)
        torch.save(state | {"run_id": "0123"}, path)
        return "(run_id '0123')"
    return "truncated, damaged or not a checkpoint)"


@pytest.mark.parametrize("kind", ["truncated", "empty", "text", "tensor", "pickle", "other run"])
def test_damaged_or_foreign_checkpoint(
    kind: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_folder / "checkpoints" / "bf16-seed0.pt"
    reason = damaged_checkpoint(kind, path)
    before = tree(run_folder)
    line = refusal(capsys, "train", "--out", str(run_folder), "--resume")
    assert line.startswith(f"blockscale train: --resume = {path} (")
    assert reason in line
    assert line.endswith("; delete it to train bf16-seed0 again from its start")
    assert tree(run_folder) == before


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"steps": 4}', "\xff"])
def test_damaged_settings(
    content: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_folder / "settings.json").write_bytes(content.encode("latin-1"))
    line = refusal(capsys, "train", "--out", str(run_folder), "--resume")
    assert line.startswith("blockscale train: --resume = ")
    assert line.endswith("need the file the run wrote; start again in another folder")


def test_metrics_that_lack_steps(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = run_folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    line = refusal(capsys, "train", "--out", str(run_folder), "--resume")
    assert line == (
        f"blockscale train: --resume = {metrics} (1 steps of bf16-seed0); need the 2 steps that "
        "its checkpoint covers; start again in another folder"
    )


def test_a_run_in_use(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    with open(run_folder / "settings.json") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        line = refusal(capsys, "train", "--out", str(run_folder), "--resume")
    assert line == (
        f"blockscale train: --out = {run_folder}; need a folder that no other process is training "
        "in; wait for it or choose another folder"
    )


SHAPE = (
    "need rows x columns such as 16384x8192, or matrices x rows x columns, of fewer than 2^31 "
    f"elements; {NONE}"
)
BENCH_OPTIONS = [
    (["--device", "cudaa"], "--device = cudaa; need cpu or cuda; did you mean cuda?"),
    (["--shape", "128"], f"--shape = 128; {SHAPE}"),
    (["--shape", "0x128"], f"--shape = 0x128; {SHAPE}"),
    (["--shape", "4x-3"], f"--shape = 4x-3; {SHAPE}"),
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


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [], "provenance": {"torch": "2"}}'])
def test_bench_from_another_file(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    file.write_text(text)
    assert refusal(capsys, "bench", "--from", str(file)) == (
        f"blockscale bench: --from = {file}; need a results.json that `blockscale bench` wrote; "
        "measure again"
    )
    assert tree(tmp_path) == {str(file): text.encode()}


def test_bench_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert refusal(capsys, "bench", "--device", "cpu", "--out", str(file)) == (
        f"blockscale bench: --out = {file} (File exists); need a folder that can be made; choose "
        "another"
    )


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "trian")
    assert line == (
        f"blockscale: command = 'trian'; need one of {', '.join(SUBCOMMANDS)}; did you mean train?"
    )


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in SUBCOMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"blockscale {bs.__version__}\n"
    words = [sys.executable, "-m", "blockscale", "--version"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert said == f"blockscale {bs.__version__}\n"


def test_the_process_exits_with_the_status() -> None:
    words = [sys.executable, "-m", "blockscale.cli", "train", "--steps", "-3"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"blockscale train: --steps = -3; {WHOLE}\n"
