"""Pipelines of `torch.distributed.pipelining`, with all stages in one process: what docs/guide.md
says of their bits, of their count of forwards, and of what they refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import blockscale as bs
import pytest
import torch
from bits import BEFORE_2_13, assert_same, normal
from blockscale import functional
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline, schedules

MICRO, ROWS, WIDTH = 4, 8, 64
CPU = torch.device("cpu")
X = normal(MICRO * ROWS, WIDTH, seed=1)
runs_alone = pytest.mark.skipif(
    BEFORE_2_13, reason="before PyTorch 2.13 a pipeline's rank cannot send to itself"
)


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))


def parts() -> list[nn.Module]:
    """Stages that are converted separately, each with a seed."""
    torch.manual_seed(0)
    made: list[nn.Module] = [block(), block()]
    for seed, part in enumerate(made):
        bs.convert(part, "nvfp4", seed=seed)
    return made


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def piped(name: str, made: list[nn.Module], told: bool = True) -> Any:
    """A schedule over these stages, which are told what they get and give, or find out."""
    stages = []
    for i, part in enumerate(made):
        x, y = (torch.empty(ROWS, WIDTH, requires_grad=grad) for grad in (i > 0, True))
        about: Any = {"input_args": x, "output_args": y} if told else {}
        stages.append(PipelineStage(part, i, len(made), CPU, **about))
    kind: Any = getattr(schedules, f"Schedule{name}")
    return kind(stages, n_microbatches=MICRO, loss_fn=loss_of)


def by_hand(made: list[nn.Module]) -> list[torch.Tensor]:
    """Without a pipeline: one micro-batch after the other."""
    losses = []
    for x in X.chunk(MICRO):
        y = x
        for part in made:
            y = part(y)
        losses.append(loss_of(y, x))
        (losses[-1] / MICRO).backward()  # type: ignore[no-untyped-call]
    return losses


def by_schedule(name: str, made: list[nn.Module]) -> Callable[[], list[torch.Tensor]]:
    schedule = piped(name, made)

    def step() -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        schedule.step(X, target=X, losses=losses)
        return losses

    return step


def trained(made: list[nn.Module], step: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Losses and gradients of two steps."""
    seen = []
    for i in range(2):
        seen += [loss.detach() for loss in step()]
        for seed, part in enumerate(made):
            assert bs.rng_state(part) == {"step": i, "forward": MICRO, "seed": seed}
            seen += [p.grad for p in part.parameters() if p.grad is not None]
            part.zero_grad()
            bs.advance(part)
    return seen


@runs_alone
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_the_bits_are_those_without_a_pipeline(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are divided by a power of two, which commutes with every rounding of them."""
    plain = parts()
    want = trained(plain, lambda: by_hand(plain))
    assert len(want) == 2 * (MICRO + 4 * len(plain))
    asked, backwards = functional.asked, Counter[tuple[bool, ...]]()

    def count(ctx: Any, needed: tuple[bool, ...]) -> tuple[bool, ...]:
        found = asked(ctx, needed)
        backwards[found[:2]] += 1  # dx, dw
        return found

    monkeypatch.setattr(functional, "asked", count)
    made = parts()
    got = trained(made, by_schedule(name, made))
    assert_same(got, want)
    # In two steps, of four layers. Nobody needs the first one's dx, and only a stage that another
    # one waits for is split: the second.
    calls = 2 * MICRO
    if name == "Interleaved1F1B":
        assert backwards == {(True, True): 3 * calls, (False, True): calls}
    else:
        assert backwards == {
            (True, True): calls,
            (False, True): 3 * calls,
            (True, False): 2 * calls,
        }


@runs_alone
@pytest.mark.usefixtures("one_rank")
def test_the_forward_that_finds_shapes_counts() -> None:
    made = parts()
    schedule = piped("Interleaved1F1B", made, told=False)
    for forwards in (1 + MICRO, MICRO):
        schedule.step(X, target=X)
        assert [bs.rng_state(part)["forward"] for part in made] == [forwards] * len(made)
        for part in made:
            bs.advance(part)


class Adding(nn.Module):
    """Adds its weight's gradient to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.sum = torch.zeros(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return bs.linear(x, self.w, recipe="mxfp8", accumulate_into=self.sum)


@runs_alone
@pytest.mark.usefixtures("one_rank")
def test_accumulating_is_refused_where_the_backward_is_split() -> None:
    made: list[Any] = [Adding(), Adding()]
    by_schedule("Interleaved1F1B", made)()
    assert all(bool(part.sum.any()) for part in made)
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        by_schedule("InterleavedZeroBubble", made)()


@pytest.mark.usefixtures("one_rank")
def test_traced_stages_count_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    bs.convert(model, "nvfp4")
    pipe = pipeline(model, (X[:ROWS],), split_spec={"1": SplitPoint.BEGINNING})
    x = X[:ROWS]
    for i in range(pipe.num_stages):
        stage: Any = pipe.get_stage_module(i)
        x = stage(x)
    assert bs.rng_state(model)["forward"] == 0
    model(X[:ROWS])
    assert bs.rng_state(model)["forward"] == 1
