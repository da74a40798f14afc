"""Functions of texts in compiled code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def constant(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let torch.compile call a function of texts: it cannot trace a call into C, and need not,
    since a text has one meaning.

    The function returns plain values: the compiler can neither compare nor copy an object that it
    has not seen made. What the function refuses is raised outside it, where code that is compiled
    may catch it: an error within is one of the compiler.
    """

    def told(*args: _P.args, **kwargs: _P.kwargs) -> tuple[_T | None, str]:
        try:
            return function(*args, **kwargs), ""
        except ValueError as error:
            return None, str(error)

    # The mark of torch.compiler.assume_constant_result(), which imports the compiler: a second.
    told._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        made, refusal = told(*args, **kwargs)
        if refusal:
            raise ValueError(refusal)
        return made  # type: ignore[return-value]

    return run
