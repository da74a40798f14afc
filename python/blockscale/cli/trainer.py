"""One training: a recipe from one seed's weights, resumable at any checkpoint, bit for bit."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import blockscale as bs
from blockscale.cli.data import Corpus
from blockscale.cli.errors import out_of_memory
from blockscale.cli.model import PRESETS, LanguageModel
from blockscale.cli.progress import LiveProgress
from blockscale.cli.run_folder import Cell, RunFolder, unusable


@contextlib.contextmanager
def reproducible_kernels(device: str) -> Iterator[None]:
    """Within it, PyTorch chooses kernels that give the same bits in every run."""
    if device == "cuda":  # cuBLAS reads this when it makes its first handle
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)
        settings.fill_uninitialized_memory = filled


class Trainer:
    """The model, optimizer and schedule of one cell."""

    def __init__(self, folder: RunFolder, cell: Cell, corpus: Corpus) -> None:
        self.folder = folder
        self.cell = cell
        self.corpus = corpus
        settings = folder.settings
        self.steps: int = settings["steps"]
        self.lr: float = settings["lr"]
        self.device = torch.device(settings["device"])
        self.batch_size: int = settings["batch_size"]
        self.seq_len: int = settings["seq_len"]
        self.model = LanguageModel(PRESETS[settings["preset"]], self.seq_len)
        self.model.initialize(cell.seed)
        self.model.to(self.device)
        kept = self.model.kept_in_bf16()
        bs.convert(self.model, cell.recipe, skip=kept, seed=cell.seed)
        self.optimizer = make_optimizer(self.model, self.lr)
        bs.attach(self.model, self.optimizer)
        self.step = 0
        self._restore()

    def _restore(self) -> None:
        state = self.folder.load_checkpoint(self.cell)
        if state is None:
            return
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            bs.set_step(self.model, state["rng"]["step"], state["rng"]["forward"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            path, first_line = self.folder.checkpoint_path(self.cell), str(error).partition("\n")[0]
            reason = f"{type(error).__name__}: {first_line}"
            raise unusable(path, self.cell, reason, "a checkpoint of this run's model") from None
        self.step = state["step"]

    def _save(self) -> None:
        state = {
            "step": self.step,
            "rng": bs.rng_state(self.model),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        self.folder.save_checkpoint(self.cell, state)

    def run(self, progress: LiveProgress) -> None:
        """Trains from the checkpoint to the end, then saves the final weights."""
        settings = self.folder.settings
        progress.start(str(self.cell), self.step, self.steps)
        while self.step < self.steps:
            begin = time.perf_counter()
            loss, grad_norm = self._train_step()  # reads the loss, so the device is done
            seconds = time.perf_counter() - begin
            self.folder.append(
                self.cell, self.step, train_loss=loss, grad_norm=grad_norm, seconds=seconds
            )
            last = self.step == self.steps
            pace = self.batch_size * self.seq_len / seconds
            progress.step(self.step, self.steps, loss, pace)
            if last or self.step % settings["eval_every"] == 0:
                self._evaluate(progress)
            if not last and self.step % settings["checkpoint_every"] == 0:
                self._save()
        self.folder.finish(self.cell, self.model.state_dict())

    def _train_step(self) -> tuple[float, float]:
        rate = learning_rate(self.step + 1, self.steps, self.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tokens, targets = self.corpus.batch(
            self.cell.seed, self.step + 1, self.batch_size, self.seq_len
        )
        self.model.train()
        loss, norm = update(
            self.model, self.optimizer, tokens.to(self.device), targets.to(self.device)
        )
        self.step += 1
        return loss.item(), norm.item()

    def _evaluate(self, progress: LiveProgress) -> None:
        begin = time.perf_counter()
        total, count = 0.0, 0
        self.model.eval()
        with torch.no_grad(), bf16(self.device):
            for tokens, targets in self.corpus.validation_batches(self.batch_size, self.seq_len):
                tokens, targets = tokens.to(self.device), targets.to(self.device)
                total += self.model(tokens, targets, "sum").item()
                count += tokens.numel()
        loss = total / count
        seconds = time.perf_counter() - begin
        noise = self._noise() if self.step == self.steps else {}
        self.folder.append(self.cell, self.step, validation_loss=loss, seconds=seconds, **noise)
        progress.say(f"{self.cell!s:<22}  step {self.step:>5}  validation loss {loss:.4f} nats")

    def _noise(self) -> dict[str, float]:
        """The SQNR of the layers' results with these weights: the median over layers, in dB by
        GEMM."""
        if bs.recipe(self.cell.recipe).high_precision:
            return {}
        tokens, targets = next(self.corpus.validation_batches(self.batch_size, self.seq_len))
        with bs.measure(self.model) as found:
            with bf16(self.device):
                loss = self.model(tokens.to(self.device), targets.to(self.device))
            loss.backward()
        self.optimizer.zero_grad()
        of: dict[str, list[float]] = {}
        for product in found.products:
            if math.isfinite(product.sqnr):
                of.setdefault(f"{product.gemm}_db", []).append(product.sqnr)
        return {gemm: statistics.median(values) for gemm, values in of.items()}


def bf16(device: torch.device) -> torch.autocast:
    """The autocast context that the model runs in."""
    return torch.autocast(device.type, torch.bfloat16)


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward, backward, clipping and the optimizer's step; returns the loss and the gradient
    norm."""
    with bf16(tokens.device):
        loss = model(tokens, targets)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW over FP32 parameters; norms are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warmup over the first tenth, then a cosine down to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if step <= warmup:
        return peak * step / warmup
    position = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1.0 + math.cos(math.pi * position)))
