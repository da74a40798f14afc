"""Writes docs/api.md from the signatures and docstrings of the package's public names: those of
`blockscale.__all__`, the modules of `blockscale.nn`, and the classes of what results hold.
`--check` only compares."""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import blockscale as bs
import torch
from blockscale.measure import Operand, Product
from tables import ROOT

PAGE = ROOT / "docs" / "api.md"

# By what one wants to do.
GROUPS: dict[str, list[str]] = {
    "Formats and quantizing": [
        "spec", "spec_names", "Spec", "quantize", "quantize_dual", "amax", "dequantize", "relayout",
        "QuantizedTensor",
    ],
    "Products": ["matmul", "grouped_matmul"],
    "Layers": [
        "linear", "grouped_linear", "quantize_weight", "QuantizedWeight", "quantized_weights",
        "nn.Linear", "nn.GroupedLinear",
    ],
    "Over ranks": ["quantized_all_gather", "quantized_all_to_all"],
    "Converting and training": [
        "convert", "Report", "revert", "attach", "advance", "rng_state", "set_step",
    ],
    "Recipes": ["recipe", "recipe_names", "Recipe"],
    "What a recipe costs": ["measure", "Measurement", "Product", "Operand"],
    "Random bits": ["Rng"],
    "What runs where": ["describe", "explain"],
}  # fmt: skip
# Classes of what results hold: `bs` itself does not have them.
HELD: dict[str, type] = {"Product": Product, "Operand": Operand}
# What those of `blockscale.nn` have in common.
COMMON = (bs.nn.Layer, bs.nn.WeightLayer)
# Public by their name alone: what the package itself calls.
INTERNAL = {"QuantizedTensor.outer_or_empty", "QuantizedWeight.operands_of"}

HEAD = """# Reference

Every public name of `import blockscale as bs`, with its docstring. Written by `tools/api.py`: edit
the docstrings, then run it. Classes without `bs.` describe what a result holds.
[guide.md](guide.md) shows how the parts go together."""


def public_names() -> set[str]:
    """What the page has to name, each once."""
    layers = (name for name, value in vars(bs.nn).items() if is_layer(value))
    return set(bs.__all__) - {"nn"} | {f"nn.{name}" for name in layers} | set(HELD)


def is_layer(value: Any) -> bool:
    """Whether it is a module that blockscale.nn defines, but for what they have in common."""
    layer = inspect.isclass(value) and issubclass(value, torch.nn.Module)
    return layer and value.__module__ == bs.nn.__name__ and value not in COMMON


# --- signatures -----------------------------------------------------------------------------------


def parameters(of: Callable[..., Any]) -> Iterator[str]:
    """Each parameter as it is written, a lone `*` included; without self."""
    named_only = False
    for p in inspect.signature(of).parameters.values():
        if p.name == "self":
            continue
        if p.kind is p.KEYWORD_ONLY and not named_only:
            yield "*"
        named_only |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        stars = 2 if p.kind is p.VAR_KEYWORD else p.kind is p.VAR_POSITIONAL
        text = "*" * stars + p.name
        typed = p.annotation is not p.empty
        text += f": {p.annotation}" if typed else ""
        if p.default is not p.empty:
            value = json.dumps(p.default) if isinstance(p.default, str) else repr(p.default)
            text += f" = {value}" if typed else f"={value}"
        yield text


def signature(name: str, of: Callable[..., Any]) -> str:
    """As Python has it, on one line if it fits."""
    returned = "" if isinstance(of, type) else inspect.signature(of).return_annotation
    wrapped = inspect.unwrap(of)
    if inspect.isgeneratorfunction(wrapped) and wrapped is not of:  # by contextlib.contextmanager
        returned = returned.replace("Iterator", "AbstractContextManager", 1)
    result = f" -> {returned}" if returned not in ("", inspect.Signature.empty) else ""
    listed = list(parameters(of))
    line = f"{name}({', '.join(listed)}){result}"
    if len(line) > 96:
        line = "\n".join([f"{name}(", *(f"    {p}," for p in listed), f"){result}"])
    return f"```python\n{line}\n```"


# --- docstrings -----------------------------------------------------------------------------------

SECTION = re.compile(r"^([A-Z][\w ]*):$")
ENTRY = re.compile(r"^([\w*.]+(?:, [\w*.]+)*): (.*)$")
LISTED = ("Args", "Attributes", "Keys", "Raises")


def markdown(docstring: str) -> str:
    """A docstring in Google's form: text, then sections."""
    title, body, parts = "", [], []
    for line in [*docstring.splitlines(), "End:"]:
        found = SECTION.match(line)
        if not found:
            body.append(line)
            continue
        parts.append(section(title, textwrap.dedent("\n".join(body)).strip("\n")))
        title, body = found[1], []
    text = "\n\n".join(part for part in parts if part)
    return re.sub(r"(?<![\w/\[])(?<!\]\()docs/([\w/]+\.md)", r"[\1](\1)", text)


def section(title: str, body: str) -> str:
    """One of them: entries as a list, an example as code."""
    if not title:
        return body
    if title.startswith("Example") and "```" not in body:
        return f"**{title}**\n\n```python\n{body}\n```"
    if title in LISTED:
        body = "\n".join(entries(body))
    return f"**{title}**\n\n{body}"


def entries(body: str) -> Iterator[str]:
    """Lines of a list, one item for each entry; what is no entry stays as it is."""
    for line in body.splitlines():
        found = ENTRY.match(line)
        if found:
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            yield f"- {names}: {found[2]}"
        else:
            yield re.sub("^    ", "  ", line)


# --- the page -------------------------------------------------------------------------------------


def doc(name: str, of: object) -> str:
    text = inspect.getdoc(of)
    if not text:
        sys.exit(f"tools/api.py: {name} has no docstring")
    return markdown(text)


def members(name: str, cls: type) -> Iterator[str]:
    """Public methods and properties that a class defines; of a layer its forward alone."""
    for key, value in vars(cls).items():
        full = f"{name}.{key}"
        if key.startswith("_") or full in INTERNAL or (is_layer(cls) and key != "forward"):
            continue
        if isinstance(value, property) and value.fget:
            text = markdown(inspect.getdoc(value) or "")
            returned = inspect.signature(value.fget).return_annotation
            yield f"```python\n{full}: {returned}\n```" + (f"\n\n{text}" if text else "")
        elif inspect.isfunction(value):
            yield f"{signature(full, value)}\n\n{doc(full, value)}"


def anchors() -> dict[str, str]:
    """Where each name's heading can be linked to: `recipe` and `Recipe` differ by a number."""
    seen: dict[str, int] = {}
    found = {}
    for title, names in GROUPS.items():
        for heading in (title, *names):
            slug = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
            count = seen[slug] = seen.get(slug, -1) + 1
            found[heading] = f"{slug}-{count}" if count else slug
    return found


def page() -> str:
    """The whole of docs/api.md."""
    named = [name for names in GROUPS.values() for name in names]
    wrong = sorted({*(public_names() ^ set(named)), *(n for n in named if named.count(n) > 1)})
    if wrong:
        sys.exit(f"tools/api.py: GROUPS has to name {', '.join(wrong)} once, if public, else never")
    links = anchors()
    rows = [
        f"| [{title}](#{links[title]}) | "
        + ", ".join(f"[`{name}`](#{links[name]})" for name in names)
        + " |"
        for title, names in GROUPS.items()
    ]
    parts = [HEAD, "\n".join(["| | |", "|---|---|", *rows])]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        for name in names:
            value: Any = HELD.get(name) or functools.reduce(getattr, name.split("."), bs)
            shown = name if name in HELD else f"bs.{name}"
            parts += [f"### `{name}`", signature(shown, value), doc(name, value)]
            if isinstance(value, type):
                parts += members(name, value)
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def main() -> None:
    """Write the page, or say that it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit("docs/api.md is out of date; run: .venv/bin/python tools/api.py")


if __name__ == "__main__":
    main()
