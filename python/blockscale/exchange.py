"""Rows that travel to other ranks and back as codes: what experts that are divided over ranks are
sent of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from blockscale._arguments import check_spec
from blockscale._errors import fail, fail_type, integer
from blockscale.functional import first_order
from blockscale.recipe import Spec
from blockscale.tensor import FLOATS, FLOATS_TEXT, check_plain

_OP = "quantized_all_to_all"
_ops = torch.ops.blockscale


def quantized_all_to_all(
    x: torch.Tensor,
    spec: str | Spec,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: dist.ProcessGroup | None = None,
    backward_spec: str | Spec | None = None,
) -> torch.Tensor:
    """`all_to_all_single` of rows that travel as codes and scales, differentiable.

    Each row is quantized by itself where it starts and decoded where it arrives, so the result is
    `dequantize(quantize(x, spec))`, rows exchanged. Over the wire an element takes 1.03 bytes in
    "mxfp8" and 0.53 in "mxfp4", where BF16 takes two. Values of these specs stay what they are
    when they are quantized again: a layer whose recipe has the same spec for fprop_x multiplies
    the codes that it would have without the exchange. (Its operand for the weight's gradient is
    made of decoded values instead, and differs. Values of FP8 with FP32 scales are rounded to x's
    dtype first.)

    Args:
        x: [T, K] float32, bfloat16 or float16; rows sorted by the rank that they go to.
        spec: in blocks along a row, rounded to nearest, without an outer scale or a transform:
            "mxfp8", "mxfp6", "mxfp4", "fp8_1x128", or a change of one.
        output_splits: rows that come from each rank of the group.
        input_splits: rows that go to each; T in all.
        group: of the ranks; None for all.
        backward_spec: what gradients travel back in; None for their own dtype.

    Returns:
        [sum(output_splits), K] in x's dtype, on its device.

    Raises:
        TypeError, ValueError: with the argument, what it got and what it needs.
    """
    if not isinstance(x, torch.Tensor):
        fail_type(_OP, "x", x, "a tensor")
    if x.dtype not in FLOATS:
        fail(_OP, "x.dtype", x.dtype, FLOATS_TEXT)
    x = check_plain(_OP, "x", x)
    if x.dim() != 2:
        fail(_OP, "x.shape", list(x.shape), "rank 2, [T, K]")
    there = _spec_of_rows("spec", spec)
    back = None if backward_spec is None else _spec_of_rows("backward_spec", backward_spec)
    ranks = dist.get_world_size(group)
    out = _splits("output_splits", output_splits, ranks)
    into = _splits("input_splits", input_splits, ranks)
    if sum(into) != x.shape[0]:
        fail(_OP, "input_splits", f"{into}, {sum(into)} in all", f"{x.shape[0]}, the rows of x")
    y: torch.Tensor = _Exchange.apply(x, (there, back, out, into, group))  # type: ignore[no-untyped-call]
    return y


def _spec_of_rows(name: str, value: str | Spec) -> Spec:
    """One by which each row is quantized by itself, and read without anything of its sender's."""
    s = check_spec(_OP, name, value)
    if s.block[0] != 1 or s.outer or s.hadamard or s.rounding != "nearest":
        need = "blocks along a row, rounded to nearest, without an outer scale or a transform"
        fail(_OP, name, s.text, need, "use mxfp8, mxfp6, mxfp4 or fp8_1x128")
    return s


def _splits(name: str, given: Sequence[int], ranks: int) -> list[int]:
    if not isinstance(given, list | tuple):
        fail_type(_OP, name, given, "a list of ints, one for each rank", "tensors have .tolist()")
    rows = [integer(value) for value in given]
    whole = [value for value in rows if value is not None and value >= 0]
    if len(whole) != ranks or len(rows) != ranks:
        fail(_OP, name, list(given), f"{ranks} numbers of rows, one for each rank")
    return whole


class _Exchange(torch.autograd.Function):
    """x [T, K] -> [sum(out), K]; its gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        call: tuple[Spec, Spec | None, list[int], list[int], dist.ProcessGroup | None],
    ) -> torch.Tensor:
        ctx.operation, ctx.call = _OP, call
        there, _, out, into, group = call
        return _exchanged(x, there, out, into, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, back, out, into, group = ctx.call
        return _exchanged(dy, back, into, out, group), None


def _exchanged(
    x: torch.Tensor,
    s: Spec | None,
    out: list[int],
    into: list[int],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    def sent(rows: torch.Tensor) -> torch.Tensor:
        come = rows.new_empty(sum(out), *rows.shape[1:])
        dist.all_to_all_single(come, rows.contiguous(), out, into, group=group)
        return come

    if s is None:
        return sent(x)
    codes, scales, outer = _ops.quantize(x, s.text, -1, None, None, None, (), "linear", 0)
    codes, scales = (sent(t.view(torch.uint8)).view(t.dtype) for t in (codes, scales))
    shape = (sum(out), x.shape[1])
    y: torch.Tensor = _ops.dequantize(codes, scales, outer, s.text, -1, shape, "linear", x.dtype)
    return y
