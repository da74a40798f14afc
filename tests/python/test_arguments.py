"""What counts as an int, a name, a spec: in every operator alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import blockscale as bs
import numpy as np
import pytest
import torch
from bits import assert_same_operand

X = torch.randn(2, 4, 70, generator=torch.Generator().manual_seed(0))
SPECS = "one of fp8_1x128, fp8_128x128, mxfp8, mxfp6, mxfp4, nvfp4, amdfp4"


def refused(kind: type[Exception], said: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == said


class Index:
    """An integer of another library."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize("kind", [np.int64, np.int8, Index])
def test_integers_of_any_type(kind: Any) -> None:
    spec, rng = bs.spec("nvfp4", rounding="stochastic"), bs.Rng(1)
    place: dict[str, Any] = {"batch_dims": kind(1), "origin": (kind(16), kind(32))}
    want = bs.quantize(X, spec, -2, rng=rng, batch_dims=1, origin=[16, 32])
    got = bs.quantize(X, spec, kind(-2), rng=rng, **place)
    assert_same_operand(got, want)
    assert [type(n) for n in (got.axis, got.batch_dims)] == [int, int]
    assert_same_operand(bs.quantize_dual(X, spec, spec, rng, **place)[1], want)
    amax = bs.amax(X, spec, kind(-2), kind(1))
    assert torch.equal(amax, bs.amax(X, spec, -2, 1))
    shape = tuple(map(kind, want.shape))
    made = dataclasses.replace(want, axis=kind(-2), batch_dims=kind(1), shape=shape)
    assert_same_operand(made, want)
    assert all(type(n) is int for n in (made.axis, made.batch_dims, *made.shape))


@pytest.mark.parametrize("flag", [True, np.True_])
def test_a_bool_is_no_int(flag: Any) -> None:
    a_bool = f"a {type(flag).__name__}; need an int"
    q = bs.quantize(X, "nvfp4", batch_dims=1)
    calls: dict[str, Callable[[], Any]] = {
        "quantize": lambda: bs.quantize(X, "nvfp4", batch_dims=flag),
        "quantize_dual": lambda: bs.quantize_dual(X, "nvfp4", "nvfp4", batch_dims=flag),
        "amax": lambda: bs.amax(X, "nvfp4", batch_dims=flag),
        "QuantizedTensor": lambda: dataclasses.replace(q, batch_dims=flag),
    }
    for operation, call in calls.items():
        refused(TypeError, f"{operation}: batch_dims = {a_bool}", call)
    said = "quantize: origin = a tuple; need (row, column), two ints"
    refused(TypeError, said, lambda: bs.quantize(X, "nvfp4", origin=(flag, 0)))


def test_an_origin_has_two_coordinates() -> None:
    for origin in ((), (16,), (0, 0, 0)):
        said = f"quantize: origin = {list(origin)}; need [row, column]"
        refused(ValueError, said, partial(bs.quantize, X, "nvfp4", origin=origin))


def test_names_belong_to_an_operation() -> None:
    q = bs.quantize(X, "nvfp4")
    calls: dict[str, Callable[[], Any]] = {
        "quantize: spec.name = 'nvfp5'": lambda: bs.quantize(X, "nvfp5"),
        "quantize: spec.block = 3x3": lambda: bs.quantize(X, "nvfp4[block=3x3]"),
        "amax: spec.name = 'nvfp5'": lambda: bs.amax(X, "nvfp5"),
        "quantize_dual: row_spec.name = 'a'": lambda: bs.quantize_dual(X, "a", "nvfp4"),
        "quantize_dual: col_spec.name = 'a'": lambda: bs.quantize_dual(X, "nvfp4", "a"),
        "quantize: layout.name = 'a'": lambda: bs.quantize(X, "nvfp4", layout="a"),
        "quantize: layout.scales = 'mn_major'": lambda: bs.quantize(X, "nvfp4", layout="mn_major"),
        "quantize_dual: col_layout.codes = 'mfma_16x16'": lambda: bs.quantize_dual(
            X, "nvfp4", "mxfp8", row_layout="mfma_16x16", col_layout="mfma_16x16"
        ),
        "relayout: layout.name = 'a'": lambda: bs.relayout(q, "a"),
        "QuantizedTensor: layout.scales = 'mn_major'": lambda: dataclasses.replace(
            q, layout="mn_major"
        ),
    }
    for said, call in calls.items():
        with pytest.raises(ValueError, match="; need ") as error:
            call()
        assert str(error.value).startswith(f"{said}; need ")
    none: Any = None
    need = "None; need a Spec, or a spec's text such as 'nvfp4'"
    refused(TypeError, f"quantize: spec = {need}", lambda: bs.quantize(X, none))
    said = f"quantize_dual: col_spec = {need}"
    refused(TypeError, said, lambda: bs.quantize_dual(X, "nvfp4", none))


def test_a_recipe_is_no_spec() -> None:
    said = (
        f"name = 'fp8_blockwise'; need {SPECS}; 'fp8_blockwise' is a recipe, for a whole layer: "
        "bs.linear(x, w, recipe='fp8_blockwise')"
    )
    refused(ValueError, f"spec: {said}", lambda: bs.spec("fp8_blockwise"))
    refused(ValueError, f"quantize: spec.{said}", lambda: bs.quantize(X, "fp8_blockwise"))


def test_specs_are_made_by_name() -> None:
    said = "Spec: text = 'nvfp4'; need all that the core says of it; make it with bs.spec(name)"
    refused(TypeError, said, lambda: bs.Spec("nvfp4"))
    assert dataclasses.replace(bs.spec("nvfp4")) == bs.spec("nvfp4")
    assert bs.spec("nvfp4", scale="e4m3") == bs.spec("nvfp4")
