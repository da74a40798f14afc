"""`bs.grouped_linear` against its pieces and against a `bs.linear` for every group, bit for bit;
`accumulate_into` of both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import blockscale as bs
import pytest
import torch
from bits import QUANTIZED, RNG
from models import BANDS
from torch.utils.checkpoint import checkpoint

# Ragged, empty, of one row; the last ones short of the rows.
ENDS = ([0, 5, 5, 6, 131, 150], [70, 150], [150], [0, 0, 0], [1, 2, 3])
T, N, K = 150, 37, 70


class Case(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    dy: torch.Tensor
    offsets: torch.Tensor


def make(
    ends: list[int],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    w_dtype: torch.dtype | None = None,
    shape: tuple[int, int, int] = (T, N, K),
    wide: bool = False,
) -> Case:
    g = torch.Generator().manual_seed(1)
    t, n, k = shape
    return Case(
        torch.randn(t, k, generator=g).to(device, dtype).requires_grad_(),
        torch.randn(len(ends), n, k, generator=g).to(device, w_dtype or dtype).requires_grad_(),
        torch.randn(t, n, generator=g).to(device, dtype),
        torch.tensor(ends, dtype=torch.int64 if wide else torch.int32, device=device),
    )


Result = tuple[torch.Tensor, ...]


def run(case: Case, recipe: str | bs.Recipe, rng: bs.Rng = RNG) -> Result:
    """[y, dx, dw] of bs.grouped_linear."""
    y = bs.grouped_linear(case.x, case.w, case.offsets, recipe, rng)
    return (y, *torch.autograd.grad(y, (case.x, case.w), case.dy.to(y.dtype)))


def by_hand(case: Case, r: bs.Recipe) -> Result:
    """The same from quantize and grouped_matmul."""

    def rows(t: torch.Tensor, spec: bs.Spec | None, axis: int, role: str) -> bs.QuantizedTensor:
        assert spec is not None
        return bs.quantize(t.detach(), spec, axis, rng=RNG.role(role), offsets=case.offsets)

    def matrices(spec: bs.Spec | None, axis: int) -> bs.QuantizedTensor:
        assert spec is not None
        return bs.quantize(case.w.detach(), spec, axis, rng=RNG.role("w"), batch_dims=1)

    x, dy, mm, o = case.x, case.dy, bs.grouped_matmul, case.offsets
    return (
        mm(rows(x, r.fprop_x, -1, "x"), matrices(r.fprop_w, -1), o, None, x.dtype),
        mm(rows(dy, r.dgrad_dy, -1, "dy"), matrices(r.dgrad_w, -2), o, None, x.dtype),
        mm(rows(dy, r.wgrad_dy, -2, "dy"), rows(x, r.wgrad_x, -2, "x"), o, None, case.w.dtype),
    )


def by_linears(case: Case, recipe: str | bs.Recipe) -> Result:
    """A linear for each group, on its rows alone."""
    x, w, ends = case.x.detach(), case.w.detach(), case.offsets.tolist()
    y, dx, dw = x.new_zeros(x.shape[0], w.shape[1]), torch.zeros_like(x), torch.zeros_like(w)
    for g, (b, e) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        xs, ws = x[b:e].clone().requires_grad_(), w[g].clone().requires_grad_()
        made = bs.linear(xs, ws, None, recipe, RNG)
        y[b:e] = made.detach()
        dx[b:e], dw[g] = torch.autograd.grad(made, (xs, ws), case.dy[b:e])
    return y, dx, dw


def assert_same(got: Result, want: Result, what: object = "") -> None:
    for name, g, w in zip(("y", "dx", "dw"), got, want, strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape), (name, what)
        assert torch.equal(g, w), (name, what)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_is_the_composition_of_its_pieces(recipe: str, device: torch.device) -> None:
    for i, ends in enumerate(ENDS):
        case = make(ends, device, w_dtype=torch.float32 if i % 2 else None, wide=i % 2 == 0)
        assert_same(run(case, recipe), by_hand(case, bs.recipe(recipe)), ends)


def nearest(name: str) -> bs.Recipe:
    """The recipe without random bits, which belong to a group's place."""
    r = bs.recipe(name)
    specs: dict[str, Any] = {
        operand: bs.spec(getattr(r, operand), rounding="nearest")
        for operand in ("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w", "wgrad_dy", "wgrad_x")
    }
    return r.replace(**specs)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_is_a_linear_for_every_group(recipe: str) -> None:
    for ends in ENDS:
        for dtype in (torch.bfloat16, torch.float32):
            case = make(ends, dtype=dtype)
            assert_same(run(case, nearest(recipe)), by_linears(case, nearest(recipe)), ends)


@pytest.mark.parametrize("recipe", [name for name in QUANTIZED if bs.recipe(name).stochastic])
def test_random_bits_are_those_of_the_place_of_a_group(recipe: str) -> None:
    """The composition draws them by `offsets`; another key draws others."""
    case = make(ENDS[0])
    one, same, other = (run(case, recipe, bs.Rng(1, o)) for o in (0, 0, 1))
    assert_same(one, same)
    assert torch.equal(one[0], other[0])
    assert not torch.equal(one[1], other[1])
    assert not torch.equal(one[2], other[2])


def exact(case: Case) -> Result:
    """In float64, by group."""
    x, w, dy = (t.detach().cpu().double() for t in case[:3])
    y, dx, dw = x.new_zeros(x.shape[0], w.shape[1]), torch.zeros_like(x), torch.zeros_like(w)
    ends = case.offsets.tolist()
    for g, (b, e) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        y[b:e], dx[b:e], dw[g] = x[b:e] @ w[g].T, dy[b:e] @ w[g], dy[b:e].T @ x[b:e]
    return y, dx, dw


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_error_is_that_of_the_format(recipe: str, device: torch.device) -> None:
    case = make([100, 100, 163, 300], device, shape=(300, 128, 128))
    low, high = BANDS[recipe]
    for name, g, w in zip(("y", "dx", "dw"), run(case, recipe), exact(case), strict=True):
        error = ((g.cpu().double() - w).norm() / w.norm()).item()
        assert low < error < high, (name, error)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_fp16_is_rounded_from_fp32(recipe: str, device: torch.device) -> None:
    """The same values in FP32 have the same operands, hence the same sums but for their order."""
    case = make([100, 100, 163, 300], device, torch.float16, shape=(300, 40, 136))
    x, w, dy = (t.detach().float() for t in case[:3])
    wide = Case(x.requires_grad_(), w.requires_grad_(), dy, case.offsets)
    for got, want in zip(run(case, recipe), run(wide, recipe), strict=True):
        assert got.dtype == torch.float16
        torch.testing.assert_close(got.float(), want, rtol=2.0**-11, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_is_plain(dtype: torch.dtype, device: torch.device) -> None:
    """Sums of 128 and 70 products: FP32's rounding of them, then the dtype's, on either side."""
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("PyTorch's grouped GEMM is of bfloat16")
    for ends in ENDS:
        case = make(ends, device, dtype=dtype)
        unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
        x, w, dy = (t.detach().abs() for t in case[:3])
        magnitudes = exact(Case(x, w, dy, case.offsets))
        got, want = run(case, "bf16"), exact(case)
        for g, true, m in zip(got, want, magnitudes, strict=True):
            allowed = (T + 4) * 2.0**-24 * m + 2 * unit * true.abs()
            assert ((g.cpu().double() - true).abs() <= allowed).all(), ends


MIXES = {
    "fprop high precision": dict(fprop_x=None, fprop_w=None),
    "wgrad high precision": dict(wgrad_x=None, wgrad_dy=None),
    "weight only": dict(fprop_x=None, dgrad_dy=None),
}


@pytest.mark.parametrize("mix", MIXES)
def test_high_precision_operands(mix: str, device: torch.device) -> None:
    """What the other operand decodes to, multiplied in BF16."""
    r = bs.recipe("mxfp8").replace(**MIXES[mix])
    for ends in ([0, 64, 64, 65, 140], [150]):
        check_mix(make(ends, device), r)


def check_mix(case: Case, r: bs.Recipe) -> None:

    def value(t: torch.Tensor, spec: bs.Spec | None, axis: int) -> torch.Tensor:
        if spec is None:
            return t.detach()
        batch = t.dim() - 2
        q = bs.quantize(t, spec, axis, batch_dims=batch, offsets=None if batch else case.offsets)
        return q.dequantize()

    pairs = (
        (value(case.x, r.fprop_x, -1), value(case.w, r.fprop_w, -1), case.dy),
        (case.x.detach(), value(case.w, r.dgrad_w, -2), value(case.dy, r.dgrad_dy, -1)),
        (value(case.x, r.wgrad_x, -2), case.w.detach(), value(case.dy, r.wgrad_dy, -2)),
    )
    for i, (got, (x, w, dy)) in enumerate(zip(run(case, r), pairs, strict=True)):
        want = exact(Case(x, w, dy, case.offsets))[i]
        torch.testing.assert_close(got.cpu().double(), want, rtol=2.0**-7, atol=2.0**-6)


def test_rows_of_no_group_and_empty_groups(device: torch.device) -> None:
    """0, whatever x and dy hold there; nothing of theirs is seen elsewhere."""
    for recipe in bs.recipe_names():
        case = make([20, 20, 90], device)
        clean = run(case, recipe)
        with torch.no_grad():
            case.x[90:] = float("nan")
            case.dy[90:] = float("inf")
        got = run(case, recipe)
        assert_same(got, clean, recipe)
        assert not got[0][90:].any()
        assert not got[1][90:].any()
        assert not got[2][1].any()


def test_nan_stays_in_its_group(device: torch.device) -> None:
    for recipe in QUANTIZED:
        case = make([50, 100, 150], device)
        with torch.no_grad():
            case.x[60, 7] = float("nan")
        y, dx, dw = run(case, recipe)
        assert y[60].isnan().all()
        assert dw[1].isnan().any()
        for part in (y[:50], y[100:], dx, dw[0], dw[2]):
            assert not part.isnan().any(), recipe


@pytest.mark.parametrize("shape", [(0, 37, 70), (6, 37, 0), (6, 0, 70), (1, 1, 1)])
def test_degenerate_extents(shape: tuple[int, int, int], device: torch.device) -> None:
    for recipe in bs.recipe_names():
        t, n, k = shape
        y, dx, dw = run(make([0, t, t], device, shape=shape), recipe)
        assert (y.shape, dx.shape, dw.shape) == ((t, n), (t, k), (3, n, k))
        if min(shape) == 0:
            assert not y.any()
            assert not dx.any()
            assert not dw.any()


def test_any_strides(device: torch.device) -> None:
    """What torchtitan's experts pass: w as a transposed view, x a part of a buffer."""
    case = make(ENDS[0], device)
    want = run(case, "nvfp4")
    buffer = torch.zeros(T, K + 8, dtype=torch.bfloat16, device=device)
    buffer[:, 3 : 3 + K] = case.x.detach()
    turned = case.w.detach().mT.contiguous().mT.requires_grad_()
    assert not turned.is_contiguous()
    dy = case.dy.mT.contiguous().mT
    views = Case(buffer[:, 3 : 3 + K].requires_grad_(), turned, dy, case.offsets)
    assert_same(run(views, "nvfp4"), want)


def test_makes_only_the_gradients_that_are_asked_for() -> None:
    case = make(ENDS[0])
    want = run(case, "nvfp4")
    frozen = case.w.detach()
    y = bs.grouped_linear(case.x, frozen, case.offsets, "nvfp4", RNG)
    assert torch.equal(torch.autograd.grad(y, case.x, case.dy)[0], want[1])
    y = bs.grouped_linear(case.x.detach(), case.w, case.offsets, "nvfp4", RNG)
    assert torch.equal(torch.autograd.grad(y, case.w, case.dy)[0], want[2])
    with torch.no_grad():
        assert torch.equal(bs.grouped_linear(*case[:2], case.offsets, "nvfp4", RNG), want[0])


def test_saves_the_quantized_operands_and_nothing_else() -> None:
    case = make([16, 40, 64], shape=(64, 48, 32))
    kept: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        bs.grouped_linear(*case[:2], case.offsets, "nvfp4", RNG)
    room = 128  # of three groups along the contraction axis, whose lines are whole tiles
    x = 32 * room // 2 + 32 * room // 16 + 3 * 4
    w = 3 * (32 * 48 // 2 + (32 // 16) * (48 // 16) + 4)
    assert sum(t.numel() * t.element_size() for t in kept) == x + w + 16 + case.offsets.numel() * 4


# --- in training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED])
def test_recomputation_gives_the_same_bits(recipe: str, device: torch.device) -> None:
    case = make(ENDS[0], device)
    want = run(case, recipe)
    y = checkpoint(
        bs.grouped_linear, case.x, case.w, case.offsets, recipe, RNG, use_reentrant=False
    )
    assert isinstance(y, torch.Tensor)
    assert_same((y, *torch.autograd.grad(y, (case.x, case.w), case.dy)), want)


@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED])
def test_compiles_whole(recipe: str, device: torch.device) -> None:
    torch._dynamo.reset()

    def step(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return bs.grouped_linear(x, w, offsets, recipe, RNG) * 2

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for ends in ENDS[0], [10, 20, 30, 40, 50, 150]:
        case = make(ends, device)
        results = []
        for call in (step, compiled):
            y = call(case.x, case.w, case.offsets)
            results.append((y, *torch.autograd.grad(y, (case.x, case.w), case.dy)))
        assert_same(results[1], results[0], ends)


def test_experts_that_are_counted_compile_whole(device: torch.device) -> None:
    """The compiler does not know how many numbers bincount returns."""
    torch._dynamo.reset()
    case = make(ENDS[0], device)
    experts = case.w.shape[0]

    def step(x: torch.Tensor, w: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        offsets = torch.bincount(chosen, minlength=experts).cumsum(0)
        return bs.grouped_linear(x[chosen.argsort(stable=True)], w, offsets, "nvfp4", RNG)

    chosen = torch.arange(case.x.shape[0], device=device) % experts
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        results = []
        for call in (step, compiled):
            y = call(case.x, case.w, chosen)
            results.append((y, *torch.autograd.grad(y, (case.x, case.w), case.dy)))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED])
def test_captured_graphs_see_new_offsets(recipe: str, cuda: torch.device) -> None:
    case = make([0, 100, 150], cuda)
    seed, offset = torch.tensor(5, device=cuda), torch.tensor(6, device=cuda)
    rng = bs.Rng(seed, offset)
    run(case, recipe, rng)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(case, recipe, rng)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = run(case, recipe, rng)
    for ends in ([5, 140, 150], [0, 0, 0], [128, 128, 129]):
        case.offsets.copy_(torch.tensor(ends))
        graph.replay()
        assert_same(held, run(case, recipe, rng), ends)


@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED])
def test_wrong_offsets_on_a_gpu_make_nan(recipe: str, cuda: torch.device) -> None:
    for ends in ([100, 50, 150], [5, 6, 151], [-1, 5, 6]):
        for t in run(make(ends, cuda), recipe):
            assert t.isnan().all(), ends


# --- accumulate_into ------------------------------------------------------------------------------


def both(
    case: Case, grouped: bool
) -> tuple[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor]:
    """The function of (w, recipe, rng, into), w, and dy."""
    if grouped:
        return (
            lambda w, *a: bs.grouped_linear(case.x, w, case.offsets, a[0], a[1], a[2]),
            case.w,
            case.dy,
        )
    w = case.w.detach()[0].clone().requires_grad_()
    return lambda w, *a: bs.linear(case.x, w, None, a[0], a[1], a[2]), w, case.dy


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED])
def test_accumulates_into_a_buffer(
    recipe: str, grouped: bool, behind: int, device: torch.device
) -> None:
    """What the gradient adds up to, in FP32, at any element of a larger buffer; x's is as ever.
    PyTorch's own GEMMs, which are all of recipe bf16's, round to BF16 first."""
    case = make([0, 70, 70, 140], device)
    call, w, dy = both(case, grouped)
    plain = recipe == "bf16"
    own = w.detach().to(w.dtype if plain else torch.float32).requires_grad_()
    want_x, want = torch.autograd.grad(call(own, recipe, RNG, None), (case.x, own), dy)
    want = want.float()
    bucket = torch.full((behind + w.numel() + 1,), 0.5, device=device)
    main_grad = bucket[behind:-1].view(w.shape)
    for step in (1, 2):
        y = call(w, recipe, RNG, main_grad)
        made = torch.autograd.grad(y, (case.x, w), dy, allow_unused=True)
        assert [gradient is None for gradient in made] == [False, True]
        assert torch.equal(made[0], want_x)
        # At most two roundings of a sum on either side.
        rough = 0.5 + step * want
        allowed = 4 * 2.0**-23 * (rough.abs() + want.abs() + 1)
        assert ((main_grad - rough).abs() <= allowed).all()
    assert (bucket[[*range(behind), -1]] == 0.5).all()
    empty = make([0, 0, 0, 0], device)
    before = main_grad.clone()
    if grouped:
        y = bs.grouped_linear(empty.x, empty.w, empty.offsets, recipe, RNG, main_grad)
        y.backward(empty.dy)  # type: ignore[no-untyped-call]
        assert torch.equal(main_grad, before)


def test_accumulates_into_a_buffer_made_in_inference_mode() -> None:
    """It keeps no count of its changes."""
    call, w, dy = both(make([0, 70, 70, 140]), grouped=False)
    plain = torch.zeros(w.shape)
    with torch.inference_mode():
        kept_apart = torch.zeros(w.shape)
    for into in (plain, kept_apart):
        call(w, "nvfp4", RNG, into).backward(dy)  # type: ignore[no-untyped-call]
    assert plain.any()
    assert torch.equal(kept_apart, plain)


@pytest.mark.parametrize("grouped", [False, True])
def test_accumulates_when_compiled(grouped: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    case = make([0, 70, 70, 140], device)
    call, w, dy = both(case, grouped)
    results = []
    for f in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        into = torch.ones(w.shape, device=device)
        f(w, "nvfp4", RNG, into).backward(dy)  # type: ignore[no-untyped-call]
        results.append(into)
    assert torch.equal(results[1], results[0])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_buffer_that_changes_does_so_for_autograd_too(compiled: bool) -> None:
    """Autograd must refuse a backward that saved the buffer before it changed."""
    torch._dynamo.reset()
    call, w, dy = both(make([0, 70, 70, 140]), False)
    into, scale = torch.ones(w.shape), torch.ones((), requires_grad=True)
    scaled = (into * scale).sum()
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    run(w, "mxfp8", RNG, into).backward(dy)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scaled.backward()  # type: ignore[no-untyped-call]


# --- refusals -------------------------------------------------------------------------------------


def test_refusals_say_what_is_wrong() -> None:
    case = make([5, 140, 150])
    x, w, _, o = copy.copy(case)

    def refuses(message: str, *args: object, **more: object) -> None:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message) as error:
            bs.grouped_linear(*args, **{"rng": RNG, **more})  # type: ignore[arg-type]
        assert str(error.value).startswith("grouped_linear: ")
        assert "; need " in str(error.value)

    refuses(r"offsets = .*a tensor", x, w, [5, 140, 150])
    refuses(r"offsets\.shape = \[2\]; need \[3\]", x, w, o[:2])
    led = torch.cat([o.new_zeros(1), o])
    refuses(r"offsets\.shape = \[4\]; need \[3\].*leave the leading zero out", x, w, led)
    refuses(r"offsets\.dtype = float32; need int32 or int64", x, w, o.float())
    refuses(r"offsets\[1\] = 4 is smaller than offsets\[0\] = 5", x, w, torch.tensor([5, 4, 150]))
    refuses(r"offsets\[2\] = 151; need at most 150", x, w, torch.tensor([5, 40, 151]))
    refuses(r"w\.shape = \[37, 70\]; need rank 3, \[E, N, K\]", x, w[0], o)
    refuses(r"x\.shape = \[150, 69\]; need \[T, 70\]", x[:, 1:], w, o)
    refuses(r"x\.shape = \[1, 150, 70\]; need \[T, 70\]", x[None], w, o)
    refuses(r"rng = None; need a key", x, w, o, rng=None)
    refuses(r"rng = ", x, w, o, rng=5)
    refuses(r"accumulate_into = .*contiguous torch.float32\[3, 37, 70\]", x, w, o,
            accumulate_into=torch.zeros(3, 37, 70, dtype=torch.bfloat16))  # fmt: skip
    refuses(r"accumulate_into = given; need none: w needs no gradient", x, w.detach(), o,
            accumulate_into=torch.zeros(3, 37, 70))  # fmt: skip
    with pytest.raises(ValueError, match="need one of"):
        bs.grouped_linear(x, w, o, "nope")
