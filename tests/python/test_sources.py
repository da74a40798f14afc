"""Rules of the sources that no compiler checks."""

from __future__ import annotations

import re
from pathlib import Path

GPU = Path(__file__).resolve().parents[2] / "src" / "gpu"
CUDA = GPU.parent / "cuda"


def test_every_kernel_waits_for_the_ones_before() -> None:
    """start() lets a kernel enter the device early, so its first statement has to wait."""
    kernels = 0
    for source in {*GPU.rglob("*.cu"), *GPU.rglob("*.h")} - {GPU / "port" / "host.h"}:
        for first in re.findall(r"__global__[^;{]*\{\s*(\S+)", source.read_text()):
            if first != "}":
                assert first.startswith("after_previous("), source.name
                kernels += 1
    assert kernels > 10


def test_the_gemm_reads_nothing_as_constant() -> None:
    """It finds its first tile before it waits. What __ldg() loads counts as written before the
    kernel began, so the compiler brings it in front of the wait."""
    for source in {*CUDA.rglob("*.cu"), *CUDA.rglob("*.h")}:
        assert not re.search(r"__ldg\(\w|load_once\(", source.read_text()), source.name
