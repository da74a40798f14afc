"""Tensor parallelism: `linear` of a weight that is sharded over the ranks of a mesh, a DTensor.

The two ways in which `torch.distributed.tensor.parallel` shards a layer, here over two ranks:

                 ColwiseParallel        RowwiseParallel
    w            [N/2, K] Shard(0)      [N, K/2] Shard(1)
    x, dx        [M, K]   whole         [M, K/2] cut
    y, dy        [M, N/2] cut           [M, N]   whole
    to be added  dx                     y

A rank quantizes its piece of a matrix as part of the whole: block scales need whole blocks, an
outer scale is made from the largest value of all pieces (two numbers are exchanged), and random
bits depend on the position in the whole. So all codes and scales equal those of a single process,
whatever the number of ranks; only sums over ranks may be rounded differently.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from blockscale._collectives import largest_of_ranks
from blockscale._errors import as_pytorch_raises, fail, fail_type
from blockscale._layer_arguments import check_shapes
from blockscale._recipe_text import OPERANDS
from blockscale.functional import Arguments, LinearFunction, asked, first_order
from blockscale.recipe import Recipe, Spec
from blockscale.rng import Key

_ops = torch.ops.blockscale


@as_pytorch_raises
def linear_over_mesh(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    key: Key | None,
    dtype: torch.dtype,
    grad: bool,
) -> torch.Tensor:
    """`linear` of DTensors; x and bias are redistributed as w's placement requires.

    Args:
        x: [..., K] DTensor on w's mesh.
        w: [N, K] DTensor on a one-dimensional mesh: Shard(0), Shard(1) or Replicate, with whole
            blocks of the recipe on every rank.
        bias: [N] DTensor on that mesh.
        recipe: one with quantized operands.
        key: the layer's, the same on all ranks of the mesh; needed if the recipe draws random bits.
        dtype: dtype of the result.
        grad: whether gradients are recorded.

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
        remedy = "leave the others to fully_shard(mesh=...), without its dp_mesh_dims="
        fail("linear", "w.device_mesh", mesh, need, remedy)
    for name, tensor in (("x", x), ("bias", row)):
        if tensor is not None and tensor.device_mesh != mesh:
            remedy = "give parallelize_module one mesh for both"
            fail("linear", f"{name}.device_mesh", tensor.device_mesh, f"{mesh}, w's", remedy)
    # Compiled code checks only the pieces, which may match on one rank and not on another.
    check_shapes("linear", x, w, row, grouped=False)
    cut = _cut_of(placement)
    _check_pieces(w, cut, recipe)
    last = Shard(x.dim() - 1)
    # The placements of x, its gradient, the bias and y. With partial sums, one rank adds the bias.
    plans: dict[int | None, tuple[Placement, Placement, Placement, Placement]] = {
        None: (Replicate(), Replicate(), Replicate(), Replicate()),
        0: (Replicate(), Partial(), Shard(0), last),
        1: (last, last, Replicate(), Partial()),
    }
    of_x, of_dx, of_bias, of_y = plans[cut]
    local = (
        _placed(x, of_x).to_local(grad_placements=[of_dx]),
        w.to_local(),
        None if row is None else _placed(row, of_bias).to_local(),
    )
    needs = tuple(grad and t is not None and t.requires_grad for t in local)
    adds_bias = cut != 1 or mesh.get_local_rank() == 0
    y = _Linear.apply(*local, (recipe, key, dtype, needs, adds_bias, _places(w, cut)))  # type: ignore[no-untyped-call]
    shape = torch.Size((*x.shape[:-1], w.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, mesh, [of_y], run_check=False, shape=shape, stride=stride)


def _placed(tensor: DTensor, placement: Placement) -> DTensor:
    """The tensor, redistributed only if it is placed otherwise: even if it is not, PyTorch's own
    call would reduce the gradient over ranks, for every layer that reads the tensor and before
    their gradients are summed."""
    same = tensor.placements == (placement,)
    return tensor if same else tensor.redistribute(tensor.device_mesh, [placement])


def experts_here(weight: torch.Tensor) -> torch.Tensor:
    """This rank's matrices of w [E, N, K], a DTensor sharded into whole matrices."""
    assert isinstance(weight, DTensor)
    remedy = "distribute_tensor(weight, mesh, [Shard(0)]) over the dimension of experts"
    if any(placement != Shard(0) for placement in weight.placements):
        need = "Shard(0): other whole matrices on each rank"
        fail("GroupedLinear", "weight.placements", weight.placements, need, remedy)
    # The check gives the same result on all ranks: if one failed alone, the others would wait for
    # its rows.
    # Along a dimension all pieces are as large as the first, but for the last one; where more are
    # smaller, it is empty (0 or less here).
    sizes = {weight.shape[0]}
    for ranks in weight.device_mesh.shape:
        firsts = {size: -(-size // ranks) for size in sizes}
        lasts = {size - first * (ranks - 1) for size, first in firsts.items()}
        sizes = {*firsts.values(), *lasts}
    if min(sizes) <= 0:
        got = f"{weight.shape[0]} experts over {tuple(weight.device_mesh.shape)} ranks"
        fail("GroupedLinear", "weight", got, "an expert or more on each", "use fewer ranks")
    return weight.to_local()


def _on_mesh(name: str, tensor: torch.Tensor) -> DTensor:
    if not isinstance(tensor, DTensor):
        need = "a DTensor, as the others are"
        fail_type("linear", name, tensor, need, "parallelize_module makes all of them")
    return tensor


def _cut_of(placement: Placement) -> int | None:
    """The dimension along which w is sharded."""
    if isinstance(placement, Replicate):
        return None
    if not isinstance(placement, Shard) or placement.dim not in (0, 1):
        remedy = "use ColwiseParallel or RowwiseParallel"
        fail("linear", "w.placements", placement, "Shard(0), Shard(1) or Replicate()", remedy)
    return placement.dim


def _piece(w: DTensor, cut: int) -> int:
    """The extent of a piece; the last pieces may be shorter, or empty."""
    return -(-w.shape[cut] // w.device_mesh.size())


def _check_pieces(w: DTensor, cut: int | None, recipe: Recipe) -> None:
    if cut is None:
        return
    specs = [s for s in (getattr(recipe, name) for name in OPERANDS) if s is not None]
    unit = max(max(*s.block, s.extent_multiple) for s in specs)
    piece = _piece(w, cut)
    if piece % unit and piece < w.shape[cut]:
        got = f"{list(w.shape)} in pieces of {piece} along dimension {cut}"
        need = f"whole blocks on every rank: pieces that are multiples of {unit} for {recipe}"
        fail("linear", "w", got, need, "leave this layer out of the parallel plan, or unconverted")


class _Place(NamedTuple):
    """Where a rank's piece of a matrix starts, and the ranks that have the rest."""

    row: int
    column: int
    group: dist.ProcessGroup | None  # None: the piece is the whole


def _places(w: DTensor, cut: int | None) -> tuple[_Place, _Place, _Place]:
    """The places of x, w and dy."""
    whole = _Place(0, 0, None)
    if cut is None:
        return whole, whole, whole
    mesh = w.device_mesh
    start = mesh.get_local_rank() * _piece(w, cut)
    start = start if start < w.shape[cut] else 0  # an empty piece has no position
    group = mesh.get_group()
    across = _Place(0, start, group)
    return (whole, _Place(start, 0, group), across) if cut == 0 else (across, across, whole)


def _amax(
    place: _Place, x: torch.Tensor, row: Spec | None, column: Spec | None
) -> torch.Tensor | None:
    """[2]: the amax that outer scales of a whole matrix are made from, along its rows and down its
    columns; None if the quantizer computes it, or needs none."""
    outer = [(s, axis) for s, axis in ((row, -1), (column, -2)) if s is not None and s.outer]
    if place.group is None or not outer:
        return None
    x = x[None] if x.dim() == 1 else x
    # Without a transform the largest value is the same along either axis.
    plain = [_ops.amax(x, s.text, axis, 0) for s, axis in outer if not s.hadamard][:1]
    found = {axis: _ops.amax(x, s.text, axis, 0) if s.hadamard else plain[0] for s, axis in outer}
    any_of_them = next(iter(found.values()))
    both = torch.stack([found.get(axis, any_of_them) for axis in (-1, -2)])
    return largest_of_ranks(both, place.group)


class _Linear(torch.autograd.Function):
    """The part of a linear layer that one rank computes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        call: tuple[Recipe, Key | None, torch.dtype, tuple[bool, ...], bool, tuple[_Place, ...]],
    ) -> torch.Tensor:
        recipe, key, dtype, (dx, dw, db), adds_bias, (of_x, of_w, of_dy) = call
        seed, offset = key or (None, None)
        x_amax = _amax(of_x, x, recipe.fprop_x, recipe.wgrad_x if dw else None)
        w_amax = _amax(of_w, w, recipe.fprop_w, recipe.dgrad_w if dx else None)
        ctx.recipe, ctx.place = recipe, of_dy

        def forward(x: torch.Tensor, w: torch.Tensor, bias: Any, *_: object) -> Any:
            call = (recipe.text, dx, dw, seed, offset, dtype, [*of_x[:2], *of_w[:2]])
            bias = bias if adds_bias else None
            return _ops.linear_piece.default(x, w, bias, *call, x_amax, w_amax)

        rest: Arguments = (recipe.text, dx, dw, seed, offset, None, dtype, None, None)
        return LinearFunction.forward(ctx, x, w, bias, (forward, recipe, rest, db, None))

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, *saved = ctx.saved_tensors
        text, k, dx, dw, db, dtypes = ctx.layer
        recipe, place = ctx.recipe, ctx.place
        want_x, want_w, want_b = wanted = asked(ctx, (dx, dw, db))
        row, column = recipe.dgrad_dy if want_x else None, recipe.wgrad_dy if want_w else None
        amax = _amax(place, dy, row, column)
        skips = (dx and not want_x, dw and not want_w)
        call = (text, k, dx, dw, want_b, *dtypes, *skips, [*place[:2]], amax)
        made = iter(_ops.linear_piece_backward.default(dy, saved, *call))
        return (*[next(made) if want else None for want in wanted], None)
