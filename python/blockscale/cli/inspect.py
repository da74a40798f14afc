"""Show what each spec would do to the tensors of safetensors files, as a table and a plot: largest
magnitude, signal to quantization noise, underflow (the share of the elements other than 0 that
become 0) and saturation (the share of all elements that are clipped to the largest code). The files
may be larger than memory; of a folder, as checkpoints in parts are, all of them are read."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch import Tensor

import blockscale as bs
from blockscale.cli.errors import CliError, nearest, path_text, printable
from blockscale.cli.files import check_writable
from blockscale.cli.output import (
    Output,
    colour_and_marker,
    shared_legend,
    shortened,
    write_picture,
)
from blockscale.noise import Noise, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEFAULT_SPECS = ("fp8_128x128", "mxfp8", "mxfp4", "nvfp4", "amdfp4")
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MOST_LABELS = 600  # tensors in the plot: as many as fit in a picture of 100 inches
INDEX = ".safetensors.index.json"  # how the name of the index of a checkpoint in parts ends
CHUNK_ELEMENTS = 1 << 22  # read at a time
CHUNK_ROWS = 128  # a chunk is whole tiles of every spec


@dataclass(frozen=True)
class Result:
    """What one spec does to one tensor."""

    tensor: str
    shape: tuple[int, ...]
    spec: str
    amax: float
    sqnr: float  # dB
    underflow: float  # share of the nonzero elements that become zero
    saturation: float  # share of all elements that are clipped to the largest code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", metavar="FILE.safetensors", nargs="+",
        help="or a folder, for those in it, or a checkpoint's .safetensors.index.json",
    )  # fmt: skip
    parser.add_argument(
        "--spec", action="append", metavar="SPEC",
        help=f"name or canonical text; may be repeated (default: {', '.join(DEFAULT_SPECS)})",
    )  # fmt: skip
    parser.add_argument("--out", type=path_text, metavar="PLOT.png", help="also draw the figures")


def run(args: argparse.Namespace) -> int:
    """Prints one row per tensor and spec, and the skipped tensors with the reason."""
    console = Output(width_in_a_file=160)
    # Two spellings of one spec count once.
    specs = list(dict.fromkeys(parse_spec(text) for text in args.spec or DEFAULT_SPECS))
    if args.out is not None:
        check_plot_path(Path(args.out))
    results: list[Result] = []
    skipped: list[tuple[str, str]] = []
    with contextlib.ExitStack() as stack:
        # Opens all of them first, each once: a bad file is reported before the long work.
        files = {path: stack.enter_context(open_file(path)) for path in paths_of(args.files)}
        named = [(name, path) for path, file in files.items() for name in [*file.keys()]]
        named.sort(key=lambda each: (by_number(each[0]), each))
        times = Counter(name for name, _ in named)
        for name, path in named:
            piece = files[path].get_slice(name)
            label = printable(name if times[name] == 1 else f"{name} ({path})")
            shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
            reason = why_skip(shape, dtype)
            if reason:
                skipped.append((label, reason))
            else:
                results += inspect_tensor(label, piece, shape, specs)
    try:
        if results:
            console.print(as_table(results))
        for name, reason in skipped:
            console.print(f"skipped {name}: {reason}", highlight=False, soft_wrap=True)
    finally:  # whatever standard output takes
        if results and args.out is not None:
            remedy = "when that is mended, run the command again"
            write_picture(Path(args.out), lambda: draw(results, specs), remedy)
    if not results:
        why = "all its tensors are skipped" if skipped else "it holds no tensors"
        where = ", ".join(args.files)
        console.print(f"nothing to inspect in {where}: {why}", highlight=False, soft_wrap=True)
    elif args.out is not None:
        console.print(f"wrote {args.out}", highlight=False, soft_wrap=True)
    return 0


def by_number(name: str) -> str:
    """What sorts names as their layers follow each other: 2 before 10."""
    return re.sub("[0-9]+", lambda number: number[0].zfill(20), name)


def parse_spec(text: str) -> bs.Spec:
    """A spec from its name or canonical text; CliError with the nearest name."""
    family = text.split("[")[0]
    if family not in bs.spec_names():
        known = bs.spec_names()
        raise CliError(
            f"--spec = {text}; need a spec among {', '.join(known)}; {nearest(family, known)}"
        )
    try:
        spec = bs.spec(text)
    except ValueError as error:
        raise CliError(f"--spec = {text}; {error}") from None
    if spec.hadamard:
        raise CliError(
            f"--spec = {text}; need a spec without a Hadamard transform, whose codes stand for "
            "the transformed tensor; drop hadamard="
        )
    return spec


def check_plot_path(path: Path) -> None:
    """CliError unless the plot can be written, before the long work."""
    if path.is_dir():
        raise CliError(f"--out = {path} (a folder); need a .png file; name one")
    if path.suffix != ".png":
        raise CliError(f"--out = {path}; need a .png file; name it {path.with_suffix('.png')}")
    if not path.parent.is_dir():
        raise CliError(f"--out = {path}; need a file in an existing folder; choose another path")
    check_writable("--out", path.parent, path)


def paths_of(given: Sequence[str]) -> list[str]:
    """The files, with folders replaced by their files, and indexes by their parts."""
    found: list[str] = []
    for path in given:
        if not os.path.isdir(path):
            found += whole_parts(Path(path)) if path.endswith(INDEX) else [path]
            continue
        within = sorted(str(file) for file in Path(path).glob("*.safetensors"))
        for index in sorted(Path(path).glob(f"*{INDEX}")):
            # Without any of its parts, it belongs to another variant that was left out on purpose.
            if not set(within).isdisjoint(parts_of(index)):
                whole_parts(index)
        if not within:
            raise CliError(
                f"file = {path} (a folder without *.safetensors); need a safetensors file, or a "
                "folder of some; check the path"
            )
        found += within
    return found


def whole_parts(index: Path) -> list[str]:
    """The files that an index names; CliError if one is missing: the rest would pass for all."""
    parts = parts_of(index)
    missing = [part for part in parts if not os.path.exists(part)]
    if missing:
        raise CliError(
            f"file = {index} ({len(missing)} of its {len(parts)} files missing, such as "
            f"{Path(missing[0]).name}); need all of them; fetch the rest, or name the files to "
            "inspect"
        )
    return parts


def parts_of(index: Path) -> list[str]:
    """The files that an index names, in order."""
    fault = "damaged"
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
        return sorted({str(index.parent / name) for name in names})
    except FileNotFoundError:
        raise CliError(f"file = {index}; need an existing file; check the path") from None
    except OSError as error:
        fault = error.strerror or "unreadable"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise CliError(
        f"file = {index} ({fault}); need the index of a checkpoint in parts; fetch it again, or "
        "name the files to inspect"
    )


def open_file(path: str) -> Any:
    """The file, opened for reading by slices."""
    from safetensors import SafetensorError, safe_open

    try:
        kind = os.stat(path).st_mode
        if not stat.S_ISREG(kind):  # opening a pipe would block
            raise CliError(f"file = {path} (not a regular file); need one; save it to a file first")
        open(path, "rb").close()  # safe_open calls every file missing that it cannot open
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise CliError(
            f"file = {path or repr(path)}; need an existing file; check the path"
        ) from None
    except OSError as error:
        raise CliError(
            f"file = {path} ({error.strerror or error}); need a file that can be read; check its "
            "permissions"
        ) from None
    except SafetensorError as error:
        raise CliError(
            f"file = {path} ({error}); need a whole safetensors file; it is truncated, damaged or "
            "of another kind"
        ) from None


def why_skip(shape: Sequence[int], dtype: str) -> str:
    """Why a tensor is not inspected; empty if it is."""
    if dtype not in FLOATS:
        return f"{dtype}, not one of {', '.join(FLOATS)}"
    if len(shape) < 2:
        return f"{len(shape)}-D, not a matrix"
    return "" if math.prod(shape) else "empty"


def pieces(file_slice: Any, shape: Sequence[int], prefix: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """A tensor's leading dims flattened into rows, as consecutive 2-D parts of bounded size."""
    left = shape[len(prefix) :]
    inner = math.prod(left[1:])
    if inner > CHUNK_ELEMENTS and len(left) > 2:
        for index in range(left[0]):
            yield from pieces(file_slice, shape, (*prefix, index))
        return
    step = max(1, CHUNK_ELEMENTS // inner)
    for start in range(0, left[0], step):
        place = (*prefix, slice(start, min(start + step, left[0])))
        part = file_slice[place]
        yield part.reshape(-1, shape[-1])


def chunks(file_slice: Any, shape: Sequence[int]) -> Iterator[Tensor]:
    """The same rows regrouped, so that every chunk but the last has a multiple of CHUNK_ROWS."""
    held: list[Tensor] = []
    rows = 0
    for piece in pieces(file_slice, shape):
        held.append(piece)
        rows += len(piece)
        whole = rows - rows % CHUNK_ROWS
        if whole:
            joined = torch.cat(held)
            yield joined[:whole]
            held, rows = [joined[whole:].clone()], rows - whole
    if rows:
        yield torch.cat(held)


def inspect_tensor(
    name: str, file_slice: Any, shape: tuple[int, ...], specs: Sequence[bs.Spec]
) -> list[Result]:
    """Reads a tensor twice: once for its amax, which two-level specs need, once to measure."""
    amax = max_of(chunk.float().abs().amax() for chunk in chunks(file_slice, shape))
    sums = [Noise() for _ in specs]
    for index, chunk in enumerate(chunks(file_slice, shape)):
        for spec, total in zip(specs, sums, strict=True):
            total.add(chunk, spec, amax if spec.outer else None, bs.Rng(0, index))
    return [
        Result(name, shape, spec.text, of.amax, of.sqnr, of.underflow, of.saturation)
        for spec, of in zip(specs, sums, strict=True)
    ]


def max_of(values: Iterator[Tensor]) -> Tensor:
    """The largest of some scalars, NaN if one is NaN."""
    return torch.stack(list(values)).amax()


def as_table(results: Sequence[Result]) -> Table:
    """A row per tensor and spec; a tensor's name, shape and amax once."""
    table = Table(
        caption="underflow: elements other than 0 that become 0\n"
        "saturation: elements clipped to the largest code",
        caption_justify="left",
    )
    for heading in ("tensor", "shape"):
        table.add_column(heading, overflow="fold")
    table.add_column("amax", justify="right", overflow="fold")
    table.add_column("spec", overflow="fold")
    for heading in ("SQNR dB", "underflow", "saturation"):
        table.add_column(heading, justify="right", overflow="fold")
    previous = None
    for r in results:
        first = r.tensor != previous
        previous = r.tensor
        table.add_row(
            r.tensor if first else "",
            "x".join(map(str, r.shape)) if first else "",
            f"{r.amax:.4g}" if first else "",
            r.spec,
            f"{r.sqnr:.2f}",
            percent(r.underflow, 3),
            percent(r.saturation, 3),
        )
    return table


def mark_at_edge(axes: Axes, values: Sequence[float], style: dict[str, Any]) -> None:
    """Marks, with a word, what has no place along the axis."""
    across = axes.get_yaxis_transform()  # from 0 to 1 across the panel
    for row, value in enumerate(values):
        if math.isfinite(value):
            continue
        word = "NaN" if math.isnan(value) else "exact" if value > 0 else "overflows"
        x, away, side = (1, -8, "right") if word == "exact" else (0, 8, "left")
        axes.plot([x], [row], transform=across, clip_on=False, **style)
        axes.annotate(
            word, (x, row), (away, 0), xycoords=across, textcoords="offset points", ha=side,
            va="center", color="0.35", fontsize=8,
        )  # fmt: skip


def draw(results: Sequence[Result], specs: Sequence[bs.Spec]) -> bytes:
    """Three panels over the tensors, a colour and marker per spec."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(r.tensor for r in results))
    every = math.ceil(len(names) / MOST_LABELS)
    shown = [shortened(name) for name in names[::every]]
    height = max(4.0, 2.0 + 0.16 * len(shown)) - 0.2  # the legend adds a row at least
    figure = Figure(figsize=(13, height), dpi=120, layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    rows = range(len(names))
    for index, spec in enumerate(specs):
        ours = [r for r in results if r.spec == spec.text]
        columns = ([r.sqnr for r in ours], [100 * r.underflow for r in ours],
                   [100 * r.saturation for r in ours])  # fmt: skip
        style: dict[str, Any] = {"linestyle": "", "fillstyle": "none", "markeredgewidth": 1.5}
        style |= {"markersize": 10 - 5 * index / len(specs), **colour_and_marker(index)}
        for axes, values in zip(panels, columns, strict=True):
            axes.plot(values, rows, label=spec.text, **style)
            mark_at_edge(axes, values, style)
    labels = ("SQNR (dB), more is better", "underflow (% of nonzeros)", "saturation (% of all)")
    for axes, label in zip(panels, labels, strict=True):
        axes.set_xlabel(label)
        axes.grid(color="0.9", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(rows[::every], shown, fontsize=8, parse_math=False)  # a name may contain $
    panels[0].set_ylim(len(names) - 1 + 0.5 * every, -0.5 * every)
    shared_legend(figure, panels[0], "upper")
    buffer = io.BytesIO()
    with warnings.catch_warnings():  # about letters that the font lacks and draws as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format="png")
    return buffer.getvalue()
