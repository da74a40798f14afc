"""Tensors, keys and recipes for tests, and comparing tensors and operands bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import blockscale as bs
import torch
from torch.torch_version import TorchVersion

RNG = bs.Rng(0x1234_5678_9ABC_DEF0, (3 << 16) | 1)
QUANTIZED = [name for name in bs.recipe_names() if name != "bf16"]
BEFORE_2_13 = TorchVersion(torch.__version__) < "2.13"  # of PyTorch


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def normal_bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed).bfloat16()


def raw(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of any dtype, in order."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: object = "") -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    assert torch.equal(raw(got), raw(want)), what


def assert_same_operand(
    got: bs.QuantizedTensor, want: bs.QuantizedTensor, what: object = ""
) -> None:
    about = [(q.spec, q.axis, q.shape, q.layout, q.batch_dims) for q in (got, want)]
    assert about[0] == about[1], what
    assert_same_bits(got.codes, want.codes, ("codes", what))
    assert_same_bits(got.scales, want.scales, ("scales", what))
    assert (got.outer is None) == (want.outer is None), what
    if got.outer is not None and want.outer is not None:
        assert_same_bits(got.outer, want.outer, ("outer", what))


def equal(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Whether there are as many of both, at least one, and all are equal."""
    return len(got) == len(want) > 0 and all(map(torch.equal, got, want))


def assert_same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    assert len(got) == len(want) > 0
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), i
