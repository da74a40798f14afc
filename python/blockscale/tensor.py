"""`QuantizedTensor`: the stored form of one operand, and the shapes that its tensors must have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.utils._pytree as pytree

from blockscale import _core
from blockscale._errors import any_device, check_int, fail, fail_offsets, fail_type, reword
from blockscale._plain import check_dense
from blockscale.recipe import Spec, spec


def check_layout(operation: str, name: str, s: Spec, layout: str) -> None:
    """Refuse a layout that does not exist, or that cannot hold operands of a spec."""
    if refusal := _core.layout_refusal(s.text, layout):
        raise ValueError(reword(refusal, operation, name))


class StoredShapes(NamedTuple):
    """Shapes of a quantized operand's three tensors."""

    codes: tuple[int, ...]
    scales: tuple[int, ...]
    outer: tuple[int, ...]


def _round_up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple


def _rounded_parts(total: int, count: int, multiple: int) -> int:
    """The largest possible sum of `count` parts of `total`, each rounded up to a multiple."""
    return (total + count * (multiple - 1)) // multiple * multiple


def matrix_extents(shape: Sequence[int], batch_dims: int) -> tuple[int, int]:
    """Rows and columns of each matrix of a tensor of `shape`; leading dimensions are rows."""
    return math.prod(shape[batch_dims:-1]), shape[-1]


def gemm_layout(s: Spec) -> str:
    """How `linear` stores its operands: as GEMMs read them."""
    layout: str = _core.spec_facts(s.text)["gemm_layout"]
    return layout


def stored_shapes(
    s: Spec, axis: int, shape: Sequence[int], layout: str, batch_dims: int, groups: int = 0
) -> StoredShapes:
    """Shapes of the stored tensors; works on symbolic sizes too. `groups`: 0 for none.

    The formulas are those of the specification, section 13, and of groups.h for groups. Every
    number in them (block, codes per byte, multiples) comes from the core.

    Raises:
        ValueError: not a layout for operands of this spec.
    """
    if refusal := _core.layout_refusal(s.text, layout):
        raise ValueError(refusal)
    rows, columns = matrix_extents(shape, batch_dims)
    lines, contraction = (rows, columns) if axis == -1 else (columns, rows)
    block_lines, block = s.block
    batch = (groups,) if groups else tuple(shape[:batch_dims])
    lead = () if groups else batch
    facts = [_core.LAYOUTS[name] for name in layout.split("+")]
    # One-byte layouts hold a row of scales for every line: they replicate the scales of square
    # blocks.
    per_line = any(fact["scale_bytes"] == 1 and fact["applies"] == "scales" for fact in facts)
    scale_lines = 1 if per_line else block_lines

    def line_count(unit: int, multiple: int) -> int:
        """Rows of `unit` lines, in whole tiles of `multiple` rows."""
        if groups and axis == -1:
            return _rounded_parts(lines, groups, unit * multiple) // unit
        return _round_up((lines + unit - 1) // unit, multiple)

    def columns_of(unit: int, multiple: int) -> int:
        """Columns of `unit` codes, in whole tiles of `multiple` columns."""
        if groups and axis == -2:
            unit_of_groups = max(block, s.extent_multiple, unit * multiple)
            most = _rounded_parts(contraction, groups, unit_of_groups)
            return (_round_up(most, _core.GROUP_LINE) if multiple == 1 else most) // unit
        padded = _round_up(_round_up(contraction, s.extent_multiple), block)
        return _round_up(padded // unit, multiple)

    codes: tuple[int, ...] = (line_count(1, 1), columns_of(s.codes_per_byte, 1))
    scales: tuple[int, ...] = (line_count(scale_lines, 1), columns_of(block, 1))
    for fact in facts:
        row, column = fact["row_multiple"], fact["column_multiple"]
        if fact["applies"] == "codes":
            codes = (line_count(1, row) * columns_of(s.codes_per_byte, column),)
        elif fact["applies"] == "scales":
            padded = (line_count(scale_lines, row), columns_of(block, column))
            transposed = fact["scale_bytes"] == 4  # mn_major
            scales = (padded[1], padded[0]) if transposed else (padded[0] * padded[1],)
    return StoredShapes(lead + codes, lead + scales, batch if s.outer else (0,))


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """One quantized operand. A plain container, not a tensor: nothing operates on it by accident.

    Attributes:
        codes: element codes, in lines along the contraction axis (for axis -2: transposed); torch's
            FP8 dtype, or uint8 with two FP4 codes (or one FP6 code) per byte.
        scales: block scales (what codes are multiplied by), `spec.scale_dtype`, in `layout`.
        outer: the outer scale (per-tensor, in FP32), a scalar or [E], or [G] with groups; None if
            the spec has none.
        spec: how it was quantized.
        axis: -1 (blocks along rows) or -2 (down columns): the contraction axis of its GEMM.
        shape: the logical shape that was quantized.
        layout: storage layout, e.g. "linear", "nv_128x4", "mfma_16x16+aiter_scale" (`quantize`).
        batch_dims: 1 when dimension 0 is a batch of separate matrices, else 0.
        offsets: [G] int32 or int64, cumulative ends of the groups of rows, each quantized alone;
            None without groups. docs/groups.md describes where each group is stored.

    Raises:
        TypeError, ValueError: the tensors' shapes, dtypes or devices do not match the other
            attributes.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    outer: torch.Tensor | None
    spec: Spec
    axis: int
    shape: tuple[int, ...]
    layout: str = "linear"
    batch_dims: int = 0
    offsets: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():
            _settle_ints(self, "QuantizedTensor")
            check_stored(self, "QuantizedTensor")

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.codes.device

    @property
    def outer_or_empty(self) -> torch.Tensor:
        """`outer` as the operators take it: an empty FP32 tensor stands for None."""
        if self.outer is not None:
            return self.outer
        return self.scales.new_empty(0, dtype=torch.float32)  # fake if they are

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The values within `shape`, for a Hadamard spec the transformed ones; see
        `blockscale.dequantize`."""
        from blockscale.ops import dequantize

        return dequantize(self, dtype)

    def to(self, device: str | torch.device) -> QuantizedTensor:
        """A copy on another device (itself if it is already there)."""
        to = any_device("QuantizedTensor.to", device)
        here = {name: getattr(self, name) for name in _LEAVES}
        there: dict[str, Any] = {name: None if t is None else t.to(to) for name, t in here.items()}
        if all(there[name] is t for name, t in here.items()):
            return self
        return dataclasses.replace(self, **there)

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes, since pickle does not support torch's 8-bit floats; checked when restored.
        spec = str(self.spec)
        rest = (self.outer, spec, self.axis, self.shape, self.layout, self.batch_dims, self.offsets)
        return _restored, (_as_bytes(self.codes), _as_bytes(self.scales), *rest)

    def __repr__(self) -> str:
        grouped = isinstance(self.offsets, torch.Tensor)
        groups = f"groups={self.offsets.numel()}, " if grouped else ""  # type: ignore[union-attr]
        device = getattr(self.codes, "device", None)
        return (
            f"QuantizedTensor(shape={list(self.shape)}, spec={str(self.spec)!r}, axis={self.axis}, "
            f"layout={self.layout!r}, {groups}codes={_shown(self.codes)}, "
            f"scales={_shown(self.scales)}, device={str(device)!r})"
        )


def _shown(leaf: object) -> str:
    """A tensor's dtype and shape; tree_map may have put anything in its place."""
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _restored(
    codes: torch.Tensor, scales: torch.Tensor, outer: torch.Tensor | None, text: str, *rest: Any
) -> QuantizedTensor:
    s = spec(text)
    codes, scales = codes.view(s.code_dtype), scales.view(s.scale_dtype)
    return QuantizedTensor(codes, scales, outer, s, *rest)


# What torch.load may call: a quantized tensor is data.
torch.serialization.add_safe_globals([_restored])


def _settle_ints(q: QuantizedTensor, operation: str) -> None:
    """Refuse anything that is not an integer, and convert integers of other types to int."""
    if not isinstance(q.shape, tuple | list):
        fail_type(operation, "shape", q.shape, "a tuple of ints, the quantized tensor's shape")
    need = "ints, the quantized tensor's shape"
    shape = tuple([check_int(operation, "shape", extent, need) for extent in q.shape])
    if any(type(extent) is int and extent < 0 for extent in shape):  # symbols are not tested
        fail(operation, "shape", list(shape), "extents of 0 or more")
    object.__setattr__(q, "shape", shape)
    for name in ("axis", "batch_dims"):
        object.__setattr__(q, name, check_int(operation, name, getattr(q, name)))


def check_stored(q: QuantizedTensor, operation: str) -> None:
    """Refuse a container whose tensors do not match its spec, axis, shape and layout."""
    if not isinstance(q.spec, Spec):
        fail_type(operation, "spec", q.spec, "a Spec", "make one with bs.spec(name)")
    if q.axis not in (-1, -2):
        fail(operation, "axis", q.axis, "-1 or -2")
    if not isinstance(q.layout, str):
        fail_type(operation, "layout", q.layout, "a layout's name such as 'linear'")
    if q.batch_dims not in (0, 1) or len(q.shape) < 1 + 2 * q.batch_dims:
        fail(operation, "shape", list(q.shape), "[..., C], or [E, R, C] with batch_dims = 1")
    check_layout(operation, "layout", q.spec, q.layout)
    groups = _check_offsets(operation, q)
    expected = stored_shapes(q.spec, q.axis, q.shape, q.layout, q.batch_dims, groups)
    _check(operation, "codes", q.codes, expected.codes, q.spec.code_dtype, q)
    _check(operation, "scales", q.scales, expected.scales, q.spec.scale_dtype, q)
    if q.spec.outer:
        _check(operation, "outer", q.outer, expected.outer, torch.float32, q)
    elif q.outer is not None:
        fail(operation, "outer", "a tensor", f"None: {q.spec} has no outer scale")


def _check_offsets(operation: str, q: QuantizedTensor) -> int:
    """The number of groups, 0 for none."""
    if q.offsets is None:
        return 0
    if not isinstance(q.offsets, torch.Tensor):
        fail_offsets(operation, q.offsets)
    if q.offsets.dtype not in (torch.int32, torch.int64):
        fail(operation, "offsets.dtype", q.offsets.dtype, "int32 or int64")
    if q.offsets.dim() != 1 or q.offsets.numel() == 0:
        fail(operation, "offsets.shape", list(q.offsets.shape), "[G] with at least one group")
    if q.batch_dims:
        fail(operation, "batch_dims", q.batch_dims, "0: offsets cut the rows of one matrix")
    if q.offsets.device != q.codes.device:
        fail(operation, "offsets.device", q.offsets.device, f"{q.codes.device}, like the codes")
    return q.offsets.numel()


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
    check_dense(operation, name, tensor)
    if tensor.dtype != dtype:
        fail(operation, f"{name}.dtype", tensor.dtype, f"{dtype} {what}")
    if tuple(tensor.shape) != shape:
        fail(operation, f"{name}.shape", list(tensor.shape), f"{list(shape)} {what}")
    if tensor.device != q.codes.device:
        fail(operation, f"{name}.device", tensor.device, f"{q.codes.device}, where the codes are")


_LEAVES: Final = ("codes", "scales", "outer", "offsets")


def _flatten(q: QuantizedTensor) -> tuple[list[torch.Tensor | None], list[Any]]:
    # Lists, since that is what loading an exported program returns.
    context = [q.spec.text, q.axis, list(q.shape), q.layout, q.batch_dims]
    return [getattr(q, name) for name in _LEAVES], context


def _flatten_with_keys(q: QuantizedTensor) -> tuple[list[tuple[Any, Any]], list[Any]]:
    leaves, context = _flatten(q)
    return [(pytree.GetAttrKey(n), t) for n, t in zip(_LEAVES, leaves, strict=True)], context


def _unflatten(leaves: Any, context: list[Any]) -> QuantizedTensor:
    # Leaves may be anything here (tree_map), so the container is built without its checks.
    text, axis, shape, layout, batch_dims = context
    q = object.__new__(QuantizedTensor)
    fields = dict(zip(_LEAVES, leaves, strict=True), spec=spec(text), axis=axis, layout=layout)
    fields.update(shape=tuple(shape), batch_dims=batch_dims)
    for name, value in fields.items():
        object.__setattr__(q, name, value)
    return q


pytree.register_pytree_node(
    QuantizedTensor,
    _flatten,
    _unflatten,
    serialized_type_name="blockscale.QuantizedTensor",
    flatten_with_keys_fn=_flatten_with_keys,
)
