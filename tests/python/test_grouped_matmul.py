"""`grouped_matmul` against `matmul` of every group alone: bit for bit on the CPU, within a bound on
a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import blockscale as bs
import pytest
import torch
from bits import assert_same_bits
from torch._dynamo.testing import CompileCounter

# Specs of a and of b.
PAIRS = {
    "fp8": ("fp8_1x128", "fp8_128x128"),
    "fp8 lines": ("fp8_1x128", "fp8_1x128[element=e5m2]"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "mxfp6": ("mxfp6", "mxfp6"),
    "mxfp4": ("mxfp4", "mxfp4[block=32x32]"),
    "nvfp4": ("nvfp4", "nvfp4[block=16x16]"),
    "nvfp4 wide": ("nvfp4[hadamard=64]", "nvfp4[hadamard=64]"),
    "amdfp4": ("amdfp4", "amdfp4"),
}
ENDS = ([70], [0, 5, 5, 6, 200, 290], [128, 256, 300], [0, 0], [1, 2, 3])
T, K, N = 300, 136, 37


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.to(torch.bfloat16)


def spans(ends: list[int]) -> list[slice]:
    return [slice(b, e) for b, e in zip([0, *ends[:-1]], ends, strict=True)]


def rows_form(
    pair: str, ends: list[int], device: torch.device, dtype: torch.dtype = torch.int32
) -> tuple[bs.QuantizedTensor, bs.QuantizedTensor, torch.Tensor]:
    offsets = torch.tensor(ends, dtype=dtype, device=device)
    a = bs.quantize(normal(T, K).to(device), PAIRS[pair][0], offsets=offsets)
    w = normal(len(ends), N, K, seed=2).to(device)
    return a, bs.quantize(w, PAIRS[pair][1], batch_dims=1), offsets


def contraction_form(
    pair: str, ends: list[int], device: torch.device, dtype: torch.dtype = torch.int32
) -> tuple[bs.QuantizedTensor, bs.QuantizedTensor, torch.Tensor]:
    offsets = torch.tensor(ends, dtype=dtype, device=device)
    spec = PAIRS[pair][0]
    a = bs.quantize(normal(T, N).to(device), spec, -2, offsets=offsets)
    return a, bs.quantize(normal(T, K, seed=2).to(device), spec, -2, offsets=offsets), offsets


def by_pieces(
    pair: str, ends: list[int], along: bool, bias: torch.Tensor | None, out: torch.dtype
) -> torch.Tensor:
    """The product of each group from operands of its own, on the CPU."""
    a_spec, b_spec = PAIRS[pair]
    if along:
        a, b = normal(T, N), normal(T, K, seed=2)
        pieces = [
            (bs.quantize(a[s], a_spec, -2), bs.quantize(b[s], a_spec, -2)) for s in spans(ends)
        ]
    else:
        a, b = normal(T, K), normal(len(ends), N, K, seed=2)
        pieces = [(bs.quantize(a[s], a_spec), bs.quantize(w, b_spec))
                  for s, w in zip(spans(ends), b, strict=True)]  # fmt: skip
    made = [
        bs.matmul(qa, qb, None if bias is None else bias[g], out)
        for g, (qa, qb) in enumerate(pieces)
    ]
    if along:
        return torch.stack(made)
    return torch.cat([*made, torch.zeros(T - ends[-1], N, dtype=out)])


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_is_the_products_of_the_groups(pair: str, ends: list[int]) -> None:
    cpu = torch.device("cpu")
    for out, with_bias, wide in itertools.product(
        (torch.bfloat16, torch.float32), (False, True), (torch.int32, torch.int64)
    ):
        for along, form in ((False, rows_form), (True, contraction_form)):
            a, b, offsets = form(pair, ends, cpu, wide)
            bias = normal(len(ends), K if along else N) if with_bias else None
            got = bs.grouped_matmul(a, b, offsets, bias, out)
            assert torch.equal(got, by_pieces(pair, ends, along, bias, out))


def test_the_matrices_may_be_quantized_along_either_axis() -> None:
    """dgrad: what W [G, N, K] is along its columns."""
    offsets = torch.tensor([5, 140, 300])
    dy, w = normal(T, 96), normal(3, 96, K, seed=2)
    a = bs.quantize(dy, "mxfp8", offsets=offsets)
    b = bs.quantize(w, "mxfp8", -2, batch_dims=1)
    got = bs.grouped_matmul(a, b, offsets)
    turned = bs.quantize(w.mT.contiguous(), "mxfp8", batch_dims=1)
    assert torch.equal(got, bs.grouped_matmul(a, turned, offsets))


@pytest.mark.parametrize("along", [False, True])
def test_layouts_do_not_matter(along: bool) -> None:
    cpu, ends = torch.device("cpu"), [0, 5, 5, 6, 200, 290]
    for pair, layouts in (("nvfp4", ("nv_128x4", "mfma_16x16+aiter_scale")),
                          ("fp8", ("mn_major",)), ("mxfp4", ("aiter_scale",))):  # fmt: skip
        a, b, offsets = (contraction_form if along else rows_form)(pair, ends, cpu)
        want = bs.grouped_matmul(a, b, offsets)
        for layout in layouts:
            got = bs.grouped_matmul(bs.relayout(a, layout), bs.relayout(b, layout), offsets)
            assert torch.equal(got, want)


def test_nan_stays_in_its_group() -> None:
    offsets = torch.tensor([100, 200, 300])
    x, w = normal(T, K), normal(3, N, K)
    x[150, 7] = float("nan")
    a = bs.quantize(x, "nvfp4", offsets=offsets)
    y = bs.grouped_matmul(a, bs.quantize(w, "nvfp4", batch_dims=1), offsets)
    assert y[100:200].isnan().all()
    assert not y[:100].isnan().any()
    assert not y[200:].isnan().any()


def compile_and_compare(
    step: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], device: torch.device
) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for rows, ends in ((300, [5, 140, 300]), (250, [0, 0, 7, 9]), (299, [100, 200, 299])):
        offsets = torch.tensor(ends, device=device)
        x, w = normal(rows, K).to(device), normal(len(ends), N, K).to(device)
        assert torch.equal(compiled(x, w, offsets), step(x, w, offsets))
    assert counter.frame_count == 1


def test_compiles_whole_and_once(device: torch.device) -> None:
    def rows(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        a = bs.quantize(x, "nvfp4", offsets=offsets)
        return bs.grouped_matmul(a, bs.quantize(w, "nvfp4", batch_dims=1), offsets)

    def contraction(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        a = bs.quantize(x, "mxfp8", -2, offsets=offsets)
        return bs.grouped_matmul(a, a, offsets, None, torch.float32)

    compile_and_compare(rows, device)
    compile_and_compare(contraction, device)


# --- on a GPU -------------------------------------------------------------------------------------


def bound(
    a: bs.QuantizedTensor, b: bs.QuantizedTensor, want: torch.Tensor, ends: list[int], along: bool
) -> torch.Tensor:
    """How far a GPU's FP32 result may be from the CPU's.

    K + 4 additions of FP32 on either side, relative to the sum of magnitudes; then BF16 and MX
    sums are rounded to BF16 once. The tensor cores for FP8, which multiply MXFP4 too, keep 13 bits
    below the largest of 33 numbers, four times in a block of 128: 4 * 34 * 2^-13 of the sum of
    magnitudes at most.
    """
    x, y = (q.dequantize(torch.float32).abs() for q in (a, b))
    if along:
        if a.spec.hadamard:  # what the transform made of the tails is not in the values
            return want.abs() * 2.0**-8 + 2.0**-8 * want.abs().max()
        all_ = torch.stack([x[s].mT @ y[s] for s in spans(ends)])
        length = T
    else:
        all_ = torch.zeros_like(want)
        for s, w in zip(spans(ends), y, strict=True):
            all_[s] = x[s] @ w.mT
        length = K
    if a.spec.scale == "fp32" or a.spec.family == "mxfp4":
        return all_ * (4 * 34 * 2.0**-13 + 2 * (length + 4) * 2.0**-24)
    return want.abs() * 2.0**-8 + all_ * 2 * (length + 4) * 2.0**-24


@pytest.mark.parametrize("pair", PAIRS)
def test_on_a_gpu(pair: str, cuda: torch.device) -> None:
    cpu = torch.device("cpu")
    for ends, wide, along in itertools.product(ENDS, (torch.int32, torch.int64), (False, True)):
        form = contraction_form if along else rows_form
        a, b, offsets = form(pair, ends, cpu, wide)
        want = bs.grouped_matmul(a, b, offsets, None, torch.float32)
        ga, gb, there = form(pair, ends, cuda, wide)
        got = bs.grouped_matmul(ga, gb, there, None, torch.float32)
        off = (got.cpu() - want).abs()
        allowed = bound(a, b, want, ends, along)
        assert (off <= allowed).all(), (ends, along, (off - allowed).max())
        bias = normal(len(ends), K if along else N).to(cuda)
        half = bs.grouped_matmul(ga, gb, there, bias, torch.bfloat16).cpu().float()
        rows = torch.repeat_interleave(
            torch.arange(len(ends)), torch.tensor([s.stop - s.start for s in spans(ends)])
        )
        if along:
            more = want + bias.cpu().float()[:, None]
        else:
            more = want.clone()
            more[: ends[-1]] += bias.cpu().float()[rows]
        assert ((half - more).abs() <= allowed + 2.0**-8 * (more.abs() + allowed)).all()


@pytest.mark.parametrize("pair", PAIRS)
def test_on_a_gpu_nothing_waits_and_graphs_see_new_offsets(pair: str, cuda: torch.device) -> None:
    specs = PAIRS[pair]
    offsets = torch.tensor([0, 100, 290], device=cuda)
    x, dy, w = (normal(*shape).to(cuda) for shape in ((T, K), (T, N), (3, N, K)))

    def rows() -> torch.Tensor:
        a = bs.quantize(x, specs[0], offsets=offsets)
        return bs.grouped_matmul(a, bs.quantize(w, specs[1], batch_dims=1), offsets)

    def contraction() -> torch.Tensor:
        a, b = (bs.quantize(t, specs[0], -2, offsets=offsets) for t in (dy, x))
        return bs.grouped_matmul(a, b, offsets)

    for step in (rows, contraction):
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = step()
        for new in ([5, 140, 300], [0, 0, 0], [128, 128, 129]):
            offsets.copy_(torch.tensor(new))
            graph.replay()
            assert torch.equal(held, step()), (step, new)


@pytest.mark.parametrize("pair", PAIRS)
def test_wrong_offsets_on_a_gpu_make_nan(pair: str, cuda: torch.device) -> None:
    for wrong, form in itertools.product(
        ([100, 50, 300], [5, 6, 301], [-1, 5, 6]), (rows_form, contraction_form)
    ):
        a, b, offsets = form(pair, [100, 200, 300], cuda)
        offsets.copy_(torch.tensor(wrong))
        for out in (torch.bfloat16, torch.float32):
            assert bs.grouped_matmul(a, b, offsets, None, out).isnan().all(), (wrong, out)


# --- refusals -------------------------------------------------------------------------------------


def test_refusals_say_what_is_wrong() -> None:
    cpu, ends = torch.device("cpu"), [5, 140, 300]
    a, b, offsets = rows_form("nvfp4", ends, cpu)
    c, d, along = contraction_form("nvfp4", ends, cpu)
    plain = bs.quantize(normal(T, K), "nvfp4")

    def refuses(message: str, *args: object, **more: object) -> None:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message) as error:
            bs.grouped_matmul(*args, **more)  # type: ignore[arg-type]
        assert str(error.value).startswith("grouped_matmul: ")
        assert "; need " in str(error.value)

    refuses("a = .*QuantizedTensor", normal(T, K), b, offsets)
    refuses("offsets = .*cumulative ends", a, b, ends)
    refuses("a.offsets = None.*quantized with", plain, b, offsets)
    others = torch.tensor([5, 141, 300]).int()
    refuses(r"offsets\[1\] = 141; need 140, as in those of a", a, b, others)
    refuses("offsets = torch.int64.*those of a, torch.int32", a, b, torch.tensor(ends))
    refuses(r"b = .*\[3, N, K\] with batch_dims=1", a, plain, offsets)
    refuses(r"a.axis = -2; need -1", c, b, along)
    refuses(r"a.axis = -1; need -2, as b has groups", a, d, offsets)
    other = bs.quantize(normal(4, N, K), "nvfp4", batch_dims=1)
    refuses(r"\[3, N, K\]", a, other, offsets)
    short = bs.quantize(normal(3, N, 64), "nvfp4", batch_dims=1)
    refuses("contraction lengths of a and b = 136", a, short, offsets)
    refuses(r"bias.shape = \[37\]; need \[3, 37\], a row for each group", a, b, offsets, normal(N))
    refuses("out_dtype = ", a, b, offsets, None, torch.float16)
    refuses("blocks of 16", a, bs.quantize(normal(3, N, K), "mxfp4", batch_dims=1), offsets)


@pytest.mark.parametrize("family", ["nvfp4", "mxfp8"])
def test_a_product_of_nothing_is_0(family: str, device: torch.device) -> None:
    """Whatever its outer scales are."""
    amax = torch.full((), math.nan, device=device) if family == "nvfp4" else None
    a = bs.quantize(torch.empty(4, 0, device=device), family, amax=amax)
    b = bs.quantize(torch.empty(8, 0, device=device), family, amax=amax)
    for dtype in (torch.float32, torch.bfloat16):
        assert_same_bits(
            bs.matmul(a, b, out_dtype=dtype), torch.zeros(4, 8, dtype=dtype).to(device)
        )


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_blockwise"])
def test_what_is_added_to_stays_where_nothing_is_added(recipe: str, device: torch.device) -> None:
    """Not even -0 changes: dense without rows, and an empty group."""
    minus = torch.full((2, 48, 64), -0.0, device=device)
    x = torch.randn(0, 64, device=device, dtype=torch.bfloat16)
    w = torch.randn(48, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    into = minus[0].clone()
    y = bs.linear(x, w, None, recipe, bs.Rng(1, 2), accumulate_into=into)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert_same_bits(into, minus[0])
    x = torch.randn(32, 64, device=device, dtype=torch.bfloat16)
    w = torch.randn(2, 48, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([0, 32], device=device)
    into = minus.clone()
    y = bs.grouped_linear(x, w, ends, recipe, bs.Rng(1, 2), accumulate_into=into)
    y.float().square().sum().backward()  # type: ignore[no-untyped-call]
    assert_same_bits(into[0], minus[0])
    assert bool((into[1] != 0).any())
