"""How the command refuses: one line on stderr (operation, argument, got, need, remedy), exit 2; and
how it fails: also one line, exit 1."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from blockscale import _errors


class CliError(Exception):
    """A refusal whose text is meant for the user, without the leading `blockscale <command>: `."""


class Failure(Exception):
    """An error that no check could foresee, in the same form: a full disk, lack of memory."""


def os_reason(error: OSError) -> str:
    """Which file failed and how; a file without a name is what the command prints to."""
    return f"{error.filename or 'output'}: {error.strerror or error}"


def printable(text: str) -> str:
    """Text from a file or the user, with escapes for what would act on a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# PyTorch's messages for failed allocations without an exception type of their own. The last is for
# an allocation within one of our operators, whose interface does not pass on the reason.
NO_MEMORY = (
    "allocate memory", "out of memory", "bad_alloc", "ALLOC_FAILED",
    "Storage size calculation overflowed", "aoti_torch_empty",
)  # fmt: skip


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the CPU or on a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that refuses with one line in the common form instead of its usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # As in Python 3.14 and later: -1x5 is a wrong value of the preceding option, not an option.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        # argparse says "argument --steps: <text of ArgumentTypeError>".
        found = re.fullmatch(r"argument (\S+): (.*; need .*)", message)
        if found:
            raise CliError(f"{found[1]} = {found[2]}")
        _, _, words = message.partition("unrecognized arguments: ")
        options = [option for action in self._actions for option in action.option_strings]
        names = [option[2:] for option in options if option.startswith("--")]
        unknown = [word for word in words.split() if word.startswith("--")]
        if unknown and (close := _errors.nearest(unknown[0][2:].partition("=")[0], names)):
            raise CliError(f"{message}; did you mean --{close}?")
        raise CliError(f"{message}; `{self.prog} --help` lists the options")

    def print_help(self, file: Any = None) -> None:
        """Unlike argparse's own, fails if nothing can be written."""
        print(self.format_help(), end="", file=file)


def nearest(name: str, known: Sequence[str]) -> str:
    """The remedy for an unknown name, after a message that lists the known ones."""
    close = _errors.nearest(name, known)
    return "choose one of these" if close is None else f"did you mean {close}?"


def device_name(text: str) -> str:
    """An argparse type: where to run."""
    if text not in ("cpu", "cuda"):
        gpu = text.lower().startswith(("gpu", "nvidia"))  # whose letters are nearer to cpu
        remedy = nearest("cuda" if gpu else text, ("cpu", "cuda"))
        raise argparse.ArgumentTypeError(f"{text}; need cpu or cuda; {remedy}")
    return text


def path_text(text: str) -> str:
    """An argparse type: a path. Python reads an empty one as the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("''; need a path; name one, or leave the option out")
    try:
        text.encode()
    except UnicodeEncodeError:  # safetensors cannot open others
        raise argparse.ArgumentTypeError(f"{text!r}; need a path in UTF-8; rename it") from None
    return text


@dataclass(frozen=True)
class Whole:
    """Whole numbers from `least` to `most`, as the text of an option and as a JSON value."""

    least: int
    most: int = 2**63 - 1

    def __str__(self) -> str:
        most = "2^63 - 1" if self.most == Whole.most else self.most
        return f"a whole number from {self.least} to {most}"

    def holds(self, value: Any) -> bool:
        return type(value) is int and self.least <= value <= self.most

    def parse(self, text: str) -> int:
        """An argparse type."""
        try:
            value = int(text)
        except ValueError:
            value = self.least - 1
        if not self.holds(value):
            raise argparse.ArgumentTypeError(
                f"{text}; need {self}; leave the option out for its default"
            )
        return value


def positive_float(text: str) -> float:
    """An argparse type: a finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(
            f"{text}; need a finite number above 0; leave the option out for its default"
        )
    return value
