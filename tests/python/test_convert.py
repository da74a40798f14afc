"""`bs.convert`: what it changes, what it leaves alone, and that a model stays a plain model."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import blockscale as bs
import numpy as np
import pytest
import torch
from models import Model, model
from torch import nn

LINEARS = [f"layers.{i}.{name}" for i in range(2) for name in ("q_proj", "o_proj")] + ["lm_head"]
TOKENS = torch.arange(24).reshape(2, 12)


def gradients(m: nn.Module) -> dict[str, torch.Tensor]:
    m.zero_grad()
    m(TOKENS).square().mean().backward()
    return {name: p.grad.clone() for name, p in m.named_parameters() if p.grad is not None}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_reports_every_module() -> None:
    m = model()
    report = bs.convert(
        m, "nvfp4", rules={r"layers\.0\.": None, r"o_proj": "mxfp8"}, skip=["lm_head"]
    )
    assert [(name, str(recipe)) for name, recipe in report.converted] == [
        ("layers.1.q_proj", "nvfp4"),
        ("layers.1.o_proj", "mxfp8"),
    ]
    assert dict(report.skipped) == {
        "embed": "Embedding is not nn.Linear",
        "layers.0.q_proj": r"rule 'layers\\.0\\.'",
        "layers.0.o_proj": r"rule 'layers\\.0\\.'",
        "norm": "LayerNorm is not nn.Linear",
        "lm_head": "skip 'lm_head'",
    }
    lines = str(report).splitlines()
    assert lines[0] == "2 layers converted, 5 modules not"
    assert lines[1].split() == ["layers.1.q_proj", "nvfp4"]
    assert lines[-1].split(maxsplit=1) == ["lm_head", "left alone: skip 'lm_head'"]
    assert type(m.lm_head) is nn.Linear
    assert type(m.layers[1].q_proj) is bs.nn.Linear


def test_changes_the_model_in_place() -> None:
    m = model()
    modules, parameters = dict(m.named_modules()), dict(m.named_parameters())
    report = bs.convert(m, "nvfp4")
    assert [name for name, _ in report.converted] == LINEARS
    assert dict(m.named_modules()) == modules
    assert all(dict(m.named_parameters())[name] is p for name, p in parameters.items())
    assert m.lm_head.weight is m.embed.weight
    assert list(m.buffers()) == []


def test_checkpoints_stay_plain() -> None:
    plain, converted = model(), model()
    bs.convert(converted, "nvfp4")
    state = plain.state_dict()
    assert list(converted.state_dict()) == list(state)
    assert converted.load_state_dict(state, strict=True) == plain.load_state_dict(
        converted.state_dict(), strict=True
    )


def test_converting_again_is_the_same() -> None:
    once, twice = model(), model()
    a = bs.convert(once, "nvfp4", skip=["lm_head"], seed=5)
    assert bs.convert(twice, "nvfp4", skip=["lm_head"], seed=5) == a
    twice(TOKENS)
    bs.set_step(twice, 3)
    assert bs.convert(twice, "nvfp4", skip=["lm_head"], seed=5) == a
    assert bs.rng_state(twice)["step"] == 3  # the count goes on
    bs.set_step(twice, 0)
    assert len(twice._forward_pre_hooks) == len(twice._forward_hooks) == 1
    assert_equal(gradients(once), gradients(twice))


def test_converting_again_changes_what_differs() -> None:
    m, fresh = model(), model()
    bs.convert(m, "mxfp8")
    rules: dict[str, str | bs.Recipe | None] = {"o_proj": "amdfp4"}
    again = bs.convert(m, "nvfp4", rules=rules, skip=["lm_head"], seed=1)
    once = bs.convert(fresh, "nvfp4", rules=rules, skip=["lm_head"], seed=1)
    assert again.converted == once.converted
    assert dict(again.skipped) == {
        **dict(once.skipped),
        "lm_head": "skip 'lm_head', no longer in mxfp8",
    }
    assert type(m.lm_head) is nn.Linear
    assert_equal(gradients(m), gradients(fresh))


def test_layers_that_came_later_are_converted_by_another_call() -> None:
    """As those of adapters, fused projections and resized heads. Others stay what they are."""
    m = model()
    bs.convert(m, "nvfp4", seed=5)
    bs.set_step(m, 3, 1)
    later: list[nn.Module] = [nn.Linear(32, 32), nn.Linear(32, 50)]
    m.layers[0].add_module("added", later[0])
    m.add_module("lm_head", later[1])
    layers = {n: layer for n, layer in m.named_modules() if isinstance(layer, bs.nn.Linear)}
    seeds = {name: int(layer._seed) for name, layer in layers.items()}
    assert list(layers) == LINEARS[:-1]
    bs.convert(m, "nvfp4")
    assert all(isinstance(layer, bs.nn.Linear) for layer in later)
    for name, layer in layers.items():
        assert m.get_submodule(name) is layer
        assert int(layer._seed) == seeds[name]
    assert bs.rng_state(m) == {"step": 3, "forward": 1, "seed": 5}


def test_a_model_that_draws_no_more_does_not_count() -> None:
    m = model()
    bs.convert(m, "nvfp4")
    bs.convert(m, "mxfp8")
    m(TOKENS)
    assert bs.rng_state(m)["forward"] == 0


def test_revert_restores_the_plain_model() -> None:
    m, plain = model(), model()
    attributes = {name: set(vars(module)) for name, module in plain.named_modules()}
    bs.convert(m, "nvfp4", rules={"layers.0": "mxfp8"})
    assert bs.revert(m) == LINEARS
    assert {name: set(vars(module)) for name, module in m.named_modules()} == attributes
    assert all(type(a) is type(b) for a, b in zip(m.modules(), plain.modules(), strict=True))
    assert not m._forward_pre_hooks
    assert not m._forward_hooks
    assert_equal(gradients(m), gradients(plain))
    assert bs.revert(m) == []


def test_of_a_replicated_model_what_it_wraps_is_converted() -> None:
    plain, wrapped = model(), nn.DataParallel(model()).cpu()  # a GPU that is there takes it
    assert bs.convert(wrapped, "nvfp4", skip=["lm_head"]) == bs.convert(
        plain, "nvfp4", skip=["lm_head"]
    )
    assert_equal(gradients(plain), gradients(wrapped.module))
    assert bs.rng_state(wrapped) == bs.rng_state(plain)
    inside = nn.Sequential(nn.DataParallel(nn.Linear(32, 32)))
    assert [name for name, _ in bs.convert(inside, "nvfp4").converted] == ["0"]
    assert bs.revert(wrapped) == LINEARS[:-1]


def test_bf16_is_a_recipe() -> None:
    m, plain = model(), model()
    report = bs.convert(m, "bf16")
    assert len(report.converted) == len(LINEARS)
    assert_equal(gradients(m), gradients(plain))


def test_a_single_linear_is_a_model() -> None:
    layer = nn.Linear(32, 32)
    assert [name for name, _ in bs.convert(layer, "nvfp4").converted] == [""]
    assert isinstance(layer, bs.nn.Linear)
    layer(torch.randn(4, 32)).sum().backward()
    assert bs.rng_state(layer)["forward"] == 1
    bs.revert(layer)
    assert type(layer) is nn.Linear


def test_a_replica_of_data_parallel_that_draws_is_refused() -> None:
    layer = nn.Linear(32, 32)
    bs.convert(layer, "nvfp4")
    replica = layer._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    # As on the second of two GPUs.
    replica.weight, replica.bias = (torch.empty(*n, device="meta") for n in ((32, 32), (32,)))
    with pytest.raises(ValueError, match=r"replica that nn\.DataParallel made; .* use Distributed"):
        replica(torch.empty(4, 32, device="meta"))


def test_weights_that_are_buffers_move() -> None:
    layer = nn.Linear(32, 32, bias=False)
    bs.convert(layer, "nvfp4")
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)
    layer.to(torch.bfloat16)
    assert layer(torch.randn(4, 32).bfloat16()).dtype == torch.bfloat16


def test_layers_built_by_hand_join_the_model_around_them() -> None:
    by_hand = nn.Sequential(bs.nn.Linear(32, 32), bs.nn.Linear(32, 32))
    said = r"2 separately counted parts; need .* sets the recipe of every layer$"
    with pytest.raises(ValueError, match=said):
        bs.rng_state(by_hand)
    bs.convert(by_hand, "nvfp4")
    converted = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    bs.convert(converted, "nvfp4")
    converted.load_state_dict(by_hand.state_dict())
    x = torch.randn(16, 32)
    for m in (by_hand, converted):
        m(x).sum().backward()
    assert bs.rng_state(by_hand) == bs.rng_state(converted) == {"step": 0, "forward": 1, "seed": 0}
    for p, q in zip(by_hand.parameters(), converted.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def test_a_converted_part_joins_the_whole() -> None:
    m, fresh = model(), model()
    bs.convert(m.layers[0], "nvfp4", seed=8)
    bs.set_step(m.layers[0], 5)
    bs.convert(m, "nvfp4")
    assert bs.rng_state(m) == {"step": 5, "forward": 0, "seed": 8}
    bs.convert(fresh, "nvfp4", seed=8)
    bs.set_step(fresh, 5)
    assert_equal(gradients(m), gradients(fresh))
    assert not m.layers[0]._forward_pre_hooks


def test_converted_parts_that_agree_keep_seed_and_step() -> None:
    parts = [nn.Sequential(nn.Linear(32, 32)) for _ in range(2)]
    for part, step in zip(parts, (7, 5), strict=True):
        bs.convert(part, "nvfp4", seed=5)
        bs.set_step(part, step)
    whole = nn.Sequential(*parts)
    bs.convert(whole, "nvfp4")
    assert bs.rng_state(whole) == {"step": 7, "forward": 0, "seed": 5}


def test_a_shared_module_is_known_by_all_its_names() -> None:
    def shared() -> nn.Module:
        m = nn.Module()
        m.encoder = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        m.decoder = nn.ModuleList([nn.Linear(32, 32), m.encoder[1]])
        m.head = m.encoder[0]
        return m

    report = bs.convert(shared(), "nvfp4", skip={"decoder"})
    assert [name for name, _ in report.converted] == ["encoder.0"]
    assert report.skipped == [("encoder.1", "skip 'decoder'"), ("decoder.0", "skip 'decoder'")]
    report = bs.convert(shared(), "nvfp4", rules={"^head$": None})
    assert [name for name, _ in report.converted] == ["encoder.1", "decoder.0"]


def test_seeds_and_steps_of_numpy() -> None:
    m = nn.Sequential(nn.Linear(32, 32))
    seed: Any = np.int64(3)
    step: Any = np.int32(2)
    largest: Any = np.int64(2**63 - 1)
    bs.convert(m, "nvfp4", seed=seed)
    bs.set_step(m, step)
    assert bs.rng_state(m) == {"step": 2, "forward": 0, "seed": 3}
    assert bs.Rng(largest).role("x").seed == bs.Rng(2**63 - 1).role("x").seed


def test_a_refused_seed_leaves_the_count_of_a_reverted_model() -> None:
    m = nn.Sequential(nn.Linear(32, 32))
    bs.convert(m, "nvfp4", seed=4)
    bs.set_step(m, 3)
    bs.revert(m)
    with pytest.raises(TypeError, match="seed = a str; need an int"):
        bs.convert(m, "nvfp4", seed="5")  # type: ignore[arg-type]
    bs.convert(m, "nvfp4")
    assert bs.rng_state(m) == {"step": 3, "forward": 0, "seed": 4}


def test_a_part_of_a_converted_model_is_refused() -> None:
    m = model()
    bs.convert(m, "nvfp4")
    words = r"convert: model = Attention, whose 'q_proj' belongs to a converted model; need the "
    with pytest.raises(ValueError, match=words + "outermost module; .*bs.revert"):
        bs.convert(m.layers[0], "mxfp8")
    bs.revert(m.layers[0])
    bs.convert(m.layers[0], "mxfp8")


def test_deepcopy_is_independent() -> None:
    m = model()
    bs.convert(m, "nvfp4", seed=2)
    m(TOKENS)
    twin = copy.deepcopy(m)
    assert bs.rng_state(twin) == bs.rng_state(m) == {"step": 0, "forward": 1, "seed": 2}
    states = {id(layer._rng_state) for layer in twin.modules() if isinstance(layer, bs.nn.Linear)}
    assert len(states) == 1
    assert states.isdisjoint(
        id(layer._rng_state) for layer in m.modules() if isinstance(layer, bs.nn.Linear)
    )
    assert_equal(gradients(m), gradients(twin))
    twin(TOKENS)
    assert bs.rng_state(twin)["forward"] == 3
    assert bs.rng_state(m)["forward"] == 2
    bs.revert(twin)
    assert not twin._forward_pre_hooks
    assert m._forward_pre_hooks


def test_whole_models_can_be_saved() -> None:
    m = model()
    bs.convert(m, "nvfp4")
    bs.set_step(m, 3)
    twin = pickle.loads(pickle.dumps(m))
    assert bs.rng_state(twin) == bs.rng_state(m)
    assert_equal(gradients(m), gradients(twin))
    buffer = io.BytesIO()
    torch.save(m.state_dict(), buffer)
    buffer.seek(0)
    plain = model()
    plain.load_state_dict(torch.load(buffer, weights_only=True), strict=True)


@pytest.mark.parametrize("when", ["before", "after"])
def test_meta_device(when: str) -> None:
    """Built on meta, converted before or after it gets its memory: the same model."""
    with torch.device("meta"):
        m = Model()
        by_hand = bs.nn.Linear(32, 32)
    if when == "before":
        bs.convert(m, "nvfp4")
    m.to_empty(device="cpu")
    m.lm_head.weight = m.embed.weight
    if when == "after":
        bs.convert(m, "nvfp4")
    fresh = model()
    m.load_state_dict(fresh.state_dict(), strict=True)
    bs.convert(fresh, "nvfp4")
    assert_equal(gradients(m), gradients(fresh))
    by_hand.to_empty(device="cpu")
    by_hand.reset_parameters()
    by_hand(torch.randn(2, 32)).sum().backward()


def test_meta_forward() -> None:
    """Shapes without data, as pipeline stages ask for them."""
    m = model().to("meta")
    bs.convert(m, "nvfp4")
    out = m(TOKENS.to("meta"))
    assert out.shape == (2, 12, 40)
    assert out.device.type == "meta"
    out.sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in m.parameters())


def test_dtype_conversion_keeps_working() -> None:
    m = model()
    bs.convert(m, "nvfp4")
    m.to(torch.bfloat16)
    assert {g.dtype for g in gradients(m).values()} == {torch.bfloat16}
    m.double()
    with pytest.raises(ValueError, match=r"linear: x.dtype = torch.float64; need float32"):
        m(TOKENS)


def test_a_recipe_is_changed_by_convert() -> None:
    m = nn.Sequential(nn.Linear(4, 4))
    bs.convert(m, "mxfp8")
    for given in ("nvfp4", bs.recipe("nvfp4")):
        with pytest.raises(TypeError, match=r"Linear: recipe = a .*; call bs.convert\(model"):
            m[0].recipe = given  # type: ignore[assignment]
    assert str(m[0].recipe) == "mxfp8"
    bs.convert(m, "nvfp4")
    assert str(m[0].recipe) == "nvfp4"
    bs.revert(m)
    m[0].recipe = "its own"  # type: ignore[assignment]  # of a plain layer


def test_a_subclass_of_ours_stays() -> None:
    class Mine(bs.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    m = nn.Sequential(nn.Linear(32, 32), Mine(32, 32, recipe="mxfp8"), nn.Linear(32, 32))
    for other in (m, copy.deepcopy(m)):
        report = bs.convert(other, "mxfp4", skip=["1"], rules={"2": None})
        assert report.skipped == [("1", "skip '1', stays in mxfp8"), ("2", "rule '2'")]
        assert bs.revert(other) == ["0"]
        assert [type(layer) for layer in other] == [nn.Linear, Mine, nn.Linear]
        other(torch.ones(1, 32)).sum().backward()
        bs.convert(other, "mxfp4")
        assert str(other[1].recipe) == "mxfp4"
        assert type(other[1]) is Mine
    by_hand = nn.Sequential(bs.nn.Linear(32, 32))
    bs.convert(nn.ModuleList([nn.Linear(32, 32), by_hand]), "mxfp4", skip=["1"])
    assert type(by_hand[0]) is nn.Linear


def test_layers_by_hand_are_of_a_dtype_that_is_quantized() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for make in (lambda: bs.nn.Linear(4, 4), lambda: bs.nn.GroupedLinear(2, 4, 4)):
            with pytest.raises(ValueError, match=r"Linear: dtype = torch.float64; need float32"):
                make()
        bs.nn.Linear(4, 4, recipe="bf16")
    finally:
        torch.set_default_dtype(before)
