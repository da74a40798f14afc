"""Converted models under DistributedDataParallel and FSDP in two processes.

Both ranks see the same batch and draw by the same seed, and the mean of two equal gradients is that
gradient: so the weights after some steps are those of one process alone, bit for bit.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import blockscale as bs
import pytest
import torch
import torch.distributed as dist
from expert_models import Block
from ranks import DEVICES, on_ranks, one_thread
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

STEPS = 2
Weights = dict[str, torch.Tensor]


def fsdp1(module: nn.Module, device: str, use_orig_params: bool) -> FullyShardedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is about to go
        return FullyShardedDataParallel(
            module, device_id=torch.device(device), use_orig_params=use_orig_params
        )


def trained(device: str, wrapper: str = "") -> Weights:
    """The weights of a small converted model after a few steps of two micro-batches."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model = nn.Sequential(block, nn.LayerNorm(32), nn.Linear(32, 7))
    sharded = wrapper.startswith("fsdp")
    if not sharded:  # which moves the parameters itself
        model.to(device)
    whole: nn.Module = model
    if wrapper == "ddp, converted last":
        whole = DistributedDataParallel(model)
    elif wrapper == "fsdp1, converted last":
        model[0] = fsdp1(block, device, use_orig_params=True)
        whole = fsdp1(model, device, use_orig_params=True)
    recipe = bs.recipe("nvfp4").replace(
        keep_w="W again" not in wrapper, keep_x="x again" not in wrapper
    )
    bs.convert(whole, recipe, skip=["2"])
    if wrapper == "ddp":
        whole = DistributedDataParallel(model)
    elif wrapper == "fsdp1":
        model[0] = fsdp1(block, device, use_orig_params=False)
        whole = fsdp1(model, device, use_orig_params=False)
    elif wrapper.startswith("fsdp2"):
        mesh = init_device_mesh(device, (2,))
        fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(whole.parameters(), 1e-2)
    bs.attach(model, optimizer)
    for _ in range(STEPS):
        for _ in range(2):
            whole(torch.randn(16, 32).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert bs.rng_state(whole) == {"step": STEPS, "forward": 0, "seed": 0}
    if isinstance(whole, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(whole):
            return {name: p.detach().clone() for name, p in whole.named_parameters()}
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters.items()}


def train_and_compare(wrapper: str, device: str, want: Weights) -> None:
    got = trained(device, wrapper)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name].cpu(), value), name


def test_layers_that_fsdp1_has_flattened_are_in_the_report(one_rank: DeviceMesh) -> None:
    inner = fsdp1(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), "cpu", use_orig_params=False)
    report = bs.convert(nn.Sequential(inner, nn.Linear(32, 32)), "mxfp8")
    assert [name for name, _ in report.converted] == ["1"]
    said = dict(report.skipped)["0.0"]
    assert "flat" in said
    assert "use_orig_params=True" in said


def test_a_layer_that_was_sharded_by_itself_is_left_alone(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        layer = nn.Linear(32, 32)
        fully_shard(layer, mesh=mesh)
        report = bs.convert(nn.Sequential(nn.Linear(32, 32), layer), "mxfp8")
        said = "FSDPLinear is sharded by itself: convert before fully_shard"
        assert report.skipped == [("1", said)]
        block = Block()
        fully_shard(block.experts, mesh=mesh)
        said = "experts: FSDPManyExperts is sharded by itself: convert before fully_shard"
        with pytest.raises(ValueError, match=said):
            bs.convert(block, "mxfp8", experts=["experts"])
        model = nn.Sequential(nn.Linear(32, 32))
        bs.convert(model, "mxfp8")
        fully_shard(model[0], mesh=mesh)
        with pytest.raises(ValueError, match=r"revert: model = Sequential with '0' as FSDPLinear"):
            bs.revert(model)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "wrapper",
    [
        "ddp",
        "ddp, converted last",
        "fsdp1",
        "fsdp1, converted last",
        "fsdp2",
        "fsdp2, W again",
        "fsdp2, x again",
    ],
)
def test_two_ranks_with_one_batch_are_one_process(
    wrapper: str, device: str, tmp_path: Path
) -> None:
    with one_thread():
        want = {name: value.cpu() for name, value in trained(device).items()}
    on_ranks(train_and_compare, tmp_path, wrapper, device, want, device=device)
