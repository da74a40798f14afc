"""Codes and scales against other people's implementations of the same formats and arithmetic.

ml_dtypes casts, torchao's MX quantizer, TransformerEngine's NVFP4 arithmetic (which torchao's
training kernels are tested against), and a float64 transcription of the FP8 rules. Where a peer is
known to differ (specification, section 11), exactly those cases are left out, and counted.
"""

from __future__ import annotations

from typing import Any

import blockscale as bs
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# element: (ml_dtypes name, largest value)
ELEMENTS = {
    "e2m1": ("float4_e2m1fn", 6.0),
    "e2m3": ("float6_e2m3fn", 7.5),
    "e3m2": ("float6_e3m2fn", 28.0),
    "e4m3fn": ("float8_e4m3fn", 448.0),
    "e4m3fnuz": ("float8_e4m3fnuz", 240.0),
    "e5m2": ("float8_e5m2", 57344.0),
    "e5m2fnuz": ("float8_e5m2fnuz", 57344.0),
}
FAMILY = {"e2m1": "mxfp4", "e2m3": "mxfp6", "e3m2": "mxfp6"}  # the others are mxfp8's


def mx_spec(element: str, **changes: Any) -> bs.Spec:
    return bs.spec(FAMILY.get(element, "mxfp8"), element=element, **changes)


def unpacked(codes: torch.Tensor) -> NDArray[np.uint8]:
    """One code an element; two to a byte only for e2m1 (uint8, half as many)."""
    return codes.view(torch.uint8).numpy()


def nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def code_array(q: bs.QuantizedTensor) -> NDArray[np.uint8]:
    codes = unpacked(q.codes)
    return nibbles(codes) if q.spec.element == "e2m1" else codes


def same_codes(q: bs.QuantizedTensor, want: NDArray[Any]) -> None:
    np.testing.assert_array_equal(code_array(q), want)


@pytest.fixture
def ml_dtypes() -> Any:
    return pytest.importorskip("ml_dtypes")


@pytest.fixture
def to_mx() -> Any:
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats import mx_tensor

    return mx_tensor.to_mx


# ---- ml_dtypes: elements and scales ----


def boundaries(values: Floats) -> Floats:
    """Every value, every midpoint, and one ulp either side of each."""
    grid = np.unique(np.abs(values[np.isfinite(values)]))
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
    around = [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(1e9))]
    return np.concatenate(around).astype(np.float32)


@pytest.mark.parametrize("element", ELEMENTS)
def test_element_codes_are_ml_dtypes_casts_at_every_boundary(element: str, ml_dtypes: Any) -> None:
    dtype_name, largest = ELEMENTS[element]
    dtype = getattr(ml_dtypes, dtype_name)
    bits = 4 if element == "e2m1" else 6 if element in FAMILY else 8
    every = np.arange(2**bits, dtype=np.uint8).view(dtype).astype(np.float32)
    random = np.random.default_rng(1).normal(size=20000) * largest / 3
    x = np.concatenate([boundaries(every), random, [0.0, 1e-30, 1e-45]]).astype(np.float32)
    x = np.concatenate([x, -x])
    x = x[np.abs(x) <= largest]
    x = np.pad(x, (0, -len(x) % 31)).reshape(-1, 31)
    # The largest value leads every block: under the rule `floor` its scale is then one.
    x = np.concatenate([np.full((len(x), 1), largest, np.float32), x], axis=1)
    q = bs.quantize(torch.from_numpy(x), mx_spec(element, scale_rule="floor"))
    assert (unpacked(q.scales) == 127).all()
    same_codes(q, x.astype(dtype).view(np.uint8))


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_code_decodes_as_ml_dtypes_has_it(element: str, ml_dtypes: Any) -> None:
    bits = 4 if element == "e2m1" else 6 if element in FAMILY else 8
    codes = np.resize(np.arange(2**bits, dtype=np.uint8), (1, 256))
    want = codes.view(getattr(ml_dtypes, ELEMENTS[element][0])).astype(np.float32)
    stored = codes[:, ::2] | codes[:, 1::2] << 4 if element == "e2m1" else codes
    empty = bs.quantize(torch.zeros(1, 256), mx_spec(element))
    q = bs.QuantizedTensor(
        torch.from_numpy(stored.copy()).view(empty.codes.dtype),
        torch.full((1, 8), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        None,
        empty.spec,
        -1,
        (1, 256),
        "linear",
        0,
    )
    got = bs.dequantize(q, torch.float32).numpy()
    np.testing.assert_array_equal(got, want)  # NaN equals NaN here
    finite = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(want[finite]))


def test_every_e8m0_scale_decodes_as_ml_dtypes_has_it(ml_dtypes: Any) -> None:
    scales = np.arange(256, dtype=np.uint8)
    want = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    ones = bs.quantize(torch.ones(1, 32 * 256), bs.spec("mxfp8", scale_rule="floor"))
    one_code = torch.full((1, 32 * 256), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    q = bs.QuantizedTensor(
        one_code,
        torch.from_numpy(scales.reshape(1, -1)).view(torch.float8_e8m0fnu),
        None,
        ones.spec,
        -1,
        (1, 32 * 256),
        "linear",
        0,
    )
    got = bs.dequantize(q, torch.float32).numpy().reshape(256, 32)[:, 0]
    np.testing.assert_array_equal(got, want)


def test_e4m3_block_scales_round_to_nearest_as_ml_dtypes_does(ml_dtypes: Any) -> None:
    every = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    amax = boundaries(every) * np.float32(6)
    around = np.concatenate([amax, np.nextafter(amax, np.float32(0)), np.nextafter(amax, 1e9)])
    amax = around.astype(np.float32)
    x = np.zeros((len(amax), 16), np.float32)
    x[:, 5] = -amax
    q = bs.quantize(torch.from_numpy(x), bs.spec("nvfp4", outer=False))
    wanted = np.minimum(amax * (np.float32(1) * np.float32(1 / 6)), np.float32(448))
    want = wanted.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(unpacked(q.scales)[:, 0], want)


# ---- torchao: MX ----


def mx_blocks(largest: float, rows: int = 4096) -> Floats:
    """Blocks of every magnitude, many with an amax at or around `largest` times a power of two."""
    rng = np.random.default_rng(2)
    exponent = rng.integers(-140, 120, size=rows)
    lead = np.where(rng.random(rows) < 0.5, 1 + rng.random(rows), 1.0)
    lead = np.where(rng.random(rows) < 0.3, largest, lead)
    amax = np.ldexp(lead, exponent).clip(0, 3e38).astype(np.float32)
    amax = (amax.view(np.int32) + rng.integers(-2, 3, size=rows)).astype(np.int32).view(np.float32)
    amax[amax < 0] = 0  # one or two below zero
    amax[:8] = [0, 1.4e-45, 1.1754944e-38, 3.4028235e38, 1.75 * 2.0**127, 1.0, largest, 1e-38]
    x = rng.uniform(-1, 1, size=(rows, 32)).astype(np.float32) * amax[:, None]
    x[np.arange(rows), rng.integers(0, 32, size=rows)] = amax * rng.choice([-1, 1], size=rows)
    return x.astype(np.float32)


def torchao_misses_log2(x: Floats, largest: float, byte: NDArray[Any]) -> NDArray[np.bool_]:
    """Where torchao's byte is not ceil(log2(amax / largest)) of its own quotient.

    Its FP32 log2 is inexact a few ulps above a power of two, and nowhere else.
    """
    quotient = np.abs(x).max(axis=1) / np.float32(largest)
    fraction, exponent = np.frexp(quotient)
    exact = np.where(fraction == 0.5, exponent - 1, exponent) + 127
    exact = np.where(quotient == 0, 0, np.clip(exact, 0, 254))
    missed = np.asarray(exact != byte)
    assert (fraction[missed] < 0.5 * (1 + 2.0**-16)).all()
    return missed


@pytest.mark.parametrize("mode", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("element", ["e4m3fn", "e5m2", "e2m3", "e3m2", "e2m1"])
def test_mx_codes_and_scales_are_torchaos(element: str, mode: str, to_mx: Any) -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    dtypes = {
        "e4m3fn": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "e2m3": "fp6_e2m3",
        "e3m2": "fp6_e3m2",
        "e2m1": torch.float4_e2m1fn_x2,
    }
    largest = ELEMENTS[element][1]
    x = mx_blocks(largest)
    scales, codes = to_mx(torch.from_numpy(x), dtypes[element], 32, ScaleCalculationMode(mode))
    want_scales = unpacked(scales).reshape(-1)
    want_codes = nibbles(unpacked(codes)) if element == "e2m1" else unpacked(codes)
    q = bs.quantize(torch.from_numpy(x), mx_spec(element, scale_rule=mode))
    got_scales = unpacked(q.scales).reshape(-1)

    excluded = np.zeros(len(x), bool)
    if mode == "rceil":
        excluded = torchao_misses_log2(x, largest, want_scales)
        assert excluded.mean() < 0.15
    np.testing.assert_array_equal(got_scales[~excluded], want_scales[~excluded])
    # At byte 0 torchao multiplies by 2^126 (by 1 under rceil) where the scale is 2^-127.
    compared = ~excluded & (want_scales != 0)
    assert compared.mean() > 0.8
    np.testing.assert_array_equal(code_array(q)[compared], want_codes[compared])


@pytest.mark.parametrize("mode", ["floor", "ceil", "even", "rceil"])
def test_mx_of_bfloat16_along_columns_is_torchaos_of_the_transpose(mode: str, to_mx: Any) -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    x = torch.randn(96, 40, generator=torch.Generator().manual_seed(3)).bfloat16()
    scales, codes = to_mx(x.t().contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode(mode))
    q = bs.quantize(x, bs.spec("mxfp8", scale_rule=mode), axis=-2)
    assert torch.equal(q.scales.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(q.codes.view(torch.uint8), codes.view(torch.uint8))


def test_nv_128x4_scales_lie_where_torchaos_to_blocked_puts_them() -> None:
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.utils import to_blocked

    x = torch.randn(300, 32 * 7, generator=torch.Generator().manual_seed(4))
    linear = bs.quantize(x, "mxfp8")
    blocked = bs.quantize(x, "mxfp8", layout="nv_128x4")
    want = to_blocked(linear.scales.view(torch.uint8)).flatten()
    assert torch.equal(blocked.scales.view(torch.uint8).flatten(), want)


# ---- NVFP4: TransformerEngine's arithmetic ----


def nvfp4_reference(
    x: torch.Tensor, amax: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """S_enc, S_dec, codes and scales of `rows` x 16 blocks, in torch's FP32 and casts."""
    from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked, pack_uint4

    biggest = torch.finfo(torch.float32).max
    encode = torch.minimum(torch.tensor(2688.0) / amax, torch.tensor(biggest))
    if amax == 0 or encode == 0:
        encode = torch.tensor(1.0)
    r, c = x.shape
    block_amax = x.abs().reshape(r // rows, rows, c // 16, 16).amax(dim=(1, 3))
    scale = (block_amax * (encode * (1.0 / 6.0))).clamp(max=448).to(torch.float8_e4m3fn)
    inverse = (1.0 / (scale.float() * (1.0 / encode))).clamp(max=biggest)
    y = x * inverse.repeat_interleave(rows, 0).repeat_interleave(16, 1)
    return pack_uint4(f32_to_f4_unpacked(y.clamp(-6, 6))), scale, 1.0 / encode


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize("power", [-120, -20, 0, 100])
def test_nvfp4_is_transformer_engines_arithmetic(block: tuple[int, int], power: int) -> None:
    pytest.importorskip("torchao")
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(256, 512, generator=generator)
    # Blocks of very different magnitude, so that scales underflow too, and all-zero ones.
    x *= torch.exp2(torch.randint(-24, 1, (256, 1), generator=generator).float())
    x[:, 64:80] *= 1e-3
    x[32:48] = 0
    x *= 2.0**power
    codes, scales, outer = nvfp4_reference(x, x.abs().max(), block[0])
    q = bs.quantize(x, bs.spec("nvfp4", block=block))
    assert q.outer is not None
    assert torch.equal(q.outer.reshape(()), outer)
    assert torch.equal(q.scales.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(q.codes, codes)


def test_a_supplied_amax_scales_nvfp4_as_in_transformer_engine() -> None:
    pytest.importorskip("torchao")
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(6))
    for amax in (0.0, 1e-40, 1e-3, 1.0, 7.7, 3e38):
        codes, scales, _ = nvfp4_reference(x, torch.tensor(amax), 1)
        q = bs.quantize(x, "nvfp4", amax=amax)
        assert torch.equal(q.scales.view(torch.uint8), scales.view(torch.uint8)), amax
        assert torch.equal(q.codes, codes), amax


def test_the_hadamard_transform_is_torchaos_matrix() -> None:
    pytest.importorskip("torchao")
    from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_rht_matrix

    # Bit i of the mask flips element i; small integers make every sum exact.
    signs = tuple(-1 if 0xD7E8 >> i & 1 else 1 for i in range(16))
    matrix = get_rht_matrix(signs, "cpu", torch.float32, 16)
    x = torch.randint(-8, 9, (64, 160), generator=torch.Generator().manual_seed(7)).float()
    rotated = (x.reshape(-1, 16) @ matrix).reshape(64, 160).bfloat16().float()
    q = bs.quantize(x, bs.spec("nvfp4", hadamard=16))
    want = bs.quantize(rotated, "nvfp4")
    assert torch.equal(q.codes, want.codes)
    assert torch.equal(q.scales.view(torch.uint8), want.scales.view(torch.uint8))
    assert torch.equal(bs.amax(x, bs.spec("nvfp4", hadamard=16)), rotated.abs().max())


# ---- float64: FP8 blockwise ----


def fp8_blockwise_float64(
    x: Floats, element: str, rows: int, ml_dtypes: Any
) -> tuple[NDArray[np.uint8], Floats]:
    """Section 4's rule `amax`; a float64 quotient rounded to FP32 is the correctly rounded one."""
    dtype_name, largest = ELEMENTS[element]
    blocks = np.abs(x).reshape(x.shape[0] // rows, rows, x.shape[1] // 128, 128).max(axis=(1, 3))
    floored = np.maximum(blocks, np.float32(1e-12)).astype(np.float64)
    inverse = (largest / floored).astype(np.float32)
    spread = inverse.repeat(rows, axis=0).repeat(128, axis=1).astype(np.float64)
    scaled = (x.astype(np.float64) * spread).astype(np.float32)
    codes = np.clip(scaled, -largest, largest).astype(getattr(ml_dtypes, dtype_name))
    return codes.view(np.uint8), (1 / inverse.astype(np.float64)).astype(np.float32)


@pytest.mark.parametrize("element", ["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"])
@pytest.mark.parametrize("name", ["fp8_1x128", "fp8_128x128"])
def test_fp8_blockwise_is_its_float64_transcription(
    name: str, element: str, ml_dtypes: Any
) -> None:
    rng = np.random.default_rng(8)
    x = rng.normal(size=(256, 512)) * np.exp2(rng.integers(-60, 60, size=(256, 4))).repeat(128, 1)
    x[:3] = 0
    x[3, :128] = 1e-14
    values = x.astype(np.float32)
    rows = 128 if name == "fp8_128x128" else 1
    codes, scales = fp8_blockwise_float64(values, element, rows, ml_dtypes)
    q = bs.quantize(torch.from_numpy(values), bs.spec(name, element=element))
    np.testing.assert_array_equal(q.scales.numpy().view(np.uint32), scales.view(np.uint32))
    same_codes(q, codes)


# ---- ue5m3, which no library has: its values from the definition ----


def test_amdfp4_scales_are_the_nearest_ue5m3_value() -> None:
    code = np.arange(255)
    exponent, mantissa = code >> 3, code & 7
    normal = (1 + mantissa / 8) * np.exp2(exponent - 15.0)
    values = np.where(exponent == 0, mantissa * 2.0**-17, normal)
    points = boundaries(values.astype(np.float32))
    amax = (points[points > 0] * np.float32(6)).astype(np.float32)
    x = np.zeros((len(amax), 16), np.float32)
    x[:, 0] = amax
    q = bs.quantize(torch.from_numpy(x), bs.spec("amdfp4", outer=False))
    wanted = np.minimum(amax * np.float32(1 / 6), np.float32(114688)).astype(np.float64)
    distance = np.abs(wanted[:, None] - values[None])
    nearest = distance.min(axis=1)
    # Ties go to the even code.
    ranked = np.where(distance == nearest[:, None], code % 2, 2)
    np.testing.assert_array_equal(unpacked(q.scales)[:, 0], ranked.argmin(axis=1))


# ---- stochastic rounding ----


STOCHASTIC = [
    bs.spec("nvfp4", rounding="stochastic"),
    bs.spec("amdfp4", rounding="stochastic"),
    bs.spec("mxfp4", rounding="stochastic", scale_rule="rceil"),
    bs.spec("mxfp8", rounding="stochastic"),
]


def decode_scales(q: bs.QuantizedTensor) -> torch.Tensor:
    """What each element's code is multiplied with, outer scale included."""
    scales = q.scales.float() if q.scales.dtype != torch.uint8 else ue5m3_values()[q.scales.long()]
    outer = 1.0 if q.outer is None else float(q.outer)
    return (scales * outer).repeat_interleave(q.spec.block[1], 1)


@pytest.mark.parametrize("spec", STOCHASTIC, ids=str)
def test_stochastic_rounding_has_no_bias(spec: bs.Spec, ml_dtypes: Any) -> None:
    """The mean of 400 draws: no element farther off than chance, nor all of them together."""
    draws = 400
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(9))
    mean = torch.zeros(32, 64, dtype=torch.float64)
    for i in range(draws):
        q = bs.quantize(x, spec, rng=bs.Rng(11, i))
        mean += bs.dequantize(q, torch.float32).double() / draws
    codes = np.arange(128 if spec.element == "e4m3fn" else 8, dtype=np.uint8)
    values = codes.view(getattr(ml_dtypes, ELEMENTS[spec.element][0])).astype(np.float64)
    grid = torch.from_numpy(values[np.isfinite(values)])
    y = (x.abs() / decode_scales(q)).double().clamp(max=float(grid[-1]))
    above = torch.searchsorted(grid, y).clamp(min=1)
    width = (grid[above] - grid[above - 1]) * decode_scales(q).double()
    p = (y - grid[above - 1]) / (grid[above] - grid[above - 1])
    variance = p * (1 - p) / draws
    # Bernstein's inequality, at one in a million for all elements together, plus the resolution
    # of the probability, half of 1/256 of the distance between neighbours.
    odds = float(np.log(2e6 * x.numel()))
    limit = (2 * variance * odds).sqrt() + odds / (3 * draws) + 1 / 500
    assert ((mean - x).abs() <= limit * width).all()
    spread = (variance * width.square()).sum().sqrt()
    assert abs(float((mean - x).sum())) < 5 * float(spread)
    assert abs(float(((mean - x) * x.sign()).sum())) < 5 * float(spread)


@pytest.mark.parametrize("spec", STOCHASTIC, ids=str)
def test_stochastic_rounding_never_saturates_with_scales_rounded_up(spec: bs.Spec) -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(10)) * torch.logspace(
        -3, 3, 256
    ).reshape(-1, 1)
    q = bs.quantize(x, spec, rng=bs.Rng(1))
    capacity = decode_scales(q) * ELEMENTS[spec.element][1]
    assert (x.abs() <= capacity * (1 + 2.0**-20)).all()


def ue5m3_values() -> torch.Tensor:
    code = torch.arange(256)
    exponent, mantissa = (code >> 3).float(), (code & 7).float()
    values = torch.where(
        exponent == 0, mantissa * 2.0**-17, (1 + mantissa / 8) * torch.exp2(exponent - 15)
    )
    values[255] = torch.nan
    return values


def test_values_on_the_grid_never_move() -> None:
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.cat([grid, -grid]).repeat(64, 1)
    spec = bs.spec("nvfp4", rounding="stochastic", outer=False)
    for offset in range(50):
        q = bs.quantize(x, spec, rng=bs.Rng(12, offset))
        assert torch.equal(bs.dequantize(q, torch.float32), x)
