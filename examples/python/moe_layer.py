"""A layer of experts: a top-k router and two `grouped_linear`, forward and backward.

Each recipe is compared with a loop over the experts in plain PyTorch, in float32. The weights are
quantized once for the two micro-batches of a step.

Run: python examples/python/moe_layer.py
"""

from __future__ import annotations

import blockscale as bs
import torch
import torch.nn.functional as F

EXPERTS, TOP, WIDTH, HIDDEN, TOKENS = 8, 2, 128, 256, 300
# bs.explain gives the reason where this build cannot run on a GPU here.
GPU = torch.cuda.is_available() and not bs.explain("nvfp4", device="cuda")
DEVICE = "cuda" if GPU else "cpu"


class Experts(torch.nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.recipe = recipe
        self.router = torch.nn.Linear(WIDTH, EXPERTS, bias=False)  # stays in high precision
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * WIDTH**-0.5)
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * HIDDEN**-0.5)
        self.kept: list[bs.QuantizedWeight | None] = [None, None]

    def quantize_weights(self) -> None:
        """Once a step, after the weights have changed; without it each call quantizes them."""
        self.kept = [bs.quantize_weight(w, self.recipe) for w in (self.up, self.down)]

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and the numbers of each token's experts, [T, TOP] both."""
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x: torch.Tensor, step: int, micro_batch: int) -> torch.Tensor:
        weights, chosen = self.route(x)
        order = chosen.flatten().argsort(stable=True)  # rows sorted by expert
        ends = torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0)
        offset = step << 16 | micro_batch  # an Rng holds no state: each forward has its own offset
        rngs = [bs.Rng(seed, offset) for seed in (1, 2)]  # and each layer its own seed
        h = bs.grouped_linear(
            x[order // TOP], self.up, ends, self.recipe, rngs[0], quantized_weight=self.kept[0]
        )
        h = bs.grouped_linear(
            F.gelu(h), self.down, ends, self.recipe, rngs[1], quantized_weight=self.kept[1]
        )
        rows = torch.empty_like(h)
        rows[order] = h  # back to the order of tokens
        return (rows.view(-1, TOP, WIDTH) * weights[..., None]).sum(1)


def plain(layer: Experts, x: torch.Tensor) -> torch.Tensor:
    """The same as a loop in float32, with the same routing."""
    weights, chosen = layer.route(x)
    y = torch.zeros(len(x), WIDTH, device=DEVICE)
    for e in range(EXPERTS):
        tokens, place = (chosen == e).nonzero(as_tuple=True)
        h = F.gelu(x[tokens].float() @ layer.up[e].float().t())
        made = h @ layer.down[e].float().t()
        y = y.index_add(0, tokens, made * weights[tokens, place, None].float())
    return y


def gradients(y: torch.Tensor, dy: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return [y.float(), *(g.float() for g in torch.autograd.grad(y, inputs, dy.to(y.dtype)))]


def main() -> None:
    # The relative error that each recipe may make; BF16 rounds to 8 bits, E4M3 to 4, E2M1 to 2.
    for recipe, most in {"bf16": 0.02, "mxfp8": 0.1, "mxfp4": 0.6, "nvfp4": 0.6}.items():
        torch.manual_seed(0)
        layer = Experts(recipe).to(DEVICE, torch.bfloat16)
        layer.quantize_weights()
        for micro_batch in range(2):
            x = torch.randn(TOKENS, WIDTH, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
            dy = torch.randn(TOKENS, WIDTH, device=DEVICE)
            inputs = (x, layer.up, layer.down)
            got = gradients(layer(x, 0, micro_batch), dy, *inputs)
            want = gradients(plain(layer, x), dy, *inputs)
            errors = [((g - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True)]
            assert max(errors) < most, errors
        named = zip(("y", "dx", "dup", "ddown"), errors, strict=True)
        print(f"{recipe:6s}", "  ".join(f"{name} {error:.4f}" for name, error in named))


if __name__ == "__main__":
    main()
