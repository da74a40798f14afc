"""What the commands print to, and draw in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console


class Output(Console):
    """Standard output. Paths and names of tensors are printed as they are: what looks like an emoji
    in them is none, nor are brackets markup, unless `markup` says so. A reader that goes away is an
    error of the output like any other (rich would end the process without a word)."""

    def __init__(self, width: int | None = None, markup: bool = False) -> None:
        super().__init__(width=width, markup=markup, emoji=False)

    def on_broken_pipe(self) -> None:
        raise


def output(width_in_a_file: int, markup: bool = False) -> Output:
    """That of tables, in a file rather wide than folded."""
    console = Output(markup=markup)
    return console if console.is_terminal else Output(width_in_a_file, markup)


@contextlib.contextmanager
def own_style() -> Iterator[None]:
    """Pictures look alike whatever a user has set for their own."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield
