"""The output of the commands: console and plots."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from blockscale.cli.errors import Failure, printable
from blockscale.cli.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, distinguishable with any colour vision; markers differ too.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
CHARACTERS_PER_INCH = 10  # of a legend's text, at least


def colour_and_marker(index: int) -> dict[str, str]:
    """How a plot shows one of many: after the last colour, the markers go on shifted by one."""
    shift = index // len(COLOURS)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[(index + shift) % len(MARKERS)],
    }


class Output(Console):
    """Standard output. Paths and tensor names are printed as they are: nothing in them is taken for
    an emoji, nor brackets for markup unless `markup` is set, nor for commands to the terminal. A
    reader that goes away is an output error like any other (rich would silently end the process).
    In a file, tables are `width_in_a_file` wide instead of folded."""

    def __init__(self, width_in_a_file: int | None = None, markup: bool = False) -> None:
        super().__init__(markup=markup, emoji=False)
        if width_in_a_file is not None and not self.is_terminal:
            self.width = width_in_a_file

    def on_broken_pipe(self) -> None:
        raise

    def render_str(self, text: str, **options: Any) -> Text:  # cells of tables come here, too
        lines = text.split("\n")
        return super().render_str("\n".join(map(printable, lines)), **options)


def write_picture(path: Path, draw: Callable[[], bytes], remedy: str) -> bool:
    """Draws a picture and writes it; returns whether there is one, as `draw` may return nothing.

    Failure if it cannot be drawn, whatever is wrong with the user's matplotlib: the figures, which
    took the time, have been kept before, and `remedy` says how to draw them again.
    """
    try:
        with own_style():
            picture = draw()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Failure(f"{path} (not drawn, {reason}); need matplotlib; {remedy}") from error
    if picture:
        write_atomically(path, lambda file: file.write(picture))
    return bool(picture)


@contextlib.contextmanager
def own_style() -> Iterator[None]:
    """Makes pictures look alike, whatever style the user has configured."""
    # matplotlib cannot be imported with a backend that it does not find, such as a notebook's,
    # which the processes started there inherit. Files need none.
    os.environ["MPLBACKEND"] = "agg"
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


def shortened(name: str, most: int = 64) -> str:
    """A name in a picture; of a long one, the ends say most."""
    half = most // 2
    return name if len(name) <= most else f"{name[: half - 1]}…{name[-half:]}"


def shared_legend(figure: Figure, axes: Axes, where: str) -> None:
    """One legend for all panels, outside them, of what `axes` shows, in as many columns as the
    longest label leaves room for. The figure grows by its rows, so the panels do not shrink."""
    handle = 8  # its width and the gaps around it, in characters
    room = int(CHARACTERS_PER_INCH * figure.get_figwidth())
    handles, names = axes.get_legend_handles_labels()
    labels = [shortened(name, room - handle) for name in names]
    columns = max(1, room // (max(map(len, labels)) + handle))
    rows = math.ceil(len(labels) / columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * rows)
    figure.legend(
        handles, labels, loc=f"outside {where} center", ncols=math.ceil(len(labels) / rows),
        frameon=False,
    )  # fmt: skip
