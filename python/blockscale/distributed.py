"""Tensor parallelism: `linear` of a weight that is cut over the ranks of a mesh, a DTensor.

The two ways that `torch.distributed.tensor.parallel` cuts a layer, here over two ranks:

                 ColwiseParallel        RowwiseParallel
    w            [N/2, K] Shard(0)      [N, K/2] Shard(1)
    x, dx        [M, K]   whole         [M, K/2] cut
    y, dy        [M, N/2] cut           [M, N]   whole
    to be added  dx                     y

A rank quantizes its piece of a matrix as it lies in the whole one: block scales need whole blocks,
an outer scale comes from the largest value of all pieces (one number is exchanged), and random bits
are drawn by the place in the whole. So all codes and scales are those of one process, whatever the
number of ranks; only the sums that ranks add up may be rounded otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from blockscale import ops
from blockscale._errors import fail, fail_type
from blockscale.functional import asked, first_order
from blockscale.recipe import OPERANDS, Recipe, Spec
from blockscale.rng import Key, Rng
from blockscale.tensor import QuantizedTensor, gemm_layout

_Operand = QuantizedTensor | torch.Tensor


# A graph ends here: traced into it, PyTorch's compiler fails in the backward.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_over_mesh(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    key: Key | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`linear` of DTensors; x and bias are redistributed to what w's placement needs of them.

    Args:
        x: [..., K] DTensor on w's mesh.
        w: [N, K] DTensor on a mesh of one dimension: Shard(0), Shard(1) or Replicate, and whole
            blocks of the recipe on every rank.
        bias: [N] DTensor on that mesh.
        recipe: with quantized operands.
        key: the layer's, the same on all ranks of the mesh; needed where the recipe draws.
        dtype: of the result.

    Returns:
        [..., N] DTensor: Shard(-1), Partial or Replicate.

    Raises:
        TypeError, ValueError: with the argument, what it got and what it needs.
    """
    x, w = _on_mesh("x", x), _on_mesh("w", w)
    row = None if bias is None else _on_mesh("bias", bias)
    mesh, placement = w.device_mesh, w.placements[0]
    if mesh.ndim != 1:
        need = "a mesh of one dimension, the tensor-parallel one"
        fail("linear", "w.device_mesh", mesh, need, "use fully_shard for the others")
    for name, tensor in (("x", x), ("bias", row)):
        if tensor is not None and tensor.device_mesh != mesh:
            remedy = "give parallelize_module one mesh for both"
            fail("linear", f"{name}.device_mesh", tensor.device_mesh, f"{mesh}, w's", remedy)
    cut = _cut_of(placement)
    _check_pieces(w, cut, recipe)
    last = Shard(x.dim() - 1)
    # The placements of x, its gradient, the bias and y. Of partial sums one rank's has the bias.
    plans: dict[int | None, tuple[Placement, Placement, Placement, Placement]] = {
        None: (Replicate(), Replicate(), Replicate(), Replicate()),
        0: (Replicate(), Partial(), Shard(0), last),
        1: (last, last, Replicate(), Partial()),
    }
    of_x, of_dx, of_bias, of_y = plans[cut]
    y = _Linear.apply(  # type: ignore[no-untyped-call]
        x.redistribute(mesh, [of_x]).to_local(grad_placements=[of_dx]),
        w.to_local(grad_placements=[placement]),
        None if row is None else row.redistribute(mesh, [of_bias]).to_local(),
        cut != 1 or mesh.get_local_rank() == 0,
        recipe,
        key,
        _places(w, cut),
        dtype,
    )
    shape = torch.Size((*x.shape[:-1], w.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, mesh, [of_y], run_check=False, shape=shape, stride=stride)


def _on_mesh(name: str, tensor: torch.Tensor) -> DTensor:
    if not isinstance(tensor, DTensor):
        need = "a DTensor, as the others are"
        fail_type("linear", name, tensor, need, "parallelize_module makes all of them")
    return tensor


def _cut_of(placement: Placement) -> int | None:
    """The dimension along which w is cut."""
    if isinstance(placement, Replicate):
        return None
    if not isinstance(placement, Shard) or placement.dim not in (0, 1):
        remedy = "use ColwiseParallel or RowwiseParallel"
        fail("linear", "w.placements", placement, "Shard(0), Shard(1) or Replicate()", remedy)
    return placement.dim


def _piece(w: DTensor, cut: int) -> int:
    """The extent of a piece; the last ones may be shorter, or empty."""
    return -(-w.shape[cut] // w.device_mesh.size())


def _check_pieces(w: DTensor, cut: int | None, recipe: Recipe) -> None:
    if cut is None:
        return
    specs = [s for s in (getattr(recipe, name) for name in OPERANDS) if s is not None]
    unit = max(max(*s.block, s.hadamard, s.extent_multiple) for s in specs)
    piece = _piece(w, cut)
    if piece % unit and piece < w.shape[cut]:
        got = f"{list(w.shape)} in pieces of {piece} along dimension {cut}"
        need = f"whole blocks on every rank: pieces that are multiples of {unit} for {recipe}"
        fail("linear", "w", got, need, "leave this layer out of the parallel plan, or unconverted")


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a rank's piece of a matrix lies in it, and the ranks that have the rest."""

    origin: tuple[int, int] = (0, 0)  # row, column
    group: dist.ProcessGroup | None = None  # none: the piece is the whole

    def amaxes(self, x: torch.Tensor, *operands: tuple[Spec | None, int]) -> list[Any]:
        """What outer scales of the whole matrix are made from, for each (spec, axis); None where
        the quantizer finds it, or needs none."""
        found: dict[tuple[int, ...], torch.Tensor] = {}
        kinds: list[tuple[int, ...] | None] = []
        for s, axis in operands:
            if self.group is None or s is None or not s.outer:
                kinds.append(None)
                continue
            # Without a transform the largest value is the same along either axis.
            kind = (axis, s.hadamard, s.hadamard_mask) if s.hadamard else ()
            kinds.append(kind)
            if kind not in found:
                found[kind] = ops.amax(x, s, axis)
        if found:
            largest = torch.stack(list(found.values()))
            # As integers their bits are in the same order, and NaN is the largest of all.
            dist.all_reduce(largest.view(torch.int32), dist.ReduceOp.MAX, self.group)
            found = dict(zip(found, largest.unbind(), strict=True))
        return [None if kind is None else found[kind] for kind in kinds]

    def quantize(
        self, x: torch.Tensor, row: Spec | None, column: Spec | None, rng: Rng | None
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """A piece by one spec along its rows and by another down its columns, each if given."""
        row_amax, column_amax = self.amaxes(x, (row, -1), (column, -2))
        if row and column:
            layouts = (gemm_layout(row), gemm_layout(column))
            return ops.quantize_dual(
                x, row, column, rng, row_amax, column_amax, *layouts, origin=self.origin
            )

        def one(s: Spec | None, axis: int, amax: torch.Tensor | None) -> QuantizedTensor | None:
            if s is None:
                return None
            return ops.quantize(x, s, axis, amax, rng, gemm_layout(s), origin=self.origin)

        return one(row, -1, row_amax), one(column, -2, column_amax)


@dataclasses.dataclass(frozen=True)
class _Places:
    x: _Place = _Place()
    w: _Place = _Place()
    dy: _Place = _Place()


def _places(w: DTensor, cut: int | None) -> _Places:
    if cut is None:
        return _Places()
    mesh = w.device_mesh
    start = mesh.get_local_rank() * _piece(w, cut)
    start = start if start < w.shape[cut] else 0  # an empty piece lies nowhere
    group = mesh.get_group()
    across = _Place((0, start), group)
    if cut == 0:
        return _Places(w=_Place((start, 0), group), dy=across)
    return _Places(x=across, w=across)


class _Linear(torch.autograd.Function):
    """The piece of a linear layer that one rank computes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        add_bias: bool,
        recipe: Recipe,
        key: Key | None,
        places: _Places,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        dx, dw, db = ctx.needs_input_grad[:3]
        rng = None if key is None else Rng(*key)
        lines = _lines(x)
        of_x = places.x.quantize(
            lines, recipe.fprop_x, recipe.wgrad_x if dw else None, rng and rng.role("x")
        )
        of_w = places.w.quantize(
            w, recipe.fprop_w, recipe.dgrad_w if dx else None, rng and rng.role("w")
        )
        y = _product(_or(of_x[0], lines), _or(of_w[0], w), bias if add_bias else None, dtype, dtype)
        # The model's offset moves on in place, perhaps before the backward of this forward runs.
        draws = rng is not None and (recipe.draws_dx or recipe.draws_dw)
        saved = (
            _or(of_x[1], lines.mT) if dw else None,
            _or(of_w[1], w.mT) if dx else None,
            (key[0], key[1].clone()) if draws and key is not None else None,
        )
        tensors, ctx.tree = pytree.tree_flatten(saved)
        ctx.save_for_backward(*tensors)
        ctx.operation = "linear"
        ctx.call = (recipe, places, (dx, dw, db), x.dtype, w.dtype, bias is not None and bias.dtype)
        return y.reshape(*x.shape[:-1], w.shape[0])

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_x, of_w, key = pytree.tree_unflatten(ctx.saved_tensors, ctx.tree)
        recipe, places, needed, x_dtype, w_dtype, bias_dtype = ctx.call
        dx, dw, db = asked(ctx, needed)
        rng = None if key is None else Rng(*key).role("dy")
        lines = _lines(dy)
        row, column = recipe.dgrad_dy if dx else None, recipe.wgrad_dy if dw else None
        of_dy = places.dy.quantize(lines, row, column, rng)
        grad_x = grad_w = grad_b = None
        if dx:
            grad_x = _product(_or(of_dy[0], lines), of_w, None, dy.dtype, x_dtype)
            grad_x = grad_x.reshape(*dy.shape[:-1], grad_x.shape[-1])
        if dw:
            grad_w = _product(_or(of_dy[1], lines.mT), of_x, None, dy.dtype, w_dtype)
        if db:
            grad_b = lines.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_x, grad_w, grad_b, None, None, None, None, None


def _lines(x: torch.Tensor) -> torch.Tensor:
    """[..., C] as a matrix; C may be 0, which reshape(-1, C) does not take."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _or(quantized: QuantizedTensor | None, values: torch.Tensor) -> _Operand:
    return values if quantized is None else quantized


def _product(
    a: _Operand,
    b: _Operand,
    bias: torch.Tensor | None,
    compute: torch.dtype,
    dtype: torch.dtype,
) -> torch.Tensor:
    """A·Bᵀ + bias; in PyTorch's own GEMM of `compute` unless both are quantized."""
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        direct = dtype if dtype is torch.bfloat16 else torch.float32
        return ops.matmul(a, b, bias, direct).to(dtype)
    row = None if bias is None else bias.to(compute)
    return F.linear(_values(a, compute), _values(b, compute), row).to(dtype)


def _values(operand: _Operand, dtype: torch.dtype) -> torch.Tensor:
    """[lines, contraction] in high precision."""
    if isinstance(operand, torch.Tensor):
        return operand.to(dtype)
    values = ops.dequantize(operand, dtype)
    return values if operand.axis == -1 else values.mT
