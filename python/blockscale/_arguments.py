"""Checks and converts the operators' arguments, with this package's error messages: PyTorch's would
fill a page."""

from __future__ import annotations

import math
import numbers
from typing import Final

import torch

from blockscale._errors import check_int, fail, fail_offsets, fail_type, integer, reword
from blockscale._plain import check_plain
from blockscale.recipe import Spec, spec
from blockscale.rng import Rng, tensors_beside
from blockscale.tensor import QuantizedTensor, check_layout


def check_spec(operation: str, name: str, value: object) -> Spec:
    if not isinstance(value, str | Spec):
        fail_type(operation, name, value, "a Spec, or a spec's text such as 'nvfp4'")
    try:
        return spec(value)
    except ValueError as error:
        raise ValueError(reword(str(error), operation, name)) from None


# Arguments' types: in words, and as classes.
_DTYPE = ("a torch.dtype", (torch.dtype,))
_KINDS: Final[dict[str, tuple[str, tuple[type, ...]]]] = {
    "dtype": _DTYPE,
    "out_dtype": _DTYPE,
    "bias": ("a tensor, or None", (torch.Tensor, type(None))),
}


def check_type(operation: str, name: str, value: object) -> None:
    need, types = _KINDS[name]
    if not isinstance(value, types):
        fail_type(operation, name, value, need)


def check_layout_of(operation: str, name: str, s: Spec, value: object) -> None:
    if not isinstance(value, str):
        fail_type(operation, name, value, "a layout's name such as 'linear'")
    check_layout(operation, name, s, value)


def check_origin(operation: str, value: object) -> list[int]:
    """The origin as the operators take it, empty for None."""
    if value is None:
        return []
    place = [integer(v) for v in value] if isinstance(value, list | tuple) else [None]
    if None in place:
        fail_type(operation, "origin", value, "(row, column), two ints")
    if len(place) != 2:
        fail(operation, "origin", place, "[row, column]")
    return [check_int(operation, "origin", number) for number in place]


def check_tensor(operation: str, x: object) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        fail_type(operation, "x", x, "a tensor")
    return check_plain(operation, "x", x).detach()


def check_operand(operation: str, name: str, q: object) -> None:
    if not isinstance(q, QuantizedTensor):
        fail_type(operation, name, q, "a QuantizedTensor", "quantize it first")


def check_rng(
    operation: str, rng: object, x: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if rng is None:
        return None, None
    if not isinstance(rng, Rng):
        fail_type(operation, "rng", rng, "bs.Rng(seed, offset)")
    return tensors_beside(rng, x)


def check_offsets(operation: str, offsets: object) -> torch.Tensor | None:
    if offsets is None:
        return None
    if not isinstance(offsets, torch.Tensor):
        fail_offsets(operation, offsets)
    return check_plain(operation, "offsets", offsets)


def check_amax(
    operation: str,
    name: str,
    value: object,
    x: torch.Tensor,
    batch_dims: int,
    offsets: torch.Tensor | None,
) -> torch.Tensor | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return check_plain(operation, name, value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        fail_type(operation, name, value, "a number, or a float32 tensor")
    need = "0, or from 1.4e-45 to 3.4028235e38, as float32 rounds it"
    try:
        number = float(value)
    except OverflowError:
        fail(operation, name, "an int beyond any float", need)
    # NaN in a tensor is data and makes the result NaN; as a plain number it is a mistake. (No
    # isnan(): in compiled code the number may be a symbol.)
    if not number >= 0:
        fail(operation, name, number, "0 or more", "amax is the largest |x|; bs.amax computes it")
    if 2.0**128 - 2.0**103 <= number < math.inf or 0 < number <= 2**-150:  # to Inf, to 0
        fail(operation, name, number, need)
    if torch.finfo(torch.float32).max < number < math.inf:  # refused by new_full()
        number = torch.finfo(torch.float32).max
    shape = x.shape[:batch_dims] if offsets is None else offsets.shape
    if 0 < number < 2**-126:  # PyTorch's conversion may flush it to 0: torch.set_flush_denormal()
        return x.new_full(shape, round(number * 2**149), dtype=torch.int32).view(torch.float32)
    return x.new_full(shape, number, dtype=torch.float32)  # fake if x is
