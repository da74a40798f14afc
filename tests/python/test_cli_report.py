"""The end of `blockscale train`: figures, page and picture, from what a run has measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from blockscale.cli import report
from blockscale.cli.data import Corpus
from blockscale.cli.report import (
    command,
    deviation_of,
    draw,
    markdown,
    noise_table,
    results,
    smoothed,
)
from blockscale.cli.run_folder import Cell, RunFolder, create_run, decode_row, encode_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def settings(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"recipes": ["bf16", "nvfp4"], "steps": 2, "seeds": 2, "seed": 4}
    return values | {"batch_size": 3, "seq_len": 5} | changes


def test_gap_is_taken_seed_by_seed(tmp_path: Path) -> None:
    folder = create_run(tmp_path / "run", settings())
    final = {(4, "bf16"): 2.0, (5, "bf16"): 3.0, (4, "nvfp4"): 2.25, (5, "nvfp4"): 3.75}
    for (seed, recipe), loss in final.items():
        for step in (1, 2):
            pace = 9.0 if (seed, step) == (4, 1) else 0.25 if recipe == "bf16" else 0.5
            folder.append(Cell(seed, recipe), step, train_loss=9.0, seconds=pace)
        folder.append(Cell(seed, recipe), 2, validation_loss=loss, seconds=7.0)
    baseline, nvfp4 = results(folder)
    assert (baseline.loss, baseline.tokens_per_second) == (2.5, 60.0)
    assert nvfp4.gap == 0.5
    assert nvfp4.spread == pytest.approx(math.sqrt(0.125))  # deviations of .25 and .75
    assert nvfp4.cells() == ("nvfp4", "3.0000", "4.3281", "+0.5000 ± 0.3536", "30")
    assert noise_table(folder) == []  # none was measured


def test_a_diverged_seed_leaves_no_deviation() -> None:
    """statistics.stdev raises for it, and the report would be lost."""
    assert math.isnan(deviation_of([0.1, math.nan]))
    assert deviation_of([1.0, 3.0]) == pytest.approx(math.sqrt(2))


UNIGRAM = 3.2


def test_more_validations_take_no_more_passes_over_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass per validation makes the picture of a long run take minutes."""
    right = report.curve
    passes: list[str] = []

    def counted(folder: RunFolder, cell: Cell, key: str) -> dict[int, float]:
        passes.append(key)
        return right(folder, cell, key)

    monkeypatch.setattr(report, "curve", counted)
    counts = []
    for steps in (2, 8):
        folder = create_run(tmp_path / str(steps), settings(steps=steps))
        for cell in folder.cells():
            for step in range(1, steps + 1):
                folder.append(cell, step, train_loss=3.0, seconds=1.0)
                folder.append(cell, step, validation_loss=2.0)
        passes.clear()
        draw(folder, UNIGRAM)
        counts.append(len(passes))
    assert counts[0] == counts[1]


def test_the_gap_is_drawn_at_every_validation(tmp_path: Path, figures: list[Figure]) -> None:
    folder = create_run(tmp_path / "run", settings(seeds=1))
    for cell in folder.cells():
        for step, gap in enumerate((0.5, 0.25), 1):
            folder.append(cell, step, train_loss=3.0, seconds=1.0)
            loss = 2.0 + (gap if cell.recipe == "nvfp4" else 0.0)
            folder.append(cell, step, validation_loss=loss)
    draw(folder, UNIGRAM)
    (line, _) = figures[0].axes[1].lines  # the other is at zero
    assert np.asarray(line.get_xydata()).tolist() == [[1, 0.5], [2, 0.25]]


def test_means_over_the_seeds_are_drawn(tmp_path: Path, figures: list[Figure]) -> None:
    recipes = ["bf16", "nvfp4", "mxfp8"]
    folder = create_run(tmp_path / "run", settings(steps=20, recipes=recipes))
    for cell in folder.cells():
        up = float(cell.seed == 5)
        for step in range(1, 21):
            folder.append(cell, step, train_loss=step % 2 + up, seconds=1.0)
        for step, gap in ((10, 0.5), (20, 0.25)):
            above = gap * (1 + up) if cell.recipe == "nvfp4" else 0.0
            folder.append(cell, step, validation_loss=2.0 + up + above)
    draw(folder, UNIGRAM)
    left, right = figures[0].axes
    lines = [np.asarray(line.get_xydata()) for line in left.lines]
    losses, points, _, others, *_, unigram = lines
    smooth = smoothed([step % 2 + 0.5 for step in range(1, 21)])
    assert losses == pytest.approx(np.array([*enumerate(smooth, 1)]))
    assert points.tolist() == [[10, 2.5], [20, 2.5]]
    assert others.tolist() == [[10, 3.25], [20, 2.875]]
    assert unigram[:, 1].tolist() == [UNIGRAM, UNIGRAM]
    # Each bar from its lower end to its upper.
    bars, beside = (gaps[2][0].get_segments() for gaps in right.containers)
    assert all(bar[0, 0] != other[0, 0] for bar, other in zip(bars, beside, strict=True))
    for bar, step, values in zip(bars, (10, 20), ((0.5, 1.0), (0.25, 0.5)), strict=True):
        mean, deviation = np.mean(values), np.std(values, ddof=1)
        assert bar[:, 0] == pytest.approx(step, abs=0.2)
        assert bar[:, 1] == pytest.approx([mean - deviation, mean + deviation])
    assert right.get_title() == "Gap to BF16, mean ± deviation"


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_a_picture_without_a_gap_says_what_it_needs(
    recipe: str, tmp_path: Path, figures: list[Figure]
) -> None:
    folder = create_run(tmp_path / "run", settings(seeds=1, recipes=[recipe]))
    for cell in folder.cells():
        for step in (1, 2):
            folder.append(cell, step, train_loss=3.0, seconds=1.0)
        folder.append(cell, 2, validation_loss=2.0)
    draw(folder, UNIGRAM)
    left, right = figures[0].axes
    assert [text.get_text() for text in right.texts] == [
        "needs bf16 and one more recipe in --recipes"
    ]
    (line,) = right.lines
    assert np.asarray(line.get_ydata()).tolist() == [0.0, 0.0]
    assert all(float(step).is_integer() for step in left.get_xticks())
    assert right.get_title() == "Gap to BF16"


@pytest.mark.parametrize(
    ("nvfp4", "top", "said"),
    [
        ((2.5, 2.1), 1.25 * UNIGRAM, "nvfp4"),
        ((2.5, 30.0), 1.05 * 30, "nvfp4"),  # it is seen
        ((2.5, math.nan), 1.25 * UNIGRAM, "nvfp4: not finite from step 2"),
        ((math.inf, math.nan), 1.25 * UNIGRAM, "nvfp4: not finite from step 1"),
    ],
)
@pytest.mark.parametrize("seeds", [1, 2])
def test_a_training_that_diverges_is_in_the_picture(
    seeds: int,
    nvfp4: tuple[float, float],
    top: float,
    said: str,
    tmp_path: Path,
    figures: list[Figure],
) -> None:
    folder = create_run(tmp_path / "run", settings(seeds=seeds))
    for cell in folder.cells():
        for step, loss in enumerate(nvfp4 if cell.recipe == "nvfp4" else (2.4, 2.0), 1):
            folder.append(cell, step, train_loss=loss, seconds=1.0)
            folder.append(cell, step, validation_loss=loss)
    draw(folder, UNIGRAM)
    left, right = figures[0].axes
    assert left.get_ylim()[1] == pytest.approx(top)
    assert left.get_legend_handles_labels()[1] == ["bf16", said]
    assert right.lines
    (legend,) = figures[0].legends  # of both panels
    assert [text.get_text() for text in legend.get_texts()] == ["bf16", said]
    assert left.get_xlim() == right.get_xlim() == pytest.approx((0, 2.1))


def test_a_baseline_that_diverges_is_what_is_said_to(tmp_path: Path, figures: list[Figure]) -> None:
    folder = create_run(tmp_path / "run", settings(seeds=1))
    for cell in folder.cells():
        for step, loss in enumerate((2.4, math.nan if cell.recipe == "bf16" else 2.0), 1):
            folder.append(cell, step, train_loss=loss, seconds=1.0)
            folder.append(cell, step, validation_loss=loss)
    draw(folder, UNIGRAM)
    said = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert said == ["bf16: not finite from step 2", "nvfp4"]
    baseline, nvfp4 = results(folder)
    assert (baseline.cells()[1], baseline.cells()[3]) == ("nan", "–")
    assert (nvfp4.cells()[1], nvfp4.cells()[3]) == ("2.0000", "nan")


LONG = "nvfp4[fprop_x=nvfp4[outer=false],wgrad_dy=none,wgrad_x=none,keep_w=False]"


@pytest.mark.parametrize("count", [1, 2, 8])
def test_long_names_leave_the_panels_their_size(
    count: int, tmp_path: Path, figures: list[Figure]
) -> None:
    recipes = ["bf16", LONG, *(f"mxfp8[{'keep_w=False,' * n}keep_x=False]" for n in range(8))]
    folder = create_run(tmp_path / "run", settings(seeds=1, recipes=recipes[:count]))
    for cell in folder.cells():
        for step in (1, 2):
            folder.append(cell, step, train_loss=3.0, seconds=1.0)
            folder.append(cell, step, validation_loss=2.0)
    draw(folder, UNIGRAM)
    whole, legend = figures[0].bbox, figures[0].legends[0].get_window_extent()
    assert whole.x0 < legend.x0 < legend.x1 < whole.x1
    for axes in figures[0].axes:
        assert axes.bbox.width > 0.4 * whole.width
        assert axes.bbox.height > 3.5 * figures[0].dpi
        assert axes.bbox.y0 > legend.y1
    handles: list[Any] = figures[0].legends[0].legend_handles
    assert len({(each.get_color(), each.get_marker()) for each in handles}) == count


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_diverged_loss_survives_the_file(loss: float) -> None:
    line = encode_row({"step": 3, "train_loss": loss})
    assert json.loads(line) == {"step": 3, "train_loss": None}
    assert math.isnan(decode_row(line)["train_loss"])


@pytest.mark.parametrize("length", [1, 2, 19, 50, 200])
def test_smoothing_keeps_a_constant_and_does_not_lag(length: int) -> None:
    assert smoothed([3.0] * length) == pytest.approx([3.0] * length)
    falling = [5.0 - 0.1 * step for step in range(length)]
    assert smoothed(falling) == pytest.approx(falling)


def test_smoothing_averages() -> None:
    """Of values 1/2 off, at most 1/21 of a window's excess is left, 4 times that at the ends."""
    smooth = smoothed([float(step % 2) for step in range(200)])
    assert all(abs(value - 0.5) < 0.03 for value in smooth[10:-10])
    assert all(abs(value - 0.5) < 0.12 for value in smooth)


def test_smoothing_leaves_no_number_after_one_that_is_none() -> None:
    assert [math.isnan(value) for value in smoothed([2.0, math.nan, 2.0])] == [False, True, True]


def test_reported_command_repeats_the_run() -> None:
    text = command(settings(data=["/a b", "/c"], lr=0.5, environment={}, data_sha256="x"))
    assert text == (
        "blockscale train --recipes bf16,nvfp4 --steps 2 --seeds 2 --seed 4 --batch-size 3 "
        "--seq-len 5 --data '/a b' /c --lr 0.5"
    )
    assert "--data" not in command(settings(data=[]))


def test_the_page_of_a_run_without_a_baseline(tmp_path: Path) -> None:
    about = {"torch": "9", "instruction_set": "AVX3"}
    folder = create_run(
        tmp_path / "run",
        settings(recipes=["mxfp8", "nvfp4"], preset="tiny", data=["/a"], environment=about),
    )
    for cell in folder.cells():
        for step in (1, 2):
            folder.append(cell, step, train_loss=3.0, seconds=1.0)
        noise = {"fprop_db": 6.0 * cell.seed} if cell.recipe == "nvfp4" else {}
        folder.append(cell, 2, validation_loss=float(cell.seed), **noise)
    three, two = torch.zeros(3, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)
    lines = markdown(folder, Corpus(three, two, 2, 1, "", "the text"), math.log(2)).splitlines()
    assert lines[0] == "# mxfp8, nvfp4: preset tiny, 2 steps, seeds 4 to 5"
    assert [line for line in lines if line.startswith("|")] == [
        "| recipe | validation (nats) | bits per byte | gap to BF16 (nats) | tokens/s |",
        "|---|---:|---:|---:|---:|",
        "| mxfp8 | 4.5000 | 6.4921 | – | 15 |",
        "| nvfp4 | 4.5000 | 6.4921 | – | 15 |",
        "| recipe | y | dx | dW |",
        "|---|---:|---:|---:|",
        "| nvfp4 | 27.0 | – | – |",
        "| setting | value |",
        "|---|---|",
        "| recipes | mxfp8, nvfp4 |",
        "| steps | 2 |",
        "| seeds | 2 |",
        "| seed | 4 |",
        "| batch_size | 3 |",
        "| seq_len | 5 |",
        "| preset | tiny |",
        "| torch | 9 |",
        "| instruction_set | AVX-512 |",
    ]
    assert any(line.endswith("scores 0.6931 nats, 1.0000 bits per byte.") for line in lines)
    assert "Text: the text; 2 files, of which 1 is held out for validation; 3 and 2 bytes." in lines
    assert lines[-2:] == ["", f"    {command(folder.settings)}"]
