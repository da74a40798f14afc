"""Tensors without data: they are refused as others are, in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blockscale as bs
import pytest
import torch
from operators import op_samples
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

OPS = torch.ops.blockscale
META, CPU = torch.device("meta"), torch.device("cpu")
STOCHASTIC = "nvfp4[rounding=stochastic]"


def ones(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def quantized(device: torch.device, spec: str, *shape: int) -> bs.QuantizedTensor:
    return bs.quantize(ones(device, *shape), spec, batch_dims=len(shape) - 2)


def grouped(device: torch.device, spec: str, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product of operands in NVFP4 and `spec`."""
    ends = torch.tensor([3, 8], device=device)
    a = bs.quantize(ones(device, 8, 70), "nvfp4", offsets=ends)
    return bs.grouped_matmul(a, quantized(device, spec, 2, 5, 70), ends, bias)


# What is refused of tensors on a device.
CALLS: dict[str, Callable[[torch.device], Any]] = {
    "dtype": lambda d: bs.quantize(ones(d, 4, 70).int(), "nvfp4"),
    "dtype of amax": lambda d: bs.amax(ones(d, 4, 70).double(), "nvfp4"),
    "axis": lambda d: bs.quantize(ones(d, 4, 70), "nvfp4", 1),
    "batch_dims": lambda d: bs.quantize(ones(d, 4, 70), "nvfp4", batch_dims=2),
    "no batch": lambda d: bs.quantize(ones(d, 4, 70), "nvfp4", batch_dims=1),
    "rank 0": lambda d: bs.quantize(ones(d), "nvfp4"),
    "rank 1": lambda d: bs.quantize_dual(ones(d, 70), "nvfp4", "mxfp8"),
    "layout": lambda d: bs.quantize(ones(d, 4, 70), "nvfp4", layout="foo"),
    "layout of others": lambda d: bs.quantize(ones(d, 4, 70), "nvfp4", layout="mn_major"),
    "layout of an operator": lambda d: OPS.quantize(
        ones(d, 4, 70), "nvfp4", -1, None, None, None, [], "foo", 0
    ),
    "amax": lambda d: bs.quantize(ones(d, 4, 70), "mxfp8", amax=3.0),
    "shape of amax": lambda d: bs.quantize(ones(d, 4, 70), "nvfp4", amax=ones(d, 3)),
    "no key": lambda d: bs.quantize(ones(d, 4, 70), STOCHASTIC),
    "origin": lambda d: bs.quantize(ones(d, 4, 70), "nvfp4", origin=(3, 5)),
    "offsets": lambda d: bs.quantize(ones(d, 4, 70), "nvfp4", offsets=ones(d, 2)),
    "offsets of a batch": lambda d: bs.quantize(
        ones(d, 2, 4, 70), "nvfp4", batch_dims=1, offsets=ones(d, 2, dtype=torch.int64)
    ),
    "dequantize": lambda d: quantized(d, "nvfp4", 4, 70).dequantize(torch.float64),
    "relayout": lambda d: bs.relayout(quantized(d, "nvfp4", 4, 70), "mn_major"),
    "shape": lambda d: OPS.dequantize(
        *OPS.quantize(ones(d, 4, 70), "nvfp4", -1, None, None, None, [], "linear", 0),
        *("nvfp4", -1, [-4, 70], "linear", torch.float32),
    ),
    "families": lambda d: bs.matmul(quantized(d, "nvfp4", 4, 70), quantized(d, "mxfp8", 4, 70)),
    "transforms": lambda d: bs.matmul(
        quantized(d, "nvfp4", 4, 64), quantized(d, "nvfp4[hadamard=16]", 4, 64)
    ),
    "out_dtype": lambda d: bs.matmul(
        quantized(d, "nvfp4", 4, 70), quantized(d, "nvfp4", 5, 70), out_dtype=torch.float16
    ),
    "bias": lambda d: bs.matmul(
        quantized(d, "nvfp4", 4, 70), quantized(d, "nvfp4", 5, 70), ones(d, 3)
    ),
    "dtype of a bias": lambda d: bs.matmul(
        quantized(d, "nvfp4", 4, 70), quantized(d, "nvfp4", 5, 70), ones(d, 5).int()
    ),
    "bias of groups": lambda d: grouped(d, "nvfp4", ones(d, 5)),
    "groups of families": lambda d: grouped(d, "mxfp4"),
    "rank of a weight": lambda d: bs.quantize_weight(ones(d, 70), "mxfp8"),
}


@pytest.mark.parametrize("what", CALLS)
def test_refused_in_the_same_words(what: str) -> None:
    said = []
    for device in (CPU, META):
        with pytest.raises(ValueError, match="; need ") as error:
            CALLS[what](device)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_fake_tensors_are_refused_too() -> None:
    with FakeTensorMode():
        for what in ("dtype", "rank 0", "layout", "out_dtype", "bias"):
            with pytest.raises(ValueError, match="; need "):
                CALLS[what](CPU)


def test_fake_tensors_outside_their_mode() -> None:
    """Also where an operator needs a tensor that is made of numbers."""
    mode = FakeTensorMode()
    x, w = mode.from_tensor(torch.empty(40, 64)), mode.from_tensor(torch.empty(16, 64))
    w.requires_grad_()
    rng = bs.Rng(3, 1)
    q = bs.quantize(x, "nvfp4[rounding=stochastic]", amax=2.0, rng=rng)
    assert bs.dequantize(q).shape == x.shape
    q = bs.quantize(x, "mxfp8")
    assert bs.matmul(q, q, out_dtype=torch.float32).shape == (40, 40)
    random = "nvfp4[fprop_w=nvfp4[rounding=stochastic],dgrad_w=nvfp4[rounding=stochastic]]"
    assert bs.quantize_weight(w.detach(), random, rng=rng).operands[0].shape
    y = bs.linear(x, w, recipe="nvfp4", rng=rng)
    assert torch.autograd.grad(y, w, y)[0].shape == w.shape
    layer = bs.nn.Linear(64, 16)
    fakes: dict[str, torch.Tensor] = {
        name: mode.from_tensor(p) for name, p in layer.named_parameters()
    }
    assert torch.func.functional_call(layer, fakes, (x,)).shape == (40, 16)


@pytest.mark.parametrize("index", range(len(op_samples(CPU))))
def test_what_operators_take_is_taken(index: int) -> None:
    name, arguments = op_samples(CPU)[index]

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(v) for v in value]
        return value.to(META) if isinstance(value, torch.Tensor) else value

    def kind(value: Any) -> Any:  # of an operator that writes into its arguments, None
        return value if value is None else (value.shape, value.dtype)

    got = tree_leaves(getattr(OPS, name)(*map(moved, arguments)))
    want = tree_leaves(getattr(OPS, name)(*arguments))
    assert [*map(kind, got)] == [*map(kind, want)]


def test_large_tensors_without_data_take_no_memory() -> None:
    """Half a petabyte."""
    x = torch.empty(1 << 24, 1 << 23, device=META)
    assert bs.quantize(x, "nvfp4", -2).codes.shape == (1 << 23, 1 << 23)
    assert bs.matmul(bs.quantize(x, "mxfp8"), bs.quantize(x[:5], "mxfp8")).shape == (1 << 24, 5)
    assert bs.dequantize(bs.quantize(x, "mxfp8")).shape == x.shape
    w = bs.quantize_weight(x, "mxfp8", backward=False)
    assert w.operands[0].numel() == (1 << 47) + (1 << 42)
