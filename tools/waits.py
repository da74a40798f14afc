"""Checks in the machine code of a library that no kernel touches the device's memory before it
waits for the kernels before it (docs/decisions.md): in the order of its instructions.

`python tools/waits.py LIBRARY`, some minutes of one processor. It takes cuobjdump and nvdisasm,
which are part of CUDA's toolkit, or of PyPI's nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator

WAIT = "ACQBULK"
TOUCHES = {
    "LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG",
    "UBLKCP", "UBLKRED", "UTMALDG", "UTMASTG", "UTMAREDG",
}  # fmt: skip
# `/*0010*/   @!P0 LDG.E.128 R4, ...`: the name up to the first dot.
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)")


def first_touches(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The first of these instructions, or a wait, of every kernel that has one."""
    kernel, found = "", True
    for line in lines:
        if "Function : " in line:
            kernel, found = line.split("Function : ")[1].strip(), False
        elif not found and (instruction := INSTRUCTION.match(line)):
            name = instruction[1]
            if name == WAIT or name in TOUCHES:
                found = True
                yield kernel, name


def main() -> None:
    if not shutil.which("cuobjdump"):
        sys.exit(
            "waits: PATH = without cuobjdump; need it and nvdisasm, from CUDA's toolkit or PyPI"
        )
    command = ["cuobjdump", "-sass", sys.argv[1]]
    early, kernels = [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dump:
        assert dump.stdout is not None
        for kernel, name in first_touches(dump.stdout):
            kernels += 1
            if name != WAIT:
                early.append(f"{kernel}: {name} before {WAIT}")
    print(
        *early, f"{kernels} kernels touch memory, {len(early)} of them before they wait", sep="\n"
    )
    if early or not kernels or dump.returncode:
        sys.exit(1)


if __name__ == "__main__":
    main()
