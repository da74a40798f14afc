"""Experts divided over ranks: tokens travel to the rank that has their expert, and back.

Run: torchrun --standalone --nproc-per-node 2 examples/python/expert_parallel.py

Results and gradients are those of one process that has all experts and tokens, to the bit.
"""

from __future__ import annotations

import os
import sys

import blockscale as bs
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

EXPERTS, WIDTH, HIDDEN, TOKENS = 8, 64, 128, 300


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = bs.nn.GroupedLinear(EXPERTS, WIDTH, HIDDEN)
        self.down = bs.nn.GroupedLinear(EXPERTS, HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x, ends).relu(), ends)
        return y


def alone(experts: Experts, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Each row by its expert, in one process."""
    order = chosen.argsort(stable=True)
    y = torch.empty_like(x)
    y[order] = experts(x[order], chosen.bincount(minlength=EXPERTS).cumsum(0))
    return y


def over_ranks(
    experts: Experts, x: torch.Tensor, chosen: torch.Tensor, mesh: DeviceMesh
) -> torch.Tensor:
    """The same where each rank has some of the experts, and x is this rank's rows."""
    order = chosen.argsort(stable=True)
    to_each = chosen.bincount(minlength=EXPERTS)  # rows for each expert
    from_each = torch.empty_like(to_each)  # from each rank for each expert of this one
    dist.all_to_all_single(from_each, to_each, group=mesh.get_group())
    sent, received = (of.view(mesh.size(), -1).sum(1).tolist() for of in (to_each, from_each))
    rows = all_to_all_single_autograd(x[order], received, sent, mesh)
    # They come rank by rank, and are wanted expert by expert.
    of_rank = from_each.view(mesh.size(), -1)
    expert = torch.arange(of_rank.shape[1], device=x.device).repeat(mesh.size())
    place = expert.repeat_interleave(from_each).argsort(stable=True)
    made = torch.empty_like(rows)
    made[place] = experts(rows[place], of_rank.sum(0).cumsum(0))
    y = torch.empty_like(x)
    y[order] = all_to_all_single_autograd(made, sent, received, mesh)
    return y


def compare(rank: int, ranks: int, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (ranks,))
    torch.manual_seed(0)  # the same weights and tokens everywhere
    x, dy = (torch.randn(ranks * TOKENS, WIDTH, device=device).bfloat16() for _ in range(2))
    chosen = torch.randint(EXPERTS, (ranks * TOKENS,), device=device)
    here = slice(rank * TOKENS, (rank + 1) * TOKENS)
    experts = Experts().to(device).bfloat16()
    bs.convert(experts, "mxfp8")
    want = alone(experts, x, chosen)
    wanted = torch.autograd.grad(want, [*experts.parameters()], dy)
    for layer in (experts.up, experts.down):  # fully_shard along another dimension goes on top
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)]))
    got = over_ranks(experts, x[here], chosen[here], mesh)
    gradients = torch.autograd.grad(got, [*experts.parameters()], dy[here])
    assert torch.equal(got, want[here])
    for gradient, value in zip(gradients, wanted, strict=True):
        assert isinstance(gradient, DTensor)
        assert torch.equal(gradient.to_local(), value.chunk(ranks)[rank])
    if rank == 0:
        print(f"{EXPERTS} experts over {ranks} ranks on {device.type} are those of one process")


def main() -> None:
    if "WORLD_SIZE" not in os.environ:
        sys.exit(f"no ranks; {__doc__.splitlines()[2].replace('Run', 'run')}")
    ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    enough = torch.cuda.device_count() >= ranks and not bs.explain("nvfp4", device="cuda")
    device = torch.device("cuda", local) if enough else torch.device("cpu")
    dist.init_process_group("nccl" if enough else "gloo", device_id=device if enough else None)
    compare(dist.get_rank(), ranks, device)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads may abort a process whose interpreter is ending


if __name__ == "__main__":
    main()
