"""Experts of other libraries that ranks divide: by whole matrices, however few rows come."""

from __future__ import annotations

import warnings
from pathlib import Path

import blockscale as bs
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

WIDTH = 64
ENDS = torch.tensor([5, 20], dtype=torch.int32)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(2, WIDTH, WIDTH).bfloat16())

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        up = self.up.to_local() if isinstance(self.up, DTensor) else self.up
        return torch.nn.functional.grouped_mm(x[:, : up.shape[1]], up, offs=ends[: len(up)])


class Local(Experts):
    """Two of a rank's own, which multiply nothing where no rows go to them."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        mine = chosen // 2 == dist.get_rank()
        if mine.any():
            by_expert, order = (chosen[mine] % 2).sort(stable=True)
            ends = by_expert.bincount(minlength=2).cumsum(0).int()
            y[mine.nonzero()[order, 0]] = super().forward(x[mine][order], ends)
        dist.all_reduce(y.detach())
        return y


def converted(made: nn.Module, recipe: str) -> nn.Module:
    bs.convert(nn.ModuleDict({"experts": made}), recipe, experts=["experts"])
    return made


def rows() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(20, WIDTH).bfloat16()


def rows_for_one_rank() -> None:
    """The other one does not leave it waiting, by an error; it is told."""
    made = converted(Local(), "mxfp8")
    for expert in (0, 3):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            y = made(rows(), torch.full((20,), expert))
        assert len(seen) == (dist.get_rank() != expert // 2)
        assert bool(y.any())


def test_a_rank_without_rows_goes_on(tmp_path: Path) -> None:
    on_ranks(rows_for_one_rank, tmp_path)


def cut_matrices() -> None:
    """Matrices cut along their rows or columns are refused by every rank, in eager code and in
    compiled. Over a mesh of one rank they are whole, and high precision needs no blocks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    for recipe, over, places, refused in (
        ("nvfp4", mesh["two"], [Shard(1)], True),
        ("nvfp4", mesh["two"], [Shard(2)], True),
        ("nvfp4", mesh, [Shard(0), Shard(1)], True),
        ("nvfp4", mesh["two"], [Shard(0)], False),
        ("nvfp4", mesh["one"], [Shard(1)], False),
        ("nvfp4", mesh, [Shard(2), Shard(0)], False),
        ("bf16", mesh["two"], [Shard(1)], False),
    ):
        made = converted(Experts(), recipe)
        made.up = nn.Parameter(distribute_tensor(made.get_parameter("up").detach(), over, places))
        for compiled in (False, True):
            torch._dynamo.reset()
            call = torch.compile(made, fullgraph=True, backend="aot_eager") if compiled else made
            if refused:
                said = r"Experts: experts = matrices placed by \(.*; need Shard\(0\) or Replicate"
                with pytest.raises(Exception, match=said):
                    call(rows(), ENDS)
            else:
                assert len(call(rows(), ENDS)) == 20


def test_cut_matrices_are_refused(tmp_path: Path) -> None:
    on_ranks(cut_matrices, tmp_path)
