"""What torch.utils.flop_counter counts for the operators: a multiplication and an addition per
product of values, as for torch.mm. Importing this module registers it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = Sequence[int]
_ops = torch.ops.blockscale


def _linear(x: Shape, w: Shape, **_: Any) -> int:
    return 2 * math.prod(x) * w[-2]  # each row times its own matrix


def _gradients(
    dy: Shape,
    k: int,
    dx: bool,
    dw: bool = True,
    skip_dx: bool = False,
    skip_dw: bool = False,
    **_: Any,
) -> int:
    return 2 * math.prod(dy) * k * ((dx and not skip_dx) + (dw and not skip_dw))


def _matmul(a_rows: int, b_rows: int, k: int, **_: Any) -> int:
    return 2 * a_rows * b_rows * k


def _by_name(op: Any, formula: Callable[..., int]) -> Callable[..., int]:
    """Call the formula with a call's arguments by their names in the operator's schema."""
    names = [argument.name for argument in op.default._schema.arguments]

    def count(*call: Any, out_val: Any = None, **named: Any) -> int:
        return int(formula(**dict(zip(names, call, strict=False)), **named))

    return count


_FORMULAS: dict[Any, Callable[..., int]] = {
    _ops.linear: _linear,
    _ops.linear_exported: _linear,
    _ops.linear_piece: _linear,
    _ops.linear_backward: _gradients,
    _ops.linear_piece_backward: _gradients,
    _ops.linear_backward_into: _gradients,
    _ops.matmul: _matmul,
}
for _op, _formula in _FORMULAS.items():
    register_flop_formula(_op)(_by_name(_op, _formula))
