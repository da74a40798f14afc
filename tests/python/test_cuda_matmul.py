"""matmul on each device against sums in double precision."""

from __future__ import annotations

import itertools

import blockscale as bs
import pytest
import torch
from bits import RNG
from matmuls import check_product, factors, normal

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


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4[block=16x16]", "amdfp4", "mxfp8", "mxfp6"])
def test_few_rows_have_b_decoded_as_it_is_multiplied(
    name: str, cuda: torch.device, random: torch.Generator
) -> None:
    """The same bits as for many rows, for which b is decoded before, and no memory for b's values.
    (With a bias in FP32 both run in the core's GEMM.)"""
    if torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.skip("needs the core's BF16 GEMM, on compute capability 9.0")
    n, k = 4096, 2048
    x, w = normal(random, 4096, k).to(cuda), normal(random, n, k).to(cuda)
    bias = normal(random, n).to(cuda)
    b = bs.quantize(w, name)
    amax = 8.0 if bs.spec(name).outer else None  # of the whole x and of part of it
    results, memory = [], []
    for rows in (4096, 16):
        a = bs.quantize(x[:rows], name.replace("16x16", "1x16"), amax=amax)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results.append(bs.matmul(a, b, bias))
        memory.append(torch.cuda.max_memory_allocated() - before)
    assert torch.equal(results[1], results[0][:16])
    assert memory[0] >= 2 * (4096 * n + 4096 * k + n * k)
    assert memory[1] < 2 * n * k / 8


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_experts_decoded_as_they_are_multiplied(
    name: str, device: torch.device, random: torch.Generator
) -> None:
    """Groups of few rows, each against its own matrix: the first of a batch, and later ones."""
    n, k, rows = 512, 448, (30, 0, 1, 97)
    offsets = torch.tensor(rows, device=device).cumsum(0)
    x, w = normal(random, sum(rows), k).to(device), normal(random, 5, n, k).to(device)
    a, b = bs.quantize(x, name, offsets=offsets), bs.quantize(w, name, batch_dims=1)
    bias = normal(random, 4, n).to(device)

    def part(
        q: bs.QuantizedTensor, those: int | slice, outer: int | slice, *shape: int
    ) -> bs.QuantizedTensor:
        of_part = None if q.outer is None else q.outer[outer]
        batch = len(shape) - 2
        codes, scales = q.codes[those], q.scales[those]
        return bs.QuantizedTensor(codes, scales, of_part, q.spec, -1, shape, batch_dims=batch)

    for first in (0, 1):
        matrices = slice(first, first + 4)
        right = part(b, matrices, matrices, 4, n, k)
        for added, out in itertools.product((None, bias), (torch.float32, torch.bfloat16)):
            got = bs.grouped_matmul(a, right, offsets, added, out)
            for g, (begin, end) in enumerate(itertools.pairwise((0, *offsets.tolist()))):
                check_product(
                    got[begin:end],
                    part(a, slice(begin, end), g, end - begin, k),
                    part(right, g, g, n, k),
                    None if added is None else added[g],
                    (g, first, out),
                )


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
