"""How a lack of memory is told, and that a refusal keeps none."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import blockscale as bs
import pytest
import torch
from blockscale._errors import typed

NO_MEMORY = """
import resource, torch, blockscale as bs
x = torch.zeros(1, 1).expand(1 << 17, 1 << 17)
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), -1))
for call in (lambda: bs.quantize(x, "nvfp4"), lambda: bs.linear(x, x[:8], recipe="mxfp8")):
    try:
        call()
    except RuntimeError as error:
        print(error)
"""


def test_a_lack_of_memory_is_told_as_by_pytorch() -> None:
    """By words that callers look for, who then try a smaller batch. (In a process of its own: a
    driver that is first asked for GPUs there finds none.)"""
    made = subprocess.run(
        [sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, check=True
    )
    said = made.stdout.splitlines()
    assert len(said) == 2
    for line in said:
        assert "Allocator: can't allocate memory" in line
        assert "API call failed" not in line


def test_a_lack_of_memory_on_a_gpu_gets_the_type_of_pytorchs() -> None:
    """All else stays as it is."""
    said = "CUDA out of memory. Tried to allocate 2.00 GiB."
    lack = typed(RuntimeError(said))
    assert type(lack) is torch.OutOfMemoryError
    assert str(lack) == said
    for other in (RuntimeError("another"), NotImplementedError(said), torch.OutOfMemoryError(said)):
        assert typed(other) is other


def test_a_lack_of_memory_on_a_gpu(cuda: torch.device) -> None:
    x = torch.zeros(1, 1, device=cuda, dtype=torch.bfloat16).expand(1 << 15, 1 << 14)
    w = torch.zeros(1 << 10, 1 << 14, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    y = bs.linear(x[: 1 << 12], w, recipe="fp8_blockwise")
    dy = torch.zeros(1, 1, device=cuda, dtype=torch.bfloat16).expand(y.shape)
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(cuda)[1]
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(cuda) + (1 << 21)) / total, cuda
    )
    try:
        for call in (
            lambda: bs.quantize(x, "mxfp8"),
            lambda: bs.linear(x, w, recipe="fp8_blockwise"),
            lambda: bs.linear(x, w, recipe="mxfp8"),
            lambda: bs.quantize_weight(x, "nvfp4"),
            lambda: torch.autograd.backward(y, dy),
        ):
            with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
                call()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    torch.autograd.backward(y, dy)  # and then there is


def test_a_refusal_keeps_nothing() -> None:
    """After a refusal nothing holds x, so that a caller can try again with a smaller batch."""
    x = torch.ones(4, 70)
    dead = weakref.ref(x)
    gc.disable()
    try:
        with pytest.raises(ValueError, match=r"linear: x\.shape"):
            bs.linear(x, torch.ones(8, 71), recipe="mxfp8")
        del x
        assert dead() is None
    finally:
        gc.enable()
