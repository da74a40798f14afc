"""Processes that need not import PyTorch first: they are forked from one that has imported these
and done nothing else."""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "blockscale.cli.bench",
        "blockscale.cli.inspect",
        "blockscale.cli.train",
        "matplotlib.backends.backend_agg",
        "matplotlib.figure",
        "pytest",
        "torch._dynamo",  # PyTorch's optimizers import it
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
    ]
)
