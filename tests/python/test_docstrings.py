"""What `help` shows of every public name: each argument, the result, and what is refused."""

from __future__ import annotations

import dataclasses
import inspect
import re

import blockscale as bs
import pytest

FUNCTIONS = [name for name in bs.__all__ if inspect.isfunction(getattr(bs, name))]
VALUES = [name for name in bs.__all__ if dataclasses.is_dataclass(getattr(bs, name))]
NO_REFUSALS = {"describe", "recipe_names", "spec_names"}  # they take nothing


def sections(text: str) -> dict[str, str]:
    """The indented text under `Args:` and its like."""
    return dict(re.findall(r"^(Args|Attributes|Returns|Raises):\n((?:(?: .*)?\n)+)", text, re.M))


def listed(section: str) -> set[str]:
    """The names that an `Args:` explains, `a, b: both` too."""
    found = re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*):", section, re.M)
    return {name for names in found for name in names.split(", ")}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_say_what_they_take_and_give(name: str) -> None:
    function = getattr(bs, name)
    text = (inspect.getdoc(function) or "") + "\n"
    found, signature = sections(text), inspect.signature(function)
    names = set(signature.parameters)
    if names != {"name"}:  # a single name, which the first line explains
        assert listed(found.get("Args", "")) == names
    one_line = text.count("\n") == 1
    assert one_line or "Raises" in found or name in NO_REFUSALS
    returns = signature.return_annotation
    said = "Returns" in found or one_line or name == "recipe"
    assert said == (returns != "None")


@pytest.mark.parametrize("name", VALUES)
def test_values_say_what_they_hold(name: str) -> None:
    value = getattr(bs, name)
    found = sections((inspect.getdoc(value) or "") + "\n")
    explained = listed(found.get("Args", "")) | listed(found.get("Attributes", ""))
    assert explained == {field.name for field in dataclasses.fields(value)}


def test_layouts_are_all_explained() -> None:
    text = inspect.getdoc(bs.quantize) or ""
    for layout in bs.describe()["layouts"]:
        assert f'- "{layout["name"]}": ' in text
