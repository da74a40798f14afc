"""Entry point of the `blockscale` command.

Each subcommand is one module of this package with `add_arguments(parser)` and `run(args) -> int`;
only the one asked for is imported. A new subcommand is a module and a row in SUBCOMMANDS.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from blockscale._core import facts
from blockscale.cli.errors import CliError, Parser, nearest

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
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words == ["--version"]:
        print(f"blockscale {facts()['version']}")
        return 0
    name = words[0]
    prog = f"blockscale {name}"
    try:
        if name not in SUBCOMMANDS:
            prog = "blockscale"
            raise CliError(
                f"command = {name!r}; need one of {', '.join(SUBCOMMANDS)}; "
                f"{nearest(name, list(SUBCOMMANDS))}"
            )
        module = importlib.import_module(f"blockscale.cli.{name}")
        parser = Parser(prog=prog, description=module.__doc__, allow_abbrev=False)
        module.add_arguments(parser)
        return int(module.run(parser.parse_args(words[1:])))
    except CliError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a disk that fills up, a folder that goes away
        print(f"{prog}: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: stopped", file=sys.stderr)
        return 130
