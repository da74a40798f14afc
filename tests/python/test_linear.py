"""`bs.linear` against the composition of its pieces, bit for bit; and as PyTorch code uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import blockscale as bs
import pytest
import torch
from bits import QUANTIZED, RNG, assert_same_operand
from linears import Case, assert_same, by_hand, make, run
from models import BANDS
from torch.autograd import forward_ad
from torch.nn import functional


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_is_the_composition_of_its_pieces(recipe: str, dtype: torch.dtype) -> None:
    case = make(dtype=dtype, bias=dtype != torch.float16)
    assert_same(run(case, recipe), by_hand(case, bs.recipe(recipe), dtype))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_mixed_dtypes(recipe: str) -> None:
    """A BF16 input and FP32 parameters: y and dx are BF16, dw and db FP32."""
    case = make(dtype=torch.bfloat16, w_dtype=torch.float32)
    got = run(case, recipe)
    assert [t.dtype for t in got if t is not None] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert_same(got, by_hand(case, bs.recipe(recipe), torch.bfloat16))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_error_is_that_of_the_format(recipe: str) -> None:
    case = make(lead=(128,), n=128, k=128)
    want = run(case, "bf16")
    low, high = BANDS[recipe]
    for name, g, w in zip(("y", "dx", "dw"), run(case, recipe), want, strict=False):
        assert g is not None
        assert w is not None
        error = ((g - w).norm() / w.norm()).item()
        assert low < error < high, (name, error)


def test_bf16_is_functional_linear() -> None:
    case = make()
    y = functional.linear(case.x, case.w, case.bias)
    inputs = [t for t in case[:3] if t is not None]
    assert_same(run(case, "bf16"), [y, *torch.autograd.grad(y, inputs, case.dy)])


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 1, 3, 2), (0,), (3, 0)])
def test_leading_dimensions(lead: tuple[int, ...]) -> None:
    case = make(lead=lead)
    y, dx, dw, db = run(case, "nvfp4")
    assert y is not None
    assert dx is not None
    assert dw is not None
    assert db is not None
    assert y.shape == (*lead, 37)
    assert dx.shape == case.x.shape
    if 0 in lead:
        assert not dw.any()
        assert not db.any()
        return
    flat = Case(case.x.detach().reshape(-1, 70).requires_grad_(), case.w, case.bias,
                case.dy.reshape(-1, 37))  # fmt: skip
    fy, fdx, fdw, fdb = run(flat, "nvfp4")
    assert fy is not None
    assert fdx is not None
    assert_same([y, dx, dw, db], [fy.reshape(y.shape), fdx.reshape(dx.shape), fdw, fdb])


@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_the_output_may_be_changed_in_place(lead: tuple[int, ...]) -> None:
    """It is no view: FSDP's hooks would be lost on one."""
    case = make(lead=lead)
    y = bs.linear(case.x, case.w, case.bias, "mxfp8")
    assert not y._is_view()
    want = torch.autograd.grad(y.clone().relu(), case.w, case.dy, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y.relu_(), case.w, case.dy)[0], want)


@pytest.mark.parametrize(("n", "k"), [(0, 70), (37, 0), (1, 1)])
def test_degenerate_extents(n: int, k: int) -> None:
    case = make(lead=(3,), n=n, k=k)
    y, dx, dw, _ = run(case, "nvfp4")
    assert y is not None
    assert dx is not None
    assert dw is not None
    assert (y.shape, dx.shape, dw.shape) == ((3, n), (3, k), (n, k))
    if n == 0:
        assert not dx.any()
    if k == 0:
        assert case.bias is not None
        assert torch.equal(y, case.bias.expand(3, n))


def test_any_strides() -> None:
    """Non-contiguous inputs and gradients give what their copies give."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(70, 2, 22, generator=g)[:, :, ::2].permute(1, 2, 0)
    w = torch.randn(70, 74, generator=g).t()[::2]
    dy = torch.randn(37, generator=g).expand(2, 11, 37)
    views = Case(x.requires_grad_(), w.requires_grad_(), None, dy)
    x2, w2 = (t.detach().clone().contiguous().requires_grad_() for t in (x, w))
    copies = Case(x2, w2, None, dy.clone())
    assert not x.is_contiguous()
    assert_same(run(views, "nvfp4"), run(copies, "nvfp4"))


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_makes_only_the_gradients_that_are_asked_for(wanted: tuple[bool, bool]) -> None:
    full = make()
    want = run(full, "nvfp4")
    x, w = (t.detach().requires_grad_(on) for t, on in zip(full[:2], wanted, strict=True))
    case = Case(x, w, full.bias, full.dy)
    got = run(case, "nvfp4")
    keep = (True, *wanted, True)
    assert_same(got, [t if on else None for t, on in zip(want, keep, strict=True)])


MIXES = {
    "fprop high precision": dict(fprop_x=None, fprop_w=None),
    "weight only": dict(fprop_x=None, dgrad_dy=None),
    "wgrad high precision": dict(wgrad_x=None, wgrad_dy=None),
    "one operand of wgrad": dict(wgrad_dy=None),
    "all but fprop_w": dict(fprop_x=None, dgrad_dy=None, dgrad_w=None, wgrad_dy=None, wgrad_x=None),
}


@pytest.mark.parametrize("mix", MIXES)
def test_high_precision_operands(mix: str) -> None:
    """A GEMM with an operand in high precision is torch's, on what the other one decodes to."""
    recipe = bs.recipe("mxfp8").replace(**MIXES[mix])
    case = make(lead=(22,))
    assert case.bias is not None

    def value(t: torch.Tensor, spec: bs.Spec | None, axis: int) -> torch.Tensor:
        t = t.detach()
        return t if spec is None else bs.quantize(t, spec, axis).dequantize(torch.float32)

    got = run(case, recipe)
    r = recipe
    want = [
        value(case.x, r.fprop_x, -1) @ value(case.w, r.fprop_w, -1).t() + case.bias,
        value(case.dy, r.dgrad_dy, -1) @ value(case.w, r.dgrad_w, -2),
        value(case.dy, r.wgrad_dy, -2).t() @ value(case.x, r.wgrad_x, -2),
    ]
    for g, w in zip(got, want, strict=False):
        assert g is not None
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-4)


def test_stochastic_forward_operands_draw_in_forward() -> None:
    recipe = bs.recipe("nvfp4").replace(fprop_x="nvfp4[rounding=stochastic]")
    case = make()
    assert_same(run(case, recipe), by_hand(case, recipe, torch.float32))
    one, other = (bs.linear(case.x, case.w, recipe=recipe, rng=bs.Rng(1, o)) for o in (0, 1))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """The output has autocast's dtype; parameters are quantized from the dtype they have."""
    case = make()
    with torch.autocast("cpu", dtype):
        y = bs.linear(case.x, case.w, case.bias, "nvfp4", rng=RNG)
    assert y.dtype == dtype
    inputs = [t for t in case[:3] if t is not None]
    got = [y, *torch.autograd.grad(y, inputs, case.dy.to(dtype))]
    assert_same(got, by_hand(case, bs.recipe("nvfp4"), dtype))


@pytest.fixture
def flush_denormal() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush denormals")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flush_denormal")
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4", "amdfp4"])
def test_flush_to_zero_does_not_change_bits(recipe: str) -> None:
    """FP8's blocks have none to flush: by the floor of their scales, no product but 0 is below
    2^-115."""
    case = make(seed=5)
    x, w = ((t.detach() * 2.0**-64).requires_grad_() for t in (case.x, case.w))
    tiny = Case(x, w, None, case.dy * 2.0**-64)

    def results() -> tuple[list[torch.Tensor | None], torch.Tensor]:
        return run(tiny, recipe), (x[0, 0] * w).sum(-1).detach()

    flushed, naive_flushed = results()
    torch.set_flush_denormal(False)
    whole, naive = results()
    assert_same(flushed, whole)
    assert not torch.equal(naive_flushed, naive)
    smallest = torch.finfo(torch.float32).smallest_normal
    for t in whole[:3]:
        assert t is not None
        assert ((t != 0) & (t.abs() < smallest)).any()


@pytest.mark.usefixtures("flush_denormal")
@pytest.mark.parametrize("amax", [1.4e-45, 2.0**-130, 2.0**-126 - 2.0**-151, 2.0**-149 * 1.5])
def test_flush_to_zero_does_not_change_an_amax(amax: float) -> None:
    x = torch.full((1, 16), 1e-39)
    as_number = bs.quantize(x, "nvfp4", amax=amax)
    torch.set_flush_denormal(False)
    as_tensor = bs.quantize(x, "nvfp4", amax=torch.tensor(amax))
    assert_same_operand(as_number, as_tensor)
    assert as_number.outer is not None
    assert as_number.outer > 0


def test_nan_is_never_hidden() -> None:
    case = make()
    with torch.no_grad():
        case.x[0, 3, 5] = float("nan")
    y, dx, dw, _ = run(case, "mxfp8")
    assert y is not None
    assert dx is not None
    assert dw is not None
    assert y[0, 3].isnan().all()
    assert y.isnan().sum() == 37
    assert not dx.isnan().any()
    assert dw[:, 5].isnan().all()
    y, _, dw, _ = run(case, "nvfp4")
    assert y is not None
    assert dw is not None
    assert y.isnan().all()  # one amax for the whole tensor
    assert dw.isnan().all()


def test_gradients_accumulate_over_forwards_of_different_offsets() -> None:
    """Two forwards before their backwards: each backward uses its own forward's offset, though
    the offset tensor has moved on in place."""
    offset = torch.tensor(7)
    x = [make(seed=s) for s in (1, 2)]
    w = x[0].w
    ys = []
    for case in x:
        ys.append(bs.linear(case.x, w, recipe="nvfp4", rng=bs.Rng(5, offset)))
        offset.add_(1)
    got = [torch.autograd.grad(y, w, case.dy)[0] for y, case in zip(ys, x, strict=True)]
    for i, case in enumerate(x):
        y = bs.linear(case.x, w, recipe="nvfp4", rng=bs.Rng(5, 7 + i))
        assert torch.equal(got[i], torch.autograd.grad(y, w, case.dy)[0])


def test_forward_mode_derivatives_are_refused() -> None:
    """The operator alone would drop the tangent, which then counts as zero."""
    x, w, ends = torch.randn(3, 70), torch.randn(5, 70), torch.tensor([3])

    def dense(x: torch.Tensor) -> torch.Tensor:
        return bs.linear(x, w, recipe="mxfp8")

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return bs.grouped_linear(x, w[None], ends, recipe="mxfp8")

    for call in (dense, grouped):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)  # type: ignore[no-untyped-call]
            with pytest.raises(ValueError, match="forward-mode derivatives are not implemented"):
                call(dual)
            assert torch.equal(call(x), call(x.clone().requires_grad_()))


def test_a_layer_in_high_precision_refuses_what_is_no_tensor_as_pytorch_does() -> None:
    with pytest.raises(TypeError, match="must be Tensor, not NoneType"):
        bs.nn.Linear(4, 4, recipe="bf16")(None)


def test_the_layer_is_the_function() -> None:
    case = make()
    layer = bs.nn.Linear(70, 37, recipe="nvfp4", seed=9)
    layer.load_state_dict({"weight": case.w, "bias": case.bias})
    y = layer(case.x)
    dw = torch.autograd.grad(y, layer.weight, case.dy)[0]
    from blockscale.rng import layer_seed

    want = bs.linear(case.x, case.w, case.bias, "nvfp4", rng=bs.Rng(layer_seed(9, ""), 0))
    assert torch.equal(y, want)
    assert torch.equal(dw, torch.autograd.grad(want, case.w, case.dy)[0])
    assert "recipe=nvfp4" in repr(layer)
    assert isinstance(layer, torch.nn.Linear)


Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
REFUSED = pytest.raises(ValueError, match=r"^(grouped_)?linear: create_graph = True; need False: ")


def layers() -> dict[str, Layer]:
    """Functions of x and w whose second derivatives are refused."""
    ends = torch.tensor([4, 13])

    def dense(recipe: str) -> Layer:
        return lambda x, w: bs.linear(x, w, None, recipe, RNG)

    def grouped(recipe: str) -> Layer:
        return lambda x, w: bs.grouped_linear(x, torch.stack((w, w)), ends, recipe, RNG)

    def accumulating(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return bs.linear(x, w * 1, None, "mxfp8", accumulate_into=torch.zeros(w.shape))

    return {
        **{recipe: dense(recipe) for recipe in QUANTIZED},
        "grouped": grouped("nvfp4"),
        "grouped bf16": grouped("bf16"),
        "accumulating": accumulating,
    }


@pytest.mark.parametrize("name", layers())
def test_second_derivatives_are_refused(name: str) -> None:
    """By whatever they are taken, and for whatever: seen later, they would be 0 in part."""
    x, w, _, dy = make(lead=(13,))
    functions = torch.autograd.functional

    def loss(x: torch.Tensor) -> torch.Tensor:
        return layers()[name](x, w).square().sum()

    for of in (functions.hvp, functions.vhp, functions.jvp):
        with REFUSED:
            of(loss, x, torch.ones_like(x))  # type: ignore[no-untyped-call]
    with REFUSED:
        functions.hessian(loss, x)  # type: ignore[no-untyped-call]
    for gradient in (dy, dy.clone().requires_grad_()):  # constant, as after y.sum(), or not
        with REFUSED:
            torch.autograd.grad(layers()[name](x, w), x, gradient, create_graph=True)


def test_a_gradient_penalty_and_an_inner_step_are_refused() -> None:
    """Behind other layers: the training of critics, and of meta-learners."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32), torch.nn.Tanh())
    bs.convert(model, "mxfp8")
    x = torch.randn(8, 32, requires_grad=True)
    with REFUSED:
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with REFUSED:
        torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True)


def test_a_tangent_of_the_bias_is_refused() -> None:
    x, w, bias, _ = make()
    assert bias is not None
    refused = pytest.raises(ValueError, match="linear: bias = a dual tensor; need no tangent")
    with forward_ad.dual_level(), refused:
        dual = forward_ad.make_dual(bias, torch.ones_like(bias))  # type: ignore[no-untyped-call]
        bs.linear(x, w, dual, "mxfp8")


@pytest.mark.parametrize("recipe", bs.recipe_names())
def test_operands_that_lie_by_columns(recipe: str, device: torch.device) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(128, 256, generator=g).bfloat16().to(device)
    w = torch.randn(192, 256, generator=g).bfloat16().to(device)
    results: list[list[torch.Tensor]] = []
    for turned in (False, True):
        a, b = ((t.t().contiguous().t() if turned else t).detach().requires_grad_() for t in (x, w))
        y = bs.linear(a, b, None, recipe, bs.Rng(1))
        results.append([y.detach(), *torch.autograd.grad(y, (a, b), torch.ones_like(y))])
        if recipe == "bf16" and turned:  # PyTorch's, which may add in another order then
            same = torch.nn.functional.linear(a, b)
            results[0] = [same, *torch.autograd.grad(same, (a, b), torch.ones_like(y))]
    for name, got, want in zip(("y", "dx", "dw"), *results, strict=True):
        assert torch.equal(got, want), name
