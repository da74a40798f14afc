"""Rules of the sources that no compiler checks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from waits import WAIT, first_touches

ROOT = Path(__file__).resolve().parents[2]
GPU, CUDA = ROOT / "src" / "gpu", ROOT / "src" / "cuda"


def test_every_kernel_waits_for_the_ones_before() -> None:
    """start() lets a kernel enter the device early, so its first statement has to wait."""
    kernels = 0
    sources = {*GPU.rglob("*.cu"), *GPU.rglob("*.h"), CUDA / "operands.cu"}
    for source in sources - {GPU / "port" / "host.h"}:
        for first in re.findall(r"__global__[^;{]*\{\s*(\S+)", source.read_text()):
            if first != "}":
                assert first.startswith("after_previous("), source.name
                kernels += 1
    assert kernels > 10
    # The GEMM waits later (docs/decisions.md), and in any case.
    gemm = (CUDA / "sm90" / "multiply.h").read_text()
    last = "if (p.problem.previous != Previous::any) after_previous();\n}"
    assert gemm.count("__global__") == 1
    assert last in gemm.split("__global__")[1]


def test_the_gemm_reads_nothing_as_constant() -> None:
    """It finds its first tile before it waits. What __ldg() loads counts as written before the
    kernel began, so the compiler brings it in front of the wait."""
    sources = {*CUDA.rglob("*.cu"), *CUDA.rglob("*.h")}
    assert len(sources) > 8
    for source in sources:
        assert not re.search(r"__ldg\((?!\))|load_once\(", source.read_text()), source.name


def test_what_touches_memory_before_a_wait_is_found() -> None:
    code = """
\t\tFunction : late
        /*0010*/                   LDC R1, c[0x0][0x28] ;    /* 0x00000a00ff017b82 */
        /*0020*/              @!P0 LDS.128 R4, [R2] ;        /* 0x0000000002048984 */
        /*0030*/                   ACQBULK ;                 /* 0x000000000000782e */
        /*0040*/                   LDG.E R2, desc[UR4][R2.64] ;
\t\tFunction : early
        /*0010*/          @!UP1 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0020*/              @P0 LDG.E.CONSTANT R3, desc[UR4][R2.64] ;
        /*0030*/                   ACQBULK ;
\t\tFunction : nothing
        /*0010*/                   EXIT ;
"""
    assert list(first_touches(code.splitlines())) == [("late", WAIT), ("early", "LDG")]


def test_the_binding_compiles_with_the_oldest_pytorch() -> None:
    """TORCH_TARGET_VERSION hides functions that PyTorch 2.11 lacks, but no macros, and the headers
    here are of a newer one. `make oldest` compiles with its headers."""
    for source in (ROOT / "binding").iterdir():
        assert "STABLE_TORCH_ERROR" not in source.read_text(), source.name


def test_cited_sections_of_the_specification_exist() -> None:
    specification = (ROOT / "docs" / "specification.md").read_text()
    sections = set(re.findall(r"^## (\d+)\. ", specification, flags=re.MULTILINE))
    cited = 0
    for folder in ("include", "src", "binding", "python", "tests", "bench"):
        for source in (ROOT / folder).rglob("*"):
            if source.suffix in {".h", ".cc", ".cu", ".py"} and source != Path(__file__).resolve():
                text = re.sub(r"\n\s*(//|#)?", " ", source.read_text())
                assert not re.search(r"numerics,? section|layouts page", text), source
                for numbers in re.findall(r"specification,? \(?sections? ([\d, and]+)", text):
                    assert set(re.findall(r"\d+", numbers)) <= sections, source
                    cited += 1
    assert cited > 20
