"""Train a decoder-only language model on real text in several recipes, from the same initial
weights and the same batches, and compare their validation loss."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import shlex
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import blockscale as bs
from blockscale._core import facts
from blockscale._recipe_text import split_outside_brackets
from blockscale.cli import run_folder
from blockscale.cli.data import Corpus, load_corpus
from blockscale.cli.doctor import why_not
from blockscale.cli.errors import (
    CliError,
    Failure,
    device_name,
    nearest,
    os_reason,
    out_of_memory,
    path_text,
    positive_float,
)
from blockscale.cli.model import PRESETS
from blockscale.cli.output import Output
from blockscale.cli.progress import LiveProgress
from blockscale.cli.provenance import ORIGIN, origin
from blockscale.cli.report import print_table, seed_range, steps_of, write_report
from blockscale.cli.run_folder import RunFolder
from blockscale.cli.saved import SETTINGS, WHOLE, read_settings
from blockscale.cli.trainer import Trainer, reproducible_kernels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every default is None: the preset (or, with --resume, the run) supplies the value."""
    add, preset = parser.add_argument, " (default: the preset's)"

    def add_whole(name: str, about: str) -> None:
        limits = WHOLE[name.replace("-", "_")]
        add(f"--{name}", type=limits.parse, metavar="N", help=about)

    models = ", ".join(f"{name} ({model.about})" for name, model in PRESETS.items())
    add("--preset", metavar="NAME", help=f"the model and its settings: {models} (default tiny)")
    source = "text files or folders, read into memory (default: the Python standard library)"
    add("--data", nargs="+", metavar="PATH", help=source)
    names = ",".join(bs.recipe_names())
    changed = "with changes too, as 'fp8_blockwise[wgrad_x=fp8_128x128]'"
    add("--recipes", metavar="A,B,...", help=f"default, where the device can: {names}; {changed}")
    add_whole("steps", f"optimizer steps of each training{preset}")
    add_whole("seeds", "train each recipe from N seeds; give the gap with its spread (default 1)")
    add_whole("seed", "the first seed (default 0)")
    add_whole("batch-size", f"sequences in a batch{preset}")
    add_whole("seq-len", f"bytes in a sequence{preset}")
    add("--lr", type=positive_float, metavar="X", help=f"peak learning rate{preset}")
    add_whole("eval-every", f"steps between validations{preset}")
    add_whole("checkpoint-every", "default: as --eval-every")
    add("--device", type=device_name, metavar="NAME", help="cpu or cuda (default cpu)")
    out = "new or empty folder (default runs/train-<date>-<time>)"
    add("--out", type=path_text, metavar="FOLDER", help=out)
    resume = "continue the run in --out; options left out are taken from it"
    add("--resume", action="store_true", help=resume)


def run(args: argparse.Namespace) -> int:
    """Trains every cell, then writes report.md and loss.png and prints the table."""
    console = Output(width_in_a_file=160)
    folder, corpus = prepare(args, console)
    again = shlex.join(["blockscale", "train", "--out", str(folder.path), "--resume"])
    remedy = f"all is trained; when that is mended, write the report with: {again}"
    unwritten: OSError | Failure | None = None
    try:
        train_all(folder, corpus, console)
        try:
            write_report(folder, corpus, remedy)
        except (OSError, Failure) as error:  # the table must not be lost with it
            unwritten = error
    except KeyboardInterrupt:
        console.print(f"stopped; continue with: {again}", highlight=False, soft_wrap=True)
        return 130
    except OSError as error:
        raise Failure(
            f"{os_reason(error)}; the run is kept up to its last checkpoint; when that is mended, "
            f"continue with: {again}"
        ) from None
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise Failure(too_large(folder, again)) from None
    print_table(folder, console)
    if isinstance(unwritten, OSError):
        raise Failure(f"{os_reason(unwritten)}; {remedy}")
    if unwritten is not None:
        raise unwritten
    console.print(
        f"report.md, loss.png, metrics.jsonl and the final weights are in {folder.path}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return 0


def train_all(folder: RunFolder, corpus: Corpus, console: Console) -> None:
    """Runs every training that is not finished yet."""
    cells = folder.cells()
    done = sum("train_loss" in row for row in folder.rows)
    progress = LiveProgress(console, len(cells) * folder.settings["steps"], done)
    kernels = reproducible_kernels(folder.settings["device"])
    with contextlib.closing(folder), kernels, progress:
        for cell in cells:
            if not folder.finished(cell):
                Trainer(folder, cell, corpus).run(progress)


def too_large(folder: RunFolder, again: str) -> str:
    """The message for insufficient memory. A run whose first step fails is removed: its settings
    are fixed, so it could not be continued with others."""
    settings = folder.settings
    remedy = "give a smaller --batch-size or --seq-len"
    if not folder.discard():
        remedy = f"start another run with a smaller --batch-size or --seq-len, or continue: {again}"
    return (
        f"--batch-size = {settings['batch_size']} with --seq-len {settings['seq_len']} (out of "
        f"memory on {settings['device']}); need a training step that fits in memory; {remedy}"
    )


def prepare(args: argparse.Namespace, console: Console) -> tuple[RunFolder, Corpus]:
    """Checks everything first, and only then touches the output folder."""
    if args.resume and args.out is None:
        raise CliError("--out = nothing; need the folder of the run to --resume; add --out FOLDER")
    if args.data is not None:  # absolute, so that --resume works from any folder
        args.data = [os.path.abspath(path) if path else "" for path in args.data]
    if args.recipes is not None:
        args.recipes = parse_recipes(args.recipes)
    path = Path(args.out or time.strftime("runs/train-%Y%m%d-%H%M%S"))
    saved = read_settings(path) if args.resume else {}
    settings = choose_settings(args, saved)
    check_device(settings)
    if not args.resume:
        run_folder.check_free(path)
    corpus = load_corpus(settings["data"], settings["seq_len"])
    if saved and saved["data_sha256"] != corpus.sha256:
        raise CliError(changed_text(saved))
    settings |= {"data_sha256": corpus.sha256, "environment": environment(settings["device"])}
    # Notes come after the folder, the last thing that may be refused: a refusal is one line.
    if saved:
        folder = run_folder.open_run(path, saved)
        say_what_goes_on(folder, console)
        warn_of_changes(saved["environment"], settings["environment"], console)
    else:
        folder = run_folder.create_run(path, settings)
        say_what_was_chosen(args, settings["device"], console)
    return folder, corpus


def changed_text(saved: dict[str, Any]) -> str:
    """The message for a text that is not the one the run began with."""
    if saved["data"]:
        got, remedy = "text that has changed since the run began", "restore it"
    else:
        before, now = saved["environment"].get("python"), platform.python_version()
        got = f"the standard library of Python {now}, "
        if before == now:  # distributors patch it and leave parts out
            got += "whose sources differ from those the run began with"
            remedy = "resume on the installation it began on"
        else:
            got += f"where the run began with Python {before}'s"
            remedy = "resume with that Python"
    return f"--data = {got}; need the same text; {remedy}, or start again in another folder"


def say_what_goes_on(folder: RunFolder, console: Console) -> None:
    """Prints which run is continued: its settings may not be those one has in mind."""
    settings, cells = folder.settings, folder.cells()
    done = sum("train_loss" in row for row in folder.rows)
    console.print(
        f"note: continues the run in {folder.path}: preset {settings['preset']}, "
        f"{steps_of(settings)}, {seed_range(settings)}, recipes {shown(settings['recipes'])}; "
        f"{done} of its {len(cells) * settings['steps']} steps are done",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def say_what_was_chosen(args: argparse.Namespace, device: str, console: Console) -> None:
    """Prints notes on what a new run does not use, as no option asked for it."""
    if args.device is None and torch.cuda.is_available():
        console.print("note: a GPU is available; --device cuda uses it", highlight=False)
    if args.recipes is None:
        for name in left_out(device):
            reason = why_not(name, device)
            console.print(f"note: {name} is left out: {reason}", highlight=False, soft_wrap=True)


def choose_settings(args: argparse.Namespace, saved: dict[str, Any]) -> dict[str, Any]:
    """The value of each setting: the given one, else the saved run's, else the preset's.

    Raises CliError when a given setting is not the saved run's.
    """
    name = "tiny" if args.preset is None else args.preset
    if name not in PRESETS:
        raise CliError(
            f"--preset = {name}; need one of {', '.join(PRESETS)}; {nearest(name, list(PRESETS))}"
        )
    eval_every = args.eval_every or PRESETS[name].eval_every
    device = args.device or "cpu"
    default = dataclasses.asdict(PRESETS[name]) | {
        "preset": name,
        "data": [],
        "recipes": [recipe for recipe in bs.recipe_names() if recipe not in left_out(device)],
        "seeds": 1,
        "seed": 0,
        "checkpoint_every": eval_every,
        "device": "cpu",
    }
    settings = {}
    for key in SETTINGS:
        given = getattr(args, key)
        if saved and given is not None and given != saved[key]:
            option = "--" + key.replace("_", "-")
            # Only the data may be empty.
            need = shown(saved[key]) or "the Python standard library's sources (no --data)"
            raise CliError(
                f"{option} = {shown(given)}; need {need}, as the run to resume has it; leave "
                f"{option} out, or start another run in another folder"
            )
        settings[key] = saved[key] if saved else default[key] if given is None else given
    return settings


def parse_recipes(text: str) -> list[str]:
    """The recipes in `a,b[x=y,...],c`, each known and given once."""
    known = bs.recipe_names()
    names = split_outside_brackets(text)
    for place, name in enumerate(names):
        if name not in known and not name.endswith("]"):
            got = name or f"{text!r} (an empty name)"
            raise CliError(
                f"--recipes = {got}; need names among {', '.join(known)}; {nearest(name, known)}"
            )
        try:
            names[place] = str(bs.recipe(name))
        except ValueError as refusal:
            raise CliError(f"--recipes = {name}: {refusal}") from None
        if any(bs.recipe(name) == bs.recipe(other) for other in names[:place]):
            raise CliError(f"--recipes = {name} twice; need each recipe once; drop one of them")
    return names


def left_out(device: str) -> list[str]:
    """The recipes that no device of this kind can run yet: trained only if named."""
    return [name for name in bs.recipe_names() if device == "cuda" and bs.recipe(name).cuda_needs]


def check_device(settings: dict[str, Any]) -> None:
    """CliError if the device is absent or cannot run one of the recipes."""
    device = settings["device"]
    if device == "cuda" and not torch.cuda.is_available():
        raise CliError(
            "--device = cuda; need a CUDA device and a PyTorch built for it; use --device cpu, or "
            "see `blockscale doctor`"
        )
    for recipe in settings["recipes"]:
        reason = why_not(recipe, device)
        if reason:
            raise CliError(
                f"--recipes = {recipe} on --device {device} ({reason}); need recipes that run "
                "there; see `blockscale doctor`"
            )


def environment(device: str) -> dict[str, Any]:
    """Date and commit of a run, and what else besides the settings decides the bits of its
    result."""
    where: dict[str, Any] = {key: value for key, value in origin().items() if value}
    if device == "cuda":
        where |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return where | {
        "blockscale": bs.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "instruction_set": facts()["instruction_set"],
    }


def warn_of_changes(before: dict[str, Any], now: dict[str, Any], console: Console) -> None:
    """Another version or thread count may sum in another order: warn, do not refuse."""
    changed = [
        f"{key} {before.get(key)} -> {now[key]}"
        for key in now
        if key not in ORIGIN and now[key] != before.get(key)
    ]
    if changed:
        console.print(
            f"note: {', '.join(changed)} since the run began; the result may differ in its last "
            "bits from an uninterrupted run",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def shown(value: Any) -> str:
    """A setting as typed on the command line."""
    return ",".join(value) if isinstance(value, list) else str(value)
