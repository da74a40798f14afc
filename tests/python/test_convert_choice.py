"""Which modules `bs.convert` converts, and what its report says of the others."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import blockscale as bs
import pytest
import torch
from blockscale import _unfit
from models import model
from torch import nn


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
    for each in (m, same):
        report = bs.convert(each, "nvfp4", seed=3)
        assert [name for name, _ in report.converted] == ["0", "1"]
    assert isinstance(m[1], bs.nn.Linear)
    assert isinstance(m[1], Theirs)
    assert (type(m[1]).__module__, type(m[1]).__doc__) == (__name__, Theirs.__doc__)
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


@pytest.mark.parametrize(
    "name", ["forward", "__call__", "_call_impl", "__getattr__", "weight", "bias"]
)
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


def test_subclasses_that_cannot_become_ours() -> None:
    class Named(Theirs):
        recipe = _seed = None

    class Last(Theirs):
        def __init_subclass__(cls) -> None:
            raise RuntimeError("no more")

    m = nn.ModuleDict({"a": nn.Linear(4, 4), "named": Named(4, 4), "last": Last(4, 4)})
    assert dict(bs.convert(m, "mxfp8").skipped) == {
        "named": "Named has attributes of ours: _seed, recipe",
        "last": "Last cannot be subclassed: no more",
    }


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


def test_none_names_none() -> None:
    m = nn.Sequential(nn.Linear(4, 4))
    report = bs.convert(m, "mxfp8", rules=None, skip=None, experts=None)
    assert [name for name, _ in report.converted] == ["0"]


def test_a_weight_that_is_gone() -> None:
    gone: Any = nn.Linear(4, 4)
    gone.weight = None
    report = bs.convert(nn.Sequential(nn.Linear(4, 4), gone), "nvfp4")
    assert dict(report.skipped) == {"1": "its weight is None"}
    for recipe in ("mxfp8", "nvfp4"):
        layer = bs.nn.Linear(4, 4, recipe=recipe)
        grouped = bs.nn.GroupedLinear(2, 4, 4, recipe=recipe)
        layer.weight = grouped.weight = None  # type: ignore[assignment]
        with pytest.raises(TypeError, match=r"^linear: w = None; need a tensor"):
            layer(torch.ones(2, 4))
        with pytest.raises(TypeError, match=r"^grouped_linear: w = None; need a tensor"):
            grouped(torch.ones(2, 4), torch.tensor([1, 2]))
        report = bs.convert(nn.Sequential(nn.Linear(4, 4), layer, grouped), "mxfp4")
        said = "its weight is None"
        assert dict(report.skipped) == {"1": said, "2": f"{said}, stays in {recipe}"}


def test_a_report_prints_as_its_table() -> None:
    report = bs.convert(nn.Sequential(nn.Linear(4, 4)), "mxfp8")
    assert repr(report) == str(report) == "1 layer converted, 0 modules not\n  0  mxfp8"


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


def test_a_weight_that_is_no_parameter() -> None:
    """Frozen into a buffer it is converted; computed, it is left alone."""
    frozen, computed = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    weight = frozen.weight.detach()
    del frozen.weight
    frozen.register_buffer("weight", weight)
    torch.nn.utils.parametrizations.weight_norm(computed)
    m = nn.ModuleDict({"frozen": frozen, "computed": computed})
    report = bs.convert(m, "mxfp8")
    assert [name for name, _ in report.converted] == ["frozen"]
    assert torch.equal(frozen(torch.ones(1, 4)), bs.linear(torch.ones(1, 4), weight, None, "mxfp8"))
    said = "ParametrizedLinear is parametrized: convert it first, then parametrize it"
    assert dict(report.skipped)["computed"] == said


class LinearLoss(nn.Module):
    """As nn.LinearCrossEntropyLoss, which PyTorch 2.11 lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x, self.linear.weight, self.linear.bias)
        return nn.functional.cross_entropy(y, target)


def test_what_a_loss_reads_past_its_forward_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.loss = nn.LinearCrossEntropyLoss(64, 8) if has_one else LinearLoss()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.loss(self.linear(x), torch.zeros(len(x), dtype=torch.long))
            return loss

    has_one = hasattr(nn, "LinearCrossEntropyLoss")
    if not has_one:
        monkeypatch.setattr(_unfit, "_LOSS", LinearLoss)
    model = Model()
    model.loss.linear = bs.nn.Linear(64, 8, recipe="mxfp8")  # built by hand, or by earlier versions
    said = "is read by nn.LinearCrossEntropyLoss directly, bypassing its forward"
    report = bs.convert(model, "mxfp8")
    assert [name for name, _ in report.converted] == ["linear"]
    assert report.skipped == [("loss.linear", said)]
    assert type(model.loss.linear) is nn.Linear
    with bs.measure(model) as found:
        model(torch.randn(3, 64)).backward()
    assert found.left_out == {}
    with pytest.raises(ValueError, match=f"^convert: rules = 'loss', which finds loss.*; .*{said}"):
        bs.convert(model, "mxfp8", rules={"loss": "mxfp8"})
    with pytest.raises(ValueError, match=f"linear: {said}"):
        bs.convert(model.loss, "mxfp8")


def test_without_such_a_loss_its_linear_is_one_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in PyTorch 2.11."""
    monkeypatch.setattr(_unfit, "_LOSS", ())
    report = bs.convert(nn.ModuleDict({"loss": LinearLoss()}), "mxfp8")
    assert [name for name, _ in report.converted] == ["loss.linear"]


def of_torch_jit(kind: str) -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    if kind == "script":
        return torch.jit.script(inner)
    return torch.jit.trace(inner, torch.ones(2, 4))  # type: ignore[no-untyped-call,no-any-return]


@pytest.mark.parametrize("kind", ["script", "trace"])
def test_what_torch_jit_has_compiled_is_left_alone(kind: str) -> None:
    m = nn.ModuleDict({"plain": nn.Linear(4, 4), "other": of_torch_jit(kind)})
    report = bs.convert(m, "mxfp8")
    assert [name for name, _ in report.converted] == ["plain"]
    assert dict(report.skipped) == {
        "other.0": "Linear is compiled by torch.jit: convert before that",
        "other.1": "LayerNorm is compiled by torch.jit: convert before that",
    }
    x = torch.randn(2, 4)
    m["other"](m["plain"](x)).sum().backward()
    assert bs.revert(m) == ["plain"]
    bs.convert(m, "mxfp8", skip=["other"])
    with pytest.raises(ValueError, match=r"other\.0: Linear is compiled by torch.jit"):
        bs.convert(m, "mxfp8", rules={"plain": None})
    said = r"^convert: model = an? \w+Module; need a model that torch.jit has not compiled; conv"
    with pytest.raises(ValueError, match=said):
        bs.convert(of_torch_jit(kind), "mxfp8")


@pytest.mark.parametrize("other", [nn.Linear(4, 4), nn.LayerNorm(4)])
def test_two_modules_of_one_name_are_refused(other: nn.Module) -> None:
    """One would be missing from the report."""
    m = nn.Module()
    m.add_module("_orig_mod", nn.Sequential(nn.Linear(4, 4)))
    m.add_module("0", other)
    said = "^convert: model = two modules named '0'; need names that differ without "
    with pytest.raises(ValueError, match=said):
        bs.convert(m, "mxfp8")
    by_hand = nn.ModuleDict({"_forward_module": nn.Sequential(bs.nn.Linear(4, 4)), "0": other})
    with pytest.raises(ValueError, match=r"^measure: model = two modules named '0'"):
        bs.measure(by_hand).__enter__()


def test_a_part_that_holds_the_model_is_no_end_of_names() -> None:
    m = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    m[1].owner = m  # as PyTorch takes what was meant as a plain attribute
    assert [name for name, _ in bs.convert(m, "mxfp8").converted] == ["0"]
    assert bs.revert(m) == ["0"]


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


def test_a_layer_with_attributes_of_ours_is_left_alone() -> None:
    named: Any = nn.Linear(4, 4)
    named.recipe, named.plain, named.keep = "mine", "x", True
    held: Any = nn.Linear(4, 4)
    held.register_buffer("_seed", torch.zeros(2))
    free: Any = nn.Linear(4, 4)
    free.tag = "theirs"
    m = nn.ModuleDict({"named": named, "held": held, "free": free})
    report = bs.convert(m, "mxfp8")
    assert dict(report.skipped) == {
        "named": "Linear has attributes of ours: keep, plain, recipe",
        "held": "Linear has attributes of ours: _seed",
    }
    assert bs.revert(m) == ["free"]
    assert (named.recipe, named.plain, named.keep, free.tag) == ("mine", "x", True, "theirs")


def test_a_name_that_only_experts_have_stays_theirs() -> None:
    m: Any = nn.Sequential(nn.Linear(4, 4), Theirs(4, 4))
    m[0]._name, m[1]._name = "a", "b"
    bs.convert(m, "mxfp8")
    bs.revert(m)
    assert (m[0]._name, m[1]._name) == ("a", "b")


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
    parts |= dict(by_another_name=type("Conv1D", (Holder,), {})((4, 8)))
    experts = type("OneExperts", (Holder,), {})
    parts |= dict(uneven=Holder((3, 4, 4), (5, 4, 4)), one=experts((3, 4, 4)), no=experts((4, 4)))
    parts |= dict(listed=nn.ParameterList([torch.ones(3, 4, 4) for _ in range(2)]))
    reasons = dict(bs.convert(nn.ModuleDict(parts), "mxfp8").skipped)
    transposed = "Conv1D is not nn.Linear: replace it by one with its weight transposed"
    assert (reasons["gpt"], reasons["audio"]) == (transposed, "Conv1D is not nn.Linear")
    assert reasons["pair"] == "Holder is not nn.Linear; experts= converts what it multiplies"
    assert reasons["one"] == "OneExperts is not nn.Linear; experts= converts what it multiplies"
    assert reasons["tokens"] == reasons["uneven"] == "Holder is not nn.Linear"
    assert reasons["no"] == "OneExperts is not nn.Linear"
    assert reasons["listed"] == "ParameterList is not nn.Linear"
    assert reasons["by_another_name"] == "Conv1D is not nn.Linear"


def test_a_layer_that_becomes_plain_is_reported_so() -> None:
    built = nn.Sequential(bs.nn.Linear(32, 32, recipe="mxfp8"), nn.Linear(32, 32))
    report = bs.convert(built, "nvfp4", skip=["0"])
    assert "0  left alone: skip '0', no longer in mxfp8" in str(report)
    assert type(built[0]) is nn.Linear
    report = bs.convert(built, "nvfp4", rules={r"^1$": None})
    assert dict(report.skipped) == {"1": "rule '^1$', no longer in nvfp4"}
    assert type(built[1]) is nn.Linear
