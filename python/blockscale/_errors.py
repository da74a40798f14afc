"""The one error form: ``operation: argument = got; need ...; remedy``, on one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn


def message(operation: str, argument: str, got: object, need: str, remedy: str = "") -> str:
    text = f"{operation}: {argument} = {got}; need {need}"
    return f"{text}; {remedy}" if remedy else text


def fail(operation: str, argument: str, got: object, need: str, remedy: str = "") -> NoReturn:
    """Raise ValueError: a value of the right type that cannot be used."""
    raise ValueError(message(operation, argument, got, need, remedy))


def fail_type(operation: str, argument: str, got: object, need: str, remedy: str = "") -> NoReturn:
    """Raise TypeError naming the type of `got`."""
    kind = type(got).__name__
    what = "None" if got is None else f"an {kind}" if kind[0] in "AEIOUaeiou" else f"a {kind}"
    raise TypeError(message(operation, argument, what, need, remedy))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """What is spelled most like `name`, upper and lower case alike; None where nothing is half
    alike."""
    spelled = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.5)
    return spelled[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The remedy that names the `nearest`; empty where there is none."""
    close = nearest(name, known)
    return "" if close is None else f"did you mean {close!r}?"
