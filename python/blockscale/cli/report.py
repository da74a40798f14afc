"""The end of a run: the table, report.md and loss.png, all from settings.json and metrics.jsonl."""

from __future__ import annotations

import io
import itertools
import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from blockscale._errors import counted
from blockscale.cli.data import Corpus, bits_per_byte
from blockscale.cli.doctor import processor_name
from blockscale.cli.files import write_atomically
from blockscale.cli.output import colour_and_marker, shared_legend, write_picture
from blockscale.cli.run_folder import Cell, RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASELINE = "bf16"
# In the row of the last validation, if the recipe quantizes (Trainer._noise).
NOISE = {"fprop_db": "y", "dgrad_db": "dx", "wgrad_db": "dW"}
HEADINGS = ("recipe", "validation (nats)", "bits per byte", "gap to BF16 (nats)", "tokens/s")


@dataclass(frozen=True)
class Result:
    """One recipe's outcome, means over the seeds."""

    recipe: str
    loss: float
    gap: float | None  # None without a BF16 training to compare with
    spread: float | None  # sample standard deviation of the gap; None with one seed
    tokens_per_second: float

    def cells(self) -> tuple[str, ...]:
        """The row of the table, as text."""
        if self.gap is None or self.recipe == BASELINE:
            gap = "–"
        elif math.isnan(self.gap):  # one of the two diverged
            gap = "nan"
        else:
            gap = f"{self.gap:+.4f}" + ("" if self.spread is None else f" ± {self.spread:.4f}")
        bits = bits_per_byte(self.loss)
        return (
            self.recipe, f"{self.loss:.4f}", f"{bits:.4f}", gap, f"{self.tokens_per_second:,.0f}"
        )  # fmt: skip


def curve(folder: RunFolder, cell: Cell, key: str) -> dict[int, float]:
    """step -> value of one metric of one training."""
    return {
        row["step"]: row[key]
        for row in folder.rows
        if key in row and row["seed"] == cell.seed and row["recipe"] == cell.recipe
    }


def seed_curves(folder: RunFolder, recipe: str, key: str) -> list[dict[int, float]]:
    """One curve per seed, in the order of the seeds."""
    return [curve(folder, cell, key) for cell in folder.cells() if cell.recipe == recipe]


def gaps(folder: RunFolder, recipe: str) -> dict[int, list[float]]:
    """step -> validation loss minus BF16's for the same seed, one number per seed; empty without
    BF16."""
    ours = seed_curves(folder, recipe, "validation_loss")
    theirs = seed_curves(folder, BASELINE, "validation_loss")
    if not theirs:
        return {}
    pairs = list(zip(ours, theirs, strict=True))
    return {step: [a[step] - b[step] for a, b in pairs] for step in ours[0]}


def deviation_of(values: Sequence[float]) -> float:
    """The standard deviation; NaN if a training diverged, which `statistics` does not accept."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def results(folder: RunFolder) -> list[Result]:
    """The final figures of every recipe. The pace is that of the median step, without
    evaluation."""
    settings = folder.settings
    tokens = settings["batch_size"] * settings["seq_len"]
    found = []
    for recipe in settings["recipes"]:
        losses = [c[settings["steps"]] for c in seed_curves(folder, recipe, "validation_loss")]
        gap = gaps(folder, recipe).get(settings["steps"])
        seconds = [
            row["seconds"] for row in folder.rows if row["recipe"] == recipe and "train_loss" in row
        ]
        found.append(
            Result(
                recipe=recipe,
                loss=statistics.fmean(losses),
                gap=statistics.fmean(gap) if gap else None,
                spread=deviation_of(gap) if gap and len(gap) > 1 else None,
                tokens_per_second=tokens / statistics.median(seconds),
            )
        )
    return found


def print_table(folder: RunFolder, console: Console) -> None:
    """The comparison, on the console."""
    table = Table(title=f"{folder.settings['preset']}, {steps_of(folder.settings)}")
    for heading in HEADINGS:
        justify: Any = "left" if heading == "recipe" else "right"
        table.add_column(heading, justify=justify, overflow="fold")
    for result in results(folder):
        table.add_row(*result.cells())
    console.print(table)


def write_report(folder: RunFolder, corpus: Corpus, remedy: str) -> None:
    """Writes report.md, then loss.png; `remedy` as for `write_picture`."""
    unigram = corpus.unigram_loss()
    text = markdown(folder, corpus, unigram).encode(errors="surrogateescape")
    write_atomically(folder.path / "report.md", lambda file: file.write(text))
    write_picture(folder.path / "loss.png", lambda: draw(folder, unigram), remedy)


def markdown(folder: RunFolder, corpus: Corpus, unigram: float) -> str:
    """The text of report.md."""
    settings = folder.settings
    lines = [
        f"# {', '.join(settings['recipes'])}: preset {settings['preset']}, "
        f"{steps_of(settings)}, {seed_range(settings)}",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|---|" + "---:|" * (len(HEADINGS) - 1),
        *(f"| {' | '.join(result.cells())} |" for result in results(folder)),
        "",
        "Every recipe starts from the same initial weights and sees the same batches. The gap is "
        "taken seed by seed; after ± stands its standard deviation over the seeds (left out with "
        "one seed). Tokens/s is from the median step, evaluation apart. A model that knows only "
        f"how frequent each byte is scores {unigram:.4f} nats, "
        f"{bits_per_byte(unigram):.4f} bits per byte.",
        "",
        "![Training loss, validation loss and gap to BF16](loss.png)",
        "",
        *noise_table(folder),
        f"Text: {corpus.source}; {corpus.split}; {len(corpus.train):,} and "
        f"{len(corpus.validation):,} bytes.",
        "",
        "| setting | value |",
        "|---|---|",
    ]
    for key, value in (settings | settings["environment"]).items():
        if key not in ("environment", "data"):
            shown = ", ".join(value) if isinstance(value, list) else value
            if key == "instruction_set":
                shown = processor_name(str(value))
            lines.append(f"| {key} | {shown} |")
    return "\n".join([*lines, "", "To repeat:", "", f"    {command(settings)}", ""])


def noise_table(folder: RunFolder) -> list[str]:
    """Lines on the quantization noise in the results of layers, if the run has measured it."""
    settings = folder.settings
    found = {}
    for recipe in settings["recipes"]:
        columns = [
            [db for curve in seed_curves(folder, recipe, key) for db in curve.values()]
            for key in NOISE
        ]
        if any(columns):
            found[recipe] = [f"{statistics.fmean(of):.1f}" if of else "–" for of in columns]
    if not found:
        return []
    return [
        "What quantization adds to a layer's results, by `blockscale.measure` in a step with the "
        "final weights on a batch of the validation text: signal to noise in dB, the layers' "
        "median, the mean over the seeds.",
        "",
        f"| recipe | {' | '.join(NOISE.values())} |",
        "|---|" + "---:|" * len(NOISE),
        *(f"| {recipe} | {' | '.join(cells)} |" for recipe, cells in found.items()),
        "",
    ]


def steps_of(settings: dict[str, Any]) -> str:
    """`1 step` or `300 steps`."""
    return counted(settings["steps"], "step")


def seed_range(settings: dict[str, Any]) -> str:
    """`seed 0` or `seeds 0 to 2`."""
    first, last = settings["seed"], settings["seed"] + settings["seeds"] - 1
    return f"seed {first}" if first == last else f"seeds {first} to {last}"


def command(settings: dict[str, Any]) -> str:
    """The command that repeats a run."""
    words = ["blockscale", "train"]
    for key, value in settings.items():
        if key in ("environment", "data_sha256") or value == []:
            continue
        words.append("--" + key.replace("_", "-"))
        if key == "recipes":
            words.append(",".join(value))
        else:
            words += [str(v) for v in value] if isinstance(value, list) else [str(value)]
    return shlex.join(words)


def draw(folder: RunFolder, unigram: float) -> bytes:
    """loss.png: training and validation loss on the left, the gap to BF16 on the right."""
    from matplotlib.figure import Figure

    settings = folder.settings
    figure = Figure(figsize=(12, 5), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    compared = {*settings["recipes"]} - {BASELINE} if BASELINE in settings["recipes"] else set()
    for index, recipe in enumerate(settings["recipes"]):
        style = colour_and_marker(index)
        # Hollow markers that shrink and lines that thin out, since most of them coincide.
        shrink = 1.0 - index / (len(settings["recipes"]) + 3)
        draw_losses(left, folder, recipe, style, shrink)
        if recipe in compared:
            draw_gap(right, folder, recipe, style, index)
    left.axhline(unigram, color="0.5", linestyle=":", linewidth=1.2)
    left.annotate(
        "byte frequencies alone", (settings["steps"], unigram), (0, 3),
        textcoords="offset points", ha="right", color="0.35", fontsize=9,
    )  # fmt: skip
    # Nonfinite values give the axes no range.
    left.set(xlim=(0, 1.05 * settings["steps"]), ylim=(None, top(folder, unigram)))
    left.set(xlabel="step", ylabel="loss (nats per byte)")
    left.set_title("Training (line, smoothed) and validation (points)")
    right.axhline(0.0, color="0.5", linewidth=1.0)
    right.set(xlabel="step", ylabel="validation loss above BF16 (nats per byte)")
    right.set_xlim(left.get_xlim())
    right.set_title("Gap to BF16" + (", mean ± deviation" if settings["seeds"] > 1 else ""))
    if not compared:
        note = "needs bf16 and one more recipe in --recipes"
        right.text(0.5, 0.6, note, transform=right.transAxes, ha="center", color="0.35")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(color="0.9", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    shared_legend(figure, left, "lower")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def top(folder: RunFolder, unigram: float) -> float:
    """The upper end of the loss axis: leaves out untrained weights, but not a diverging
    training."""
    losses: list[float] = [
        row["validation_loss"] for row in folder.rows if "validation_loss" in row
    ]
    return max([1.25 * unigram, *(1.05 * loss for loss in losses if math.isfinite(loss))])


def labelled(recipe: str, points: dict[int, float]) -> str:
    """The recipe in a legend, with the step after which it has no finite point to show."""
    shown = max((step for step, value in points.items() if math.isfinite(value)), default=0)
    lost = [step for step in points if step > shown]
    return f"{recipe}: not finite from step {lost[0]}" if lost else recipe


def draw_losses(
    axes: Axes, folder: RunFolder, recipe: str, style: dict[str, Any], shrink: float
) -> None:
    """The smoothed training curve and the validation points, means over the seeds."""
    train = mean_curve(seed_curves(folder, recipe, "train_loss"))
    smooth = smoothed(list(train.values()))
    axes.plot(list(train), smooth, color=style["color"], linewidth=2.5 * shrink)
    points = mean_curve(seed_curves(folder, recipe, "validation_loss"))
    axes.plot(
        list(points), list(points.values()), linestyle="", markersize=11 * shrink,
        fillstyle="none", markeredgewidth=1.5, label=labelled(recipe, points), **style,
    )  # fmt: skip


def draw_gap(axes: Axes, folder: RunFolder, recipe: str, style: dict[str, Any], index: int) -> None:
    """The gap at every evaluation, with its deviation over the seeds."""
    found = gaps(folder, recipe)
    steps, values = list(found), list(found.values())
    means = [statistics.fmean(v) for v in values]
    if len(values[0]) > 1:
        # Side by side, so that the bars of different recipes do not hide one another.
        shift = (index - len(folder.settings["recipes"]) / 2) * 0.006 * steps[-1]
        deviation = [deviation_of(v) for v in values]
        axes.errorbar(
            [step + shift for step in steps], means, yerr=deviation, linewidth=1.3, capsize=2,
            markersize=5, **style,
        )  # fmt: skip
    else:
        axes.plot(steps, means, linewidth=1.5, markersize=6, **style)


def mean_curve(curves: Sequence[dict[int, float]]) -> dict[int, float]:
    """step -> mean over the seeds."""
    return {step: statistics.fmean(c[step] for c in curves) for step in curves[0]}


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean over the tenth of the curve around each value. Near its ends, where less is left on
    one side, a mean would lag behind a falling loss: a line is fitted to what is there."""
    sums = [0.0, *itertools.accumulate(values)]
    moments = [0.0, *itertools.accumulate(index * value for index, value in enumerate(values))]
    reach = len(values) // 20
    out = []
    for index in range(len(values)):
        first, end = max(0, index - reach), min(len(values), index + reach + 1)
        count, middle = end - first, (first + end - 1) / 2
        total = sums[end] - sums[first]
        spread = max(1, count * (count**2 - 1)) / 12  # of the places, squared
        slope = (moments[end] - moments[first] - middle * total) / spread
        out.append(total / count + slope * (index - middle))
    return out
