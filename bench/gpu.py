"""Speed of the GPU backend: the cases of `blockscale bench`, and GEMMs beside BF16.

`python bench/gpu.py --out bench/results/h200.json`; `blockscale bench --from` that file prints and
draws it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blockscale as bs
import torch
from blockscale.cli.bench import measure, print_tables, write
from blockscale.cli.bench_cases import Row
from blockscale.cli.bench_clock import CudaClock
from rich.console import Console


def eager_microseconds(call: Callable[[], Any], calls: int = 50) -> float:
    """Time of a call on the host, its launches waited for only at the end."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * took / calls


def gemm_rows() -> list[Row]:
    """matmul by decode, and one linear forward and backward, against BF16."""
    rows: list[Row] = []
    clock = CudaClock()
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    peer = clock.microseconds(lambda i: torch.mm(a, b.t()), rounds=7, calls=4)
    qa, qb = bs.quantize(a, "nvfp4"), bs.quantize(b, "nvfp4[block=16x16]")
    took = clock.microseconds(lambda i: bs.matmul(qa, qb), rounds=7, calls=4)
    rows.append({"case": f"matmul nvfp4 {n}^3", "us": took, "of_bf16": peer / took, "goal": 0.85})
    m, k, n = 8192, 4096, 14336
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    w = torch.randn(n, k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dy = torch.randn(m, n, dtype=torch.bfloat16, device="cuda")
    rng = bs.Rng(*(torch.tensor(n, device="cuda") for n in (1, 2)))

    def step(recipe: str) -> None:
        torch.autograd.backward(bs.linear(x, w, recipe=recipe, rng=rng), dy)
        x.grad = w.grad = None

    peer = clock.microseconds(lambda i: step("bf16"), rounds=7, calls=3)
    for recipe in ("mxfp8", "mxfp4", "nvfp4", "amdfp4"):
        took = clock.microseconds(lambda i, r=recipe: step(r), rounds=7, calls=3)  # type: ignore[misc]
        rows.append(
            {
                "case": f"linear {m},{n},{k} forward+backward {recipe}",
                "us": took,
                "of_bf16": peer / took,
                "goal": 0.75 if recipe == "nvfp4" else None,
            }
        )
    small = torch.randn(16, 16, dtype=torch.bfloat16, device="cuda")
    layer = torch.nn.Linear(16, 16, dtype=torch.bfloat16, device="cuda")
    model = torch.nn.Sequential(layer)
    plain = eager_microseconds(lambda: model(small))
    bs.convert(model, "nvfp4")
    took = eager_microseconds(lambda: model(small))
    rows.append(
        {"case": "host, converted layer's forward, nvfp4", "us": took, "of_bf16": plain / took}
    )
    return rows


def main() -> None:
    """Run every case and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="what was built, where git cannot say")
    options = parser.parse_args()
    console = Console(width=120)
    found = measure("cuda", None, console)
    found["rows"] += gemm_rows()
    if options.commit:
        found["provenance"]["commit"] = options.commit
    print_tables(found, console)
    write(options.out, found)


if __name__ == "__main__":
    main()
