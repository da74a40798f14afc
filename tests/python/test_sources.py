"""Rules of the sources that no compiler checks."""

from __future__ import annotations

import re
from pathlib import Path

GPU = Path(__file__).resolve().parents[2] / "src" / "gpu"


def test_every_kernel_waits_for_the_ones_before() -> None:
    """start() lets a kernel enter the device early, so its first statement has to wait."""
    kernels = 0
    for source in {*GPU.rglob("*.cu"), *GPU.rglob("*.h")} - {GPU / "port" / "host.h"}:
        for first in re.findall(r"__global__[^;{]*\{\s*(\S+)", source.read_text()):
            if first != "}":
                assert first.startswith("after_previous("), source.name
                kernels += 1
    assert kernels > 10
