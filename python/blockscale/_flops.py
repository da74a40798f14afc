"""What torch.utils.flop_counter counts for the operators: a multiplication and an addition for each
product of values, as for torch.mm. Importing this registers it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = Sequence[int]
_ops = torch.ops.blockscale


def _linear(x: Shape, w: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * w[-2]  # each row by the one matrix that is its own


def _linear_backward(
    dy: Shape,
    saved: Any,
    recipe: str,
    k: int,
    dx: bool,
    dw: bool,
    db: bool,
    offsets: Any = None,
    x_dtype: Any = None,
    w_dtype: Any = None,
    bias_dtype: Any = None,
    skip_dx: bool = False,
    skip_dw: bool = False,
    **_: Any,
) -> int:
    return 2 * math.prod(dy) * k * ((dx and not skip_dx) + (dw and not skip_dw))


def _linear_backward_into(
    dy: Shape,
    saved: Any,
    recipe: str,
    k: int,
    dx: bool,
    db: bool,
    offsets: Any,
    into: Any,
    x_dtype: Any = None,
    bias_dtype: Any = None,
    skip_dx: bool = False,
    **_: Any,
) -> int:
    return 2 * math.prod(dy) * k * ((dx and not skip_dx) + 1)


def _matmul(*call: Any, **_: Any) -> int:
    a_rows, b_rows, k = call[5], call[11], call[12]
    return int(2 * a_rows * b_rows * k)


_FORMULAS: dict[Any, Callable[..., int]] = {
    _ops.linear: _linear,
    _ops.linear_exported: _linear,
    _ops.linear_backward: _linear_backward,
    _ops.linear_backward_into: _linear_backward_into,
    _ops.matmul: _matmul,
}
for _op, _formula in _FORMULAS.items():
    register_flop_formula(_op)(_formula)
