"""What the commands print to, and draw in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console


class Output(Console):
    """Standard output. Paths and names of tensors are printed as they are: what looks like an emoji
    in them is none, nor are brackets markup, unless `markup` says so. A reader that goes away is an
    error of the output like any other (rich would end the process without a word). Tables are
    rather `width_in_a_file` wide there than folded."""

    def __init__(self, width_in_a_file: int | None = None, markup: bool = False) -> None:
        super().__init__(markup=markup, emoji=False)
        if width_in_a_file is not None and not self.is_terminal:
            self.width = width_in_a_file

    def on_broken_pipe(self) -> None:
        raise


@contextlib.contextmanager
def own_style() -> Iterator[None]:
    """Pictures look alike whatever a user has set for their own."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield
