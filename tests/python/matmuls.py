"""Products of operands against sums in double precision."""

from __future__ import annotations

import blockscale as bs
import torch

OPS = torch.ops.blockscale


def normal(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=random)


def factors(q: bs.QuantizedTensor) -> tuple[torch.Tensor, float]:
    """scale · code in double, [lines, extent], and the outer scale: what matmul sums over."""
    q = q.to("cpu")
    rows, length = q.shape if q.axis == -1 else q.shape[::-1]
    extent = -(-length // q.spec.extent_multiple) * q.spec.extent_multiple
    plain = str(bs.spec(q.spec, outer=False, hadamard=None))
    value = OPS.dequantize(
        q.codes, q.scales, torch.empty(0), plain, -1, [rows, extent], q.layout, torch.float32
    )
    return value.double(), 1.0 if q.outer is None else float(q.outer)


def largest_sums(va: torch.Tensor, vb: torch.Tensor) -> torch.Tensor:
    """The largest product or partial sum of each block of 128, added over the blocks."""
    total = va.new_zeros(va.shape[0], vb.shape[0])
    for k in range(0, va.shape[1], 128):
        products = va[:, None, k : k + 128] * vb[None, :, k : k + 128]
        total += torch.maximum(products.abs(), products.cumsum(-1).abs()).amax(-1)
    return total


MXFP4 = ("mxfp4", "mxfp4")  # operands that FP8 tensor cores multiply


def check_product(
    got: torch.Tensor,
    a: bs.QuantizedTensor,
    b: bs.QuantizedTensor,
    bias: torch.Tensor | None = None,
    what: object = "",
    more: torch.Tensor | float = 0.0,
) -> None:
    """Within the bound of K additions in FP32, in any order.

    u = 2^-24. The tensor cores of a GPU cut a sum off where others round it: 2u an addition. Then
    the outer scales' product, its product with the sum and the bias are rounded, and the result,
    perhaps to BF16. On FP8 codes they add 32 products and the sum so far at once, each cut to 13
    bits below the largest: at most 33 errors of 2^-13 of the sum of magnitudes, in 4 steps a block
    of 128; the blocks are scaled and added in FP32.
    """
    (va, oa), (vb, ob) = factors(a), factors(b)
    outer, u, k = oa * ob, 2.0**-24, va.shape[1]
    sums, magnitude = outer * (va @ vb.t()), abs(outer) * (va.abs() @ vb.abs().t())
    exact = sums if bias is None else sums + bias.detach().double().cpu()
    bound = 2 * (k + 4) * u * magnitude + 3 * u * (sums.abs() + exact.abs()) + 2.0**-126
    if got.is_cuda and (a.spec.scale == "fp32" or (a.spec.family, b.spec.family) == MXFP4):
        bound += 4 * 33 * 2.0**-13 * largest_sums(va.to(got.device), vb.to(got.device)).cpu()
    bound += more
    if got.dtype == torch.bfloat16:
        bound += 2.0**-8 * (exact.abs() + bound)
    if got.dtype == torch.float16:
        bound += 2.0**-11 * (exact.abs() + bound) + 2.0**-25
    error = (got.detach().double().cpu() - exact).abs()
    assert got.shape == exact.shape, what
    assert bool((error <= bound).all()), (what, float((error - bound).max()))
