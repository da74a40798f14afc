"""Live progress of a run: bars on a terminal, an occasional plain line elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

PLAIN_EVERY = 10.0  # seconds between two plain lines
WIDE = 80  # characters in a line, enough for all columns


def columns() -> list[ProgressColumn]:
    """Name, bar, steps, loss, speed and time left."""
    return [
        TextColumn("{task.description:<22}", markup=False),  # recipes may contain brackets
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    ]


def narrow_columns(width: int, total: int) -> list[ProgressColumn]:
    """The same without speed and `left`. Names are not padded, and cut off where the rest would not
    fit; the bar takes what is left."""
    rest = len(f" ━━━━ {total}/{total} loss 5.545 0:00:00")
    name = Column(no_wrap=True, overflow="ellipsis", max_width=max(4, width - rest))
    return [
        TextColumn("{task.description}", markup=False, table_column=name),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
    ]


class LiveProgress:
    """Shows step, loss, tokens per second and time left; a context manager."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        """`total`: steps over all trainings of the run; `done`: those of an earlier process."""
        self.console = console
        self.total = total
        self.done = done
        self.before = done
        self.begin = self.last = time.monotonic()
        self.narrow = console.is_terminal and console.width < WIDE
        self.bars = Progress(
            *(narrow_columns(console.width, total) if self.narrow else columns()),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.whole: TaskID = self.bars.add_task("all", total=total, completed=done, status="")
        self.current: TaskID | None = None
        self.name = ""

    def __enter__(self) -> LiveProgress:
        self.bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bars.stop()

    def start(self, name: str, step: int, steps: int) -> None:
        """A training begins (or continues) at `step`."""
        if self.current is not None:
            self.bars.remove_task(self.current)
        self.name = name
        self.current = self.bars.add_task(name, total=steps, completed=step, status="")

    def step(self, step: int, steps: int, loss: float, tokens_per_second: float) -> None:
        """Another step is done."""
        self.done += 1
        status = f"loss {loss:.3f}"
        if not self.narrow:
            status += f"  {tokens_per_second:,.0f} tokens/s"
        self.bars.update(self.whole, completed=self.done)
        if self.current is not None:
            self.bars.update(self.current, completed=step, status=status)
        if not self.console.is_terminal and time.monotonic() - self.last > PLAIN_EVERY:
            self.last = time.monotonic()
            self.say(f"{self.name}  step {step}/{steps}  {status}  {self.time_left()} left")

    def time_left(self) -> str:
        """Time left for the whole run, from the mean pace of this process."""
        pace = (time.monotonic() - self.begin) / max(1, self.done - self.before)
        seconds = round(pace * (self.total - self.done))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self.console.print(text, highlight=False, soft_wrap=True)
