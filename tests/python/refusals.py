"""What the tests of bad input ask of an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(kind: type[Exception], call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(kind) as error:
        call()
    text = str(error.value)
    assert error.type is kind
    assert "\n" not in text
    assert "; need " in text, text
    for word in words:
        assert word in text, text


def value_error(call: Callable[[], Any], *words: str) -> None:
    refused(ValueError, call, *words)


def type_error(call: Callable[[], Any], *words: str) -> None:
    refused(TypeError, call, *words)
