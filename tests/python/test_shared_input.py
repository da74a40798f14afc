"""Layers that read the same input quantize it once, and their results stay what they are."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import blockscale as bs
import pytest
import torch
from bits import assert_same, normal_bf16
from blockscale import shared_input
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

RECIPES = {
    **{name: bs.recipe(name) for name in bs.recipe_names() if name != "bf16"},
    "wgrad in high precision": bs.recipe("fp8_blockwise").replace(wgrad_x=None, wgrad_dy=None),
}
STOCHASTIC_X = bs.recipe("nvfp4").replace(wgrad_x="nvfp4[hadamard=16,rounding=stochastic]")


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small inputs are shared too."""
    monkeypatch.setattr(shared_input, "LARGE", 1)
    yield
    shared_input._last.x = shared_input._last.made = None


class Calls:
    """Within it, counts how often inputs are quantized apart."""

    def __enter__(self) -> Calls:
        self.count = 0
        self.quantize = shared_input._quantize_input

        def counted(*args: Any) -> Any:
            self.count += 1
            return self.quantize(*args)

        shared_input._quantize_input = counted  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        shared_input._quantize_input = self.quantize


class Heads(nn.Module):
    """Three projections of one tensor, as attention has."""

    def __init__(self, rerun: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(48)
        self.q, self.k, self.v = nn.Linear(48, 64), nn.Linear(48, 32, False), nn.Linear(48, 32)
        self.out = nn.Linear(32, 48)
        self.rerun = rerun

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        y: torch.Tensor = self.out(k * v + q[..., :32])
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = (
            checkpoint(self.inner, x, use_reentrant=False) if self.rerun else self.inner(x)
        )
        return x + y


def model(recipe: str | bs.Recipe, blocks: int = 2, **how: Any) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(*(Heads(**how) for _ in range(blocks)))
    bs.convert(made, recipe)
    return made


def results(made: nn.Module, calls: int = 1) -> list[torch.Tensor]:
    """Outputs and gradients of that many forwards, whose backwards follow them all."""
    made.bfloat16().zero_grad()
    inputs = [normal_bf16(2, 20, 48, seed=i).requires_grad_() for i in range(calls)]
    outputs = [made(x) for x in inputs]
    for y in outputs:
        y.square().mean().backward()
    return [*outputs, *(t.grad for t in (*inputs, *made.parameters()))]


def alone(call: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """What it returns where every layer quantizes for itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_input, "LARGE", 1 << 60)
        with Calls() as counted:
            made = call()
    assert counted.count == 0
    return made


@pytest.mark.parametrize("name", RECIPES)
def test_same_bits_and_one_quantization(name: str) -> None:
    want = alone(lambda: results(model(RECIPES[name])))
    with Calls() as counted:
        got = results(model(RECIPES[name]))
    assert_same(got, want)
    assert counted.count == 4  # per block: the heads' input, and that of `out`


def test_an_operand_that_draws_is_each_layers_own() -> None:
    want = alone(lambda: results(model(STOCHASTIC_X)))
    with Calls() as counted:
        assert_same(results(model(STOCHASTIC_X)), want)
    assert counted.count == 0


def save_all(*_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def save_none(*_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("calls", [1, 2])
def test_checkpoints_save_what_they_saved(calls: int) -> None:
    want = alone(lambda: results(model("nvfp4", rerun=True), calls))
    assert_same(results(model("nvfp4", rerun=True), calls), want)


@pytest.mark.parametrize("save", [None, save_all, save_none])
@pytest.mark.parametrize("first", ["outside", "inside"])
@pytest.mark.parametrize("kept", [True, False])
def test_one_input_on_both_sides_of_a_checkpoint(save: Any, first: str, kept: bool) -> None:
    """A recomputation reads x from other memory than the forward did."""
    how: dict[str, Any] = {"use_reentrant": False}
    if save is not None:
        how["context_fn"] = lambda: create_selective_checkpoint_contexts(save)  # type: ignore[no-untyped-call]

    def run() -> list[torch.Tensor]:
        x, weights = made_by_autograd(), linears(4)

        def inner(x: torch.Tensor) -> torch.Tensor:
            h = bs.linear(x, weights[0], recipe="fp8_blockwise")
            other = torch.cat([h, h, h], -1)  # of x's shape
            made = [bs.linear(t, w, recipe="fp8_blockwise") for t, w in (
                (other, weights[1]), (x, weights[2])
            )]  # fmt: skip
            return made[0] + made[1]

        again = functools.partial(checkpoint, inner, **how)
        outside = functools.partial(bs.linear, w=weights[3], recipe="fp8_blockwise")
        ys = [outside(x), again(x)] if first == "outside" else [again(x), outside(x)]
        if not kept:
            shared_input._last.x = shared_input._last.made = None
        return [*ys, *torch.autograd.grad([y.float().square().sum() for y in ys], weights)]

    assert_same(run(), alone(run))


def test_an_input_that_is_a_leaf_the_first_time_alone() -> None:
    """FSDP2 gives it a derivative in the forward, and none when the forward runs again."""
    x, w = normal_bf16(20, 48).requires_grad_(), linears(1)[0]
    calls = 0

    def inner(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return bs.linear(x.view_as(x) if calls == 1 else x, w, recipe="mxfp8")

    checkpoint(inner, x, use_reentrant=False).sum().backward()
    assert calls == 2


def test_layers_save_one_operand() -> None:
    kept: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    made = model(bs.recipe("fp8_blockwise").replace(keep_w=False), blocks=1).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        made(normal_bf16(128, 48).requires_grad_())
    operands = [t.data_ptr() for t in kept if t.dtype is torch.uint8]
    assert len(operands) == 4
    assert len(set(operands)) == 2  # of the heads' input, and of that of `out`


@pytest.mark.parametrize("rerun", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_a_backward_quantizes_it_again_once(name: str, rerun: bool) -> None:
    recipe = RECIPES[name]
    want = results(model(recipe, rerun=rerun), calls=2)
    with Calls() as counted:
        got = results(model(recipe.replace(keep_x=False), rerun=rerun), calls=2)
    assert_same(got, want)
    inputs = 2 * 2 * 2  # of two calls of two blocks
    # What a checkpoint has recomputed comes as another tensor for each of the four layers.
    again = 0 if recipe.wgrad_x is None else inputs * (1 + rerun)
    assert counted.count == inputs * (1 + rerun) + again


def test_layers_of_one_input_that_keep_different_things() -> None:
    """In one order or another, each has its own."""
    x = made_by_autograd()
    texts = ("mxfp8", "mxfp8[keep_x=False]", "mxfp8[keep_w=False,keep_x=False]", "mxfp4", "mxfp8")
    weights = linears(len(texts))

    def run(recipes: tuple[str, ...]) -> list[torch.Tensor]:
        ys = [bs.linear(x, w, recipe=r) for w, r in zip(weights, recipes, strict=True)]
        return [*ys, *torch.autograd.grad([y.float().sum() for y in ys], weights)]

    plain = tuple(text.partition("[")[0] for text in texts)
    assert_same(run(texts), alone(lambda: run(plain)))


def linears(count: int = 2) -> list[torch.Tensor]:
    return [normal_bf16(16, 48, seed=9 + i).requires_grad_() for i in range(count)]


def products(x: torch.Tensor, *between: Callable[[torch.Tensor], object]) -> list[torch.Tensor]:
    """y of one weight after another, something done to x between, and the weights' gradients."""
    weights = linears(len(between) + 1)
    ys = [bs.linear(x, weights[0], recipe="mxfp8")]
    for change, w in zip(between, weights[1:], strict=True):
        change(x)
        ys.append(bs.linear(x, w, recipe="mxfp8"))
    return [*ys, *torch.autograd.grad([y.float().sum() for y in ys], weights)]


def made_by_autograd() -> torch.Tensor:
    return normal_bf16(20, 48).requires_grad_() * 2


def test_a_tensor_that_has_changed_is_quantized_again() -> None:
    def change(x: torch.Tensor) -> None:
        with torch.no_grad():
            x.mul_(3)

    want = alone(lambda: products(made_by_autograd(), change))
    with Calls() as counted:
        assert_same(products(made_by_autograd(), change), want)
    assert counted.count == 2


def test_a_tensor_whose_memory_is_another_is_quantized_again() -> None:
    def change(x: torch.Tensor) -> None:
        x.data = normal_bf16(20, 48, seed=5)  # which PyTorch does not count

    want = alone(lambda: products(made_by_autograd(), change))
    assert_same(products(made_by_autograd(), change), want)


def test_a_tensor_that_autograd_has_not_made_is_not_shared() -> None:
    for x in (normal_bf16(20, 48), normal_bf16(20, 48).requires_grad_()):
        with Calls() as counted:
            products(x, lambda x: None)
        assert counted.count == 2


def test_without_a_gradient_of_the_weight_nothing_is_made_apart() -> None:
    x, w = made_by_autograd(), linears(1)[0]
    with Calls() as counted:
        bs.linear(x, w.detach(), recipe="mxfp8").sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            bs.linear(x, w, recipe="mxfp8")
    assert counted.count == 0


def test_recipes_that_differ() -> None:
    x, (w, _) = made_by_autograd(), linears()
    with Calls() as counted:
        for recipe in ("mxfp8", "fp8_blockwise", "fp8_blockwise"):
            y = bs.linear(x, w, recipe=recipe)
            with torch.no_grad():
                assert torch.equal(y, bs.linear(x, w, recipe=recipe))
    assert counted.count == 2


def test_groups_are_shared_where_they_are_the_same() -> None:
    x, w = made_by_autograd(), normal_bf16(3, 16, 48).requires_grad_()
    ends = [torch.tensor(e) for e in ([5, 5, 20], [6, 9, 20])]

    def three() -> list[torch.Tensor]:
        ys = [bs.grouped_linear(x, w, e, "fp8_blockwise") for e in (ends[0], ends[0], ends[1])]
        return [*ys, *torch.autograd.grad([y.float().sum() for y in ys], [w])]

    want = alone(three)
    with Calls() as counted:
        assert_same(three(), want)
        ends[1][0] += 1
        y = bs.grouped_linear(x, w, ends[1], "fp8_blockwise")
    assert torch.equal(y, bs.grouped_linear(x.detach(), w, ends[1], "fp8_blockwise"))
    assert counted.count == 3


def test_operands_go_with_their_tensor() -> None:
    held = [made_by_autograd()]
    bs.linear(held[0], linears(1)[0], recipe="mxfp8")
    made = shared_input._last.made
    assert made is not None
    assert len(made.operands) == 2
    thread = threading.Thread(target=held.clear)  # whoever drops it last, as a backward may
    thread.start()
    thread.join()
    assert made.operands == []


def test_no_guard_on_extents_that_a_compiler_does_not_know() -> None:
    torch._dynamo.reset()
    w = linears(1)[0]

    def some(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return bs.linear(x[mask.nonzero().squeeze(-1)] * 2, w, recipe="mxfp8")

    x, mask = normal_bf16(20, 48), torch.arange(20) % 3 == 0
    with (
        pytest.MonkeyPatch.context() as patch,
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        patch.setattr(shared_input, "LARGE", 48 * 10)
        made = torch.compile(some, fullgraph=True, backend="aot_eager")
        assert torch.equal(made(x, mask), some(x, mask))
        torch._dynamo.mark_dynamic(x, 0, min=2, max=20)
        whole = torch.compile(lambda x: bs.linear(x * 2, w, recipe="mxfp8"), backend="aot_eager")
        assert torch.equal(whole(x), bs.linear(x * 2, w, recipe="mxfp8"))


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "nvfp4"])
def test_a_compiler_keeps_one_of_the_calls(recipe: str) -> None:
    from functorch.compile import (  # type: ignore[import-untyped]
        make_boxed_func,
        min_cut_rematerialization_partition,
    )
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def see(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    made = model(recipe, blocks=1)
    want = results(made)
    bs.set_step(made, 0)
    partition = min_cut_rematerialization_partition
    made.compile(backend=aot_autograd(fw_compiler=see, partition_fn=partition), fullgraph=True)
    assert_same(results(made), want)
    called = [str(n.target) for graph in graphs for n in graph.graph.nodes]
    assert sum("quantize_input" in name for name in called) == 2


def test_a_budget_of_memory_has_operands_made_again() -> None:
    """PyTorch's partitioner, asked to keep less, makes operands of x again, and no product."""
    from torch._functorch import config

    def step(budget: float) -> tuple[list[torch.Tensor], int]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512, False), nn.SiLU(), nn.Linear(512, 256, False))
        bs.convert(model, "fp8_blockwise[keep_w=False]")
        held = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal held
            parameter = any(tensor.data_ptr() == p.data_ptr() for p in model.parameters())
            held += 0 if parameter else tensor.nbytes
            return tensor

        compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
        x = torch.randn(128, 256, requires_grad=True)
        with config.patch(activation_memory_budget=budget, is_non_builtin_to_include=True):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = compiled(x)
            y.square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())], held  # type: ignore[list-item]

    (all_kept, most), (again, least) = step(1), step(0.9)
    assert all(torch.equal(a, b) for a, b in zip(all_kept, again, strict=True))
    products = 128 * 512 * 4  # the first one's, which SiLU's gradient reads
    assert products <= least < most - 128 * 512


def partitioned(graph: Any, inputs: Any, **options: Any) -> Any:
    """Inductor's passes, and its choice of what a backward computes again, without its kernels."""
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def as_it_is(inner: Any, *_: Any, **__: Any) -> Any:
        return make_boxed_func(inner)

    return compile_fx(graph, inputs, inner_compile=as_it_is, **options)


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "fp8_blockwise[wgrad_x=none,wgrad_dy=none]"])
def test_a_compiler_computes_again_what_a_backward_reads(recipe: str) -> None:
    """The results of norms and gates; it kept them even of PyTorch's own layers."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(256)
            self.up = nn.ModuleList(nn.Linear(256, 512, False) for _ in range(2))
            self.down = nn.Linear(512, 256, False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(x)
            made: torch.Tensor = self.down(nn.functional.silu(self.up[0](h)) * self.up[1](h))
            return x + made

    def step(recipe: str) -> tuple[list[torch.Tensor], int]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Gated()
        bs.convert(model, recipe)
        kept: dict[int, int] = {}
        parameters = {p.data_ptr() for p in model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.data_ptr() not in parameters:
                kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        x = torch.randn(128, 256, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = torch.compile(model, backend=partitioned, fullgraph=True)(x)
        y.square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())], sum(kept.values())  # type: ignore[list-item]

    kept, again = step(f"{recipe}[keep_w=False]"), step(f"{recipe}[keep_w=False,keep_x=False]")
    size = 4 if "none" in recipe else 1  # of x itself, or its codes
    assert kept[1] - again[1] >= size * 128 * (256 + 512)
    assert_same(again[0], kept[0])


def test_what_was_made_elsewhere_on_a_gpu_is_made_again(cuda: torch.device) -> None:
    """On another stream, which nothing orders behind the first one, and in a graph, which would
    read what was made outside of it."""
    x = normal_bf16(20, 48).to(cuda).requires_grad_() * 2
    w = normal_bf16(16, 48, seed=1).to(cuda).requires_grad_()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with Calls() as counted:
        want = bs.linear(x, w, recipe="mxfp8")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                assert torch.equal(bs.linear(x, w, recipe="mxfp8"), want)
        torch.cuda.synchronize()
        assert counted.count == 2
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            y = bs.linear(x, w, recipe="mxfp8")
        assert counted.count == 3
    with torch.no_grad():
        x.mul_(3)
    graph.replay()
    assert torch.equal(y, bs.linear(x.detach(), w, recipe="mxfp8"))


@pytest.mark.parametrize("name", RECIPES)
def test_same_bits_on_a_gpu(name: str, cuda: torch.device) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        made = nn.Sequential(Heads(), Heads()).to(cuda).bfloat16()
        bs.convert(made, RECIPES[name])
        x = normal_bf16(2, 20, 48).to(cuda).requires_grad_()
        y = made(x)
        return [y, *torch.autograd.grad(y.float().square().mean(), (x, *made.parameters()))]

    assert_same(run(), alone(run))
