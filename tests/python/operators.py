"""Calls of every operator, for PyTorch's opcheck: on any device."""

from __future__ import annotations

import functools
from typing import Any

import blockscale as bs
import torch

OPS = torch.ops.blockscale
F32, BF16 = torch.float32, torch.bfloat16

Sample = tuple[str, tuple[Any, ...]]  # the operator's name and its arguments


class Inputs:
    """What the samples of one device are made of."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.key = (torch.tensor(5, device=device), torch.tensor(6, device=device))
        # Groups of five rows: one without rows, and a row of no group.
        self.ends = torch.tensor([0, 3, 4], device=device)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(self.device)

    def ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, device=self.device)

    def stored(self, *shape: int, axis: int = -1, ends: torch.Tensor | None = None) -> list[Any]:
        """A stored operand. opcheck compares inputs with allclose, which knows no FP8 dtype: those
        of amdfp4 are uint8."""
        batch = len(shape) - 2
        args: tuple[Any, ...] = ("amdfp4", axis, None, None, None, [], "linear", batch, ends)
        return [*OPS.quantize(self.normal(*shape), *args)]


@functools.cache
def op_samples(device: torch.device) -> list[Sample]:
    """At least one call of each operator with tensors of `device`."""
    of = Inputs(device)
    return [
        *quantizer_samples(of),
        *reader_samples(of),
        *linear_samples(of),
        *gathered_samples(of),
        *grouped_linear_samples(of),
        *(("begin_forward", (*(t.clone() for t in of.key), counts)) for counts in (True, False)),
    ]


def quantizer_samples(of: Inputs) -> list[Sample]:
    stochastic, square = "nvfp4[rounding=stochastic,hadamard=16]", "mxfp8[block=32x32]"
    x, batch, none = of.normal(5, 70), of.normal(3, 5, 70), (None, None, None)
    return [
        ("quantize", (x, stochastic, -1, None, *of.key, [], "linear", 0)),
        ("quantize", (batch, square, -2, *none, [], "nv_128x4", 1)),
        ("quantize", (x, "nvfp4", -1, of.ones(), None, None, [0, 0], "linear", 0)),
        ("quantize", (x, square, -2, *none, [], "nv_128x4", 0, of.ends)),
        ("quantize_dual", (batch, stochastic, "nvfp4", None, None, *of.key, [],
                           "mfma_16x16+aiter_scale", "linear", 0)),
        ("quantize_dual", (x, "nvfp4", "mxfp4", None, *none, [], "linear", "mfma_16x16", 0,
                           of.ends)),
        ("quantize_piece", (x, torch.bfloat16, "fp8_128x128", None, 0)),
        ("quantize_piece", (batch, torch.float32, "nvfp4[block=16x16]", None, 1)),
        ("amax", (x.to(BF16), stochastic, -2, 0)),
        ("amax", (x, "nvfp4", -1, 0, None, torch.bfloat16)),
        ("amax", (x, stochastic, -2, 0, of.ends)),
        ("amax", (batch, "nvfp4", -1, 1)),
    ]  # fmt: skip


def reader_samples(of: Inputs) -> list[Sample]:
    """What reads stored operands: of one matrix, of groups of rows, and of groups along the
    contraction axis."""
    a, b = of.stored(5, 70), of.stored(9, 70)
    groups, matrices = of.stored(5, 70, ends=of.ends), of.stored(3, 9, 70)
    c, d = (of.stored(5, n, axis=-2, ends=of.ends) for n in (70, 9))
    text = ("amdfp4", "linear")
    shape = ("amdfp4", -1, [5, 70], "linear")
    return [
        ("dequantize", (*a, *shape, BF16)),
        ("dequantize", (*groups, *shape, BF16, of.ends)),
        ("relayout", (*a[:2], *shape, "mfma_16x16+nv_128x4")),
        ("relayout", (*groups[:2], *shape, "nv_128x4", of.ends)),
        ("matmul", (*a, *text, 5, *b, *text, 9, 70, None, BF16)),
        ("matmul", (*a, *text, 5, *b, *text, 9, 70, of.normal(9), F32)),
        ("matmul", (*groups, *text, 5, *matrices, *text, 9, 70, None, BF16, of.ends)),
        ("matmul", (*groups, *text, 5, *matrices, *text, 9, 70, of.normal(3, 9), F32, of.ends, -1)),
        ("matmul", (*c, *text, 70, *d, *text, 9, 5, None, F32, of.ends, -2)),
    ]


def linear_samples(of: Inputs) -> list[Sample]:
    """Forwards, and the backwards of what they return: quantized, with random bits, and mixed."""
    x, w, bias, dy = (of.normal(*shape) for shape in ((2, 3, 70), (9, 70), (9,), (2, 3, 9)))
    mixed = bs.recipe("mxfp8").replace(wgrad_x=None, fprop_w=None, dgrad_dy=None)
    samples: list[Sample] = []
    for recipe, dx, dw in (
        (bs.recipe("nvfp4"), True, True),
        (bs.recipe("nvfp4"), False, False),
        (bs.recipe("amdfp4"), False, True),
        (bs.recipe("fp8_blockwise"), True, True),
        (mixed, True, True),
    ):
        key = of.key if recipe.stochastic else (None, None)
        forward = (x, w, bias, recipe.text, dx, dw, *key, None, BF16)
        saved = OPS.linear(*forward)[1:]
        if recipe is mixed:
            saved.append(x)
        if recipe.stochastic and (dx or dw):
            saved.append(of.key[0])
        backward = (dy, saved, recipe.text, 70, dx, dw, dw, None, None, BF16, F32)
        samples += [("linear", forward), ("linear_backward", backward)]
        made = OPS.quantize_weight(w, recipe.text, dx)
        samples.append(("quantize_weight", (w, recipe.text, dx)))
        samples.append(("linear", (*forward, made)))
        tensors = [t.clone().requires_grad_(dx and dw) for t in (x, w, bias)]
        exported = (*tensors, *forward[3:])
        samples += [("linear_exported", (*exported, q, None)) for q in (None, made)]
        made_x = OPS.quantize_input(x, recipe.text, dw)
        samples.append(("quantize_input", (x, recipe.text, dw)))
        samples += [("linear", (*forward, q, made_x)) for q in (None, made)]
        samples.append(("linear_exported", (*exported, made, made_x)))
        largest = of.ones(2) * 9 if recipe.name == "nvfp4" else None
        piece = (x, w, bias, recipe.text, dx, dw, *key, BF16, [0, 128, 128, 0], largest, largest)
        samples.append(("linear_piece", piece))
        if dx or dw:
            for skips in ((False, False), (dx, False), (False, dw)):
                call = (70, dx, dw, dw, None, BF16, F32, *skips, [128, 0], largest)
                samples.append(("linear_piece_backward", (dy, saved, recipe.text, *call)))
        if dw:
            into = (dy, saved, recipe.text, 70, dx, dx, None, of.ones(9, 70), F32, BF16)
            samples.append(("linear_backward_into", into))
        if dx and dw:
            samples += [
                ("linear_backward", (*backward, *skip)) for skip in ((True,), (False, True))
            ]
            samples.append(("linear_backward_into", (*into, True)))
            text = recipe.replace(keep_w=False).forward_text
            rest = OPS.linear(*forward[:3], text, *forward[4:], None, made_x)[1:]
            of_x = x if recipe.wgrad_x is None else made_x[-1]
            flags = (False, False, False, True, True)
            for saved_x in (of_x, x):
                apart = [*rest, saved_x, w, *([of.key[0]] if recipe.stochastic else [])]
                samples.append(("linear_backward", (dy, apart, *backward[2:], *flags)))
                samples.append(("linear_backward_into", (dy, apart, *into[2:], False, True, True)))
    return samples


def gathered_samples(of: Inputs) -> list[Sample]:
    """Of a weight that FSDP2 has gathered as codes, without FP8 dtypes, which opcheck cannot
    compare."""
    recipe = bs.recipe("amdfp4")
    x, w, dy = (of.normal(*shape) for shape in ((5, 70), (9, 70), (5, 9)))
    w_codes = OPS.quantize_piece(w, F32, str(recipe.fprop_w), None, 0)
    ws = w.repeat(3, 1, 1)
    experts = OPS.quantize_piece(ws, F32, str(recipe.fprop_w), None, 1)
    samples: list[Sample] = []
    for weight, codes, ends in ((w, w_codes, None), (ws, experts, of.ends)):
        forward = (x, weight, None, recipe.text, True, True, *of.key, ends, None, list(codes))
        saved = [OPS.linear(*forward)[1], *codes, of.key[0]]
        call = (dy, saved, recipe.text, 70, True)
        apart = (*[None] * 3, *[False] * 4, True)
        into = (ends, torch.zeros_like(weight), None, None, False, False, True)
        samples += [("linear", forward), ("linear_backward", (*call, True, False, ends, *apart))]
        samples.append(("linear_backward_into", (*call, False, *into)))
    return samples


def grouped_linear_samples(of: Inputs) -> list[Sample]:
    """The same over groups."""
    samples: list[Sample] = []
    for name in ("nvfp4", "fp8_blockwise", "fp8_blockwise[wgrad_x=fp8_128x128]", "bf16"):
        recipe = bs.recipe(name)
        dtype = BF16 if recipe.high_precision else F32  # PyTorch's grouped GEMM on a GPU takes BF16
        x, w, dy = (of.normal(*shape).to(dtype) for shape in ((5, 70), (3, 9, 70), (5, 9)))
        key = of.key if recipe.stochastic else (None, None)
        forward = (x, w, None, recipe.text, True, True, *key, of.ends)
        saved = OPS.linear(*forward)[1:]
        if recipe.high_precision:
            saved = [x, w]
        if recipe.stochastic:
            saved.append(of.key[0])
        call = (dy, saved, recipe.text, 70)
        samples += [
            ("linear", forward),
            ("linear_exported", (*forward, None, None, None)),
            ("linear_backward", (*call, True, True, False, of.ends)),
            ("linear_backward_into", (*call, True, False, of.ends, of.ones(3, 9, 70))),
        ]
        turned = (True, True, False, of.ends, None, None, None, False, False, True)
        samples.append(("linear_backward", (*call, *turned)))
        if not recipe.high_precision:
            made_x = OPS.quantize_input(x, recipe.text, True, of.ends)
            samples.append(("quantize_input", (x, recipe.text, True, of.ends)))
            samples.append(("linear", (*forward, None, None, made_x)))
    return samples
