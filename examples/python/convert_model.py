"""Convert a model, train it, save a checkpoint and resume from it.

The model predicts the next byte of this package's own sources from the 16 before. The checkpoint is
that of the plain model, with one addition: how many steps have ended, which the random bits of
stochastic rounding depend on. The resumed run repeats the first one exactly.

Run: python examples/python/convert_model.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import blockscale as bs
import torch
import torch.nn.functional as F

RECIPE, STEPS, CONTEXT = "nvfp4", 40, 16
# bs.explain gives the reason where this build cannot run on a GPU here.
GPU = torch.cuda.is_available() and not bs.explain("nvfp4", device="cuda")
DEVICE = "cuda" if GPU else "cpu"


class NextByte(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, 32)
        self.up = torch.nn.Linear(32 * CONTEXT, 256)
        self.down = torch.nn.Linear(256, 256)
        self.head = torch.nn.Linear(256, 256)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        x = self.embed(context).flatten(1)
        logits: torch.Tensor = self.head(F.gelu(self.down(F.gelu(self.up(x)))))
        return logits


def make(seed: int) -> tuple[NextByte, torch.optim.Optimizer]:
    """A converted model and its optimizer, whose steps move the random bits on."""
    torch.manual_seed(0)
    model = NextByte().to(DEVICE)
    report = bs.convert(model, RECIPE, skip=["head"], seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    bs.attach(model, optimizer)
    print(report)
    return model, optimizer


def train(
    model: NextByte, optimizer: torch.optim.Optimizer, data: torch.Tensor, steps: range
) -> list[float]:
    """The loss of each step. A batch is a function of its step, in a resumed run too."""
    criterion, losses = torch.nn.CrossEntropyLoss(), []
    for step in steps:
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(data) - CONTEXT, (64, 1), generator=random)
        rows = data[starts + torch.arange(CONTEXT + 1)].to(DEVICE)
        loss = criterion(model(rows[:, :-1]), rows[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 10 == 0:
            print(f"step {step + 1:3d}  loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    sources = sorted(Path(bs.__file__).parent.glob("*.py"))
    text = bytearray().join(source.read_bytes() for source in sources)
    data, half = torch.frombuffer(text, dtype=torch.uint8).long(), STEPS // 2

    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = make(seed=17)
        losses = train(model, optimizer, data, range(half))
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random_bits": bs.rng_state(model),  # {"step": 20, "forward": 0, "seed": 17}
        }
        torch.save(checkpoint, f"{folder}/checkpoint.pt")
        losses += train(model, optimizer, data, range(half, STEPS))

        print("resumed from the checkpoint:")
        stored = torch.load(f"{folder}/checkpoint.pt", map_location=DEVICE)
    resumed, optimizer = make(seed=stored["random_bits"]["seed"])
    resumed.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
    bs.set_step(resumed, **stored["random_bits"])  # last of all
    again = train(resumed, optimizer, data, range(half, STEPS))

    assert losses[-1] < losses[0] - 1
    assert again == losses[half:]
    print("the resumed run has the same losses, to the bit")


if __name__ == "__main__":
    main()
