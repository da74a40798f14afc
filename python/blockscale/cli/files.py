"""Files that the commands write: whole or not at all, and a failure names the file."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from blockscale.cli.errors import CliError


def make_folder(path: Path) -> list[Path]:
    """Makes a folder with its parents; returns those that did not exist, innermost first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        remove_empty(missing)
        raise
    return missing


def remove_empty(folders: Sequence[Path]) -> None:
    """Removes the folders that are still empty, innermost first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def check_writable(option: str, folder: Path, path: Path | None = None) -> None:
    """CliError unless files can be written to an existing folder; `path`: what was asked for, if
    not the folder."""
    probe = folder / ".blockscale-probe"
    try:
        write_atomically(probe, lambda file: None)
        probe.unlink()
    except OSError as error:
        raise CliError(
            f"{option} = {path or folder} ({error.strerror}); need a folder that can be written; "
            "choose another"
        ) from None


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """A context in which a failed write names `path`."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_json(path: Path, value: Any, indent: int = 2) -> None:
    content = (json.dumps(value, indent=indent) + "\n").encode()
    write_atomically(path, lambda file: file.write(content))


def temporary_of(path: Path) -> Path:
    """Where `path` is written before it is whole. No file of the user's has this name, and one left
    by a kill is overwritten. It is short even if `path` is not."""
    return path.with_name(f".blockscale-{zlib.crc32(os.fsencode(path.name)):08x}.tmp")


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Replaces `path` with what `write` writes, or leaves it alone: never half of it."""
    temporary = temporary_of(path)
    with naming(path):
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)


class Watched:
    """A file to write to that remembers the exception that ended writing."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except BaseException as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def save_state(state: dict[str, Any], file: BinaryIO) -> None:
    """torch.save, which by itself reports a full disk or Ctrl-C as an inconsistency of its file."""
    watched = Watched(file)
    try:
        torch.save(state, watched)  # type: ignore[arg-type]
    except RuntimeError as failure:
        if watched.error is not None:
            raise watched.error from None
        cause: BaseException | None = failure
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            cause = cause.__context__
        raise
