"""Modules with experts as other libraries write them, for tests that convert them."""

from __future__ import annotations

from collections.abc import Callable

import blockscale as bs
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

GROUPS, WIDTH, HIDDEN = 4, 48, 64
ENDS = torch.tensor([5, 5, 12, 18], dtype=torch.int32)


class ManyExperts(nn.Module):
    """As Transformers and torchtitan write them: `turned`, the matrices are [E, K, N]."""

    up: torch.Tensor
    down: torch.Tensor

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        self.turned = turned
        for name, n, k in (("up", HIDDEN, WIDTH), ("down", WIDTH, HIDDEN)):
            w = torch.randn(GROUPS, n, k) * k**-0.5
            made = w.transpose(1, 2).contiguous() if turned else w
            self.register_parameter(name, nn.Parameter(made.bfloat16()))
        self.bias = nn.Parameter(torch.zeros(GROUPS, WIDTH, dtype=torch.bfloat16))

    def weights(self) -> list[torch.Tensor]:
        """[E, N, K], of this rank."""
        here = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        return [w.transpose(1, 2) if self.turned else w for w in here]

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        up, down = (w.transpose(1, 2) for w in self.weights())
        h = torch.nn.functional.grouped_mm(x.to(up.dtype), up, offs=ends).relu()
        return torch._grouped_mm(h, down, offs=ends)


class Block(nn.Module):
    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.experts = ManyExperts(turned)
        self.rerun = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, ends, again = self.gate(x), ENDS.to(x.device), self.rerun
        y: torch.Tensor
        y = (
            checkpoint(self.experts, x, ends, use_reentrant=False)
            if again
            else self.experts(x, ends)
        )
        return x + y


def model(recipe: str = "nvfp4", device: torch.device | str = "cpu", turned: bool = False) -> Block:
    torch.manual_seed(0)
    made = Block(turned)
    bs.convert(made, recipe, experts=["experts"], seed=5)
    return made.to(device)


def rows(device: torch.device | str = "cpu", seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(20, WIDTH, generator=g).bfloat16().to(device)


def gradients(module: nn.Module, call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    module.zero_grad()
    y = call()
    y[:18].float().square().sum().backward()  # type: ignore[no-untyped-call]
    return [y.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]
