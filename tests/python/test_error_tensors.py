"""Tensors that an operation does not take: one clear error each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import blockscale as bs
import pytest
import torch
from refusals import value_error
from torch.testing._internal.two_tensor import TwoTensor

OPS = torch.ops.blockscale
X = torch.ones(4, 70)
STOCHASTIC = "nvfp4[rounding=stochastic]"


def test_dtypes_have_the_names_of_torch() -> None:
    for dtype in (torch.complex64, torch.int16, torch.int8, torch.bool, torch.float64):
        value_error(lambda t=dtype: bs.quantize(X.to(t), "mxfp8"), f"x.dtype = {str(dtype)[6:]};")  # type: ignore[misc]


def test_sparse_tensors() -> None:
    sparse = torch.eye(4).to_sparse()
    need = "x.layout = torch.sparse_coo; need torch.strided; call "
    value_error(lambda: bs.quantize(sparse, "nvfp4"), f"quantize: {need}x.to_dense() first")
    value_error(lambda: bs.linear(sparse, torch.eye(4), recipe="mxfp8"), f"linear: {need}")
    value_error(lambda: bs.quantize_weight(sparse, "mxfp8"), "quantize_weight: w.layout = torch.sp")


def test_sparse_tensors_beside_the_input() -> None:
    one = torch.ones(1)
    value_error(lambda: bs.quantize(X, "nvfp4", amax=one.to_sparse()), "quantize: amax.layout")
    value_error(lambda: bs.Rng(one.long().to_sparse()), "rng: seed.layout")
    q = bs.quantize(X, "mxfp8")
    bias = torch.ones(4).to_sparse()
    value_error(lambda: bs.matmul(q, q, bias=bias), "matmul: bias.layout")
    codes = q.codes.view(torch.uint8).to_sparse()
    value_error(lambda: dataclasses.replace(q, codes=codes), "QuantizedTensor: codes.layout")


def test_buffers_that_nothing_may_be_added_to() -> None:
    def into(made: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
        w = torch.ones(8, 70, requires_grad=True)
        return lambda: bs.linear(X, w, recipe="mxfp8", accumulate_into=made(w))

    name = "linear: accumulate_into = "
    value_error(into(lambda w: w), name + "a tensor that requires a gradient")
    value_error(into(lambda w: torch.zeros(8, 70).to_sparse()), "linear: accumulate_into.layout")
    value_error(into(lambda w: w.data), name + "memory of w; need memory of its own")
    two: Callable[..., torch.Tensor] = TwoTensor
    value_error(into(lambda w: two(w.data, w.data)), name + "a TwoTensor")
    negative = torch._neg_view(torch.zeros(8, 70))
    value_error(into(lambda w: negative), name + "a view that negates")
    value_error(into(lambda w: torch.zeros(70, 8).t()), name + "strided torch.float32[8, 70]")
    x = torch.ones(8, 70)
    w = torch.ones(8, 70, requires_grad=True)
    call = partial(bs.linear, x, w, recipe="mxfp8", accumulate_into=x)
    value_error(call, name + "memory of x")
    both = torch.zeros(16, 70)  # one piece of memory for weights and sums is no fault
    w = both[:8].requires_grad_()
    y = bs.linear(X, w, recipe="mxfp8", accumulate_into=both[8:].detach())
    torch.autograd.backward(y.sum())
    assert both[8:].abs().sum() > 0


def test_a_weight_quantized_ahead_elsewhere() -> None:
    w = torch.ones(8, 70)
    ahead = bs.quantize_weight(w, "mxfp8").to("meta")
    call = partial(bs.linear, X, w, recipe="mxfp8", quantized_weight=ahead)
    value_error(call, "linear: quantized_weight.device = meta; need cpu, where x is")


def test_nested_tensors() -> None:
    rows = [torch.ones(3, 32), torch.ones(5, 32)]
    nested = torch.nested.nested_tensor(rows)
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    need = "x = a nested tensor; need a tensor of one shape; torch.nested.to_padded_tensor"
    value_error(lambda: bs.quantize(nested, "mxfp8"), f"quantize: {need}")
    value_error(lambda: bs.amax(jagged, "mxfp8"), f"amax: {need}")
    layer = functools.partial(bs.linear, w=torch.ones(8, 32), recipe="mxfp8")
    value_error(lambda: layer(nested), f"linear: {need}")
    value_error(lambda: layer(jagged), "one shape; write torch.nested.nested_tensor_from_jagged(")
    same = torch.nested.nested_tensor_from_jagged(layer(jagged.values()), jagged.offsets())  # type: ignore[attr-defined]
    assert all(torch.equal(a, layer(b)) for a, b in zip(same.unbind(), rows, strict=True))


def test_extents_whose_sizes_overflow() -> None:
    """Flat layouts have one size, which would be 0 or small in 64 bits."""
    said, name = "product, padded, is below 2^60", "mfma_16x16+aiter_scale"
    many = torch.zeros(1, 1).expand(1 << 62, 1)
    value_error(lambda: bs.quantize(many, "mxfp4", layout=name), "quantize: ", said)
    value_error(lambda: bs.linear(many, torch.ones(4, 1), recipe="mxfp8"), "linear: ", said)
    none = (torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.float8_e8m0fnu))
    shape = [1 << 40, 1 << 40]
    call: tuple[Any, ...] = (*none, "mxfp4", -1, shape, name, name)
    value_error(lambda: OPS.relayout(*call), "relayout: shape = ", said)
    side = (*none, torch.empty(0), "mxfp4", name, 1024)
    call = (*side, *side, 1 << 59, None, torch.float32)
    value_error(lambda: OPS.matmul(*call), "matmul: shape = [1024, ", said)


@pytest.mark.parametrize("axis", [-1, -2])
def test_rows_without_columns_take_no_time(axis: int) -> None:
    for spec in ("mxfp8", "fp8_1x128", "nvfp4"):
        q = bs.quantize(torch.empty(1 << 40, 0), spec, axis=axis)
        assert bs.dequantize(q).shape == (1 << 40, 0)
        bs.relayout(q, "linear")


def test_wrong_rank() -> None:
    value_error(lambda: bs.quantize(torch.tensor(1.0), "nvfp4"), "quantize: x.shape = []", "rank 1")
    value_error(lambda: bs.quantize(X[0], "nvfp4", -2), "x.shape = [70]", "rank 2 or more")
    value_error(lambda: bs.quantize_dual(X[0], "nvfp4", "nvfp4"), "quantize_dual: x.shape = [70]")
    value_error(lambda: bs.quantize(X, "nvfp4", batch_dims=1), "x.shape = [4, 70]", "[E, R, C]")
    value_error(lambda: bs.quantize(X, "nvfp4", batch_dims=2), "batch_dims = 2; need 0 or 1")
    value_error(lambda: bs.amax(torch.tensor(1.0), "nvfp4"), "amax: x.shape = []")
    value_error(lambda: bs.linear(X, X[0], recipe="mxfp8"), "linear: w.shape = [70]", "[N, K]")
    value_error(lambda: bs.linear(X[:, :3], X, recipe="mxfp8"), "x.shape = [4, 3]", "[..., 70]")
    value_error(lambda: bs.linear(X, X, X[0], "mxfp8"), "linear: bias.shape = [70]; need [4]")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64, torch.bool])
def test_wrong_dtype(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    x = X.to(dtype)
    need = "need float32, bfloat16 or float16"
    if dtype in (torch.float64, torch.int32, torch.bool):
        value_error(lambda: bs.quantize(x, "nvfp4"), f"quantize: x.dtype = {name}; {need}")
    value_error(lambda: bs.amax(x, "nvfp4"), "amax: x.dtype = ", need)
    value_error(lambda: bs.linear(x, X, recipe="mxfp8"), f"linear: x.dtype = torch.{name}; {need}")
    q = bs.quantize(X, "nvfp4")
    value_error(lambda: q.dequantize(dtype), "dequantize: dtype = ", need)
    value_error(lambda: bs.matmul(q, q, out_dtype=dtype), "matmul: out_dtype = ",
                "need float32 or bfloat16")  # fmt: skip
    value_error(lambda: bs.matmul(q, q, bias=x[:, 0]), "matmul: bias.dtype = ", need)


def test_wrappers_of_other_tensors() -> None:
    """As those of other libraries, whose operators ours are not among."""
    pair = TwoTensor(X, X)  # type: ignore[no-untyped-call]
    for name, call in (
        ("quantize: x", lambda: bs.quantize(pair, "mxfp8")),
        ("amax: x", lambda: bs.amax(pair, "mxfp8")),
        ("quantize_weight: w", lambda: bs.quantize_weight(pair, "mxfp8")),
    ):
        value_error(call, f"{name} = a TwoTensor; need a plain tensor")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[0].weight = torch.nn.Parameter(TwoTensor(torch.ones(8, 8), torch.ones(8, 8)))  # type: ignore[no-untyped-call]
    report = bs.convert(model, "mxfp8")
    assert report.skipped == [("0", "its weight is a tensor of type TwoTensor")]


def test_weights_that_torchao_has_quantized() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    bs.convert(model, "mxfp8")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    value_error(lambda: model(torch.ones(4, 64)), "linear: w = an Int8Tensor; need a plain tensor")


def test_wrong_device() -> None:
    meta = bs.quantize(X.to("meta"), "nvfp4")
    q = bs.quantize(X, "nvfp4")
    value_error(lambda: bs.linear(X, X.to("meta"), recipe="mxfp8"), "w.device = meta; need cpu")
    value_error(
        lambda: bs.QuantizedTensor(q.codes, meta.scales, q.outer, q.spec, -1, (4, 70)),
        "QuantizedTensor: scales.device = meta; need cpu, where the codes are",
    )
    # PyTorch asks the fake kernel then, whose result would be memory that nobody wrote.
    seed = torch.tensor(3, device="meta")
    for call in (
        lambda: bs.matmul(q, meta),
        lambda: bs.matmul(q, q, bias=torch.ones(4, device="meta")),
        lambda: bs.quantize(X, "nvfp4", amax=torch.tensor(1.0, device="meta")),
        lambda: bs.quantize(X, STOCHASTIC, rng=bs.Rng(seed)),
        lambda: bs.linear(X, X.clone().requires_grad_(), rng=bs.Rng(seed)),
    ):
        value_error(call, ".device = meta; need cpu")
    # A device that no kernel was built for: the operator says so itself.
    keys = "CompositeExplicitAutograd"
    assert all(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"blockscale::{op}", keys)
        for op in ("quantize", "quantize_dual", "amax", "dequantize", "relayout", "matmul")
    )


def test_an_amax_below_zero_that_the_processor_takes_for_zero() -> None:
    least = torch.tensor(-(2**31) + 1, dtype=torch.int32).view(torch.float32)  # -1.4e-45
    flushes = torch.set_flush_denormal(True)
    try:
        value_error(lambda: bs.quantize(X, "nvfp4", amax=least), "quantize: amax = ")
    finally:
        torch.set_flush_denormal(False)
    if flushes:
        value_error(lambda: bs.quantize(X, "nvfp4", amax=least), "quantize: amax = -1.4")
