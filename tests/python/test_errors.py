"""Bad input: one clear error each, `operation: argument = got; need ...; remedy`, on one line."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import blockscale as bs
import pytest
import torch
from blockscale._errors import did_you_mean, nearest
from refusals import refused, type_error, value_error
from torch import nn
from torch.autograd import forward_ad

OPS = torch.ops.blockscale
X = torch.ones(4, 70)
STOCHASTIC = "nvfp4[rounding=stochastic]"


def test_unknown_names() -> None:
    value_error(lambda: bs.quantize(X, "nvpf4"), "quantize: spec.name = 'nvpf4'", "mean 'nvfp4'?")
    value_error(lambda: bs.quantize(X, "nvfp4", layout="nv_128x3"),
                "quantize: layout.name = 'nv_128x3'", "did you mean 'nv_128x4'?")  # fmt: skip
    value_error(lambda: bs.linear(X, X, recipe="mxpf8"), "recipe: name = 'mxpf8'", "'mxfp8'")


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("nvpf4", "nvfp4"),  # 2 edits of 5 letters
        ("NVFP4", "nvfp4"),
        ("fp8", "fp8_1x128"),  # which goes on where the name ends
        ("xmfp8", "mxfp8"),
        ("fp8_1x218", "fp8_1x128"),
        ("foo", None),
        ("nonsense", None),
        ("", None),
    ],
)
def test_only_what_is_near_is_suggested(name: str, suggested: str | None) -> None:
    known = bs.spec_names()
    assert nearest(name, known) == suggested
    assert did_you_mean(name, known) == (f"did you mean {suggested!r}?" if suggested else "")
    assert nearest(name, ()) is None


def test_nonsense_gets_no_suggestion() -> None:
    with pytest.raises(ValueError, match=r"^recipe: operand = 'foo'; need [^;]+$"):
        bs.recipe("nvfp4").replace(foo=None)
    with pytest.raises(ValueError, match=r"^recipe: name = 'nonsense'; need [^;]+$"):
        bs.recipe("nonsense")
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    with pytest.raises(ValueError, match=r"^convert: skip = 'head'; .*; print\(model\) shows"):
        bs.convert(model, "nvfp4", skip=["head"])


def test_wrong_types() -> None:
    type_error(lambda: bs.quantize([1.0], "nvfp4"), "quantize: x = a list; need a tensor")  # type: ignore[arg-type]
    type_error(lambda: bs.quantize(X, 4), "quantize: spec = an int", "'nvfp4'")  # type: ignore[arg-type]
    type_error(lambda: bs.quantize(X, STOCHASTIC, rng=7), "rng = an int; need bs.Rng(seed, offset)")  # type: ignore[arg-type]
    type_error(lambda: bs.quantize(X, "nvfp4", amax="1"), "quantize: amax = a str; need a number")  # type: ignore[arg-type]
    type_error(lambda: bs.matmul(X, X), "matmul: a = a Tensor; need a QuantizedTensor")  # type: ignore[arg-type]
    type_error(lambda: bs.dequantize(X), "dequantize: q = a Tensor", "quantize it first")  # type: ignore[arg-type]
    type_error(lambda: bs.linear(X, None), "linear: w = None; need a tensor")  # type: ignore[arg-type]
    type_error(lambda: bs.linear(X, X, rng=3), "linear: rng = an int")  # type: ignore[arg-type]
    type_error(lambda: bs.Rng(1).role([]), "rng: role = a list; need 'x', 'w' or 'dy'")  # type: ignore[arg-type]
    type_error(lambda: bs.quantize_weight(X, backward="no"), "quantize_weight: backward = a str")  # type: ignore[arg-type]
    type_error(
        lambda: bs.linear(X, X, recipe="mxfp8", quantized_weight=bs.quantize(X, "mxfp8")),  # type: ignore[arg-type]
        "linear: quantized_weight = a QuantizedTensor; need a QuantizedWeight; ",
    )
    type_error(lambda: bs.Rng(1.5), "rng: seed = a float; need an int")  # type: ignore[arg-type]
    type_error(lambda: bs.linear([1.0], X), "linear: x = a list; need a tensor")  # type: ignore[arg-type]
    type_error(lambda: bs.linear(X, X, "mxfp8"), "linear: bias = a str", "pass the recipe as")  # type: ignore[arg-type]
    type_error(lambda: bs.nn.Linear(4, 4, "mxfp8"), "Linear: bias = a str", "pass the recipe as")  # type: ignore[arg-type]
    type_error(lambda: bs.grouped_linear(X, X[None], None), "grouped_linear: offsets = None")  # type: ignore[arg-type]
    value_error(lambda: bs.quantize_weight(X.double()), "quantize_weight: w.dtype = torch.float64")
    value_error(lambda: bs.Rng(torch.ones(1)), "rng: seed = torch.float32[1]; need an int64")
    value_error(lambda: bs.Rng(1, torch.zeros(2, dtype=torch.int64)), "offset = torch.int64[2]")
    value_error(lambda: bs.Rng(1).role("z"), "rng: role = 'z'; need one of x, w, dy")


def test_what_recipes_and_layers_are_made_of() -> None:
    type_error(lambda: bs.Recipe("mine", "mxfp8"), "recipe: fprop_x = a str; need a Spec, or None")  # type: ignore[arg-type]
    for seed in ("1", None, 1.0, True):
        type_error(lambda s=seed: bs.nn.Linear(4, 4, seed=s), "Linear: seed = ", "need an int")  # type: ignore[misc]


def test_a_spec_is_no_recipe() -> None:
    said = "'mxfp6' is a spec, for one operand: bs.recipe(...).replace(fprop_x='mxfp6', fprop_w="
    value_error(lambda: bs.linear(X, X, recipe="mxfp6"), "recipe: name = 'mxfp6'", said)
    spec = bs.spec("mxfp6")
    type_error(lambda: bs.linear(X, X, recipe=spec), "recipe: name = a Spec", "(not a Spec)")  # type: ignore[arg-type]


def test_parts_of_a_quantized_tensor() -> None:
    q = bs.quantize(X, "mxfp8")
    refused: tuple[tuple[str, Any], ...] = (("shape", 64), ("layout", None))
    for name, value in refused:
        said = f"QuantizedTensor: {name} = "
        type_error(lambda n=name, v=value: dataclasses.replace(q, **{n: v}), said)  # type: ignore[misc]


def test_numbers_of_more_than_64_bits() -> None:
    wide = 1 << 70
    said = "need ints of 64 bits"
    value_error(lambda: bs.quantize(X, "mxfp8", axis=wide), f"quantize: axis = {wide}; {said}")
    value_error(lambda: bs.quantize(X, "mxfp8", batch_dims=wide), "batch_dims = ", said)
    value_error(lambda: bs.quantize(X, "mxfp8", origin=(0, wide)), f"origin = {wide}; {said}")


def test_derivatives_that_do_not_exist() -> None:
    said = "x = a dual tensor; need no tangent: forward-mode derivatives are not implemented"

    def along(x: torch.Tensor) -> torch.Tensor:
        return bs.linear(x, X, recipe="mxfp8")

    value_error(lambda: torch.func.jvp(along, (X,), (X,)), f"linear: {said}; use reverse mode")
    within = "linear: x = within torch.func; need torch.no_grad() in it"
    value_error(lambda: torch.func.grad(lambda x: along(x).sum())(X), within)
    narrow = torch.ones(4, 5)
    gradient = torch.func.grad(lambda x: along(x).sum())
    value_error(lambda: gradient(narrow), "linear: x.shape = [4, 5]")
    w = X.clone().requires_grad_()
    y = bs.linear(X, w, recipe="mxfp8").square().sum()
    said = "linear: create_graph = True; need False: second derivatives are not implemented; use "
    value_error(lambda: torch.autograd.grad(y, w, create_graph=True), said)


def test_quantizers_have_no_derivatives_in_forward_mode() -> None:
    """Their results would be constants."""
    q = bs.quantize(X, "mxfp8")
    said = "a dual tensor; need no tangent: forward-mode derivatives are not implemented; pass "
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "quantize: x": lambda x: bs.quantize(x, "mxfp8"),
        "quantize_dual: x": lambda x: bs.quantize_dual(x, "mxfp8", "mxfp8"),
        "amax: x": lambda x: bs.amax(x, "mxfp8"),
        "quantize_weight: w": lambda w: bs.quantize_weight(w, "mxfp8"),
        "matmul: bias": lambda x: bs.matmul(q, q, x[0, : len(X)]),
    }
    for what, call in calls.items():
        said_of = f"{what} = {said}{what.partition(': ')[2]}.detach()"
        value_error(lambda call=call: torch.func.jvp(call, (X,), (X,)), said_of)  # type: ignore[misc]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, X)  # type: ignore[no-untyped-call]
        value_error(lambda: calls["quantize: x"](dual), f"quantize: x = {said}")
        assert torch.equal(bs.quantize(dual.detach(), "mxfp8").dequantize(), q.dequantize())


def test_batches_that_pytorch_would_make_of_an_operator() -> None:
    w, batch = torch.ones(6, 70), X.clone().requires_grad_()
    whole = "need a plain tensor; pass the whole batch: x may have leading dimensions"
    with torch.no_grad():
        call = torch.vmap(lambda x: bs.linear(x, w, recipe="mxfp8"))
        value_error(lambda: call(X[:, None]), f"linear: x = batched by vmap; {whole}")
    value_error(lambda: call(batch[:, None]), f"linear: x = batched by vmap; {whole}")
    whole = "need a plain tensor; pass the whole batch: x may be [E, R, C] with batch_dims=1"
    for name, quantizer in {  # all slices would draw the same random bits
        "quantize": lambda x: bs.quantize(x, "mxfp8").codes,
        "quantize_dual": lambda x: bs.quantize_dual(x, "mxfp8", "mxfp8")[1].codes,
        "amax": lambda x: bs.amax(x, "nvfp4"),
    }.items():
        value_error(
            partial(torch.vmap(quantizer), X[None]), f"{name}: x = batched by vmap; {whole}"
        )
    weights = torch.vmap(lambda w: bs.quantize_weight(w, "mxfp8").operands[0])
    value_error(lambda: weights(X[None]), "quantize_weight: w = batched by vmap", "[E, N, K]")
    assert torch.vmap(lambda s: s * bs.amax(X, "nvfp4"))(torch.ones(3)).shape == (3,)
    y = bs.linear(batch, w, recipe="mxfp8")
    dy = torch.ones(3, *y.shape)
    grad = partial(torch.autograd.grad, y, batch, dy, is_grads_batched=True)
    value_error(grad, "linear: dy = a batch of gradients; need one at a time; leave is_grads_")


def test_high_precision_operands_share_a_dtype() -> None:
    half, bias = X.bfloat16(), torch.ones(6)
    w = torch.ones(6, 70)
    said = "dtype = torch.float32; need torch.bfloat16, as x is, in a recipe without quantized"
    value_error(lambda: bs.linear(half, w, recipe="bf16"), f"linear: w.{said}", "use .to()")
    value_error(lambda: bs.linear(half, w.bfloat16(), bias, recipe="bf16"), f"linear: bias.{said}")
    with torch.autocast("cpu", torch.bfloat16):
        assert bs.linear(half, w, bias, recipe="bf16").dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore")  # of PyTorch's tracer: sizes become constants
def test_a_trace_is_one_without_gradients() -> None:
    for recipe in ("mxfp8", "nvfp4"):
        model = torch.nn.Sequential(torch.nn.Linear(70, 64))
        bs.convert(model, recipe, seed=1)
        within = "linear: x = within torch.jit.trace; need torch.no_grad() in it"
        trace = partial(torch.jit.trace, model, X)
        value_error(trace, within)
        with torch.no_grad():
            assert torch.equal(trace()(X), model(X))
    experts, ends = torch.ones(2, 9, 70, requires_grad=True), torch.tensor([1, 4])

    def call(x: torch.Tensor) -> torch.Tensor:
        return bs.grouped_linear(x, experts, ends, "mxfp8")

    value_error(partial(torch.jit.trace, call, X), f"grouped_{within}")


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_trace_takes_no_quantized_weight(recipe: str) -> None:
    """It would lose the operands, a list of constants, after its first call."""
    model = torch.nn.Sequential(torch.nn.Linear(70, 64))
    bs.convert(model, recipe)
    said = "quantized_weight = given within torch.jit.trace; need none in it; leave quantized_wei"
    with torch.no_grad(), bs.quantized_weights(model):
        value_error(partial(torch.jit.trace, model, X), f"linear: {said}")
        exported = torch.export.export(model, (X,)).module()  # which the remedy names
        for _ in range(3):
            assert torch.equal(exported(X), model(X))
    experts, ends = torch.ones(2, 9, 70), torch.tensor([1, 4])
    kept = bs.quantize_weight(experts, recipe)

    def call(x: torch.Tensor) -> torch.Tensor:
        return bs.grouped_linear(x, experts, ends, recipe, quantized_weight=kept)

    value_error(partial(torch.jit.trace, call, X), f"grouped_linear: {said}")


def test_no_operator_passes_for_differentiable() -> None:
    """PyTorch would give what depends on an operand no gradient, and warn."""
    x = X.clone().requires_grad_()
    q = bs.quantize(x, "nvfp4", amax=x.abs().max())
    assert q.outer is not None
    learned = dataclasses.replace(q, outer=torch.nn.Parameter(q.outer))
    for y in (q.outer, bs.dequantize(learned), bs.matmul(q, learned, bias=x[:, 0])):
        assert not y.requires_grad


def test_wrong_types_that_the_operators_would_refuse_in_pages() -> None:
    q: Any = bs.quantize(X, "nvfp4")
    bad: Any
    for bad in (1.5, None, "-1", torch.tensor(-1)):
        name = "None; need an int" if bad is None else f"a {type(bad).__name__}; need an int"
        type_error(partial(bs.quantize, X, "nvfp4", axis=bad), "quantize: axis = " + name)
        type_error(partial(bs.amax, X, "nvfp4", axis=bad), "amax: axis = " + name)
        type_error(partial(bs.quantize_dual, X, "nvfp4", "nvfp4", batch_dims=bad), name)
    for bad in (16, "ab", (1.0, 2.0), torch.tensor([0, 16])):
        type_error(partial(bs.quantize, X, "nvfp4", origin=bad), "origin = a", "two ints")
    type_error(lambda: bs.quantize(X, "nvfp4", layout=None), "layout = None")  # type: ignore[arg-type]
    type_error(lambda: bs.quantize_dual(X, "nvfp4", "nvfp4", col_layout=3), "col_layout = an int")  # type: ignore[arg-type]
    type_error(lambda: bs.relayout(q, None), "relayout: layout = None")  # type: ignore[arg-type]
    type_error(lambda: bs.dequantize(q, "f"), "dequantize: dtype = a str; need a torch.dtype")  # type: ignore[arg-type]
    type_error(lambda: bs.matmul(q, q, out_dtype="bf16"), "matmul: out_dtype = a str")  # type: ignore[arg-type]
    type_error(lambda: bs.matmul(q, q, bias=[1.0]), "matmul: bias = a list; need a tensor, or None")  # type: ignore[arg-type]


def test_dtypes_have_their_names() -> None:
    q = bs.quantize(X, "nvfp4")
    value_error(
        lambda: bs.matmul(q, q, out_dtype=torch.float16), "out_dtype = float16; need float32"
    )


def test_entries_of_a_container() -> None:
    q = bs.quantize(X, "nvfp4")
    stored = (q.codes, q.scales, q.outer, q.spec)
    for rest, words in (
        ((-1, (4.0, 70)), ("shape = a float", "ints")),
        ((-1, ("4", 70)), ("shape = a str", "ints")),
        ((torch.tensor([-1, -1]), (4, 70)), ("axis = ", "an int")),
    ):
        with pytest.raises(TypeError, match="QuantizedTensor: ") as error:
            bs.QuantizedTensor(*stored, *rest)
        for word in words:
            assert word in str(error.value)


@pytest.mark.parametrize("axis", [0, 1, 2, -3])
def test_axis(axis: int) -> None:
    value_error(lambda: bs.quantize(X, "nvfp4", axis), f"quantize: axis = {axis}; need -1 or -2")
    value_error(lambda: bs.amax(X, "nvfp4", axis), f"amax: axis = {axis}; need -1 or -2")


def test_amax() -> None:
    for bad in (-1.0, -1e-30, -math.inf, math.nan):
        with pytest.raises(ValueError, match=r"^quantize: amax = .+; need 0 or more; amax is the"):
            bs.quantize(X, "nvfp4", amax=bad)
    value_error(
        lambda: bs.quantize(X, "nvfp4", amax=torch.tensor(-1.0)), "amax = -1; need 0 or more"
    )
    for large, got in (
        (1e300, "1e+300"),
        (2.0**128 - 2.0**103, "3.4028235677973366e+38"),
        (2.0**-150, "7.006492321624085e-46"),
        (10**400, "an int beyond any float"),
    ):
        said = f"quantize: amax = {got}; need 0, or from 1.4e-45 to"
        value_error(partial(bs.quantize, X, "nvfp4", amax=large), said)
    for least_and_most in (1.4e-45, 3.4028235e38):
        outer = bs.quantize(X, "nvfp4", amax=least_and_most).outer
        assert outer is not None
        assert outer > 0
    for infinite in (math.inf, torch.tensor(math.inf)):  # data, as in a tensor that holds it
        assert bs.quantize(X, "nvfp4", amax=infinite).dequantize().isnan().all()
    value_error(
        lambda: bs.quantize(X, "nvfp4", amax=torch.ones(2)), "amax.shape = [2]", "1 element"
    )
    value_error(
        lambda: bs.quantize(X, "nvfp4", amax=torch.ones(1).double()), "amax.dtype = float64"
    )
    value_error(lambda: bs.quantize(X, "mxfp8", amax=1.0), "quantize: amax", "no outer scale")
    x = X.reshape(2, 2, 70)
    negative = torch.tensor([1.0, -2.0])
    value_error(lambda: bs.quantize(x, "nvfp4", amax=negative, batch_dims=1), "amax = -2")
    value_error(
        lambda: bs.quantize_dual(X, "nvfp4", "mxfp8", col_amax=1.0),
        "quantize_dual: col_amax = given",
    )
    value_error(
        lambda: bs.quantize_dual(X, "nvfp4", "nvfp4", row_amax=torch.ones(3)),
        "quantize_dual: row_amax.shape = [3]",
    )


@pytest.mark.parametrize("amax", [math.nan, math.inf])
def test_an_amax_tensor_that_is_not_finite_is_data(amax: float) -> None:
    """Section 5 of the specification: the whole result is NaN, and codes are 0."""
    q = bs.quantize(X, "nvfp4", amax=torch.tensor(amax))
    assert q.outer is not None
    assert q.outer.isnan()
    assert q.scales.float().isnan().all()
    assert not q.codes.any()


def test_rng() -> None:
    value_error(lambda: bs.quantize(X, STOCHASTIC), "quantize: rng = none", "bs.Rng(seed, offset)")
    value_error(lambda: bs.quantize_dual(X, "nvfp4", STOCHASTIC), "quantize_dual: rng = none")
    w = torch.ones(4, 70, requires_grad=True)
    value_error(lambda: bs.linear(X, w), "linear: rng = None", "nvfp4 rounds stochastically")
    bs.linear(X, w.detach())  # nothing is drawn without a gradient
    seed = torch.tensor(1)
    args = (X, STOCHASTIC, -1, None)
    value_error(lambda: OPS.quantize(*args, seed, None, [], "linear", 0), "both or neither")
    value_error(
        lambda: OPS.quantize(*args, seed.int(), seed, [], "linear", 0), "seed.dtype = int32"
    )
    two = torch.zeros(2, dtype=torch.int64)
    value_error(lambda: OPS.quantize(*args, seed, two, [], "linear", 0), "offset = [2]; need one")


def test_origin() -> None:
    rng = bs.Rng(1)
    value_error(lambda: bs.quantize(X, "nvfp4", origin=(1,)), "origin = [1]; need [row, column]")
    value_error(lambda: bs.quantize(X, "nvfp4", origin=(-1, 0)), "origin = [-1, 0]", "0 or more")
    value_error(lambda: bs.quantize(X, STOCHASTIC, rng=rng, origin=(0, 8)), "multiples of 16")
    for far in (2**32, 2**63 - 1):  # the coordinates behind the second do not fit in int64_t
        value_error(partial(bs.quantize, X, STOCHASTIC, rng=rng, origin=(far, 0)), "below 2^32")
    value_error(lambda: bs.quantize_dual(X, "mxfp8", "nvfp4", origin=(8, 32)), "quantize_dual: ori")


def test_layouts_that_cannot_hold_an_operand() -> None:
    value_error(lambda: bs.quantize(X, "mxfp8", layout="mfma_16x16"), "packed FP4 codes")
    fits = "one of linear, mn_major for the fp32 scales of fp8_1x128"
    value_error(lambda: bs.quantize(X, "fp8_1x128", layout="nv_128x4"), fits)
    fits = "one of linear, nv_128x4, aiter_scale for the e4m3 scales of nvfp4"
    value_error(lambda: bs.quantize(X, "nvfp4", layout="mn_major"), fits)
    value_error(lambda: bs.relayout(bs.quantize(X, "nvfp4"), "mn_major"), fits)


def test_operands_that_cannot_be_multiplied() -> None:
    a = bs.quantize(X, "nvfp4")
    lengths = "matmul: contraction lengths of a and b = 70 (axis -1 of [4, 70]) and "
    value_error(lambda: bs.matmul(a, bs.quantize(X, "nvfp4", -2)), lengths + "4 (axis -2", "summed")
    value_error(lambda: bs.matmul(a, bs.quantize(X[:, :64], "nvfp4")), lengths + "64")
    transformed = bs.quantize(X, "nvfp4[hadamard=16]")
    value_error(lambda: bs.matmul(a, transformed), "matmul: b = nvfp4[hadamard", "Hadamard")
    value_error(lambda: bs.matmul(a, bs.quantize(X, "mxfp8")), "matmul: b = mxfp8", "blocks of 16")
    batch = bs.quantize(X.reshape(2, 2, 70), "nvfp4", batch_dims=1)
    value_error(lambda: bs.matmul(batch, batch), "matmul: a.batch_dims = 1; need 0")
    value_error(lambda: bs.matmul(a, a, bias=torch.ones(3)), "bias.shape = [3]", "[4]")


def damaged(**changes: Any) -> bs.QuantizedTensor:
    """A container that was tampered with after it was made."""
    q = bs.quantize(torch.ones(4, 64), "nvfp4")
    for name, value in changes.items():
        object.__setattr__(q, name, value)
    return q


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "codes cut": (dict(codes=torch.zeros(4, 31, dtype=torch.uint8)), "codes.shape = [4, 31]"),
    "codes dtype": (dict(codes=torch.zeros(4, 32)), "codes.dtype = float32"),
    "scales cut": (dict(scales=torch.zeros(4, 3).to(torch.float8_e4m3fn)), "scales.shape = [4, 3]"),
    "scales dtype": (dict(scales=torch.zeros(4, 4, dtype=torch.uint8)), "scales.dtype = uint8"),
    "outer gone": (dict(outer=None), "outer.shape = [0]"),
    "outer dtype": (dict(outer=torch.ones((), dtype=torch.float64)), "outer.dtype = float64"),
    "outer many": (dict(outer=torch.ones(2)), "outer.shape = [2]"),
    "shape": (dict(shape=(5, 64)), "codes.shape = [4, 32]; need [5, 32]"),
    "spec": (dict(spec=bs.spec("mxfp8")), "codes.dtype = uint8; need float8_e4m3fn"),
    "layout": (dict(layout="nv_128x4"), "scales.shape = [4, 4]; need [512]"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_operand(what: str) -> None:
    changes, words = DAMAGE[what]
    q, good = damaged(**changes), bs.quantize(torch.ones(4, 64), "nvfp4")
    value_error(q.dequantize, "dequantize: ", words)
    value_error(lambda: bs.matmul(q, good), "matmul: ", words)
    value_error(lambda: bs.matmul(good, q), "matmul: ", words)
    if what == "outer gone":
        words = "outer = None; need a tensor"
    kind = TypeError if what == "outer gone" else ValueError
    name = words.split(";")[0].replace("float", "torch.float").replace("uint8", "torch.uint8")
    refused(kind, lambda: dataclasses.replace(q), "QuantizedTensor: ", name)


def test_a_container_that_says_nonsense() -> None:
    value_error(lambda: dataclasses.replace(damaged(axis=1)), "QuantizedTensor: axis = 1")
    value_error(lambda: dataclasses.replace(damaged(layout="flat")), "layout.name = 'flat'")
    value_error(lambda: dataclasses.replace(damaged(batch_dims=1)), "shape = [4, 64]", "[E, R, C]")
    type_error(lambda: dataclasses.replace(damaged(spec="nvfp4")), "spec = a str; need a Spec")
    q = bs.quantize(X, "mxfp8")
    value_error(
        lambda: dataclasses.replace(q, outer=torch.ones(())), "need None: mxfp8 has no outer"
    )
    value_error(damaged(axis=7).dequantize, "dequantize: axis = 7")


def test_operators_check_for_themselves() -> None:
    q = bs.quantize(X, "nvfp4")
    args = (q.codes, q.scales, q.outer, "nvfp4")
    value_error(lambda: OPS.dequantize(*args, -1, [70], "linear", torch.float32), "shape = [70]",
                "[R, C] or [E, R, C]")  # fmt: skip
    value_error(lambda: OPS.dequantize(*args, -1, [-4, 70], "linear", torch.float32), "[-4, 70]")
    side = (*args, "linear")
    value_error(lambda: OPS.matmul(*side, -4, *side, 4, 70, None, torch.float32), "= -4")
    value_error(
        lambda: OPS.matmul(*side, 4, *side, 4, 71 + 16, None, torch.float32), "a_codes.shape"
    )


def test_convert() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    nothing = "convert: model = ReLU with nothing to convert"
    value_error(lambda: bs.convert(nn.ReLU(), "nvfp4"), nothing, "it has no parameters")
    value_error(lambda: bs.convert(nn.Conv1d(1, 1, 1), "nvfp4"), "Conv1d is not nn.Linear")
    value_error(lambda: bs.convert(model, "nvfp4", skip=["0"]), "nothing to convert", "skip '0'")
    value_error(lambda: bs.convert(model, "nvpf4"), "recipe: name = 'nvpf4'")
    value_error(lambda: bs.convert(model, "nvfp4", rules={"0": "nvpf4"}), "recipe: name = 'nvpf4'")
    value_error(lambda: bs.convert(model, "nvfp4", rules={"lm_head": None}), "rules = 'lm_head'",
                "found in the name of a layer", "the names are 0")  # fmt: skip
    value_error(lambda: bs.convert(model, "nvfp4", rules={"(": None}), "rules = '('", "regular")
    value_error(lambda: bs.convert(model, "nvfp4", skip=["lm_head"]), "skip = 'lm_head'")
    type_error(lambda: bs.convert(model, "nvfp4", skip="0"), "skip = a str", "skip=['0']")
    type_error(lambda: bs.convert([model], "nvfp4"), "model = a list; need an nn.Module")  # type: ignore[arg-type]
    type_error(lambda: bs.convert(model, "nvfp4", seed="1"), "seed = a str; need an int")  # type: ignore[arg-type]
    type_error(lambda: bs.convert(model, "nvfp4", rules=["0"]), "rules = a list; need a dict")  # type: ignore[arg-type]
    type_error(
        lambda: bs.convert(model, "nvfp4", rules={0: None}),  # type: ignore[dict-item]
        "rules = an int; need regular expressions",
    )
    type_error(lambda: bs.convert(model, "nvfp4", skip=0), "skip = an int; need a list of names")  # type: ignore[arg-type]
    type_error(lambda: bs.convert(model, "nvfp4", skip=[0]), "skip = an int; need names")  # type: ignore[list-item]
    type_error(lambda: bs.revert(None), "revert: model = None; need an nn.Module")  # type: ignore[arg-type]
    assert type(model[0]) is nn.Linear  # nothing was changed
    assert not model._forward_pre_hooks


def test_state_of_a_model_that_is_not_converted() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    for name, call in {
        "attach": lambda: bs.attach(model, optimizer),
        "advance": lambda: bs.advance(model),
        "rng_state": lambda: bs.rng_state(model),
        "set_step": lambda: bs.set_step(model, 1),
    }.items():
        value_error(call, f"{name}: model = Linear, which is not converted", "bs.convert(model")
    bs.convert(model, "nvfp4")
    value_error(lambda: bs.set_step(model, -1), "set_step: step = -1; need 0 or more")
    value_error(lambda: bs.set_step(model, 2**47), "below 2^47")
    type_error(lambda: bs.set_step(model, 1.5), "set_step: step = a float")  # type: ignore[arg-type]
    type_error(lambda: bs.set_step(model, 1, seed="0"), "set_step: seed = a str")  # type: ignore[arg-type]
    said = "set_step: seed = 7; need 0, the model's; call bs.convert(model, recipe, seed=7) first"
    value_error(lambda: bs.set_step(model, **{"step": 1, "forward": 2, "seed": 7}), said)
    assert bs.rng_state(model) == {"step": 0, "forward": 0, "seed": 0}
    type_error(lambda: bs.attach(model, model), "optimizer = a Linear", "bs.advance(model)")  # type: ignore[arg-type]


def test_a_missing_library_says_what_to_do(tmp_path: Any) -> None:
    """The package without its compiled part: one line, and the remedy."""
    import blockscale._core as core

    code = f"""
import pathlib
real = pathlib.Path.exists
pathlib.Path.exists = lambda p: False if p.name == {core._LIBRARY.name!r} else real(p)
import blockscale
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: blockscale: libblockscale_torch.so = not built; need it in"
    )
    assert "make setup" in last
