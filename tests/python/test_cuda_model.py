"""linear on each device against sums in double precision; and on a GPU in graphs and on side
streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import blockscale as bs
import pytest
import torch
from bits import RNG
from matmuls import check_product, normal

RECIPES = [name for name in bs.recipe_names() if not bs.recipe(name).cuda_needs and name != "bf16"]
SQUARES_ON_THE_LEFT = (
    "mxfp4[fprop_x=mxfp4[block=32x32],dgrad_dy=mxfp4[block=32x32],"
    "wgrad_dy=mxfp4[block=32x32],wgrad_x=mxfp4]"
)


class Case(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor
    dy: torch.Tensor

    def to(self, device: torch.device) -> Case:
        x, w, bias, dy = (t.detach().to(device) for t in self)
        return Case(x.requires_grad_(), w.requires_grad_(), bias.requires_grad_(), dy)


def make(random: torch.Generator, lead: Sequence[int], n: int, k: int, dtype: torch.dtype) -> Case:
    x, w, bias = normal(random, *lead, k), normal(random, n, k), normal(random, n)
    return Case(x.to(dtype), w.to(dtype), bias.to(dtype), normal(random, *lead, n).to(dtype))


def forward_backward(
    case: Case, recipe: str | bs.Recipe, rng: bs.Rng = RNG
) -> tuple[torch.Tensor, ...]:
    y = bs.linear(case.x, case.w, case.bias, recipe, rng=rng)
    return (y, *torch.autograd.grad(y, (case.x, case.w, case.bias), case.dy.to(y.dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", [*RECIPES, SQUARES_ON_THE_LEFT])
def test_linear(
    recipe: str, dtype: torch.dtype, device: torch.device, random: torch.Generator
) -> None:
    """Each of the three products is that of the operands that the CPU quantizes."""
    r = bs.recipe(recipe)
    for lead, n, k in (((2, 11), 37, 70), ((128,), 64, 96), ((1,), 1, 1), ((70,), 33, 288)):
        case = make(random, lead, n, k, dtype)
        y, dx, dw, db = forward_backward(case.to(device), recipe)
        x, dy = case.x.flatten(0, -2), case.dy.flatten(0, -2)

        def operand(t: torch.Tensor, spec: bs.Spec | None, axis: int, role: str) -> Any:
            assert spec is not None
            return bs.quantize(t, spec, axis, rng=RNG.role(role))

        products = {
            "y": (y, (x, r.fprop_x, -1, "x"), (case.w, r.fprop_w, -1, "w"), case.bias),
            "dx": (dx, (dy, r.dgrad_dy, -1, "dy"), (case.w, r.dgrad_w, -2, "w"), None),
            "dw": (dw, (dy, r.wgrad_dy, -2, "dy"), (x, r.wgrad_x, -2, "x"), None),
        }
        for name, (got, a, b, bias) in products.items():
            assert got.dtype == dtype
            qa, qb = operand(*a), operand(*b)
            check_product(got.flatten(0, -2), qa, qb, bias, (name, lead, n, k))
        want = dy.double().sum(0)
        torch.testing.assert_close(db.cpu().double(), want, rtol=2.0**-7, atol=1e-2)


def test_linear_of_mixed_precision(device: torch.device, random: torch.Generator) -> None:
    """A GEMM with an operand in high precision is PyTorch's; FP32 scales may be in one."""
    recipe = bs.recipe("fp8_blockwise").replace(fprop_x=None, dgrad_dy=None, wgrad_dy=None)
    assert recipe.cuda_needs == ""
    case = make(random, (22,), 37, 70, torch.float32)
    for got, want in zip(
        forward_backward(case.to(device), recipe),
        forward_backward(case.to(torch.device("cpu")), recipe),
        strict=True,
    ):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-3)


def test_operands_of_two_families_are_kept_together(device: torch.device) -> None:
    """Scales of a byte, 51 of them, in the one tensor with FP32 ones, which have to be aligned."""
    recipe = bs.recipe("fp8_blockwise").replace(wgrad_x="mxfp8", wgrad_dy="mxfp8")
    case = make(torch.Generator().manual_seed(0), (32,), 64, 51, torch.bfloat16)
    _, dx, dw, _ = forward_backward(case.to(device), recipe)
    _, want_dx, _, _ = forward_backward(case.to(device), "fp8_blockwise")
    _, _, want_dw, _ = forward_backward(case.to(device), "mxfp8")
    assert torch.equal(dx, want_dx)
    assert torch.equal(dw, want_dw)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, device: torch.device, random: torch.Generator) -> None:
    """It decides the result's dtype, and never that of the product of two quantized operands."""
    case = make(random, (22,), 37, 70, torch.float32).to(device)
    x, w = case.x.detach() * 2.0**10, case.w.detach() * 2.0**-20  # w is subnormal in FP16
    for recipe in ("mxfp8", "mxfp4", "nvfp4"):
        r = bs.recipe(recipe)
        assert r.fprop_x is not None
        assert r.fprop_w is not None
        with torch.autocast(device.type, dtype):
            y = bs.linear(x, w, None, recipe, rng=RNG)
        assert y.dtype == dtype
        check_product(y, bs.quantize(x, r.fprop_x), bs.quantize(w, r.fprop_w), None, recipe)


def test_fnuz_fp8_is_refused_by_name(cuda: torch.device) -> None:
    """The tensor cores of NVIDIA do not read AMD's element formats."""
    amd = bs.recipe("fp8_blockwise").replace(
        name="amd_fp8",
        fprop_x="fp8_1x128[element=e4m3fnuz]",
        fprop_w="fp8_128x128[element=e4m3fnuz]",
    )
    text = " on cuda; need e4m3fn or e5m2 elements, which NVIDIA's tensor cores read; "
    x, w = torch.ones(4, 128, device=cuda), torch.ones(8, 128, device=cuda)
    with pytest.raises(ValueError, match="; need ") as error:
        bs.linear(x, w, recipe=amd)
    assert str(error.value).startswith("linear: recipe = ")
    assert text in str(error.value)


# --- graphs and streams ---------------------------------------------------------------------------


def captured(f: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """`f` run a few times on a side stream, as PyTorch asks for, then captured."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            f()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = f()
    return graph, out


def in_graph(what: str, case: Case, rng: bs.Rng) -> tuple[torch.Tensor, ...]:
    if what == "quantize":
        q = bs.quantize(case.x, "nvfp4[rounding=stochastic,hadamard=16]", -2, rng=rng)
        return (q.dequantize(torch.float32),)
    if what == "quantize_dual":
        pair = bs.quantize_dual(case.x, "amdfp4[rounding=stochastic]", "nvfp4[hadamard=128]", rng)
        return tuple(t.view(torch.uint8) for q in pair for t in (q.codes, q.scales))
    if what == "matmul":
        return (bs.matmul(bs.quantize(case.x, "nvfp4"), bs.quantize(case.w, "nvfp4")),)
    return forward_backward(case, what, rng)


@pytest.mark.parametrize("what", ["quantize", "quantize_dual", "matmul", *RECIPES])
def test_graphs(what: str, cuda: torch.device, random: torch.Generator) -> None:
    """A replay sees new inputs, new keys and nothing of the capture."""
    case = make(random, (65,), 40, 130, torch.float32).to(cuda)
    seed, offset = (torch.zeros((), dtype=torch.int64, device=cuda) for _ in range(2))
    graph, out = captured(lambda: in_graph(what, case, bs.Rng(seed, offset)))
    for step in range(3):
        fresh = make(random, (65,), 40, 130, torch.float32)
        with torch.no_grad():
            for old, new in zip(case, fresh, strict=True):
                old.copy_(new)
        seed.fill_(step + 5)
        offset.fill_(step << 16)
        graph.replay()
        got = [t.clone() for t in out]
        want = in_graph(what, fresh.to(cuda), bs.Rng(step + 5, step << 16))
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g, w), step


def test_linear_on_a_side_stream(cuda: torch.device, random: torch.Generator) -> None:
    case = make(random, (65,), 40, 130, torch.bfloat16).to(cuda)
    want = forward_backward(case, "nvfp4")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = Case(*(torch.zeros_like(t).requires_grad_(t.requires_grad) for t in case))
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for to, t in zip(late, case, strict=True):
                to.copy_(t)
        got = forward_backward(late, "nvfp4")
    stream.synchronize()
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_products_wait_for_their_operands(cuda: torch.device, random: torch.Generator) -> None:
    """Behind a long kernel the launches queue up, and each enters the device while the one before
    is in its last blocks. The memory of W's operand holds the one of the product before, whose
    scales are others: what a kernel reads before it has waited shows in the result."""
    x = torch.randn(4096, 1024, generator=random, dtype=torch.bfloat16).to(cuda)
    w = torch.randn(2048, 1024, generator=random, dtype=torch.bfloat16).to(cuda)
    weights = [w * 2.0**power for power in (0, 5, -7, 3, -2, 8)]
    want = []
    for weight in weights:
        ahead = bs.quantize_weight(weight, "fp8_blockwise")
        torch.cuda.synchronize()
        want.append(bs.linear(x, weight, recipe="fp8_blockwise", quantized_weight=ahead))
        del ahead
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
    got = [bs.linear(x, weight, recipe="fp8_blockwise") for weight in weights]
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "mxfp4", "nvfp4"])
def test_a_chain_of_layers_has_the_bits_of_one_call_after_another(
    cuda: torch.device, random: torch.Generator, recipe: str
) -> None:
    """Behind a long kernel, and in a graph whose offsets change from replay to replay: products
    begin before what was launched before them has ended, forward and backward, over groups too."""
    t, e, n, k = 1024, 4, 512, 256
    x = torch.randn(t, k, generator=random, dtype=torch.bfloat16).to(cuda).requires_grad_()
    w = torch.randn(e, n, k, generator=random, dtype=torch.bfloat16).to(cuda).requires_grad_()
    v = torch.randn(k, n, generator=random, dtype=torch.bfloat16).to(cuda).requires_grad_()
    dy = torch.randn(t, k, generator=random, dtype=torch.bfloat16).to(cuda)
    ends = [[0, 9, 700, 1024], [256, 512, 768, 1024], [1000, 1000, 1001, 1010], [1, 2, 3, 4]]
    offsets = torch.tensor(ends[0], dtype=torch.int32, device=cuda)
    rng = bs.Rng(*(torch.tensor(key, device=cuda) for key in (1, 2)))

    def chain(meet: Callable[[], None]) -> list[torch.Tensor]:
        grad_v = torch.zeros(k, n, device=cuda)
        y = bs.grouped_linear(x, w, offsets, recipe, rng)
        meet()
        z = bs.linear(y, v, None, recipe, rng, accumulate_into=grad_v)
        meet()
        (dz,) = torch.autograd.grad(z, y, dy, retain_graph=True)
        meet()
        return [y, z, *torch.autograd.grad(z, (x, w), dy), dz, grad_v]

    want = []
    for each in ends:
        offsets.copy_(torch.tensor(each, dtype=torch.int32))
        want.append([value.detach().clone() for value in chain(torch.cuda.synchronize)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(lambda: None)
    changes = [torch.tensor(each, dtype=torch.int32, device=cuda) for each in ends]
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
    got = []
    for change in 4 * changes:
        offsets.copy_(change)
        got.append(chain(lambda: None))
    for change in 4 * changes:
        offsets.copy_(change)
        graph.replay()
        got.append([value.clone() for value in captured])
    for one, other in zip(got, 8 * want, strict=True):
        assert all(torch.equal(g, w) for g, w in zip(one, other, strict=True))


def test_random_bits_follow_weights_that_were_moved_alone(cuda: torch.device) -> None:
    """As FSDP2 moves the parameters of a model that was converted on the CPU, and as FSDP1 sets
    views of its flat ones, which leaves a layer none; an evaluation is first."""
    layers = [bs.nn.Linear(64, 32, recipe="nvfp4", seed=3) for _ in range(3)]
    weights = []
    for layer in layers:
        layer.load_state_dict(layers[0].state_dict())
        weights.append(layer.weight)
    x = torch.randn(16, 64, device=cuda)
    layers[0].to(cuda)
    for parameter in layers[1].parameters():
        parameter.data = parameter.data.to(cuda)
    for name, parameter in list(layers[2].named_parameters()):
        delattr(layers[2], name)
        setattr(layers[2], name, parameter.to(cuda))
    for layer in layers:
        with torch.inference_mode():
            layer(x)
        layer(x).sum().backward()
    want, *others = (weight.grad for weight in weights)
    assert want is not None
    for got in others:
        assert got is not None
        assert torch.equal(got.to(cuda), want)


def test_linear_waits_for_nothing(cuda: torch.device) -> None:
    layer = bs.nn.Linear(130, 40, recipe="nvfp4", device=cuda)
    x = torch.randn(65, 130, device=cuda, requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
        bs.linear(x, layer.weight, recipe="nvfp4", rng=RNG)
        bs.advance(layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
