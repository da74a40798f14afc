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
from torch import nn


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.o_proj(self.q_proj(x))
        return out


class Model(nn.Module):
    """An embedding, two blocks, a norm, and a head that shares the embedding's weight."""

    def __init__(self, vocabulary: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, vocabulary, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        out: torch.Tensor = self.lm_head(self.norm(x))
        return out


LINEARS = [f"layers.{i}.{name}" for i in range(2) for name in ("q_proj", "o_proj")] + ["lm_head"]
TOKENS = torch.arange(24).reshape(2, 12)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


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
    assert again == bs.convert(fresh, "nvfp4", rules=rules, skip=["lm_head"], seed=1)
    assert type(m.lm_head) is nn.Linear
    assert_equal(gradients(m), gradients(fresh))


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
    with pytest.raises(ValueError, match=r"2 separately counted parts; need .* once more$"):
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
    bs.convert(m, "nvfp4", seed=np.int64(3))  # type: ignore[arg-type]
    bs.set_step(m, np.int32(2))  # type: ignore[arg-type]
    assert bs.rng_state(m) == {"step": 2, "forward": 0, "seed": 3}
    assert bs.Rng(np.int64(2**63 - 1)).role("x").seed == bs.Rng(2**63 - 1).role("x").seed  # type: ignore[arg-type]


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


class Base(nn.Module):
    """What other libraries' layers have in common."""

    def init_states(self) -> None:
        for parameter in self.parameters():
            nn.init.ones_(parameter)


class Theirs(nn.Linear, Base):
    """As torchtitan's: it has the forward of nn.Linear."""

    def __init__(self, in_features: int, out_features: int, tag: str = "") -> None:
        super().__init__(in_features, out_features, bias=False)
        self.tag = tag

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tag={self.tag}"


def test_subclasses_with_the_forward_of_linear() -> None:
    x, m = torch.randn(8, 64), nn.Sequential(nn.Linear(64, 48, bias=False), Theirs(48, 32, "a"))
    same = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 32, bias=False))
    keys = list(m.state_dict())
    same.load_state_dict(m.state_dict())
    for model in (m, same):
        report = bs.convert(model, "nvfp4", seed=3)
        assert [name for name, _ in report.converted] == ["0", "1"]
    assert isinstance(m[1], bs.nn.Linear)
    assert isinstance(m[1], Theirs)
    assert "tag=a, recipe=nvfp4" in repr(m[1])
    assert list(m.state_dict()) == keys
    copies: list[Any] = [copy.deepcopy(m), pickle.loads(pickle.dumps(m)), m]
    for made in copies:
        want: Any = copy.deepcopy(same)
        y, dy = made(x), torch.randn(8, 32)
        assert torch.equal(y, want(x))
        y.backward(dy)
        want = copy.deepcopy(same)
        want(x).backward(dy)
        assert torch.equal(made[1].weight.grad, want[1].weight.grad)
        assert type(made[1]) is type(m[1])
        assert made[1].tag == "a"
    m[1].init_states()
    assert bool((m[1].weight == 1).all())
    assert bs.revert(m) == ["0", "1"]
    assert type(m[1]) is Theirs


@pytest.mark.parametrize("name", ["forward", "__call__", "__getattr__", "weight", "bias"])
def test_subclasses_that_are_other_layers(name: str) -> None:
    kind: Any = type(
        "Other", (nn.Linear,), {"__module__": "their.layers", name: lambda *args: None}
    )
    other = kind.__new__(kind)
    nn.Module.__init__(other)
    vars(other)["_parameters"]["weight"] = nn.Parameter(torch.ones(4, 4))
    m = nn.ModuleDict({"a": nn.Linear(4, 4), "b": other})
    said = f"their.layers.Other is a subclass of nn.Linear with a {name} of its own"
    assert dict(bs.convert(m, "mxfp8").skipped) == {"b": said}


def test_what_is_named_has_to_be_fit() -> None:
    wide = nn.ModuleDict({"q": nn.Linear(4, 4), "wide": nn.Linear(4, 4, dtype=torch.float64)})
    said = (
        r"rules = '\^wide\$', which finds wide; need at least one .*; wide: its weight is torch.f"
    )
    with pytest.raises(ValueError, match=said):
        bs.convert(wide, "mxfp8", rules={"^wide$": "nvfp4"})
    assert type(wide["q"]) is nn.Linear
    assert len(bs.convert(wide, "mxfp8", rules={"^wide$": None}).converted) == 1
    assert len(bs.convert(wide, "mxfp8", rules={"q|wide": "nvfp4"}).converted) == 1
    lazy = nn.ModuleDict({"q": nn.Linear(4, 4), "lazy": nn.LazyLinear(4)})
    with pytest.raises(ValueError, match="lazy: LazyLinear has no shape yet"):
        bs.convert(lazy, "mxfp8", rules={"lazy": "mxfp8"})


def test_a_report_prints_as_its_table() -> None:
    report = bs.convert(nn.Sequential(nn.Linear(4, 4)), "mxfp8")
    assert repr(report) == str(report) == "1 layers converted, 0 modules not\n  0  mxfp8"


def test_what_is_left_alone_and_why() -> None:
    class Custom(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    m = nn.ModuleDict(
        dict(
            plain=nn.Linear(4, 4),
            custom=Custom(4, 4),
            wide=nn.Linear(4, 4, dtype=torch.float64),
            attention=nn.MultiheadAttention(4, 1),
            conv=nn.Conv1d(1, 1, 1),
            lazy=nn.LazyLinear(4),
            act=nn.ReLU(),
            normed=torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        )
    )
    report = bs.convert(m, "mxfp8")
    assert [name for name, _ in report.converted] == ["plain"]
    reasons = dict(report.skipped)
    assert reasons["custom"].startswith(__name__)
    said = "Custom is a subclass of nn.Linear with a forward of its own"
    assert reasons["custom"].endswith(said)
    assert reasons["wide"] == "its weight is torch.float64, not float32, bfloat16 or float16"
    assert "is read by nn.MultiheadAttention" in reasons["attention.out_proj"]
    said = "ParametrizedLinear is parametrized: convert it first, then parametrize it"
    assert reasons["normed"] == said
    assert reasons["lazy"] == "LazyLinear has no shape yet: convert after it has seen a batch"
    m["lazy"](torch.randn(2, 4))
    assert [name for name, _ in bs.convert(m, "mxfp8").converted] == ["plain", "lazy"]
    assert reasons["conv"] == "Conv1d is not nn.Linear"
    assert "act" not in reasons


def test_a_forward_that_another_library_replaced_is_left_alone() -> None:
    """It still calls nn.Linear's own, as accelerate's hooks do: converted in name only."""
    m = nn.ModuleDict(dict(plain=nn.Linear(4, 4), hooked=nn.Linear(4, 4)))
    m["hooked"].forward = m["hooked"].forward
    report = bs.convert(m, "mxfp8")
    assert [name for name, _ in report.converted] == ["plain"]
    reasons = dict(report.skipped)
    assert reasons["hooked"] == "its forward was replaced by another library: convert before that"
    m["plain"].forward = m["plain"].forward  # that of a converted layer: it stays one
    assert [name for name, _ in bs.convert(m, "mxfp4").converted] == ["plain"]
    with pytest.raises(ValueError, match="with 'plain' as a layer with another forward; need"):
        bs.revert(m)  # whose forward would look for a recipe
    assert m["plain"](torch.randn(2, 4)).shape == (2, 4)


def test_a_converted_layer_of_another_class() -> None:
    """A parametrization gives a layer a class of its own; the layer stays a converted one."""

    class Halved(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w / 2

    m = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32))
    bs.convert(m, "nvfp4")
    nn.utils.parametrize.register_parametrization(m[0], "weight", Halved())
    report = bs.convert(m, "mxfp8")
    assert [(name, str(r)) for name, r in report.converted] == [("0", "mxfp8"), ("1", "mxfp8")]
    x, halved = torch.randn(4, 32), next(m[0].parameters()) / 2
    assert torch.equal(m[0](x), bs.linear(x, halved, recipe="mxfp8"))
    for refused in (lambda: bs.revert(m), lambda: bs.convert(m, "mxfp4", skip=["0"])):
        with pytest.raises(ValueError, match=r"model = Sequential with '0' as ParametrizedLinear;"):
            refused()
    assert all("recipe=mxfp8" in layer.extra_repr() for layer in m)
    nn.utils.parametrize.remove_parametrizations(m[0], "weight")
    assert bs.revert(m) == ["0", "1"]


def test_an_encoder_evaluates_through_its_converted_layers() -> None:
    """In inference PyTorch's encoder layers have a kernel that never calls their linear layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    m = nn.ModuleDict(dict(encoder=nn.TransformerEncoder(layer, 2), other=copy.deepcopy(layer)))
    encoder = m["encoder"].eval()
    x = torch.randn(2, 5, 32)
    padding = torch.arange(5).expand(2, 5) >= torch.tensor([[5], [3]])

    def outputs() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat((encoder(x), encoder(x, src_key_padding_mask=padding)))[:3]

    plain = outputs()
    bs.convert(m, "mxfp4", rules={"other": None})
    quantized = outputs()
    assert not torch.allclose(quantized, plain, atol=1e-2)
    called = encoder(x.clone().requires_grad_()).detach()  # no such kernel with gradients
    assert torch.allclose(quantized[:2], called, atol=1e-5)
    assert m["other"].activation_relu_or_gelu == 1
    twin = pickle.loads(pickle.dumps(m))
    bs.convert(m, "mxfp4")  # keeps what it was before the first time
    for reverted in (m, twin):
        bs.revert(reverted)
        assert reverted["encoder"].use_nested_tensor is True
        assert reverted["encoder"].layers[0].activation_relu_or_gelu == 1
        assert not any(
            "_blockscale" in name for inner in reverted.modules() for name in vars(inner)
        )
    assert torch.equal(outputs(), plain)


def test_rules_in_order_and_skip_first() -> None:
    m = model()
    report = bs.convert(
        m,
        "bf16",
        rules={"q_proj": bs.recipe("mxfp8"), "proj": "mxfp4", "lm_head": "nvfp4"},
        skip=["layers.1"],
    )
    assert [(name, str(r)) for name, r in report.converted] == [
        ("layers.0.q_proj", "mxfp8"),
        ("layers.0.o_proj", "mxfp4"),
        ("lm_head", "nvfp4"),
    ]
    bs.revert(m)
    assert len(bs.convert(m, "bf16", skip=["q_proj"]).converted) == 3


def test_a_rule_that_decides_nothing_is_reported() -> None:
    report = bs.convert(model(), "nvfp4", rules={"proj": "mxfp8", "q_proj": None, "o_proj": "bf16"})
    assert report.unused == ["q_proj", "o_proj"]
    assert str(report).endswith("\nRules that decided nothing: 'q_proj', 'o_proj'")
    rules = {"q_proj": None, "proj": "mxfp8", "lm_head": "bf16"}
    report = bs.convert(model(), "nvfp4", rules=rules, skip=["lm_head"])
    assert report.unused == ["lm_head"]
    assert bs.convert(model(), "nvfp4", rules={"q_proj": None, "proj": "mxfp8"}).unused == []


def test_layers_come_first_among_the_reasons_why_nothing_is_converted() -> None:
    parts: list[nn.Module] = [nn.Conv1d(1, 1, 1) for _ in range(5)]
    said = r"; 5: its weight is torch.float64, .*; 0: Conv1d is not nn.Linear; 1: .*; 2: [^;]*$"
    with pytest.raises(ValueError, match=said):
        bs.convert(nn.Sequential(*parts, nn.Linear(4, 4)).double(), "nvfp4")


def test_what_holds_matrices_is_told_of_experts() -> None:
    class Conv1D(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(shape))

    class Holder(nn.Module):
        def __init__(self, *shapes: tuple[int, ...]) -> None:
            super().__init__()
            for i, shape in enumerate(shapes):
                self.register_parameter(f"p{i}", nn.Parameter(torch.ones(shape)))

    parts = dict(layer=nn.Linear(4, 4), gpt=Conv1D(4, 8), audio=Conv1D(4, 8, 3))
    parts |= dict(pair=Holder((3, 4, 4), (3, 4, 4)), tokens=Holder((1, 1, 4), (1, 9, 4)))
    reasons = dict(bs.convert(nn.ModuleDict(parts), "mxfp8").skipped)
    transposed = "Conv1D is not nn.Linear: replace it by one with its weight transposed"
    assert (reasons["gpt"], reasons["audio"]) == (transposed, "Conv1D is not nn.Linear")
    assert reasons["pair"] == "Holder is not nn.Linear; experts= converts what it multiplies"
    assert reasons["tokens"] == "Holder is not nn.Linear"
