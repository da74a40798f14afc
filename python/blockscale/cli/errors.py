"""How the command refuses: one line on stderr (operation, argument, got, need, remedy), exit 2."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from blockscale import _errors


class CliError(Exception):
    """A refusal whose text is meant for the user, without the leading `blockscale <command>: `."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that refuses with one line in the common form instead of its usage."""

    def error(self, message: str) -> NoReturn:
        # argparse says "argument --steps: <text of ArgumentTypeError>".
        found = re.fullmatch(r"argument (\S+): (.*; need .*)", message)
        if found:
            raise CliError(f"{found[1]} = {found[2]}")
        raise CliError(f"{message}; `{self.prog} --help` lists the options")


def nearest(name: str, known: Sequence[str]) -> str:
    """The remedy for an unknown name, after a message that lists the known ones."""
    close = _errors.nearest(name, known)
    return "choose one of these" if close is None else f"did you mean {close}?"


def device_name(text: str) -> str:
    """An argparse type: where to run."""
    if text not in ("cpu", "cuda"):
        remedy = nearest(text, ("cpu", "cuda"))
        raise argparse.ArgumentTypeError(f"{text}; need cpu or cuda; {remedy}")
    return text


def integer(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `least` that fits 63 bits."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value < 2**63:
            raise argparse.ArgumentTypeError(
                f"{text}; need a whole number of at least {least}; leave the option out for its "
                "default"
            )
        return value

    return parse


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
