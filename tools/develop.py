"""Make the work tree importable from this Python's environment: a .pth file and the `blockscale`
command. The package runs from python/, so an edit is live at once and there is nothing to rebuild.
"""

from __future__ import annotations

import stat
import sys
import sysconfig
from pathlib import Path

# A call of Python with this same file to the shell, a string to Python: a first line that names the
# interpreter itself can have no space in it.
COMMAND = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import sys

from blockscale.cli.main import main

sys.exit(main())
"""


def main() -> None:
    package_dir = Path(__file__).resolve().parent.parent / "python"
    Path(sysconfig.get_path("purelib"), "blockscale.pth").write_text(f"{package_dir}\n")
    command = Path(sysconfig.get_path("scripts"), "blockscale")
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(command.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


if __name__ == "__main__":
    main()
