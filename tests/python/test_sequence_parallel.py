"""Tensor parallelism with PyTorch's sequence parallelism: each rank has some lines of what goes
into a block and of what comes out, and all of them within.

Converted layers exchange what PyTorch's own do: gradients of an input that several layers read are
summed on each rank before ranks add them up.
"""

from __future__ import annotations

from pathlib import Path

import blockscale as bs
import pytest
import torch
from ranks import DEVICES, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, LENGTH = 256, 64


class Mix(nn.Module):
    """Three layers of one input, and in place of attention something that needs all lines."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.o(self.q(x) * self.k(x).flip(1) + self.v(x))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(WIDTH), Mix()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.mix(self.norm(x))
        return y


def block(recipe: str, device: str) -> Block:
    torch.manual_seed(0)
    model = Block().to(device)
    if recipe != "none":
        bs.convert(model, recipe, seed=5)
    return model


def cut(model: Block, device: str) -> Block:
    lines, whole = (Shard(1),), (Replicate(),)
    plan: dict[str, ParallelStyle] = {
        "norm": SequenceParallel(),
        "mix": PrepareModuleInput(input_layouts=lines, desired_input_layouts=whole),
        "mix.q": ColwiseParallel(),
        "mix.k": ColwiseParallel(),
        "mix.v": ColwiseParallel(),
        "mix.o": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, init_device_mesh(device, (2,)), plan)
    return model


def results(model: Block, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """y and the gradients, whole where they are of parameters."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    assert x.grad is not None
    found = {"y": y.detach(), "dx": x.grad}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        of = parameter.grad
        found[name] = of.full_tensor() if isinstance(of, DTensor) else of
    return found


def as_in_one_process(device: str) -> None:
    torch.manual_seed(1)
    x, dy = torch.randn(2, 2, LENGTH, WIDTH).to(device)
    rank = torch.distributed.get_rank()
    mine = [t.chunk(2, 1)[rank] for t in (x, dy)]
    exchanged = {}
    for recipe in ("none", "fp8_blockwise", "mxfp8", "mxfp4"):
        want = results(block(recipe, device), x, dy)
        mode = CommDebugMode()  # type: ignore[no-untyped-call]
        model = cut(block(recipe, device), device)
        with mode:
            got = results(model, *mine)
        exchanged[recipe] = {str(name): count for name, count in mode.get_comm_counts().items()}
        for name, value in want.items():
            part = value.chunk(2, 1)[rank] if name in ("y", "dx") else value
            # The ranks' sums round otherwise, and so may codes made of them.
            error = (got[name] - part).norm() / part.norm()
            assert error < (1e-5 if recipe == "none" else 2e-3), (recipe, name, float(error))
    assert exchanged["none"]
    for recipe, counts in exchanged.items():
        assert counts == exchanged["none"], recipe


@pytest.mark.parametrize("device", DEVICES)
def test_as_in_one_process(device: str, tmp_path: Path) -> None:
    on_ranks(as_in_one_process, tmp_path, device, device=device)
