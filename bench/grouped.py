"""Speed of products over groups on a GPU beside PyTorch's grouped GEMM in BF16.

Products: FP8 operands quantized beforehand, the sum of the groups' operations, in TFLOP/s; even
groups, and ragged ones of the same sum. Layers: `grouped_linear` forward, and forward and backward,
quantization included, in µs; "ahead" with the weight quantized once before. Random normal data;
every product is compared with what its operands decode to before it is timed. `python
bench/grouped.py --out FILE` writes one JSON.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import blockscale as bs
import torch
from common import SQUARES, check, options, recipe, seconds, speeds, with_backward, write

# Groups, rows of all, N, K: groups of rows, and groups along the contraction axis.
BY_ROWS = (
    (4, 32768, 4096, 7168), (4, 32768, 7168, 2048), (8, 32768, 4096, 7168), (8, 32768, 7168, 2048),
    (32, 32768, 4096, 7168),
)  # fmt: skip
BY_CONTRACTION = (
    (4, 32768, 4096, 7168), (8, 32768, 4096, 7168), (8, 32768, 7168, 2048), (16, 32768, 4096, 7168),
)  # fmt: skip
LAYERS = (
    (8, 2048, 1024, 1024), (8, 4096, 2048, 2048), (8, 4096, 4096, 4096), (8, 8192, 4096, 4096),
    (16, 4096, 2048, 2048), (16, 8192, 4096, 4096), (8, 16384, 4096, 4096), (8, 4096, 5120, 5120),
    (8, 16640, 8192, 5120),
)  # fmt: skip
RECIPES = ("fp8_blockwise", SQUARES, "mxfp4", "nvfp4")
RUNS, CALLS = 5, 10


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def ends(groups: int, rows: int, ragged: bool) -> torch.Tensor:
    """Where groups end: even ones, or random ones."""
    if ragged:
        cuts = torch.randint(0, rows + 1, (groups - 1,), device="cuda").sort().values
        return torch.cat([cuts, torch.tensor([rows], device="cuda")]).int()
    return torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * (rows // groups)


def parts(offsets: torch.Tensor) -> list[slice]:
    """The rows of every group."""
    cuts = [0, *offsets.tolist()]
    return [slice(begin, end) for begin, end in itertools.pairwise(cuts)]


def by_rows(groups: int, rows: int, n: int, k: int, ragged: bool) -> dict[str, Any]:
    x, w, offsets = normal(rows, k), normal(groups, n, k), ends(groups, rows, ragged)
    a = bs.quantize(x, "fp8_1x128", layout="mn_major", offsets=offsets)
    b = bs.quantize(w, "fp8_128x128", layout="mn_major", batch_dims=1)
    left, right = a.dequantize(torch.float32), b.dequantize(torch.float32)
    got = bs.grouped_matmul(a, b, offsets)
    error = max(
        check(got[part], left[part] @ right[g].t(), (groups, rows, n, k, g))
        for g, part in enumerate(parts(offsets))
    )
    ours = functools.partial(bs.grouped_matmul, a, b, offsets)
    peers = {"bf16": functools.partial(torch._grouped_mm, x, w.mT, offsets)}
    found = speeds(ours, peers, 2e-12 * rows * n * k, RUNS, CALLS)
    return {"relative_error": error, **found}


def by_contraction(groups: int, rows: int, n: int, k: int, ragged: bool) -> dict[str, Any]:
    x, dy, offsets = normal(rows, k), normal(rows, n), ends(groups, rows, ragged)
    a, b = (bs.quantize(t, "fp8_1x128", -2, layout="mn_major", offsets=offsets) for t in (dy, x))
    left, right = a.dequantize(torch.float32), b.dequantize(torch.float32)
    ours = functools.partial(bs.grouped_matmul, a, b, offsets, None, torch.float32)
    got = ours()
    error = max(
        check(got[g], left[part].t() @ right[part], (groups, rows, n, k, g))
        for g, part in enumerate(parts(offsets))
    )
    peers = {"bf16": functools.partial(torch._grouped_mm, dy.t(), x, offsets)}
    found = speeds(ours, peers, 2e-12 * rows * n * k, RUNS, CALLS)
    return {"relative_error": error, **found}


def layer(groups: int, rows: int, n: int, k: int) -> dict[str, Any]:
    x, w = normal(rows, k).requires_grad_(), normal(groups, n, k).requires_grad_()
    dy, offsets = normal(rows, n), ends(groups, rows, False)
    rng = bs.Rng(*(torch.tensor(i, device="cuda") for i in (1, 2)))

    def ours(how: bs.Recipe, kept: bs.QuantizedWeight | None) -> Callable[[], torch.Tensor]:
        return lambda: bs.grouped_linear(x, w, offsets, how, rng, quantized_weight=kept)

    row: dict[str, Any] = {}
    calls = {"bf16": lambda: torch._grouped_mm(x, w.mT, offsets)}
    for name in RECIPES:
        calls[name] = ours(recipe(name), None)
        calls[f"{name} ahead"] = ours(recipe(name), bs.quantize_weight(w, recipe(name)))
    for name, forward in calls.items():
        with torch.no_grad():
            row[f"{name} forward"] = 1e6 * seconds(forward, RUNS, CALLS)
        row[f"{name} both"] = 1e6 * seconds(with_backward(forward, (x, w), dy), RUNS, CALLS)
    return row


def main() -> None:
    given = options(__doc__.splitlines()[0])
    torch.manual_seed(0)  # the same uneven groups in every run
    rows: list[dict[str, Any]] = []

    def add(kind: str, shape: tuple[int, ...], measured: dict[str, Any]) -> None:
        facts = dict(zip(("groups", "rows", "n", "k"), shape, strict=True))
        rounded = {key: float(f"{value:.4g}") for key, value in measured.items()}
        rows.append({"kind": kind, **facts, **rounded})
        print(rows[-1], flush=True)

    for ragged in (False, True):
        text = "ragged" if ragged else "even"
        for shape in BY_ROWS:
            add(f"rows, {text}", shape, by_rows(*shape, ragged))
        for shape in BY_CONTRACTION:
            add(f"contraction, {text}", shape, by_contraction(*shape, ragged))
    for shape in LAYERS:
        add("layer", shape, layer(*shape))
    write(rows, "products: TFLOP/s; layers: µs", given)


if __name__ == "__main__":
    main()
