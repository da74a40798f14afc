"""Ctrl-C while the command `blockscale` starts, which for the most part is importing PyTorch. The
modules of the command cannot catch it: Python imports this package before them."""

from __future__ import annotations

import os
import sys
from types import TracebackType

_hook = sys.excepthook


def is_command() -> bool:
    """Whether this process is `blockscale` or `python -m blockscale`, not a program that imports
    the package."""
    if sys.argv[:1] == ["-m"]:  # until Python has imported the package that it runs
        return sys.orig_argv[-len(sys.argv)] in ("blockscale", "-mblockscale")
    return any(os.path.basename(path) == "blockscale" for path in sys.argv[:1])


def stop(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A hook for uncaught exceptions that ends as `blockscale.cli.main` does after Ctrl-C."""
    if not issubclass(kind, KeyboardInterrupt):
        _hook(kind, error, trace)
        return
    print(" ".join(["blockscale", *sys.argv[1:2]]) + ": stopped", file=sys.stderr)
    raise SystemExit(130)


if is_command():
    sys.excepthook = stop
