"""`matmul` and `grouped_matmul` of random specs, layouts, axes, extents and groups, of values whose
products add up exactly in any order, so that every bit of the result is known.

A value is zero, or ± the largest of its element times a power of two that 128 x 128 values share.
Scales are then powers of two, and sums whole multiples of a product's unit. FP8 tensor cores keep
13 bits below their largest sum. 128 products of 448 = 7 · 2^6 or 57344 = 7 · 2^13 are at most
128 · 49 < 2^13 of their units, those of MXFP4, 6 = 3 · 2, fewer. FP32 sums, of these blocks as of
the others' products, have room for all of K.
"""

from __future__ import annotations

import itertools
import random as randomness
from collections.abc import Callable
from typing import Any, NamedTuple

import blockscale as bs
import pytest
import torch
from bits import raw

LARGEST = {"e4m3fn": 448.0, "e5m2": 57344.0, "e2m3": 7.5, "e3m2": 28.0, "e2m1": 6.0}
SPECS = (  # those of a row multiply each other
    ("fp8_1x128", "fp8_128x128", "fp8_1x128[element=e5m2]"),
    ("mxfp4", "mxfp4[block=32x32]", "mxfp8", "mxfp8[element=e5m2]", "mxfp6", "mxfp6[element=e3m2]"),
    ("nvfp4", "nvfp4[block=16x16]", "nvfp4[outer=false]", "amdfp4", "amdfp4[outer=false]"),
)
LAYOUTS = (
    "linear", "mn_major", "nv_128x4", "aiter_scale",
    "mfma_16x16", "mfma_16x16+nv_128x4", "mfma_16x16+aiter_scale",
)  # fmt: skip
EXTENTS = (0, 1, 2, 7, 8, 17, 63, 64, 128, 130, 200, 256, 385, 513, 1000)
LONG = (4096, 8200, 12_008, 16_136)  # contraction lengths
DTYPES = (torch.float32, torch.bfloat16)  # of results
SPARE = 1 << 21  # products of the largest case


class Operand(NamedTuple):
    values: torch.Tensor  # [lines, length], or [groups, lines, length]
    spec: bs.Spec
    axis: int
    layout: str


def layouts_of(spec: bs.Spec) -> list[str]:
    """The layouts that operands of the spec can have."""
    found = []
    for layout in LAYOUTS:
        try:
            bs.quantize(torch.zeros(1, 1), spec, layout=layout)
        except ValueError:
            continue
        found.append(layout)
    return found


def draw(
    r: randomness.Random, spec: bs.Spec, axis: int, shape: tuple[int, ...], grouped: bool = False
) -> Operand:
    """`grouped`: blocks may start anywhere, so all values have one power of two."""
    g = torch.Generator().manual_seed(r.getrandbits(60))
    values = torch.randint(-1, 2, shape, generator=g) * LARGEST[spec.element]
    values *= torch.rand(shape, generator=g) < r.choice((0.1, 1.0))
    if not grouped:
        squares = [-(-extent // 128) for extent in shape[-2:]]
        powers = 2.0 ** torch.randint(-1, 2, (*shape[:-2], *squares), generator=g)
        powers = powers.repeat_interleave(128, -2).repeat_interleave(128, -1)
        values *= powers[..., : shape[-2], : shape[-1]]
    return Operand(values, spec, axis, r.choice(layouts_of(spec)))


def quantized(operand: Operand, device: torch.device, **of_groups: Any) -> bs.QuantizedTensor:
    values, spec, axis, layout = operand
    x = (values if axis == -1 else values.mT).contiguous().to(device, torch.float32)
    amax = LARGEST["e2m1"] * LARGEST["e4m3fn"] if spec.outer else None  # outer: a power of two
    made = bs.quantize(x, spec, axis, layout=layout, amax=amax, **of_groups)
    if "offsets" not in of_groups:  # what is in no group dequantizes to 0
        assert torch.equal(made.dequantize(torch.float32), x), (spec, axis, layout)
    return made


def check(got: torch.Tensor, sums: torch.Tensor, bias: torch.Tensor | None, what: object) -> None:
    want = (sums if bias is None else sums + bias.double().cpu()).float().to(got.dtype)
    got = got.cpu()
    assert got.shape == want.shape, what
    assert torch.equal(got, want), (what, (got != want).nonzero()[:4].tolist())


def draw_extents(r: randomness.Random, spare: int, groups: int = 0) -> tuple[int, int, int]:
    while True:
        m, n, k = (r.choice(EXTENTS) for _ in range(3))
        k = r.choice(LONG) if r.random() < 0.1 else k
        if max(m, 1) * max(n, 1) * max(k, 1) <= spare and groups * n * max(m, k) <= spare:
            return m, n, k


def draw_bias(
    r: randomness.Random, device: torch.device, unit: float, *shape: int
) -> torch.Tensor | None:
    if r.random() < 0.6:
        return None
    g = torch.Generator().manual_seed(r.getrandbits(60))
    bias = torch.randint(-8, 9, shape, generator=g) * unit
    return bias.to(device, r.choice((torch.float32, torch.bfloat16)))


def check_product(r: randomness.Random, device: torch.device, spare: int) -> None:
    (m, n, k), specs, axes = draw_extents(r, spare), r.choice(SPECS), (-1, -2)
    a = draw(r, bs.spec(r.choice(specs)), r.choice(axes), (m, k))
    b = draw(r, bs.spec(r.choice(specs)), r.choice(axes), (n, k))
    bias = draw_bias(r, device, LARGEST[a.spec.element] * LARGEST[b.spec.element], n)
    got = bs.matmul(quantized(a, device), quantized(b, device), bias, r.choice(DTYPES))
    check(got, a.values.double() @ b.values.double().mT, bias, (a[1:], b[1:], (m, n, k), bias))


def check_groups(r: randomness.Random, device: torch.device, spare: int) -> None:
    of_rows, count, specs = r.random() < 0.5, r.choice((1, 3, 9, 33)), r.choice(SPECS)
    m, n, k = draw_extents(r, spare, count)
    ends = sorted(r.randint(0, m if of_rows else k) for _ in range(count))
    if r.random() < 0.5:
        ends[-1] = m if of_rows else k
    a = draw(r, bs.spec(r.choice(specs)), -1 if of_rows else -2, (m, k), grouped=True)
    b_spec, b_axis = bs.spec(r.choice(specs)), r.choice((-1, -2)) if of_rows else -2
    b = draw(r, b_spec, b_axis, (count, n, k) if of_rows else (n, k), grouped=not of_rows)
    bias = draw_bias(r, device, LARGEST[a.spec.element] * LARGEST[b.spec.element], count, n)
    what = (a[1:], b[1:], (m, n, k), ends, bias)

    offsets = torch.tensor(ends, dtype=r.choice((torch.int32, torch.int64)), device=device)
    qa = quantized(a, device, offsets=offsets)
    qb = quantized(b, device, **({"batch_dims": 1} if of_rows else {"offsets": offsets}))
    try:
        got = bs.grouped_matmul(qa, qb, offsets, bias, r.choice(DTYPES))
    except ValueError as refusal:
        if device.type == "cuda" and "on a GPU" in str(refusal):
            return  # only the CPU multiplies these, such as groups of rows in square blocks
        raise
    assert torch.equal(raw(bs.grouped_matmul(qa, qb, offsets, bias, got.dtype)), raw(got)), what
    for i, (begin, end) in enumerate(itertools.pairwise((0, *ends))):
        those, added = slice(begin, end), None if bias is None else bias[i]
        if of_rows:
            sums = a.values[those].double() @ b.values[i].double().mT
        else:
            sums = a.values[:, those].double() @ b.values[:, those].double().mT
        check(got[those] if of_rows else got[i], sums, added, (i, what))
    if of_rows:
        assert not got[ends[-1] :].any(), what


@pytest.mark.parametrize("check_one", [check_product, check_groups])
def test_every_bit(
    check_one: Callable[[randomness.Random, torch.device, int], None],
    device: torch.device,
    random: torch.Generator,
) -> None:
    r = randomness.Random(int(torch.randint(1 << 60, (), generator=random)))
    for _ in range(300):
        check_one(r, device, (32 if device.type == "cuda" else 1) * SPARE)
