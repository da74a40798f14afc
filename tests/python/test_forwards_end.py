"""How forwards of a converted model end: by an interrupt, in several threads, as a copy."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import blockscale as bs
import pytest
import torch
from blockscale.forwards import RngState
from torch import nn


class Interrupted(nn.Module):
    """A linear layer and then whatever `then` does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.then: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.then()
        return y


def converted() -> Interrupted:
    torch.manual_seed(0)
    model = Interrupted()
    bs.convert(model, "nvfp4")
    return model


def state(model: nn.Module) -> RngState:
    (layer,) = (m for m in model.modules() if isinstance(m, bs.nn.Linear))
    return layer._rng_state


X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


def leaf() -> torch.Tensor:
    return X.clone().requires_grad_()


def test_an_interrupted_forward_leaves_nothing_to_the_next() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    model, other = converted(), converted()
    seen: list[torch.Tensor] = []
    model.layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.then = interrupt
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            model(X)
        model.then, then = lambda: None, model.then
        x = leaf() * 1
        model(x).sum().backward()
        assert seen[-1] is x  # a forward within another one gets views of what has a node
        assert not state(model).running.stack
        model.then = then
    # Layers called past the root have the offset of the last forward, as in a run resumed here.
    now = bs.rng_state(model)
    bs.set_step(other, now["step"], now["forward"])
    assert torch.equal(state(model).offset, state(other).offset)


def test_an_interrupted_forward_within_another_module() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    model = converted()
    around = nn.Sequential(model)
    model.then = interrupt
    with pytest.raises(KeyboardInterrupt):
        around(X)
    model.then = lambda: None
    around(leaf())
    assert not state(model).running.stack


def test_a_forward_that_fails_before_it_is_counted() -> None:
    """PyTorch warns of a hook that fails then, too."""

    def refuse(*_: object) -> None:
        raise RuntimeError("refused")

    model = converted()
    model.register_forward_pre_hook(refuse, prepend=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="refused"):
            model(X)


def test_a_forward_while_another_thread_is_in_one_is_not_within_it() -> None:
    model = converted()
    seen: list[torch.Tensor] = []
    model.layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    inside, go = threading.Event(), threading.Event()
    waits = threading.local()

    def then() -> None:
        if getattr(waits, "here", False):
            inside.set()
            assert go.wait(60)

    def first() -> torch.Tensor:
        waits.here = True
        y: torch.Tensor = model(leaf() * 1)
        return y

    model.then = then
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(first)
        assert inside.wait(60)
        x = leaf() * 1
        y = model(x)
        left = len(state(model).running.stack)  # of this thread
        go.set()
        assert torch.equal(result.result(60), y)
    assert seen[-1] is x
    assert left == 0


def loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied: nn.Module = torch.load(file, weights_only=False)
    return copied


def pickled(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, loaded])
def test_a_model_copied_in_inference_mode_can_be_trained(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    bs.convert(model, "nvfp4")
    with torch.inference_mode():
        copy_of_it = copied(model)  # its parameters are inference tensors
    for part in (model, copy_of_it):
        ones = {key: torch.ones_like(value) for key, value in part.state_dict().items()}
        part.load_state_dict(ones, assign=True)
    gradients = []
    for part in (model, copy_of_it):
        optimizer = torch.optim.SGD(part.parameters(), 0.1)
        bs.attach(part, optimizer)
        part(X).square().sum().backward()
        optimizer.step()
        gradients.append(part.get_parameter("0.weight").grad)
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])
    assert bs.rng_state(model) == bs.rng_state(copy_of_it)


def test_a_shallow_copy_outlives_what_it_was_made_of() -> None:
    shallow = copy.copy(converted())
    for model in (copy.deepcopy(shallow), shallow):
        bs.attach(model, torch.optim.SGD(model.parameters(), 0.1))
        model(X)
        bs.advance(model)
        model(X)
        assert bs.rng_state(model) == {"step": 1, "forward": 1, "seed": 0}
