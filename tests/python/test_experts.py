"""Experts of other libraries, converted: their calls of `grouped_mm` are `grouped_linear`."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import blockscale as bs
import pytest
import torch
from bits import assert_same
from blockscale import experts as blockscale_experts
from blockscale.rng import layer_seed
from expert_models import ENDS, GROUPS, WIDTH, Block, ManyExperts, gradients, model, rows
from ranks import DEVICES, on_ranks, one_thread
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


@pytest.mark.parametrize("last", ["converted", "divided"])
def test_experts_divided_over_ranks(last: str, one_rank: DeviceMesh) -> None:
    plain, divided = model(), Block()
    divided.load_state_dict(plain.state_dict())

    def convert() -> None:
        bs.convert(divided, "nvfp4", experts=["experts"], seed=5)

    if last == "divided":
        convert()
    for name in ("up", "down"):
        local = getattr(divided.experts, name)
        setattr(divided.experts, name, nn.Parameter(distribute_tensor(local, one_rank, [Shard(0)])))
    if last == "converted":
        convert()
    x = rows()
    got = gradients(divided, lambda: divided(x))
    got = [g.to_local() if isinstance(g, DTensor) else g for g in got]
    assert_same(got, gradients(plain, lambda: plain(x)))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("recipe", bs.recipe_names())
def test_each_product_is_grouped_linear(recipe: str, turned: bool, device: torch.device) -> None:
    experts = model(recipe, device, turned).experts
    x, ends = rows(device), ENDS.to(device)

    def by_hand() -> torch.Tensor:
        rngs = [bs.Rng(layer_seed(5, f"experts#{i}")) for i in range(2)]
        up, down = experts.weights()
        h = bs.grouped_linear(x, up, ends, recipe, rngs[0]).relu()
        return bs.grouped_linear(h, down, ends, recipe, rngs[1])

    if recipe == "bf16":  # PyTorch's own, whose rows past the last group are undefined
        plain = ManyExperts(turned).to(device)
        plain.load_state_dict(experts.state_dict())
        want = gradients(plain, lambda: plain(x, ends)[:18])
        assert_same(gradients(experts, lambda: experts(x, ends)[:18]), want)
    else:
        want = gradients(experts, by_hand)
        assert_same(gradients(experts, lambda: experts(x, ends)), want)


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "mxfp4", "mxfp8", "nvfp4"])
def test_gradients_lie_as_the_matrices_do(recipe: str, device: torch.device) -> None:
    made = model(recipe, device, turned=True).experts
    plain = model(recipe, device).experts
    y = made(rows(device), ENDS.to(device))
    want = plain(rows(device), ENDS.to(device))
    assert torch.equal(y, want)
    matrices = ((made.up, made.down), (plain.up, plain.down))
    turned, usual = (
        torch.autograd.grad(result, of, torch.ones_like(result))
        for result, of in zip((y, want), matrices, strict=True)
    )
    for got, other in zip(turned, usual, strict=True):
        assert got.is_contiguous()
        assert other.is_contiguous()
        if device.type == "cpu":
            assert torch.equal(got.transpose(1, 2), other)
        else:  # scales in the other order: last bits of FP32, at most a step of BF16
            torch.testing.assert_close(got.transpose(1, 2), other, rtol=2**-7, atol=1e-4)


def test_forwards_count_and_are_recomputed_alike(device: torch.device) -> None:
    plain, again = model(device=device), model(device=device)
    again.rerun = True
    x = rows(device)
    for _ in range(2):
        want = gradients(plain, lambda: plain(x))
        assert_same(gradients(again, lambda: again(x)), want)
    assert not torch.equal(want[-1], gradients(plain, lambda: plain(x))[-1])
    assert bs.rng_state(plain)["forward"] == 3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_in_one_graph(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    torch._dynamo.reset()
    plain = model(device=device).to(dtype)
    x = rows(device).to(dtype)
    other = copy.deepcopy(plain)
    want = gradients(plain.experts, lambda: plain.experts(x, ENDS.to(device)))
    compiled = torch.compile(other.experts, fullgraph=True, backend=backend)
    assert_same(gradients(other.experts, lambda: compiled(x, ENDS.to(device))), want)


def test_copies_and_files() -> None:
    made = model()
    want = gradients(made, lambda: made(rows()))
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for twin in (copy.deepcopy(made), loaded):
        assert type(twin.experts) is type(made.experts)
        bs.set_step(twin, 0)
        assert_same(gradients(twin, functools.partial(twin, rows())), want)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_blockwise", "mxfp8"])
def test_weights_are_quantized_once(recipe: str, turned: bool, device: torch.device) -> None:
    plain, other = model(recipe, device, turned), model(recipe, device, turned)
    made: list[object] = []
    of = bs.quantize_weight

    def counted(*args: Any) -> object:
        made.append(of(*args))
        return made[-1]

    with bs.quantized_weights(other), pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockscale_experts, "quantize_weight", counted)
        for seed in range(2):
            x = rows(device, seed)
            want = gradients(plain, functools.partial(plain, x))
            assert_same(gradients(other, functools.partial(other, x)), want)
        assert len(made) == 2
        assert "_kept" not in vars(copy.deepcopy(other).experts)
        with torch.no_grad():
            other.experts.down.mul_(2)
        with pytest.raises(ValueError, match="quantized_weights: experts = changed; need"):
            other(x)
        optimizer = torch.optim.SGD([other.experts.up], 1e-2)
        with pytest.raises(ValueError, match="optimizer = a step of its weights"):
            optimizer.step()
    other(x)


def test_a_copy_of_all_attributes_is_a_model_like_others() -> None:
    """Made while a forward's operands are kept, by a class that says itself how it is copied."""

    class Own(ManyExperts):
        def __deepcopy__(self, memo: dict[int, Any]) -> Own:
            made = memo[id(self)] = type(self).__new__(type(self))
            made.__dict__ = copy.deepcopy(self.__dict__, memo)
            return made

    made = nn.ModuleDict({"experts": Own()})
    bs.convert(made, "mxfp8", experts=["experts"])
    with bs.quantized_weights(made), torch.no_grad():
        want = made["experts"](rows(), ENDS)
        other = copy.deepcopy(made)
    with torch.no_grad():
        assert torch.equal(other["experts"](rows(), ENDS), want)


def test_a_matrix_both_ways_round_within_quantized_weights() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(GROUPS, WIDTH, WIDTH).bfloat16())

        def forward(self, x: torch.Tensor, turned: bool) -> torch.Tensor:
            w = self.up.transpose(1, 2) if turned else self.up
            return torch._grouped_mm(x, w, offs=ENDS)

    made = Square()
    whole = nn.ModuleDict({"experts": made})
    bs.convert(whole, "mxfp8", experts=["experts"])
    want = [made(rows(), turned) for turned in (False, True)]
    with bs.quantized_weights(whole):
        for turned in (False, True, False):
            assert torch.equal(made(rows(), turned), want[turned])


def test_the_dtype_is_that_of_grouped_mm(device: torch.device) -> None:
    made = model("mxfp8", device).experts.float()
    x = rows(device).float()
    want = made(x, ENDS.to(device))
    with torch.autocast(device.type, torch.bfloat16):
        got = made(x, ENDS.to(device))
    assert got.dtype == torch.float32
    assert torch.equal(got, want)  # not rounded on the way


def test_classes_go_with_what_they_were_made_of() -> None:
    class Local(ManyExperts):
        pass

    kind = weakref.ref(Local)
    holder = nn.ModuleDict({"experts": Local()})
    bs.convert(holder, "mxfp8", experts=["experts"])
    bs.revert(holder)
    del Local, holder
    gc.collect()
    assert kind() is None


def test_a_module_that_takes_no_attributes_is_converted() -> None:
    class Frozen(ManyExperts):
        def __setattr__(self, name: str, value: Any) -> None:
            if "frozen" in vars(self):
                raise AttributeError(f"{name}: frozen")
            super().__setattr__(name, value)

    made = Frozen()
    vars(made)["frozen"] = True
    holder = nn.ModuleDict({"experts": made})
    bs.convert(holder, "nvfp4", experts=["experts"])
    made(rows(), ENDS).float().sum().backward()
    assert bs.revert(holder) == ["experts"]


def test_an_instance_that_convert_has_not_seen_is_copied_and_moved() -> None:
    made = model("nvfp4").experts
    fresh = type(made)()
    fresh.load_state_dict(made.state_dict())
    for twin in (copy.deepcopy(fresh), pickle.loads(pickle.dumps(fresh))):
        assert type(twin) is type(made)
        assert_same(list(twin.parameters()), list(made.parameters()))
        assert twin.to(torch.float32).up.dtype is torch.float32
    with pytest.raises(ValueError, match="an instance that convert has not seen; need a converted"):
        fresh(rows(), ENDS)


def test_a_computed_matrix_within_quantized_weights() -> None:
    """It is multiplied as it is at each forward."""

    class Scaled(ManyExperts):
        scale = 1.0

        def weights(self) -> list[torch.Tensor]:
            return [w * self.scale for w in super().weights()]

    made = Scaled()
    whole = nn.ModuleDict({"experts": made})
    bs.convert(whole, "mxfp8", experts=["experts"])
    with torch.no_grad():
        before, made.scale = made(rows(), ENDS), 3.0
        want, made.scale = made(rows(), ENDS), 1.0
        with bs.quantized_weights(whole):
            assert torch.equal(made(rows(), ENDS), before)
            made.scale = 3.0
            assert torch.equal(made(rows(), ENDS), want)


def test_another_recipe_within_quantized_weights() -> None:
    made = model("mxfp8")
    with bs.quantized_weights(made):
        bs.convert(made, "mxfp4")
        got = made(rows())
    assert torch.equal(got, made(rows()))


def test_parametrized_afterwards_they_can_be_moved() -> None:
    made = model("nvfp4")
    for name in ("up", "down", "bias"):
        nn.utils.parametrize.register_parametrization(made.experts, name, nn.Identity())
    made.to(torch.bfloat16)
    assert made(rows()).shape == (20, WIDTH)


def test_copies_of_compiled_layers_are_copies() -> None:
    made = nn.Sequential(nn.Linear(8, 8))
    bs.convert(made, "mxfp8")
    made[0].compile(backend="eager")
    x = torch.randn(2, 8)
    made(x)
    twin = copy.deepcopy(made)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert twin(x).abs().sum() == 0


def test_exported() -> None:
    made = model("mxfp8").experts
    want = made(rows(), ENDS)
    for strict in (False, True):
        program = torch.export.export(made, (rows(), ENDS), strict=strict)
        assert torch.equal(program.module()(rows(), ENDS), want)


class Often(ManyExperts):
    """Multiplies more often than it has matrices."""

    times = 2

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = super().forward(x, ends)
        return x


def test_one_matrix_may_be_multiplied_several_times() -> None:
    made = Often()
    bs.convert(nn.ModuleDict({"experts": made}), "nvfp4", experts=["experts"])
    made(rows(), ENDS).float().sum().backward()
    made.times = 9
    with pytest.raises(
        ValueError, match="experts = more than 16 products in a forward; need 16 at most"
    ):
        made(rows(), ENDS)


def trained(recipe: str, device: str, ranks: int) -> list[torch.Tensor]:
    """Weights after two steps, in one process or cut over two."""
    made = model(recipe, device)
    if ranks > 1:
        mesh = init_device_mesh(device, (ranks,))
        fully_shard(made.experts, mesh=mesh)
        fully_shard(made, mesh=mesh)
    optimizer = torch.optim.SGD(made.parameters(), 0.5)
    bs.attach(made, optimizer)
    for step in range(2):
        made(rows(device, step))[:18].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.detach() for p in made.parameters()]
    return [(w.full_tensor() if isinstance(w, DTensor) else w).cpu() for w in weights]


def train_and_compare(device: str, want: dict[str, list[torch.Tensor]]) -> None:
    for recipe, weights in want.items():
        assert_same(trained(recipe, device, 2), weights)


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_with_one_batch_are_one_process(device: str, tmp_path: Path) -> None:
    with one_thread():
        want = {recipe: trained(recipe, device, 1) for recipe in ("nvfp4", "fp8_blockwise")}
    on_ranks(train_and_compare, tmp_path, device, want, device=device)
