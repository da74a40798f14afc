"""Specs and recipes are values: what they hold, how they print, and which ones are refused."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any

import blockscale as bs
import pytest
import torch

TABLE = {  # specification, section 9: element, scale, block, outer, scale_rule
    "fp8_1x128": ("e4m3fn", "fp32", (1, 128), False, "amax"),
    "fp8_128x128": ("e4m3fn", "fp32", (128, 128), False, "amax"),
    "mxfp8": ("e4m3fn", "e8m0", (1, 32), False, "rceil"),
    "mxfp6": ("e2m3", "e8m0", (1, 32), False, "rceil"),
    "mxfp4": ("e2m1", "e8m0", (1, 32), False, "even"),
    "nvfp4": ("e2m1", "e4m3", (1, 16), True, "two_level"),
    "amdfp4": ("e2m1", "ue5m3", (1, 16), True, "two_level"),
}


def test_named_specs_are_the_table() -> None:
    assert set(bs.spec_names()) == set(TABLE)
    for name, facts in TABLE.items():
        s = bs.spec(name)
        assert (s.element, s.scale, s.block, s.outer, s.scale_rule) == facts
        assert str(s) == name
        assert s.rounding == "nearest"
        assert s.scale_rounding == "nearest"
        assert s.hadamard == 0


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("fp8_1x128", {"element": "e4m3fnuz"}, "fp8_1x128[element=e4m3fnuz]"),
        ("mxfp8", {"block": (32, 32)}, "mxfp8[block=32x32]"),
        ("nvfp4", {"hadamard": (16, 0xD7E8)}, "nvfp4[hadamard=16:0xd7e8]"),
        ("nvfp4", {"hadamard": 16}, "nvfp4[hadamard=16:0xd7e8]"),
        ("nvfp4", {"hadamard": (16, 0)}, "nvfp4[hadamard=16:0x0]"),
        ("nvfp4", {"outer": False}, "nvfp4[outer=false]"),
        ("nvfp4", {"rounding": "stochastic"}, "nvfp4[rounding=stochastic,scale_rounding=up]"),
        (
            "nvfp4",
            {"rounding": "stochastic", "scale_rounding": "nearest"},
            "nvfp4[rounding=stochastic,scale_rounding=nearest]",
        ),
        ("nvfp4[hadamard=16]", {"hadamard": None}, "nvfp4"),
        ("nvfp4[hadamard=16]", {"hadamard": 0}, "nvfp4"),
        ("mxfp4", {"scale_rule": "floor"}, "mxfp4[scale_rule=floor]"),
        ("nvfp4", {"scale": "e4m3"}, "nvfp4"),
    ],
)
def test_changes_give_the_canonical_text(name: str, changes: dict[str, Any], text: str) -> None:
    s = bs.spec(name, **changes)
    assert str(s) == text
    assert bs.spec(text) == s
    assert bs.spec(s) == s


def test_a_spec_is_a_value() -> None:
    a, b = bs.spec("nvfp4", block=(16, 16)), bs.spec("nvfp4[block=16x16]")
    assert a == b
    assert hash(a) == hash(b)
    assert a != bs.spec("nvfp4")
    assert copy.deepcopy(a) == a
    assert pickle.loads(pickle.dumps(a)) == a
    with pytest.raises(AttributeError):
        a.element = "e5m2"  # type: ignore[misc]


def test_dtypes_are_torchs_where_torch_has_them() -> None:
    assert bs.spec("mxfp8").code_dtype == torch.float8_e4m3fn
    assert bs.spec("mxfp8", element="e5m2").code_dtype == torch.float8_e5m2
    assert bs.spec("fp8_1x128", element="e4m3fnuz").code_dtype == torch.float8_e4m3fnuz
    assert bs.spec("mxfp6").code_dtype == bs.spec("nvfp4").code_dtype == torch.uint8
    scales = {name: bs.spec(name).scale_dtype for name in ("mxfp4", "nvfp4", "amdfp4", "fp8_1x128")}
    assert scales == {
        "mxfp4": torch.float8_e8m0fnu,
        "nvfp4": torch.float8_e4m3fn,
        "amdfp4": torch.uint8,
        "fp8_1x128": torch.float32,
    }


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("nvpf4", {}, ["spec: name = 'nvpf4'", "did you mean 'nvfp4'?"]),
        ("nvfp4", {"scale": "ue5m3"}, ["spec: scale = 'ue5m3'", "need e4m3", "use 'amdfp4'"]),
        ("nvfp4", {"element": "e4m3fn"}, ["spec: element = e4m3fn"]),
        ("nvfp4", {"rouding": "stochastic"}, ["'rouding'", "did you mean 'rounding'?"]),
        ("nvfp4", {"rounding": "stochastik"}, ["rounding = 'stochastik'", "'stochastic'"]),
        ("mxfp4", {"rounding": "stochastic"}, ["scale_rule = even", "ceil or rceil", "biases"]),
        ("nvfp4", {"hadamard": 24}, ["hadamard = 24", "16, 32, 64, 128"]),
        ("nvfp4", {"hadamard": (16, 1 << 16)}, ["hadamard = 16:0x10000", "at most 16 bits"]),
        ("nvfp4", {"hadamard": (16, "d7e8")}, ["hadamard = 16xd7e8", "16, 32, 64, 128"]),
        ("nvfp4", {"block": (1, 32)}, ["block = 1x32", "1x16 or 16x16"]),
        ("mxfp8", {"outer": True}, ["outer = true", "two-level"]),
        ("mxfp8", {"scale_rounding": "up"}, ["scale_rounding = up", "two-level"]),
        ("fp8_1x128", {"scale_rule": "rceil"}, ["scale_rule = rceil", "amax, pow2"]),
        ("nvfp4", {"element": "e2m1,outer=false"}, ["element = 'e2m1,outer=false'", "one value"]),
    ],
)
def test_specs_that_mean_nothing(name: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^spec: .+; need ") as error:
        bs.spec(name, **changes)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "shown"), [("nvfp4\0", r"nvfp4\x00"), ("\ud800", r"\ud800")])
def test_a_text_reaches_the_core_whole(text: str, shown: str) -> None:
    with pytest.raises(ValueError, match=r"^spec: name = ") as error:
        bs.spec(text)
    assert f"'{shown}'" in str(error.value)


def test_named_recipes_are_the_table() -> None:
    rows: dict[str, Sequence[str | None]] = {
        "bf16": [None] * 6,
        "fp8_blockwise": ["fp8_1x128", "fp8_128x128", "fp8_1x128", "fp8_128x128"]
        + ["fp8_1x128"] * 2,
        "mxfp8": ["mxfp8"] * 6,
        "mxfp4": ["mxfp4", "mxfp4[block=32x32]", "mxfp4", "mxfp4[block=32x32]"]
        + ["mxfp4[hadamard=16:0x0]"] * 2,
    }
    for fp4 in ("nvfp4", "amdfp4"):
        square, signs = f"{fp4}[block=16x16]", "hadamard=16:0xd7e8"
        random = "rounding=stochastic,scale_rounding=up"
        wgrad = [f"{fp4}[{random},{signs}]", f"{fp4}[{signs}]"]
        rows[fp4] = [fp4, square, f"{fp4}[{random}]", square, *wgrad]
    assert bs.recipe_names() == tuple(rows)
    for name, texts in rows.items():
        r = bs.recipe(name)
        slots = [r.fprop_x, r.fprop_w, r.dgrad_dy, r.dgrad_w, r.wgrad_dy, r.wgrad_x]
        assert [None if s is None else str(s) for s in slots] == list(texts)
        assert str(r) == name
        assert r.high_precision == (name == "bf16")
        assert r.stochastic == (name in ("nvfp4", "amdfp4"))


def test_a_recipe_is_a_value() -> None:
    base = bs.recipe("nvfp4")
    assert bs.recipe(base) is base
    changed = base.replace(dgrad_dy="nvfp4", fprop_x=None)
    assert changed.dgrad_dy == bs.spec("nvfp4")
    assert changed.fprop_x is None
    assert base.fprop_x == bs.spec("nvfp4")
    assert str(changed) == "nvfp4[dgrad_dy=nvfp4,fprop_x=none]"
    assert str(base.replace(fprop_x=None, name="mine")) == "mine"
    assert changed.replace(dgrad_dy=base.dgrad_dy, fprop_x=base.fprop_x) == base
    assert hash(changed) != hash(base)
    assert pickle.loads(pickle.dumps(changed)) == changed
    assert base.replace() == base
    assert base.replace(name="").name == ""
    lean = base.replace(keep_w=False)
    assert str(lean) == "nvfp4[keep_w=False]"
    assert lean != base
    assert lean.text == base.text
    assert not lean.replace(fprop_x=None).keep_w
    assert lean.replace(keep_w=True) == base
    assert pickle.loads(pickle.dumps(lean)) == lean
    leaner = lean.replace(keep_x=False)
    assert str(leaner) == "nvfp4[keep_w=False][keep_x=False]"
    assert leaner not in (base, lean, base.replace(keep_x=False))
    assert pickle.loads(pickle.dumps(leaner)) == leaner
    assert (leaner.replace(keep_w=True), leaner.replace(keep_x=True)) == (
        base.replace(keep_x=False),
        lean,
    )


TEXTS = {
    "fp8_blockwise[wgrad_x=fp8_128x128]": ("fp8_blockwise", {"wgrad_x": "fp8_128x128"}),
    "mxfp8[keep_w=False]": ("mxfp8", {"keep_w": False}),
    "mxfp4[keep_w=False,keep_x=False]": ("mxfp4", {"keep_w": False, "keep_x": False}),
    "nvfp4[wgrad_dy=none,wgrad_x=none,keep_w=False]": (
        "nvfp4",
        {"wgrad_dy": None, "wgrad_x": None, "keep_w": False},
    ),
    "bf16[fprop_x=mxfp8,fprop_w=mxfp8[block=32x32]]": (
        "bf16",
        {"fprop_x": "mxfp8", "fprop_w": "mxfp8[block=32x32]"},
    ),
    "nvfp4[fprop_x=nvfp4[scale_rounding=up,outer=false],fprop_w=nvfp4]": (
        "nvfp4",
        {"fprop_x": bs.spec("nvfp4", outer=False, scale_rounding="up"), "fprop_w": "nvfp4"},
    ),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_recipe_is_text(text: str) -> None:
    name, changes = TEXTS[text]
    made = bs.recipe(name).replace(**changes)  # type: ignore[arg-type]
    assert str(made) == text
    assert bs.recipe(text) == made
    assert str(bs.recipe(text)) == text
    if text.count("[") == 1:  # the text of a spec has no spaces
        assert bs.recipe(f" {text} ".replace(",", " , ").replace("=", " = ")) == made
    twice = bs.recipe(f"{text}[keep_w=True]")
    assert (twice, str(twice)) == (made.replace(keep_w=True), f"{text}[keep_w=True]")


def test_a_text_may_be_spelled_as_python_or_as_a_spec() -> None:
    mine = bs.recipe("nvfp4[wgrad_dy=None,wgrad_x=None,keep_w=false]")
    assert mine == bs.recipe("nvfp4[wgrad_dy=none,wgrad_x=none,keep_w=False]")
    back = bs.recipe("nvfp4[keep_w=false][keep_w=true]")
    assert (back, str(back)) == (bs.recipe("nvfp4"), "nvfp4[keep_w=False][keep_w=True]")
    assert bs.spec("nvfp4[outer=False]") == bs.spec("nvfp4", outer=False)
    assert bs.spec("mxfp8", element=torch.float8_e5m2) == bs.spec("mxfp8[element=e5m2]")


def test_a_name_of_its_own_is_no_other_recipes() -> None:
    made = bs.recipe("nvfp4").replace(keep_w=False, name="mine")
    assert str(made) == "mine"
    assert bs.recipe("nvfp4").replace(name="nvfp4") == bs.recipe("nvfp4")
    said = r"^recipe: name = 'nvfp4.*'; need one that names no other recipe; .* bs.recipe\('nvfp4"
    makes: list[Callable[[], bs.Recipe]] = [
        lambda: bs.Recipe("nvfp4"),
        lambda: bs.recipe("nvfp4").replace(keep_w=False, name="nvfp4"),
        lambda: bs.recipe("mxfp8").replace(name="nvfp4[keep_w=False]"),
        lambda: bs.recipe("nvfp4[keep_x=False]").replace(name="nvfp4[keep_w=False]"),
        lambda: dataclasses.replace(bs.recipe("nvfp4"), wgrad_x=None, wgrad_dy=None),
    ]
    for make in makes:
        with pytest.raises(ValueError, match=said):
            make()
    lean = bs.recipe("nvfp4[keep_w=False]")
    assert lean.replace(name="nvfp4[ keep_w = false ]") == lean
    assert bs.Recipe("bf16") == bs.Recipe("of my own") == bs.recipe("bf16")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((f"nvfp4[{inside}]", "need NAME[operand=spec,...]") for inside in (
            "", "x", "wgrad_x=", "=none", "keep_w=True,", "keep_w=True,keep_w=True",
        )),
        *((text, "need NAME[operand=spec,...]") for text in (
            "]", "nvfp4]", "][", "[keep_w=True]", "nvfp4[keep_w=True]x",
        )),
        ("nvfp4[keep_w=no]", "recipe: keep_w = no; need True or False"),
        ("nvpf4[keep_w=True]", "recipe: name = 'nvpf4'; need one of bf16"),
        ("nvfp4[[keep_w=True]", "close every bracket that is opened"),
        ("nvfp4[keep_w=False", "close every bracket that is opened"),
        ("mxfp8[fprop_w=mxfp8[block=32x32]", "close every bracket that is opened"),
        ("mxfp8" + "[keep_w=False]" * 400, "need at most 100 brackets"),
        ("nvfp4[wgrad=none]", "recipe: operand = 'wgrad'; need one of fprop_x"),
        ("nvfp4[wgrad_x=none]", "need the same Hadamard transform"),
        ("nvfp4[name=mine]", "recipe: operand = 'name'; need one of fprop_x"),
        ("nvfp4[self=nvfp4]", "recipe: operand = 'self'; need one of fprop_x"),
        ("nvfp4[wgrad_x=nvpf4]", "spec: name = 'nvpf4'; need one of fp8_1x128"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_recipe(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        bs.recipe(text)


def test_compiled_code_takes_the_text_of_a_recipe() -> None:
    text = "fp8_blockwise[wgrad_x=fp8_128x128,keep_w=False]"
    made = bs.recipe(text)  # known to the compiler by another way, too
    x, w = torch.randn(8, 64, requires_grad=True), torch.randn(32, 64)

    def both(x: torch.Tensor) -> torch.Tensor:
        return bs.linear(x, w, recipe=text) + bs.linear(x, w, recipe=made)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), both(x))

    def changed(x: torch.Tensor) -> torch.Tensor:
        lean = bs.recipe("mxfp8[keep_w=True]").replace(keep_w=False, wgrad_x=None)
        ahead = bs.quantize_weight(w, text)
        return bs.linear(x, w, recipe=lean) + bs.linear(x, w, recipe=text, quantized_weight=ahead)

    compiled = torch.compile(changed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), changed(x))


def test_a_change_that_is_misspelt() -> None:
    words = "recipe: operand = 'keep_X'; need one of .*, keep_w or keep_x; did you mean 'keep_x'"
    with pytest.raises(ValueError, match=words):
        bs.recipe("mxfp8").replace(keep_X=None)
    with pytest.raises(ValueError, match=words):
        bs.recipe("mxfp8[keep_X=False]")


def test_what_draws_is_kept() -> None:
    with pytest.raises(TypeError, match=r"^recipe: keep_w = an int; need a bool$"):
        bs.recipe("nvfp4").replace(keep_w=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^recipe: keep_w = False; need True: another quanti"):
        bs.recipe("nvfp4").replace(dgrad_w="nvfp4[block=16x16,rounding=stochastic]", keep_w=False)
    with pytest.raises(ValueError, match=r"^recipe: keep_x = False; need True: another quanti"):
        bs.recipe("nvfp4[wgrad_x=nvfp4[hadamard=16,rounding=stochastic],keep_x=False]")


def test_what_recipes_draw() -> None:
    """Of dy's operands: draws_dx is that of x's gradient, draws_dw that of W's."""
    mxfp8 = bs.recipe("mxfp8")
    assert (mxfp8.draws_dx, mxfp8.draws_dw) == (False, False)
    assert (bs.recipe("nvfp4").draws_dx, bs.recipe("nvfp4").draws_dw) == (True, True)
    random = "mxfp8[rounding=stochastic]"
    for gemm, (dx, dw) in {"dgrad": (True, False), "wgrad": (False, True)}.items():
        operand: dict[str, Any] = {f"{gemm}_dy": random}
        changed = mxfp8.replace(**operand)
        assert (changed.draws_dx, changed.draws_dw) == (dx, dw)
    assert mxfp8.replace(fprop_x=random).stochastic
    assert not mxfp8.replace(fprop_x=random).draws_dx


@pytest.mark.parametrize(
    ("operands", "words"),
    [
        (
            {"wgrad_x": "nvfp4"},
            ["wgrad_dy, wgrad_x = Hadamard transform 16:0xd7e8 and none", "cancel in wgrad"],
        ),
        ({"wgrad_x": "nvfp4[hadamard=16:0x1]"}, ["16:0xd7e8 and 16:0x1"]),
        ({"wgrad_x": "nvfp4[hadamard=32]"}, ["16:0xd7e8 and 32:0x0"]),
        ({"wgrad_x": None}, ["16:0xd7e8 and none"]),
        ({"fprop_x": "mxfp8"}, ["fprop_x, fprop_w = block length 32 and 16", "one family"]),
        ({"fprop": "mxfp8"}, ["operand = 'fprop'", "did you mean 'fprop_x'?"]),
        ({"dgrad_dy": "mxfp4[rounding=stochastic]"}, ["scale_rule = even", "rceil"]),
    ],
)
def test_recipes_that_mean_nothing(operands: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^(recipe|spec): .+; need ") as error:
        bs.recipe("nvfp4").replace(**operands)
    for word in words:
        assert word in str(error.value)


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"recipe: name = 'nvpf4'; need one of bf16, .*'nvfp4'\?"):
        bs.recipe("nvpf4")
    with pytest.raises(TypeError, match=r"recipe: name = an int; need a name such as 'nvfp4'"):
        bs.recipe(4)  # type: ignore[arg-type]
    # What goes on where the name ends is meant.
    with pytest.raises(ValueError, match=r"did you mean 'fp8_blockwise'\?"):
        bs.recipe("fp8")
    for make in (bs.Recipe, lambda name: bs.recipe("nvfp4").replace(name=name)):
        with pytest.raises(TypeError, match=r"^recipe: name = an int; need text, a label$"):
            make(4)  # type: ignore[arg-type]


def test_explain_says_what_the_error_would() -> None:
    assert bs.explain("nvfp4") == ""
    assert bs.explain(bs.spec("mxfp8"), layout="nv_128x4", device="cpu") == ""
    assert "did you mean 'nvfp4'?" in bs.explain("nvpf4")
    assert "'fp8_blockwise' is a recipe, for a whole layer" in bs.explain("fp8_blockwise")
    assert "one of linear, mn_major for" in bs.explain("fp8_1x128", layout="nv_128x4")
    assert "packed FP4 codes" in bs.explain("mxfp8", layout="mfma_16x16")
    assert bs.explain("nvfp4", device="tpu") == "explain: device = 'tpu'; need one of cpu, cuda"
    for argument in ("layout", "operation", "device"):
        with pytest.raises(TypeError, match=f"^explain: {argument} = an int; need .*'"):
            bs.explain("nvfp4", **{argument: 3})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^explain: spec = an int; need a Spec, or .*'nvfp4'$"):
        bs.explain(3)  # type: ignore[arg-type]
    cuda = next(b for b in bs.describe()["backends"] if b["name"] == "cuda")
    assert bs.explain("nvfp4", device=torch.device("cuda:0")) == cuda["reason"]


def test_explain_names_the_path_of_a_product() -> None:
    on_cpu = bs.explain("nvfp4", operation="matmul")
    assert on_cpu == f"the CPU's GEMM ({bs.describe()['instruction_set']})"
    assert bs.explain("mxfp8", operation="grouped_matmul") == f"{on_cpu}, group by group"
    assert bs.explain("nvfp4", operation="conv") == (
        "explain: operation = 'conv'; need matmul or grouped_matmul"
    )
    assert "one of linear, mn_major for" in bs.explain("fp8_1x128", "nv_128x4", operation="matmul")


def test_explain_names_the_path_of_a_product_on_a_gpu(cuda: torch.device) -> None:
    def path(spec: str, operation: str = "grouped_matmul") -> str:
        return bs.explain(spec, device=cuda, operation=operation)

    assert path("mxfp8", "matmul").startswith("decoded to BF16, then PyTorch's GEMM with FP32 sums")
    assert path("mxfp8").startswith("decoded to BF16, then PyTorch's grouped GEMM")
    if torch.cuda.get_device_capability(cuda) == (9, 0):
        assert path("nvfp4", "matmul") == (
            "decoded to BF16, then the BF16 GEMM for compute capability 9.0, with outer scales "
            "(PyTorch's where that is faster); where few rows meet b, that GEMM decodes b itself"
        )
        assert path("mxfp8").endswith(
            ", or the BF16 GEMM for compute capability 9.0; where few rows meet b, that GEMM "
            "decodes b itself"
        )
        assert "itself" not in path("mxfp8[element=e5m2]", "matmul")
        assert path("mxfp4", "matmul") == (
            "codes of E5M2 that hold the scales' differences, then the block-scaled FP8 GEMM for "
            "compute capability 9.0"
        )
        assert path("mxfp4") == path("mxfp4", "matmul") + ", one launch for all groups"
    else:
        assert path("nvfp4", "matmul") == (
            "decoded to BF16, then PyTorch's GEMM with FP32 sums, then outer scales in one pass"
        )
    q = bs.quantize(torch.ones(4, 128, device=cuda), "fp8_1x128[element=e4m3fnuz]")
    with pytest.raises(ValueError, match="e4m3fn or e5m2") as error:
        bs.matmul(q, q)
    assert path(str(q.spec), "matmul") == str(error.value)
    fp8 = path("fp8_1x128")
    assert fp8.startswith("the block-scaled FP8 GEMM") or "compute capability 9.0 (H100" in fp8


def test_what_recipes_need_on_a_gpu() -> None:
    """Elements that the tensor cores read, but only where both operands of a GEMM are quantized."""
    needs = {name: bs.recipe(name).cuda_needs for name in bs.recipe_names()}
    assert set(needs.values()) == {""}
    mixed = bs.recipe("fp8_blockwise").replace(fprop_x=None, dgrad_dy=None, wgrad_dy=None)
    assert mixed.cuda_needs == ""
    amd = mixed.replace(wgrad_dy="fp8_1x128[element=e4m3fnuz]")
    assert amd.cuda_needs == "e4m3fn or e5m2 elements, which NVIDIA's tensor cores read"
    assert bs.recipe("mxfp8").replace(wgrad_dy=None, wgrad_x=None).cuda_needs == ""


def test_recipes_are_made_in_compiled_code() -> None:
    x, w = torch.randn(8, 64), torch.randn(16, 64)

    def changed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        careful = bs.recipe("nvfp4").replace(wgrad_dy=None, wgrad_x=None, dgrad_dy=None)
        mixed = bs.recipe("bf16").replace(fprop_x="mxfp8", fprop_w=bs.spec("mxfp8", block=(32, 32)))
        made = bs.Recipe("made", bs.spec("mxfp4"), bs.spec("mxfp4", block=(32, 32)))
        return torch.stack([bs.linear(x, w, recipe=recipe) for recipe in (careful, mixed, made)])

    run = torch.compile(changed, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(x, w), changed(x, w))


def test_torch_load_takes_them_as_data() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    saved = {
        "recipe": bs.recipe("nvfp4").replace(wgrad_x=None, wgrad_dy=None),
        "spec": bs.spec("nvfp4", block=(16, 16)),
        "rng": bs.Rng(5, 2),
        "report": bs.convert(model, "nvfp4"),
    }
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["recipe"] == saved["recipe"]
    assert str(loaded["recipe"]) == str(saved["recipe"])
    assert loaded["spec"] == saved["spec"]
    assert (loaded["rng"].seed, loaded["rng"].offset) == (5, 2)
    assert str(loaded["report"]) == str(saved["report"])


def test_a_recipe_that_is_loaded_asks_this_machine_anew() -> None:
    recipe = bs.recipe("mxfp8").replace(name="made elsewhere")
    object.__setattr__(recipe, "cuda_needs", "another GPU")
    assert pickle.loads(pickle.dumps(recipe)).cuda_needs != "another GPU"
