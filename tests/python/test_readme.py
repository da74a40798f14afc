"""The README: its snippet runs, its generated parts are what the core and the results say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_python_snippet_runs_and_converts_one_layer() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    checks = (
        "assert y.shape == (1024, 512) and y.dtype == torch.bfloat16\n"
        "exact = x.float() @ w.float().t()\n"
        "assert 0.05 < (y.float() - exact).norm() / exact.norm() < 0.2\n"
        "assert isinstance(model[0], bs.nn.Linear) and not isinstance(model[2], bs.nn.Linear)\n"
        "assert model[0].weight.grad is not None\n"
    )
    done = run(sys.executable, "-c", snippet + checks)
    assert done.returncode == 0, done.stderr


def test_generated_parts_are_up_to_date() -> None:
    done = run(sys.executable, "tools/readme.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
