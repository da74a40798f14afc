"""The effect of a spec on the elements of a tensor: noise, underflow, saturation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch

from blockscale._core import facts
from blockscale.ops import dequantize, quantize
from blockscale.recipe import Spec
from blockscale.rng import Rng
from blockscale.tensor import QuantizedTensor

# The relative loss of a maximum that does not count as saturation (specification, section 6).
_ROUNDING_OF_DECODE: Final = 2.0**-20
_PIECE: Final = 1 << 22  # elements compared at a time, in float64


class Noise:
    """Sums over tensors, or pieces of one, for one spec, in float64."""

    def __init__(self) -> None:
        self.signal = self.noise = self.amax = 0.0
        self.count = self.nonzero = self.underflowed = self.saturated = 0

    def add(
        self, x: torch.Tensor, spec: Spec, amax: torch.Tensor | None = None, rng: Rng | None = None
    ) -> torch.Tensor:
        """Adds a matrix [R, C], quantized along its rows; returns the values of its codes, float32
        [R, C] (with C rounded up to whole transforms if the spec has a Hadamard transform).

        Args:
            x: float32, bfloat16 or float16.
            spec: how to quantize it.
            amax: what the outer scale is made from, if x is a piece; None for x's own amax.
            rng: for a spec that rounds stochastically.
        """
        if spec.hadamard:  # padded as the transform pads it
            x = torch.nn.functional.pad(x, (0, -x.shape[1] % spec.hadamard))
        rng = rng if spec.stochastic else None
        q = quantize(x, spec, amax=amax, rng=rng)
        y = dequantize(q, dtype=torch.float32)
        largest, signs = _is_largest(q, x.shape[1]), _signs(spec, rng, x.device)
        for rows in pieces(*x.shape):
            before, after = x[rows].float(), y[rows]
            encoded = before
            if signs is not None:
                before = _transformed(before, signs)
                encoded = before.bfloat16().float()  # amax and codes are computed from it
            self.add_error(before, after)
            self.count += before.numel()
            self.nonzero += int((encoded != 0).sum())
            self.underflowed += int(((encoded != 0) & (after == 0)).sum())
            cut = encoded.abs() > after.abs() * (1.0 + _ROUNDING_OF_DECODE)
            cut &= after != 0  # underflowed instead: a scale of 0 leaves codes as they were
            self.saturated += int((cut & largest[rows]).sum())
        return y

    def add_error(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds the error of y relative to x, both matrices."""
        for rows in pieces(*x.shape):
            exact = x[rows].double()
            self.signal += float(exact.square().sum())
            self.noise += float((exact - y[rows]).square().sum())
            amax = float(exact.abs().amax())
            self.amax = amax if math.isnan(amax) else max(self.amax, amax)

    @property
    def sqnr(self) -> float:
        """Signal-to-quantization-noise ratio in dB; infinite without noise."""
        if self.noise == 0.0:  # exact; includes tensors of zeros
            return math.inf
        if self.signal == 0.0:  # zeros that became nonzero
            return math.nan if math.isnan(self.noise) else -math.inf
        if math.isinf(self.noise) and not math.isinf(self.signal):
            return -math.inf  # a value that overflows when decoded
        return 10.0 * math.log10(self.signal / self.noise)

    @property
    def underflow(self) -> float:
        """The share of nonzero elements that become 0; NaN unless the amax is finite."""
        return self._share(self.underflowed, self.nonzero)

    @property
    def saturation(self) -> float:
        """The share of all elements that are clipped to the largest code; NaN unless the amax is
        finite."""
        return self._share(self.saturated, self.count)

    def _share(self, of: int, among: int) -> float:
        # A block with a NaN or Inf becomes NaN: its elements are neither kept, nor 0, nor clipped.
        return of / max(1, among) if math.isfinite(self.amax) else math.nan


def percent(share: float, digits: int) -> str:
    """A share as it is printed."""
    return "nan" if math.isnan(share) else f"{share:.{digits}%}"


def pieces(rows: int, columns: int) -> Iterator[slice]:
    """Slices of a matrix's rows, each with a bounded number of elements."""
    step = max(1, _PIECE // max(1, columns))
    for start in range(0, rows if columns else 0, step):
        yield slice(start, start + step)


def _signs(spec: Spec, rng: Rng | None, device: torch.device) -> torch.Tensor | None:
    """The signs of the spec's Hadamard transform, [d]: the core transforms the unit vectors, and
    the first element of each result has that vector's sign."""
    d = spec.hadamard
    if not d:
        return None
    units = quantize(torch.eye(d, dtype=torch.float32, device=device), spec, rng=rng)
    return dequantize(units, dtype=torch.float32)[:, 0].sign()


def _transformed(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """The Hadamard transform of rows in blocks of d, before rounding (specification, section 8):
    butterflies in float32, in that order, so that values that cancel give exactly 0."""
    d = len(signs)
    y = x.reshape(-1, d) * signs
    step = 1
    while step < d:
        a, b = y.reshape(-1, d // (2 * step), 2, step).unbind(2)
        y = torch.stack((a + b, a - b), 2)
        step *= 2
    # On the CPU, whatever the default device is: a scalar there goes with a tensor anywhere.
    factor = torch.tensor(1 / math.sqrt(d), dtype=torch.float32, device="cpu")
    return (y * factor + 0.0).reshape(x.shape)


def _is_largest(q: QuantizedTensor, columns: int) -> torch.Tensor:
    """Mask [R, C] of the codes with their format's largest magnitude."""
    element = next(e for e in facts()["elements"] if e["name"] == q.spec.element)
    codes = q.codes
    if codes.dtype != torch.uint8:  # one of torch's FP8 dtypes
        return codes[:, :columns].float().abs().eq(element["max"])
    if q.spec.codes_per_byte == 2:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    # FP6 and FP4 have no NaN or Inf: in the largest magnitude all bits below the sign are 1.
    ones: int = (1 << (element["bits"] - 1)) - 1
    return (codes[:, :columns] & ones).eq(ones)
