"""The command, inside the process of the tests or in one of its own."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
from blockscale.cli.main import main
from forked import CONTEXT


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr of a command that must be refused."""
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.rstrip()


class Done(NamedTuple):
    """How a command ended: its exit status, or the negative number of the signal that ended it."""

    returncode: int | None
    stdout: str
    stderr: str


class Command:
    """`blockscale` with these words, in a process of its own, which Ctrl-C reaches even where the
    tests run in the background of a shell that ignores it. Its files cannot grow beyond `limit`
    bytes: writing then fails in the midst of a file, as on a full disk."""

    def __init__(self, *words: str, limit: int | None = None, cwd: Path | None = None) -> None:
        self._out, out = CONTEXT.Pipe(duplex=False)
        self._err, err = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(
            target=_run, args=(words, out, err, limit, str(cwd or Path.cwd()))
        )
        self.process.start()
        out.close()
        err.close()

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self, timeout: float = 300) -> Done:
        """Wait for it; it is killed when that takes longer."""
        watch = threading.Timer(timeout, self.process.kill)
        watch.start()
        with ThreadPoolExecutor(2) as pool:
            out, err = pool.map(_text, (self._out, self._err))
        self.process.join()
        watch.cancel()
        return Done(self.process.exitcode, out, err)


def _text(end: Connection) -> str:
    with end, open(end.fileno(), errors="surrogateescape", closefd=False) as file:
        return file.read()


def _run(
    words: Sequence[str], out: Connection, err: Connection, limit: int | None, cwd: str
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    for name, number, end in (("stdout", 1, out), ("stderr", 2, err)):
        os.dup2(end.fileno(), number)
        end.close()
        setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115  the process's own
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.exit(main(words))
