"""Speed and memory of a training step under FSDP2, beside PyTorch in BF16 and torchao's FP8.

The blocks of Llama 3 8B of `model.py` with weights in FP32, each compiled and cut over all ranks:
forward and backward with values in BF16 and gradients summed in FP32, and AdamW. Before that each
recipe's result, uncompiled, is the same to the bit with values and with codes. (Compiled, PyTorch's
norms may add in another order.) All are timed in turn.
`torchrun --standalone --nproc-per-node 4 bench/fsdp.py --out FILE` writes one JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.metadata
from collections.abc import Callable
from typing import Any

import blockscale as bs
import torch
import torch.distributed as dist
from blockscale.cli.bench_clock import between_events
from common import SQUARES, options, recipe, write
from model import BLOCKS, LENGTH, WIDTH, blocks, figures, step
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# What is gathered: the values in BF16, or the codes that the products read.
CASES = (
    ("fp8_blockwise", "values"),
    ("fp8_blockwise[keep_w=False]", "values"),
    ("fp8_blockwise", "codes"),
    (SQUARES, "codes"),
    ("fp8_blockwise[wgrad_x=fp8_128x128,keep_x=False]", "codes"),
    ("mxfp4", "codes"),
    ("nvfp4", "codes"),
)
BATCHES = (2, 1)  # sequences a rank
TURNS, STEPS = 5, 4


@dataclasses.dataclass
class Case:
    """A way to train plain blocks."""

    name: str
    gathers: str
    change: Callable[[nn.Module], object]
    made: Callable[[nn.Module, torch.optim.Optimizer], object] = lambda model, optimizer: None
    after_step: Callable[[nn.Module], object] = lambda model: None


def ours(name: str, gathers: str) -> Case:
    def change(model: nn.Module) -> None:
        bs.convert(model, recipe(name), seed=dist.get_rank())
        if gathers == "codes":
            bs.quantized_all_gather(model)

    return Case(name, gathers, change, bs.attach)


def cases() -> list[Case]:
    """BF16, ours, and torchao's where it is installed."""
    found = [Case("bf16", "values", lambda model: None)]
    found += [ours(name, gathers) for name, gathers in CASES]
    try:
        from torchao.float8 import (
            Float8LinearConfig,
            convert_to_float8_training,
            precompute_float8_dynamic_scale_for_fsdp,
        )
    except ImportError:
        return found
    for name, gathers in (("rowwise", "values"), ("tensorwise", "values"), ("tensorwise", "codes")):
        config = Float8LinearConfig.from_recipe_name(name)
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=gathers == "codes")
        change = functools.partial(convert_to_float8_training, config=config)
        case = Case(f"torchao {name}", gathers, change)
        if gathers == "codes":
            case.after_step = precompute_float8_dynamic_scale_for_fsdp
        found.append(case)
    return found


class Training:
    """A model, its optimizer, and what a step takes."""

    def __init__(self, case: Case, compiled: bool = True) -> None:
        self.case = case
        self.model = blocks(torch.float32)
        case.change(self.model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model:
            if compiled:
                block.compile(dynamic=False)
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        case.made(self.model, self.optimizer)
        self.times: dict[int, list[float]] = {batch: [] for batch in BATCHES}

    def step(self, x: torch.Tensor, dy: torch.Tensor) -> tuple[int, int]:
        """`model.step`; its sizes leave out weights and optimizer."""
        found = step(self.model, x, dy, self.optimizer.step)
        self.case.after_step(self.model)
        return found


def check(x: torch.Tensor) -> None:
    """Check that gathering codes gives the bits of gathering values."""
    for case in cases():
        if case.gathers == "codes" and not case.name.startswith("torchao"):
            y = [Training(ours(case.name, it), False).model(x) for it in ("values", "codes")]
            assert torch.equal(*y), case.name


def main() -> None:
    given = options(__doc__.splitlines()[0])
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    torch._dynamo.config.recompile_limit = 64  # each model compiles the same block anew
    torch.manual_seed(rank)
    shape = (LENGTH, WIDTH)
    data = {
        batch: torch.randn(2, batch, *shape, device="cuda", dtype=torch.bfloat16).unbind()
        for batch in BATCHES
    }
    check(data[1][0])
    trainings = [Training(case) for case in cases()]
    for training in trainings:
        for x, dy in data.values():
            training.step(x, dy)
            training.step(x, dy)
    gc.collect()
    for _ in range(TURNS):
        for training in trainings:
            for batch, (x, dy) in data.items():
                dist.barrier()
                took = between_events(functools.partial(training.step, x, dy), STEPS, 1) / 1e3
                training.times[batch].append(took)
    rows: list[dict[str, Any]] = []
    for batch, (x, dy) in data.items():
        for training in trainings:
            times, of_bf16 = (one.times[batch] for one in (training, trainings[0]))
            row = {"model": training.case.name, "gathers": training.case.gathers}
            size = {"ranks": ranks, "tokens": batch * LENGTH}
            rows.append(row | size | figures(times, of_bf16, batch * LENGTH, training.step(x, dy)))
            if rank == 0:
                print(rows[-1], flush=True)
    if rank == 0:
        peers = [case.name for case in cases() if case.name.startswith("torchao")]
        peer = importlib.metadata.version("torchao") if peers else "none"
        write(rows, f"{BLOCKS} blocks; torchao {peer}", given)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
