"""`QuantizedTensor` as a value: copied, pickled, saved and loaded as data, checked on return."""

from __future__ import annotations

import copy
import io
import pickle

import blockscale as bs
import pytest
import torch
import torch.utils._pytree as pytree
from bits import assert_same_bits, normal

# Every dtype of codes and scales, with and without an outer scale, a tiled layout, groups.
KINDS = (
    "fp8_1x128",
    "fp8_128x128[element=e4m3fnuz]",
    "mxfp8[element=e5m2]",
    "mxfp8[element=e5m2fnuz]",
    "mxfp6",
    "nvfp4[block=16x16]",
    "amdfp4[outer=false]",
)


def operands() -> list[bs.QuantizedTensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 20, 70)
    made = [bs.quantize(x, kind, axis=-2, batch_dims=1) for kind in KINDS]
    offsets = torch.tensor([3, 3, 60])
    made.append(bs.quantize(x, "nvfp4", layout="mfma_16x16+aiter_scale", offsets=offsets))
    return [*made, bs.quantize(x[:0], "mxfp4")]


def assert_same(a: bs.QuantizedTensor, b: bs.QuantizedTensor) -> None:
    assert type(b) is bs.QuantizedTensor
    for name in ("spec", "axis", "shape", "layout", "batch_dims"):
        assert getattr(a, name) == getattr(b, name)
    for name in ("codes", "scales", "outer", "offsets"):
        one, other = getattr(a, name), getattr(b, name)
        if one is None:
            assert other is None
        else:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
    assert torch.equal(a.dequantize(torch.float32), b.dequantize(torch.float32))


def test_comes_back_from_a_file_as_it_was() -> None:
    for q in operands():
        assert_same(q, pickle.loads(pickle.dumps(q)))
        for weights_only in (True, False):
            buffer = io.BytesIO()
            torch.save({"w": q}, buffer)
            buffer.seek(0)
            assert_same(q, torch.load(buffer, weights_only=weights_only)["w"])


def test_copies() -> None:
    q = bs.quantize(torch.randn(4, 70), "nvfp4")
    shallow, deep = copy.copy(q), copy.deepcopy(q)
    assert_same(q, shallow)
    assert_same(q, deep)
    q.codes.zero_()
    assert not shallow.codes.any()
    assert deep.codes.any()


def test_it_prints_whatever_tree_map_has_put_in_it() -> None:
    offsets = torch.tensor([3, 60])
    for q, groups in (
        (bs.quantize(torch.ones(4, 70), "mxfp8"), ""),
        (bs.quantize(torch.ones(60, 70), "mxfp8", offsets=offsets), "groups=2, "),
    ):
        rows = q.shape[0]
        codes = f"codes=torch.float8_e4m3fn[{rows}, 96], scales=torch.float8_e8m0fnu[{rows}, 3]"
        assert f"{groups}{codes}, device='cpu')" in repr(q)
        for value in (None, (1, 2), "text"):
            said = repr(pytree.tree_map(lambda _, value=value: value, q))
            assert said.startswith("QuantizedTensor(shape=")
            assert f"codes={value!r}, scales={value!r}" in said


def test_to_what_is_no_device() -> None:
    q = bs.quantize(torch.ones(4, 32), "mxfp8")
    for wrong in (torch.float32, "foo"):
        with pytest.raises(TypeError, match=r"QuantizedTensor.to: device = .*; need a device"):
            q.to(wrong)  # type: ignore[arg-type]


def test_on_another_device() -> None:
    for q in operands():
        assert q.to("cpu") is q
        there = q.to("meta")
        assert there.device.type == "meta"
        assert there.to("meta") is there
        parts = [getattr(there, name) for name in ("codes", "scales", "outer", "offsets")]
        assert all(part is None or part.is_meta for part in parts)


def test_a_file_that_lies_is_refused() -> None:
    q = bs.quantize(torch.randn(4, 70), "nvfp4")
    object.__setattr__(q, "shape", (4, 71 + 16))
    with pytest.raises(
        ValueError, match=r"^QuantizedTensor: codes.shape = \[4, 40\]; need \[4, 48"
    ):
        pickle.loads(pickle.dumps(q))


@pytest.mark.parametrize("axis", [-1, -2])
def test_what_dequantize_leaves_out_of_a_transform(axis: int) -> None:
    """70 values are transformed as 80: a GEMM multiplies all of them, dequantize gives back 70."""
    torch.manual_seed(0)
    x = torch.randn(5, 70)
    padded = torch.nn.functional.pad(x, (0, 10))
    if axis == -2:
        x, padded = x.mT, padded.mT
    spec = bs.spec("nvfp4", hadamard=16)
    q, whole = (bs.quantize(t, spec, axis) for t in (x, padded))
    assert_same_bits(q.codes, whole.codes)
    assert_same_bits(q.scales, whole.scales)
    given, values = (t.dequantize(torch.float32).double() for t in (q, whole))
    if axis == -2:
        given, values = given.mT, values.mT
    assert torch.equal(given, values[:, :70])
    product = bs.matmul(q, q, out_dtype=torch.float32).double()
    # 80 products and sums, and two roundings of each value that dequantize gives.
    bound = (80 + 8) * 2**-24 * (values.abs() @ values.abs().mT)
    assert ((product - values @ values.mT).abs() <= bound).all()
    assert ((product - given @ given.mT).abs() > bound).any()
    # Groups along the axis: each is extended by itself.
    offsets = torch.tensor([30, 70])
    if axis == -2:
        parts = bs.quantize(x, spec, axis, offsets=offsets).dequantize(torch.float32)
        for rows in (slice(30), slice(30, 70)):
            alone = bs.quantize(x[rows], spec, axis).dequantize(torch.float32)
            assert torch.equal(parts[rows], alone)


@pytest.mark.parametrize("shape", [(33, 70), (256, 384)])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", ["nvfp4", "nvfp4[block=16x16]", "mxfp6", "mxfp6[element=e3m2]"])
def test_readers_ignore_bits_that_no_quantizer_sets(
    spec: str, axis: int, shape: tuple[int, int], device: torch.device
) -> None:
    """The sign of an E4M3 scale; two bits of the byte of a code of six bits."""
    q = bs.quantize(normal(*shape).to(device), spec, axis)
    other = copy.deepcopy(q)
    if spec.startswith("nvfp4"):
        other.scales.view(torch.uint8).bitwise_or_(0x80)
    else:
        other.codes.bitwise_or_(0xC0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_same_bits(other.dequantize(dtype), q.dequantize(dtype), dtype)
    for dtype in (torch.float32, torch.bfloat16):
        assert_same_bits(bs.matmul(other, q, None, dtype), bs.matmul(q, q, None, dtype), dtype)
        assert_same_bits(bs.matmul(q, other, None, dtype), bs.matmul(q, q, None, dtype), dtype)
