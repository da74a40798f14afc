"""`bs.quantize_weight`: calls that are given a quantized weight do what they do without, bit for
bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import blockscale as bs
import pytest
import torch
from bits import RNG, assert_same, normal_bf16

RECIPES = {
    **{name: bs.recipe(name) for name in bs.recipe_names()},
    "stochastic weight": bs.recipe("nvfp4").replace(
        fprop_w="nvfp4[block=16x16,rounding=stochastic]",
        dgrad_w="nvfp4[block=16x16,rounding=stochastic]",
    ),
    "dgrad in high precision": bs.recipe("mxfp8").replace(dgrad_dy=None, dgrad_w=None),
    "fprop in high precision": bs.recipe("mxfp8").replace(fprop_x=None, fprop_w=None),
}


class Case(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    dy: torch.Tensor
    call: Callable[..., torch.Tensor]  # (x, w, recipe, **more)


def make(grouped: bool, device: torch.device | str = "cpu") -> Case:
    """Extents that no block divides, and an empty group."""
    x = normal_bf16(53, 70).to(device).requires_grad_()
    dy = normal_bf16(53, 37, seed=1).to(device)
    if not grouped:
        w = normal_bf16(37, 70, seed=2).to(device).requires_grad_()
        bias = normal_bf16(37, seed=3).to(device)
        return Case(x, w, dy, lambda x, w, r, **more: bs.linear(x, w, bias, r, RNG, **more))
    w = normal_bf16(3, 37, 70, seed=2).to(device).requires_grad_()
    ends = torch.tensor([20, 20, 50], device=device)
    return Case(x, w, dy, lambda x, w, r, **more: bs.grouped_linear(x, w, ends, r, RNG, **more))


def run(case: Case, recipe: bs.Recipe, **more: Any) -> list[torch.Tensor]:
    """[y, dx, dw]."""
    y = case.call(case.x, case.w, recipe, **more)
    return [y, *torch.autograd.grad(y, (case.x, case.w), case.dy)]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_same_bits(name: str, grouped: bool, device: torch.device) -> None:
    recipe, case = RECIPES[name], make(grouped, device)
    want = run(case, recipe)
    kept = bs.quantize_weight(case.w, recipe, RNG)
    made = sum(s is not None for s in (recipe.fprop_w, recipe.dgrad_w))
    assert len(kept.operands) == made
    for _ in range(2):
        assert_same(run(case, recipe, quantized_weight=kept), want)
    with torch.no_grad():
        forward = bs.quantize_weight(case.w, recipe, RNG, backward=False)
        assert torch.equal(case.call(case.x, case.w, recipe, quantized_weight=forward), want[0])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("keep_x", [False, True])
@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp4", "nvfp4", "dgrad in high precision"])
def test_the_backward_quantizes_it_again(
    name: str, keep_x: bool, grouped: bool, device: torch.device
) -> None:
    """Where it is not kept; one made ahead is read all the same."""
    recipe, case = RECIPES[name], make(grouped, device)
    want, lean = run(case, recipe), recipe.replace(keep_w=False, keep_x=keep_x)
    assert_same(run(case, lean), want)
    kept = bs.quantize_weight(case.w, recipe)
    assert_same(run(case, lean, quantized_weight=kept), want)
    gradients = []
    for how in (recipe, lean):
        into = torch.zeros_like(case.w, dtype=torch.float32)
        y = case.call(case.x, case.w, how, accumulate_into=into)
        gradients.append([torch.autograd.grad(y, case.x, case.dy)[0], into])
    assert_same(*gradients)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_blockwise", "nvfp4"])
def test_the_weight_itself_is_not_read(recipe: str, grouped: bool) -> None:
    case = make(grouped)
    want = run(case, bs.recipe(recipe))
    kept = bs.quantize_weight(case.w, recipe, RNG)
    with torch.no_grad():
        case.w.fill_(float("nan"))
    assert_same(run(case, bs.recipe(recipe), quantized_weight=kept), want)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_blockwise", "mxfp8", "nvfp4"])
def test_micro_batches_accumulate(recipe: str, grouped: bool) -> None:
    """Into `.grad`, and into a buffer."""
    case = make(grouped)
    gradients: list[torch.Tensor] = []
    buffers: list[torch.Tensor] = []
    for ahead in (False, True):
        w = case.w.detach().requires_grad_()
        more = {"quantized_weight": bs.quantize_weight(w, recipe, RNG)} if ahead else {}
        main_grad = torch.zeros(w.shape)
        for scale in (1, 2):
            x = case.x * scale
            y = case.call(x, w, recipe, **more)
            into = case.call(x, w, recipe, accumulate_into=main_grad, **more)
            torch.autograd.backward((y, into), (case.dy, case.dy))
        assert w.grad is not None
        gradients.append(w.grad)
        buffers.append(main_grad)
    assert_same(gradients[:1], gradients[1:])
    assert_same(buffers[:1], buffers[1:])
    assert buffers[0].any()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_blockwise", "nvfp4"])
def test_compiled(recipe: str, grouped: bool) -> None:
    torch._dynamo.reset()
    case = make(grouped)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kept = bs.quantize_weight(w, recipe, RNG)
        halves = (x * scale for scale in (1, 2))
        first, second = (case.call(half, w, recipe, quantized_weight=kept) for half in halves)
        return first + second

    ys = [f(case.x, case.w), torch.compile(f, fullgraph=True, backend="aot_eager")(case.x, case.w)]
    grads = [torch.autograd.grad(y, (case.x, case.w), case.dy) for y in ys]
    assert_same([ys[0], *grads[0]], [ys[1], *grads[1]])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_saved_and_loaded(name: str, grouped: bool) -> None:
    """By pickle, and by torch.load with its usual care: it is data."""
    recipe, case = RECIPES[name], make(grouped)
    want = run(case, recipe)
    kept = bs.quantize_weight(case.w, recipe, RNG)
    file = io.BytesIO()
    torch.save({"w": kept}, file)
    file.seek(0)
    for back in (torch.load(file)["w"], pickle.loads(pickle.dumps(kept)), copy.deepcopy(kept)):
        assert (back.recipe, str(back.recipe)) == (kept.recipe, str(kept.recipe))
        assert (back.shape, back.backward, back.device) == (kept.shape, True, kept.device)
        assert_same(run(case, recipe, quantized_weight=back), want)


def test_moved() -> None:
    kept = bs.quantize_weight(make(False).w, "nvfp4")
    assert kept.device == torch.device("cpu")
    there = kept.to("meta")
    assert there.device == torch.device("meta")
    assert [t.shape for t in there.operands] == [t.shape for t in kept.operands]
    assert bs.quantize_weight(make(False).w, "bf16").device is None  # nothing lies anywhere


def test_what_does_not_belong() -> None:
    case = make(False)
    kept = bs.quantize_weight(case.w, "mxfp8")

    def refused(text: str, w: torch.Tensor, recipe: str, kept: bs.QuantizedWeight) -> None:
        with pytest.raises(ValueError, match=text):
            bs.linear(case.x, w, None, recipe, RNG, quantized_weight=kept)

    name = "linear: quantized_weight = "
    refused(f"{name}of recipe mxfp8; need recipe nvfp4", case.w, "nvfp4", kept)
    refused(f"{name}of recipe mxfp8; need recipe bf16", case.w, "bf16", kept)
    refused(rf"{name}of a weight \[37, 70\]; need that of w \[36, 70\]", case.w[1:], "mxfp8", kept)
    forward = bs.quantize_weight(case.w, "mxfp8", backward=False)
    refused(f"{name}without backward", case.w, "mxfp8", forward)
    refused("linear: quantized_weight.device = meta; need ", case.w, "mxfp8", bs.quantize_weight(
        case.w.to("meta"), "mxfp8"))  # fmt: skip
    for wrong in (torch.float32, "foo"):
        with pytest.raises(TypeError, match=r"QuantizedWeight.to: device = .*; need a device"):
            kept.to(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quantize_weight: rng = None; need a key"):
        bs.quantize_weight(case.w, RECIPES["stochastic weight"])
    with pytest.raises(TypeError, match="quantize_weight: w = a list; need a tensor"):
        bs.quantize_weight([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"quantize_weight: w.dim\(\) = 1; need 2"):
        bs.quantize_weight(case.w[0], "mxfp8")
    with pytest.raises(ValueError, match=r"quantize_weight: w.dtype = torch.float64"):
        bs.quantize_weight(case.w.double(), "mxfp8")


# --- of a whole model -----------------------------------------------------------------------------


def converted(recipe: str | bs.Recipe, device: torch.device | str = "cpu") -> torch.nn.Sequential:
    torch.manual_seed(0)
    parts = (torch.nn.Linear(70, 37), torch.nn.GELU(), torch.nn.Linear(37, 19, bias=False))
    model = torch.nn.Sequential(*parts).to(device)
    bs.convert(model, recipe, seed=5)
    return model


def micro_batches(
    model: torch.nn.Module,
    device: torch.device | str = "cpu",
    call: Callable[..., torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """The results and the sums of gradients of two micro-batches."""
    ys = []
    for seed in (0, 1):
        x = normal_bf16(11, 70, seed=seed).to(device).float().requires_grad_()
        y = (call or model)(x)
        y.square().sum().backward()
        assert x.grad is not None
        ys += [y.detach(), x.grad]
    return [*ys, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", RECIPES)
def test_weights_of_a_model_are_quantized_once(name: str, device: torch.device) -> None:
    models = [converted(RECIPES[name], device) for _ in range(2)]
    want = micro_batches(models[0], device)
    with bs.quantized_weights(models[1]):
        got = micro_batches(models[1], device)
    assert_same(got, want)
    layers = [layer for layer in models[1] if isinstance(layer, bs.nn.Linear)]
    with bs.quantized_weights(models[1], backward=False), torch.no_grad():
        x = normal_bf16(11, 70).to(device).float()
        assert torch.equal(models[1](x), models[0](x))
        kept = [layer._kept is not None for layer in layers]
    assert kept == [name != "stochastic weight"] * 2
    assert not any("_kept" in vars(layer) for layer in layers)


def test_a_model_reads_what_was_made_of_its_weights() -> None:
    model = converted("nvfp4")
    x = normal_bf16(11, 70).float()
    with torch.no_grad(), bs.quantized_weights(model):
        want = model(x)
        for p in model.parameters():
            if p.dim() == 2:
                p.data.fill_(float("nan"))  # past its version
        assert torch.equal(model(x), want)


def test_backward_is_a_bool() -> None:
    with pytest.raises(TypeError, match=r"^quantized_weights: backward = an int; need a bool"):
        bs.quantized_weights(converted("nvfp4"), backward=0).__enter__()  # type: ignore[arg-type]


def test_a_weight_that_changes_within_raises() -> None:
    model = converted("mxfp8")
    x = normal_bf16(11, 70).float()
    with bs.quantized_weights(model):
        with torch.no_grad():
            model.get_submodule("0").get_parameter("weight").mul_(2)
        with pytest.raises(ValueError, match=r"^quantized_weights: 0.weight = changed; need"):
            model(x)
    model(x)
    with bs.quantized_weights(model):  # past its version, but elsewhere
        model.get_submodule("0").get_parameter("weight").data = normal_bf16(37, 70).float()
        with pytest.raises(ValueError, match=r"^quantized_weights: 0.weight = changed; need"):
            model(x)
    others = {name: p.detach().clone() for name, p in model.named_parameters()}
    with bs.quantized_weights(model), pytest.raises(ValueError, match="weight = another tensor"):
        torch.func.functional_call(model, others, (x,))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_within_is_refused_before_it_does_anything(compiled: bool) -> None:
    """Compiled layers do not look whether their weight has changed."""
    torch._dynamo.reset()
    model = converted("mxfp8")
    call = torch.compile(model, backend="eager") if compiled else model
    x = normal_bf16(11, 70).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    other = torch.nn.Parameter(torch.ones(3))
    others = torch.optim.SGD([other], lr=0.5)
    with bs.quantized_weights(model):
        call(x).sum().backward()
        said = "^quantized_weights: optimizer = a step of its weights; need weights that stay"
        with pytest.raises(ValueError, match=said):
            optimizer.step()
        other.sum().backward()  # type: ignore[no-untyped-call]
        others.step()  # of other weights
    assert_same([p.detach() for p in model.parameters()], before)
    assert torch.equal(other, torch.full((3,), 0.5))
    optimizer.step()
    assert not torch.equal(model.get_submodule("0").get_parameter("weight"), before[0])


def test_a_step_that_leaves_frozen_weights_alone_is_none_of_them() -> None:
    model = converted("mxfp8")
    model.requires_grad_(False)
    adapter = torch.nn.Parameter(torch.ones(70))
    optimizer = torch.optim.AdamW([*model.parameters(), adapter], lr=0.1)
    with bs.quantized_weights(model):
        model(normal_bf16(11, 70).float() * adapter).sum().backward()
        optimizer.step()
    assert not torch.equal(adapter, torch.ones(70))


def test_copies_made_within_are_models_like_others() -> None:
    model = converted("mxfp4")
    x = normal_bf16(11, 70).float()
    with bs.quantized_weights(model):
        copied = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        want = model(x)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert torch.equal(other(x), want)
        with bs.quantized_weights(other):
            assert torch.equal(other(x), want)


def test_copies_of_all_attributes_are_models_like_others() -> None:
    """As parametrizations copy a module, and classes that say themselves how."""

    class Own(torch.nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Own:
            made = memo[id(self)] = type(self).__new__(type(self))
            made.__dict__ = copy.deepcopy(self.__dict__, memo)
            return made

    model = torch.nn.Sequential(Own(70, 37), torch.nn.Linear(37, 19))
    x = normal_bf16(11, 70).float()
    bs.convert(model, "mxfp8")
    torch.nn.utils.parametrize.register_parametrization(model[1], "bias", torch.nn.Identity())
    with bs.quantized_weights(model):
        want = model(x)
        other = copy.deepcopy(model)
    assert torch.equal(other(x), want)
    with bs.quantized_weights(other):
        assert torch.equal(other(x), want)


def test_a_shallow_copy_keeps_no_operands() -> None:
    """It has the weight, but nothing would remove its operands: they would outlast the context."""
    model, x = converted("mxfp8"), normal_bf16(11, 70).float()
    layer = model.get_submodule("0")
    with bs.quantized_weights(model):
        assert "_kept" in vars(layer)
        other = copy.copy(layer)
    assert "_kept" not in vars(other)
    with torch.no_grad():
        layer.get_parameter("weight").mul_(2)
    assert torch.equal(other(x), layer(x))


def test_a_layer_that_takes_no_attributes_is_quantized_once() -> None:
    class Frozen(torch.nn.Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            if "frozen" in vars(self):
                raise AttributeError(f"{name}: frozen")
            super().__setattr__(name, value)

    layer, x = Frozen(64, 32), torch.randn(8, 64)
    vars(layer)["frozen"] = True
    model = torch.nn.Sequential(layer)
    bs.convert(model, "mxfp8")
    want = model(x)
    with bs.quantized_weights(model):
        assert "_kept" in vars(layer)
        assert torch.equal(model(x), want)
    assert bs.revert(model) == ["0"]


def test_a_weight_that_has_lost_rows_is_quantized() -> None:
    """As structured pruning leaves it, in a layer with the extents of before."""
    model, x = converted("mxfp8"), normal_bf16(11, 70).float()
    layer = model.get_submodule("2")
    layer.weight = torch.nn.Parameter(layer.get_parameter("weight")[:7].detach())
    layer.register_parameter("bias", None)
    want = model(x)
    with bs.quantized_weights(model):
        assert torch.equal(model(x), want)


def test_a_weight_that_fsdp_has_flattened_is_refused() -> None:
    model = converted("mxfp8")
    layer = model.get_submodule("2")
    layer.weight = torch.nn.Parameter(torch.empty(0))
    said = r"^quantized_weights: 2.weight = \[0\], flattened, .*; need the whole of it, \[19, 37"
    with pytest.raises(ValueError, match=said), bs.quantized_weights(model):
        pass


def test_a_computed_weight_is_quantized_as_ever() -> None:
    model = converted("mxfp8")
    torch.nn.utils.parametrizations.weight_norm(model[0])
    x = normal_bf16(11, 70).float()
    want = model(x)
    with bs.quantized_weights(model):
        assert torch.equal(model(x), want)
        assert [getattr(model[i], "_kept", None) is not None for i in (0, 2)] == [False, True]


def test_compiled_models_take_them() -> None:
    torch._dynamo.reset()
    model, other = converted("mxfp4"), converted("mxfp4")
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for _ in range(3):  # made anew for every step, of other weights
        want = micro_batches(model)
        with bs.quantized_weights(other):
            got = micro_batches(other, call=compiled)
        assert_same(got, want)
        for step in (model, other):
            torch.optim.SGD(step.parameters(), lr=1e-3).step()
            step.zero_grad()


def test_what_has_no_weights_to_quantize() -> None:
    plain, model = torch.nn.Linear(4, 4), converted("mxfp8")
    said = "quantized_weights: model = Linear without converted layers; need a converted model"
    with pytest.raises(ValueError, match=said), bs.quantized_weights(plain):
        pass
    said = "quantized_weights: model = a str; need an nn.Module"
    with pytest.raises(TypeError, match=said), bs.quantized_weights("model"):  # type: ignore[arg-type]
        pass
    with bs.quantized_weights(model):
        said = "quantized_weights: 0 = within another one; need no"
        with pytest.raises(ValueError, match=said), bs.quantized_weights(model):
            pass
        model(normal_bf16(11, 70).float())  # that of the outer one is still there
        assert any("_kept" in vars(layer) for layer in model.modules())
