"""The folder of one `blockscale train` run: settings, metrics and checkpoints that survive a kill.

    settings.json         written once, before anything else
    metrics.jsonl         one line per training step and per evaluation; only "seconds" is a time
    checkpoints/*.pt      a training in progress: model, optimizer, step, random state
    checkpoints/*.safetensors   the weights of a finished training, which is what marks it finished
    report.md, loss.png   written at the end, from settings.json and metrics.jsonl

A metrics line is on disk before the checkpoint that covers it, so after a kill the metrics reach at
least as far as the checkpoint; `open_run` cuts off the excess, and those steps are run again with
the same result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from blockscale._errors import counted
from blockscale.cli.errors import CliError
from blockscale.cli.files import (
    make_folder,
    naming,
    remove_empty,
    save_state,
    write_atomically,
    write_json,
)
from blockscale.cli.provenance import ORIGIN

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One training of the run: a recipe from one seed's initial weights."""

    seed: int
    recipe: str

    def __str__(self) -> str:
        return f"{self.recipe}-seed{self.seed}"

    @property
    def file_name(self) -> str:
        """The name of its files, without the extension; the beginning and a digest if the name is
        too long for a file."""
        name = str(self)
        digest = hashlib.sha256(name.encode()).hexdigest()
        return name if len(name) <= 200 else f"{name[:120]}-{digest[:16]}"


class RunFolder:
    """An opened run: its settings, its metrics so far, and its checkpoints."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings = settings
        self.run_id = run_id(settings)
        self.rows: list[Row] = []
        self.checkpoints = path / "checkpoints"
        self.checkpoints.mkdir(exist_ok=True)
        self._hold_lock()
        self._metrics: BinaryIO | None = None
        self.made: list[Path] | None = None  # the folders made for it, if it is new

    def _hold_lock(self) -> None:
        """Locks the run: two processes writing it would corrupt it. The lock ends with the
        process."""
        handle = os.open(self.path / "settings.json", os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CliError(
                f"--out = {self.path}; need a folder that no other process is training in; wait "
                "for it or choose another folder"
            ) from None
        except OSError as error:
            raise CliError(
                f"--out = {self.path} ({error.strerror}); need a file system that can lock files; "
                "choose a folder on another one"
            ) from None

    def cells(self) -> list[Cell]:
        """Every training of the run, in the order they are run."""
        first, count = self.settings["seed"], self.settings["seeds"]
        return [Cell(s, r) for s in range(first, first + count) for r in self.settings["recipes"]]

    def finished(self, cell: Cell) -> bool:
        """Whether the cell's final weights are in place."""
        return self.weights_path(cell).exists()

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def weights_path(self, cell: Cell) -> Path:
        return self.checkpoints / f"{cell.file_name}.safetensors"

    def checkpoint_path(self, cell: Cell) -> Path:
        return self.checkpoints / f"{cell.file_name}.pt"

    def append(self, cell: Cell, step: int, **values: float) -> None:
        """Adds one metrics line; it is certain to be on disk only after the next checkpoint."""
        row: Row = {"seed": cell.seed, "recipe": cell.recipe, "step": step, **values}
        with naming(self.metrics_path):
            if self._metrics is None:
                self._metrics = open(self.metrics_path, "ab")  # noqa: SIM115 (kept open)
            self._metrics.write(encode_row(row))
        self.rows.append(row)

    def flush(self) -> None:
        """Puts every metrics line on disk."""
        if self._metrics is not None:
            with naming(self.metrics_path):
                self._metrics.flush()
                os.fsync(self._metrics.fileno())

    def close(self) -> None:
        """Closes the metrics."""
        if self._metrics is not None:
            with naming(self.metrics_path):
                self._metrics.close()

    def save_checkpoint(self, cell: Cell, state: dict[str, Any]) -> None:
        """Writes a training's state, after its metrics; the previous state stays until then."""
        self.flush()
        state = {"format": "blockscale-train-1", "run_id": self.run_id, "cell": str(cell), **state}
        write_atomically(self.checkpoint_path(cell), lambda file: save_state(state, file))

    def load_checkpoint(self, cell: Cell) -> dict[str, Any] | None:
        """The cell's saved state, None if there is none; CliError if it is not this run's."""
        path = self.checkpoint_path(cell)
        if not path.exists():
            return None
        need = "a checkpoint of this run"
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for a damaged file
            reason = f"{type(error).__name__}: truncated, damaged or not a checkpoint"
            raise unusable(path, cell, reason, need) from None
        expected = {"format": "blockscale-train-1", "run_id": self.run_id, "cell": str(cell)}
        for key, value in expected.items():
            got = state.get(key) if isinstance(state, dict) else type(state).__name__
            if got != value:
                raise unusable(path, cell, f"{key} {got!r}", f"{need} ({key} {value!r})")
        kinds = {"step": int, "rng": dict, "model": dict, "optimizer": dict}
        lacking = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
        if lacking:
            raise unusable(path, cell, f"without its {', '.join(lacking)}", need)
        return dict(state)

    def check_weights(self, cell: Cell) -> None:
        """CliError unless the final weights of a finished cell are a whole file."""
        from safetensors import SafetensorError, safe_open

        path = self.weights_path(cell)
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError):
            reason = "truncated, damaged or of another kind"
            raise unusable(path, cell, reason, "the final weights that this run wrote") from None

    def finish(self, cell: Cell, weights: dict[str, torch.Tensor]) -> None:
        """Replaces the checkpoint with the final weights."""
        from safetensors.torch import save

        self.flush()
        # One key only: safetensors writes several in arbitrary order, and files could not be
        # compared.
        content = save(weights, metadata={"trained_as": str(cell)})
        write_atomically(self.weights_path(cell), lambda file: file.write(content))
        self.checkpoint_path(cell).unlink(missing_ok=True)

    def discard(self) -> bool:
        """Removes a new run, unless a step of it has been trained already."""
        if self.made is None or self.rows:
            return False
        (self.path / "settings.json").unlink()
        remove_empty([self.checkpoints, *self.made])
        return True


def run_id(settings: dict[str, Any]) -> str:
    """An identifier that is the same for runs that do the same, whatever their date and commit."""
    where = {k: v for k, v in settings.get("environment", {}).items() if k not in ORIGIN}
    what = settings | {"environment": where}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def create_run(path: Path, settings: dict[str, Any]) -> RunFolder:
    """Starts a run in a new or empty folder; CliError if it is not empty or is unwritable."""
    check_free(path)
    made: list[Path] = []
    try:
        made = make_folder(path)
        write_json(path / "settings.json", settings)
        folder = RunFolder(path, settings)
    except (OSError, CliError) as error:  # unwritable, or it cannot be locked
        with contextlib.suppress(OSError):  # the next try must not find a run
            (path / "settings.json").unlink()
        remove_empty([path / "checkpoints", *made])
        if isinstance(error, CliError):
            raise
        raise CliError(
            f"--out = {path} ({error.strerror}); need a folder that can be written; choose another"
        ) from None
    folder.made = made
    return folder


def unusable(path: Path, cell: Cell, reason: str, need: str) -> CliError:
    """The refusal of a cell's saved file."""
    return CliError(
        f"--resume = {path} ({reason}); need {need}; delete it to train {cell} again from its start"
    )


def is_run(names: Iterable[str]) -> bool:
    """Whether a folder with these entries is one that `RunFolder` has opened."""
    return {"settings.json", "checkpoints"}.issubset(names)


def check_free(path: Path) -> None:
    """CliError unless a new run may be started in `path`."""
    try:
        held = sorted(n for n in os.listdir(path) if not n.endswith(".tmp"))
    except FileNotFoundError:
        return
    except OSError as error:
        raise CliError(
            f"--out = {path} ({error.strerror}); need a folder that can be written; choose another"
        ) from None
    if "settings.json" in held:
        raise CliError(
            f"--out = {path} (holds a run); need a new or empty folder; add --resume to continue "
            "that run, or choose another folder"
        )
    if held:
        raise CliError(
            f"--out = {path} (holds {held[0]}); need a new or empty folder; choose another"
        )


def open_run(path: Path, settings: dict[str, Any]) -> RunFolder:
    """Continues a run: keeps the metrics that finished trainings and checkpoints cover."""
    folder = RunFolder(path, settings)
    reached: dict[Cell, int] = {}
    for cell in folder.cells():
        if folder.finished(cell):
            folder.check_weights(cell)
            reached[cell] = settings["steps"]
        else:
            state = folder.load_checkpoint(cell)
            reached[cell] = state["step"] if state else 0
    metrics = folder.metrics_path
    held = metrics.read_bytes() if metrics.exists() else b""
    folder.rows = covered_rows(held, reached)
    check_rows(folder, reached)
    content = b"".join(encode_row(row) for row in folder.rows)
    if held != content:
        write_atomically(metrics, lambda file: file.write(content))
    return folder


def covered_rows(metrics: bytes, reached: dict[Cell, int]) -> list[Row]:
    """The lines of metrics.jsonl up to the steps reached."""
    rows: list[Row] = []
    for line in metrics.splitlines():
        try:
            row = decode_row(line)
            keep = row["step"] <= reached[Cell(row["seed"], row["recipe"])]
            if not is_metric(row):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            break  # the line that the kill cut short
        if keep:
            rows.append(row)
    return rows


def check_rows(folder: RunFolder, reached: dict[Cell, int]) -> None:
    """CliError unless the metrics hold every step and every validation that they should."""
    steps, every = folder.settings["steps"], folder.settings["eval_every"]
    found: dict[tuple[Cell, str], list[int]] = {}
    for row in folder.rows:
        key = "step" if "train_loss" in row else "validation"
        found.setdefault((Cell(row["seed"], row["recipe"]), key), []).append(row["step"])
    for cell, step in reached.items():
        ends = step == steps and step % every != 0  # the last step is always validated
        for key, count in (("step", step), ("validation", step // every + ends)):
            got = found.get((cell, key), [])
            if len(got) == count:  # first: a damaged count may be too large to list
                want = list(range(1, step + 1))
                if key == "validation":
                    want = [*range(every, step + 1, every), *([step] if ends else [])]
                if got == want:
                    continue
            order = ", not in order" if len(got) == count else ""
            raise CliError(
                f"--resume = {folder.metrics_path} ({counted(len(got), key)} of {cell}{order}); "
                f"need the {counted(count, key)} that its checkpoint covers; start again in "
                "another folder"
            )


def encode_row(row: Row) -> bytes:
    """One line of strict JSON: numbers that JSON lacks (a diverged loss) become null."""
    plain = {k: None if v != v or v in (math.inf, -math.inf) else v for k, v in row.items()}
    return (json.dumps(plain) + "\n").encode()


def decode_row(line: bytes) -> Row:
    """The inverse of encode_row, null read as NaN; ValueError for anything but an object."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError
    return {key: math.nan if value is None else value for key, value in row.items()}


def is_metric(row: Row) -> bool:
    """Whether a row with seed, recipe and step has the other values that `append` writes."""
    losses = [key for key in ("train_loss", "validation_loss") if key in row]
    numbers = [value for key, value in row.items() if key != "recipe"]
    good = len(losses) == 1 and all(type(value) in (int, float) for value in numbers)
    return good and type(row["step"]) is int and row.get("seconds", 0) > 0
