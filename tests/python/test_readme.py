"""The README and the pages: their snippets run, generated parts are what the core and the results
say, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
        "assert isinstance(model.up, bs.nn.Linear)\n"
        "assert not isinstance(model.lm_head, bs.nn.Linear)\n"
        "assert model.up.weight.grad is not None and bs.rng_state(model)['step'] == 1\n"
    )
    done = run(sys.executable, "-c", snippet + checks)
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"^# (.*\n)", snippet, flags=re.MULTILINE)
    assert done.stdout == "".join(printed)


@pytest.mark.parametrize("tool", ["readme", "api"])
def test_generated_parts_are_up_to_date(tool: str) -> None:
    done = run(sys.executable, f"tools/{tool}.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", ["guide", "groups", "rng"])
def test_the_blocks_of_a_page_run(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    done = run(sys.executable, "-c", "\n".join(snippets))
    assert done.returncode == 0, done.stderr


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    made: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE):
        made.append("#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    # A heading that is there before gets a number.
    return {a if made.index(a) == i else f"{a}-{made[:i].count(a)}" for i, a in enumerate(made)}


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_and_pictures_exist(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]+)?\)", prose):
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), (target, anchor)
