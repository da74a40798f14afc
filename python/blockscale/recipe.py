"""What decides the bits: `Spec` (one quantized operand) and `Recipe` (the operands of a linear)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import torch

from blockscale import _core
from blockscale._constant import constant
from blockscale._errors import did_you_mean, fail, fail_type, message
from blockscale._recipe_text import (
    GEMMS,
    KEPT,
    OPERANDS,
    refuse_change,
    split_changes,
    with_changes,
)


@dataclasses.dataclass(frozen=True, init=False)
class Spec:
    """How one operand is quantized. Made by `spec`; `str(spec)` is its canonical text.

    The core derives all other attributes from the text; specs are equal when their texts are.
    docs/specification.md defines the bits.

    Attributes:
        text: the canonical text, such as "nvfp4[block=16x16]".
        family: the named spec that it derives from, such as "nvfp4".
        element: the format of the codes, such as "e2m1" (`describe()["elements"]`).
        scale: the format of the block scales: "e8m0", "e4m3", "ue5m3" or "fp32".
        block: (lines, codes along the axis) that share a scale; (1, 16) is 16 codes of one line.
        scale_rule: how a block's scale is derived from its largest value: "floor", "ceil", "even"
            or "rceil" (MX), "amax" or "pow2" (FP32 scales), "two_level" (nvfp4, amdfp4).
        scale_rounding: how scales are rounded: "nearest" (ties to even), or "up" in two-level
            specs.
        rounding: how elements are rounded: "nearest" (ties to even) or "stochastic".
        outer: whether an outer scale (per-tensor, in FP32) multiplies the block scales.
        hadamard: the size of the Hadamard transform along the axis, in values; 0 for none.
        hadamard_mask: its signs: bit i is set if value i of each run of `hadamard` values is
            negated.
        codes_per_byte: 2 if an element has 4 bits, else 1.
        scale_bytes: bytes per scale, 1 or 4.
        extent_multiple: the multiple, in values, that the extent of the axis is padded to before
            blocks are counted: the size of the transform, or 1.

    Raises:
        TypeError: constructed other than by `spec`.
    """

    text: str
    family: str = dataclasses.field(compare=False)
    element: str = dataclasses.field(compare=False)
    scale: str = dataclasses.field(compare=False)
    block: tuple[int, int] = dataclasses.field(compare=False)
    scale_rule: str = dataclasses.field(compare=False)
    scale_rounding: str = dataclasses.field(compare=False)
    rounding: str = dataclasses.field(compare=False)
    outer: bool = dataclasses.field(compare=False)
    hadamard: int = dataclasses.field(compare=False)
    hadamard_mask: int = dataclasses.field(compare=False)
    codes_per_byte: int = dataclasses.field(compare=False)
    scale_bytes: int = dataclasses.field(compare=False)
    extent_multiple: int = dataclasses.field(compare=False)

    def __init__(self, text: str, **facts: Any) -> None:
        if ("text", *facts) != _FACTS:
            need = "all that the core says of it"
            raise TypeError(message("Spec", "text", repr(text), need, "make it with bs.spec(name)"))
        for name, value in {"text": text, **facts}.items():
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Spec({self.text!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return spec, (self.text,)

    def __deepcopy__(self, memo: object) -> Spec:
        return self  # a value; and torch.compile cannot trace a copy of what is constant

    @property
    def stochastic(self) -> bool:
        """Whether rounding draws random bits."""
        return self.rounding == "stochastic"

    @property
    def code_dtype(self) -> torch.dtype:
        """torch's dtype for the element if there is one, else uint8."""
        dtype: torch.dtype = getattr(torch, f"float8_{self.element}", torch.uint8)
        return dtype

    @property
    def scale_dtype(self) -> torch.dtype:
        """torch's dtype for the scales if there is one, else uint8."""
        return _SCALE_DTYPES.get(self.scale, torch.uint8)


_FACTS: Final = tuple(field.name for field in dataclasses.fields(Spec))
_SCALE_DTYPES: Final = {
    "fp32": torch.float32,
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
}


def any_stochastic(*specs: Spec | None) -> bool:
    """Whether any of them draws random bits."""
    return any(s is not None and s.stochastic for s in specs)


@constant
def _facts_of_spec(text: str, changes: str) -> tuple[Any, ...]:
    """The attributes of a spec in their order, from the core."""
    try:
        facts = dict(_core.spec_facts_with(text, changes) if changes else _core.spec_facts(text))
    except ValueError:
        if text in spec_names() or text not in recipe_names():
            raise
        remedy = f"{text!r} is a recipe, for a whole layer: bs.linear(x, w, recipe={text!r})"
        fail("spec", "name", repr(text), f"one of {', '.join(spec_names())}", remedy)
    facts["block"] = tuple(facts["block"])
    facts["scale_rule"] = facts.pop("rule")  # under the name that `spec` takes
    facts["hadamard_mask"] = int(facts["hadamard_mask"], 16)
    return tuple(facts[name] for name in _FACTS)


@functools.cache
def _known_spec(text: str, changes: str) -> Spec:
    return _spec_of(_facts_of_spec(text, changes))


def _spec_of(facts: tuple[Any, ...]) -> Spec:
    return Spec(**dict(zip(_FACTS, facts, strict=True)))


def _change_text(key: str, value: object) -> str:
    """One change in the core's syntax: block=16x16, outer=false, hadamard=16:0xd7e8."""
    if value is None:
        return f"{key}=none"
    if isinstance(value, bool):
        return f"{key}={str(value).lower()}"
    if isinstance(value, tuple | list):
        if key == "hadamard" and len(value) == 2 and isinstance(value[1], int):
            return f"{key}={value[0]}:{value[1]:#x}"
        return f"{key}={'x'.join(str(v) for v in value)}"
    text = str(value)
    if "," in text or "=" in text:
        fail("spec", key, repr(value), "one value")
    return f"{key}={text}"


def spec(name: str | Spec, **changes: Any) -> Spec:
    """A named spec, or a copy of one with changes.

    Args:
        name: "nvfp4", "mxfp8", ... (`spec_names`), a spec's text such as "nvfp4[block=16x16]", or a
            Spec.
        changes: element="e5m2", block=(16, 16), rounding="nearest" or "stochastic", scale_rule (MX:
            "floor", "ceil", "even" or "rceil"; FP32 scales: "amax" or "pow2"), scale_rounding=
            "nearest" or "up", outer=False, hadamard=0, 16, 32, 64 or 128, or with a sign mask:
            (32, 0x9e3779b9), and scale=, which must be the scale that the name implies. The
            attributes of `Spec` explain them. A change of rounding also changes scale_rounding if
            that is the default of the old rounding, even where it was given by name.

    Returns:
        A Spec; a Spec passed as `name` is not changed.

    Raises:
        TypeError: the name is neither text nor a Spec.
        ValueError: unknown name or change, or a meaningless combination, with the reason.
    """
    if not isinstance(name, str | Spec):
        fail_type("spec", "name", name, "a name such as 'nvfp4', or a Spec")
    text = ",".join(_change_text(key, value) for key, value in changes.items())
    named = name.text if isinstance(name, Spec) else name
    if torch.compiler.is_compiling():  # it ignores caches
        return _spec_of(_facts_of_spec(named, text))
    return _known_spec(named, text)


def spec_names() -> tuple[str, ...]:
    """The names that `spec` knows."""
    return tuple(_core.facts()["specs"])


# Facts determined when a recipe is made.
_RECIPE_FACTS: Final = (
    "text", "forward_text", "later_x", "high_precision", "stochastic", "quantizes_x", "draws_dx",
    "draws_dw", "cuda_needs",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A spec for each operand of the three GEMMs of a linear layer; None means high precision.

    An operand that is None keeps the dtype of the layer's result, BF16 in a BF16 model or autocast;
    PyTorch's own GEMM multiplies it by the other operand, decoded.

    Args:
        name: a label: recipes are equal when their operands, keep_w and keep_x are. A text that
            `recipe` accepts cannot be the label of another recipe.
        fprop_x: x [M, K] of y = x·Wᵀ, quantized along axis -1 (K).
        fprop_w: W [N, K] of y = x·Wᵀ, along axis -1 (K).
        dgrad_dy: dy [M, N] of dx = dy·W, along axis -1 (N).
        dgrad_w: W [N, K] of dx = dy·W, along axis -2 (N).
        wgrad_dy: dy [M, N] of dW = dyᵀ·x, along axis -2 (M).
        wgrad_x: x [M, K] of dW = dyᵀ·x, along axis -2 (M).
        keep_w: whether a forward keeps dgrad_w for its backward, which takes a byte per weight in
            FP8. Otherwise it keeps W itself, which takes no extra memory where W is a parameter,
            and the backward quantizes W again. The results are the same bits. dgrad_w is always
            kept where tensor parallelism has cut W, and in programs of torch.export.
        keep_x: likewise, whether it keeps wgrad_x, or else x itself, which must then not change
            until the backward has run. Keeping x takes less memory where x is kept for something
            else, or where `torch.compile` can recompute it (also if wgrad_x is None); elsewhere it
            takes more (docs/guide.md, "Memory"). wgrad_x is always kept by layers over a mesh and
            in programs of torch.export.

    Attributes:
        text: the operands as the operators take them: their texts, in the order of `OPERANDS`.
        forward_text: the same, with "none" for operands that the forward does not make, as they are
            not kept.
        later_x: the same, with "none" for all but wgrad_x, if the backward makes it; else empty.
        quantizes_x: x's operands in fprop and wgrad are made from x alone, without random bits.
        high_precision: no operand is quantized.
        stochastic: at least one operand draws random bits.
        draws_dx: dgrad_dy draws random bits, so a backward to x needs a key.
        draws_dw: wgrad_dy draws random bits, so a backward to W needs a key.
        cuda_needs: what its GEMMs need that the GPU lacks; empty for a recipe that runs there.

    Raises:
        TypeError: an operand that is neither a Spec nor None, a name that is not a string, or a
            keep_w or keep_x that is not a bool.
        ValueError: two operands of a GEMM that cannot be multiplied, as their Hadamard transforms
            or block lengths differ; keep_w=False where dgrad_w draws random bits, or keep_x=False
            where wgrad_x does; the name of another recipe.
    """

    name: str = dataclasses.field(compare=False)
    fprop_x: Spec | None = None
    fprop_w: Spec | None = None
    dgrad_dy: Spec | None = None
    dgrad_w: Spec | None = None
    wgrad_dy: Spec | None = None
    wgrad_x: Spec | None = None
    keep_w: bool = True
    keep_x: bool = True
    # Computed once: a layer reads them in every forward.
    text: str = dataclasses.field(default="", init=False, repr=False, compare=False)
    forward_text: str = dataclasses.field(default="", init=False, repr=False, compare=False)
    later_x: str = dataclasses.field(default="", init=False, repr=False, compare=False)
    high_precision: bool = dataclasses.field(default=True, init=False, repr=False, compare=False)
    stochastic: bool = dataclasses.field(default=False, init=False, repr=False, compare=False)
    quantizes_x: bool = dataclasses.field(default=False, init=False, repr=False, compare=False)
    draws_dx: bool = dataclasses.field(default=False, init=False, repr=False, compare=False)
    draws_dw: bool = dataclasses.field(default=False, init=False, repr=False, compare=False)
    cuda_needs: str = dataclasses.field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            fail_type("recipe", "name", self.name, "text, a label")
        operands = [getattr(self, operand) for operand in OPERANDS]
        for operand, value in zip(OPERANDS, operands, strict=True):
            if value is not None and not isinstance(value, Spec):
                fail_type("recipe", operand, value, "a Spec, or None", "bs.spec(name) makes one")
        texts = ["none" if s is None else s.text for s in operands]
        text, later_x = " ".join(texts), ""
        for keep, operand in KEPT.items():
            if not isinstance(getattr(self, keep), bool):
                fail_type("recipe", keep, getattr(self, keep), "a bool")
            at, value = OPERANDS.index(operand), getattr(self, operand)
            if getattr(self, keep) or value is None:
                continue
            if value.stochastic:
                need = "True: another quantization would have to draw the random bits of the first"
                fail("recipe", keep, False, need, f"give {operand} rounding='nearest'")
            texts[at] = "none"
            if keep == "keep_x":
                later_x = " ".join([*["none"] * at, value.text])
        if _meaning_of(self.name) not in (None, (text, self.keep_w, self.keep_x)):
            remedy = f"choose another, or call bs.recipe({self.name!r}) for that one"
            fail("recipe", "name", repr(self.name), "one that names no other recipe", remedy)
        facts = (text, " ".join(texts), later_x, *_facts_of(text))
        for name, value in zip(_RECIPE_FACTS, facts, strict=True):
            object.__setattr__(self, name, value)

    def replace(
        self,
        *,
        name: str | None = None,
        keep_w: bool | None = None,
        keep_x: bool | None = None,
        **operands: Spec | str | None,
    ) -> Recipe:
        """A copy with some operands replaced.

        Args:
            name: of the copy; None for this recipe's name with the changes in brackets.
            keep_w, keep_x: None for this recipe's.
            operands: fprop_x, fprop_w, dgrad_dy, dgrad_w, wgrad_dy, wgrad_x: a Spec, its text, or
                None for high precision.

        Raises:
            TypeError, ValueError: as for `Recipe`; an unknown operand.
        """
        for key in operands:
            if key not in OPERANDS:
                refuse_change(key)
        specs = {k: None if v is None else spec(v) for k, v in operands.items()}
        changes = {k: "none" if v is None else v.text for k, v in specs.items()}
        kept = {k: v for k, v in (("keep_w", keep_w), ("keep_x", keep_x)) if v is not None}
        changes |= {k: str(v) for k, v in kept.items()}
        named = with_changes(self.name, changes) if name is None else name
        return dataclasses.replace(self, name=named, **kept, **specs)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return self.name

    def __deepcopy__(self, memo: object) -> Recipe:
        return self  # as a spec

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew: what its GEMMs need on a GPU was determined on another machine.
        operands = (getattr(self, operand) for operand in OPERANDS)
        return Recipe, (self.name, *operands, self.keep_w, self.keep_x)


# What torch.load may call and construct: both are data.
torch.serialization.add_safe_globals([spec, Recipe])


@constant
def _facts_of(text: str) -> tuple[bool | str, ...]:
    """The facts that follow from the text of a recipe; ValueError for operands that no GEMM can
    multiply."""
    parsed = (None if one == "none" else spec(one) for one in text.split(" "))
    operands = dict(zip(OPERANDS, parsed, strict=True))
    made = [s for s in operands.values() if s is not None]
    draws = {name for name, s in operands.items() if s is not None and s.stochastic}
    needs = ""
    for gemm, (a, b) in GEMMS.items():
        pair = {a: operands[a], b: operands[b]}
        _check_pair(gemm, pair)
        if None not in pair.values():
            each = (_core.matmul_needs(str(s), "cuda") for s in pair.values())
            needs = needs or next(filter(None, each), "")
    x_alone = operands["fprop_x"] is not None and not draws & {"fprop_x", "wgrad_x"}
    return not made, bool(draws), x_alone, "dgrad_dy" in draws, "wgrad_dy" in draws, needs


def _check_pair(gemm: str, pair: dict[str, Spec | None]) -> None:
    """Refuse two operands that no GEMM can multiply."""
    a, b = pair

    def compare(what: str, values: list[str], why: str, remedy: str) -> None:
        if values[0] != values[1]:
            got = f"{what} {values[0]} and {values[1]}"
            fail("recipe", f"{a}, {b}", got, f"the same {what} on both: {why}", remedy)

    transforms = [
        "none" if s is None or not s.hadamard else f"{s.hadamard}:{s.hadamard_mask:#x}"
        for s in pair.values()
    ]
    why = f"otherwise they do not cancel in {gemm}"
    compare("Hadamard transform", transforms, why, f"give {a} and {b} the same hadamard=")
    blocks = [str(s.block[1]) for s in pair.values() if s is not None]
    if len(blocks) == 2:
        why = f"{gemm} sums block by block along its contraction axis"
        compare("block length", blocks, why, f"use one family for {a} and {b}")


def _uniform(x: str, w: str, dy: str, wgrad_dy: str, wgrad_x: str) -> str:
    """A recipe's text with the same spec for W in fprop and dgrad."""
    return " ".join(spec(one).text for one in (x, w, dy, w, wgrad_dy, wgrad_x))


def _fp4(family: str) -> str:
    """nvfp4 and amdfp4: square blocks on W, stochastic dy, signed Hadamard 16 in wgrad."""
    return _uniform(
        x=family,
        w=f"{family}[block=16x16]",
        dy=f"{family}[rounding=stochastic]",
        wgrad_dy=f"{family}[rounding=stochastic,hadamard=16]",
        wgrad_x=f"{family}[hadamard=16]",
    )


def _named_texts() -> dict[str, str]:
    """`Recipe.text` of the named recipes (specification, section 9)."""
    fp8, mxfp8, mxfp4 = "fp8_1x128", "mxfp8", "mxfp4"
    mxfp4_wgrad = "mxfp4[hadamard=16:0x0]"
    return {
        "bf16": " ".join(["none"] * len(OPERANDS)),
        "fp8_blockwise": _uniform(x=fp8, w="fp8_128x128", dy=fp8, wgrad_dy=fp8, wgrad_x=fp8),
        "mxfp8": _uniform(x=mxfp8, w=mxfp8, dy=mxfp8, wgrad_dy=mxfp8, wgrad_x=mxfp8),
        "mxfp4": _uniform(
            x=mxfp4,
            w="mxfp4[block=32x32]",
            dy=mxfp4,
            wgrad_dy=mxfp4_wgrad,
            wgrad_x=mxfp4_wgrad,
        ),
        "nvfp4": _fp4("nvfp4"),
        "amdfp4": _fp4("amdfp4"),
    }


_NAMED: Final = _named_texts()


@functools.cache
def _parsed(name: str) -> tuple[str, str, bool, bool]:
    """The recipe that a text stands for: its label, `Recipe.text`, keep_w and keep_x."""
    if name in _NAMED:
        return name, _NAMED[name], True, True
    if not ("[" in name or "]" in name):
        known = recipe_names()
        remedy = did_you_mean(name, known)
        if name in spec_names():
            both = f"fprop_x={name!r}, fprop_w={name!r}"
            remedy = f"{name!r} is a spec, for one operand: bs.recipe(...).replace({both}, ...)"
        fail("recipe", "name", repr(name), f"one of {', '.join(known)}", remedy)
    of, changes = split_changes(name)
    label, text, *kept = _parsed(of)
    parts = dict(zip((*OPERANDS, *KEPT), (*text.split(" "), *map(str, kept)), strict=True))
    for key, value in changes.items():
        if key in KEPT:
            changes[key] = value.capitalize()
        else:
            changes[key] = "none" if value in ("none", "None") else spec(value).text
    parts |= changes
    text = " ".join(parts[operand] for operand in OPERANDS)
    keep_w, keep_x = (parts[key] == "True" for key in KEPT)
    return with_changes(label, changes), text, keep_w, keep_x


_parts_of = constant(_parsed)


@constant
def _meaning_of(name: str) -> tuple[str, bool, bool] | None:
    """The same without the label; None for a text that stands for no recipe."""
    try:
        return _parsed(name)[1:]
    except ValueError:
        return None


def _made(name: str) -> Recipe:
    label, text, keep_w, keep_x = _parts_of(name)
    texts = text.split(" ")
    # Each once: a compiler traces what makes them.
    specs = {one: None if one == "none" else spec(one) for one in dict.fromkeys(texts)}
    operands: Any = [specs[one] for one in texts]
    return Recipe(label, *operands, keep_w, keep_x)  # type: ignore[call-arg]


_known_recipe = functools.cache(_made)
_RECIPES: Final = {name: _known_recipe(name) for name in _NAMED}


def recipe(name: str | Recipe) -> Recipe:
    """A named recipe (`recipe_names`), or one with changes; a Recipe is returned unchanged.

    Args:
        name: "nvfp4", "fp8_blockwise", ..., or a name with the arguments of `Recipe.replace` in
            brackets, as `str(recipe)` writes it: "fp8_blockwise[wgrad_x=fp8_128x128,keep_w=False]",
            "nvfp4[wgrad_dy=none,wgrad_x=none]", "mxfp8[fprop_w=mxfp8[block=32x32]]".

    Raises:
        TypeError: neither text nor a Recipe.
        ValueError: unknown name (the message lists the known ones); changes that cannot be parsed,
            or that `Recipe.replace` refuses.
    """
    if isinstance(name, Recipe):
        return name
    if not isinstance(name, str):
        fail_type("recipe", "name", name, "a name such as 'nvfp4', or a Recipe (not a Spec)")
    if name in _RECIPES:
        return _RECIPES[name]
    return _made(name) if torch.compiler.is_compiling() else _known_recipe(name)


def recipe_names() -> tuple[str, ...]:
    """The names that `recipe` knows."""
    return tuple(_NAMED)
