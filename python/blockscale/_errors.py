"""The one error form: ``operation: argument = got; need ...; remedy``, on one line."""

from __future__ import annotations

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
    """What is spelled most like `name`, upper and lower case alike; None where nothing is within
    edits of half the longer word's letters. (The core's did_you_mean, src/text.cc, has this rule.)
    """
    distances = {other: edit_distance(name.lower(), other.lower()) for other in known}
    other = min(distances, key=distances.__getitem__, default=None)
    if other is None or 2 * distances[other] > max(len(name), len(other)):
        return None
    return other


def edit_distance(a: str, b: str) -> int:
    """Letters to insert, delete or replace to make one of the other."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            replaced = diagonal + (left != right)
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, replaced)
    return row[-1]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The remedy that names the `nearest`; empty where there is none."""
    close = nearest(name, known)
    return "" if close is None else f"did you mean {close!r}?"
