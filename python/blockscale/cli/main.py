"""Entry point of the `blockscale` command.

Each subcommand is one module of this package with `add_arguments(parser)` and `run(args) -> int`;
only the one asked for is imported. A new subcommand is a module and a row in SUBCOMMANDS.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence

from blockscale._core import facts
from blockscale.cli.errors import (
    CliError,
    Failure,
    Parser,
    nearest,
    os_reason,
    out_of_memory,
    printable,
)

SUBCOMMANDS = {
    "train": "train a small language model in several recipes and compare them",
    "doctor": "what this machine can run, and why not the rest",
    "bench": "the speed of the quantizers on this machine, against a copy",
    "inspect": "what each spec would do to the tensors of a safetensors file",
}


def usage() -> str:
    """The text of `blockscale --help`."""
    rows = "\n".join(f"  {name:<9}{text}" for name, text in SUBCOMMANDS.items())
    return (
        "usage: blockscale COMMAND [options]\n\nBlock-scaled FP8 and FP4 training.\n\n"
        f"commands:\n{rows}\n\n`blockscale COMMAND --help` lists a command's options; "
        "`blockscale --version` says which version this is."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit status: 0, 1 (failed), 2 (refused), 130 (Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters of tables
        sys.stdout.reconfigure(errors="backslashreplace")
    prog = f"blockscale {words[0]}" if words and words[0] in SUBCOMMANDS else "blockscale"
    try:
        status = run(words)
        print(end="", flush=True)  # a failure to write can still be reported here
        return status
    except CliError as error:
        status, reason = 2, str(error)
    except Failure as error:
        status, reason = 1, str(error)
    except OSError as error:  # a disk fills up, a folder disappears
        status, reason = 1, os_reason(error)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        status, reason = 1, "out of memory; need a machine with more, or less to do at a time"
    except KeyboardInterrupt:
        status, reason = 130, "stopped"
    drop_output()
    print(f"{prog}: {printable(reason)}", file=sys.stderr)
    return status


def run(words: Sequence[str]) -> int:
    """Runs one subcommand, or handles the options of the command itself."""
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if list(words) == ["--version"]:
        print(f"blockscale {facts()['version']}")
        return 0
    name = words[0]
    if name not in SUBCOMMANDS:
        raise CliError(
            f"command = {name!r}; need one of {', '.join(SUBCOMMANDS)}; "
            f"{nearest(name, list(SUBCOMMANDS))}"
        )
    module = importlib.import_module(f"blockscale.cli.{name}")
    about = module.__doc__ or SUBCOMMANDS[name]  # python -OO drops docstrings
    parser = Parser(prog=f"blockscale {name}", description=about, allow_abbrev=False)
    module.add_arguments(parser)
    try:
        args = parser.parse_args(words[1:])
    except SystemExit:  # after --help
        return 0
    return int(module.run(args))


def drop_output() -> None:
    """Drops what standard output does not accept: the interpreter would retry at exit, and change
    the exit status."""
    try:
        print(end="", flush=True)
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
