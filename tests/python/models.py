"""Models that more than one file of tests converts, and what all expect of a recipe."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# Relative errors of y and the gradients of a linear layer on Gaussian data, from both sides: too
# good is wrong too.
BANDS = {
    "fp8_blockwise": (0.01, 0.06),
    "mxfp8": (0.01, 0.06),
    "mxfp4": (0.08, 0.35),
    "nvfp4": (0.08, 0.35),
    "amdfp4": (0.08, 0.35),
}


class Block(nn.Module):
    """x + down(relu(up(x))); with `rerun` its inside is recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 64), nn.Linear(64, 48)
        self.rerun = False

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rerun:
            out: torch.Tensor = x + checkpoint(self.inner, x, use_reentrant=False)
            return out
        return x + self.inner(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.o_proj(self.q_proj(x))
        return out


class Model(nn.Module):
    """An embedding, two blocks, a norm, and a head that shares the embedding's weight."""

    def __init__(self, vocabulary: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, vocabulary, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        out: torch.Tensor = self.lm_head(self.norm(x))
        return out


def model() -> Model:
    torch.manual_seed(0)
    return Model()
