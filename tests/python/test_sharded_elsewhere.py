"""Weights that FSDP2 gathers as codes, where other code meets them: inference mode, compilers."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import blockscale as bs
import pytest
import torch
from ranks import DEVICES, on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import prune


def evaluated_first(device: str) -> None:
    for reshard in (True, False):
        seen = []
        for codes in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 64)).to(device)
            bs.convert(model, "nvfp4")
            if codes:
                bs.quantized_all_gather(model)
            mesh = init_device_mesh(device, (2,))
            fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
            with torch.inference_mode():
                seen.append([model(torch.ones(4, 256, device=device)) for _ in range(2)])
        for a, b in zip(*seen, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_forward_may_be_in_inference_mode(device: str, tmp_path: Path) -> None:
    on_ranks(evaluated_first, tmp_path, device, device=device)


def test_inference_mode_reads_and_converts_it() -> None:
    layer = bs.nn.Linear(64, 64, recipe="nvfp4", seed=1)
    plain = copy.deepcopy(layer)
    bs.quantized_all_gather(layer)
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(layer.state_dict()["weight"], plain.state_dict()["weight"])
        cast = copy.deepcopy(layer).to(torch.bfloat16)
        assert torch.equal(cast(x), copy.deepcopy(plain).bfloat16()(x))
        weight = layer.weight
        views = (weight.detach(), weight.data, weight[:3], weight.view(32, 128), *weight.chunk(2))
        for made in (*views, weight.clone(), weight.to(torch.bfloat16)):
            assert type(made).__name__ == "ShardedWeight"
        assert not any(made.is_inference() for made in views)
        assert weight.chunk(2)[1].storage_offset() == 32 * 64
    views[0].zero_()
    assert bool((layer.weight == 0).all())


def halve_all(device: str, folder: str) -> None:
    """Code that was compiled for an ordinary weight is not run on one with a type, nor the other
    way round; neither when it comes from the cache on disk."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    torch._inductor.config.compile_threads = 1
    for order in ((1, 0), (0, 1)):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(device)
        bs.convert(model, "nvfp4", skip=["1"])
        assert bs.quantized_all_gather(model) == ["0.weight"]
        fully_shard(model, mesh=init_device_mesh(device, (2,)))
        halve = torch.compile(lambda w: w.mul_(0.5))
        for i in order:
            weight = model[i].get_parameter("weight").detach()
            assert isinstance(weight, DTensor)
            want = weight.full_tensor() * 0.5
            halve(weight)
            assert torch.equal(weight.full_tensor(), want)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_knows_its_type(device: str, tmp_path: Path) -> None:
    on_ranks(halve_all, tmp_path, device, str(tmp_path / "cache"), device=device)


def test_which_weights_are_chosen() -> None:
    """Those that are quantized in square blocks, once for both products, and without a choice that
    depends on the position in the whole."""
    turned = "mxfp4[block=32x32,hadamard=32]"
    rounded = "nvfp4[block=16x16,rounding=stochastic]"
    plain = bs.recipe("mxfp4")
    for recipe, chosen in (
        (bs.recipe("nvfp4"), ["weight"]),
        (bs.recipe("mxfp8"), []),
        (bs.recipe("fp8_blockwise").replace(dgrad_w="fp8_1x128"), []),
        (bs.recipe("nvfp4").replace(fprop_w=rounded, dgrad_w=rounded), []),
        (plain.replace(fprop_x=turned, fprop_w=turned, dgrad_dy=turned, dgrad_w=turned), []),
    ):
        layer = bs.nn.Linear(64, 64, recipe=recipe)
        assert bs.quantized_all_gather(layer) == chosen, recipe
        assert bs.quantized_all_gather(nn.ModuleDict({"up": layer})) == [
            f"up.{name}" for name in chosen
        ]
    layer = bs.nn.Linear(64, 64, recipe="nvfp4")
    prune.identity(layer, "weight")  # type: ignore[no-untyped-call]  # which computes it
    assert bs.quantized_all_gather(layer) == []


def test_a_weight_without_gradient_stays_so() -> None:
    layer = bs.nn.Linear(64, 64, recipe="nvfp4")
    layer.weight.requires_grad_(False)
    bs.quantized_all_gather(layer)
    for made in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(made.weight).__name__ == "ShardedWeight"
        assert isinstance(made.weight, nn.Parameter)
        assert not made.weight.requires_grad


def test_a_weight_keeps_its_strides() -> None:
    layer = bs.nn.Linear(64, 32, recipe="nvfp4")
    values = torch.randn(64, 32).T
    layer.weight = nn.Parameter(values)
    want = layer(torch.ones(2, 64))
    bs.quantized_all_gather(layer)
    for weight in (layer.weight, layer.weight.detach(), copy.deepcopy(layer.weight)):
        assert weight.stride() == (1, 32)
        assert torch.equal(weight + 0, values)
    assert torch.equal(layer(torch.ones(2, 64)), want)


def test_a_copy_and_its_optimizer_belong_together() -> None:
    layer = bs.nn.Linear(64, 64, recipe="nvfp4")
    bs.quantized_all_gather(layer)
    layer.weight.grad = torch.ones(64, 64)
    before = layer.weight.detach() + 0
    copied, optimizer = copy.deepcopy((layer, torch.optim.SGD([layer.weight], 0.5)))
    optimizer.step()
    assert torch.equal(copied.weight + 0, before - 0.5)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(layer.weight + 0, before)
    assert bool((layer.weight.grad == 1).all())


def test_a_single_rank_gathers_nothing(one_rank: DeviceMesh) -> None:
    """Its piece is the whole weight, and its layer quantizes that."""
    seen = []
    for codes in (False, True):
        torch.manual_seed(0)
        layer = bs.nn.Linear(256, 256, recipe="nvfp4", seed=1)
        if codes:
            assert bs.quantized_all_gather(layer) == ["weight"]
            fully_shard(layer, mesh=one_rank)
        y = layer(torch.ones(4, 256))
        y.square().sum().backward()
        grads = [p.grad for p in layer.parameters()]
        seen.append([y, *(g.to_local() if isinstance(g, DTensor) else g for g in grads)])
    for a, b in zip(*seen, strict=True):
        assert torch.equal(a, b)


def test_addresses_tell_weights_apart(one_rank: DeviceMesh) -> None:
    """As Accelerate finds the parameters of an optimizer again that was made before."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    bs.convert(model, "fp8_blockwise")
    plain = [weight.data_ptr() for weight in model.parameters()]
    bs.quantized_all_gather(model)
    assert [weight.data_ptr() for weight in model.parameters()] == plain
    fully_shard(model, mesh=one_rank)
    weights: list[Any] = list(model.parameters())
    pieces = [weight._local_tensor.data_ptr() for weight in weights]
    assert 0 not in pieces
    assert len(set(pieces)) == 2


def test_gradients_stay_where_weights_are_replaced() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, dtype=torch.bfloat16))
    bs.convert(model, "fp8_blockwise")
    model[1].weight.grad_dtype = torch.float32
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter, dtype=parameter.grad_dtype)
    gradients = [parameter.grad for parameter in model.parameters()]
    for change in (bs.quantized_all_gather, bs.revert):
        change(model)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is gradient


def test_what_is_computed_from_a_weight_is_not_copied() -> None:
    bs.quantized_all_gather(layer := bs.nn.Linear(64, 64))
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(layer.weight.view(64, 64))


def cut_otherwise() -> None:
    """Each rank has a part of every row, or of every expert's matrix."""
    ends = torch.tensor([2, 4])
    for layer, args, got in (
        (bs.nn.Linear(64, 32), (), r"\[32, 32\] of \[32, 64\]"),
        (bs.nn.GroupedLinear(2, 64, 32), (ends,), r"\[2, 16, 64\] of \[2, 32, 64\]"),
    ):
        bs.quantized_all_gather(layer)
        fully_shard(
            layer,
            mesh=init_device_mesh("cpu", (2,)),
            shard_placement_fn=lambda parameter: Shard(min(1, parameter.dim() - 1)),
        )
        said = f"weight = pieces {got}; need whole rows, or of experts whole matrices; leave out sh"
        with pytest.raises(ValueError, match=said):
            layer(torch.randn(4, 64), *args)


def test_pieces_that_are_no_whole_rows_are_refused(tmp_path: Path) -> None:
    on_ranks(cut_otherwise, tmp_path)


def kept_by_some() -> None:
    """After a forward, two of four ranks have the weight between them; or, as with True, all."""
    mesh = init_device_mesh("cpu", (4,))
    x = torch.ones(4, 64)
    layer = bs.nn.Linear(64, 512)
    bs.quantized_all_gather(layer)
    few = copy.deepcopy(layer)
    fully_shard(few, mesh=mesh, reshard_after_forward=2)
    said = "reshard_after_forward = a number; need True or False: FSDP2 gathers no codes from fewer"
    with pytest.raises(ValueError, match=said):
        few(x)
    fully_shard(layer, mesh=mesh, reshard_after_forward=4)
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_weights_that_fewer_ranks_keep_are_refused(tmp_path: Path) -> None:
    on_ranks(kept_by_some, tmp_path, ranks=4)
