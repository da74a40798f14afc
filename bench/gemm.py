"""Speed of the FP8 GEMM on a GPU beside cuBLASLt's block-scaled GEMM and torch.mm in BF16.

Random normal data, quantized beforehand with scales laid out as each side wants them; every product
is compared with that of the dequantized operands in double before it is timed: the median of
several runs of 20 calls each, back to back in a CUDA graph; then ours for half a second, with the
clock that it comes to, for the roofline. Layers: `linear` forward and backward, quantization of x,
w and dy included, beside PyTorch's in BF16, in bursts and for half a second each ("lasting").
`python bench/gemm.py --out FILE` writes one JSON with where it was measured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import blockscale as bs
import torch
from common import (
    SQUARES,
    check,
    options,
    recipe,
    replayed,
    speeds,
    sustained,
    with_backward,
    write,
)

# M, N, K. A 1x128 by B 128x128: what the forward pass and the input's gradient multiply.
FPROP = (
    (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (4096, 2304, 7168),
    (4096, 24576, 1536), (4096, 7168, 16384), (4096, 4096, 7168), (4096, 7168, 2048),
    (8192, 14336, 4096), (8192, 4096, 14336),
)  # fmt: skip
# Both 1x128: the weight's gradient.
WGRAD = (
    (4096, 4096, 4096), (8192, 8192, 8192), (7168, 4096, 4096), (7168, 2048, 8192),
    (14336, 4096, 8192),
)  # fmt: skip
FEW_ROWS = tuple((m, n, k) for n, k in ((7168, 2048), (2048, 7168)) for m in (1, 16, 64, 128))
# Rows, N, K of a linear layer.
LAYERS = ((8192, 14336, 4096), (16384, 4096, 4096), (8192, 8192, 8192))
RUNS, CALLS, LAYER_CALLS = 7, 20, 5


def peer_scales(q: bs.QuantizedTensor) -> torch.Tensor:
    """The scales of an operand as torch._scaled_mm reads them, [K/128, rows or blocks]."""
    linear: torch.Tensor = bs.relayout(q, "linear").scales
    if q.spec.block[0] == 1:
        return linear.t().contiguous()
    blocks, k = linear.shape
    padded = torch.zeros(blocks, -(-k // 4) * 4, device=linear.device)  # rows of 16 bytes
    padded[:, :k] = linear
    return padded[:, :k].t()


def measure(kind: str, m: int, n: int, k: int) -> dict[str, Any]:
    """TFLOP/s of ours and of the peers for one product."""
    x, w = (torch.randn(r, k, device="cuda", dtype=torch.bfloat16) for r in (m, n))
    b_spec = "fp8_1x128" if kind == "wgrad" else "fp8_128x128"
    a = bs.quantize(x, "fp8_1x128", layout="mn_major")
    b = bs.quantize(w, b_spec, layout="mn_major")
    out = torch.float32 if kind == "wgrad" else torch.bfloat16
    a_scales, b_scales = peer_scales(a).t(), peer_scales(b)

    def peer() -> torch.Tensor:
        y: torch.Tensor = torch._scaled_mm(a.codes, b.codes.t(), a_scales, b_scales, out_dtype=out)
        return y

    want = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().t()
    error = check(bs.matmul(a, b, out_dtype=out), want, (kind, m, n, k))
    with contextlib.suppress(RuntimeError):  # what it refuses
        check(peer(), want, ("cuBLASLt", kind, m, n, k))
    peers: dict[str, Callable[[], Any]] = {"cublaslt_fp8": peer, "bf16": lambda: x @ w.t()}
    ours = functools.partial(bs.matmul, a, b, out_dtype=out)
    found = speeds(ours, peers, 2e-12 * m * n * k, RUNS, CALLS)
    rounded = {key: v if isinstance(v, str) else round(v, 1) for key, v in found.items()}
    return {"kind": kind, "m": m, "n": n, "k": k, "relative_error": error, **rounded}


def layer(m: int, n: int, k: int) -> dict[str, Any]:
    """TFLOP/s of a layer's three products, everything that it takes to make them included, a bias
    and its gradient where there is one."""
    x, w, dy = (
        torch.randn(r, c, device="cuda", dtype=torch.bfloat16) for r, c in ((m, k), (n, k), (m, n))
    )
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    for leaf in (x, w, bias):
        leaf.requires_grad_()
    linear = torch.nn.functional.linear
    forwards: dict[str, Callable[[], torch.Tensor]] = {
        "bf16": functools.partial(linear, x, w),
        "bf16 bias": functools.partial(linear, x, w, bias),
        "fp8_blockwise bias": functools.partial(bs.linear, x, w, bias, "fp8_blockwise"),
    }
    for name in ("fp8_blockwise", SQUARES, "mxfp4"):
        ours = functools.partial(bs.linear, x, w, None, recipe(name))
        kept = bs.quantize_weight(w, recipe(name))
        forwards[name] = ours
        forwards[f"{name} ahead"] = functools.partial(ours, quantized_weight=kept)
    row: dict[str, Any] = {"kind": "layer", "m": m, "n": n, "k": k}
    for name, forward in forwards.items():
        leaves = (x, w, bias) if name.endswith(" bias") else (x, w)
        took, replay = replayed(with_backward(forward, leaves, dy), RUNS, LAYER_CALLS)
        row[name] = round(6e-12 * m * n * k / took, 1)
        lasting, _ = sustained(replay, LAYER_CALLS, took)
        row[f"{name} lasting"] = round(6e-12 * m * n * k / lasting, 1)
    return row


def main() -> None:
    given = options(__doc__.splitlines()[0])
    rows = []
    for kind, shapes in (("fprop", FPROP), ("wgrad", WGRAD), ("few rows", FEW_ROWS)):
        for shape in shapes:
            rows.append(measure(kind, *shape))
            print(rows[-1], flush=True)
    for shape in LAYERS:
        rows.append(layer(*shape))
        print(rows[-1], flush=True)
    write(rows, "TFLOP/s", given)


if __name__ == "__main__":
    main()
