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


def _gradients(dy: Shape, k: int, dx: bool, dw: bool, *skips: bool) -> int:
    skip_dx, skip_dw, *_ = (*skips, False, False)
    return 2 * math.prod(dy) * k * ((dx and not skip_dx) + (dw and not skip_dw))


def _linear_backward(*call: Any, **_: Any) -> int:
    return _gradients(call[0], *call[3:6], *call[11:13])


def _linear_piece_backward(*call: Any, **_: Any) -> int:
    return _gradients(call[0], *call[3:6], *call[10:12])


def _linear_backward_into(*call: Any, **_: Any) -> int:
    return _gradients(call[0], *call[3:5], True, *call[10:11])


def _matmul(*call: Any, **_: Any) -> int:
    a_rows, b_rows, k = call[5], call[11], call[12]
    return int(2 * a_rows * b_rows * k)


_FORMULAS: dict[Any, Callable[..., int]] = {
    _ops.linear: _linear,
    _ops.linear_exported: _linear,
    _ops.linear_piece: _linear,
    _ops.linear_backward: _linear_backward,
    _ops.linear_piece_backward: _linear_piece_backward,
    _ops.linear_backward_into: _linear_backward_into,
    _ops.matmul: _matmul,
}
for _op, _formula in _FORMULAS.items():
    register_flop_formula(_op)(_formula)
