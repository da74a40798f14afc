"""Show what this machine can run: backends, instruction set, PyTorch, devices, and for every
recipe the devices it runs on, or why it does not."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from typing import Any

import torch
from rich.table import Table

import blockscale as bs
from blockscale._errors import counted
from blockscale.cli.output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command has none."""


def run(args: argparse.Namespace) -> int:
    """Prints two tables."""
    console = Output(width_in_a_file=160)
    about = bs.describe()
    console.print(facts(about))
    console.print(recipes([backend["name"] for backend in about["backends"]]))
    return 0


def facts(about: dict[str, Any]) -> Table:
    """Versions, backends and devices."""
    table = Table(title="blockscale doctor", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("blockscale", bs.__version__)
    table.add_row("python", platform.python_version())
    cuda = torch.version.cuda
    table.add_row("torch", f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'no CUDA'})")
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    table.add_row("cpu", f"{counted(cores, 'core')}, {counted(threads, 'thread')} in use")
    best, *others = map(processor_name, about["instruction_sets"])
    rest = f" (usable here too: {', '.join(others)})" if others else ""
    table.add_row("instruction set", best + rest)
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        table.add_row(
            f"cuda:{index}",
            f"{device.name}, sm_{device.major}{device.minor}, "
            f"{device.total_memory / 2**30:.0f} GiB",
        )
    for backend in about["backends"]:
        state = "available" if backend["available"] else f"not available: {backend['reason']}"
        table.add_row(f"backend {backend['name']}", state)
    return table


def processor_name(instruction_set: str) -> str:
    """An instruction set by its vendor's name; the Highway library numbers AVX."""
    return instruction_set.replace("AVX3", "AVX-512")


def recipes(devices: list[str]) -> Table:
    """A row per recipe, a column per device: `yes`, or the reason why not."""
    table = Table(title="what each recipe can run on")
    table.add_column("recipe", no_wrap=True)
    for device in devices:
        table.add_column(device, overflow="fold")
    for name in bs.recipe_names():
        table.add_row(name, *(why_not(name, device) or "yes" for device in devices))
    return table


def why_not(recipe: str, device: str) -> str:
    """The first reason why a recipe cannot run on the device; empty if it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    reasons = (bs.explain(spec, device=device) for spec in recipe_specs(recipe))
    reason = next((reason for reason in reasons if reason), "")
    needs = bs.recipe(recipe).cuda_needs if device == "cuda" else ""
    return reason or (f"needs {needs}" if needs else "")


def recipe_specs(recipe: str) -> Iterator[bs.Spec]:
    """The specs of a recipe's operands; none for an operand kept in high precision."""
    for value in vars(bs.recipe(recipe)).values():
        if isinstance(value, bs.Spec):
            yield value
