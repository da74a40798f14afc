"""The folder of one `blockscale train` run: settings, metrics and checkpoints that survive a kill.

    settings.json         written once, before anything else
    metrics.jsonl         one line per training step and per evaluation; only "seconds" is a time
    checkpoints/*.pt      a training in progress: model, optimizer, step, random state
    checkpoints/*.safetensors   the weights of a finished training, which is what marks it finished
    report.md, loss.png   written at the end, from settings.json and metrics.jsonl

A metrics line is on disk before the checkpoint that covers it, so after a kill the metrics reach
at least as far as the checkpoint; `open_run` cuts off what reaches further, and those steps are
run again with the same result.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from blockscale.cli.errors import CliError
from blockscale.cli.provenance import ORIGIN

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One training of the run: a recipe from one seed's initial weights."""

    seed: int
    recipe: str

    def __str__(self) -> str:
        return f"{self.recipe}-seed{self.seed}"


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

    def _hold_lock(self) -> None:
        """Two processes writing one run would corrupt it; the lock goes when the process does."""
        handle = os.open(self.path / "settings.json", os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CliError(
                f"--out = {self.path}; need a folder that no other process is training in; wait "
                "for it or choose another folder"
            ) from None

    def cells(self) -> list[Cell]:
        """Every training of the run, in the order they are run."""
        first, count = self.settings["seed"], self.settings["seeds"]
        return [Cell(s, r) for s in range(first, first + count) for r in self.settings["recipes"]]

    def finished(self, cell: Cell) -> bool:
        """Whether the cell's final weights are in place."""
        return self.weights_path(cell).exists()

    def weights_path(self, cell: Cell) -> Path:
        return self.checkpoints / f"{cell}.safetensors"

    def checkpoint_path(self, cell: Cell) -> Path:
        return self.checkpoints / f"{cell}.pt"

    def append(self, cell: Cell, step: int, **values: float) -> None:
        """Adds one metrics line; it is on disk for sure after the next checkpoint only."""
        row: Row = {"seed": cell.seed, "recipe": cell.recipe, "step": step, **values}
        if self._metrics is None:
            self._metrics = open(self.path / "metrics.jsonl", "ab")  # noqa: SIM115 (kept open)
        self._metrics.write(encode_row(row))
        self.rows.append(row)

    def flush(self) -> None:
        """Puts every metrics line on disk."""
        if self._metrics is not None:
            self._metrics.flush()
            os.fsync(self._metrics.fileno())

    def save_checkpoint(self, cell: Cell, state: dict[str, Any]) -> None:
        """Writes a training's state, after its metrics; the previous state stays until then."""
        self.flush()
        state = {"format": "blockscale-train-1", "run_id": self.run_id, "cell": str(cell), **state}
        write_atomically(self.checkpoint_path(cell), lambda file: torch.save(state, file))

    def load_checkpoint(self, cell: Cell) -> dict[str, Any] | None:
        """The cell's saved state, None when there is none; CliError when it is not this run's."""
        path = self.checkpoint_path(cell)
        if not path.exists():
            return None
        remedy = f"delete it to train {cell} again from its start"
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for a damaged file
            reason = type(error).__name__
            raise CliError(
                f"--resume = {path} ({reason}: truncated, damaged or not a checkpoint); need a "
                f"checkpoint of this run; {remedy}"
            ) from None
        expected = {"format": "blockscale-train-1", "run_id": self.run_id, "cell": str(cell)}
        for key, value in expected.items():
            got = state.get(key) if isinstance(state, dict) else type(state).__name__
            if got != value:
                raise CliError(
                    f"--resume = {path} ({key} {got!r}); need a checkpoint of this run ({key} "
                    f"{value!r}); {remedy}"
                )
        return dict(state)

    def finish(self, cell: Cell, weights: dict[str, torch.Tensor]) -> None:
        """Replaces the checkpoint by the final weights."""
        from safetensors.torch import save

        self.flush()
        # One key only: safetensors writes several in any order, and files could not be compared.
        content = save(weights, metadata={"trained_as": str(cell)})
        write_atomically(self.weights_path(cell), lambda file: file.write(content))
        self.checkpoint_path(cell).unlink(missing_ok=True)


def run_id(settings: dict[str, Any]) -> str:
    """The same for runs that do the same, whenever and from whichever commit."""
    where = {k: v for k, v in settings.get("environment", {}).items() if k not in ORIGIN}
    what = settings | ({"environment": where} if "environment" in settings else {})
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def create_run(path: Path, settings: dict[str, Any]) -> RunFolder:
    """Starts a run in a new or empty folder; CliError when it holds something or is unwritable."""
    check_free(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / "settings.json", settings)
        return RunFolder(path, settings)
    except OSError as error:
        raise CliError(
            f"--out = {path} ({error.strerror}); need a folder that can be written; choose another"
        ) from None


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


def read_settings(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """The settings of the run in `path`; CliError unless it is a run with all of `names`."""
    try:
        settings = json.loads((path / "settings.json").read_text())
        if not (isinstance(settings, dict) and settings.keys() >= set(names)):
            raise ValueError
    except (FileNotFoundError, NotADirectoryError):
        raise CliError(
            f"--resume = {path} (holds no run); need the --out folder of an earlier run; leave "
            "--resume out to start one"
        ) from None
    except (ValueError, OSError):
        raise CliError(
            f"--resume = {path / 'settings.json'} (damaged or unreadable); need the file the run "
            "wrote; start again in another folder"
        ) from None
    return settings


def open_run(path: Path, settings: dict[str, Any]) -> RunFolder:
    """Continues a run: keeps the metrics that finished trainings and checkpoints cover."""
    folder = RunFolder(path, settings)
    steps = settings["steps"]
    reached: dict[Cell, int] = {}
    for cell in folder.cells():
        state = None if folder.finished(cell) else folder.load_checkpoint(cell)
        reached[cell] = steps if folder.finished(cell) else state["step"] if state else 0
    metrics = path / "metrics.jsonl"
    for line in metrics.read_bytes().splitlines() if metrics.exists() else []:
        try:
            row = decode_row(line)
            keep = row["step"] <= reached[Cell(row["seed"], row["recipe"])]
        except (ValueError, KeyError, TypeError):
            break  # the line that the kill cut short
        if keep:
            folder.rows.append(row)
    for cell, step in reached.items():
        got = sum("train_loss" in r for r in folder.rows if Cell(r["seed"], r["recipe"]) == cell)
        if got != step:
            raise CliError(
                f"--resume = {metrics} ({got} steps of {cell}); need the {step} steps that its "
                "checkpoint covers; start again in another folder"
            )
    content = b"".join(encode_row(row) for row in folder.rows)
    write_atomically(metrics, lambda file: file.write(content))
    return folder


def encode_row(row: Row) -> bytes:
    """One line of strict JSON: numbers that JSON lacks (a diverged loss) become null."""
    plain = {k: None if v != v or v in (math.inf, -math.inf) else v for k, v in row.items()}
    return (json.dumps(plain) + "\n").encode()


def decode_row(line: bytes) -> Row:
    """The inverse of encode_row, null read as NaN."""
    row = json.loads(line)
    return {key: math.nan if value is None else value for key, value in row.items()}


def write_json(path: Path, value: Any) -> None:
    content = (json.dumps(value, indent=2) + "\n").encode()
    write_atomically(path, lambda file: file.write(content))


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Replaces `path` by what `write` puts in a file, or leaves it alone: never half of it."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)
