"""Meshes of two dimensions, on two or four processes: FSDP2 over tensor parallelism, and its
replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import blockscale as bs
import pytest
import torch
import torch.distributed as dist
from ranks import DEVICES, devices, on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
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


def spread(made: nn.Sequential, how: str, mesh: DeviceMesh) -> None:
    """Give the first layers weights on a mesh of one rank, or the same one on every rank."""
    if how == "pieces":
        parallelize_module(made, mesh, PLAN)
        return

    def shared(_: nn.Module, args: Any, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(args[0], mesh, [Replicate()])

    def local(_: nn.Module, y: Any, mesh: DeviceMesh) -> Any:
        return y.to_local()

    distribute_module(made[0], mesh, input_fn=shared, output_fn=local)  # type: ignore[arg-type]


def whole_pieces(device: str) -> None:
    """Weights of tensor parallelism as large as the layer's own are gathered by their values, and
    those beside them as codes."""
    mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("data", "tensor"))
    for how in ("pieces", "the same"):
        seen = []
        for codes in (False, True):
            made = model("nvfp4", device, dist.get_rank()).append(nn.Linear(256, 256))
            bs.convert(made.to(device), "nvfp4")
            if codes:
                names = bs.quantized_all_gather(made)
                assert names == ["0.weight", "2.weight", "4.weight"]
            spread(made, how, mesh["tensor"])
            fully_shard(made, mesh=mesh["data"])
            torch.manual_seed(dist.get_rank())
            y = made(torch.randn(64, 256).to(device))
            kinds = [type(made[i].weight).__name__ for i in (0, 4)]
            assert kinds == ["DTensor", "GatheredWeight" if codes else "Parameter"], how
            y.square().mean().backward()
            seen.append([y.detach(), *(whole(p.grad) for p in made.parameters())])
        for a, b in zip(*seen, strict=True):
            assert torch.equal(a, b), how


def experts_of_one_rank(device: str) -> None:
    mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("data", "experts"))
    seen = []
    for codes in (False, True):
        torch.manual_seed(0)
        layer = bs.nn.GroupedLinear(4, 64, 64, device=device, recipe="nvfp4")
        if codes:
            bs.quantized_all_gather(layer)
        divided = distribute_tensor(layer.weight, mesh["experts"], [Shard(0)])
        layer.weight = nn.Parameter(divided)
        fully_shard(layer, mesh=mesh["data"])
        y = layer(torch.randn(8, 64).to(device), torch.tensor([2, 4, 6, 8]).to(device))
        y.sum().backward()
        seen.append([y.detach(), whole(layer.weight.grad)])
    for a, b in zip(*seen, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", [whole_pieces, experts_of_one_rank])
def test_what_a_mesh_leaves_whole_is_gathered_by_values(
    call: Any, device: str, tmp_path: Path
) -> None:
    on_ranks(call, tmp_path, device, device=device)


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


def test_weights_on_the_whole_mesh_are_refused(one_rank: DeviceMesh) -> None:
    dims = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)  # PyTorch 2.13
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    made = model("nvfp4", "cpu", 0)
    for layer in (made[0], made[2], made[3]):
        distribute_module(layer, mesh)
    if dims is not None:
        fully_shard(made, mesh=mesh, dp_mesh_dims=dims(shard=("data",)))
    x = distribute_tensor(torch.randn(64, 256), mesh, [Replicate(), Replicate()])
    said = (
        r"linear: w.device_mesh = DeviceMesh\(.*; need a mesh of one dimension, the "
        r"tensor-parallel one; leave the others to fully_shard\(mesh=...\), without its "
        r"dp_mesh_dims="
    )
    with pytest.raises(ValueError, match=said):
        made(x)
