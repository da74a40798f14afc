"""`measure` tells what quantization costs, and changes nothing."""

from __future__ import annotations

import copy
import gc
import io
import math
import threading
from collections.abc import Iterator
from typing import Any

import blockscale as bs
import pytest
import torch
from bits import QUANTIZED, normal
from blockscale import functional
from blockscale._recipe_text import GEMMS
from blockscale.noise import Noise
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

ROUNDED = ["fp8_blockwise", "mxfp8", "mxfp4"]  # without random bits


def model(recipe: str | bs.Recipe) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(70, 96), nn.GELU(), nn.Linear(96, 37))
    bs.convert(made, recipe)
    return made


def noise_db(exact: torch.Tensor, made: torch.Tensor) -> float:
    error = (exact.double() - made.double()).square().sum()
    return 10 * math.log10(float(exact.detach().double().square().sum() / error.detach()))


def step(made: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    made.zero_grad()
    y = made(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in made.parameters() if p.grad is not None)]


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_step_stays_what_it_is(recipe: str, device: torch.device) -> None:
    made, x = model(recipe).to(device), normal(2, 11, 70).to(device)
    want = step(made, x)
    bs.set_step(made, 0)
    with bs.measure(made) as found:
        got = step(made, x)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    # x itself needs no gradient.
    names = [(p.layer, p.gemm) for p in found.products]
    assert names == [("0", "fprop"), ("0", "wgrad"), *(("2", gemm) for gemm in GEMMS)]
    assert all(list(p.operands) == list(GEMMS[p.gemm]) for p in found.products)


@pytest.mark.parametrize("recipe", ROUNDED)
def test_the_noise_of_results(recipe: str) -> None:
    """Of y and both gradients, against products in double. Those are sums of FP32's rounding, 2^-24
    of magnitudes whose noise is 2^-6 of them: a thousandth of a dB."""
    x, w = normal(50, 70).requires_grad_(), normal(37, 70, seed=1)
    layer = bs.nn.Linear(70, 37, bias=False, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(w)
    dy = normal(50, 37, seed=2)
    with bs.measure(layer) as found:
        y = layer(x)
    y.backward(dy)  # whenever it comes
    assert x.grad is not None
    assert layer.weight.grad is not None
    a, b, c = x.double(), w.double(), dy.double()
    exact = {"fprop": a @ b.t(), "dgrad": c @ b, "wgrad": c.t() @ a}
    made = {"fprop": y, "dgrad": x.grad, "wgrad": layer.weight.grad}
    got = {p.gemm: p for p in found.products}
    assert list(got) == list(GEMMS)
    for gemm, product in got.items():
        assert product.layer == "(root)"
        assert product.sqnr == pytest.approx(noise_db(exact[gemm], made[gemm]), abs=0.01)
    # An operand by itself.
    spec = layer.recipe.dgrad_w
    assert spec is not None
    of_w = got["dgrad"].operands["dgrad_w"]
    values = bs.quantize(w, spec, axis=-2).dequantize(torch.float32)
    assert of_w.sqnr == pytest.approx(noise_db(w, values), abs=1e-3)
    lost = int(((w != 0) & (values == 0)).sum())
    assert of_w.underflow == lost / int((w != 0).sum())
    assert (of_w.spec, of_w.amax) == (spec.text, float(w.abs().max()))


def test_transforms_and_random_bits() -> None:
    """A transform leaves the noise of normal data what it is, but for chance, of which 4096 blocks
    leave a 64th; stochastic rounding doubles it."""
    x, w = normal(256, 256), normal(256, 256, seed=1)
    layer = bs.nn.Linear(256, 256, bias=False, recipe="nvfp4")
    with torch.no_grad():
        layer.weight.copy_(w)
    with bs.measure(layer) as found:
        layer(x.requires_grad_()).backward(normal(256, 256, seed=2))
    of = {name: operand for p in found.products for name, operand in p.operands.items()}
    assert of["wgrad_x"].sqnr == pytest.approx(of["fprop_x"].sqnr, abs=0.3)
    assert of["wgrad_dy"].sqnr == pytest.approx(of["dgrad_dy"].sqnr, abs=0.3)
    assert of["fprop_x"].sqnr - of["dgrad_dy"].sqnr > 3
    assert "hadamard=16" in of["wgrad_x"].spec


@pytest.mark.parametrize("size", [16, 32, 128])
def test_what_is_encoded_is_rounded_first(size: int) -> None:
    """Codes are made of a transform's BF16 values: none of them saturates that would without it,
    and what cancels is 0 before."""
    x, rng = normal(256, 256), bs.Rng(1)
    for spec in (f"nvfp4[rounding=stochastic,hadamard={size}]", f"fp8_1x128[hadamard={size}]"):
        noise = Noise()
        noise.add(x, bs.spec(spec), rng=rng)
        assert noise.saturation == 0, spec
        assert noise.count == x.numel()
    for value in (0.1, 0.3, 1 / 3):
        noise = Noise()
        noise.add(torch.full((16, 256), value), bs.spec(f"mxfp8[hadamard={size}:0]"))
        assert (noise.nonzero, noise.underflowed) == (16 * 256 // size, 0)
    # What the rounding before it loses is part of the error.
    x, turned = normal(4, 256), bs.spec(f"mxfp8[hadamard={size}:0]")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    exact = (x.view(-1, size) @ matrix / math.sqrt(size)).view_as(x)
    error = bs.quantize(x, turned).dequantize() - exact
    noise = Noise()
    noise.add(x, turned)
    ratio = float(exact.square().sum() / error.square().sum())
    assert noise.sqnr == pytest.approx(10 * math.log10(ratio), rel=1e-5)


def test_the_default_device_has_no_say() -> None:
    x, transformed = normal(16, 64), bs.spec("nvfp4[hadamard=16]")
    found, elsewhere = Noise(), Noise()
    found.add(x, transformed)
    with torch.device("meta"):  # stands for another GPU
        elsewhere.add(x, transformed)
    assert vars(elsewhere) == vars(found)


def test_outlying_channels_show_in_products_and_underflow() -> None:
    """As docs/guide.md says: x's own decibels rise with them, where W makes up for them."""

    def of(factor: float) -> Any:
        x, w = normal(512, 1024), normal(512, 1024, seed=1)
        x[:, ::256] *= factor
        w[:, ::256] /= factor
        layer = bs.nn.Linear(1024, 512, bias=False, recipe="nvfp4")
        with torch.no_grad(), bs.measure(layer) as found:
            layer.weight.copy_(w)
            layer(x)
        (product,) = found.products
        return product, product.operands["fprop_x"]

    (plain, plain_x), (outlying, outlying_x) = of(1), of(100)
    assert (round(plain_x.sqnr), round(outlying_x.sqnr)) == (20, 27)
    assert (round(plain.sqnr), round(outlying.sqnr)) == (17, 12)
    assert outlying_x.underflow > 1.5 * plain_x.underflow


def test_sums_over_steps() -> None:
    made, batches = model("mxfp8"), [normal(8, 70, seed=i) * 10.0**i for i in range(3)]

    def of(*xs: torch.Tensor) -> bs.Measurement:
        with bs.measure(made) as found:
            for x in xs:
                step(made, x)
        return found

    one, together = of(batches[2]), of(*batches)
    first = together.products[0]
    # The largest batch has 99% of the energy, and of the noise: 10·log10(1/.99) is .04.
    assert first.sqnr == pytest.approx(one.products[0].sqnr, abs=0.1)
    assert first.operands["fprop_x"].amax == float(batches[2].abs().max())
    assert len(together.products) == len(one.products) == 5


def test_high_precision_is_not_measured() -> None:
    recipe = bs.recipe("mxfp8").replace(dgrad_dy=None, dgrad_w=None)
    made = model(recipe)
    bs.convert(made, recipe, skip=["0"])
    with bs.measure(made) as found:
        step(made, normal(8, 70))
    products = {(p.layer, p.gemm): p for p in found.products}
    exact = products.pop(("2", "dgrad"))
    assert exact.sqnr == math.inf
    assert {o.spec for o in exact.operands.values()} == {"none"}
    assert {layer for layer, _ in products} == {"2"}
    assert all(20 < p.sqnr < 40 for p in products.values())


def test_high_precision_is_that_of_the_result() -> None:
    """Under autocast the layer multiplies by W rounded to BF16. Its dy is BF16 as it comes. The
    same sums in float64, in another order."""
    torch.manual_seed(0)
    layer = bs.nn.Linear(70, 37, recipe=bs.recipe("mxfp8").replace(dgrad_dy=None, dgrad_w=None))
    with bs.measure(layer) as found:
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(normal(8, 70).requires_grad_())
        y.backward(normal(8, 37, seed=1).bfloat16())
    (dgrad,) = (p for p in found.products if p.gemm == "dgrad")
    w = layer.weight.detach()
    assert dgrad.operands["dgrad_w"].sqnr == pytest.approx(noise_db(w, w.bfloat16()), rel=1e-9)
    assert dgrad.operands["dgrad_dy"].sqnr == math.inf


@pytest.mark.parametrize(("y", "want"), [(0.0, math.inf), (1.0, -math.inf), (math.nan, math.nan)])
def test_the_noise_of_zeros(y: float, want: float) -> None:
    noise = Noise()
    noise.add_error(torch.zeros(2, 3), torch.full((2, 3), y))
    assert noise.sqnr == want or (math.isnan(noise.sqnr) and math.isnan(want))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_runs_again_counts_once(reentrant: bool) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model("mxfp4")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)
            return y

    made, x = Again(), normal(8, 70).requires_grad_()
    with bs.measure(made.inner) as plain:
        step(made.inner, x)
    with bs.measure(made) as found:
        step(made, x)
    assert [p.layer for p in found.products] == [f"inner.{p.layer}" for p in plain.products]
    assert [p.sqnr for p in found.products] == [p.sqnr for p in plain.products]
    assert {sums.calls for sums in found._sums.values()} == {1}


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_code_runs_uncompiled(how: str) -> None:
    made, x = model("mxfp8"), normal(8, 70)
    with bs.measure(made) as plain:
        step(made, x)
    compiled: Any = torch.compile(made, backend="aot_eager")
    if how == "in place":
        compiled = made
        made.compile(backend="aot_eager")
    step(compiled, x)
    with bs.measure(compiled) as found:
        step(compiled, x)
    assert str(found) == str(plain)
    step(compiled, x)


def names(made: nn.Module, x: torch.Tensor) -> list[str]:
    with bs.measure(made) as found:
        step(made, x)
    return list(dict.fromkeys(product.layer for product in found.products))


def test_names_are_those_of_convert(one_rank: DeviceMesh) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    x = normal(8, 70)
    wrapped: Any = nn.Sequential(checkpoint_wrapper(model("mxfp8")), nn.ReLU())
    compiled: Any = torch.compile(wrapped)
    for wrapper in (wrapped, nn.parallel.DistributedDataParallel(wrapped), compiled):
        found = names(wrapper, x)
        assert found == ["0.0", "0.2"]
        bs.convert(wrapper, "mxfp8", skip=found[:1])
        bs.convert(wrapper, "mxfp8")
    compiled = torch.compile(model("mxfp8")[0], backend="aot_eager")
    assert names(compiled, x) == ["(root)"]


def test_functions_have_the_name_of_the_module_that_calls_them() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(normal(70, 70))
            self.inner = model("mxfp4")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = bs.linear(x, self.w, recipe="mxfp8")
            return bs.linear(self.inner(h) @ torch.ones(37, 70), self.w, recipe="fp8_blockwise")

    made = nn.Sequential(Own())
    assert names(made, normal(8, 70)) == ["0#0", "0#1", "0.inner.0", "0.inner.2"]


def test_what_is_not_asked_for_is_not_measured() -> None:
    made, x = model("mxfp8"), normal(8, 70).requires_grad_()
    with bs.measure(made) as found:
        torch.autograd.grad(made(x).sum(), x)
    assert {p.gemm for p in found.products} == {"fprop", "dgrad"}


def test_an_input_that_changes_before_the_backward_is_left_out() -> None:
    layer = bs.nn.Linear(70, 37, recipe="mxfp8")
    x = normal(8, 70)
    with bs.measure(layer) as found:
        y = layer(x)
        x.zero_()
        y.sum().backward()
    assert [p.gemm for p in found.products] == ["fprop"]
    assert found.left_out == {"(root)": "x has changed before the backward"}
    with bs.measure(layer) as found:
        y = layer(normal(8, 70))
        with torch.no_grad():
            layer.weight.zero_()
        y.sum().backward()
    assert found.left_out == {"(root)": "w has changed before the backward"}


def test_nan_shows() -> None:
    layer, x = bs.nn.Linear(70, 37, recipe="mxfp8"), normal(8, 70)
    x[3, 3] = math.nan
    with bs.measure(layer) as found, torch.no_grad():
        layer(x)
        layer(normal(8, 70))
    (product,) = found.products
    of_x, of_w = product.operands["fprop_x"], product.operands["fprop_w"]
    assert all(map(math.isnan, (product.sqnr, of_x.amax, of_x.underflow, of_x.saturation)))
    assert (of_w.amax, of_w.saturation) == (float(layer.weight.detach().abs().max()), 0)
    assert "nan%" not in str(found)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("first", [False, True])
def test_shares_are_of_finite_tensors(value: float, first: bool) -> None:
    """As `blockscale inspect` prints them, wherever the value is."""
    noise, x = Noise(), normal(8, 64)
    x[3, 3] = value
    for rows in (x, normal(8, 64, seed=1))[:: 1 if first else -1]:
        noise.add(rows, bs.spec("nvfp4"))
    assert math.isnan(noise.underflow)
    assert math.isnan(noise.saturation)


def test_another_recipe_within() -> None:
    made, x = model("mxfp8"), normal(8, 70)
    with bs.measure(made) as found, torch.no_grad():
        made(x)
        bs.convert(made, "mxfp4", skip=["0"])
        made(x)
    rows = [(p.layer, p.recipe, p.sqnr > 25) for p in found.products]
    assert rows == [("0", "mxfp8", True), ("2", "mxfp8", True), ("2", "mxfp4", False)]


def test_the_model_stays_what_it_is_for_others() -> None:
    """It can be saved and copied, and what copies and other threads run is not of it."""
    made, x = model("mxfp8"), normal(8, 70)
    with bs.measure(made) as found, torch.no_grad():
        torch.save(made, io.BytesIO())
        copy.deepcopy(made)(x)
        thread = threading.Thread(target=lambda: model("mxfp8")(x))
        thread.start()
        thread.join()
        assert found.products == []
        made(x)
    assert {sums.calls for sums in found._sums.values()} == {1}


def test_inputs_go_with_the_backward() -> None:
    layer = bs.nn.Linear(70, 37, recipe="mxfp8")
    x = normal(8, 70)
    memory = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
    with bs.measure(layer):
        loss = layer(x).sum()
        loss.backward()
    del x
    gc.collect()
    assert loss.grad_fn is not None
    assert memory.expired()  # type: ignore[no-untyped-call]


def test_groups_are_layers_of_their_own() -> None:
    ends = torch.tensor([5, 5, 19])
    experts = bs.nn.GroupedLinear(3, 70, 37, recipe="mxfp8")
    x, dy = normal(24, 70).requires_grad_(), normal(24, 37, seed=1)
    with bs.measure(experts) as found:
        experts(x, ends).backward(dy)
    dense = [bs.nn.Linear(70, 37, bias=False, recipe="mxfp8") for _ in range(3)]
    want = []
    groups = (slice(0, 5), slice(0), slice(5, 19))
    for layer, w, rows in zip(dense, experts.weight, groups, strict=True):
        with torch.no_grad():
            layer.weight.copy_(w)
        with bs.measure(layer) as alone:
            layer(x.detach()[rows].requires_grad_()).backward(dy[rows])
        want.append({gemm: sums.result for (_, gemm, _), sums in alone._sums.items()})
    assert [product.gemm for product in found.products] == list(GEMMS)
    for product in found.products:
        parts = [one[product.gemm] for one in want if product.gemm in one]
        assert len(parts) == 2
        ratio = sum(p.signal for p in parts) / sum(p.noise for p in parts)
        assert product.sqnr == pytest.approx(10 * math.log10(ratio), abs=1e-6)


def test_products_of_converted_experts_have_numbers() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(normal(2, 32, 64).bfloat16())
            self.down = nn.Parameter(normal(2, 64, 32).bfloat16())

        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            h = nn.functional.grouped_mm(x, self.up, offs=ends)
            return nn.functional.grouped_mm(h.relu(), self.down, offs=ends)

    made = nn.ModuleDict({"experts": Experts()})
    bs.convert(made, "fp8_blockwise", experts=["experts"])
    ends = torch.tensor([3, 8], dtype=torch.int32)
    with bs.measure(made) as found:
        for _ in range(2):
            made["experts"](normal(8, 32).bfloat16(), ends).float().sum().backward()
    assert [p.layer for p in found.products if p.gemm == "fprop"] == ["experts#0", "experts#1"]


def test_the_table() -> None:
    made = model("fp8_blockwise")
    with bs.measure(made) as found, torch.no_grad():
        made(normal(8, 70))
    head, *lines = str(found).split("\n")
    operand = ["operand", "dB", "underflow", "saturation"]
    assert head.split() == ["layer", "product", "dB", *operand, *operand]
    assert [line.split()[:2] for line in lines] == [["0", "fprop"], ["2", "fprop"]]
    first = found.products[0]
    x, w = first.operands.values()
    assert lines[0].split()[2:] == [
        f"{first.sqnr:.1f}",
        *("fprop_x", f"{x.sqnr:.1f}", f"{x.underflow:.2%}", f"{x.saturation:.2%}"),
        *("fprop_w", f"{w.sqnr:.1f}", f"{w.underflow:.2%}", f"{w.saturation:.2%}"),
    ]
    assert len({len(line) for line in (head, *lines)}) == 1
    assert str(first) == (
        f"0 fprop: {first.sqnr:.1f} dB (fprop_x {x.sqnr:.1f}, fprop_w {w.sqnr:.1f})"
    )
    with bs.measure(nn.Linear(2, 2)) as nothing:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert repr(nothing) == "nothing was measured: no layer with a quantized operand has run"


def test_layers_cut_by_tensor_parallelism_are_named(one_rank: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    made = model("mxfp8")
    parallelize_module(made, one_rank, {"0": ColwiseParallel()})
    with bs.measure(made) as found:
        for _ in range(2):
            step(made, normal(8, 70))
    assert list(found.left_out) == ["0"]
    assert {p.layer for p in found.products} == {"2"}
    assert str(found).endswith("\nleft out: 0: x is a DTensor, no plain tensor")


def test_under_fsdp2(one_rank: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    made, x = model("fp8_blockwise"), normal(8, 70)
    with bs.measure(made) as plain:
        step(made, x)
    for layer in (made[0], made[2], made):
        fully_shard(layer, mesh=one_rank, reshard_after_forward=True)
    with bs.measure(made) as found:
        step(made, x)
    assert str(found) == str(plain)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_extents_of_zero(shape: tuple[int, int]) -> None:
    """A layer of them works, and has no product to measure."""
    layer, experts = bs.nn.Linear(*shape), bs.nn.GroupedLinear(2, *shape)
    x = torch.randn(3, shape[0], requires_grad=True)
    for made, more in ((layer, ()), (experts, (torch.tensor([1, 3]),))):
        with bs.measure(made) as found:
            made(x, *more).sum().backward()
        assert found.products == []
        assert found.left_out == {}


def test_another_default_dtype() -> None:
    """Also of what a recipe with Hadamard transforms needs."""
    x = normal(32, 64)
    tables = []
    for dtype in (torch.float32, torch.float64):
        layer = bs.nn.Linear(64, 48, False, dtype=torch.float32, recipe="mxfp4")
        with torch.no_grad():
            layer.weight.copy_(normal(48, 64, seed=1))
        torch.set_default_dtype(dtype)
        try:
            with bs.measure(layer) as found:
                step(layer, x)
        finally:
            torch.set_default_dtype(torch.float32)
        tables.append(str(found))
    assert tables[0] == tables[1]


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    yield
    assert functional.product_seen is None


def test_what_is_no_module(nothing_stays: None) -> None:
    words = r"^measure: model = a str; need an nn.Module$"
    with pytest.raises(TypeError, match=words), bs.measure("model"):  # type: ignore[arg-type]
        pass


def test_one_at_a_time(nothing_stays: None) -> None:
    made = model("mxfp8")
    with (
        bs.measure(made),
        pytest.raises(ValueError, match="measure: model = measured within another"),
        bs.measure(made),
    ):
        pass
    # A forward that fails leaves nothing behind.
    with bs.measure(made) as found:
        with pytest.raises(ValueError, match="linear: x"):
            made(normal(8, 71))
        step(made, normal(8, 70))
    assert len(found.products) == 5
    assert not nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
