"""The one error form: ``operation: argument = got; need ...; remedy``, on one line."""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def message(operation: str, argument: str, got: object, need: str, remedy: str = "") -> str:
    text = f"{operation}: {argument} = {got}; need {need}"
    return f"{text}; {remedy}" if remedy else text


def fail(operation: str, argument: str, got: object, need: str, remedy: str = "") -> NoReturn:
    """Raise ValueError: a value of the right type that cannot be used."""
    raise ValueError(message(operation, argument, got, need, remedy))


def fail_type(operation: str, argument: str, got: object, need: str, remedy: str = "") -> NoReturn:
    """Raise TypeError naming the type of `got`."""
    what = "None" if got is None else kind_of(got)
    raise TypeError(message(operation, argument, what, need, remedy))


def fail_offsets(operation: str, got: object) -> NoReturn:
    """Raise TypeError: offsets that are no tensor."""
    need = "a tensor of the cumulative ends of groups, [G] int32 or int64"
    fail_type(operation, "offsets", got, need, "torch.tensor(ends, device=x.device)")


def kind_of(got: object) -> str:
    """The name of its type, with an article."""
    kind = type(got).__name__
    return f"an {kind}" if kind[0] in "AEIOUaeiou" or kind == "ndarray" else f"a {kind}"


def reword(refusal: str, operation: str, argument: str) -> str:
    """What the core says of a spec or layout by itself, such as "spec: block = 3x3; need ...", said
    of the argument of an operation: "quantize: spec.block = 3x3; need ..."."""
    return f"{operation}: {argument}.{refusal.partition(': ')[2]}"


def typed(error: Exception) -> Exception:
    """An operator's error as PyTorch's own raise it: a GPU's lack of memory as OutOfMemoryError,
    which what makes batches smaller catches; through the stable ABI every failure is a
    RuntimeError. Others as they are."""
    lacks_memory = type(error) is RuntimeError and "out of memory. Tried to allocate" in str(error)
    return torch.OutOfMemoryError(str(error)) if lacks_memory else error


def as_pytorch_raises(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function with errors that are `typed`."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            told = typed(error)
            if told is error:
                raise
            raise told from None

    return run


def integer(value: object) -> int | None:
    """Any type's integer, such as NumPy's, as an int; None for what is none. A bool is a mistake,
    and a tensor might have to be waited for."""
    if isinstance(value, bool | torch.Tensor):
        return None
    if isinstance(value, int | torch.SymInt):  # a symbol stays one
        return value  # type: ignore[return-value]
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def any_device(operation: str, device: Any) -> torch.device:
    """What `.to()` is given, refused where it names no device."""
    try:
        return torch.device(device)
    except (TypeError, RuntimeError):
        if isinstance(device, str | torch.dtype | int):
            raise TypeError(message(operation, "device", repr(device), "a device")) from None
        fail_type(operation, "device", device, "a device")


def any_int(operation: str, argument: str, value: object, need: str = "an int") -> int:
    """The int that a value is, refused where it is none."""
    number = value if type(value) is int else integer(value)
    if number is None:
        fail_type(operation, argument, value, need)
    return number


def check_int(operation: str, argument: str, value: object, need: str = "an int") -> int:
    """The same, refused where it is none of 64 bits."""
    number = any_int(operation, argument, value, need)
    if type(number) is int and not -(1 << 63) <= number < 1 << 63:
        fail(operation, argument, number, "ints of 64 bits")
    return number


def nearest(name: str, known: Iterable[str]) -> str | None:
    """What begins with `name`, or is spelled most like it, upper and lower case alike; None where
    nothing is close by the measure of difflib, whose default keeps "explain" from "train"."""
    spelled = {other.lower(): other for other in known}
    begun = [other for other in spelled if name and other.startswith(name.lower())]
    close = begun or difflib.get_close_matches(name.lower(), spelled, n=1)
    return spelled[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The remedy that names the `nearest`; empty where there is none."""
    close = nearest(name, known)
    return "" if close is None else f"did you mean {close!r}?"
