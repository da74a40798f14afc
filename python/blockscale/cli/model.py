"""The language model that `blockscale train` trains: decoder only, byte-level tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockscale as bs

VOCABULARY = 256  # bytes; 0 marks the end of a file
BALANCE = 0.01  # weight of uneven routing in the training loss


@dataclass(frozen=True)
class Preset:
    """The shape of a model and the training settings that suit it."""

    dim: int
    layers: int
    heads: int
    hidden: int
    seq_len: int
    batch_size: int
    steps: int
    lr: float
    eval_every: int
    about: str
    experts: int = 0  # in place of each feed-forward; `hidden` is that of one expert
    top: int = 2  # experts per token


PRESETS = {
    "tiny": Preset(256, 3, 4, 640, 128, 8, 200, 1e-3, 25, "2.4 M parameters"),
    "small": Preset(512, 6, 8, 1408, 256, 16, 2000, 1e-3, 100, "19.5 M"),
    # GPT-2's smallest, which is 124 M with its vocabulary of 50257.
    "gpt-124m": Preset(768, 12, 12, 2048, 1024, 8, 20000, 6e-4, 500, "85.3 M"),
    # As many multiplications per token as in tiny and small.
    "tiny-moe": Preset(256, 3, 4, 320, 128, 8, 200, 1e-3, 25, "6.8 M with all experts", 8),
    "small-moe": Preset(512, 6, 8, 704, 256, 16, 2000, 1e-3, 100, "110.4 M with all experts", 16),
}


class Attention(nn.Module):
    """Causal self-attention with rotary position embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, heads: int, seq_len: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        half = dim // heads // 2
        angle = torch.outer(torch.arange(seq_len), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Turns each (i, i + half) pair of x [B, H, T, D] by its position's angle."""
        length = x.shape[-2]
        cos, sin = self.cos[:length], self.sin[:length]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        projected: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return projected


class SwiGlu(nn.Module):
    """down(silu(gate) * up), gate and up from one GEMM."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class Experts(nn.Module):
    """SwiGLUs; a router sends each token to the best few and weights their results."""

    def __init__(self, dim: int, hidden: int, experts: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(dim, experts, bias=False)
        # In BF16 until convert gives them the model's recipe.
        self.gate_up = bs.nn.GroupedLinear(experts, dim, 2 * hidden, recipe="bf16")
        self.down = bs.nn.GroupedLinear(experts, hidden, dim, recipe="bf16")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The result, and how uneven the routing is: 1 if all experts get equally many tokens (the
        Switch Transformer's loss)."""
        tokens = x.flatten(0, -2)
        likely = self.router(tokens).float().softmax(-1)
        weights, chosen = likely.topk(self.top)
        by_expert, order = chosen.flatten().sort(stable=True)
        experts = torch.arange(self.gate_up.groups, device=x.device)
        ends = torch.searchsorted(by_expert, experts, right=True)
        share = torch.diff(ends, prepend=ends.new_zeros(1)) / by_expert.numel()
        balance = len(experts) * (share * likely.mean(0)).sum()

        gate, up = self.gate_up(tokens[order // self.top], ends).chunk(2, dim=-1)
        rows = self.down(F.silu(gate) * up, ends)[order.argsort()]  # in token order again
        weights = weights / weights.sum(-1, keepdim=True)
        weighed = rows.view(*chosen.shape, -1) * weights[..., None].to(rows.dtype)
        return weighed.sum(1).view_as(x), balance


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, preset: Preset, seq_len: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(preset.dim, eps=1e-6)
        self.attention = Attention(preset.dim, preset.heads, seq_len)
        self.mlp_norm = nn.RMSNorm(preset.dim, eps=1e-6)
        self.mlp = (
            Experts(preset.dim, preset.hidden, preset.experts, preset.top)
            if preset.experts
            else SwiGlu(preset.dim, preset.hidden)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The result, and how uneven the routing to experts is, if there are any."""
        x = x + self.attention(self.attention_norm(x))
        made = self.mlp(self.mlp_norm(x))
        y, balance = made if isinstance(made, tuple) else (made, None)
        return x + y, balance


class LanguageModel(nn.Module):
    """Tokens [B, T] (int64, below 256) to the mean next-token cross-entropy in nats, FP32 scalar;
    in training plus the loss for uneven routing to experts.

    `targets` [B, T] are the next tokens. `reduction` is as in `cross_entropy`.
    """

    def __init__(self, preset: Preset, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, preset.dim)
        self.layers = nn.ModuleList(Block(preset, seq_len) for _ in range(preset.layers))
        self.norm = nn.RMSNorm(preset.dim, eps=1e-6)
        self.lm_head = nn.Linear(preset.dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        x = self.embedding(tokens)
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            balances += [] if balance is None else [balance]
        logits = self.lm_head(self.norm(x)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        if self.training and reduction == "mean" and balances:
            loss = loss + BALANCE * torch.stack(balances).sum()
        return loss

    def kept_in_bf16(self) -> list[str]:
        """The modules that convert is told to skip."""
        has_router = any(isinstance(module, Experts) for module in self.modules())
        return ["lm_head", "router"] if has_router else ["lm_head"]

    def initialize(self, seed: int) -> None:
        """Fills every parameter from `seed` alone: normal(0, 0.02), the two projections into the
        residual stream scaled by 1/sqrt(2 * layers)."""
        generator = torch.Generator().manual_seed(seed)
        narrow = (2 * len(self.layers)) ** -0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() < 2:
                    continue  # norms start at one
                back = name.endswith(("attention.out.weight", "mlp.down.weight"))
                parameter.normal_(0.0, 0.02 * (narrow if back else 1.0), generator=generator)
