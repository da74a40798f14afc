"""Recipes as text: NAME, or NAME[operand=spec,...]."""

from __future__ import annotations

from typing import Final, NoReturn

from blockscale._errors import did_you_mean, fail

# The operands of the three GEMMs of y = x·Wᵀ, two per GEMM.
GEMMS: Final = {
    "fprop": ("fprop_x", "fprop_w"),  # y [M, N], contraction K
    "dgrad": ("dgrad_dy", "dgrad_w"),  # dx [M, K], contraction N
    "wgrad": ("wgrad_dy", "wgrad_x"),  # dW [N, K], contraction M
}
OPERANDS: Final = tuple(operand for pair in GEMMS.values() for operand in pair)
# The switches for what a forward keeps for its backward, and the operand of each.
KEPT: Final = {"keep_w": "dgrad_w", "keep_x": "wgrad_x"}


def with_changes(name: str, changes: dict[str, str]) -> str:
    """The text of a recipe with changes."""
    inside = ",".join(f"{key}={value}" for key, value in changes.items())
    return f"{name}[{inside}]" if inside else name


def split_changes(text: str) -> tuple[str, dict[str, str]]:
    """The reverse: what the last brackets change, and the name before them."""
    need = "NAME[operand=spec,...], such as 'fp8_blockwise[wgrad_x=fp8_128x128,keep_w=False]'"
    text = text.strip()
    opens = [i for i, letter in enumerate(text) if letter == "["]
    if len(opens) != text.count("]"):
        fail("recipe", "name", repr(text), need, "close every bracket that is opened")
    if len(opens) > 100:
        fail("recipe", "name", f"{text[:60]!r}...", "at most 100 brackets")
    # The opening bracket that matches the last one.
    start = next((i for i in reversed(opens) if text.count("[", i) == text.count("]", i)), -1)
    if start < 1 or not text.endswith("]"):
        fail("recipe", "name", repr(text), need)
    changes: dict[str, str] = {}
    for part in split_outside_brackets(text[start + 1 : -1]):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not (key and equals and value) or key in changes:
            fail("recipe", "name", repr(text), need)
        if key not in (*OPERANDS, *KEPT):
            refuse_change(key)
        if key in KEPT and value not in ("True", "False", "true", "false"):
            fail("recipe", key, value, "True or False")
        changes[key] = value
    return text[:start].strip(), changes


def split_outside_brackets(text: str) -> list[str]:
    """The parts between the commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def refuse_change(key: str) -> NoReturn:
    """Refuse a change of something else."""
    need = f"one of {', '.join(OPERANDS)}, {' or '.join(KEPT)}"
    fail("recipe", "operand", repr(key), need, did_you_mean(key, (*OPERANDS, *KEPT)))
