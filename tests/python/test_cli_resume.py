"""`blockscale train --resume`: what it refuses, naming the file, and then changes nothing."""

from __future__ import annotations

import io
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blockscale as bs
import pytest
import torch
from blockscale.cli import data
from blockscale.cli.files import save_state
from blockscale.cli.main import main
from blockscale.cli.run_folder import open_run
from commands import Command, refusal


def test_resume_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone, file = tmp_path / "gone", tmp_path / "file"
    file.write_text("kept")
    assert refusal(capsys, "train", "--resume") == (
        "blockscale train: --out = nothing; need the folder of the run to --resume; add --out "
        "FOLDER"
    )
    for out in (gone, file):
        assert refusal(capsys, "train", "--resume", "--out", str(out)) == (
            f"blockscale train: --resume = {out} (holds no run); need the --out folder of an "
            "earlier run; leave --resume out to start one"
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


def of_the_standard_library(run_folder: Path, python: str) -> None:
    """Makes it look like a run without --data under that version of Python."""
    file = run_folder / "settings.json"
    settings = json.loads(file.read_text())
    settings |= {"data": [], "environment": settings["environment"] | {"python": python}}
    file.write_text(json.dumps(settings))


NOW = platform.python_version()


@pytest.mark.parametrize(
    ("python", "fault", "remedy"),
    [
        ("3.0.1", "where the run began with Python 3.0.1's", "resume with that Python"),
        (NOW, "whose sources differ from those the run began with",
         "resume on the installation it began on"),
    ],
)  # fmt: skip
def test_resume_with_another_standard_library(
    python: str, fault: str, remedy: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(data, "read_stdlib", lambda: [("a.py", b"x = 1\n" * 99)])
    of_the_standard_library(run_folder, python)
    assert refusal(capsys, "train", "--out", str(run_folder), "--resume") == (
        f"blockscale train: --data = the standard library of Python {NOW}, {fault}; need the same "
        f"text; {remedy}, or start again in another folder"
    )


def test_resume_of_the_standard_library_with_a_text(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_the_standard_library(run_folder, NOW)
    words = ["train", "--out", str(run_folder), "--resume", "--data", __file__]
    assert refusal(capsys, *words) == (
        f"blockscale train: --data = {__file__}; need the Python standard library's sources (no "
        "--data), as the run to resume has it; leave --data out, or start another run in another "
        "folder"
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
    elif kind == "other training":
        state = torch.load(path, weights_only=True)
        torch.save(state | {"cell": "nvfp4-seed0"}, path)
        return "(cell 'nvfp4-seed0')"
    elif kind == "step as text":
        state = torch.load(path, weights_only=True)
        torch.save(state | {"step": "2"}, path)
        return "(without its step)"
    elif kind.startswith("no "):
        state = torch.load(path, weights_only=True)
        del state[kind[3:]]
        torch.save(state, path)
        return f"(without its {kind[3:]})"
    return "truncated, damaged or not a checkpoint)"


@pytest.mark.parametrize(
    "kind",
    ["truncated", "empty", "text", "tensor", "pickle", "other run", "other training",
     "step as text", "no step", "no rng", "no model", "no optimizer"],
)  # fmt: skip
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


def test_a_checkpoint_of_another_model(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found only once the model is built, when progress may have been printed."""
    path = run_folder / "checkpoints" / "bf16-seed0.pt"
    state = torch.load(path, weights_only=True)
    state["model"].popitem()
    torch.save(state, path)
    before = tree(run_folder)
    assert main(["train", "--out", str(run_folder), "--resume"]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith(
        f"blockscale train: --resume = {path} (RuntimeError: Error(s) in loading"
    )
    assert line.endswith("; delete it to train bf16-seed0 again from its start")
    assert tree(run_folder) == before


@pytest.mark.parametrize("where", ["file", "torch"])
def test_ctrl_c_while_a_checkpoint_is_written(where: str, tmp_path: Path) -> None:
    """PyTorch makes an error of its own of it."""

    class Stops(io.BytesIO):
        def write(self, data: Any) -> int:
            if where == "file" and self.tell() > 100:
                raise KeyboardInterrupt
            return super().write(data)

    class Stopping:
        def __reduce__(self) -> Any:  # within torch.save's own Python
            raise KeyboardInterrupt

    state = {"x": torch.zeros(10000), "y": Stopping() if where == "torch" else None}
    with pytest.raises(KeyboardInterrupt):
        save_state(state, Stops())


def test_metrics_that_are_whole_are_not_written_again(run_folder: Path) -> None:
    done = Command("train", "--resume", "--out", str(run_folder)).end()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == (
        f"note: continues the run in {run_folder}: preset tiny, 4 steps, seed 0, recipes bf16; 2 "
        "of its 4 steps are done"
    )
    stamp = (run_folder / "metrics.jsonl").stat().st_mtime_ns
    open_run(run_folder, json.loads((run_folder / "settings.json").read_text()))
    assert (run_folder / "metrics.jsonl").stat().st_mtime_ns == stamp


Change = Callable[[dict[str, Any]], Any]


def test_a_continued_run_without_a_step_stays(run_folder: Path) -> None:
    """It may have been stopped before its first checkpoint, and is again: only a new one goes."""
    for path in ("metrics.jsonl", "checkpoints/bf16-seed0.pt"):
        (run_folder / path).unlink()
    settings = json.loads((run_folder / "settings.json").read_text())
    folder = open_run(run_folder, settings)
    assert folder.rows == []
    before = tree(run_folder)
    assert not folder.discard()
    assert tree(run_folder) == before


def without(key: str) -> Change:
    return lambda settings: {k: v for k, v in settings.items() if k != key}


def with_(**values: Any) -> Change:
    return lambda settings: settings | values


WHOLE = "a whole number from"
MOST = "to 2^63 - 1"
NAMES = "different names among bf16, fp8_blockwise, mxfp8, mxfp4, nvfp4, amdfp4, or changes of them"
SETTINGS: list[tuple[Change, str]] = [
    (lambda settings: [], "list, not an object"),
    (lambda settings: {}, "no preset"),
    (without("steps"), "no steps"),
    (without("environment"), "no environment"),
    (with_(preset="huge"), 'preset "huge", not one of tiny, small, gpt-124m, tiny-moe, small-moe'),
    (
        with_(preset=["tiny"]),
        'preset ["tiny"], not one of tiny, small, gpt-124m, tiny-moe, small-moe',
    ),
    (with_(data="text"), 'data "text", not a list of paths'),
    (with_(data=[3]), "data [3], not a list of paths"),
    (with_(recipes=["bf17"]), f'recipes ["bf17"], not {NAMES}'),
    (with_(recipes=["bf16", "bf16"]), f'recipes ["bf16", "bf16"], not {NAMES}'),
    (
        with_(recipes=["mxfp8", "mxfp8[keep_w=True]"]),
        f'recipes ["mxfp8", "mxfp8[keep_w=True]"], not {NAMES}',
    ),
    (with_(recipes=[]), f"recipes [], not {NAMES}"),
    (with_(recipes=[[]]), f"recipes [[]], not {NAMES}"),
    (with_(steps="4"), f'steps "4", not {WHOLE} 1 {MOST}'),
    (with_(steps=True), f"steps true, not {WHOLE} 1 {MOST}"),
    (with_(steps=None), f"steps null, not {WHOLE} 1 {MOST}"),
    (with_(steps=2**63), f"steps {2**63}, not {WHOLE} 1 {MOST}"),
    (with_(batch_size=0), f"batch_size 0, not {WHOLE} 1 {MOST}"),
    (with_(seq_len=16.0), f"seq_len 16.0, not {WHOLE} 2 {MOST}"),
    (with_(eval_every=0), f"eval_every 0, not {WHOLE} 1 {MOST}"),
    (with_(seed=-1), f"seed -1, not {WHOLE} 0 {MOST}"),
    (with_(seeds=10**11), f"seeds {10**11}, not a whole number from 1 to 1000"),
    (with_(lr=float("nan")), "lr NaN, not a finite number above 0"),
    (with_(lr=float("inf")), "lr Infinity, not a finite number above 0"),
    (with_(lr=0.0), "lr 0.0, not a finite number above 0"),
    (with_(lr="0.1"), 'lr "0.1", not a finite number above 0'),
    (with_(lr=True), "lr true, not a finite number above 0"),
    (with_(device="cupboard"), 'device "cupboard", not cpu or cuda'),
    (with_(data_sha256=None), "data_sha256 null, not a text"),
    (with_(environment=None), "environment null, not an object"),
    (with_(recipes="b" * 100), f'recipes "{"b" * 59}..., not {NAMES}'),
]


@pytest.mark.parametrize(("change", "fault"), SETTINGS, ids=[fault for _, fault in SETTINGS])
def test_settings_that_no_run_has(
    change: Change, fault: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_folder / "settings.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    before = tree(run_folder)
    assert refusal(capsys, "train", "--out", str(run_folder), "--resume") == (
        f"blockscale train: --resume = {file} ({fault}); need the file the run wrote; start again "
        "in another folder"
    )
    assert tree(run_folder) == before


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[" * 99999],
    ids=["empty", "cut short", "no UTF-8", "too deep"],
)
def test_settings_that_are_no_json(
    content: bytes, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_folder / "settings.json"
    file.write_bytes(content)
    assert refusal(capsys, "train", "--out", str(run_folder), "--resume") == (
        f"blockscale train: --resume = {file} (damaged); need the file the run wrote; start again "
        "in another folder"
    )


def test_settings_that_cannot_be_read(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run_folder / "settings.json"
    file.unlink()
    file.mkdir()
    assert refusal(capsys, "train", "--out", str(run_folder), "--resume") == (
        f"blockscale train: --resume = {file} (Is a directory); need the file the run wrote; start "
        "again in another folder"
    )


def test_metrics_that_lack_steps(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = run_folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    line = refusal(capsys, "train", "--out", str(run_folder), "--resume")
    assert line == (
        f"blockscale train: --resume = {metrics} (1 step of bf16-seed0); need the 2 steps that "
        "its checkpoint covers; start again in another folder"
    )


FIRST = {"seed": 0, "recipe": "bf16", "step": 1, "train_loss": 5.5, "grad_norm": 2, "seconds": 1}
DAMAGES: list[dict[str, Any]] = [
    {"step": None}, {"step": "1"}, {"step": 1.0}, {"step": [1]}, {"seed": "0"}, {"seed": [0]},
    {"recipe": "bf17"}, {"recipe": {}}, {"train_loss": "5"}, {"seconds": 0}, {"seconds": None},
    {"validation_loss": 5.5}, {"train_loss": True}, {"seed": False},
]  # fmt: skip
LINES = ["3", "null", "[]", '"step"', "{}", "[" * 99999, '{"seed": 0']
LINES += [
    json.dumps({k: v for k, v in FIRST.items() if k != key}) for key in FIRST if key != "grad_norm"
]
LINES += [json.dumps(FIRST | damage) for damage in DAMAGES]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:90])
def test_a_line_that_is_no_metric(
    line: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = run_folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(line + "\n" + lines[1])
    before = tree(run_folder)
    assert refusal(capsys, "train", "--out", str(run_folder), "--resume") == (
        f"blockscale train: --resume = {metrics} (0 steps of bf16-seed0); need the 2 steps that "
        "its checkpoint covers; start again in another folder"
    )
    assert tree(run_folder) == before


@pytest.fixture(scope="module")
def finished_run(stopped_run: Path) -> Path:
    """The same run, continued to its end."""
    folder = shutil.copytree(stopped_run / "run", stopped_run / "finished")
    assert main(["train", "--out", str(folder), "--resume"]) == 0
    return Path(folder)


@pytest.mark.parametrize("content", [b"", b"text", None], ids=["empty", "text", "cut short"])
def test_final_weights_that_are_damaged(
    content: bytes | None, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(finished_run, tmp_path / "run"))
    capsys.readouterr()  # of the fixture
    path = folder / "checkpoints" / "bf16-seed0.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100] if content is None else content)
    before = tree(folder)
    assert refusal(capsys, "train", "--out", str(folder), "--resume") == (
        f"blockscale train: --resume = {path} (truncated, damaged or of another kind); need the "
        "final weights that this run wrote; delete it to train bf16-seed0 again from its start"
    )
    assert tree(folder) == before


def test_a_table_in_a_file_is_not_folded(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "40")
    folder = Path(shutil.copytree(finished_run, tmp_path / "run"))
    capsys.readouterr()  # of the fixture
    assert main(["train", "--out", str(folder), "--resume"]) == 0
    assert "┃ gap to BF16 (nats) ┃" in capsys.readouterr().out
    assert main(["doctor"]) == 0
    reason = next(b["reason"] for b in bs.describe()["backends"] if b["name"] == "cuda")
    assert reason in capsys.readouterr().out


def test_final_weights_that_are_deleted_are_trained_again(
    finished_run: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished_run, tmp_path / "run"))
    path = folder / "checkpoints" / "bf16-seed0.safetensors"
    whole = path.read_bytes()
    path.unlink()
    assert main(["train", "--out", str(folder), "--resume"]) == 0
    assert path.read_bytes() == whole


def changed_rows(kind: str, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Rows, and what is wrong with them."""
    if kind == "no validation":
        kept = [row for row in rows if "train_loss" in row]
        return kept, "0 validations of bf16-seed0); need the 1 validation "
    if kind == "a step twice":
        return [*rows[:3], rows[2], *rows[4:]], "4 steps of bf16-seed0, not in order); need the 4"
    moved = [row | {"step": 3} if "validation_loss" in row else row for row in rows]
    return moved, "1 validation of bf16-seed0, not in order); need the 1 validation "


@pytest.mark.parametrize("kind", ["no validation", "a step twice", "an early validation"])
def test_a_finished_run_with_other_metrics(
    kind: str, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(finished_run, tmp_path / "run"))
    capsys.readouterr()  # of the fixture
    metrics = folder / "metrics.jsonl"
    rows, fault = changed_rows(
        kind, [json.loads(line) for line in metrics.read_text().split("\n")[:-1]]
    )
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = refusal(capsys, "train", "--out", str(folder), "--resume")
    assert line.startswith(f"blockscale train: --resume = {metrics} ({fault}")
    assert line.endswith(" that its checkpoint covers; start again in another folder")


def test_more_steps_than_there_are(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many steps as no list holds are counted, not listed."""
    folder = Path(shutil.copytree(finished_run, tmp_path / "run"))
    capsys.readouterr()
    file = folder / "settings.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"steps": 2**62}))
    line = refusal(capsys, "train", "--out", str(folder), "--resume")
    assert f"metrics.jsonl (4 steps of bf16-seed0); need the {2**62} steps" in line


def test_a_run_in_use(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_run(run_folder, json.loads((run_folder / "settings.json").read_text()))
    assert refusal(capsys, "train", "--out", str(run_folder), "--resume") == (
        f"blockscale train: --out = {run_folder}; need a folder that no other process is training "
        "in; wait for it or choose another folder"
    )
