"""Layers whose weight is cut over two ranks: codes, scales, random bits are those of one process.

What no two ranks add up has the same bits as in one process, on the CPU; the rest differs by the
rounding of sums. PyTorch's GEMM, which multiplies operands in high precision and on GPUs decoded
ones too, may choose another order of sums for another shape.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blockscale as bs
import pytest
import torch
from bits import assert_same_bits, assert_same_operand
from blockscale._recipe_text import OPERANDS
from ranks import DEVICES, on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# The last piece is shorter; 255 = 128 + 127 are whole blocks of every recipe but for the end.
N, K, ROWS = 255, 384, 40
CUTS: dict[str, ParallelStyle] = {
    "columns": ColwiseParallel(use_local_output=False),
    "rows": RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
}
# Each rank has some lines of what goes in, or of what comes out: x and dy are gathered.
OF_LINES: dict[str, ParallelStyle] = {
    "columns": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
    "rows": RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False
    ),
}
# What ranks add up.
SUMMED = {"columns": "dx", "rows": "y"}
Results = dict[str, torch.Tensor]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def layer(recipe: str | bs.Recipe, cut: str, device: str, n: int = N, k: int = K) -> nn.Sequential:
    """A converted layer, of N outputs where they are cut, else of N inputs."""
    torch.manual_seed(0)
    linear = nn.Linear(k, n) if cut == "columns" else nn.Linear(n, k)
    model = nn.Sequential(linear).to(device)
    bs.convert(model, recipe, seed=5)
    return model


def inputs(cut: str, device: str, poison: bool = False, n: int = N) -> torch.Tensor:
    torch.manual_seed(1)
    x = torch.randn(2, ROWS // 2, K if cut == "columns" else n)
    if poison:
        x[0, 0, 0] = torch.nan
    return x.to(device).requires_grad_()


def linear_of(model: nn.Sequential) -> nn.Linear:
    linear = model[0]
    assert isinstance(linear, nn.Linear)
    return linear


def results(model: nn.Sequential, x: torch.Tensor, again: bool = False) -> Results:
    """A forward and backward, with `again` under activation checkpointing."""
    y = whole(checkpoint(model, x, use_reentrant=False) if again else model(x))
    torch.manual_seed(2)
    torch.autograd.backward(y, torch.randn(y.shape).to(x.device))
    w, bias = linear_of(model).weight, linear_of(model).bias
    found = {"y": y, "dx": x.grad, "dw": w.grad, "db": bias.grad}
    return {name: whole(value).detach() for name, value in found.items() if value is not None}


def magnitudes(model: nn.Sequential, x: torch.Tensor) -> Results:
    """Sums of magnitudes, which bound the rounding of sums."""
    linear = linear_of(model)
    lines, w = x.detach().flatten(0, 1).abs(), linear.weight.detach().abs()
    torch.manual_seed(2)
    dy = torch.randn(*x.shape[:-1], w.shape[0]).to(x.device).flatten(0, 1).abs()
    y = (lines @ w.mT).reshape(*x.shape[:-1], -1) + linear.bias.detach().abs()
    dx = (dy @ w).reshape(x.shape)
    return {"y": y, "dx": dx, "dw": dy.mT @ lines, "db": dy.sum(0)}


def compare(got: Results, want: Results, bounds: Results, summed: str, exact: bool) -> None:
    assert got.keys() == want.keys() == bounds.keys()
    for name, value in want.items():
        if exact and name != summed:
            assert torch.equal(got[name], value), name
        else:
            # At most K roundings of 2^-24 of the magnitudes' sum in each of the two. (Quantized
            # ones may be larger, at most twice: that is left out.)
            limit = 2 * max(N, K) * 2**-24 * bounds[name]
            assert ((got[name] - value).abs() <= limit).all(), name


def against_one_process(recipe: str | bs.Recipe, cut: str, device: str, n: int) -> None:
    one = layer(recipe, cut, device, n)
    x = inputs(cut, device, n=n)
    want, bounds = results(one, x), magnitudes(one, x)
    mesh = init_device_mesh(device, (2,))
    for style, again in ((CUTS[cut], False), (CUTS[cut], True), (OF_LINES[cut], False)):
        cut_layer = layer(recipe, cut, device, n)
        parallelize_module(cut_layer, mesh, {"0": style})
        lines = inputs(cut, device, n=n)
        if style is OF_LINES["columns"]:
            lines = distribute_tensor(lines.detach(), mesh, [Shard(0)]).requires_grad_()
        got = results(cut_layer, lines, again)
        compare(got, want, bounds, SUMMED[cut], exact=device == "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cut", CUTS)
def test_pieces_of_a_layer_are_those_of_the_whole(cut: str, device: str, tmp_path: Path) -> None:
    on_ranks(every_recipe, tmp_path, cut, device, device=device)


def every_recipe(cut: str, device: str) -> None:
    for name in bs.recipe_names():
        against_one_process(name, cut, device, N)
        if name != "bf16":
            against_one_process(name, cut, device, 1)  # one rank has nothing
    rounded = "nvfp4[rounding=stochastic,scale_rounding=up]"
    every_one = bs.recipe("nvfp4").replace(**dict.fromkeys(OPERANDS, rounded))  # type: ignore[arg-type]
    against_one_process(every_one, cut, device, N)


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape).float()


def stacked(recipe: str) -> nn.Sequential:
    """Two blocks one behind the other, of whole numbers: what ranks add up is exact where scales
    are powers of two."""
    torch.manual_seed(3)
    extents = ((64, 128), (128, 64))
    first, second, third, fourth = (nn.Linear(*extents[i % 2]) for i in range(4))
    model = nn.Sequential(first, nn.ReLU(), second, third, nn.ReLU(), fourth)
    for parameter in model.parameters():
        parameter.data = whole_numbers(*parameter.shape)
    bs.convert(model, recipe, seed=5)
    return model


def stacked_plan(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    cuts = (ColwiseParallel(), RowwiseParallel(), ColwiseParallel(), RowwiseParallel())
    parallelize_module(model, mesh, dict(zip("0235", cuts, strict=True)))
    return model


def stacked_results(model: nn.Sequential) -> list[torch.Tensor]:
    torch.manual_seed(4)
    x = whole_numbers(16, 64).requires_grad_()
    y = model(x)
    y.backward(whole_numbers(16, 64))
    assert x.grad is not None
    gradients = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    assert len(gradients) == 8
    return [y.detach() * 1, x.grad, *gradients]


class Shared(nn.Module):
    """An input that three layers read, in whole numbers as above."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 256) for _ in range(3))
        self.o = nn.Linear(256, 64)
        torch.manual_seed(3)
        for parameter in self.parameters():
            parameter.data = whole_numbers(*parameter.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.o(self.q(x) + self.k(x).flip(0) + self.v(x))
        return y


# Each rank has some lines of what goes in and of what comes out.
SHARED: dict[str, ParallelStyle] = {
    "": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
    "q": ColwiseParallel(),
    "k": ColwiseParallel(),
    "v": ColwiseParallel(),
    "o": RowwiseParallel(output_layouts=Shard(0)),
}


def shared_input(device: str) -> None:
    """Its gradients are summed before ranks add them up: they exchange what PyTorch's layers do."""
    mesh = init_device_mesh(device, (2,))
    torch.manual_seed(4)
    x, dy = (whole_numbers(16, 64).to(device) for _ in range(2))
    exchanged = []
    for recipe in ("bf16", "mxfp8", "mxfp4", "fp8_blockwise"):
        found = []
        for parallel in (False, True):
            model = Shared().to(device)
            if recipe != "bf16":
                bs.convert(model, recipe, seed=5)
            here = slice(None)
            if parallel:
                parallelize_module(model, mesh, SHARED)
                here = slice(8 * mesh.get_local_rank(), 8 * mesh.get_local_rank() + 8)
            mine = x[here].clone().requires_grad_()
            with CommDebugMode() as seen:  # type: ignore[no-untyped-call]
                y = model(mine)
                y.backward(dy[here])
            assert mine.grad is not None
            gradients = [whole(p.grad) for p in model.parameters() if p.grad is not None]
            found.append([y.detach(), mine.grad, *gradients])
        exchanged.append(seen.get_comm_counts())
        mine_of_one = [value[here] if i < 2 else value for i, value in enumerate(found[0])]
        if recipe != "fp8_blockwise":  # its scales are no powers of two
            assert len(gradients) == 8
            assert all(map(torch.equal, found[1], mine_of_one)), recipe
    assert exchanged[0]
    assert exchanged == exchanged[:1] * 4


@pytest.mark.parametrize("device", DEVICES)
def test_an_input_that_layers_share(device: str, tmp_path: Path) -> None:
    on_ranks(shared_input, tmp_path, device, device=device)


def waiting(model: nn.Sequential) -> nn.Sequential:
    """The same with sums of ranks waited for by hand, forward and backward."""
    model[2].register_forward_hook(lambda module, args, y: y * 1)
    return model


def blocks_in_a_row() -> None:
    """What one block's ranks add up goes straight to the next one, still being added."""
    mesh = init_device_mesh("cpu", (2,))
    for recipe in ("mxfp8", "mxfp4", "nvfp4"):
        got = stacked_results(stacked_plan(stacked(recipe), mesh))
        want = stacked_results(
            waiting(stacked_plan(stacked(recipe), mesh)) if recipe == "nvfp4" else stacked(recipe)
        )
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(one, other), (recipe, i)


def test_blocks_in_a_row(tmp_path: Path) -> None:
    on_ranks(blocks_in_a_row, tmp_path)


def still_added_up() -> None:
    """Every argument that is a tensor may be what a collective is still writing."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(6)

    def pending(whole: torch.Tensor) -> torch.Tensor:
        mine = whole if mesh.get_local_rank() == 0 else torch.zeros_like(whole)
        parts = DTensor.from_local(mine, mesh, [Partial()])
        local = parts.redistribute(mesh, [Replicate()], async_op=True).to_local()
        assert type(local).__name__ == "AsyncCollectiveTensor"
        return local

    x, w, bias = torch.randn(8, 64), torch.randn(32, 64), torch.randn(32)
    offsets, peak = torch.tensor([3, 8]), torch.tensor(5.0)
    a, b = bs.quantize(pending(x), "nvfp4"), bs.quantize(w, "nvfp4")
    assert_same_operand(a, bs.quantize(x, "nvfp4"))
    for q in bs.quantize_dual(pending(x), "nvfp4", "nvfp4", row_amax=pending(peak)):
        amax = peak if q.axis == -1 else None
        assert_same_operand(q, bs.quantize(x, "nvfp4", q.axis, amax))
    assert_same_bits(bs.amax(pending(x), "nvfp4"), bs.amax(x, "nvfp4"))
    assert_same_bits(bs.matmul(a, b, pending(bias)), bs.matmul(a, b, bias))
    groups = bs.quantize(x, "nvfp4", offsets=pending(offsets))
    assert_same_operand(copy.deepcopy(groups), bs.quantize(x, "nvfp4", offsets=offsets))
    matrices = bs.quantize(torch.stack([w, -w]), "nvfp4", batch_dims=1)
    grouped = bs.grouped_matmul(groups, matrices, pending(offsets))
    assert_same_bits(grouped, bs.grouped_matmul(groups, matrices, offsets))
    made = bs.quantize_weight(pending(w), "mxfp8")
    y = bs.linear(pending(x), w, pending(bias), "mxfp8", quantized_weight=made)
    assert_same_bits(y, bs.linear(x, w, bias, "mxfp8"))
    with pytest.raises(ValueError, match=r"linear: x\.shape = \[8, 64\]"):
        bs.linear(pending(x), w.mT, recipe="mxfp8")

    def call(x: torch.Tensor) -> torch.Tensor:
        return bs.dequantize(bs.quantize(x, "nvfp4")) + bs.linear(x, w.mT @ w, recipe="mxfp8")

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(pending(x)), call(x))


def second_derivatives() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = stacked_plan(stacked("mxfp8"), mesh)
    x = whole_numbers(16, 64).requires_grad_()
    with pytest.raises(ValueError, match=r"^linear: create_graph = True; need False: second"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def test_second_derivatives_are_refused(tmp_path: Path) -> None:
    on_ranks(second_derivatives, tmp_path)


def test_what_a_collective_still_writes_is_waited_for(tmp_path: Path) -> None:
    on_ranks(still_added_up, tmp_path)


def mixed_and_composed() -> None:
    """High precision beside quantized operands; NaN on one rank; FSDP2 on a second mesh; frozen
    parameters; rows that nobody cuts."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    nvfp4 = bs.recipe("nvfp4")
    recipes = (
        nvfp4.replace(wgrad_x=None, wgrad_dy=None),
        nvfp4.replace(dgrad_dy=None, dgrad_w=None),
        bs.recipe("bf16").replace(fprop_w="nvfp4"),
        bs.recipe("bf16").replace(wgrad_dy="mxfp8", dgrad_w="nvfp4"),
    )
    for recipe in recipes:
        for cut, style in CUTS.items():
            one, x = layer(recipe, cut, "cpu"), inputs(cut, "cpu")
            want, bounds = results(one, x), magnitudes(one, x)
            both = layer(recipe, cut, "cpu")
            parallelize_module(both, mesh["tp"], {"0": style})
            fully_shard(both, mesh=mesh["dp"])
            compare(results(both, inputs(cut, "cpu")), want, bounds, SUMMED[cut], exact=False)
    for cut, style in CUTS.items():
        want = results(layer("nvfp4", cut, "cpu"), inputs(cut, "cpu", poison=True))
        poisoned = layer("nvfp4", cut, "cpu")
        parallelize_module(poisoned, mesh["tp"], {"0": style})
        got = results(poisoned, inputs(cut, "cpu", poison=True))
        assert want["y"].isnan().any()
        for name, value in want.items():
            assert torch.equal(got[name].isnan(), value.isnan()), name
        y = poisoned(inputs(cut, "cpu"))
        assert (y.shape, y.stride()) == (want["y"].shape, want["y"].stride())
    one, cut_layer = layer("nvfp4", "rows", "cpu"), layer("nvfp4", "rows", "cpu")
    parallelize_module(cut_layer, mesh["tp"], {"0": CUTS["rows"]})
    for model in (one, cut_layer):
        model.requires_grad_(False)
    with torch.no_grad():
        x = inputs("rows", "cpu")
        y, want_y = whole(cut_layer(x)), one(x)
    bounds = {"y": magnitudes(one, x)["y"]}
    compare({"y": y}, {"y": want_y}, bounds, "y", exact=True)
    w = distribute_tensor(torch.randn(10, 20), mesh["tp"], [Replicate()])
    x = distribute_tensor(torch.randn(4, 20), mesh["tp"], [Shard(0)])
    bias = distribute_tensor(torch.randn(10), mesh["tp"], [Replicate()])
    want_y = bs.linear(whole(x), whole(w), whole(bias), recipe="mxfp8")
    assert torch.equal(whole(bs.linear(x, w, bias, recipe="mxfp8")), want_y)


def test_operands_are_made_for_gradients_that_are_recorded(one_rank: DeviceMesh) -> None:
    made = layer("nvfp4", "columns", "cpu")
    parallelize_module(made, one_rank, {"0": CUTS["columns"]})
    seen: list[tuple[bool, bool]] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.ops.blockscale.linear_piece.default:
                seen.append(args[4:6])
            return func(*args, **(kwargs or {}))

    x = inputs("columns", "cpu")
    with Watch():  # type: ignore[no-untyped-call]
        made(x)
        made(x.detach())
        with torch.no_grad():
            made(x)
    assert seen == [(True, True), (False, True), (False, False)]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(K, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


def compiled_and_checkpointed() -> None:
    """Recomputed as it was, in eager mode after another forward has begun, too. (With one between,
    checkpoints within a compiled root are PyTorch's to refuse: docs/rng.md.)"""
    mesh = init_device_mesh("cpu", (2,))
    gradients = []
    for compiled in (False, True):
        model = Checkpointed()
        bs.convert(model, bs.recipe("nvfp4").replace(fprop_x="nvfp4[rounding=stochastic]"))
        parallelize_module(model, mesh, {"inner": ColwiseParallel()})
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        x = inputs("columns", "cpu")
        first = call(x)
        if not compiled:
            call(x)
        first.square().sum().backward()
        assert model.inner.weight.grad is not None
        gradients.append((whole(first), whole(model.inner.weight.grad), x.grad))
    for eager, other in zip(*gradients, strict=True):
        assert torch.equal(eager, other)


def compiled_is_eager() -> None:
    """In one graph, and bit for bit: columns, then rows, which is what a block of a model has."""
    mesh = init_device_mesh("cpu", (2,))
    mixed = bs.recipe("nvfp4").replace(fprop_x=None, dgrad_w=None)
    for recipe in (*map(bs.recipe, ("fp8_blockwise", "mxfp4", "nvfp4")), mixed):
        torch._dynamo.reset()
        found = []
        for compiled in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(K, 256), nn.GELU(), nn.Linear(256, K))
            bs.convert(model, recipe, seed=5)
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
            x = inputs("columns", "cpu")
            for _ in range(2):
                call(x).square().sum().backward()
            gradients = {
                name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None
            }
            found.append({"y": call(x), "x": x.grad, **gradients})
        for name, value in found[0].items():
            assert torch.equal(found[1][name], value), (recipe, name)


def gradients_one_by_one() -> None:
    """Gradients asked for one by one equal those of a single backward."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(K, 256), nn.GELU(), nn.Linear(256, K))
    bs.convert(model, "nvfp4", seed=5)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = inputs("columns", "cpu")
    y = model(x).square().sum()
    wanted = [x, *model.parameters()]
    for tensor, gradient in zip(
        wanted, torch.autograd.grad(y, wanted, retain_graph=True), strict=True
    ):
        alone = torch.autograd.grad(y, tensor, retain_graph=True)[0]
        assert torch.equal(whole(alone), whole(gradient))


def extents_that_do_not_fit() -> None:
    """Refused on every rank, compiled too, though the pieces of rank 0 alone fit each other."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(8, 256), mesh, [Replicate()])
    w = distribute_tensor(torch.randn(128, 255), mesh, [Shard(1)])
    for compiled in (False, True):
        call = torch.compile(bs.linear, backend="aot_eager") if compiled else bs.linear
        with pytest.raises(ValueError, match=r"x.shape = \[8, 256\]; need \[..., 255\]"):
            call(x, w, None, "mxfp8")


def test_extents_that_do_not_fit(tmp_path: Path) -> None:
    on_ranks(extents_that_do_not_fit, tmp_path)


def test_gradients_one_by_one(tmp_path: Path) -> None:
    on_ranks(gradients_one_by_one, tmp_path)


def test_compiled_is_eager(tmp_path: Path) -> None:
    on_ranks(compiled_is_eager, tmp_path)


def keeps_collectives() -> None:
    """Selective checkpointing that keeps what collectives gave; and an x of one dimension."""

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept = "c10d" in str(op)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    seen = []
    for rerun in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        bs.convert(model, "nvfp4")
        styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (2,)), styles)
        torch.manual_seed(1)
        x = torch.randn(64, 64, requires_grad=True)
        called = functools.partial(checkpoint, model, use_reentrant=False, context_fn=contexts)
        y = (called if rerun else model)(x)
        y.square().sum().backward()
        seen.append([y, x.grad, *(whole(p.grad) for p in model.parameters() if p.grad is not None)])
        of_lines = []
        for line in (x[:1].detach(), x[0].detach()):
            bs.set_step(model, 0)
            model.zero_grad()
            y = model(line)
            y.square().sum().backward()
            gradients = [whole(p.grad) for p in model.parameters() if p.grad is not None]
            of_lines.append([y.flatten(), *gradients])
        assert all(map(torch.equal, *of_lines))
    for a, b in zip(*seen, strict=True):
        assert torch.equal(a, b)


def test_collectives_that_are_kept(tmp_path: Path) -> None:
    on_ranks(keeps_collectives, tmp_path)


def test_compiled_and_checkpointed(tmp_path: Path) -> None:
    on_ranks(compiled_and_checkpointed, tmp_path)


def test_mixed_precision_and_composition(tmp_path: Path) -> None:
    on_ranks(mixed_and_composed, tmp_path)


def refusals() -> None:
    flat = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def cut(*shape: int) -> DTensor:
        return distribute_tensor(torch.randn(shape), flat, [Shard(0)])

    x, w = torch.randn(8, 64), cut(256, 64)
    on_flat = distribute_tensor(x, flat, [Replicate()])
    on_other = distribute_tensor(x, square["tp"], [Replicate()])
    twice = distribute_tensor(torch.randn(256, 64), square, [Replicate(), Shard(0)])
    bias_elsewhere = distribute_tensor(torch.randn(256), square["tp"], [Replicate()])
    into, offsets = torch.zeros(256, 64), torch.tensor([4, 8])
    turned = bs.recipe("mxfp8").replace(wgrad_x="mxfp8[hadamard=64]", wgrad_dy="mxfp8[hadamard=64]")
    pieces = (
        "linear: w = [100, 64] in pieces of 50 along dimension 0; need whole blocks on every rank: "
        "pieces that are multiples of 32 for mxfp8; leave this layer out of the parallel plan, or "
        "unconverted"
    )
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        (re.escape(pieces), lambda: bs.linear(on_flat, cut(100, 64), recipe="mxfp8")),
        (  # a transform that is larger than a block
            "32 along dimension 0; need whole blocks .*: pieces that are multiples of 64 for ",
            lambda: bs.linear(on_flat, cut(64, 64), recipe=turned),
        ),
        (r"linear: x = .*; need a DTensor", lambda: bs.linear(x, w, recipe="mxfp8")),
        (r"linear: w = .*; need a DTensor", lambda: bs.linear(on_flat, into, recipe="mxfp8")),
        (r"linear: x\.device_mesh", lambda: bs.linear(on_other, w, recipe="mxfp8")),
        (r"linear: w\.device_mesh", lambda: bs.linear(on_flat, twice, recipe="mxfp8")),
        (r"linear: x\.shape = \[8, 64\]", lambda: bs.linear(on_flat, cut(256, 96), recipe="mxfp8")),
        (
            r"linear: bias\.device_mesh",
            lambda: bs.linear(on_flat, w, bias_elsewhere, recipe="mxfp8"),
        ),
        (
            r"linear: bias = a DTensor; need a plain tensor",
            lambda: bs.linear(x, into, bias_elsewhere, recipe="mxfp8"),
        ),
        (r"linear: w = a str; need a tensor", lambda: bs.linear(on_flat, "mxfp8", recipe="mxfp8")),  # type: ignore[arg-type]
        (r"linear: rng = None", lambda: bs.linear(on_flat.requires_grad_(), w, recipe="nvfp4")),
        (
            r"linear: accumulate_into = given; need none",
            lambda: bs.linear(on_flat, w, recipe="mxfp8", accumulate_into=into),
        ),
        (
            r"grouped_linear: x = a DTensor; need a plain tensor: .*x.to_local",
            lambda: bs.grouped_linear(on_flat, cut(2, 256, 64), offsets, recipe="mxfp8"),
        ),
    )
    for message, call in calls:
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    on_ranks(refusals, tmp_path)
