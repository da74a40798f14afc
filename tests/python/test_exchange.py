"""`quantized_all_to_all`: rows of two ranks, exchanged as codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import blockscale as bs
import pytest
import torch
import torch.distributed as dist
from ranks import DEVICES, on_ranks
from refusals import value_error
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_gather_tensor_autograd,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

POWERS = ["mxfp8", "mxfp6", "mxfp4", *(f"mxfp8[scale_rule={r}]" for r in ("floor", "ceil", "even"))]
SPECS = [*POWERS, "fp8_1x128"]
WIDTH = 200  # no block divides it
SENT = [[3, 17], [0, 11]]  # rows from rank to rank


def rows(rank: int, count: int, device: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(10 * seed + rank)
    exponents = torch.randint(-60, 60, (count, WIDTH // 8), generator=g).repeat_interleave(8, -1)
    made = torch.ldexp(torch.randn(count, WIDTH, generator=g), exponents)
    if count > 3:
        made[0] = 0
        made[1, 3], made[2, 7] = torch.nan, torch.inf
    return made.to(dtype).to(device)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """With NaN where there is NaN."""
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(7e3), b.nan_to_num(7e3))


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
            assert equal(y, parts([through(v.detach(), spec) for v in xs], SENT, rank))
            if spec in POWERS:
                assert equal(through(y.detach(), spec), y)
            (dx,) = torch.autograd.grad(y, x, dys[rank])
            assert equal(dx, parts([through(dy, way_back) for dy in dys], back, rank))
    # So a layer of that spec gives what it gives without the exchange.
    for spec in ("mxfp8", "mxfp4"):
        xs = [rows(r, sum(SENT[r]), device, torch.bfloat16) for r in range(2)]
        w = rows(0, 64, device, torch.bfloat16, seed=2)
        y = bs.quantized_all_to_all(xs[rank], spec, back[rank], SENT[rank])
        got = bs.linear(y, w, recipe=spec)
        assert equal(got, bs.linear(parts(xs, SENT, rank), w, recipe=spec))
    # Rows that a collective may still be writing keep their gradient.
    mesh = init_device_mesh(device, (2,))
    leaf = rows(0, 8, device, torch.bfloat16).requires_grad_()
    x = all_gather_tensor_autograd(leaf, 0, mesh)
    assert isinstance(x, AsyncCollectiveTensor)
    y = bs.quantized_all_to_all(x, "mxfp8", [8, 8], [8, 8], mesh)
    y.nan_to_num().sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    first = dist.new_group([0])
    if rank == 0:
        own = xs[rank].detach()
        y = bs.quantized_all_to_all(own, "mxfp8", (len(own),), (len(own),), first)
        assert equal(y, through(own, "mxfp8"))
    else:
        with pytest.raises(ValueError, match=r"group = one without this rank; need a group that"):
            bs.quantized_all_to_all(xs[rank], "mxfp8", [20], [20], first)
    # No rows, from anybody or of no width.
    none = torch.zeros(0, WIDTH, device=device)
    assert bs.quantized_all_to_all(none, "mxfp8", [0, 0], [0, 0]).shape == (0, WIDTH)
    narrow = torch.zeros(4, 0, device=device)
    assert bs.quantized_all_to_all(narrow, "fp8_1x128", [2, 2], [2, 2]).shape == (4, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_two_ranks(device: str, tmp_path: Path) -> None:
    on_ranks(exchange_and_compare, tmp_path, device, device=device)


def test_a_dimension_of_a_mesh(one_rank: DeviceMesh) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "experts"))
    x = torch.randn(4, WIDTH).bfloat16()

    def call(group: DeviceMesh) -> torch.Tensor:
        return bs.quantized_all_to_all(x, "mxfp8", [4], [4], group)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for run in (call, compiled):
        assert equal(run(mesh["experts"]), through(x, "mxfp8"))
    need = "a ProcessGroup, a DeviceMesh of one dimension, or None"
    said = f"quantized_all_to_all: group = a DeviceMesh of 2 dimensions; need {need}; pass mesh['"
    value_error(lambda: call(mesh), said)


def test_in_compiled_code(one_rank: DeviceMesh) -> None:
    torch._dynamo.reset()
    x, counts = torch.randn(20, WIDTH).bfloat16().requires_grad_(), torch.tensor([20])

    def call(x: torch.Tensor) -> torch.Tensor:
        return bs.quantized_all_to_all(2 * x, "mxfp8", [20], [20], one_rank.get_group())

    def counted(x: torch.Tensor) -> torch.Tensor:
        return bs.quantized_all_to_all(2 * x, "mxfp8", counts.tolist(), counts.tolist())

    want = call(x)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        got = torch.compile(counted, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, want)
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
        ({"group": 3}, r"group = an int; need a ProcessGroup, a DeviceMesh"),
        ({"x": None}, r"x = None; need a tensor"),
        ({"x": torch.zeros(4)}, r"x.shape = \[4\]; need rank 2, \[T, K\]"),
        ({"x": torch.zeros(4, 4, 32)}, r"x.shape = \[4, 4, 32\]; need rank 2, \[T, K\]"),
        ({"x": torch.zeros(4, 4, dtype=torch.float16)}, r"x.dtype = torch.float16; need torch.fl"),
        ({"input_splits": [3]}, r"input_splits = \[3\]; need 4 in all, the rows of x"),
        ({"input_splits": [2, 2]}, r"input_splits = \[2, 2\]; need 1 numbers of rows"),
        ({"input_splits": [4, "1"]}, r"input_splits = \[4, '1'\]; need 1 numbers of rows"),
        ({"output_splits": ["4"]}, r"output_splits = \['4'\]; need 1 numbers of rows"),
        ({"output_splits": [-1]}, r"output_splits = \[-1\]; need 1 numbers of rows"),
        ({"output_splits": torch.tensor([4])}, r"output_splits = a Tensor; need a list of ints"),
    ],
)
def test_refusals(change: dict[str, Any], said: str, one_rank: DeviceMesh) -> None:
    call = {"x": torch.zeros(4, 32), "spec": "mxfp8", "output_splits": [4], "input_splits": [4]}
    with pytest.raises((TypeError, ValueError), match=f"^quantized_all_to_all: {said}"):
        bs.quantized_all_to_all(**call | change)  # type: ignore[arg-type]


def test_what_ranks_have_cut_is_refused(one_rank: DeviceMesh) -> None:
    x = distribute_tensor(torch.zeros(4, 32), one_rank, [Shard(0)])
    with pytest.raises(ValueError, match=r"^quantized_all_to_all: x = a DTensor; need a plain t"):
        bs.quantized_all_to_all(x, "mxfp8", [4], [4])


def test_second_derivatives_are_refused(one_rank: DeviceMesh) -> None:
    x = torch.zeros(4, 32, requires_grad=True)
    y = bs.quantized_all_to_all(x, "mxfp8", [4], [4])
    said = "^quantized_all_to_all: create_graph = True; need False: second derivatives"
    with pytest.raises(ValueError, match=said):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_within_a_transform_of_functions(one_rank: DeviceMesh) -> None:
    def of(x: torch.Tensor) -> torch.Tensor:
        return bs.quantized_all_to_all(x, "mxfp8", [4], [4]).sum()

    with pytest.raises(ValueError, match=r"^quantized_all_to_all: x = within torch.func; need"):
        torch.func.grad(of)(torch.zeros(4, 32))


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match=r"group = None; need a process group; call torch.dist"):
        bs.quantized_all_to_all(torch.zeros(4, 32), "mxfp8", [4], [4])
