"""matmul and linear on each device against sums in double precision; and on a GPU in
graphs and on side streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import blockscale as bs
import pytest
import torch

OPS = torch.ops.blockscale
RECIPES = [name for name in bs.recipe_names() if not bs.recipe(name).cuda_needs and name != "bf16"]
SQUARES_ON_THE_LEFT = (
    "mxfp4[fprop_x=mxfp4[block=32x32],dgrad_dy=mxfp4[block=32x32],"
    "wgrad_dy=mxfp4[block=32x32],wgrad_x=mxfp4]"
)
RNG = bs.Rng(0x1234_5678_9ABC_DEF0, (3 << 16) | 1)


def normal(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=random)


# --- matmul ---------------------------------------------------------------------------------------


def factors(q: bs.QuantizedTensor) -> tuple[torch.Tensor, float]:
    """scale · code in double, [lines, extent], and the outer scale: what matmul sums over."""
    q = q.to("cpu")
    rows, length = q.shape if q.axis == -1 else q.shape[::-1]
    extent = -(-length // q.spec.extent_multiple) * q.spec.extent_multiple
    plain = str(bs.spec(q.spec, outer=False, hadamard=None))
    value = OPS.dequantize(
        q.codes, q.scales, torch.empty(0), plain, -1, [rows, extent], q.layout, torch.float32
    )
    return value.double(), 1.0 if q.outer is None else float(q.outer)


def largest_sums(va: torch.Tensor, vb: torch.Tensor) -> torch.Tensor:
    """The largest product or partial sum of each block of 128, added over the blocks."""
    total = va.new_zeros(va.shape[0], vb.shape[0])
    for k in range(0, va.shape[1], 128):
        products = va[:, None, k : k + 128] * vb[None, :, k : k + 128]
        total += torch.maximum(products.abs(), products.cumsum(-1).abs()).amax(-1)
    return total


MXFP4 = ("mxfp4", "mxfp4")  # operands that FP8 tensor cores multiply


def check_product(
    got: torch.Tensor,
    a: bs.QuantizedTensor,
    b: bs.QuantizedTensor,
    bias: torch.Tensor | None = None,
    what: object = "",
    more: torch.Tensor | float = 0.0,
) -> None:
    """Within the bound of K additions in FP32, in any order.

    u = 2^-24. The tensor cores of a GPU cut a sum off where others round it: 2u an addition. Then
    the outer scales' product, its product with the sum and the bias are rounded, and the result,
    perhaps to BF16. On FP8 codes they add 32 products and the sum so far at once, each cut to 13
    bits below the largest: at most 33 errors of 2^-13 of the sum of magnitudes, in 4 steps a block
    of 128; the blocks are scaled and added in FP32.
    """
    (va, oa), (vb, ob) = factors(a), factors(b)
    outer, u, k = oa * ob, 2.0**-24, va.shape[1]
    sums, magnitude = outer * (va @ vb.t()), abs(outer) * (va.abs() @ vb.abs().t())
    exact = sums if bias is None else sums + bias.detach().double().cpu()
    bound = 2 * (k + 4) * u * magnitude + 3 * u * (sums.abs() + exact.abs()) + 2.0**-126
    if got.is_cuda and (a.spec.scale == "fp32" or (a.spec.family, b.spec.family) == MXFP4):
        bound += 4 * 33 * 2.0**-13 * largest_sums(va.to(got.device), vb.to(got.device)).cpu()
    bound += more
    if got.dtype == torch.bfloat16:
        bound += 2.0**-8 * (exact.abs() + bound)
    if got.dtype == torch.float16:
        bound += 2.0**-11 * (exact.abs() + bound) + 2.0**-25
    error = (got.detach().double().cpu() - exact).abs()
    assert got.shape == exact.shape, what
    assert bool((error <= bound).all()), (what, float((error - bound).max()))


PAIRS = (
    ("fp8_1x128", "fp8_128x128"),
    ("fp8_1x128[element=e5m2]", "fp8_1x128"),
    ("fp8_128x128", "fp8_128x128[element=e5m2]"),
    ("mxfp8", "mxfp8[element=e5m2]"),
    ("mxfp8[block=32x32]", "mxfp4"),
    ("mxfp4", "mxfp4"),
    ("mxfp4[block=32x32]", "mxfp4[rounding=stochastic,scale_rule=rceil]"),
    ("mxfp6", "mxfp6[element=e3m2]"),
    ("mxfp4[hadamard=16:0x0]", "mxfp4[hadamard=16:0x0]"),
    ("nvfp4", "nvfp4[block=16x16]"),
    ("nvfp4[hadamard=16,rounding=stochastic]", "nvfp4[hadamard=16]"),
    ("nvfp4[hadamard=128]", "nvfp4[hadamard=128]"),
    ("nvfp4[outer=false]", "nvfp4"),
    ("amdfp4", "nvfp4"),
    ("amdfp4[hadamard=64,outer=false]", "amdfp4[hadamard=64]"),
)


@pytest.mark.parametrize(("a_spec", "b_spec"), PAIRS)
def test_matmul(a_spec: str, b_spec: str, device: torch.device, random: torch.Generator) -> None:
    """Tails, odd extents, one element, both axes, any bias: what the operands say, in FP32."""
    for m, n, k in ((1, 1, 1), (17, 33, 70), (64, 48, 128), (5, 130, 1), (37, 20, 2891)):
        for a_axis, b_axis in itertools.product((-1, -2), (-1, -2)):
            a = normal(random, *((m, k) if a_axis == -1 else (k, m))).to(device)
            b = normal(random, *((n, k) if b_axis == -1 else (k, n))).to(device)
            qa = bs.quantize(a, a_spec, a_axis, rng=RNG)
            qb = bs.quantize(b, b_spec, b_axis, rng=RNG)
            for bias_type, out in itertools.product(
                (None, torch.float32, torch.bfloat16), (torch.float32, torch.bfloat16)
            ):
                bias = None
                if bias_type is not None:
                    bias = normal(random, n).to(device, bias_type)
                got = bs.matmul(qa, qb, bias, out)
                assert (got.dtype, got.device) == (out, qa.device)
                check_product(got, qa, qb, bias, (m, n, k, a_axis, b_axis, bias_type, out))


# cuBLAS rounds parts of the sums to BF16, or sums before their bias, where an extent is no multiple
# of 8; and for some long K (the last three) it leaves out what follows the last multiple of 64.
EXTENTS = (
    (786, 6, 1567), (1022, 59, 2112), (1211, 578, 4377), (1729, 520, 5492), (2003, 139, 4752),
    (1024, 64, 2112), (100, 32, 51208), (3, 16, 24328), (213, 16, 38992),
)  # fmt: skip


@pytest.mark.parametrize(("m", "n", "k"), EXTENTS)
def test_sums_are_kept_in_fp32(
    m: int, n: int, k: int, device: torch.device, random: torch.Generator
) -> None:
    """Small integers, whose sums FP32 holds exactly, and biases that cancel some of them."""
    a, b = (torch.randint(-8, 9, (r, k), generator=random).to(device).bfloat16() for r in (m, n))
    qa, qb = bs.quantize(a, "mxfp8"), bs.quantize(b, "mxfp8")
    assert torch.equal(qa.dequantize(), a)
    assert torch.equal(qb.dequantize(), b)
    sums = a.double() @ b.double().t()
    some = torch.randint(0, m, (n,), generator=random).to(device)
    bias = -sums[some, torch.arange(n, device=device)].bfloat16()
    for added, out in itertools.product((None, bias), (torch.float32, torch.bfloat16)):
        want = sums if added is None else sums + added.double()
        assert torch.equal(bs.matmul(qa, qb, added, out), want.float().to(out)), (added, out)


@pytest.mark.parametrize("spec", ["nvfp4", "mxfp4"])
def test_matmul_reads_any_layout(spec: str, device: torch.device, random: torch.Generator) -> None:
    layouts = ("linear", "nv_128x4", "aiter_scale", "mfma_16x16", "mfma_16x16+nv_128x4")
    x, w = normal(random, 33, 70).to(device), normal(random, 20, 70).to(device)
    want = bs.matmul(bs.quantize(x, spec), bs.quantize(w, spec), out_dtype=torch.float32)
    for a, b in itertools.product(layouts, layouts):
        qa, qb = bs.quantize(x, spec, layout=a), bs.quantize(w, spec, layout=b)
        assert torch.equal(bs.matmul(qa, qb, out_dtype=torch.float32), want), (a, b)


@pytest.mark.parametrize("spread", [24, 60, 110])
def test_mxfp4_of_any_scales(spread: int, device: torch.device, random: torch.Generator) -> None:
    """As FP8 nothing is lost of blocks that differ by 2^28, and 2^-31 of a line's largest value of
    those further down."""
    a, b = (
        normal(random, lines, 640).view(lines, -1, 32)
        * 2.0 ** -torch.randint(spread + 1, (lines, 20, 1), generator=random)
        * 2.0 ** (spread // 2)
        for lines in (70, 133)
    )
    qa, qb = (bs.quantize(x.flatten(1).to(device), "mxfp4") for x in (a, b))
    (va, _), (vb, _) = factors(qa), factors(qb)
    lost: torch.Tensor | float = 0.0
    if spread > 28:
        lost = 2.0**-31 * (
            va.abs().amax(1, keepdim=True) * vb.abs().sum(1)
            + va.abs().sum(1, keepdim=True) * vb.abs().amax(1)
        )
    check_product(bs.matmul(qa, qb, out_dtype=torch.float32), qa, qb, more=lost)


def test_what_follows_the_sums(cuda: torch.device, random: torch.Generator) -> None:
    """Outer scales and bias are applied to the FP32 sums as on the CPU: in double, one rounding
    to FP32, one more to BF16. The same sums come from the same operands without outer scales."""
    for m, n, k in ((1, 1, 16), (17, 33, 70), (300, 1001, 128), (64, 4096, 300)):
        x, w = (bs.quantize(normal(random, r, k).to(cuda), "nvfp4") for r in (m, n))
        plain = bs.spec("nvfp4", outer=False)
        a, b = (bs.QuantizedTensor(q.codes, q.scales, None, plain, -1, q.shape) for q in (x, w))
        sums = bs.matmul(a, b, out_dtype=torch.float32)
        assert x.outer is not None
        assert w.outer is not None
        exact = sums.double() * (x.outer.double() * w.outer.double())
        for bias_type, out in itertools.product(
            (None, torch.float32, torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)
        ):
            bias = None if bias_type is None else normal(random, n).to(cuda, bias_type)
            want = exact if bias is None else exact + bias.double()
            got = bs.matmul(x, w, bias, out)
            assert torch.equal(got, want.float().to(out)), (m, n, k, bias_type, out)


def test_fp8_matmul_reads_any_layout(device: torch.device, random: torch.Generator) -> None:
    x, w = normal(random, 133, 390).to(device), normal(random, 300, 390).to(device)
    for spec in ("fp8_1x128", "fp8_128x128"):
        results = [
            bs.matmul(bs.quantize(x, "fp8_1x128", layout=a), bs.quantize(w, spec, layout=b))
            for a, b in itertools.product(("linear", "mn_major"), repeat=2)
        ]
        assert all(torch.equal(results[0], r) for r in results), spec


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 70), (5, 0, 70), (5, 7, 0), (0, 0, 0)])
@pytest.mark.parametrize("spec", ["nvfp4", "mxfp8", "fp8_1x128"])
def test_matmul_of_nothing(spec: str, m: int, n: int, k: int, device: torch.device) -> None:
    a, b = (bs.quantize(torch.ones(r, k, device=device), spec) for r in (m, n))
    bias = torch.arange(n, dtype=torch.float32, device=device)
    for out in (torch.float32, torch.bfloat16):
        assert torch.equal(bs.matmul(a, b, None, out), torch.zeros(m, n, device=device, dtype=out))
        want = bias.expand(m, n).to(out)
        assert torch.equal(bs.matmul(a, b, bias, out), want)


def test_matmul_never_hides_nan(device: torch.device, random: torch.Generator) -> None:
    x, w = normal(random, 33, 70), normal(random, 20, 70).to(device)
    x[4, 5], x[6, 7] = float("nan"), float("inf")
    y = bs.matmul(bs.quantize(x.to(device), "mxfp8"), bs.quantize(w, "mxfp8"))
    assert y[4].isnan().all()
    assert not y[6].isfinite().any()
    rest = [row for row in range(33) if row not in (4, 6)]
    assert y[rest].isfinite().all()
    q = bs.quantize(x.to(device), "nvfp4")  # one amax for the whole tensor
    assert bs.matmul(q, bs.quantize(w, "nvfp4")).isnan().all()


CODE_SPACES = (
    *(("mxfp8", e) for e in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")),
    *(("mxfp6", e) for e in ("e2m3", "e3m2")),
    ("mxfp4", "e2m1"),
    ("nvfp4", "e2m1"),
    ("amdfp4", "e2m1"),
)


@pytest.mark.parametrize(("family", "element"), CODE_SPACES)
def test_every_scale_times_every_code_is_a_bf16(
    family: str, element: str, device: torch.device
) -> None:
    """What matmul on a GPU relies on; below 2^-126 the nearest multiple of 2^-133."""
    spec = bs.spec(family, element=element, outer=False)
    bits = next(e["bits"] for e in bs.describe()["elements"] if e["name"] == element)
    block = spec.block[1]
    columns = -(-(1 << bits) // block) * block
    codes = torch.arange(columns).remainder(1 << bits).to(torch.uint8)
    if spec.codes_per_byte == 2:
        codes = codes[::2] | codes[1::2] << 4
    scales = torch.arange(128 if spec.scale == "e4m3" else 256, dtype=torch.uint8)
    q = bs.QuantizedTensor(
        codes.expand(len(scales), -1).contiguous().view(spec.code_dtype).to(device),
        scales[:, None].expand(-1, columns // block).contiguous().view(spec.scale_dtype).to(device),
        None, spec, -1, (len(scales), columns),
    )  # fmt: skip
    exact = q.dequantize(torch.float32).cpu().double()
    half = q.dequantize(torch.bfloat16).cpu().double()
    error = (half - exact).abs()
    assert torch.equal(half.isnan(), exact.isnan())
    normal_range = (exact.abs() >= 2.0**-126) | (exact == 0)
    assert torch.equal(half[normal_range], exact[normal_range])
    small = ~normal_range & ~exact.isnan()
    assert bool((error[small] <= 2.0**-134).all())
    assert bool(small.any()) == (spec.scale == "e8m0")


def test_what_matmul_refuses(cuda: torch.device) -> None:
    x = torch.ones(4, 128, device=cuda)
    fp8 = bs.quantize(x, "fp8_1x128[element=e4m3fnuz]")
    with pytest.raises(ValueError, match="; need ") as error:
        bs.matmul(fp8, bs.quantize(x, "fp8_128x128"))
    assert str(error.value) == (
        "matmul: a = fp8_1x128[element=e4m3fnuz] on cuda; need e4m3fn or e5m2 elements, which "
        "NVIDIA's tensor cores read; dequantize both operands and use torch.mm, or run on the CPU"
    )
    nvfp4 = bs.quantize(x, "nvfp4")
    for a, b, text in (
        (nvfp4, bs.quantize(x, "fp8_1x128"), "matmul: b = fp8_1x128; need blocks of 16"),
        (nvfp4, bs.quantize(x, "nvfp4[hadamard=16]"), "matmul: b = nvfp4[hadamard"),
        (nvfp4, bs.quantize(x, "mxfp8"), "matmul: b = mxfp8; need blocks of 16"),
    ):
        with pytest.raises(ValueError, match="; need ") as error:
            bs.matmul(a, b)
        assert str(error.value).startswith(text), error.value


# --- linear ---------------------------------------------------------------------------------------


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
