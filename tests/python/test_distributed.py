"""Converted models under DistributedDataParallel and FSDP2 in two processes.

Both ranks see the same batch and draw by the same seed, and the mean of two equal gradients is that
gradient: so the weights after some steps are those of one process alone, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import blockscale as bs
import pytest
import torch
from ranks import DEVICES, on_two_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

STEPS = 2
Weights = dict[str, torch.Tensor]


def trained(device: str, wrapper: str = "") -> Weights:
    """The weights of a small converted model after a few steps of two micro-batches."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model = nn.Sequential(block, nn.LayerNorm(32), nn.Linear(32, 7))
    bs.convert(model, "nvfp4", skip=["2"])
    whole: nn.Module = model
    if wrapper == "fsdp":  # it moves the parameters itself
        mesh = init_device_mesh(device, (2,))
        fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model.to(device)
    if wrapper == "ddp":
        whole = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    bs.attach(model, optimizer)
    for _ in range(STEPS):
        for _ in range(2):
            whole(torch.randn(16, 32).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert bs.rng_state(whole) == {"step": STEPS, "forward": 0, "seed": 0}
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters.items()}


def train_and_compare(wrapper: str, device: str, want: Weights) -> None:
    got = trained(device, wrapper)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name].cpu(), value), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_two_ranks_with_one_batch_are_one_process(
    wrapper: str, device: str, tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks
    want = {name: value.cpu() for name, value in trained(device).items()}
    torch.set_num_threads(threads)
    on_two_ranks(train_and_compare, tmp_path, wrapper, device, want, device=device)
