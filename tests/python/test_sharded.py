"""FSDP2 with weights that are gathered as codes: in two processes, against values that are gathered
and quantized then, bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import blockscale as bs
import pytest
import torch
import torch.distributed as dist
from blockscale._collectives import largest_of_ranks
from ranks import DEVICES, on_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SQUARE = "mxfp8[block=32x32]"
RECIPES = {name: bs.recipe(name) for name in ("fp8_blockwise", "mxfp4", "nvfp4", "amdfp4", "mxfp8")}
RECIPES["mxfp8, W in squares"] = RECIPES["mxfp8"].replace(fprop_w=SQUARE, dgrad_w=SQUARE)


class Block(nn.Module):
    """Pieces of `up` and `down` on two ranks are whole blocks of every recipe, those of `odd` of
    none; those of `odd` differ."""

    def __init__(self, rerun: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256, bias=False)
        self.odd = nn.Linear(256, 249)
        self.rerun = rerun

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:  # the host runs ahead, and prepares the next block's gather
            torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
        y = checkpoint(self.inner, x, use_reentrant=False) if self.rerun else self.inner(x)
        return torch.nn.functional.pad(self.odd(x + y), (0, 7))


def sharded(
    device: str,
    recipe: str,
    codes: bool,
    rerun: bool = False,
    extents: tuple[int, ...] = (2,),
    compiled: bool = False,
    **options: Any,
) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(rerun), nn.LayerNorm(256), Block(rerun))
    bs.convert(model, RECIPES.get(recipe, recipe))
    if codes:
        names = bs.quantized_all_gather(model)
        layers = ("up", "down", "odd") if recipe != "mxfp8" else ()
        assert names == [f"{block}.{layer}.weight" for block in (0, 2) for layer in layers]
    mesh = init_device_mesh(device, extents, mesh_dim_names=("replicas", "pieces")[-len(extents) :])
    if compiled:
        torch._dynamo.reset()
        model[0].compile(fullgraph=True, backend="aot_eager")
        model[2].compile(fullgraph=True, backend="aot_eager")
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, **options)
    return model


def trained(device: str, model: nn.Module) -> list[torch.Tensor]:
    """Losses and weights of some steps of two micro-batches; ranks see other batches."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    bs.attach(model, optimizer)
    torch.manual_seed(1 + dist.get_rank())
    seen = []
    for _ in range(2):
        for _ in range(2):
            loss = model(torch.randn(64, 256).to(device)).float().square().mean()
            loss.backward()
            seen.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        seen.append(parameter.full_tensor().detach())
    assert {type(t) for t in seen} == {torch.Tensor}
    return seen


def watch(block: nn.Module, name: str) -> list[bool]:
    """Whether a layer's weight is codes, of each forward."""
    seen: list[bool] = []

    def look(layer: nn.Module, _: Any) -> None:
        seen.append(type(layer.weight).__name__ == "GatheredWeight")

    getattr(block, name).register_forward_pre_hook(look)
    return seen


WAYS: list[dict[str, Any]] = [
    {},
    {"rerun": True},
    {"compiled": True},
    {"reshard_after_forward": False},
    {"extents": (1, 2)},
    {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
]


def compare(device: str, recipe: str) -> None:
    for way in WAYS:
        # Takes longest: with a maximum to exchange, and without one.
        if way.get("compiled") and recipe not in ("nvfp4", "fp8_blockwise"):
            continue
        want = trained(device, sharded(device, recipe, False, **way))
        model = sharded(device, recipe, True, **way)
        kinds = [watch(model[0], name) for name in ("up", "down", "odd")]
        got = trained(device, model)
        whole = recipe != "mxfp8"
        assert [set(seen) for seen in kinds] == [{whole}, {whole}, {False}], way
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), (way, i)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_are_those_of_gathered_values(recipe: str, device: str, tmp_path: Path) -> None:
    on_ranks(compare, tmp_path, device, recipe, device=device)


def changed_between(device: str) -> None:
    """Evaluation in inference mode before a forward, and weights that change behind it: the
    backward reads them as they are then, as with values of which nothing is kept."""
    for recipe in ("nvfp4[keep_w=False]", "fp8_blockwise[keep_w=False]"):
        for reshard in (True, False):
            seen = []
            for codes in (False, True):
                model = sharded(device, recipe, codes, reshard_after_forward=reshard)
                torch.manual_seed(dist.get_rank())
                x = torch.randn(64, 256).to(device).requires_grad_()
                model(x).sum().backward()
                with torch.inference_mode():
                    model(x)
                y = model(x)
                with torch.no_grad():
                    for parameter in model.parameters() if reshard else ():
                        parameter.mul_(3)
                if x.is_cuda:  # FSDP2 waits for changes at the next forward only
                    torch.cuda.synchronize()
                y.square().mean().backward()
                grads = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
                seen.append([y, x.grad, *grads])
            for a, b in zip(*seen, strict=True):
                assert torch.equal(a, b), (recipe, reshard)


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_reads_what_was_gathered_for_it(device: str, tmp_path: Path) -> None:
    on_ranks(changed_between, tmp_path, device, device=device)


def exchanged(device: str) -> None:
    """Weights that are gathered together have their maxima exchanged together, each under its own
    recipe, and with weights that have none between them, or one for each expert."""
    sent: list[int] = []
    mesh = init_device_mesh(device, (2,))

    def count(amax: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        sent.append(amax.numel())
        return largest_of_ranks(amax, group)

    def model(codes: bool) -> nn.Sequential:
        torch.manual_seed(0)
        made = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))).to(device)
        extents = (256, 256, 256, 256, 8, 256)  # pieces of the 8 rows are no whole blocks
        made.insert(0, nn.Sequential(*map(nn.Linear, extents, extents[1:])).to(device))
        experts = bs.nn.GroupedLinear(2, 256, 256, device=device)
        experts.register_forward_pre_hook(lambda _, rows: (*rows, ends))
        made[0].append(experts)  # type: ignore[operator]
        rules = {"0.1": "fp8_blockwise", "0.2": "amdfp4", "2": "bf16"}
        bs.convert(made, "nvfp4", rules=rules)
        if codes:
            bs.quantized_all_gather(made)
        policy = MixedPrecisionPolicy(torch.bfloat16)
        fully_shard([made[0]], mesh=mesh, mp_policy=policy)
        fully_shard([made], mesh=mesh, mp_policy=policy)
        return made

    torch.manual_seed(dist.get_rank())
    x, ends = torch.randn(64, 256, device=device), torch.tensor([32, 64], device=device)
    seen = []
    with mock.patch("blockscale.sharded.largest_of_ranks", count):
        for made in (model(False), model(True)):
            y = made(x)
            y.float().square().mean().backward()
            torch.optim.SGD(made.parameters(), 1.0).step()
            grads = [p.grad.full_tensor() for p in made.parameters()]  # type: ignore[union-attr]
            seen.append([y, *grads, made(x)])
    for a, b in zip(*seen, strict=True):
        assert torch.equal(a, b)
    # The first group's three, in each forward and once more for the backward; and the root's two,
    # which stay gathered for it.
    assert sorted(sent) == [2] * 2 + [3] * 3, sent


@pytest.mark.parametrize("device", DEVICES)
def test_maxima_are_exchanged_together(device: str, tmp_path: Path) -> None:
    on_ranks(exchanged, tmp_path, device, device=device)


def refused(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def use(device: str, folder: str) -> None:
    """What else is done with such a model, in the same processes."""
    x = torch.randn(64, 256).to(device)
    compile_and_load(device, x, folder)
    read_values(device, x)
    change_recipes(device, x)
    refuse_what_is_gathered_for_now(device, x)
    gather_for_the_first_time_too_late(device, x)
    free_before_the_backward(device, x)


def compile_and_load(device: str, x: torch.Tensor, folder: str) -> None:
    want = sharded(device, "nvfp4", False)(x)
    model = sharded(device, "nvfp4", True)
    # Taken before the first forward, it is of the parameters' memory, padded pieces or not.
    early = model.state_dict()
    assert type(early["0.up.weight"].to_local()) is torch.Tensor
    assert torch.equal(torch.compile(model, backend="aot_eager")(x), want)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for name, value in model.state_dict().items():
        assert torch.equal(early[name].full_tensor(), value.full_tensor()), name
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(1)
    want = model(x)

    # Made without memory, and filled from a checkpoint, which knows no types of this package.
    state = {"model": model.state_dict()}
    save(state, checkpoint_id=folder)
    written = b"".join(path.read_bytes() for path in Path(folder).iterdir())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert b"ShardedWeight" not in written + buffer.getvalue()
    for assign in (False, True):
        with torch.device("meta"):
            bare = sharded(device, "nvfp4", True)
        bare.to_empty(device=device)
        state = {"model": bare.state_dict()}
        load(state, checkpoint_id=folder)
        bare.load_state_dict(state["model"], assign=assign)
        seen = watch(bare[0], "up")
        assert torch.equal(bare(x), want)
        assert seen == [True]
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    with torch.device("meta"):
        bare = sharded(device, "nvfp4", True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(bare, full, options=options)
    seen = watch(bare[0], "up")
    assert torch.equal(bare(x), want)
    assert seen == [True]


def read_values(device: str, x: torch.Tensor) -> None:
    """They are not there while it runs, and its codes once, where FSDP2 has gathered them."""

    def read(layer: Any, _: Any) -> None:
        assert "recipe=nvfp4" in repr(layer.weight)
        codes, scales, outer = layer.weight.quantized.operands
        assert codes.untyped_storage().nbytes() == 512 * 256 / 2
        assert (scales.shape, outer.shape) == ((32, 16), ())
        refused(
            lambda: bs.linear(x, layer.weight, recipe="fp8_blockwise"),
            r"weight = read by blockscale.linear.*; need nothing",
        )
        refused(lambda: bs.quantize_weight(layer.weight), r"w = a GatheredWeight; need a plain t")
        assert torch.equal(torch.zeros_like(layer.weight).cpu(), torch.zeros(512, 256))
        refused(lambda: layer.weight.view(-1), r"weight = read by aten.view.*; need nothing but")
        torch.sum(layer.weight)

    model = sharded(device, "nvfp4", True)
    model[0].get_submodule("up").register_forward_pre_hook(read)
    refused(
        lambda: model(x), r"weight = read by aten.sum.*; need nothing but its layer.*: skip= of"
    )


def change_recipes(device: str, x: torch.Tensor) -> None:
    """That of W stays, others may change."""
    model = sharded(device, "nvfp4", True)
    model(x)
    refused(lambda: bs.convert(model, "mxfp8"), "recipe = mxfp8 for '0.up', whose codes FSDP2 gat")
    refused(lambda: bs.revert(model), "revert: model = '0.up', whose codes FSDP2 gathers; need")
    mixed = bs.recipe("nvfp4").replace(wgrad_x=None, wgrad_dy=None)
    bs.convert(model, mixed)
    model(x).sum().backward()
    stays = sharded(device, "nvfp4", True, reshard_after_forward=False)
    with torch.no_grad():
        stays(x)
    refused(lambda: bs.convert(stays, "mxfp8"), "recipe = mxfp8 for '0.up', whose codes FSDP2 gat")
    refused(lambda: bs.revert(stays), "revert: model = '0.up', whose codes FSDP2 gathers; need")
    bs.convert(stays, mixed)
    # PyTorch views a tensor to find its gradient's node.
    told: list[Any] = []
    handle = torch.autograd.graph.register_multi_grad_hook(
        [stays[0].get_parameter("up.weight")], told.append
    )
    stays(x)[:, :1].sum().backward()
    assert len(told) == 1
    handle.remove()


def refuse_what_is_gathered_for_now(device: str, x: torch.Tensor) -> None:
    """As values: it looks as if nobody had cut it."""
    stays = sharded(device, "nvfp4", False, reshard_after_forward=False)
    with torch.no_grad():
        stays(x)
    assert type(stays[0].get_parameter("up.weight")) is nn.Parameter
    said = "0.up.weight = gathered by FSDP2 for now; need a weight that fully_shard has not cut"
    refused(lambda: bs.quantized_all_gather(stays), said)
    refused(lambda: bs.quantized_weights(stays).__enter__(), said)


def gather_for_the_first_time_too_late(device: str, x: torch.Tensor) -> None:
    """Where FSDP2 has room for values."""
    torch.manual_seed(0)
    warm = nn.Sequential(nn.Linear(256, 512))
    bs.convert(warm, "nvfp4")
    bs.quantized_all_gather(warm)
    bs.convert(warm, "mxfp8")
    fully_shard(warm.to(device), mesh=init_device_mesh(device, (2,)))
    warm(x)
    refused(lambda: bs.convert(warm, "nvfp4"), "recipe = nvfp4 for '0', whose values FSDP2 gath")
    warm(x)


def free_before_the_backward(device: str, x: torch.Tensor) -> None:
    freed = sharded(device, "nvfp4", True)
    for block in (freed[0], freed[2]):
        block.set_unshard_in_backward(False)  # type: ignore[operator]
    y = freed(x)
    refused(lambda: y.sum().backward(), "saved = a weight whose memory FSDP2 has freed; need one")


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_compiled_saved_and_loaded(device: str, tmp_path: Path) -> None:
    on_ranks(use, tmp_path, device, str(tmp_path / "saved"), device=device)


def test_only_what_can_be_is_gathered_as_codes() -> None:
    with pytest.raises(ValueError, match="model = Linear without converted layers"):
        bs.quantized_all_gather(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="quantized_all_gather: model = None"):
        bs.quantized_all_gather(None)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[2].weight = model[1].weight  # tied
    bs.convert(model, "nvfp4")
    y = model(torch.ones(2, 64))
    assert bs.quantized_all_gather(model) == ["0.weight"]
    assert bs.quantized_all_gather(model) == ["0.weight"]
    # Without fully_shard, and in a copy, it is a weight like any other.
    copied = copy.deepcopy(model)
    assert type(copied[0].weight).__name__ == "ShardedWeight"
    assert isinstance(copied[0].weight, nn.Parameter)
    for one in (model, copied):
        got = one(torch.ones(2, 64))
        assert torch.equal(got, y)
        assert type(got) is torch.Tensor
    saved = pickle.dumps(model)
    assert b"ShardedWeight" not in saved
    restored = pickle.loads(saved)
    assert type(restored[0].weight).__name__ == "ShardedWeight"
    assert restored[0].weight.requires_grad
    assert bs.convert(restored, "mxfp8").skipped == []
    assert bs.convert(copied, "mxfp8").skipped == []
    bs.revert(copied)
    assert type(copied[0]) is nn.Linear
    assert type(copied[0].weight) is nn.Parameter


def test_a_weight_that_is_computed_is_saved_and_loaded() -> None:
    for change in (
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),  # type: ignore[no-untyped-call]
        parametrizations.weight_norm,
    ):
        model = nn.Sequential(nn.Linear(64, 64))
        bs.convert(model, "nvfp4")
        bs.quantized_all_gather(model)
        change(model[0])
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        saved = torch.load(file)
        assert "0.weight" not in saved
        assert {type(t) for t in saved.values()} == {torch.Tensor}
        model.load_state_dict(saved)


def test_a_weight_is_written_to_as_ever() -> None:
    layer = bs.nn.Linear(64, 64, recipe="nvfp4", seed=1)
    layer.weight.no_decay = True  # type: ignore[attr-defined]
    bs.quantized_all_gather(layer)
    assert layer.weight.no_decay  # type: ignore[attr-defined]
    values = torch.randn(64, 64)
    layer.weight.data = values.clone()
    assert torch.equal(layer.weight + 0, values)
    layer.weight.data.mul_(2)
    torch.nn.init.constant_(layer.weight.data[:2], 3)
    assert torch.equal(layer.weight[2:] + 0, values[2:] * 2)
    assert bool((layer.weight[:2] == 3).all())
    for assign in (False, True):
        layer.load_state_dict({"weight": values, "bias": torch.zeros(64)}, assign=assign)
        assert type(layer.weight).__name__ == "ShardedWeight"
        assert torch.equal(layer.weight + 0, values)
    layer.weight.data = layer.weight.data.clone()
    assert type(layer.weight.local) is torch.Tensor  # type: ignore[attr-defined]
    for other, got in (
        (values.bfloat16(), r"torch.bfloat16\[64, 64\] on cpu"),
        (values[1:], r"torch.float32\[63, 64\] on cpu"),
        (values.to("meta"), r"torch.float32\[64, 64\] on meta"),
    ):
        said = rf"weight.data = {got}; need torch.float32\[64, 64\] on cpu, as the weight is"
        with pytest.raises(ValueError, match=said):
            layer.weight.data = other
    layer.to(torch.bfloat16)
    assert type(layer.weight).__name__ == "ShardedWeight"
    assert layer(values.bfloat16()).dtype is torch.bfloat16
    layer.weight.no_decay = True  # type: ignore[attr-defined]
    bs.revert(layer)
    assert type(layer.weight) is nn.Parameter
    assert vars(layer.weight) == {"no_decay": True}


def test_a_layer_that_takes_no_attributes_gets_its_weight() -> None:
    class Frozen(nn.Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            if "frozen" in vars(self):
                raise AttributeError(f"{name}: frozen")
            super().__setattr__(name, value)

    layer = Frozen(64, 64)
    vars(layer)["frozen"] = True
    model = nn.Sequential(layer)
    bs.convert(model, "nvfp4")
    x, values = torch.randn(2, 64), layer.weight.detach()
    want = copy.deepcopy(model)(x)
    assert bs.quantized_all_gather(model) == ["0.weight"]
    assert type(layer.weight).__name__ == "ShardedWeight"
    assert torch.equal(model(x), want)
    assert type(model.state_dict()["0.weight"]) is torch.Tensor
    assert bs.revert(model) == ["0"]
    assert type(layer.weight) is nn.Parameter
    assert torch.equal(layer.weight, values)


def test_it_enters_compiled_code() -> None:
    seen = []
    for codes in (False, True):
        torch.manual_seed(0)
        layer = bs.nn.Linear(64, 64, recipe="nvfp4", seed=1)
        if codes:
            bs.quantized_all_gather(layer)
        optimizer = torch.optim.AdamW(layer.parameters())
        torch._dynamo.reset()
        step = torch.compile(lambda it=optimizer: it.step(), backend="aot_eager")
        for _ in range(2):
            layer(torch.ones(2, 64)).sum().backward()
            step()
        seen.append([*layer.parameters()])
    for a, b in zip(*seen, strict=True):
        assert torch.equal(a.detach() + 0, b.detach() + 0)


def test_a_state_dict_is_plain_and_shares_its_memory(tmp_path: Path) -> None:
    layer = bs.nn.Linear(64, 64, recipe="nvfp4", seed=1)
    bs.quantized_all_gather(layer)
    state = layer.state_dict()
    assert type(state["weight"]) is torch.Tensor
    save_file(state, tmp_path / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], layer.weight + 0)
    state["weight"].fill_(3)
    assert bool((layer.weight == 3).all())
    assert type(layer.state_dict(keep_vars=True)["weight"]).__name__ == "ShardedWeight"


def test_what_nobody_has_cut_is_quantized_ahead() -> None:
    layer = bs.nn.Linear(64, 64, recipe="nvfp4", seed=1)
    want = layer(torch.ones(2, 64))
    bs.quantized_all_gather(layer)
    with bs.quantized_weights(layer):
        got = layer(torch.ones(2, 64))
        assert torch.equal(got, want)
        got.sum().backward()
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(ValueError, match="quantized_weights: weight = changed"):
            layer(torch.ones(2, 64))
    assert layer.weight.grad is not None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_piece_is_quantized_in_the_dtype_that_is_gathered(device: str) -> None:
    ops = torch.ops.blockscale
    torch.manual_seed(0)
    for spec in ("fp8_128x128", "mxfp4[block=32x32]", "nvfp4[block=16x16]", "amdfp4[block=16x16]"):
        for shape in ((256, 384), (130, 70), (3, 128, 144), (1, 0)):
            x = torch.randn(shape).mul(torch.randn(shape).exp()).to(device)
            batch = len(shape) - 2
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                values = x.to(dtype)
                amax = ops.amax(x, spec, -1, batch, None, dtype) if "p4[block=16" in spec else None
                if amax is not None:
                    assert torch.equal(amax, ops.amax(values, spec, -1, batch))
                for given in (None, amax):
                    want = ops.quantize(values, spec, -1, given, None, None, [], "linear", batch)
                    got = ops.quantize_piece(x, dtype, spec, given, batch)
                    for a, b in zip(got[:2], want[:2], strict=True):
                        assert a.dtype is torch.uint8
                        assert torch.equal(a, b.view(torch.uint8)), (spec, shape, dtype)
                    assert torch.equal(got[2], want[2])


@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp4", "amdfp4"])
def test_gathered_parts_may_begin_anywhere(name: str, device: torch.device) -> None:
    """They come as bytes, cut from what a collective wrote."""

    def shifted(t: torch.Tensor) -> torch.Tensor:
        to: torch.Tensor = torch.empty(t.numel() + 1, dtype=t.dtype, device=device)[1:].view(
            t.shape
        )
        return to.copy_(t)

    ops, recipe = torch.ops.blockscale, bs.recipe(name)
    torch.manual_seed(0)
    x, w, dy = (
        torch.randn(shape, dtype=torch.bfloat16, device=device)
        for shape in ((70, 384), (200, 384), (70, 200))
    )
    key = [torch.tensor(i, device=device) for i in (1, 2)]
    made = ops.quantize_piece(w, torch.bfloat16, str(recipe.fprop_w), None, 0)
    moved = [shifted(part) for part in made[:2]] + [made[2]]
    apart = (*[None] * 3, *[False] * 4, True)
    results = []
    for parts in (list(made), moved):
        y, *kept = ops.linear(x, w, None, recipe.text, True, False, *key, None, None, parts)
        saved = [*kept, *parts, *([key[0]] if recipe.stochastic else [])]
        call = (dy, saved, recipe.text, 384, True, False, False, None, *apart)
        results.append((y, ops.linear_backward(*call)[0]))
    for got, want in zip(*results, strict=True):
        assert bool(torch.isfinite(want).all())
        assert torch.equal(got, want)
