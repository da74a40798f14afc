"""tools/api.py: what becomes of signatures and docstrings; no public name is left out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import api

DOCSTRING = """One line.

More of it, and docs/rng.md.

Args:
    x, y: two of them,
        which go on.
    **rest: any.

Returns:
    A thing.

Example:
    f(1)
"""
MARKDOWN = """One line.

More of it, and [rng.md](rng.md).

**Args**

- `x`, `y`: two of them,
  which go on.
- `**rest`: any.

**Returns**

A thing.

**Example**

```python
f(1)
```"""


def test_a_docstring_becomes_markdown() -> None:
    assert api.markdown(DOCSTRING) == MARKDOWN
    assert api.markdown("One line.") == "One line."


def example(a: int, *more: str, b: str = "x", **rest: float) -> bool:
    return not (a, more, b, rest)


def test_a_signature_is_that_of_the_source() -> None:
    want = 'f(a: int, *more: str, b: str = "x", **rest: float) -> bool'
    assert api.signature("f", example) == f"```python\n{want}\n```"


@contextlib.contextmanager
def context() -> Iterator[int]:
    yield 1


def test_what_a_context_gives_is_a_context_manager() -> None:
    want = "f() -> AbstractContextManager[int]"
    assert api.signature("f", context) == f"```python\n{want}\n```"


def test_a_public_name_without_a_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {title: names for title, names in api.GROUPS.items() if title != "Products"}
    monkeypatch.setattr(api, "GROUPS", groups)
    with pytest.raises(SystemExit, match="has to name grouped_matmul, matmul once"):
        api.page()
