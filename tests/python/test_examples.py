"""Runs the programs of examples/python, which contain the assertions; on a GPU if there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "python"
ON_RANKS = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# The launcher of each, and the last thing it says.
EXAMPLES = {
    "convert_model.py": ((), "the resumed run has the same losses, to the bit"),
    "expert_parallel.py": (("-m", *ON_RANKS), "are those of one process"),
    "fsdp2.py": (("-m", *ON_RANKS), "hold the same weights"),
    "moe_layer.py": ((), "nvfp4"),
    "published_checkpoint.py": ((), "0.weight_scale_inv"),
    "quantize_and_inspect.py": ((), "fp8_1x128"),
}


def test_no_example_is_left_out() -> None:
    assert EXAMPLES.keys() == {file.name for file in FOLDER.glob("*.py")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str) -> None:
    launcher, said = EXAMPLES[name]
    done = subprocess.run(
        [sys.executable, *launcher, FOLDER / name],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", [name for name, (launcher, _) in EXAMPLES.items() if launcher])
def test_an_example_without_its_launcher_says_how_it_is_run(name: str) -> None:
    alone = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    done = subprocess.run(
        [sys.executable, FOLDER / name],
        env=alone, capture_output=True, text=True, check=False,
    )  # fmt: skip
    run = f"torchrun --standalone --nproc-per-node 2 examples/python/{name}"
    assert (done.returncode, done.stderr) == (1, f"no ranks; run: {run}\n")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_says_how_it_is_run(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert len(text.splitlines()) < 100
    launcher = "torchrun --standalone --nproc-per-node 2" if EXAMPLES[name][0] else "python"
    assert f"Run: {launcher} examples/python/{name}\n" in text
