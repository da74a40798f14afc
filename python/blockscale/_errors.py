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
    """Raise ValueError for a value of the right type that cannot be used."""
    raise ValueError(message(operation, argument, got, need, remedy))


def fail_type(operation: str, argument: str, got: object, need: str, remedy: str = "") -> NoReturn:
    """Raise TypeError naming the type of `got`."""
    what = "None" if got is None else kind_of(got)
    raise TypeError(message(operation, argument, what, need, remedy))


def fail_offsets(operation: str, got: object) -> NoReturn:
    """Raise TypeError for offsets that are not a tensor."""
    need = "a tensor of the cumulative ends of groups, [G] int32 or int64"
    remedy = proxy_remedy(got) or "torch.tensor(ends, device=x.device)"
    fail_type(operation, "offsets", got, need, remedy)


def proxy_remedy(got: object) -> str:
    """The remedy for what torch.fx.symbolic_trace passes instead of a tensor; "" for other
    values."""
    if not isinstance(got, torch.fx.Proxy):
        return ""
    remedy = "trace before bs.convert, or make the modules that call it leaves: a Tracer whose"
    in_torchvision = 'tracer_kwargs={"leaf_modules": [bs.nn.Linear]}'
    return f"{remedy} is_leaf_module accepts bs.nn.Linear; in torchvision, {in_torchvision}"


def kind_of(got: object) -> str:
    """The name of its type, with an article."""
    kind = type(got).__name__
    return f"an {kind}" if kind[0] in "AEIOUaeiou" or kind == "ndarray" else f"a {kind}"


def counted(count: int, noun: str) -> str:
    """`1 layer` or `2 layers`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def reword(refusal: str, operation: str, argument: str) -> str:
    """Turn the core's message about a spec or layout alone, such as "spec: block = 3x3; need ...",
    into one about an operation's argument: "quantize: spec.block = 3x3; need ..."."""
    return f"{operation}: {argument}.{refusal.partition(': ')[2]}"


def typed(error: Exception) -> Exception:
    """An operator's error with the type that PyTorch's own would have: lack of GPU memory becomes
    OutOfMemoryError, which code that reduces batch sizes catches (through the stable ABI every
    failure is a RuntimeError). Other errors stay as they are."""
    lacks_memory = type(error) is RuntimeError and "out of memory. Tried to allocate" in str(error)
    return torch.OutOfMemoryError(str(error)) if lacks_memory else error


def as_pytorch_raises(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap a function so that its errors are `typed`."""

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
    """An integer of any type, such as NumPy's, as an int; None for anything else: a bool is a
    mistake, and reading a tensor might synchronize."""
    if isinstance(value, bool | torch.Tensor):
        return None
    if isinstance(value, int | torch.SymInt):  # a symbol stays a symbol
        return value  # type: ignore[return-value]
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def any_device(operation: str, device: Any) -> torch.device:
    """The device given to `.to()`; refuses anything that names none."""
    try:
        return torch.device(device)
    except (TypeError, RuntimeError):
        if isinstance(device, str | torch.dtype | int):
            raise TypeError(message(operation, "device", repr(device), "a device")) from None
        fail_type(operation, "device", device, "a device")


def any_int(operation: str, argument: str, value: object, need: str = "an int") -> int:
    """The value as an int; refuses anything that is not an integer."""
    number = value if type(value) is int else integer(value)
    if number is None:
        fail_type(operation, argument, value, need)
    return number


def check_int(operation: str, argument: str, value: object, need: str = "an int") -> int:
    """The same, but also refuses ints beyond 64 bits."""
    number = any_int(operation, argument, value, need)
    if type(number) is int and not -(1 << 63) <= number < 1 << 63:
        fail(operation, argument, number, "ints of 64 bits")
    return number


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that begins with `name`, or is spelled most like it, ignoring case; None if
    none is close by difflib's measure, whose default cutoff keeps "explain" apart from "train"."""
    spelled = {other.lower(): other for other in known}
    begun = [other for other in spelled if name and other.startswith(name.lower())]
    close = begun or difflib.get_close_matches(name.lower(), spelled, n=1)
    return spelled[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The remedy that names the `nearest`; empty if there is none."""
    close = nearest(name, known)
    return "" if close is None else f"did you mean {close!r}?"
