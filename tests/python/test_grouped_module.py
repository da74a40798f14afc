"""`GroupedLinear`: `grouped_linear` as a module, alone and in a converted model."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from pathlib import Path

import blockscale as bs
import numpy
import pytest
import torch
import torch.distributed as dist
from bits import assert_same
from blockscale.rng import layer_seed
from ranks import DEVICES, on_ranks, one_thread
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

EXPERTS, WIDTH, HIDDEN = 4, 48, 64
ENDS = torch.tensor([5, 5, 12, 18])


class Experts(nn.Module):
    """x plus what each row's expert makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.up = bs.nn.GroupedLinear(EXPERTS, WIDTH, HIDDEN, seed=1)
        self.down = bs.nn.GroupedLinear(EXPERTS, HIDDEN, WIDTH, seed=2)
        self.rerun = False

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        ends = ENDS.to(x.device)
        y: torch.Tensor = self.down(torch.relu(self.up(x, ends)), ends)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.gate(self.norm(x))
        y = checkpoint(self.inner, x, use_reentrant=False) if self.rerun else self.inner(x)
        return x + y


def model(recipe: str = "nvfp4", device: torch.device | str = "cpu") -> Experts:
    torch.manual_seed(0)
    made = Experts()
    bs.convert(made, recipe)
    return made.to(device)


def rows(seed: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


def gradients(module: nn.Module, backward: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    module.zero_grad()
    y = backward()
    y.square().sum().backward()  # type: ignore[no-untyped-call]
    return [y.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("recipe", bs.recipe_names())
def test_alone_it_is_grouped_linear_and_counts(recipe: str, device: torch.device) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if recipe == "bf16" else torch.float32  # PyTorch's grouped GEMM on CUDA
    layer = bs.nn.GroupedLinear(EXPERTS, WIDTH, HIDDEN, device, dtype, recipe=recipe, seed=7)
    assert layer.weight.shape == (EXPERTS, HIDDEN, WIDTH)
    assert 0.9 * WIDTH**-0.5 < layer.weight.abs().max() <= 1.01 * WIDTH**-0.5
    x, ends = rows(0, device).to(dtype), ENDS.to(device)
    for forward in range(2):
        got = gradients(layer, lambda: layer(x, ends))
        rng = bs.Rng(layer_seed(7, ""), forward)
        function = functools.partial(bs.grouped_linear, x, layer.weight, ends, recipe, rng)
        assert_same(got, gradients(layer, function))
    drawn = bs.recipe(recipe).stochastic
    assert bs.rng_state(layer) == {"step": 0, "forward": 2 if drawn else 0, "seed": 7}
    assert list(layer.state_dict()) == ["weight"]


def test_a_converted_model_counts_for_its_experts() -> None:
    torch.manual_seed(0)
    made = Experts()
    report = bs.convert(made, "nvfp4", rules={"down": "mxfp8"}, seed=5)
    recipes = {name: str(recipe) for name, recipe in report.converted}
    assert recipes == {"gate": "nvfp4", "up": "nvfp4", "down": "mxfp8"}
    optimizer = torch.optim.SGD(made.parameters(), 1e-2)
    bs.attach(made, optimizer)
    made(rows()).sum().backward()
    optimizer.step()
    made(rows()).sum().backward()
    assert bs.rng_state(made) == {"step": 1, "forward": 1, "seed": 5}
    assert len({id(layer._rng_state) for layer in (made.up, made.down)}) == 1
    seeds = [int(layer._seed) & (1 << 64) - 1 for layer in (made.up, made.down)]
    assert seeds == [layer_seed(5, "up"), layer_seed(5, "down")]


def test_what_is_left_alone_keeps_its_recipe() -> None:
    made = Experts()
    report = bs.convert(made, "fp8_blockwise", rules={"down": None}, skip=["up"])
    assert [name for name, _ in report.converted] == ["gate"]
    assert dict(report.skipped)["up"] == "skip 'up', stays in nvfp4"
    assert dict(report.skipped)["down"] == "rule 'down', stays in nvfp4"
    optimizer = torch.optim.SGD(made.parameters(), 1e-2)
    bs.attach(made, optimizer)
    made(rows()).sum().backward()
    assert bs.rng_state(made)["forward"] == 1  # counted with the others
    assert bs.revert(made) == ["gate"]
    assert type(made.gate) is nn.Linear
    assert str(made.up.recipe) == "nvfp4"
    optimizer.step()
    made(rows()).sum().backward()
    assert bs.rng_state(made) == {"step": 1, "forward": 1, "seed": 0}
    bs.convert(made, "mxfp4")
    assert bs.rng_state(made) == {"step": 1, "forward": 1, "seed": 0}
    assert str(made.up.recipe) == "mxfp4"


def test_reverting_a_part_leaves_the_count_of_the_whole() -> None:
    parts = [Experts(), Experts()]
    whole = nn.Sequential(*parts)
    bs.convert(whole, "nvfp4", seed=3)
    bs.set_step(whole, 5)
    seeds = [int(part.up._seed) for part in parts]
    assert bs.revert(whole[0]) == ["gate"]
    assert bs.revert(whole[1]) == ["gate"]
    assert bs.rng_state(whole) == {"step": 5, "forward": 0, "seed": 3}
    assert [int(part.up._seed) for part in parts] == seeds
    alone = bs.nn.GroupedLinear(2, 32, 32, seed=4)
    bs.set_step(alone, 6)
    assert bs.revert(alone) == []
    assert bs.rng_state(alone) == {"step": 6, "forward": 0, "seed": 4}


def test_recomputed_experts_draw_the_same_bits(device: torch.device) -> None:
    plain, again = model(device=device), model(device=device)
    again.rerun = True
    x = rows(0, device)
    for _ in range(2):
        want = gradients(plain, lambda: plain(x))
        assert_same(gradients(again, lambda: again(x)), want)
        assert not torch.equal(want[-1], gradients(plain, lambda: plain(x))[-1])
        gradients(again, lambda: again(x))


def test_their_weights_are_quantized_once(device: torch.device) -> None:
    plain, other = model("mxfp8", device), model("mxfp8", device)
    x = rows(0, device)
    with bs.quantized_weights(other):
        assert_same(gradients(other, lambda: other(x)), gradients(plain, lambda: plain(x)))
        with torch.no_grad():
            other.up.weight.mul_(2)
        with pytest.raises(ValueError, match=r"_weights: up.weight = changed; need what it was"):
            other(x)


def test_compiled_and_copied(device: torch.device) -> None:
    torch._dynamo.reset()
    plain, other = model(device=device), copy.deepcopy(model(device=device))
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    x = rows(0, device)
    want = gradients(plain, lambda: plain(x))
    assert_same(gradients(other, lambda: compiled(x)), want)


def test_made_without_memory() -> None:
    layer = bs.nn.GroupedLinear(2, 32, 16, device="meta")
    layer.to_empty(device="cpu").reset_parameters()
    assert layer._seed.device == layer.weight.device
    assert layer(torch.randn(3, 32), torch.tensor([1, 3])).shape == (3, 16)
    assert "groups=2, in_features=32, out_features=16, recipe=nvfp4" in repr(layer)


def test_any_whole_numbers_are_taken() -> None:
    layer = bs.nn.GroupedLinear(*numpy.array([2, 32, 16]))
    assert [type(size) for size in layer.weight_shape] == [int] * 3


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="GroupedLinear: groups = 0; need 1 or more"):
        bs.nn.GroupedLinear(0, 2, 2)
    with pytest.raises(
        TypeError, match="device = a str; need a device; pass the recipe as recipe="
    ):
        bs.nn.GroupedLinear(2, 2, 2, "mxfp8")
    with pytest.raises(TypeError, match="Linear: device = a str; need a device; pass the recipe"):
        bs.nn.Linear(2, 2, True, "nvfp4")
    with pytest.raises(TypeError, match="need a device; pass the recipe as recipe="):
        bs.nn.GroupedLinear(3, 8, 8, "nvfp4[keep_w=False]")
    with pytest.raises(ValueError, match=r"GroupedLinear: dtype = torch.float64; need float32"):
        bs.nn.GroupedLinear(3, 8, 8, dtype=torch.float64)
    with pytest.raises(TypeError, match="GroupedLinear: in_features = a str; need an int"):
        bs.nn.GroupedLinear(1, "a", 2)  # type: ignore[arg-type]
    layer = bs.nn.GroupedLinear(2, 32, 16)
    with pytest.raises(
        TypeError, match="GroupedLinear: offsets = an int; need a tensor of the cumulative ends"
    ):
        layer(torch.randn(3, 32), 3)
    with pytest.raises(ValueError, match=r"grouped_linear: offsets.shape = \[3\]; need \[2\]"):
        layer(torch.randn(3, 32), torch.tensor([0, 1, 3]))


def test_experts_divided_over_ranks(one_rank: DeviceMesh) -> None:
    """Each rank's are a tensor of their own; examples/python/expert_parallel.py has two."""
    made, x = model(), rows()
    want = gradients(made, lambda: made(x))
    bs.set_step(made, 0)
    for layer in (made.up, made.down):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, one_rank, [Shard(0)]))
    bs.convert(made, "nvfp4")  # again, of weights that are divided already
    got = gradients(made, lambda: made(x))
    assert_same([g.to_local() if isinstance(g, DTensor) else g for g in got], want)
    bs.set_step(made, 0)
    with bs.quantized_weights(made):
        got = gradients(made, lambda: made(x))
    assert_same([g.to_local() if isinstance(g, DTensor) else g for g in got], want)
    w = made.up.weight
    with pytest.raises(ValueError, match=r"grouped_linear: w = a DTensor; .*w.to_local\(\)"):
        bs.grouped_linear(x, w, ENDS, "mxfp8")
    square, values = init_device_mesh("cpu", (1, 1)), w.to_local().detach()  # type: ignore[attr-defined]
    for mesh, places, got_places in (
        (one_rank, [Shard(1)], r"\(Shard\(dim=1\),\)"),
        (square, [Shard(0), Shard(1)], r"\(Shard\(dim=0\), Shard\(dim=1\)\)"),
    ):
        made.up.weight = nn.Parameter(distribute_tensor(values, mesh, places))
        said = rf"GroupedLinear: weight.placements = {got_places}; need Shard\(0\): other whole"
        with pytest.raises(ValueError, match=said):
            made(x)


def divided_and_compare(device: str, want: dict[str, list[torch.Tensor]]) -> None:
    """All rows go to both ranks, which have two experts each; FSDP2 on top, of one rank."""
    both = init_device_mesh(device, (1, 2), mesh_dim_names=("data", "expert"))
    rank = dist.get_rank()
    rows_here = slice(0, 5) if rank == 0 else slice(5, 18)
    for recipe, one_process in want.items():
        for how in ("alone", "ahead", "fsdp"):
            made = model(recipe, device)
            for layer in (made.up, made.down):
                divided = distribute_tensor(layer.weight.detach(), both["expert"], [Shard(0)])
                layer.weight = nn.Parameter(divided)
            if how == "fsdp":
                for layer in (made.up, made.down):
                    fully_shard(layer, mesh=both["data"], shard_placement_fn=lambda _: Shard(1))
            x = rows(0, device)[rows_here]
            ends = ENDS.to(device)[2 * rank : 2 * rank + 2] - rows_here.start
            with bs.quantized_weights(made) if how == "ahead" else contextlib.nullcontext():
                y = made.down(torch.relu(made.up(x, ends)), ends)
                y.square().sum().backward()
            got = [y, *(p.grad for p in (made.up.weight, made.down.weight))]
            whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in got]
            assert_same([g.detach().cpu() for g in whole[1:]], one_process[1:])
            assert torch.equal(y.detach().cpu(), one_process[0][rows_here])
    made = model("mxfp8", device)
    weight = distribute_tensor(torch.randn(1, HIDDEN, WIDTH, device=device), both["expert"])
    weight = weight.redistribute(both["expert"], [Shard(0)])
    made.up.weight = nn.Parameter(weight)
    with pytest.raises(ValueError, match=r"weight = 1 experts over \(2,\) ranks; need an expert"):
        made.up(rows(0, device), ENDS.to(device))  # on both


def uneven_experts() -> None:
    """Seven on 2 x 3 ranks: 4 and 3, of which the 4 would be 2, 2 and none."""
    mesh = init_device_mesh("cpu", (2, 3))
    for experts, refused in ((7, True), (6, False)):
        layer = bs.nn.GroupedLinear(experts, WIDTH, HIDDEN, recipe="mxfp8")
        divided = distribute_tensor(layer.weight.detach(), mesh, [Shard(0), Shard(0)])
        layer.weight = nn.Parameter(divided)
        x, ends = torch.ones(3, WIDTH), torch.tensor([3])
        if refused:
            said = r"weight = 7 experts over \(2, 3\) ranks; need an expert"
            with pytest.raises(ValueError, match=said):
                layer(x, ends)
        else:
            assert layer(x, ends).shape == (3, HIDDEN)


def test_each_rank_of_a_mesh_needs_an_expert(tmp_path: Path) -> None:
    on_ranks(uneven_experts, tmp_path, ranks=6)


@pytest.mark.parametrize("device", DEVICES)
def test_experts_of_two_ranks_are_those_of_one_process(device: str, tmp_path: Path) -> None:
    want = {}
    for recipe in ("mxfp8", "fp8_blockwise"):
        made = model(recipe, device)
        made.forward = functools.partial(made.inner)  # type: ignore[method-assign]
        y = made(rows(0, device)[:18])
        y.square().sum().backward()
        grads = [made.up.weight.grad, made.down.weight.grad]
        want[recipe] = [y.detach().cpu(), *(g.cpu() for g in grads if g is not None)]
    on_ranks(divided_and_compare, tmp_path, device, want, device=device)


def trained(recipe: str, device: str, gather: str = "") -> list[torch.Tensor]:
    """Weights after two steps, in one process or gathered by FSDP2 as values or as codes."""
    made = model(recipe, device)
    if gather == "codes":
        # Pieces of the gate, of 24 rows, are whole blocks of no recipe.
        assert bs.quantized_all_gather(made) == ["gate.weight", "up.weight", "down.weight"]
    if gather:
        fully_shard(made, mesh=init_device_mesh(device, (2,)))
    optimizer = torch.optim.AdamW(made.parameters(), 1e-2)
    bs.attach(made, optimizer)
    for step in range(2):
        made(rows(step, device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if gather:
        kinds: list[str] = []
        layer: nn.Module = made.up
        layer.register_forward_pre_hook(lambda m, _: kinds.append(type(m.weight).__name__))
        made(rows(0, device))
        made.get_submodule("").reshard()  # type: ignore[operator]
        assert kinds == ["GatheredWeight" if gather == "codes" else "Parameter"]
    weights = [p.detach() for p in made.parameters()]
    return [(w.full_tensor() if isinstance(w, DTensor) else w).cpu() for w in weights]


def train_and_compare(device: str, want: dict[str, list[torch.Tensor]]) -> None:
    assert dist.get_world_size() == 2
    for recipe, weights in want.items():
        for gather in ("values", "codes"):
            assert_same(trained(recipe, device, gather), weights)


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_with_one_batch_are_one_process(device: str, tmp_path: Path) -> None:
    with one_thread():
        recipes = ("nvfp4", "fp8_blockwise", "mxfp4", "amdfp4")
        want = {recipe: trained(recipe, device) for recipe in recipes}
    on_ranks(train_and_compare, tmp_path, device, want, device=device)
