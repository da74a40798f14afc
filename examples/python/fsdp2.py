"""Convert a model and shard it with FSDP2 (`fully_shard`).

Run: torchrun --standalone --nproc-per-node 2 examples/python/fsdp2.py

Ranks talk by NCCL where there is a GPU for each, else by Gloo on the CPU. They see other batches,
so each has a seed of its own. The end checks that all hold the same weights and count of steps.
"""

from __future__ import annotations

import os
import sys

import blockscale as bs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WIDTH, STEPS = 64, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(self.norm(x)).relu())
        return x + y


def same_on_all_ranks(value: torch.Tensor) -> bool:
    of_rank_0 = value.clone()
    dist.broadcast(of_rank_0, src=0)
    agree = torch.tensor(float(torch.equal(of_rank_0, value)), device=value.device)
    dist.all_reduce(agree, dist.ReduceOp.MIN)
    return bool(agree)


def train(rank: int, ranks: int, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (ranks,))
    torch.manual_seed(0)  # the same initial weights everywhere
    model = nn.Sequential(*(blocks := [Block(), Block()]), nn.Linear(WIDTH, WIDTH))
    report = bs.convert(model, "nvfp4", skip=["2"], seed=rank)  # before fully_shard
    gathered = bs.quantized_all_gather(model)  # FSDP2 sends codes of these instead of values
    if rank == 0:
        print(report, "gathered as codes: " + ", ".join(gathered), sep="\n")
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    bs.attach(model, optimizer)

    random = torch.Generator().manual_seed(rank)  # other batches on each rank
    losses = []
    for step in range(STEPS):
        x = torch.randn(256, WIDTH, generator=random).to(device)
        loss = (model(x) - x.flip(-1)).square().mean()  # learn to reverse a row
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / ranks)
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1:2d}  loss {losses[-1]:.4f}")

    assert losses[-1] < losses[0] / 2, losses
    assert bs.rng_state(model) == {"step": STEPS, "forward": 0, "seed": rank}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().numel() < parameter.numel(), name
        assert same_on_all_ranks(parameter.full_tensor().detach()), name
    if rank == 0:
        print(f"{ranks} ranks on {device.type} hold the same weights")


def main() -> None:
    if "WORLD_SIZE" not in os.environ:
        sys.exit("no ranks; run: torchrun --standalone --nproc-per-node 2 examples/python/fsdp2.py")
    ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    enough = torch.cuda.device_count() >= ranks and not bs.explain("nvfp4", device="cuda")
    device = torch.device(f"cuda:{local}" if enough else "cpu")
    if enough:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if enough else "gloo")
    train(dist.get_rank(), ranks, device)
    dist.barrier()  # nobody leaves while another still talks to it
    if not enough:  # Gloo's threads may abort a process whose interpreter is ending
        sys.stdout.flush()
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
