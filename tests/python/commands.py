"""The command, run inside the process of the tests."""

from __future__ import annotations

import pytest
from blockscale.cli.main import main


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr of a command that must be refused."""
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.rstrip()
