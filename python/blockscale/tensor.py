"""`QuantizedTensor`: the stored form of one operand, and the shapes it must have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from blockscale import _core
from blockscale._errors import fail, fail_type
from blockscale.recipe import Spec, spec


class StoredShapes(NamedTuple):
    """Shapes of the three tensors of a quantized operand."""

    codes: tuple[int, ...]
    scales: tuple[int, ...]
    outer: tuple[int, ...]


def _round_up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple


def matrix_extents(shape: Sequence[int], batch_dims: int) -> tuple[int, int]:
    """Rows and columns of each matrix of a tensor of `shape`; leading dimensions are rows."""
    return math.prod(shape[batch_dims:-1]), shape[-1]


def stored_shapes(
    s: Spec, axis: int, shape: Sequence[int], layout: str, batch_dims: int
) -> StoredShapes:
    """Shapes of the stored tensors; works on symbolic sizes too.

    The formulas are the architecture's; every number in them (block, codes per byte, multiples)
    comes from the core.
    """
    rows, columns = matrix_extents(shape, batch_dims)
    lines, contraction = (rows, columns) if axis == -1 else (columns, rows)
    block_lines, block = s.block
    extent = _round_up(contraction, s.extent_multiple)
    blocks = (extent + block - 1) // block
    line_bytes = blocks * block // s.codes_per_byte
    batch = tuple(shape[:batch_dims])

    codes: tuple[int, ...] = (lines, line_bytes)
    # One-byte layouts hold a row of scales for every line: square blocks are replicated in them.
    names = layout.split("+")
    facts = [_core.LAYOUTS[name] for name in names]
    per_line = any(fact["scale_bytes"] == 1 and fact["applies"] == "scales" for fact in facts)
    scale_rows = lines if per_line else (lines + block_lines - 1) // block_lines
    scales: tuple[int, ...] = (scale_rows, blocks)
    for fact in facts:
        row, column = fact["row_multiple"], fact["column_multiple"]
        if fact["applies"] == "codes":
            codes = (_round_up(lines, row) * _round_up(line_bytes, column),)
        elif fact["applies"] == "scales":
            padded = (_round_up(scale_rows, row), _round_up(blocks, column))
            transposed = fact["scale_bytes"] == 4  # mn_major
            scales = (padded[1], padded[0]) if transposed else (padded[0] * padded[1],)
    return StoredShapes(batch + codes, batch + scales, batch if s.outer else (0,))


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """One quantized operand. A plain container, not a tensor: nothing happens to it by accident.

    Attributes:
        codes: element codes, lines of the contraction axis (for axis -2: transposed); torch's
            FP8 dtype, or uint8 with two FP4 codes (or one FP6 code) to a byte.
        scales: block scales (decode scales), in `layout`.
        outer: FP32 scale of the whole tensor, a scalar or [E]; None when the spec has none.
        spec: how it was quantized.
        axis: -1 (blocks along rows) or -2 (down columns): the contraction axis of its GEMM.
        shape: the logical shape that was quantized.
        layout: storage layout, e.g. "linear", "nv_128x4", "mfma_16x16+aiter_scale".
        batch_dims: 1 when dimension 0 is a batch of separate matrices, else 0.

    Raises:
        ValueError: the tensors' shapes, dtypes or devices are not what the rest says.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    outer: torch.Tensor | None
    spec: Spec
    axis: int
    shape: tuple[int, ...]
    layout: str = "linear"
    batch_dims: int = 0

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():
            check_stored(self, "QuantizedTensor")

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def outer_or_empty(self) -> torch.Tensor:
        """What the operators take for `outer`: an empty FP32 tensor stands for none."""
        if self.outer is not None:
            return self.outer
        return torch.empty(0, dtype=torch.float32, device=self.device)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The values as a tensor of `shape`; see `blockscale.dequantize`."""
        from blockscale.ops import dequantize

        return dequantize(self, dtype)

    def to(self, device: str | torch.device) -> QuantizedTensor:
        """A copy on another device (itself when it is there already)."""
        outer = None if self.outer is None else self.outer.to(device)
        return dataclasses.replace(
            self, codes=self.codes.to(device), scales=self.scales.to(device), outer=outer
        )

    def __repr__(self) -> str:
        return (
            f"QuantizedTensor(shape={list(self.shape)}, spec={str(self.spec)!r}, axis={self.axis}, "
            f"layout={self.layout!r}, codes={self.codes.dtype}{list(self.codes.shape)}, "
            f"scales={self.scales.dtype}{list(self.scales.shape)}, device={str(self.device)!r})"
        )


def check_stored(q: QuantizedTensor, operation: str) -> None:
    """Refuse a container whose tensors are not what its spec, axis, shape and layout say."""
    if not isinstance(q.spec, Spec):
        fail_type(operation, "spec", q.spec, "a Spec", "make one with bs.spec(name)")
    if q.axis not in (-1, -2):
        fail(operation, "axis", q.axis, "-1 or -2")
    if q.batch_dims not in (0, 1) or len(q.shape) < 1 + 2 * q.batch_dims:
        fail(operation, "shape", list(q.shape), "[..., C], or [E, R, C] with batch_dims = 1")
    if any(name not in _core.LAYOUTS for name in q.layout.split("+")):
        fail(operation, "layout", repr(q.layout), f"one of {', '.join(_core.LAYOUTS)}")
    expected = stored_shapes(q.spec, q.axis, q.shape, q.layout, q.batch_dims)
    _check(operation, "codes", q.codes, expected.codes, q.spec.code_dtype, q)
    _check(operation, "scales", q.scales, expected.scales, q.spec.scale_dtype, q)
    if q.spec.outer:
        _check(operation, "outer", q.outer, expected.outer, torch.float32, q)
    elif q.outer is not None:
        fail(operation, "outer", "a tensor", f"None: {q.spec} has no outer scale")


def _check(
    operation: str,
    name: str,
    tensor: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    q: QuantizedTensor,
) -> None:
    what = f"for {q.spec}, axis {q.axis}, shape {list(q.shape)}, layout {q.layout!r}"
    if not isinstance(tensor, torch.Tensor):
        fail_type(operation, name, tensor, f"a tensor {what}")
    if tensor.dtype != dtype:
        fail(operation, f"{name}.dtype", tensor.dtype, f"{dtype} {what}")
    if tuple(tensor.shape) != shape:
        fail(operation, f"{name}.shape", list(tensor.shape), f"{list(shape)} {what}")
    if tensor.device != q.codes.device:
        fail(operation, f"{name}.device", tensor.device, f"{q.codes.device}, where the codes are")


def _flatten(q: QuantizedTensor) -> tuple[list[torch.Tensor | None], tuple[Any, ...]]:
    return [q.codes, q.scales, q.outer], (str(q.spec), q.axis, q.shape, q.layout, q.batch_dims)


def _unflatten(leaves: Any, context: tuple[Any, ...]) -> QuantizedTensor:
    # Leaves may be anything here (tree_map), so this builds the container without its checks.
    text, axis, shape, layout, batch_dims = context
    q = object.__new__(QuantizedTensor)
    codes, scales, outer = leaves
    fields = dict(codes=codes, scales=scales, outer=outer, spec=spec(text), axis=axis)
    for name, value in dict(**fields, shape=shape, layout=layout, batch_dims=batch_dims).items():
        object.__setattr__(q, name, value)
    return q


pytree.register_pytree_node(
    QuantizedTensor,
    _flatten,
    _unflatten,
    serialized_type_name="blockscale.QuantizedTensor",
)
