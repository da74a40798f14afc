"""What a converted model counts, and which random bits its forwards and what is recomputed of them
draw (docs/rng.md)."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import blockscale as bs
import pytest
import torch
import torch.multiprocessing  # its pickler shares memory
from bits import equal
from blockscale.rng import layer_seed
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


class Net(nn.Module):
    """Two linear layers in a block that may be checkpointed, and one outside."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(48, 64), nn.Linear(64, 48), nn.Linear(48, 33)
        self.reentrant = reentrant

    def block(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        out: torch.Tensor = self.head(x)
        return out


def net(reentrant: bool | None = None, seed: int = 0) -> Net:
    model = Net(reentrant)
    bs.convert(model, "nvfp4", seed=seed)
    return model


def batch(i: int) -> torch.Tensor:
    return torch.randn(20, 48, generator=torch.Generator().manual_seed(i)).requires_grad_()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return grads


def train(model: nn.Module, order: str, steps: int = 2) -> list[torch.Tensor]:
    """Gradients of some steps of two micro-batches each; f is a forward, b a backward."""
    grads = []
    for step in range(steps):
        forwards = iter([batch(2 * step), batch(2 * step + 1)])
        losses: list[torch.Tensor] = []
        for what in order:
            if what == "f":
                losses.append(model(next(forwards)).square().mean())
            elif what == "b":
                losses.pop(0).backward()  # type: ignore[no-untyped-call]
            else:  # one backward for the sum
                torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        grads += gradients(model)
        bs.advance(model)
    return grads


def test_every_layer_of_a_model_reads_the_keys_of_the_document() -> None:
    model = net(seed=3)
    bs.set_step(model, 6)
    model(batch(0))
    x, dy = batch(1), torch.randn(20, 33)
    calls: dict[str, Any] = {}
    model.head.register_forward_hook(lambda m, args, y: calls.update(x=args[0], y=y))
    y = model(x)
    dw = torch.autograd.grad(y, model.head.weight, dy)[0]
    rng = bs.Rng(layer_seed(3, "head"), (6 << 16) | 1)
    want = bs.linear(calls["x"].detach(), model.head.weight, model.head.bias, "nvfp4", rng=rng)
    assert torch.equal(dw, torch.autograd.grad(want, model.head.weight, dy)[0])


def test_steps_and_forwards_count() -> None:
    model = net()
    assert bs.rng_state(model) == {"step": 0, "forward": 0, "seed": 0}
    model(batch(0))
    model(batch(0)).sum().backward()
    assert bs.rng_state(model) == {"step": 0, "forward": 2, "seed": 0}
    with torch.no_grad():  # an evaluation does not shift the bits of training
        model(batch(0))
    assert bs.rng_state(model)["forward"] == 2
    model.block(batch(0))  # nor does a part of the model
    assert bs.rng_state(model)["forward"] == 2
    bs.advance(model)
    assert bs.rng_state(model) == {"step": 1, "forward": 0, "seed": 0}
    bs.set_step(model, 2**40)
    assert bs.rng_state(model) == {"step": 2**40, "forward": 0, "seed": 0}


@pytest.mark.parametrize("reentrant", [False, True])
def test_steps_within_a_backward_leave_recomputations_alone(reentrant: bool) -> None:
    """Optimizers that step as soon as a parameter has its gradient."""

    def train(recompute: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        drawn = bs.spec("nvfp4", rounding="stochastic")
        bs.convert(model, bs.recipe("nvfp4").replace(fprop_x=drawn), seed=1)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        for optimizer in optimizers.values():
            (parameter,) = optimizer.param_groups[0]["params"]

            def after(p: torch.Tensor, step: Any = optimizer.step) -> None:
                step()

            parameter.register_post_accumulate_grad_hook(after)
        bs.attach(model, optimizers[model.get_parameter("2.bias")])  # whose gradient comes first
        if recompute:
            for layer in model:
                plain = layer.forward
                layer.forward = lambda x, f=plain: checkpoint(f, x, use_reentrant=reentrant)
        for i in range(3):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(i)).requires_grad_()
            model(x).square().mean().backward()
            for p in model.parameters():
                p.grad = None
        assert bs.rng_state(model)["step"] == 3
        return [p.detach() for p in model.parameters()]

    for got, want in zip(train(True), train(False), strict=True):
        assert torch.equal(got, want)


def test_a_run_continues_within_a_step() -> None:
    def step(model: nn.Module) -> torch.Tensor:
        model.zero_grad()
        model(batch(1)).square().sum().backward()
        bs.advance(model)
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    model, resumed = net(), net()
    step(model)
    model(batch(0))  # a forward that counts, and no step after it
    state = bs.rng_state(model)
    assert (state["step"], state["forward"]) == (1, 1)
    bs.set_step(resumed, **state)
    assert bs.rng_state(resumed) == state
    assert torch.equal(step(resumed), step(model))


def test_what_is_called_past_the_root_continues_within_a_step() -> None:
    """It draws as in the forward that began last."""
    model, resumed = net(), net()
    for i in range(2):
        model(batch(i))
    state = bs.rng_state(model)
    bs.set_step(resumed, state["step"], state["forward"])
    for one in (model, resumed):
        one.up(batch(2)).square().sum().backward()
    assert equal(gradients(resumed), gradients(model))


def test_another_process_counts_for_itself() -> None:
    """What is sent to one lies in memory that both see."""
    model = net()
    sent = pickle.loads(ForkingPickler.dumps(model))
    bs.advance(sent)
    assert bs.rng_state(sent)["step"] == 1
    assert bs.rng_state(model)["step"] == 0


def test_a_model_loaded_onto_the_meta_device_keeps_its_bits() -> None:
    model, file = net(), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, map_location="meta", weights_only=False)
    loaded.to_empty(device="cpu")
    loaded.load_state_dict(model.state_dict())
    for m in (model, loaded):
        m(batch(0)).square().sum().backward()
    assert equal(gradients(loaded), gradients(model))
    assert bs.rng_state(loaded) == bs.rng_state(model)


def test_a_forward_within_a_mode_after_an_evaluation() -> None:
    """What is recomputed draws as that forward, not as the evaluation."""

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    found = []
    for reentrant in (None, False):
        model = net(reentrant)
        with torch.no_grad():
            model(batch(0))
        bs.advance(model)
        with Mode():  # type: ignore[no-untyped-call]
            with torch.no_grad():
                model(batch(2))
            y = model(batch(1)).square().sum()
        y.backward()
        found.append(gradients(model))
        assert bs.rng_state(model)["forward"] == 1
    assert equal(*found)


def test_a_forward_within_a_transform_of_functions() -> None:
    model, x = net(), batch(0).detach()
    seen = []

    def without_gradient(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            seen.append(model(x).sum())
        return x.sum()

    gradient = torch.func.grad(without_gradient)(x)
    assert torch.equal(gradient, torch.ones_like(x))
    with torch.no_grad():
        assert torch.equal(seen[0], model(x).sum())
    assert bs.rng_state(model)["forward"] == 0
    with pytest.raises(ValueError, match=r"^linear: x = within torch.func; need torch.no_grad"):
        torch.func.grad(lambda x: model(x).sum())(x)


def multiply(model: nn.Module, x: torch.Tensor, results: Any) -> None:
    results.put((model(x).tolist(), bs.rng_state(model)["forward"]))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_is_started_with_a_model(method: str) -> None:
    context: Any = torch.multiprocessing.get_context(method)
    model, results = net(), context.SimpleQueue()
    child = context.Process(target=multiply, args=(model, batch(0), results))
    child.start()
    child.join()
    assert child.exitcode == 0
    y = model(batch(0)).tolist()
    assert results.get() == (y, bs.rng_state(model)["forward"])


def test_the_offset_changes_in_place_only() -> None:
    model = net()
    layers = [layer for layer in model.modules() if isinstance(layer, bs.nn.Linear)]
    state = layers[0]._rng_state
    assert all(layer._rng_state is state for layer in layers)
    tensors = (state.offset, state.upcoming)
    model(batch(0)).sum().backward()
    bs.advance(model)
    bs.set_step(model, 7)
    assert (state.offset, state.upcoming) == tensors


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="PyTorch opens a GPU that is not there")
def test_random_bits_follow_layers_to_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that need not be there: nothing of a fake tensor is computed."""
    found = []

    def record(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        _, _, _, key, *_ = rest
        found.append([str(tensor.device) for tensor in key])
        return x

    monkeypatch.setattr(bs.nn, "linear_with_key", record)
    devices = ["cuda:0", "cuda:1", "cuda:0"]
    with FakeTensorMode():
        layers = [nn.Linear(8, 8, bias=False, device="meta") for _ in devices]
        for layer, device in zip(layers, devices, strict=True):
            layer.weight = nn.Parameter(torch.empty(8, 8, device=device))
        bs.convert(nn.Sequential(*layers), "nvfp4")
        for layer, device in zip(layers, devices, strict=True):
            layer(torch.empty(4, 8, device=device))
    assert found == [[device, device] for device in devices]  # of seed and offset


def test_random_bits_follow_weights_before_the_first_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before any layer runs: a compiled one might not be able to."""
    model, moved = net(), []
    monkeypatch.setattr(bs.nn.Linear, "_move_rng", lambda layer: moved.append(layer))
    for again in (False, True):
        if again:
            bs.convert(model, "nvfp4")
            moved.clear()
        model(batch(0))
        assert moved == [model.up, model.down, model.head]
        model(batch(1))
        assert len(moved) == 3
    copied = copy.deepcopy(model)
    moved.clear()
    copied(batch(0))
    assert moved == [copied.up, copied.down, copied.head]


def test_a_forward_of_fake_parameters_computes_and_counts_nothing() -> None:
    model = net()
    model(batch(0)).sum().backward()
    at = bs.rng_state(model)
    mode = FakeTensorMode()
    fake: dict[str, torch.Tensor] = {
        name: nn.Parameter(mode.from_tensor(p)) for name, p in model.named_parameters()
    }
    with mode:
        y = torch.func.functional_call(model, fake, (torch.empty(32, 48),))
        y.sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in fake.values())
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.empty(32, 48))
    assert bs.rng_state(model) == at
    want = net()
    want(batch(0)).sum().backward()
    for m in (model, want):  # as if there had been none
        m.zero_grad()
        m(batch(1)).sum().backward()
    assert equal(gradients(model), gradients(want))


def test_a_model_that_is_converted_in_inference_mode_can_be_trained() -> None:
    model = Net()
    with torch.inference_mode():
        bs.convert(model, "nvfp4")
        model(batch(0))
    assert equal(train(model, "fb"), train(net(), "fb"))


def test_forwards_and_steps_draw_different_bits() -> None:
    first, second = net(), net()
    x = batch(0)
    first(x).sum().backward()
    one = gradients(first)
    first(x).sum().backward()  # forward 1 of step 0
    assert not equal(one, gradients(first))
    bs.set_step(second, 1)
    second(x).sum().backward()
    assert not equal(one, gradients(second))
    other = net(seed=1)
    other(x).sum().backward()
    assert not equal(one, gradients(other))


def test_resuming_reproduces_the_run() -> None:
    model = net()
    whole = train(model, "fbfb", steps=4)
    resumed = net()
    bs.set_step(resumed, 2)
    grads = []
    for step in (2, 3):
        for i in (2 * step, 2 * step + 1):
            resumed(batch(i)).square().mean().backward()
        grads += gradients(resumed)
        bs.advance(resumed)
    assert equal(grads, whole[len(whole) // 2 :])


@pytest.mark.parametrize("order", ["fbfb", "ffbb", "ffs"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_draws_the_same_bits(order: str, reentrant: bool) -> None:
    """Also when a later forward has begun before the backward that recomputes."""
    assert equal(train(net(reentrant), order), train(net(), order))


def test_a_parameter_among_the_outputs() -> None:
    """Its gradient sums over all forwards: with a hook from each, all would recompute with the bits
    of the last one."""

    class Tempered(Net):
        temperature: nn.Parameter

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            x = checkpoint(self.block, x, use_reentrant=False) if self.reentrant else self.block(x)
            return self.head(x * self.temperature), self.temperature

    def gradients_of_two(again: bool) -> list[torch.Tensor]:
        model = Tempered(again)
        model.temperature = nn.Parameter(torch.ones(()))
        bs.convert(model, "nvfp4")
        outputs = [model(batch(i)) for i in range(2)]
        for y, temperature in outputs:
            (y * temperature).square().mean().backward()
        return gradients(model)

    assert equal(gradients_of_two(True), gradients_of_two(False))


def test_an_evaluation_is_a_function_of_the_step_too() -> None:
    """With a recipe that draws in forward: a resumed run evaluates alike, and recomputation does
    not see that an evaluation came before it."""
    recipe = bs.recipe("nvfp4").replace(fprop_x="nvfp4[rounding=stochastic]")

    def model(reentrant: bool | None = None) -> Net:
        made = net(reentrant)
        bs.convert(made, recipe)
        return made

    def evaluate(m: Net) -> torch.Tensor:
        with torch.no_grad():
            y: torch.Tensor = m(batch(9))
        return y

    whole, resumed, rerun = model(), model(), model(False)
    first = evaluate(whole)
    for i in range(3):
        for m in (whole, rerun):
            y = m(batch(i))
            evaluate(m)
            y.square().mean().backward()
            bs.advance(m)
    assert equal(gradients(rerun), gradients(whole))
    bs.set_step(resumed, 3)
    assert torch.equal(evaluate(resumed), evaluate(whole))
    assert not torch.equal(evaluate(whole), first)


def test_a_checkpointed_root_counts_once() -> None:
    plain, rerun = net(), net()
    for i in range(2):
        plain(batch(i)).square().mean().backward()
        checkpoint(rerun, batch(i), use_reentrant=False).square().mean().backward()
    assert bs.rng_state(rerun) == bs.rng_state(plain)
    assert equal(gradients(rerun), gradients(plain))


def test_a_root_in_a_reentrant_region_is_not_counted() -> None:
    """Its forward has no gradients; every one of a step draws, and draws again, the same bits."""
    plain, rerun = net(), net()
    for i in range(2):
        bs.set_step(plain, 0)
        plain(batch(i)).square().mean().backward()
        checkpoint(rerun, batch(i), use_reentrant=True).square().mean().backward()
        assert bs.rng_state(rerun)["forward"] == 0
    assert equal(gradients(rerun), gradients(plain))


def regions(kind: str) -> tuple[nn.Sequential, Callable[[torch.Tensor], torch.Tensor]]:
    """A model, and what a region of checkpointing has around it."""
    recipe = bs.recipe("nvfp4[fprop_x=nvfp4[rounding=stochastic]]")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    if kind == "layers by hand":
        layers = (bs.nn.Linear(32, 32, recipe=recipe, seed=i) for i in range(2))
        model = nn.Sequential(*layers)
        return model, lambda x: model(x).relu().square().mean()
    if kind == "regions within":
        model[0].forward = functools.partial(checkpoint, model[0].forward, use_reentrant=False)
    bs.convert(model, recipe)
    if kind == "several forwards":  # the second one is an evaluation

        def several(x: torch.Tensor) -> torch.Tensor:
            y = model(x)
            with torch.no_grad():
                target = model(x + 1)
            loss: torch.Tensor = (y * target * model(x + 2) * model(x + 3)).mean()
            return loss

        return model, several
    return model, lambda x: model(x).clone().square().mean()


@pytest.mark.parametrize(
    "kind", ["model and loss", "several forwards", "layers by hand", "regions within"]
)
def test_a_region_around_the_root_draws_again_what_it_drew(kind: str) -> None:
    """Nodes behind the root have the region recomputed before the gradient of its output is there,
    when other forwards have begun; one is an evaluation."""

    def train(wrapped: bool) -> list[torch.Tensor]:
        model, loss = regions(kind)
        x = [batch(i)[:, :32] for i in range(3)]
        run = functools.partial(checkpoint, loss, use_reentrant=False) if wrapped else loss
        first, second = run(x[0]), run(x[1])
        with torch.no_grad():
            model(x[2])
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        (run(x[1]) + run(x[0])).backward()
        return gradients(model)

    assert equal(train(True), train(False))


@pytest.mark.parametrize("saved", ["clones", "all"])
def test_a_selective_region_around_the_root(saved: str) -> None:
    """The policy is never asked about the operators that count forwards."""

    def policy(_: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        save = saved == "all" or op is torch.ops.aten.clone.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def train(wrapped: bool) -> list[torch.Tensor]:
        model, loss = regions("model and loss")
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        run = functools.partial(checkpoint, loss, use_reentrant=False, context_fn=contexts)
        x = batch(0)[:, :32]
        ((run if wrapped else loss)(x.clone()) + (run if wrapped else loss)(x * 2)).backward()
        return gradients(model)

    assert equal(train(True), train(False))


def test_bits_do_not_depend_on_wrappers() -> None:
    """A layer's name is the same whether its block is compiled or checkpointed."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    fast = nn.Module()
    fast._orig_mod = nn.Linear(32, 32)  # the name that torch.compile gives
    fabric = nn.Module()
    fabric._forward_module = nn.Sequential(checkpoint_wrapper(nn.Linear(32, 32)), fast)
    a, b = bs.convert(plain, "nvfp4"), bs.convert(fabric, "nvfp4")
    assert [name for name, _ in a.converted] == [name for name, _ in b.converted] == ["0", "1"]
