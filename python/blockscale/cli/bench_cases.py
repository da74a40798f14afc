"""The cases of `blockscale bench`: what is measured, on which shapes, the goal of each, and the
check of its answer before it is timed. bench_run.py measures them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import blockscale as bs

Row = dict[str, Any]
Shape = tuple[int, ...]  # [R, C], or [E, R, C] with batch_dims=1
Peer = Callable[[Tensor], Sequence[Tensor]]

STOCHASTIC = "[scale_rounding=up,rounding=stochastic]"
BOTH = "[scale_rounding=up,rounding=stochastic,hadamard=16]"

# For a GPU: 64 MiB and more, except the odd ones. With INPUTS in rotation, the cache holds none.
GPU_SHAPES: tuple[Shape, ...] = (
    (16384, 8192),
    (32768, 4096),
    (131072, 4096),
    (16384, 7168),
    (10007, 2880),
    (4099, 5003),
    (8, 2048, 7168),
    (32, 5760, 2880),
)
# Outputs stay below 32 MiB, which malloc reuses: fresh pages would cost more than the work.
CPU_SHAPES: tuple[Shape, ...] = ((4096, 4096), (4099, 5003), (8, 512, 2880))
INPUTS = 3

# Share of the copy speed that each kind of work should reach on a GPU.
ROWS_AND_COLUMNS = {
    "fp8_1x128": 0.94,
    "fp8_128x128": 0.94,
    "mxfp8": 0.94,
    "mxfp4": 0.92,
    "nvfp4": 0.92,
    "nvfp4[block=16x16]": 0.92,
    "amdfp4": 0.92,
    f"nvfp4{STOCHASTIC}": 0.82,
    "nvfp4[hadamard=16]": 0.82,
    f"nvfp4{BOTH}": 0.70,
}
DUAL = {
    ("fp8_1x128", "fp8_1x128"): 0.90,
    ("fp8_128x128", "fp8_128x128"): 0.90,
    ("mxfp8", "mxfp8"): 0.90,
    ("mxfp4", "mxfp4"): 0.75,
    ("nvfp4", "nvfp4"): 0.75,
    (f"nvfp4{STOCHASTIC}", f"nvfp4{BOTH}"): 0.55,
}
# Pairs quantized from FP32, as a layer's x and W are with FP32 weights and in autocast.
WIDE_DUAL = {
    ("fp8_1x128", "fp8_1x128"): 0.90,
    ("fp8_128x128", "fp8_128x128"): 0.90,
    ("mxfp8", "mxfp8"): 0.90,
    ("nvfp4", "nvfp4[hadamard=16]"): 0.75,
    ("nvfp4[block=16x16]", "nvfp4[block=16x16]"): 0.75,
}
AMAX = {("nvfp4", -1): 0.95, ("nvfp4[hadamard=16]", -2): 0.90}
DEQUANTIZE, DEQUANTIZE_GOAL = ("fp8_1x128", "nvfp4"), 0.92
RELAYOUT_GOAL = 0.85
# Layouts written by the quantizer, as shares of its own speed in `linear`.
LAYOUTS = {
    "fp8_1x128": ("mn_major",),
    "mxfp8": ("nv_128x4", "aiter_scale"),
    "nvfp4": ("nv_128x4", "aiter_scale", "mfma_16x16"),
}
LAYOUT_GOAL = 0.97
# Rows of experts, in groups of uneven sizes.
GROUPED_SHAPE, GROUPS = (32768, 2880), 32
# On odd shapes and in groups, goals differ for one direction with no work beyond rounding.
ODD: tuple[Shape, ...] = ((10007, 2880), (4099, 5003))
ODD_GOALS = {0.94: 0.88, 0.92: 0.85}

# 1024 x 1024 is bound by launch time; the goal is a multiple of an empty kernel's time.
LAUNCH_SHAPE, LAUNCH_GOAL = (1024, 1024), 2.0
LAUNCH_SPECS = ("fp8_1x128", "mxfp8", "nvfp4")

# The case beside which each peer is shown: it does the same work.
BESIDE = {
    "torchao fp8 act_quant_lhs": "quantize/fp8_1x128/axis:-1",
    "torchao fp8 act_quant_transposed_lhs": "quantize/fp8_1x128/axis:-2",
    "torchao fp8 weight_quant_rhs": "quantize/fp8_128x128/axis:-1",
    "torchao compiled to_mx mxfp8": "quantize/mxfp8/axis:-1",
    "torchao compiled to_mx mxfp4": "quantize/mxfp4/axis:-1",
    "torchao to_mx mxfp8": "quantize/mxfp8/axis:-1",
    "torchao to_mx mxfp4": "quantize/mxfp4/axis:-1",
}


ENOUGH = 32  # values: enough that their errors are not all small by chance


class WrongAnswer(Exception):
    """A case's result is wrong: nothing is timed."""


@dataclass(frozen=True)
class Case:
    """One piece of work. `call` receives a counter; `check` raises WrongAnswer."""

    name: str
    goal: float | None
    call: Callable[[int], Any]
    moved: int  # bytes that must be read and written
    check: Callable[[], None]


def nbytes(*operands: bs.QuantizedTensor) -> int:
    """Bytes of codes and scales."""
    return sum(q.codes.nbytes + q.scales.nbytes for q in operands)


def same(name: str, got: Tensor, want: Tensor) -> None:
    """Compares the leading part of `got` with `want`, bit for bit."""
    got, want = (t.cpu().contiguous().reshape(-1) for t in (got[: len(want)], want))
    if not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
        raise WrongAnswer(f"{name}: bits differ from the CPU's on the same values")


def same_operand(name: str, got: bs.QuantizedTensor, want: bs.QuantizedTensor) -> None:
    """Compares codes and scales of the leading lines, or of the leading matrices."""
    same(f"{name}, codes", got.codes, want.codes)
    same(f"{name}, scales", got.scales, want.scales)


def plausible(name: str, x: Tensor, q: bs.QuantizedTensor) -> None:
    """Checks that decoding gives x back except for rounding: errors no larger than one spacing of
    the element, and not suspiciously smaller than a uniform error within it.

    The scale may make the largest value of a block exact, so the latter is checked on the others,
    if there are ENOUGH. A single value is closer than a sixteenth of a spacing once in four to
    eight times.
    """
    if q.spec.hadamard:  # these decode to the transformed x
        return
    spacing = 2.0 ** -int(q.spec.element[3])  # e4m3fn: 3 bits of mantissa
    x = x.float()
    error = bs.dequantize(q, dtype=torch.float32) - x
    relative = (error.norm() / x.norm()).item()
    good = relative < spacing
    others = ~largest_of_blocks(x, q)
    if good and others.sum() >= ENOUGH:
        relative = (error.mul_(others).norm() / (x * others).norm()).item()
        good = relative > spacing / 16
    if not good:
        raise WrongAnswer(f"{name}: decodes with a relative error of {relative:.3g}")


def largest_of_blocks(x: Tensor, q: bs.QuantizedTensor) -> Tensor:
    """Mask of where x [.., R, C] is the largest of its block; blocks as without groups."""
    lines, columns = q.spec.block
    block = (lines, columns) if q.axis == -1 else (columns, lines)
    matrices = x.abs().reshape(-1, 1, *x.shape[-2:])
    _, where = F.max_pool2d(matrices, block, block, ceil_mode=True, return_indices=True)
    found = torch.zeros_like(matrices, dtype=torch.bool)
    found.flatten(1).scatter_(1, where.flatten(1), True)
    return found.view(x.shape)


class Data:
    """Normally distributed inputs of one shape on one device, and the cases on them; with `groups`
    their rows form that many groups."""

    def __init__(
        self, shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16, groups: int = 0
    ) -> None:
        generator = torch.Generator(device).manual_seed(1)
        self.x = [
            torch.randn(shape, dtype=dtype, device=device, generator=generator)
            for _ in range(INPUTS)
        ]
        self.shape, self.device = shape, device
        self.suffix = "" if dtype == torch.bfloat16 else f", {str(dtype).removeprefix('torch.')}"
        self.batch_dims = len(shape) - 2
        self.offsets = None
        if groups:
            cuts = torch.randint(shape[0] + 1, (groups,), device=device, generator=generator)
            cuts[-1] = shape[0]
            self.offsets = cuts.sort().values.int()
        self.rng = bs.Rng(7, 1)
        if device == "cuda":  # a graph replays it
            self.rng = bs.Rng(*(torch.tensor(n, device=device) for n in (7, 1)))

    def goal(self, goal: float) -> float | None:
        """The goal for this shape; None on a CPU: goals are for GPUs."""
        if self.device != "cuda":
            return None
        odd = self.shape in ODD or self.offsets is not None
        return ODD_GOALS.get(goal, goal) if odd else goal

    def part(self, x: Tensor, axis: int) -> Tensor:
        """Two matrices, or 128 lines along the axis, on the CPU. Alone they quantize to the same as
        within the whole; for rows in groups only all of them do."""
        if self.batch_dims:
            return x[:2].cpu()
        if self.offsets is not None and axis == -1:
            return x.cpu()
        return (x[:128] if axis == -1 else x[:, :128]).cpu()

    def amax(self, spec: str, axis: int) -> Tensor | None:
        """The amax passed for a spec with an outer scale."""
        if not bs.spec(spec).outer:
            return None
        return bs.amax(self.x[0], spec, axis, self.batch_dims, self.offsets)

    def quantize_part(self, spec: str, axis: int, amax: Tensor | None) -> bs.QuantizedTensor:
        """Quantizes a part on the CPU."""
        part = self.part(self.x[0], axis)
        if amax is not None:
            amax = amax[: len(part)].cpu() if self.batch_dims else amax.cpu()
        q = bs.quantize(
            part, spec, axis=axis, amax=amax, rng=bs.Rng(7, 1), batch_dims=self.batch_dims,
            offsets=None if self.offsets is None else self.offsets.cpu(),
        )  # fmt: skip
        plausible(f"quantize {spec} along axis {axis}", part, q)
        return q

    def elementwise(self) -> Case:
        """An elementwise pass of PyTorch over the same input: the ceiling for a small shape."""

        def check() -> None:
            same("torch.neg", torch.neg(torch.neg(self.x[0])), self.x[0])

        moved = 2 * self.x[0].nbytes
        return Case("torch.neg", None, lambda i: torch.neg(self.x[i % INPUTS]), moved, check)

    def quantizers(self) -> Iterator[Case]:
        """Every spec along both axes, pairs in one pass, and an elementwise pass to compare
        with."""
        yield self.elementwise()
        for spec, goal in ROWS_AND_COLUMNS.items():
            for axis in (-1, -2):
                yield self.quantize(spec, axis, self.goal(goal))
        for (row, col), goal in DUAL.items():
            yield self.quantize_dual(row, col, self.goal(goal))

    def wide_quantizers(self) -> Iterator[Case]:
        """The quantizers that get FP32 inputs."""
        for axis in (-1, -2):
            yield self.quantize("fp8_1x128", axis, self.goal(ROWS_AND_COLUMNS["fp8_1x128"]))
        for (row, col), goal in WIDE_DUAL.items():
            yield self.quantize_dual(row, col, self.goal(goal))
        for (spec, axis), goal in AMAX.items():
            yield self.find_amax(spec, axis, self.goal(goal))

    def quantizer(
        self, spec: str, axis: int, amax: Tensor | None, layout: str = "linear"
    ) -> Callable[[Tensor], bs.QuantizedTensor]:
        return functools.partial(
            bs.quantize, spec=spec, axis=axis, amax=amax, rng=self.rng, layout=layout,
            batch_dims=self.batch_dims, offsets=self.offsets,
        )  # fmt: skip

    def quantize(self, spec: str, axis: int, goal: float | None) -> Case:
        name, amax = f"quantize/{spec}/axis:{axis}{self.suffix}", self.amax(spec, axis)
        call = self.quantizer(spec, axis, amax)
        q = call(self.x[0])
        return Case(
            name=name,
            goal=goal,
            call=lambda i: call(self.x[i % INPUTS]),
            moved=self.x[0].nbytes + nbytes(q),
            check=lambda: same_operand(name, q, self.quantize_part(spec, axis, amax)),
        )

    def quantize_dual(self, row: str, col: str, goal: float | None) -> Case:
        name = f"quantize_dual/{row}+{col}{self.suffix}"
        amaxes = self.amax(row, -1), self.amax(col, -2)
        call = functools.partial(
            bs.quantize_dual,
            row_spec=row,
            col_spec=col,
            rng=self.rng,
            row_amax=amaxes[0],
            col_amax=amaxes[1],
            batch_dims=self.batch_dims,
            offsets=self.offsets,
        )
        both = call(self.x[0])

        def check() -> None:
            for q, spec, axis, amax in zip(both, (row, col), (-1, -2), amaxes, strict=True):
                same_operand(name, q, self.quantize_part(spec, axis, amax))

        return Case(
            name=name,
            goal=goal,
            call=lambda i: call(self.x[i % INPUTS]),
            moved=self.x[0].nbytes + nbytes(*both),
            check=check,
        )

    def readers(self) -> Iterator[Case]:
        """Amax, dequantize and relayout."""
        for (spec, axis), goal in AMAX.items():
            yield self.find_amax(spec, axis, self.goal(goal))
        for spec in DEQUANTIZE:
            for axis in (-1, -2):
                yield self.dequantize(spec, axis, self.goal(DEQUANTIZE_GOAL))
        yield self.relayout("nvfp4", "nv_128x4", self.goal(RELAYOUT_GOAL))

    def find_amax(self, spec: str, axis: int, goal: float | None) -> Case:
        call = functools.partial(bs.amax, spec=spec, axis=axis, batch_dims=self.batch_dims)
        name = f"amax/{spec}/axis:{axis}{self.suffix}"

        def check() -> None:
            same(name, call(self.x[0]).reshape(-1), call(self.x[0].cpu()).reshape(-1))

        return Case(name, goal, lambda i: call(self.x[i % INPUTS]), self.x[0].nbytes, check)

    def dequantize(self, spec: str, axis: int, goal: float | None) -> Case:
        name = f"dequantize/{spec}/axis:{axis}"
        q = [bs.quantize(x, spec, axis=axis, batch_dims=self.batch_dims) for x in self.x]

        def check() -> None:
            amax = self.amax(spec, axis)
            want = bs.dequantize(self.quantize_part(spec, axis, amax))
            same(name, self.part(bs.dequantize(q[0]), axis), want)

        moved = self.x[0].nbytes + nbytes(q[0])
        return Case(name, goal, lambda i: bs.dequantize(q[i % INPUTS]), moved, check)

    def relayout(self, spec: str, layout: str, goal: float | None) -> Case:
        name = f"relayout/{spec}/{layout}"
        q = [bs.quantize(x, spec, batch_dims=self.batch_dims) for x in self.x]

        def check() -> None:
            same_operand(name, bs.relayout(bs.relayout(q[0], layout), "linear"), q[0])

        return Case(
            name, goal, lambda i: bs.relayout(q[i % INPUTS], layout), 2 * nbytes(q[0]), check
        )

    def layouts(self) -> Iterator[tuple[Case, Case]]:
        """Quantizers into every other layout, each with the same one into `linear`."""
        for spec, layouts in LAYOUTS.items():
            for axis in (-1, -2):
                linear, amax = self.quantize(spec, axis, None), self.amax(spec, axis)
                for layout in layouts:
                    yield self.quantize_into(layout, spec, axis, amax), linear

    def quantize_into(self, layout: str, spec: str, axis: int, amax: Tensor | None) -> Case:
        name = f"layout/{spec}/{layout}/axis:{axis}"
        call = self.quantizer(spec, axis, amax, layout)
        q, want = call(self.x[0]), self.quantizer(spec, axis, amax)(self.x[0])

        def check() -> None:
            same_operand(name, bs.relayout(q, "linear"), want)

        moved = self.x[0].nbytes + nbytes(q)
        return Case(name, LAYOUT_GOAL, lambda i: call(self.x[i % INPUTS]), moved, check)

    def peer(self, name: str, call: Peer) -> Case:
        """Another library's quantizer."""
        _, spec, axis = BESIDE[name].split("/")
        outputs = call(self.x[0])
        return Case(
            name=name,
            goal=None,
            call=lambda i: call(self.x[i % INPUTS]),
            moved=self.x[0].nbytes + sum(t.nbytes for t in outputs),
            check=lambda: self.check_peer(name, outputs, spec, int(axis.removeprefix("axis:"))),
        )

    def check_peer(self, name: str, outputs: Sequence[Tensor], spec: str, axis: int) -> None:
        """Compares its codes, as they lie in memory, with ours: scales may differ by a rounding."""
        codes = max(outputs, key=lambda t: t.nbytes)
        same_rule = bs.spec(spec, scale_rule="rceil") if "to_mx" in name else bs.spec(spec)
        ours = bs.quantize(self.x[0], same_rule, axis=axis).codes
        for theirs in (codes, codes.t()):
            if theirs.shape == ours.shape:
                equal = theirs.contiguous().view(torch.uint8) == ours.view(torch.uint8)
                if equal.float().mean().item() > 0.97:
                    return
        raise WrongAnswer(f"{name}: codes are not those of {spec} along axis {axis}")


def torchao(device: str) -> dict[str, Peer]:
    """torchao's Triton quantizers for FP8 and its quantizers for MX, compiled on a GPU."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError:
        return {}
    peers: dict[str, Peer] = {}
    for label, element in (("mxfp8", torch.float8_e4m3fn), ("mxfp4", torch.float4_e2m1fn_x2)):
        # The scale rule that torch.compile supports for both.
        mode = ScaleCalculationMode.RCEIL
        peer = functools.partial(to_mx, elem_dtype=element, block_size=32, scaling_mode=mode)
        if device == "cuda":
            peers[f"torchao compiled to_mx {label}"] = torch.compile(peer)
        else:
            peers[f"torchao to_mx {label}"] = peer
    if device == "cuda":
        try:
            from torchao.prototype.blockwise_fp8_training import kernels
        except ImportError:
            return peers
        for name in ("act_quant_lhs", "act_quant_transposed_lhs", "weight_quant_rhs"):
            if kernel := getattr(kernels, f"triton_fp8_blockwise_{name}", None):
                peers[f"torchao fp8 {name}"] = kernel
    return peers
