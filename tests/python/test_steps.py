"""Steps without forwards, models without a root: what the random bits of a model follow when it is
trained by other methods, copied in part, reverted or converted again (docs/rng.md)."""

from __future__ import annotations

import copy
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import blockscale as bs
import pytest
import torch
from bits import equal
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Its forward is what `loss` computes, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(48, 64), nn.Linear(64, 33)
        self.rerun: bool | None = None  # checkpointed, reentrant or not

    def body(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        if self.rerun is None:
            return self.body(x).square().mean()
        made: torch.Tensor = checkpoint(self.body, x, use_reentrant=self.rerun)
        return made.square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x)


# Draws in the forward, too, so that recomputation has something to repeat.
RECIPE = bs.recipe("nvfp4").replace(fprop_x="nvfp4[rounding=stochastic]")


def net(seed: int = 0) -> Net:
    model = Net()
    bs.convert(model, RECIPE, seed=seed)
    return model


def batch() -> torch.Tensor:
    return torch.randn(20, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()


Gradients = list[torch.Tensor]


def gradients(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> Gradients:
    model.zero_grad()
    call(batch()).backward()  # type: ignore[no-untyped-call]
    return [p.grad for p in model.parameters() if p.grad is not None]


def attached(model: nn.Module, lr: float = 0.0) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    bs.attach(model, optimizer)
    return optimizer


# --- without the root's forward -------------------------------------------------------------------


# Checkpointed around compiled blocks, not inside (docs/rng.md).
@pytest.mark.parametrize(
    ("rerun", "compiled"), [(None, False), (False, False), (True, False), (None, True)]
)
def test_other_methods_draw_as_forward_0_of_their_step(rerun: bool | None, compiled: bool) -> None:
    torch._dynamo.reset()
    model, plain = net(), net()
    model.rerun = rerun
    if compiled:
        for part in (model.up, model.down):
            part.compile(backend="aot_eager")
    optimizer, other = attached(model), attached(plain)
    seen: list[Gradients] = []
    for step in range(3):
        got, again = gradients(model, model.loss), gradients(model, model.loss)
        assert equal(got, again)  # micro-batches of a step share their bits
        assert equal(got, gradients(plain, plain))
        assert not any(equal(got, before) for before in seen)
        assert bs.rng_state(model) == {"step": step, "forward": 0, "seed": 0}
        seen.append(got)
        optimizer.step()
        other.step()
    bs.set_step(model, 1)
    assert equal(gradients(model, model.loss), seen[1])
    model(batch())
    bs.advance(model)
    assert equal(gradients(model, model.loss), seen[2])


def test_a_root_without_a_forward() -> None:
    model = nn.ModuleDict({"a": nn.Linear(48, 32)})
    bs.convert(model, "nvfp4")
    optimizer = attached(model)
    one = gradients(model, lambda x: model["a"](x).square().sum())
    optimizer.step()
    assert not equal(one, gradients(model, lambda x: model["a"](x).square().sum()))


def test_a_skipped_step_keeps_its_bits() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    bs.attach(model, optimizer)
    before = gradients(model, model.loss)
    model(batch())  # forward 0, after which a part draws as that forward does
    model(batch())
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert bs.rng_state(model) == {"step": 0, "forward": 2, "seed": 0}
    assert equal(gradients(model, model.loss), before)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


# --- copies of parts ------------------------------------------------------------------------------


def test_a_copy_of_a_part_is_converted_before_it_is_attached() -> None:
    whole = nn.Sequential(nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 16)), nn.Linear(16, 8))
    bs.convert(whole, "nvfp4", seed=3)
    bs.set_step(whole, 5)
    attached(whole[0])  # a part of a model that is there counts for all of it
    for part in (copy.deepcopy(whole[0]), pickle.loads(pickle.dumps(whole[0]))):
        for refused in (lambda p: attached(p), bs.advance):
            with pytest.raises(ValueError, match="Sequential, a copy or a rest of a part"):
                refused(part)
        bs.convert(part, "nvfp4")
        assert bs.rng_state(part) == {"step": 5, "forward": 0, "seed": 3}
        optimizer = attached(part)
        seen = [gradients(part, lambda x: part(x).sum())]  # noqa: B023
        assert bs.rng_state(part)["forward"] == 1
        optimizer.step()
        assert not equal(seen[0], gradients(part, lambda x: part(x).sum()))  # noqa: B023
    twin = pickle.loads(pickle.dumps(copy.deepcopy(whole)))
    assert bs.rng_state(twin) == bs.rng_state(whole)
    attached(twin).step()
    assert (bs.rng_state(twin)["step"], bs.rng_state(whole)["step"]) == (6, 5)


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, pickled])
def test_another_model_of_the_same_layers_is_converted_itself(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    made = nn.Sequential(nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 16)), nn.Linear(16, 8))
    bs.convert(made, "nvfp4", seed=3)
    whole: Any = copied(made)
    for counted in (whole, whole[0], whole[1], nn.ModuleList([whole])):
        attached(counted)
        bs.advance(counted)
    assert bs.rng_state(whole)["step"] == 4
    other = nn.Sequential(nn.GELU(), whole[0])
    said = (
        "model = Sequential with layers of a converted Sequential, which counts for them; need "
        "that Sequential, what contains it, or a part of it; bs.revert this one, then convert it"
    )
    for refused in (attached, bs.advance):
        with pytest.raises(ValueError, match=said):
            refused(other)
    assert bs.rng_state(whole)["step"] == 4
    bs.revert(other)
    bs.convert(other, RECIPE)
    attached(other).step()
    other(batch()).sum().backward()
    assert bs.rng_state(other) == {"step": 1, "forward": 1, "seed": 0}
    assert bs.rng_state(whole[1]) == {"step": 4, "forward": 0, "seed": 3}


def test_a_layer_that_was_copied_joins_the_model_it_is_put_into() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU())
    bs.convert(model, "nvfp4", seed=3)
    bs.set_step(model, 5)
    model.append(copy.deepcopy(model[0]))
    report = bs.convert(model, "nvfp4")
    assert [name for name, _ in report.converted] == ["0", "2"]
    assert bs.rng_state(model) == {"step": 5, "forward": 0, "seed": 3}
    first, last = (layer for layer in model if isinstance(layer, bs.nn.Linear))
    assert first._rng_state is last._rng_state
    assert not torch.equal(first._seed, last._seed)


@pytest.mark.parametrize("last", [False, True])
def test_an_optimizer_of_a_part_counts_on_in_the_whole(last: bool) -> None:
    body = nn.Sequential(nn.Linear(16, 16))
    bs.convert(body, "nvfp4", seed=1)
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    bs.attach(body, optimizer)
    head = bs.nn.Linear(16, 16, seed=4)  # counted apart, from the same place
    model = nn.Sequential(head, body) if last else nn.Sequential(body, head)
    bs.convert(model, "nvfp4")
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    assert bs.rng_state(model) == {"step": 1, "forward": 0, "seed": 0}


def test_layers_of_a_model_that_is_gone_join_another() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    bs.convert(model, "nvfp4")
    stage, gone = nn.Sequential(model[0]), weakref.ref(model)
    del model
    assert gone() is None  # at once: nothing of ours is part of a circle with it
    bs.convert(stage, "nvfp4")


# --- converted again ------------------------------------------------------------------------------


def test_the_seed_stays_until_another_is_given() -> None:
    model = net(seed=17)
    bs.convert(model, "mxfp8")
    assert bs.rng_state(model)["seed"] == 17
    bs.convert(model, RECIPE)
    fresh = net(seed=17)
    assert equal(gradients(model, model), gradients(fresh, fresh))
    bs.convert(model, RECIPE, seed=0)
    assert bs.rng_state(model)["seed"] == 0


def test_an_optimizer_counts_on_after_revert_and_convert() -> None:
    model = net(seed=17)
    optimizer = attached(model)
    optimizer.step()
    bs.revert(model)
    optimizer.step()  # one without random bits, which is a step too
    bs.convert(model, RECIPE)
    assert bs.rng_state(model) == {"step": 2, "forward": 0, "seed": 17}
    bs.attach(model, optimizer)  # changes nothing
    optimizer.step()
    assert bs.rng_state(model)["step"] == 3
    bs.revert(model)
    bs.convert(copy.deepcopy(model), RECIPE)  # a copy has no optimizer: it is new
    bs.convert(model, RECIPE, seed=2)
    assert bs.rng_state(model) == {"step": 3, "forward": 0, "seed": 2}


def test_the_last_position_that_can_be_set() -> None:
    model = nn.Linear(32, 32)
    bs.convert(model, "nvfp4", seed=3)
    last = {"step": 2**47 - 1, "forward": 2**16 - 1, "seed": 3}
    bs.set_step(model, **last)
    for change, said in (
        ({"step": 2**47}, "step = 140737488355328; need 0 or more, below 2^47"),
        ({"forward": 2**16}, "forward = 65536; need 0 or more, below 2^16"),
        ({"seed": 0}, "seed = 0; need 3, the model's"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            bs.set_step(model, **(last | change))
        assert bs.rng_state(model) == last
