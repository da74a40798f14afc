"""Speed and memory of a model on a GPU in every recipe, beside PyTorch in BF16 and torchao's FP8.

The blocks of Llama 3 8B, as a user writes them with PyTorch's own layers, converted and compiled;
forward and backward over 8192 tokens, weights and activations in BF16. All are timed in turn, since
the clock follows the load. `python bench/model.py --out FILE` writes one JSON with where it was
measured.
"""

from __future__ import annotations

import functools
import importlib.metadata
import statistics
from collections.abc import Callable
from typing import Any

import blockscale as bs
import torch
from blockscale.cli.bench_clock import between_events
from common import SQUARES, options, recipe, write
from torch import nn
from torch.nn import functional

WIDTH, HIDDEN, HEADS, KV_HEADS, BLOCKS = 4096, 14336, 32, 8, 4
BATCH, LENGTH = 2, 4096
RECIPES = (
    "fp8_blockwise",
    "fp8_blockwise[keep_w=False]",
    "fp8_blockwise[keep_w=False,keep_x=False]",
    SQUARES,
    "fp8_blockwise[wgrad_x=fp8_128x128,keep_w=False,keep_x=False]",
    "mxfp8",
    "mxfp4",
    "mxfp4[keep_w=False,keep_x=False]",
    "nvfp4",
)
TURNS, STEPS = 5, 4


class Attention(nn.Module):
    turns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        angle = torch.outer(torch.arange(LENGTH), 5e5 ** -(torch.arange(0, head, 2) / head))
        self.register_buffer("turns", torch.stack((angle.cos(), angle.sin())), persistent=False)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.float().chunk(2, -1)
        cos, sin = self.turns.float().unbind()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = functional.scaled_dot_product_attention(
            self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True
        )
        made: torch.Tensor = self.o_proj(y.transpose(1, 2).flatten(-2))
        return made


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        made: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return made


def blocks(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return nn.Sequential(*(Block() for _ in range(BLOCKS))).to(dtype)


def variants() -> dict[str, Callable[[nn.Module], object]]:
    """What makes each of plain blocks."""
    recipes = [recipe(one) for one in RECIPES]
    found: dict[str, Callable[[nn.Module], object]] = {"bf16": lambda model: None}
    found |= {str(one): functools.partial(bs.convert, recipe=one) for one in recipes}
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return found
    for name in ("tensorwise", "rowwise"):
        config = Float8LinearConfig.from_recipe_name(name)
        found[f"torchao {name}"] = functools.partial(convert_to_float8_training, config=config)
    return found


def step(
    model: nn.Module,
    x: torch.Tensor,
    dy: torch.Tensor,
    update: Callable[[], object] = lambda: None,
) -> tuple[int, int]:
    """One forward, backward and `update`. Returns two sizes in bytes, beyond what was allocated
    before: what the forward keeps for the backward, and the peak."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = model(x)
    held = torch.cuda.memory_allocated() - before - y.nbytes
    y.backward(dy)
    update()
    most = torch.cuda.max_memory_allocated() - before
    for parameter in model.parameters():
        parameter.grad = None
    return held, most


def figures(
    times: list[float], of_bf16: list[float], tokens: int, memory: tuple[int, int]
) -> dict[str, Any]:
    """One row: the median time, the speed relative to BF16's steps of the same turns, and the sizes
    from `step`."""
    ms = statistics.median(times)
    ratio = statistics.median(a / b for a, b in zip(of_bf16, times, strict=True))
    held, most = (round(size / 1e9, 3) for size in memory)
    found = {"ms": round(ms, 2), "tokens_per_s": round(tokens / ms * 1e3)}
    return found | {"x_bf16": round(ratio, 3), "gb_held": held, "gb_most": most}


def main() -> None:
    given = options(__doc__.splitlines()[0])
    torch._dynamo.config.recompile_limit = 64  # each model compiles the same block anew
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    models: dict[tuple[str, bool], nn.Sequential] = {}
    for name, change in variants().items():
        for compiled in (False, True):
            if name.startswith("torchao") and not compiled:
                continue  # it is meant to be compiled
            model = blocks()
            change(model)
            if compiled:
                for block in model:
                    block.compile()
            models[name, compiled] = model
            step(model, x, dy)
    times: dict[tuple[str, bool], list[float]] = {key: [] for key in models}
    for _ in range(TURNS):
        for key, model in models.items():
            took = between_events(lambda model=model: step(model, x, dy), STEPS, 1)  # type: ignore[misc]
            times[key].append(took / 1e3)
    rows: list[dict[str, Any]] = []
    for key, model in models.items():
        found = figures(times[key], times["bf16", key[1]], BATCH * LENGTH, step(model, x, dy))
        rows.append({"model": key[0], "compiled": key[1]} | found)
        print(rows[-1], flush=True)
    peer = importlib.metadata.version("torchao") if "torchao tensorwise" in variants() else "none"
    write(rows, f"{BLOCKS} blocks; torchao {peer}", given)


if __name__ == "__main__":
    main()
