"""`quantized_all_to_all`: rows of two ranks, exchanged as codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import blockscale as bs
import pytest
import torch
import torch.distributed as dist
from ranks import DEVICES, on_two_ranks
from torch.distributed.device_mesh import DeviceMesh

SPECS = ["mxfp8", "mxfp6", "mxfp4", "fp8_1x128", "mxfp8[scale_rule=rceil]"]
WIDTH = 200  # no block divides it
SENT = [[3, 17], [0, 11]]  # rows from rank to rank


def rows(rank: int, count: int, device: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(10 * seed + rank)
    spread = torch.randn(count, WIDTH, generator=g) * torch.rand(count, 1, generator=g).exp2()
    return spread.to(dtype).to(device)


def through(x: torch.Tensor, spec: str | None) -> torch.Tensor:
    return x if spec is None else bs.dequantize(bs.quantize(x, spec), dtype=x.dtype)


def parts(of: list[torch.Tensor], counts: list[list[int]], rank: int) -> torch.Tensor:
    """What comes to a rank, of the rows of all."""
    return torch.cat([torch.split(x, n)[rank] for x, n in zip(of, counts, strict=True)])


def exchange_and_compare(device: str) -> None:
    rank, back = dist.get_rank(), [list(column) for column in zip(*SENT, strict=True)]
    for spec in SPECS:
        for dtype, way_back in ((torch.bfloat16, None), (torch.float32, "mxfp8")):
            xs = [rows(r, sum(SENT[r]), device, dtype) for r in range(2)]
            dys = [rows(r, sum(back[r]), device, dtype, seed=1) for r in range(2)]
            x = xs[rank].requires_grad_()
            y = bs.quantized_all_to_all(x, spec, back[rank], SENT[rank], backward_spec=way_back)
            assert y.dtype is dtype
            assert torch.equal(y, parts([through(v.detach(), spec) for v in xs], SENT, rank))
            (dx,) = torch.autograd.grad(y, x, dys[rank])
            assert torch.equal(dx, parts([through(dy, way_back) for dy in dys], back, rank))
    # A layer of that spec quantizes what has come to the codes that were sent.
    for spec in ("mxfp8", "mxfp4"):
        xs = [rows(r, sum(SENT[r]), device, torch.bfloat16) for r in range(2)]
        w = rows(0, 64, device, torch.bfloat16, seed=2)
        y = bs.quantized_all_to_all(xs[rank], spec, back[rank], SENT[rank])
        got = bs.linear(y, w, recipe=spec)
        assert torch.equal(got, bs.linear(parts(xs, SENT, rank), w, recipe=spec))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_two_ranks(device: str, tmp_path: Path) -> None:
    on_two_ranks(exchange_and_compare, tmp_path, device, device=device)


def test_in_compiled_code(one_rank: DeviceMesh) -> None:
    torch._dynamo.reset()
    x = rows(0, 20, "cpu", torch.bfloat16).requires_grad_()

    def call(x: torch.Tensor) -> torch.Tensor:
        return bs.quantized_all_to_all(2 * x, "mxfp8", [20], [20], one_rank.get_group())

    want = call(x)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got = compiled(x)
    assert torch.equal(got, want)
    grads = [torch.autograd.grad(y.float().square().sum(), x)[0] for y in (got, want)]
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spec": "nvfp4"}, r"spec = nvfp4; need blocks along a row, .*; use mxfp8, mxfp6, "),
        ({"spec": "fp8_128x128"}, r"spec = fp8_128x128; need blocks along a row"),
        ({"spec": "mxfp4[hadamard=32]"}, r"spec = mxfp4\[hadamard=32:0x.*; need blocks along"),
        ({"backward_spec": "mxfp8[rounding=stochastic]"}, r"backward_spec = mxfp8\[.*; need "),
        ({"spec": 8}, r"spec = an int; need a Spec"),
        ({"x": torch.zeros(4)}, r"x.shape = \[4\]; need rank 2, \[T, K\]"),
        ({"x": torch.zeros(4, 4, dtype=torch.int32)}, r"x.dtype = torch.int32; need "),
        ({"input_splits": [3]}, r"input_splits = \[3\], 3 in all; need 4, the rows of x"),
        ({"input_splits": [2, 2]}, r"input_splits = \[2, 2\]; need 1 numbers of rows"),
        ({"output_splits": [-1]}, r"output_splits = \[-1\]; need 1 numbers of rows"),
        ({"output_splits": torch.tensor([4])}, r"output_splits = a Tensor; need a list of ints"),
    ],
)
def test_refusals(change: dict[str, Any], said: str, one_rank: DeviceMesh) -> None:
    call = {"x": torch.zeros(4, 32), "spec": "mxfp8", "output_splits": [4], "input_splits": [4]}
    with pytest.raises((TypeError, ValueError), match=f"^quantized_all_to_all: {said}"):
        bs.quantized_all_to_all(**call | change)  # type: ignore[arg-type]
