"""A layer of experts: a top-k router and two `GroupedLinear`, forward and backward.

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
    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = bs.nn.GroupedLinear(EXPERTS, WIDTH, HIDDEN)
        self.down = bs.nn.GroupedLinear(EXPERTS, HIDDEN, WIDTH)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and the numbers of each token's experts, [T, TOP] both."""
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.route(x)
        by_expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(by_expert, torch.arange(EXPERTS, device=DEVICE), right=True)
        h = self.down(F.gelu(self.up(x[order // TOP], ends)), ends)
        rows = torch.empty_like(h)
        rows[order] = h  # back to the order of tokens
        return (rows.view(-1, TOP, WIDTH) * weights[..., None]).sum(1)


def plain(layer: Experts, x: torch.Tensor) -> torch.Tensor:
    """The same as a loop in float32, with the same routing."""
    weights, chosen = layer.route(x)
    y = torch.zeros(len(x), WIDTH, device=DEVICE)
    for e in range(EXPERTS):
        tokens, place = (chosen == e).nonzero(as_tuple=True)
        h = F.gelu(x[tokens].float() @ layer.up.weight[e].float().t())
        made = h @ layer.down.weight[e].float().t()
        y = y.index_add(0, tokens, made * weights[tokens, place, None].float())
    return y


def gradients(y: torch.Tensor, dy: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return [y.float(), *(g.float() for g in torch.autograd.grad(y, inputs, dy.to(y.dtype)))]


def main() -> None:
    # The relative error that each recipe may make; BF16 rounds to 8 bits, E4M3 to 4, E2M1 to 2.
    for recipe, most in {"bf16": 0.02, "mxfp8": 0.1, "mxfp4": 0.6, "nvfp4": 0.6}.items():
        torch.manual_seed(0)
        layer = Experts().to(DEVICE, torch.bfloat16)
        bs.convert(layer, recipe, skip=["router"])
        inputs = (layer.up.weight, layer.down.weight)
        with bs.quantized_weights(layer):
            for _ in range(2):  # micro-batches
                x = torch.randn(TOKENS, WIDTH, device=DEVICE).bfloat16().requires_grad_()
                dy = torch.randn(TOKENS, WIDTH, device=DEVICE)
                got = gradients(layer(x), dy, x, *inputs)
                want = gradients(plain(layer, x), dy, x, *inputs)
                pairs = zip(got, want, strict=True)
                errors = [((g - w).norm() / w.norm()).item() for g, w in pairs]
                assert max(errors) < most, errors
        named = zip(("y", "dx", "dup", "ddown"), errors, strict=True)
        print(f"{recipe:6s}", "  ".join(f"{name} {error:.4f}" for name, error in named))


if __name__ == "__main__":
    main()
