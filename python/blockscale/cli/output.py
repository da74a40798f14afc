"""The output of the commands: console and plots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console


class Output(Console):
    """Standard output. Paths and tensor names are printed as they are: nothing in them is taken for
    an emoji, nor brackets for markup unless `markup` is set. A reader that goes away is an output
    error like any other (rich would silently end the process). In a file, tables are
    `width_in_a_file` wide instead of folded."""

    def __init__(self, width_in_a_file: int | None = None, markup: bool = False) -> None:
        super().__init__(markup=markup, emoji=False)
        if width_in_a_file is not None and not self.is_terminal:
            self.width = width_in_a_file

    def on_broken_pipe(self) -> None:
        raise


@contextlib.contextmanager
def own_style() -> Iterator[None]:
    """Makes pictures look alike, whatever style the user has configured."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield
