"""Meshes of two dimensions, on four processes: FSDP2 over tensor parallelism, and its replicas."""

from __future__ import annotations

from pathlib import Path

import blockscale as bs
import pytest
import torch
import torch.distributed as dist
from ranks import devices, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

FOUR = devices(4)
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
RECIPES = ("fp8_blockwise", "mxfp4", "nvfp4", "fp8_blockwise[keep_w=False,keep_x=False]")


def model(recipe: str, device: str, seed: int) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256))
    bs.convert(made, recipe, seed=seed)
    return made.to(device)


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def sharded_pieces(device: str) -> None:
    """Pieces of a layer that FSDP2 cuts once more, against the same pieces whole, whose gradients
    are averaged by hand: the same bits."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh["data"], mesh["tensor"]
    for recipe in RECIPES:
        for compiled in (False, True):
            torch.manual_seed(10 + data.get_local_rank())
            x = torch.randn(64, 256).to(device, torch.bfloat16)
            one, cut = (model(recipe, device, data.get_local_rank()) for _ in range(2))
            if not compiled:  # pieces of these are gathered by their values all the same
                bs.quantized_all_gather(cut)
            parallelize_module(one.bfloat16(), tensor, PLAN)
            parallelize_module(cut, tensor, PLAN)
            if compiled:
                torch._dynamo.reset()
                cut.compile(backend="aot_eager")
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            fully_shard(cut, mesh=data, mp_policy=policy)
            y, want = cut(x), one(x)
            assert torch.equal(y, want), (recipe, compiled)
            for made in (y, want):
                made.float().square().mean().backward()
            for (name, a), b in zip(cut.named_parameters(), one.parameters(), strict=True):
                mean = whole(b.grad).float()
                dist.all_reduce(mean, group=data.get_group())
                assert torch.equal(whole(a.grad), mean / 2), (recipe, compiled, name)


@pytest.mark.parametrize("device", FOUR)
def test_tensor_parallel_pieces_are_sharded(device: str, tmp_path: Path) -> None:
    on_ranks(sharded_pieces, tmp_path, device, device=device, ranks=4)


def replicas(device: str) -> None:
    """Two replicas of two pieces each: codes that are gathered, against values."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicas", "pieces"))
    for recipe in RECIPES:
        seen: list[list[torch.Tensor]] = []
        for codes in (False, True):
            made = model(recipe, device, dist.get_rank())
            if codes:
                assert bs.quantized_all_gather(made) == ["0.weight", "2.weight"]
            fully_shard(made, mesh=mesh)
            optimizer = torch.optim.AdamW(made.parameters(), 1e-2)
            bs.attach(made, optimizer)
            torch.manual_seed(dist.get_rank())
            for _ in range(2):
                y = made(torch.randn(64, 256).to(device))
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append([y.detach(), *(whole(p) for p in made.parameters())])
        for a, b in zip(*seen, strict=True):
            assert torch.equal(a, b), recipe


@pytest.mark.parametrize("device", FOUR)
def test_replicas_gather_codes(device: str, tmp_path: Path) -> None:
    on_ranks(replicas, tmp_path, device, device=device, ranks=4)
