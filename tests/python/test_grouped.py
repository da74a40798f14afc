"""Groups of rows in Python: shapes from shapes alone, values from the groups alone."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys

import blockscale as bs
import pytest
import torch
import torch.utils._pytree as pytree
from bits import assert_same_bits, assert_same_operand
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

SPECS = {
    "fp8_1x128": ("linear", "mn_major"),
    "fp8_128x128": ("linear", "mn_major"),
    "mxfp8": ("linear", "nv_128x4", "aiter_scale"),
    "mxfp8[block=32x32]": ("linear", "nv_128x4"),
    "nvfp4": ("linear", "nv_128x4", "mfma_16x16+aiter_scale"),
    "nvfp4[hadamard=64]": ("linear", "mfma_16x16"),
    "amdfp4[block=16x16]": ("linear", "aiter_scale"),
}
CASES = [(spec, layout, axis) for spec in SPECS for layout in SPECS[spec] for axis in (-1, -2)]
ENDS = ([70], [0, 5, 5, 6, 200, 290], [128, 256, 300], [0, 0], [1, 2, 3])
ROWS, COLUMNS = 300, 192


def data(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    return (x * torch.arange(1, ROWS + 1)[:, None]).to(device, dtype)


def expected(
    x: torch.Tensor, ends: list[int], spec: str, layout: str, axis: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the groups alone, joined; what is left of the buffers is padding."""
    begins = [0, *ends[:-1]]
    alone = [
        bs.quantize(x[b:e], spec, axis, layout=layout) for b, e in zip(begins, ends, strict=True)
    ]
    # A linear matrix grows downwards (axis -1) or to the right, mn_major is a transposed one.
    names = layout.split("+")
    codes_along = 0 if "mfma_16x16" in names or axis == -1 else 1
    tiled = {"nv_128x4", "aiter_scale"} & set(names)
    scales_along = 0 if tiled else int(("mn_major" in names) == (axis == -1))
    codes = torch.cat([q.codes.view(torch.uint8) for q in alone], codes_along)
    return codes, torch.cat([q.scales.view(torch.uint8) for q in alone], scales_along)


@pytest.mark.parametrize(("spec", "layout", "axis"), CASES)
def test_every_group_is_what_it_is_alone(
    device: torch.device, spec: str, layout: str, axis: int
) -> None:
    x = data(device)
    for ends, dtype in itertools.product(ENDS, (torch.int32, torch.int64)):
        offsets = torch.tensor(ends, dtype=dtype, device=device)
        q = bs.quantize(x, spec, axis, layout=layout, offsets=offsets)
        codes, scales = expected(x, ends, spec, layout, axis)
        fill = 127 if "aiter_scale" in layout and q.scales.dtype == torch.float8_e8m0fnu else 0
        for got, want, padding in ((q.codes, codes, 0), (q.scales, scales, fill)):
            held = got.view(torch.uint8)
            inside = tuple(slice(0, n) for n in want.shape)
            assert torch.equal(held[inside], want)
            rest = torch.full_like(held, padding)
            rest[inside] = want
            assert torch.equal(held, rest)
        begins = [0, *ends[:-1]]
        if q.outer is not None:
            outers = [
                bs.quantize(x[b:e], spec, axis).outer for b, e in zip(begins, ends, strict=True)
            ]
            assert q.outer.tolist() == [float(o) for o in outers]  # type: ignore[arg-type]
        values = bs.dequantize(q, torch.float32)
        assert values.shape == x.shape
        for b, e in zip(begins, ends, strict=True):
            assert_same_bits(values[b:e], bs.quantize(x[b:e], spec, axis).dequantize(torch.float32))
        assert not values[ends[-1] :].any()


@pytest.mark.parametrize(("spec", "layout", "axis"), CASES)
def test_relayout_keeps_the_groups(device: torch.device, spec: str, layout: str, axis: int) -> None:
    x, offsets = data(device), torch.tensor([3, 3, 131, 280], device=device)
    q = bs.quantize(x, spec, axis, layout=layout, offsets=offsets)
    plain = bs.relayout(q, "linear")
    want = bs.quantize(x, spec, axis, offsets=offsets)
    assert_same_operand(plain, want)
    assert plain.offsets is q.offsets
    back = bs.relayout(plain, layout)
    assert_same_operand(back, q)


def test_both_axes_in_one_pass_are_the_two_passes(device: torch.device) -> None:
    x, offsets = data(device), torch.tensor([0, 100, 101, 290], dtype=torch.int32, device=device)
    rng = bs.Rng(3, 4)
    stochastic = "nvfp4[rounding=stochastic,hadamard=16]"
    for row_spec, col_spec in (("fp8_1x128", "fp8_1x128"), ("nvfp4", stochastic),
                               ("mxfp8[block=32x32]", "mxfp8[block=32x32]")):  # fmt: skip
        pair = bs.quantize_dual(x, row_spec, col_spec, rng, offsets=offsets)
        for q, spec, axis in zip(pair, (row_spec, col_spec), (-1, -2), strict=True):
            want = bs.quantize(x, spec, axis, rng=rng, offsets=offsets)
            assert_same_operand(q, want)


def test_amax_is_that_of_every_group(device: torch.device) -> None:
    x, offsets = data(device), torch.tensor([0, 100, 101, 290], device=device)
    for spec, axis in (("nvfp4", -1), ("nvfp4[hadamard=16]", -2), ("amdfp4[hadamard=64]", -1)):
        got = bs.amax(x, spec, axis, offsets=offsets)
        want = [bs.amax(x[b:e], spec, axis) for b, e in ((0, 0), (0, 100), (100, 101), (101, 290))]
        assert got.tolist() == [float(a) for a in want]
        frozen = bs.quantize(x, spec, axis, amax=got, offsets=offsets)
        assert_same_bits(frozen.codes, bs.quantize(x, spec, axis, offsets=offsets).codes)
        one = bs.quantize(x, spec, axis, amax=7.0, offsets=offsets)
        assert one.outer is not None
        assert len(set(one.outer.tolist())) == 1


def test_random_bits_belong_to_the_place_of_a_group(device: torch.device) -> None:
    x, offsets = data(device), torch.tensor([5, 140, 300], device=device)
    spec, rng = "nvfp4[rounding=stochastic]", bs.Rng(1, 2)
    rows = bs.quantize(x, spec, -1, rng=rng, offsets=offsets)
    alone = bs.quantize(x[5:140], spec, -1, rng=rng, origin=(5, 0))
    assert_same_bits(rows.codes[5:140], alone.codes)
    columns = bs.quantize(x, spec, -2, rng=rng, offsets=offsets)
    alone = bs.quantize(x[5:140], spec, -2, rng=rng, origin=(16, 0))  # 5 rows: one block
    assert_same_bits(columns.codes[:, 8 : 8 + 72], alone.codes)


# --- sizes and compilation ------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "layout", "axis"), CASES)
def test_fakes_know_the_shapes(spec: str, layout: str, axis: int) -> None:
    for rows, columns, groups in ((300, 192, 4), (17, 70, 1), (0, 64, 3), (129, 1, 9)):
        x = torch.randn(rows, columns)
        offsets = torch.zeros(groups, dtype=torch.int32)
        real = torch.ops.blockscale.quantize(
            x, spec, axis, None, None, None, [], layout, 0, offsets
        )
        with FakeTensorMode() as mode:
            fake = torch.ops.blockscale.quantize(
                mode.from_tensor(x), spec, axis, None, None, None, [], layout, 0,
                mode.from_tensor(offsets),
            )  # fmt: skip
        for a, b in zip(fake, real, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_compiles_whole_and_once_for_any_rows_and_offsets(device: torch.device) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(x: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = bs.quantize(x, "nvfp4", offsets=offsets)
        back = bs.relayout(q, "nv_128x4").dequantize()
        row, col = bs.quantize_dual(x, "mxfp8", "mxfp8", offsets=offsets)
        return back, row.codes, col.scales, bs.amax(x, "nvfp4", offsets=offsets)

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    x = data(device)
    for rows, ends in ((300, [5, 140, 300]), (250, [0, 0, 7, 9]), (299, [100, 200, 299])):
        offsets = torch.tensor(ends, device=device)
        part = x[:rows].clone()
        got, want = compiled(part, offsets), step(part, offsets)
        for g, w in zip(got, want, strict=True):
            assert_same_bits(g, w)
    assert counter.frame_count == 1


def test_a_grouped_operand_is_a_tree_and_moves_and_prints() -> None:
    x, offsets = data(torch.device("cpu")), torch.tensor([5, 140, 300])
    q = bs.quantize(x, "nvfp4", offsets=offsets)
    leaves, tree = pytree.tree_flatten(q)
    again = pytree.tree_unflatten(leaves, tree)
    assert again.offsets is offsets
    assert_same_bits(again.dequantize(), q.dequantize())
    assert q.to("cpu").offsets is not None
    assert "groups=3" in repr(q)


def test_captured_graphs_see_new_offsets(cuda: torch.device) -> None:
    x, offsets = data(cuda), torch.tensor([0, 0, 300], device=cuda)

    def step() -> tuple[torch.Tensor, ...]:
        row, col = bs.quantize_dual(x, "nvfp4", "nvfp4[hadamard=64]", offsets=offsets)
        return row.codes, row.scales, col.codes, col.scales, bs.dequantize(col)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    for ends in ([5, 140, 300], [1, 2, 3], [128, 256, 290]):
        offsets.copy_(torch.tensor(ends))
        graph.replay()
        for got, want in zip(held, step(), strict=True):
            assert_same_bits(got, want)


def test_wrong_offsets_on_a_gpu_give_nan_or_an_error(cuda: torch.device) -> None:
    x = data(cuda)
    for ends in ([5, 256, 200], [5, 301], [-1, 300]):
        q = bs.quantize(x, "nvfp4", offsets=torch.tensor(ends, device=cuda))
        assert q.dequantize().isnan().all()
        assert bs.relayout(q, "nv_128x4").dequantize().isnan().all()
    code = """
import blockscale as bs, torch
x = torch.randn(300, 64, device="cuda")
try:
    bs.quantize(x, "nvfp4", offsets=torch.tensor([5, 256, 200], device="cuda"))
except Exception as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "BLOCKSCALE_CHECK_OFFSETS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "offsets[2] = 200 is smaller than offsets[1] = 256" in done.stdout, done.stderr


# --- refusals -------------------------------------------------------------------------------------


def test_refusals_say_what_is_wrong() -> None:
    x = data(torch.device("cpu"))

    def refuses(message: str, offsets: object, **more: object) -> None:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            bs.quantize(x, "nvfp4", offsets=offsets, **more)  # type: ignore[arg-type]

    smaller = r"offsets\[2\] = 200 is smaller than offsets\[1\] = 256; .*must not decrease"
    refuses(smaller, torch.tensor([5, 256, 200]))
    refuses(r"offsets\[1\] = 301; need at most 300, the rows of x", torch.tensor([5, 301]))
    refuses(r"offsets\[0\] = -1 is smaller than 0", torch.tensor([-1, 301]))
    refuses("offsets.dtype = float32; need int32 or int64", torch.tensor([5.0]))
    refuses(r"offsets.shape = \[1, 1\]", torch.tensor([[5]]))
    refuses(r"offsets.shape = \[0\]", torch.tensor([], dtype=torch.int32))
    refuses("offsets.*tensor of the cumulative ends", [5, 300])
    refuses("amax.shape", torch.tensor([5, 300]), amax=torch.ones(3))
    with pytest.raises((ValueError, RuntimeError), match="batch_dims = 1; need 0"):
        bs.quantize(x[None], "nvfp4", batch_dims=1, offsets=torch.tensor([5]))
    q = bs.quantize(x, "nvfp4", offsets=torch.tensor([5, 300]))
    with pytest.raises(ValueError, match=r"a\.offsets = given; need none"):
        bs.matmul(q, q)
    with pytest.raises(ValueError, match=r"outer\.shape"):
        dataclasses.replace(q, offsets=torch.tensor([5, 6, 300]))
    with pytest.raises(ValueError, match=r"offsets\.dtype"):
        dataclasses.replace(q, offsets=torch.tensor([5.0, 300.0]))
