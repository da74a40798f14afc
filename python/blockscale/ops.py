"""The operators as functions of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from blockscale._arguments import (
    check_amax,
    check_layout_of,
    check_offsets,
    check_operand,
    check_origin,
    check_rng,
    check_spec,
    check_tensor,
    check_type,
)
from blockscale._errors import as_pytorch_raises, check_int, fail, fail_offsets
from blockscale._plain import FLOATS, FLOATS_TEXT, check_plain
from blockscale.recipe import Spec
from blockscale.rng import Rng
from blockscale.tensor import QuantizedTensor, matrix_extents

_ops = torch.ops.blockscale


@as_pytorch_raises
def quantize(
    x: torch.Tensor,
    spec: str | Spec,
    axis: int = -1,
    amax: float | torch.Tensor | None = None,
    rng: Rng | None = None,
    layout: str = "linear",
    batch_dims: int = 0,
    origin: Sequence[int] | None = None,
    offsets: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Quantize `x` along one axis. Not differentiable; `linear` is.

    With `offsets`, x is [T, C] in groups of consecutive rows, and each group is quantized as if it
    were alone, with its own outer scale and its own tiling of scales. All groups share buffers
    whose sizes depend only on T and the number of groups (docs/groups.md). Rows past the last end
    belong to no group.

    Args:
        x: [..., C] float32, bfloat16 or float16, any strides; leading dimensions are rows.
        spec: a Spec, or the text of one, such as "nvfp4".
        axis: the contraction axis of the GEMM that will read the result: -1 (blocks run along a
            row) or -2 (down a column; the codes are stored transposed).
        amax: for specs with an outer scale: the largest |x|, to use instead of computing it; a
            number or a float32 tensor of one element ([E] with batch_dims=1, [G] with offsets) on
            x's device. On a GPU the tensor is read without synchronizing, so a negative value is
            not detected.
        rng: the key of the random bits; required by stochastic specs, unused by others.
        layout: how codes and scales are stored (docs/specification.md, section 12):

            - "linear": both row by row, padded to whole blocks only;
            - "mn_major": FP32 scales, transposed, as the GEMM for H100 and H200 reads them;
            - "nv_128x4": one-byte scales, in the tiles that NVIDIA's tensor cores read;
            - "aiter_scale": one-byte scales, in the tiles that AMD's AITER reads;
            - "mfma_16x16": packed FP4 codes, in AITER's tiles.

            Whatever a layout does not cover stays linear; "+" combines a layout of codes with one
            of scales, as in "mfma_16x16+aiter_scale".
        batch_dims: 1 when x is [E, R, C], a batch of separate matrices; else 0.
        origin: (row, column) of x in the unsharded tensor, so that each shard draws its own bits.
            It must be a multiple of the block and the transform along the axis, and of the side of
            a square block across it. In a batch, lines are numbered through all matrices. A shard
            may therefore hold whole matrices or part of the contraction axis, but not part of each
            matrix's lines.
        offsets: [G] int32 or int64, contiguous, on x's device: where each group ends. The ends must
            not decrease or pass the last row. On a GPU this is not checked synchronously: wrong
            offsets make the whole result NaN (with the environment variable
            BLOCKSCALE_CHECK_OFFSETS=1 the call synchronizes and raises). The result keeps this
            tensor, not a copy: do not change it in place.

    Returns:
        A QuantizedTensor on x's device, of x's shape. For axis -1 in "linear", with P columns after
        padding to whole blocks of B (and whole transforms): codes [R, P], or [R, P/2] uint8 for
        FP4; scales [R, P/B], or one row per B rows of x where blocks are square. For axis -2, the
        same for x transposed; with batch_dims=1, a leading dimension E.

    Raises:
        TypeError, ValueError: with the operation, the argument, what it got and what it needs.
    """
    op = "quantize"
    s = check_spec(op, "spec", spec)
    x = check_tensor(op, x)
    axis, batch_dims = check_int(op, "axis", axis), check_int(op, "batch_dims", batch_dims)
    check_layout_of(op, "layout", s, layout)
    offsets = check_offsets(op, offsets)
    seed, offset = check_rng(op, rng, x)
    codes, scales, outer = _ops.quantize(
        x,
        s.text,
        axis,
        check_amax(op, "amax", amax, x, batch_dims, offsets),
        seed,
        offset,
        check_origin(op, origin),
        layout,
        batch_dims,
        offsets,
    )
    return _stored((codes, scales, outer), s, axis, x, layout, batch_dims, offsets)


@as_pytorch_raises
def quantize_dual(
    x: torch.Tensor,
    row_spec: str | Spec,
    col_spec: str | Spec,
    rng: Rng | None = None,
    row_amax: float | torch.Tensor | None = None,
    col_amax: float | torch.Tensor | None = None,
    row_layout: str = "linear",
    col_layout: str = "linear",
    batch_dims: int = 0,
    origin: Sequence[int] | None = None,
    offsets: torch.Tensor | None = None,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Quantize `x` along both axes in one pass.

    Args:
        x: [..., R, C], rank 2 or more, as for `quantize`.
        row_spec, col_spec: the specs of the operands along axis -1 and along axis -2.
        rng: one key for both: where both are stochastic, they draw the same bits at the same
            coordinates.
        row_amax, col_amax, row_layout, col_layout: `amax` and `layout` for each.
        batch_dims, origin, offsets: as for `quantize`.

    Returns:
        (rows, columns): `quantize(x, row_spec, axis=-1)` and `quantize(x, col_spec, axis=-2)`, bit
        for bit.

    Raises:
        TypeError, ValueError: with the operation, the argument, what it got and what it needs.
    """
    op = "quantize_dual"
    row, col = check_spec(op, "row_spec", row_spec), check_spec(op, "col_spec", col_spec)
    x = check_tensor(op, x)
    batch_dims = check_int(op, "batch_dims", batch_dims)
    check_layout_of(op, "row_layout", row, row_layout)
    check_layout_of(op, "col_layout", col, col_layout)
    offsets = check_offsets(op, offsets)
    seed, offset = check_rng(op, rng, x)
    out = _ops.quantize_dual(
        x,
        row.text,
        col.text,
        check_amax(op, "row_amax", row_amax, x, batch_dims, offsets),
        check_amax(op, "col_amax", col_amax, x, batch_dims, offsets),
        seed,
        offset,
        check_origin(op, origin),
        row_layout,
        col_layout,
        batch_dims,
        offsets,
    )
    return (
        _stored(out[:3], row, -1, x, row_layout, batch_dims, offsets),
        _stored(out[3:], col, -2, x, col_layout, batch_dims, offsets),
    )


@as_pytorch_raises
def amax(
    x: torch.Tensor,
    spec: str | Spec,
    axis: int = -1,
    batch_dims: int = 0,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """The largest |x| after the spec's transform, in the form that `quantize` takes as `amax`.

    Args:
        x: [..., C] float32, bfloat16 or float16, any strides; leading dimensions are rows.
        spec: the spec whose Hadamard transform, if it has one, is applied first.
        axis: the axis of the transform, -1 or -2.
        batch_dims: 1 when x is [E, R, C], a batch of separate matrices; else 0.
        offsets: [G] int32 or int64, contiguous, on x's device: where each group of rows ends.

    Returns:
        A float32 scalar on x's device ([E] with batch_dims=1, [G] with offsets): NaN if any value
        is NaN, else Inf if any is infinite; 0 for an empty tensor.

    Raises:
        TypeError, ValueError: with the operation, the argument, what it got and what it needs.
    """
    op = "amax"
    s = check_spec(op, "spec", spec)
    axis, batch_dims = check_int(op, "axis", axis), check_int(op, "batch_dims", batch_dims)
    offsets = check_offsets(op, offsets)
    result: torch.Tensor = _ops.amax(check_tensor(op, x), s.text, axis, batch_dims, offsets)
    return result


@as_pytorch_raises
def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The values of `q`: outer · scale · code, rounded to `dtype` (float32, bfloat16, float16).

    A Hadamard transform is not undone: these are the values of the transformed operand, which a
    GEMM multiplies, before they are rounded to `dtype`. Where the contraction axis (or a group's
    part of it) is not a multiple of the transform, it is extended with zeros, which the transform
    fills: a GEMM multiplies those values too, but they are left out here. To see them, pad x with
    zeros to a multiple of `q.spec.hadamard` before quantizing it: the codes and scales stay the
    same.

    Args:
        q: what `quantize` returns, in any layout.
        dtype: of the result.

    Returns:
        A tensor of shape `q.shape` on q's device; rows that belong to no group are 0.

    Raises:
        TypeError, ValueError: not a QuantizedTensor, or a damaged one.
    """
    check_operand("dequantize", "q", q)
    check_type("dequantize", "dtype", dtype)
    if dtype not in FLOATS:
        fail("dequantize", "dtype", dtype, FLOATS_TEXT, "convert the result with .to()")
    values: torch.Tensor = _ops.dequantize(
        q.codes,
        q.scales,
        q.outer_or_empty,
        q.spec.text,
        q.axis,
        _matrix_shape(q),
        q.layout,
        dtype,
        q.offsets,
    )
    return values.reshape(q.shape)


@as_pytorch_raises
def relayout(q: QuantizedTensor, layout: str) -> QuantizedTensor:
    """The same operand stored in another layout, bit for bit.

    Args:
        q: what `quantize` returns, in any layout.
        layout: as for `quantize`.

    Returns:
        A QuantizedTensor that shares q's outer scale and offsets.

    Raises:
        TypeError, ValueError: not a QuantizedTensor, a damaged one, or a layout that its spec
            cannot be stored in.
    """
    check_operand("relayout", "q", q)
    check_layout_of("relayout", "layout", q.spec, layout)
    codes, scales = _ops.relayout(
        q.codes, q.scales, q.spec.text, q.axis, _matrix_shape(q), q.layout, layout, q.offsets
    )
    return dataclasses.replace(q, codes=codes, scales=scales, layout=layout)


@as_pytorch_raises
def matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """A·Bᵀ (+ bias): contracts the axes that `a` and `b` were quantized along. Not differentiable,
    not even in the bias; `linear` is.

    On a GPU most specs are decoded to BF16 without their outer scales, which is exact except for
    the smallest values of "mxfp8", and multiplied with FP32 sums, to which outer scales and bias
    are applied. That is done by our own BF16 GEMM or PyTorch's on compute capability 9.0 (H100,
    H200), by PyTorch's on other GPUs (docs/numerics.md says which and why). Where few rows of `a`
    meet a `b` of "nvfp4", "amdfp4", "mxfp8" or "mxfp6", our GEMM decodes `b` itself, and its values
    are written nowhere; `b` must be linear, with a contraction axis that 64 divides.

    Specs with FP32 block scales (`fp8_1x128`, `fp8_128x128`) do not fit in BF16: they run in a
    block-scaled FP8 GEMM on compute capability 9.0, and other GPUs refuse them. That GEMM also
    multiplies two operands of `mxfp4`: their codes become E5M2 codes, exactly where the scales of a
    row of b, and of 128 codes of a row of a, are within 2^28 of each other; otherwise with an error
    of at most 2^-31 of the largest value among those. Within 128 codes the tensor cores add with 13
    bits below the largest product or sum.

    Args:
        a, b: operands with equal extents along their axes. The other extent of each (leading
            dimensions are rows) is an extent of the result.
        bias: [rows of b], float32, bfloat16 or float16; added to the FP32 sums.
        out_dtype: float32 or bfloat16.

    Returns:
        [rows of a, rows of b] in `out_dtype`, on their device.

    Raises:
        TypeError, ValueError: operands that are damaged, or that cannot be multiplied.
    """
    check_operand("matmul", "a", a)
    check_operand("matmul", "b", b)
    check_type("matmul", "bias", bias)
    check_type("matmul", "out_dtype", out_dtype)
    for name, q in (("a", a), ("b", b)):
        if q.batch_dims:
            remedy = "quantize each matrix by itself, or see grouped_matmul"
            fail("matmul", f"{name}.batch_dims", q.batch_dims, "0: one matrix", remedy)
        if q.offsets is not None:
            fail("matmul", f"{name}.offsets", "given", "none: one matrix, not groups")
    return _product("matmul", a, b, bias, out_dtype)


@as_pytorch_raises
def grouped_matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`matmul` for each group of rows, in one call that does not synchronize on the offsets. Not
    differentiable; `grouped_linear` is.

    There are two forms, depending on the axis of the operands (docs/groups.md):

    - groups of rows: `a` [M, K] quantized along axis -1 with `offsets`, `b` [G, N, K] along axis -1
      with batch_dims=1. Row r of the result is row r of a times its group's matrix; rows that
      belong to no group are 0. (dgrad: `b` [G, K, N] along axis -2.)
    - groups along the contraction axis: `a` [T, M] and `b` [T, N], both quantized along axis -2
      with `offsets`. The result holds one product per group; that of an empty group is 0.

    Each group is multiplied as `matmul` would multiply its operands alone, outer scales included:
    bit for bit on the CPU. On a GPU, specs with FP32 block scales, and `mxfp4`, run in the
    block-scaled GEMM for H100 and H200. Other specs are decoded to BF16: with outer scales, a bias,
    a float32 result, an N that is not a multiple of 8 or few rows for each matrix of b they run in
    our BF16 GEMM for H100 and H200, and otherwise in PyTorch's grouped GEMM, which rounds its sums
    to BF16 before outer scales and bias are applied.

    Args:
        a, b: operands with equal contraction lengths.
        offsets: the tensor that they were quantized with, [G].
        bias: [G, N], one row per group; float32, bfloat16 or float16.
        out_dtype: float32 or bfloat16.

    Returns:
        [M, N], or [G, M, N] for groups along the contraction axis, in `out_dtype`.

    Raises:
        TypeError, ValueError: damaged operands, or operands that cannot be multiplied; offsets that
            decrease or pass the end (on a GPU these make the result NaN instead).
    """
    op = "grouped_matmul"
    check_operand(op, "a", a)
    check_operand(op, "b", b)
    check_type(op, "bias", bias)
    check_type(op, "out_dtype", out_dtype)
    if not isinstance(offsets, torch.Tensor):
        fail_offsets(op, offsets)
    along = b.offsets is not None
    for name, q in (("a", a), ("b", b)) if along else (("a", a),):
        _same_offsets(op, name, q, offsets)
    axis = -2 if along else -1
    if a.axis != axis:
        need = "-2, as b has groups" if along else "-1: groups of rows, as b has none"
        fail(op, "a.axis", a.axis, need, "quantize both with offsets along axis -2, or a along -1")
    groups = offsets.shape[0]
    if along and b.axis != -2:
        fail(op, "b.axis", b.axis, "-2: groups along the contraction axis")
    if not along and (b.batch_dims != 1 or b.shape[0] != groups):
        got = f"{list(b.shape)} with batch_dims={b.batch_dims}"
        fail(op, "b", got, f"[{groups}, N, K] with batch_dims=1: a matrix for each group")
    return _product(op, a, b, bias, out_dtype, offsets, axis)


# --- operands ------------------------------------------------------------------------------------


def _stored(
    tensors: Sequence[torch.Tensor],
    s: Spec,
    axis: int,
    x: torch.Tensor,
    layout: str,
    batch: int,
    offsets: torch.Tensor | None,
) -> QuantizedTensor:
    codes, scales, outer = tensors
    shape = tuple(x.shape)
    return QuantizedTensor(
        codes, scales, outer if s.outer else None, s, axis, shape, layout, batch, offsets
    )


def _matrix_shape(q: QuantizedTensor) -> list[int]:
    """[R, C], or [E, R, C] for a batch."""
    return [*q.shape[: q.batch_dims], *matrix_extents(q.shape, q.batch_dims)]


def _lines_and_length(q: QuantizedTensor) -> tuple[int, int]:
    rows, columns = matrix_extents(q.shape, q.batch_dims)
    return (rows, columns) if q.axis == -1 else (columns, rows)


def _product(
    operation: str,
    a: QuantizedTensor,
    b: QuantizedTensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *groups: torch.Tensor | int,
) -> torch.Tensor:
    """The GEMM of two operands; refuses operands with different contraction lengths.

    `groups`: the offsets, and the axis along which a was quantized with them.
    """
    a_lines, a_length = _lines_and_length(a)
    b_lines, b_length = _lines_and_length(b)
    if a_length != b_length:
        got = f"{a_length} (axis {a.axis} of {list(a.shape)}) and "
        got += f"{b_length} (axis {b.axis} of {list(b.shape)})"
        remedy = "quantize both operands along the axis that is summed over"
        fail(operation, "contraction lengths of a and b", got, "equal lengths", remedy)
    product: torch.Tensor = _ops.matmul(
        *(a.codes, a.scales, a.outer_or_empty, a.spec.text, a.layout, a_lines),
        *(b.codes, b.scales, b.outer_or_empty, b.spec.text, b.layout, b_lines),
        a_length,
        None if bias is None else check_plain(operation, "bias", bias).detach(),
        out_dtype,
        *groups,
    )
    return product


def _same_offsets(operation: str, name: str, q: QuantizedTensor, offsets: torch.Tensor) -> None:
    """Refuse offsets that differ from the operand's; on a GPU their values are not compared."""
    own = q.offsets
    remedy = "pass the offsets that it was quantized with"
    if own is None:
        fail(operation, f"{name}.offsets", "None", "an operand in groups", remedy)
    if own is offsets:
        return
    if (own.shape, own.dtype, own.device) != (offsets.shape, offsets.dtype, offsets.device):
        got = f"{offsets.dtype}{list(offsets.shape)} on {offsets.device}"
        fail(operation, "offsets", got, f"those of {name}, {own.dtype}{list(own.shape)}", remedy)
    looks = own.device.type == "cpu" and not torch.compiler.is_compiling()
    if looks and not torch.equal(own, offsets):
        g = int((own != offsets).nonzero()[0])
        need = f"{own[g]}, as in those of {name}"
        fail(operation, f"offsets[{g}]", int(offsets[g]), need, remedy)
