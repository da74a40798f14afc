"""The text to train on: which files, how they are split, and which bytes form batch number s."""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blockscale.cli.errors import CliError
from blockscale.cli.run_folder import is_run

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
VALIDATION_TOKENS = 16384  # a whole evaluation, in windows spread evenly over the validation text


@dataclass(frozen=True)
class Corpus:
    """Training and validation text as bytes (uint8, each file followed by one zero byte)."""

    train: Tensor
    validation: Tensor
    files: int
    validation_files: int
    sha256: str
    source: str

    @property
    def split(self) -> str:
        """What is held out, in words."""
        if self.files == 1:
            return "1 file, of which the last tenth is held out for validation"
        verb = "is" if self.validation_files == 1 else "are"
        return (
            f"{self.files} files, of which {self.validation_files} {verb} held out for validation"
        )

    def batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets [B, T] of a step: a pure function of (seed, step), so that resuming
        needs no loader state and every recipe sees the same text."""
        key = hashlib.sha256(f"{seed}:{step}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        starts = torch.randint(len(self.train) - seq_len, (batch_size,), generator=generator)
        return windows(self.train, starts, seq_len)

    def validation_batches(self, batch_size: int, seq_len: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The fixed validation windows, the same for every recipe and seed."""
        last = len(self.validation) - seq_len - 1
        count = max(1, min(VALIDATION_TOKENS // seq_len, last // seq_len))
        starts = torch.arange(count) * last // max(1, count - 1)
        for first in range(0, count, batch_size):
            yield windows(self.validation, starts[first : first + batch_size], seq_len)

    def unigram_loss(self) -> float:
        """Nats per byte of a model that knows only the frequency of each byte."""
        train = torch.bincount(self.train.int(), minlength=256).double() + 1.0
        share = torch.bincount(self.validation.int(), minlength=256) / len(self.validation)
        return float(-(share * (train / train.sum()).log()).sum())


def windows(text: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, both [B, T] int64, of the windows beginning at `starts` [B]."""
    rows = text[starts[:, None] + torch.arange(seq_len + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def load_corpus(paths: Sequence[str], seq_len: int) -> Corpus:
    """Reads `paths` (files or folders; none: the standard library's sources) into memory.

    Raises CliError for text that is missing, unreadable, binary, empty or too short to split.
    """
    texts = dict(read_all(paths) if paths else read_stdlib())
    if not texts:
        raise CliError(
            f"--data = {' '.join(paths)}; need text files; hidden, empty and binary files do "
            "not count"
        )
    digest = hashlib.sha256()
    for name in sorted(texts):
        digest.update(as_bytes(f"{name}\0{len(texts[name])}\0") + texts[name])
    held_out = validation_names(texts)
    if len(texts) == 1:  # one file cannot be split by file: its last tenth is held out
        (only,) = texts.values()
        cut = len(only) - len(only) // 10
        train, validation = only[:cut], only[cut:]
    else:
        train = b"".join(texts[n] + b"\0" for n in sorted(texts) if n not in held_out)
        validation = b"".join(texts[n] + b"\0" for n in sorted(texts) if n in held_out)
    for part, text in (("training", train), ("validation", validation)):
        if len(text) < seq_len + 2:
            raise CliError(
                f"--data = {len(text)} bytes of {part} text; need at least {seq_len + 2} for "
                f"--seq-len {seq_len}; give more text or a smaller --seq-len"
            )
    return Corpus(
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        validation=torch.frombuffer(bytearray(validation), dtype=torch.uint8),
        files=len(texts),
        validation_files=len(held_out),
        sha256=digest.hexdigest(),
        source=", ".join(paths) if paths else "the Python standard library's sources",
    )


def as_bytes(name: str) -> bytes:
    """A file's name as on disk, where it need not be UTF-8."""
    return name.encode(errors="surrogateescape")


def validation_names(texts: dict[str, bytes]) -> set[str]:
    """About one file in twenty, picked by a hash of its name; always at least one."""

    def bucket(name: str) -> int:
        return int.from_bytes(hashlib.sha256(as_bytes(name)).digest()[:8], "little")

    chosen = {name for name in texts if bucket(name) % 20 == 0}
    if not chosen or len(chosen) == len(texts):
        chosen = {min(texts, key=bucket)}
    return chosen


def read_stdlib() -> Iterator[tuple[str, bytes]]:
    """Every .py file of the standard library except its tests, named relative to its folder."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in walk(root, SKIPPED_FOLDERS, links=True):
        if path.suffix == ".py":
            text = read_text(path, "--data")
            if text:
                yield path.relative_to(root).as_posix(), text


def read_all(paths: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """(name, text) of every file named or found in a named folder.

    A named file must be text. In a folder, binary, empty and hidden files are skipped, but an
    unreadable one is an error: silently training on less would be worse.
    """
    # Named by position and relative path, so that neither the split nor the order depends on where
    # the text is or how its path was typed.
    seen: set[str] = set()
    for index, given in enumerate(paths):
        root = Path(given)
        if not given:
            raise CliError("--data = ''; need an existing file or folder; check the path")
        if os.path.realpath(given) in seen:
            raise CliError(f"--data = {given} (given twice); need each text once; leave one out")
        seen.add(os.path.realpath(given))
        if root.is_dir():
            for path in walk(root, {"__pycache__"}):
                text = read_text(path, given)
                if text:
                    yield f"{index}/{path.relative_to(root).as_posix()}", text
            continue
        if not root.is_file():
            got = f"{given} (neither a file nor a folder)" if root.exists() else given
            raise CliError(f"--data = {got}; need an existing file or folder; check the path")
        named = read_text(root, given)
        if not named:
            kind = "a binary file" if named is None else "an empty file"
            raise CliError(f"--data = {given} ({kind}); need text; name text files or folders")
        yield f"{index}/{root.name}", named


def walk(root: Path, skipped: set[str], links: bool = False) -> Iterator[Path]:
    """Visible regular files below `root`, in an order that does not depend on the file system. The
    files of a `blockscale train` run in it are left out: they are not text to train on, and change.
    Without `links`, a link to a folder or to nothing is refused: its target would be silently left
    out."""

    def refuse(error: OSError) -> None:
        raise CliError(
            f"--data = {error.filename} ({error.strerror}); need a readable folder; check its "
            "permissions"
        )

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        if is_run([*names, *subfolders]) and Path(folder) != root:
            subfolders.clear()
            continue
        subfolders[:] = sorted(s for s in subfolders if s not in skipped and s[0] != ".")
        for name in sorted([*names, *subfolders]):
            path = Path(folder, name)
            if name[0] == ".":
                continue
            if path.is_file():
                yield path
            elif path.is_symlink() and not links:
                leads, remedy = "nothing", "remove the link, or restore its target"
                if path.is_dir():
                    leads = "a folder"
                    remedy = "remove the link and give its target as another --data path"
                raise CliError(
                    f"--data = {path} (a link to {leads}); need files and folders themselves; "
                    f"{remedy}"
                )


def read_text(path: Path, given: str) -> bytes | None:
    """A file's bytes, or None for a binary file (one with a zero byte)."""
    try:
        content = path.read_bytes()
    except OSError as error:
        where = given if given == str(path) else f"{given}: {path}"
        raise CliError(
            f"--data = {where} ({error.strerror}); need a readable file; check its permissions"
        ) from None
    return None if b"\0" in content else content


def bits_per_byte(nats: float) -> float:
    """One token is one byte."""
    return nats / math.log(2.0)
