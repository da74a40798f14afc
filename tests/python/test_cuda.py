"""The quantizers on a GPU: what they give on the CPU, bit for bit, on fresh random inputs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import blockscale as bs
import pytest
import torch
from bits import RNG, assert_same_bits, assert_same_operand, raw

OPS = torch.ops.blockscale
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SPECS = (
    "fp8_1x128",
    "fp8_1x128[rounding=stochastic]",
    "fp8_128x128",
    "mxfp8",
    "mxfp8[element=e5m2]",
    "mxfp8[element=e4m3fnuz,block=32x32]",
    "mxfp8[element=e5m2fnuz,rounding=stochastic,scale_rule=rceil]",
    "mxfp6",
    "mxfp6[element=e3m2,rounding=stochastic]",
    "mxfp4",
    "mxfp4[block=32x32]",
    "mxfp4[rounding=stochastic,scale_rule=rceil]",
    "mxfp4[hadamard=16:0x0]",
    "mxfp4[hadamard=32,rounding=stochastic,scale_rule=ceil]",
    "nvfp4",
    "nvfp4[block=16x16]",
    "nvfp4[outer=false]",
    "nvfp4[rounding=stochastic]",
    "nvfp4[hadamard=16]",
    "nvfp4[hadamard=16,rounding=stochastic]",
    "nvfp4[hadamard=128]",
    "amdfp4",
    "amdfp4[block=16x16,rounding=stochastic]",
    "amdfp4[hadamard=64,outer=false]",
)
# No extents that are multiples of each other, of a block or of a tile alone; and none at all.
SHAPES = (
    (0, 70), (5, 0), (1, 1), (1, 2880), (2880, 1), (17, 2880), (2880, 17), (129, 257), (300, 1001),
    (2, 3, 40), (4, 0, 7),
)  # fmt: skip
LAYOUTS = {
    "nvfp4": ("linear", "nv_128x4", "aiter_scale", "mfma_16x16", "mfma_16x16+aiter_scale"),
    "nvfp4[block=16x16]": ("linear", "nv_128x4", "mfma_16x16+nv_128x4"),
    "mxfp8[block=32x32]": ("linear", "nv_128x4", "aiter_scale"),
    "mxfp4": ("linear", "nv_128x4", "mfma_16x16+aiter_scale"),
    "amdfp4[block=16x16,hadamard=128,outer=false]": ("linear", "mfma_16x16+nv_128x4"),
    "fp8_1x128": ("linear", "mn_major"),
    "fp8_128x128": ("linear", "mn_major"),
}


def values(random: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    """Gaussian, but every row is of another magnitude and a tenth are zeros of either sign."""
    x = torch.randn(*shape, generator=random)
    if len(shape) > 1:
        x *= 2.0 ** torch.randint(-12, 8, (*shape[:-1], 1), generator=random)
    return torch.where(torch.rand(shape, generator=random) < 0.1, x * 0.0, x).to(dtype)


def axes(shape: Sequence[int]) -> tuple[int, ...]:
    return (-1, -2) if len(shape) > 1 else (-1,)


@pytest.mark.parametrize("spec", SPECS)
def test_quantize_and_dequantize(spec: str, cuda: torch.device, random: torch.Generator) -> None:
    for shape, dtype in itertools.product((*SHAPES, (70,)), DTYPES):
        x = values(random, *shape, dtype=dtype)
        for axis in axes(shape):
            what = (shape, dtype, axis)
            want = bs.quantize(x, spec, axis, rng=RNG)
            got = bs.quantize(x.to(cuda), spec, axis, rng=RNG)
            assert got.device == cuda
            assert_same_operand(got, want, what)
            for out in DTYPES:
                assert_same_bits(got.dequantize(out), want.dequantize(out), (what, out))


@pytest.mark.parametrize(
    ("row", "col"),
    [
        *((spec, spec) for spec in SPECS),
        ("nvfp4[rounding=stochastic]", "nvfp4[rounding=stochastic,hadamard=16]"),
        ("nvfp4", "nvfp4[hadamard=16]"),
        ("amdfp4[rounding=stochastic]", "amdfp4[rounding=stochastic,hadamard=16]"),
        ("mxfp4", "mxfp4[hadamard=16:0x0]"),
        ("mxfp8", "nvfp4"),
        ("nvfp4[hadamard=16]", "mxfp8[element=e5m2]"),
    ],
)
def test_quantize_dual(row: str, col: str, cuda: torch.device, random: torch.Generator) -> None:
    """Both directions, against the CPU and against the GPU's own single directions."""
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        x = values(random, *shape, dtype=dtype)
        want = bs.quantize_dual(x, row, col, rng=RNG)
        got = bs.quantize_dual(x.to(cuda), row, col, rng=RNG)
        singles = [bs.quantize(x.to(cuda), s, a, rng=RNG) for s, a in ((row, -1), (col, -2))]
        for g, w, single in zip(got, want, singles, strict=True):
            assert_same_operand(g, w, (shape, dtype))
            assert_same_operand(g, single, (shape, dtype))


@pytest.mark.parametrize(
    ("row", "col"),
    [
        (None, "nvfp4[hadamard=16]"),
        (None, "mxfp4[hadamard=16]"),
        ("nvfp4[rounding=stochastic]", "nvfp4[rounding=stochastic,hadamard=16]"),
        ("amdfp4[rounding=stochastic]", "amdfp4[hadamard=16]"),
        ("nvfp4[block=16x16]", "nvfp4[block=16x16]"),
        ("mxfp4[block=32x32]", "mxfp4[block=32x32]"),
        ("fp8_1x128", "fp8_1x128"),
        ("mxfp8", "mxfp8[hadamard=32]"),
    ],
)
def test_many_tiles(row: str | None, col: str, cuda: torch.device) -> None:
    """So many that threads take one tile after another, which they do from eight rounds on."""
    for shape in ((8188, 8184), (3, 4220, 4088)):
        x = torch.randn(shape, device=cuda, dtype=torch.bfloat16)
        batch = len(shape) - 2
        if row is None:
            made = [[bs.quantize(t, col, -2, rng=RNG, batch_dims=batch)] for t in (x, x.cpu())]
        else:
            made = [
                list(bs.quantize_dual(t, row, col, RNG, batch_dims=batch)) for t in (x, x.cpu())
            ]
        for got, want in zip(*made, strict=True):
            assert_same_operand(got, want, shape)


@pytest.mark.parametrize("spec", LAYOUTS)
def test_layouts(spec: str, cuda: torch.device, random: torch.Generator) -> None:
    """Written by the quantizer, read by dequantize, and between any two by relayout."""
    for shape in ((17, 2880), (300, 257), (1, 1), (0, 70), (5, 0)):
        x = values(random, *shape)
        for axis in (-1, -2):
            made = {
                layout: bs.quantize(x.to(cuda), spec, axis, layout=layout)
                for layout in LAYOUTS[spec]
            }
            for layout, got in made.items():
                what = (shape, axis, layout)
                assert_same_operand(got, bs.quantize(x, spec, axis, layout=layout), what)
                assert_same_bits(got.dequantize(), made["linear"].dequantize(), what)
                for other in LAYOUTS[spec]:
                    assert_same_operand(bs.relayout(got, other), made[other], (*what, other))


@pytest.mark.parametrize("spec", SPECS)
def test_batches(spec: str, cuda: torch.device, random: torch.Generator) -> None:
    for shape in ((3, 33, 70), (1, 17, 129), (2, 0, 5), (0, 5, 70)):
        x = values(random, *shape)
        for axis in (-1, -2):
            want = bs.quantize(x, spec, axis, rng=RNG, batch_dims=1)
            got = bs.quantize(x.to(cuda), spec, axis, rng=RNG, batch_dims=1)
            assert_same_operand(got, want, (shape, axis))
            assert_same_bits(got.dequantize(torch.float32), want.dequantize(torch.float32), shape)
        pairs = [bs.quantize_dual(t, spec, spec, RNG, batch_dims=1) for t in (x.to(cuda), x)]
        for g, w in zip(*pairs, strict=True):
            assert_same_operand(g, w, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", ["mxfp8", "fp8_128x128", "nvfp4[hadamard=16,rounding=stochastic]"])
def test_strides(
    spec: str, dtype: torch.dtype, cuda: torch.device, random: torch.Generator
) -> None:
    """Any strides and any alignment of x give what its copy gives."""
    base = values(random, 150, 300, dtype=dtype).to(cuda)
    flat = values(random, 20001, dtype=dtype).to(cuda)
    batch = values(random, 4, 70, 90, dtype=dtype).to(cuda)
    views = {
        "transposed": base.t(),
        "every other column": base[:, ::2],
        "every third row": base[::3],
        "a window": base[3:, 5:264],
        "off by one element": flat[1:20001].view(100, 200),
        "expanded": base[:1].expand(40, 300),
        "three dimensions, rows with one stride": batch[:, :, 1:64],
        "three dimensions, no common stride": batch.transpose(1, 2),
    }
    for what, x in views.items():
        copy = x.cpu().contiguous()
        for axis in (-1, -2):
            assert_same_operand(
                bs.quantize(x, spec, axis, rng=RNG), bs.quantize(copy, spec, axis, rng=RNG), what
            )
        for g, w in zip(bs.quantize_dual(x, spec, spec, RNG),
                        bs.quantize_dual(copy, spec, spec, RNG), strict=True):  # fmt: skip
            assert_same_operand(g, w, what)
        assert_same_bits(bs.amax(x, spec), bs.amax(copy, spec), what)
    batches = {"transposed": batch.transpose(1, 2), "every other": batch[::2], "part": batch[:, 1:]}
    for what, x in batches.items():
        args: Any = (spec, -1, None, RNG, "linear", 1)
        assert_same_operand(bs.quantize(x, *args), bs.quantize(x.cpu().contiguous(), *args), what)


@pytest.mark.parametrize("spec", [s for s in SPECS if bs.spec(s).outer])
def test_amax(spec: str, cuda: torch.device, random: torch.Generator) -> None:
    for shape, dtype in itertools.product((*SHAPES, (3, 33, 70)), DTYPES):
        x = values(random, *shape, dtype=dtype)
        for axis, batch in itertools.product(axes(shape), (0, 1)):
            if batch and len(shape) != 3:
                continue
            what = (shape, dtype, axis, batch)
            found = bs.amax(x.to(cuda), spec, axis, batch)
            assert_same_bits(found, bs.amax(x, spec, axis, batch), what)
            q = bs.quantize(x.to(cuda), spec, axis, rng=RNG, batch_dims=batch)
            given = bs.quantize(x.to(cuda), spec, axis, found, RNG, batch_dims=batch)
            assert_same_operand(given, q, what)
            half = bs.quantize(x.to(cuda), spec, axis, 0.5, RNG, batch_dims=batch)
            assert_same_operand(half, bs.quantize(x, spec, axis, 0.5, RNG, batch_dims=batch), what)


@pytest.mark.parametrize("spec", SPECS)
def test_values_that_are_not_ordinary(
    spec: str, cuda: torch.device, random: torch.Generator
) -> None:
    ends = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
    cases = {
        "zeros": torch.zeros(33, 70),
        "negative zeros": -torch.zeros(33, 70),
        "subnormal": values(random, 33, 70) * 2.0**-130,
        "tiny": values(random, 33, 70) * 2.0**-60,
        "near overflow": values(random, 33, 70).clamp(-1, 1) * 3.4e38,
        "one large": torch.cat([values(random, 32, 70) * 2.0**-80, torch.full((1, 70), 3e38)]),
    }
    for name, value in ends.items():
        cases[name] = values(random, 33, 70)
        cases[name][5, 7] = value
    for (name, x), dtype in itertools.product(cases.items(), DTYPES):
        x = x.to(dtype)
        want = bs.quantize_dual(x, spec, spec, RNG)
        got = bs.quantize_dual(x.to(cuda), spec, spec, RNG)
        for g, w in zip(got, want, strict=True):
            assert_same_operand(g, w, (name, dtype))
            assert_same_bits(
                g.dequantize(torch.float32), w.dequantize(torch.float32), (name, dtype)
            )
        assert_same_bits(bs.amax(x.to(cuda), spec), bs.amax(x, spec), (name, dtype))


@pytest.mark.parametrize("amax", [float("nan"), float("inf"), 0.0])
def test_an_amax_tensor_is_data(amax: float, cuda: torch.device) -> None:
    x, found = torch.ones(4, 70), torch.tensor(amax)
    assert_same_operand(
        bs.quantize(x.to(cuda), "nvfp4", amax=found.to(cuda)), bs.quantize(x, "nvfp4", amax=found)
    )


STOCHASTIC = [s for s in SPECS if bs.spec(s).stochastic]


@pytest.mark.parametrize("spec", STOCHASTIC)
def test_keys_in_device_memory(spec: str, cuda: torch.device, random: torch.Generator) -> None:
    x = values(random, 65, 129)
    for seed, offset in ((1, 2), (-1, 2**62), (2**63 - 1, 0), (-(2**63), 2**40)):
        tensors = bs.Rng(torch.tensor(seed, device=cuda), torch.tensor([offset], device=cuda))
        for axis in (-1, -2):
            want = bs.quantize(x, spec, axis, rng=bs.Rng(seed, offset))
            assert_same_operand(
                bs.quantize(x.to(cuda), spec, axis, rng=tensors), want, (seed, offset, axis)
            )
    one, other = (bs.quantize(x.to(cuda), spec, rng=bs.Rng(1, o)) for o in (1, 2))
    assert not torch.equal(raw(one.codes), raw(other.codes))


@pytest.mark.parametrize("spec", STOCHASTIC)
def test_a_shard_draws_what_the_whole_draws(
    spec: str, cuda: torch.device, random: torch.Generator
) -> None:
    x = values(random, 300, 500).to(cuda)
    outer = bs.spec(spec).outer
    for axis, where in itertools.product((-1, -2), ((128, 0), (0, 128), (128, 256))):
        amax = bs.amax(x, spec, axis) if outer else None
        shard = x[where[0] : where[0] + 128, where[1] : where[1] + 128]
        got = bs.quantize(shard, spec, axis, amax, RNG, origin=where)
        want = bs.quantize(
            shard.cpu(), spec, axis, None if amax is None else amax.cpu(), RNG, origin=where
        )
        assert_same_operand(got, want, (axis, where))


def test_operands_may_begin_anywhere(cuda: torch.device, random: torch.Generator) -> None:
    """One matrix of a batch is a view into it, at no multiple of 16 bytes."""
    q = bs.quantize(values(random, 3, 3, 40).to(cuda), "nvfp4", batch_dims=1)
    assert q.outer is not None
    assert q.codes[1].storage_offset() % 16 == 8
    for e in range(3):
        one = bs.QuantizedTensor(q.codes[e], q.scales[e], q.outer[e], q.spec, -1, (3, 40))
        assert_same_bits(one.dequantize(), q.dequantize()[e], e)
        assert_same_operand(bs.relayout(bs.relayout(one, "nv_128x4"), "linear"), one, e)


def test_mixed_devices_are_refused(cuda: torch.device) -> None:
    x, gpu = torch.ones(4, 70), str(cuda)
    y = x.to(cuda)
    spec = "nvfp4[rounding=stochastic]"
    key = torch.tensor(1)
    q, g = bs.quantize(x, "nvfp4"), bs.quantize(y, "nvfp4")

    def refused(text: str, call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match="need") as error:
            call(*args, **kwargs)
        assert str(error.value).startswith(text), str(error.value)
        assert "\n" not in str(error.value)

    there = f'need {gpu}, where x is; move it with .to("{gpu}")'
    refused(f"quantize: amax.device = cpu; {there}", bs.quantize, y, "nvfp4", amax=torch.ones(()))
    refused(f"quantize: seed.device = cpu; {there}", bs.quantize, y, spec, rng=bs.Rng(key))
    on_gpu = key.to(cuda)
    refused(f"quantize: offset.device = cpu; {there}",
            bs.quantize, y, spec, rng=bs.Rng(on_gpu, key))  # fmt: skip
    refused(f"quantize: seed.device = {gpu}; need cpu, where x is",
            bs.quantize, x, spec, rng=bs.Rng(on_gpu))  # fmt: skip
    found = torch.ones((), device=cuda)
    refused(f"quantize_dual: col_amax.device = {gpu}; need cpu",
            bs.quantize_dual, x, "nvfp4", "nvfp4", col_amax=found)  # fmt: skip
    refused(f"matmul: b_codes.device = {gpu}; need cpu, where a_codes is", bs.matmul, q, g)
    refused(f"matmul: b_codes.device = cpu; need {gpu}, where a_codes is", bs.matmul, g, q)
    refused(f"matmul: bias.device = cpu; need {gpu}", bs.matmul, g, g, torch.ones(4))
    refused(f"linear: w.device = cpu; need {gpu}", bs.linear, y, x, recipe="mxfp8")
    args = ("nvfp4", -1, [4, 70], "linear")
    refused(f"dequantize: scales.device = cpu; need {gpu}, where codes is",
            OPS.dequantize, g.codes, q.scales, g.outer, *args, torch.float32)  # fmt: skip
    refused(f"relayout: scales.device = {gpu}; need cpu, where codes is",
            OPS.relayout, q.codes, g.scales, *args, "nv_128x4")  # fmt: skip


def test_nothing_waits_for_the_device(cuda: torch.device, random: torch.Generator) -> None:
    """PyTorch raises where one of its own operators would synchronise."""
    x = values(random, 65, 130).to(cuda)
    spec = "nvfp4[rounding=stochastic,hadamard=16]"
    key = bs.Rng(torch.tensor(5, device=cuda), torch.tensor(6, device=cuda))
    torch.cuda.set_sync_debug_mode("error")
    try:
        q = bs.quantize(x, spec, amax=bs.amax(x, spec), rng=key)
        bs.quantize(x, spec, amax=2.0, rng=bs.Rng(5, 6))
        bs.quantize_dual(x, "nvfp4", spec, rng=key)
        bs.relayout(q, "nv_128x4").dequantize()
        bs.matmul(q, q, bias=x[0, :65])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_side_streams(cuda: torch.device, random: torch.Generator) -> None:
    """Work goes to the current stream, behind what it depends on and nothing else."""
    x = values(random, 1000, 1030).to(cuda)
    spec = "nvfp4[hadamard=128]"  # this one needs workspaces
    want = bs.quantize_dual(x, spec, spec)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for _ in range(10):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late = torch.zeros_like(x)
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            late.copy_(x)
            got = bs.quantize_dual(late, spec, spec)
            values_of = [q.dequantize(torch.float32) for q in got]
            late.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        for g, w, v in zip(got, want, values_of, strict=True):
            assert_same_operand(g, w)
            assert_same_bits(v, w.dequantize(torch.float32))


def test_another_device_than_the_current_one(random: torch.Generator, cuda: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    x, spec = values(random, 65, 130), "nvfp4[rounding=stochastic,hadamard=128]"
    there = torch.device("cuda", 1 - (cuda.index or 0))
    for g, w in zip(bs.quantize_dual(x.to(there), spec, spec, RNG),
                    bs.quantize_dual(x, spec, spec, RNG), strict=True):  # fmt: skip
        assert_same_operand(g, w)
        assert g.device == there
    assert torch.cuda.current_device() == cuda.index
    q = bs.quantize(x.to(there), "nvfp4")
    assert bs.matmul(q, q).device == there
    with pytest.raises(ValueError, match=f"matmul: b_codes.device = {cuda}; need {there}"):
        bs.matmul(q, q.to(cuda))
