"""The operators in PyTorch's compiler: opcheck, exact fakes, fullgraph compilation."""

from __future__ import annotations

import copy
import io
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import blockscale as bs
import pytest
import torch
from bits import BEFORE_2_13, assert_same, assert_same_operand, normal
from models import Block
from operators import op_samples
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

OPS = torch.ops.blockscale
SAMPLES = [name for name, _ in op_samples(torch.device("cpu"))]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "index", range(len(SAMPLES)), ids=[f"{s}-{i}" for i, s in enumerate(SAMPLES)]
)
def test_opcheck(index: int, device: torch.device) -> None:
    """The slow checks, of the schema and of compiled code, of one sample of an operator and number
    of arguments that are tensors; the others of all."""
    name, args = op_samples(device)[index]
    kinds = [(one, sum(isinstance(a, torch.Tensor) for a in of)) for one, of in op_samples(device)]
    quick = ("test_autograd_registration", "test_faketensor")
    every = (*quick, "test_schema", "test_aot_dispatch_dynamic")
    first = kinds.index(kinds[index]) == index
    torch.library.opcheck(getattr(OPS, name), args, test_utils=every if first else quick)


def test_the_compiler_is_not_imported_before_it_is_used() -> None:
    """It takes a second."""
    code = (
        "import sys, torch\n"
        "before = 'torch._dynamo' in sys.modules\n"
        "import blockscale as bs\n"
        "bs.linear(torch.ones(4, 64), torch.ones(8, 64), recipe='mxfp8')\n"
        "assert ('torch._dynamo' in sys.modules) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_op_is_checked() -> None:
    defined = {str(s.name) for s in torch._C._jit_get_all_schemas()}
    assert {f"blockscale::{name}" for name in SAMPLES} == {
        name for name in defined if name.startswith("blockscale::")
    }


LAYOUTS = {
    "nvfp4": ("linear", "nv_128x4", "aiter_scale", "mfma_16x16", "mfma_16x16+aiter_scale"),
    "mxfp8[block=32x32]": ("linear", "nv_128x4", "aiter_scale"),
    "amdfp4[block=16x16,hadamard=128,outer=false]": ("linear", "mfma_16x16+nv_128x4"),
    "fp8_1x128": ("linear", "mn_major"),
    "fp8_128x128": ("linear", "mn_major"),
    "mxfp6": ("linear",),
}
SHAPES = ((), (0,), (1,), (70,), (5, 70), (0, 70), (5, 0), (300, 17), (2, 3, 40), (3, 0, 5))


def test_fakes_are_exact() -> None:
    """Shape, dtype and stride of every result, and QuantizedTensor's own idea of them."""
    checked = 0
    for spec, layouts in LAYOUTS.items():
        for layout, shape, axis, batch in itertools.product(layouts, SHAPES, (-1, -2), (0, 1)):
            if len(shape) < max(1, -axis) or (batch and len(shape) != 3):
                continue
            args: tuple[Any, ...] = (spec, axis, None, None, None, [], layout, batch)
            # In BF16, which none of the results has.
            real = OPS.quantize(torch.zeros(shape, dtype=torch.bfloat16), *args)
            with FakeTensorMode():
                fake = OPS.quantize(torch.zeros(shape, dtype=torch.bfloat16), *args)
            for r, f in zip(real, fake, strict=True):
                what = (spec, layout, shape, axis, batch)
                assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride()), what
            q = bs.quantize(torch.zeros(shape), spec, axis, layout=layout, batch_dims=batch)
            assert q.dequantize(torch.float32).shape == shape
            checked += 1
    assert checked > 200


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(f, fullgraph=True, **options)


@pytest.mark.parametrize("spec", ["nvfp4", "fp8_128x128"])
def test_quantized_tensors_pass_through(spec: str) -> None:
    def quantize(x: torch.Tensor) -> bs.QuantizedTensor:
        return bs.quantize(x * 2, spec, axis=-2)

    def multiply(a: bs.QuantizedTensor, b: bs.QuantizedTensor) -> torch.Tensor:
        return bs.matmul(a, b, out_dtype=torch.float32) + a.dequantize(torch.float32).sum()

    x = normal(40, 70)
    q = compiled(quantize, backend="aot_eager")(x)
    assert_same_operand(q, quantize(x))
    product = compiled(multiply, backend="aot_eager")(q, q)
    assert torch.equal(product, multiply(q, q))


def test_exported_programs_take_and_return_quantized_tensors() -> None:
    """Also once they were in a file."""

    class Double(nn.Module):
        def forward(self, q: bs.QuantizedTensor) -> bs.QuantizedTensor:
            return bs.quantize(q.dequantize(torch.float32) * 2, "fp8_1x128")

    q = bs.quantize(normal(20, 70), "nvfp4")
    program = torch.export.export(Double(), (q,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for run in (program.module(), torch.export.load(file).module()):
        assert_same_operand(run(q), Double()(q))


def test_dynamic_shapes_do_not_recompile() -> None:
    counter = CompileCounter()

    def f(x: torch.Tensor) -> torch.Tensor:
        q = bs.quantize(x, "nvfp4[block=16x16]", axis=-2, layout="nv_128x4")
        return q.dequantize(torch.float32)

    g = compiled(f, backend=counter, dynamic=True)
    for rows in (7, 40, 129):
        x = normal(rows, 70)
        assert torch.equal(g(x), f(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "mxfp4", "nvfp4"])
def test_linear_forward_and_backward(recipe: str) -> None:
    x, w, bias = normal(2, 9, 70), normal(33, 70), normal(33)
    inputs, seed = [t.requires_grad_() for t in (x, w, bias)], torch.tensor(5)

    def f(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return bs.linear(x, w, bias, recipe, rng=bs.Rng(seed, o))

    g = compiled(f, backend="aot_eager")
    for offset in (torch.tensor(1), torch.tensor(2)):
        ys = [f(x, w, bias, offset), g(x, w, bias, offset)]
        assert torch.equal(*ys)
        grads = [torch.autograd.grad(y.square().sum(), inputs) for y in ys]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_an_offset_that_is_an_int_compiles_once_more() -> None:
    """As a symbol, from its second value on."""
    counter = CompileCounterWithBackend("aot_eager")

    def f(x: torch.Tensor, offset: int) -> bs.QuantizedTensor:
        return bs.quantize(x, "nvfp4[rounding=stochastic]", rng=bs.Rng(3, offset))

    g = compiled(f, backend=counter)
    for offset in range(4):
        assert_same_operand(g(normal(9, 70), offset), f(normal(9, 70), offset))
    assert counter.frame_count == 2


def test_an_amax_that_is_a_number_compiles_whole() -> None:
    def f(x: torch.Tensor, amax: float) -> bs.QuantizedTensor:
        return bs.quantize(x, "nvfp4", amax=amax)

    g, x = compiled(f, backend="aot_eager"), normal(9, 70)
    for amax in (1.0, 2.0, 3.5, 2):
        assert_same_operand(g(x, amax), f(x, amax))


def test_autocast_inside_compiled_code() -> None:
    x, w = normal(9, 70).requires_grad_(), normal(33, 70).requires_grad_()

    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return bs.linear(x, w, recipe="mxfp8")

    y, z = cast(x), compiled(cast, backend="aot_eager")(x)
    assert y.dtype == z.dtype == torch.bfloat16
    assert torch.equal(y, z)


class Net(nn.Module):
    def __init__(self, rerun: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(1))
        self.rerun = rerun

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.rerun else block(x)
        return x


def net(rerun: bool = False) -> Net:
    model = Net(rerun)
    bs.convert(model, "nvfp4")
    return model


def train(model: nn.Module, order: str, parameters: Any) -> list[torch.Tensor]:
    """Gradients of two steps of two micro-batches; f is a forward, b a backward."""
    grads = []
    for step in range(2):
        batches = iter([normal(20, 48, seed=2 * step + i) for i in range(2)])
        losses: list[torch.Tensor] = []
        for what in order:
            if what == "f":
                losses.append(model(next(batches)).square().mean())
            else:
                losses.pop(0).backward()  # type: ignore[no-untyped-call]
        grads += [p.grad.clone() for p in parameters]
        model.zero_grad()
        bs.advance(model)
    return grads


@pytest.mark.parametrize("order", ["fbfb", "ffbb"])
@pytest.mark.parametrize("what", ["whole model", "blocks", "blocks inside checkpoint"])
def test_a_converted_model_draws_the_same_bits_compiled(what: str, order: str) -> None:
    plain, model = net(), net(rerun=what == "blocks inside checkpoint")
    want = train(plain, order, list(plain.parameters()))
    parameters = list(model.parameters())
    if what == "whole model":
        got = train(torch.compile(model, fullgraph=True, backend="aot_eager"), order, parameters)  # type: ignore[arg-type]
    else:
        for block in model.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        got = train(model, order, parameters)
    assert_same(got, want)
    assert bs.rng_state(model) == bs.rng_state(plain)


@pytest.mark.parametrize(
    ("what", "order"), [("whole model", "fbfb"), ("block", "fbfb"), ("block", "ffbb")]
)
def test_checkpoint_inside_compiled_code(what: str, order: str) -> None:
    """Also when only the block is compiled, and the root restores the offset eagerly, after other
    forwards too, as a pipeline's are."""
    plain, model = net(), net()
    want = train(plain, order, list(plain.parameters()))
    block = model.blocks[0]
    assert isinstance(block, Block)
    block.rerun = True
    (model if what == "whole model" else block).compile(fullgraph=True, backend="aot_eager")
    assert_same(train(model, order, list(model.parameters())), want)


def test_inductor() -> None:
    """Generated code: of two forwards before their backwards, each keeps its own offset."""
    layer, x = bs.nn.Linear(48, 64), normal(20, 48)
    twin = copy.deepcopy(layer)
    run = compiled(twin)
    pairs = list(zip([layer(x), layer(x)], [run(x), run(x)], strict=True))
    grads = []
    for y, z in pairs:
        assert torch.equal(y, z)
        want = torch.autograd.grad(y.square().sum(), layer.weight)[0]
        assert torch.equal(torch.autograd.grad(z.square().sum(), twin.weight)[0], want)
        grads.append(want)
    assert not torch.equal(*grads)


def test_a_spec_that_a_recipe_has_too() -> None:
    x, w = normal(8, 64), normal(8, 64, seed=1).requires_grad_()

    def both(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return bs.quantize(x, "mxfp8").dequantize() + bs.linear(x, w, recipe="mxfp8").sum()

    run = compiled(both, backend="aot_eager")
    assert torch.equal(run(x, w), both(x, w))


def test_specs_and_recipes_are_values_in_compiled_code() -> None:
    outside, lean = bs.spec("mxfp8"), bs.recipe("mxfp8").replace(keep_w=False)

    def compare(x: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
        q, made = bs.quantize(x, "mxfp8"), bs.recipe("mxfp8[keep_w=False]")
        return x + 1, [
            q.spec == bs.spec("mxfp8"),
            q.spec == outside,
            bs.spec("mxfp4") == bs.spec("mxfp8"),
            bs.spec("mxfp4") != bs.spec("mxfp8"),
            bs.spec("mxfp4") in (bs.spec("mxfp8"), bs.spec("mxfp4", block=(1, 32))),
            bs.spec("mxfp8") is None,
            bs.spec("mxfp8") == None,  # noqa: E711
            made == bs.recipe("mxfp8").replace(keep_w=False),
            made == lean,
            made == bs.recipe("mxfp8"),
        ]

    y, got = compiled(compare, backend="aot_eager")(normal(4, 64))
    assert torch.equal(y, normal(4, 64) + 1)
    assert got == compare(normal(4, 64))[1]


@pytest.mark.skipif(BEFORE_2_13, reason="PyTorch compiles copy.deepcopy from 2.13 on")
def test_specs_and_recipes_are_copied_in_compiled_code() -> None:
    def copies(x: torch.Tensor) -> tuple[torch.Tensor, bool, bool]:
        spec, recipe = bs.spec("mxfp8"), bs.recipe("mxfp8[keep_w=False]")
        return x + 1, copy.deepcopy(spec) == spec, copy.deepcopy(recipe) == recipe

    assert compiled(copies, backend="aot_eager")(normal(4, 64))[1:] == (True, True)


def test_a_refusal_is_caught_in_compiled_code() -> None:
    texts: list[Callable[[torch.Tensor], object]] = [
        lambda x: bs.spec("nvpf4"),
        lambda x: bs.quantize(x, "nvfp4[block=3x3]"),
        lambda x: bs.recipe("nvpf4"),
        lambda x: bs.recipe("mxfp8[fprop_x=nvfp4]"),
        lambda x: bs.recipe("mxfp8").replace(fprop_x="nvfp4"),
        lambda x: bs.Recipe("mxfp8"),
        lambda x: bs.linear(x, x, recipe="mxfp8[keep_w=2]"),
    ]

    def caught(x: torch.Tensor) -> int:
        count = 0
        for make in texts:
            try:
                make(x)
            except ValueError:
                count += 1
        return count

    assert compiled(caught, backend="aot_eager")(normal(4, 64)) == len(texts)


def test_a_layout_is_refused_in_the_same_words() -> None:
    x = normal(32, 64)
    q = bs.quantize(x, "nvfp4")
    calls: list[Callable[[], object]] = [
        lambda: bs.quantize(x, "nvfp4", layout="mn_major").codes,
        lambda: bs.quantize(x, "nvfp4", layout="diagonal").codes,
        lambda: bs.quantize_dual(x, "nvfp4", "nvfp4", col_layout="mn_major")[0].codes,
        lambda: bs.relayout(q, "mn_major").codes,
    ]

    def said(run: Callable[[], object]) -> str:
        with pytest.raises(ValueError, match="layout") as error:
            run()
        return str(error.value)

    told = [said(call) for call in calls]
    operations = ["quantize", "quantize", "quantize_dual", "relayout"]
    assert [text.split(": ")[0] for text in told] == operations
    assert [said(torch.compile(call, backend="aot_eager")) for call in calls] == told


def test_conversion_after_compilation_is_seen() -> None:
    model = Net()
    run = compiled(model, backend="aot_eager")
    x = normal(20, 48)
    exact = run(x)
    bs.convert(model, "mxfp4")
    assert torch.equal(run(x), model(x))
    assert not torch.equal(run(x), exact)
    twin = copy.deepcopy(model)
    bs.revert(model)
    assert torch.equal(run(x), exact)
    assert torch.equal(twin(x), compiled(twin, backend="aot_eager")(x))


def test_a_number_of_groups_that_a_compiler_does_not_know() -> None:
    """On a GPU it decides how operands in MXFP4 are stored; the fakes need no GPU."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        rows = mode.from_tensor(torch.zeros(64, 70), static_shapes=False).shape[0]
        groups = mode.from_tensor(torch.zeros(5), static_shapes=False).shape[0]
        x = torch.empty(rows, 70, dtype=torch.bfloat16, device="cuda")
        ends = torch.empty(groups, dtype=torch.int32, device="cuda")
        made = torch.ops.blockscale.quantize_input(x, bs.recipe("mxfp4").text, True, ends)
    assert [t.device.type for t in made] == ["cuda", "cuda"]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_transforms_of_functions_are_refused_in_compiled_code(recipe: str) -> None:
    """There they would give gradients of 0: PyTorch does not know yet that they are needed."""
    model, x = nn.Sequential(nn.Linear(64, 32)), normal(4, 64)
    bs.convert(model, recipe)

    def loss(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x)
        return y.sum()

    def without_gradient(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = loss(x)
        return x.sum() + y

    def compiled_gradient(of: Callable[..., Any], **others: Any) -> torch.Tensor:
        made: torch.Tensor = torch.compile(torch.func.grad(of), backend="aot_eager", **others)(x)
        return made

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"within torch\.func"):
        compiled_gradient(loss, fullgraph=True)
    with pytest.raises(ValueError, match=r"^linear: x = within torch\.func; need torch\.no_grad"):
        compiled_gradient(loss)
    assert torch.equal(compiled_gradient(without_gradient), torch.ones_like(x))
    # A function that PyTorch then gives up to compile goes on as before.
    called = torch.compile(loss, backend="aot_eager")
    with pytest.raises(ValueError, match=r"within torch\.func"):
        torch.func.grad(called)(x)
    with torch.no_grad():
        assert torch.equal(called(x), loss(x))
    called(x).backward()  # type: ignore[no-untyped-call]
