"""Rows sent to other ranks and back as codes: how tokens reach experts that are divided over
ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from blockscale._arguments import check_spec
from blockscale._errors import as_pytorch_raises, fail, fail_type, integer
from blockscale._layer_arguments import refuse_transforms
from blockscale._plain import check_plain
from blockscale.functional import first_order
from blockscale.recipe import Spec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OP = "quantized_all_to_all"
_GROUP = "a ProcessGroup, a DeviceMesh of one dimension, or None"
_ops = torch.ops.blockscale


@as_pytorch_raises
def quantized_all_to_all(
    x: torch.Tensor,
    spec: str | Spec,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: dist.ProcessGroup | DeviceMesh | None = None,
    backward_spec: str | Spec | None = None,
) -> torch.Tensor:
    """A differentiable `all_to_all_single` of rows, sent as codes and scales.

    Each row is quantized on its own by the sender and decoded by the receiver, so the result is
    `dequantize(quantize(x, spec))` with rows exchanged. On the wire an element takes 1.03 bytes in
    "mxfp8" and 0.53 in "mxfp4", where BF16 takes two.

    Where scales are powers of two (mxfp8, mxfp6, mxfp4), received rows keep their values when
    quantized again: a layer whose recipe has the same spec for fprop_x gives the same y as without
    the exchange. (Its operand for the weight's gradient is made from decoded values, and differs.
    With FP32 scales, values differ too, by a rounding.)

    Args:
        x: [T, K] float32 or bfloat16; rows sorted by destination rank.
        spec: one with blocks along a row, rounding to nearest, and no outer scale or transform:
            "mxfp8", "mxfp6", "mxfp4", "fp8_1x128", or one of these with changes.
        output_splits: number of rows received from each rank of the group.
        input_splits: number of rows sent to each; T in total.
        group: the process group, or a one-dimensional mesh; None for all ranks.
        backward_spec: the spec in which gradients are sent back; None for their own dtype.

    Returns:
        [sum(output_splits), K] in x's dtype, on its device.

    Raises:
        TypeError, ValueError: with the argument, what it got and what it needs.
    """
    if not isinstance(x, torch.Tensor):
        fail_type(_OP, "x", x, "a tensor")
    if x.dtype not in (torch.float32, torch.bfloat16):  # in float16 large values would become Inf
        fail(_OP, "x.dtype", x.dtype, "torch.float32 or torch.bfloat16", "convert x with .to()")
    check_plain(_OP, "x", x)
    if x.dim() != 2:
        fail(_OP, "x.shape", list(x.shape), "rank 2, [T, K]")
    there = _spec_of_rows("spec", spec)
    back = None if backward_spec is None else _spec_of_rows("backward_spec", backward_spec)
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER  # what new_group gives to other ranks
    among: Any = group
    if not (among is None or among is outside or isinstance(among, dist.ProcessGroup)):
        if not hasattr(among, "get_group"):  # which compiled code cannot ask a ProcessGroup
            fail_type(_OP, "group", among, _GROUP)
        if among.ndim != 1:
            got = f"a DeviceMesh of {among.ndim} dimensions"
            fail(_OP, "group", got, _GROUP, "pass mesh['name']")
        among = among.get_group()
    if among is None and not dist.is_initialized():
        fail(_OP, "group", "None", "a process group", "call torch.distributed.init_process_group")
    if torch._C._are_functorch_transforms_active():
        refuse_transforms(_OP)
    ranks = dist.get_world_size(among)
    if ranks < 1:
        fail(_OP, "group", "one without this rank", "a group that it is in")
    received = _splits("output_splits", output_splits, ranks)
    sent = _splits("input_splits", input_splits, ranks)
    _check(sum(sent) == x.shape[0], "input_splits", sent, f"{x.shape[0]} in all, the rows of x")
    call = there, back, received, sent, among or dist.group.WORLD
    y: torch.Tensor = _Exchange.apply(x, call)  # type: ignore[no-untyped-call]
    return y


def _spec_of_rows(name: str, value: str | Spec) -> Spec:
    """A spec that quantizes each row on its own, so that it is decoded from its codes and scales
    alone."""
    s = check_spec(_OP, name, value)
    if s.block[0] != 1 or s.outer or s.hadamard or s.rounding != "nearest":
        need = "blocks along a row, rounded to nearest, without an outer scale or a transform"
        fail(_OP, name, s.text, need, "use mxfp8, mxfp6, mxfp4 or fp8_1x128")
    return s


def _splits(name: str, given: Sequence[int], ranks: int) -> list[int]:
    if not isinstance(given, list | tuple):
        fail_type(_OP, name, given, "a list of ints, one for each rank", "tensors have .tolist()")
    rows = [integer(value) for value in given]
    whole = [value for value in rows if value is not None]
    if len(whole) != ranks or len(rows) != ranks:
        fail(_OP, name, list(given), f"{ranks} numbers of rows, one for each rank")
    for value in whole:
        _check(value >= 0, name, whole, f"{ranks} numbers of rows, one for each rank")
    return whole


def _check(holds: bool, name: str, got: object, need: str) -> None:
    """Refuse numbers unless `holds`; a compiler may not know them yet."""
    if torch.compiler.is_compiling():
        torch._check(holds)  # type: ignore[no-untyped-call]
    elif not holds:
        fail(_OP, name, got, need)


class _Exchange(torch.autograd.Function):
    """x [T, K] -> [sum(received), K]; its gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        call: tuple[Spec, Spec | None, list[int], list[int], dist.ProcessGroup],
    ) -> torch.Tensor:
        ctx.operation, ctx.call = _OP, call
        there, _, received, sent, group = call
        return _exchanged(x, there, received, sent, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, back, received, sent, group = ctx.call
        return _exchanged(dy, back, sent, received, group), None


def _exchanged(
    x: torch.Tensor, s: Spec | None, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    # Selective checkpointing recognizes these as collectives, but not c10d's own.
    from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

    def exchange(rows: torch.Tensor) -> torch.Tensor:
        underway = all_to_all_single(rows.contiguous(), received, sent, group)
        arrived: torch.Tensor = wait_tensor(underway)  # type: ignore[no-untyped-call]
        return arrived

    if not torch.compiler.is_compiling():
        x = check_plain(_OP, "x", x)  # waits for a collective that may still be writing it
    if s is None or x.shape[1] == 0:
        return exchange(x)
    codes, scales, outer = _ops.quantize(x, s.text, -1, None, None, None, (), "linear", 0)
    codes, scales = (exchange(t.view(torch.uint8)).view(t.dtype) for t in (codes, scales))
    shape = (sum(received), x.shape[1])
    y: torch.Tensor = _ops.dequantize(codes, scales, outer, s.text, -1, shape, "linear", x.dtype)
    return y
