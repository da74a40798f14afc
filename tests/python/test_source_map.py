"""docs/source.md names every file of the library and the package, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "source.md").read_text()
FOLDERS = ("include", "src", "binding", "python/blockscale")
BUILT = {"lib", "__pycache__"}


def files() -> set[str]:
    """Every file of the folders that the page maps."""
    found = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file())
    return {str(file.relative_to(ROOT)) for file in found if not BUILT & set(file.parts)}


def test_every_file_has_one_line() -> None:
    listed = []
    for folder, lines in re.findall(
        r"^### `([^`]*)/`\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL
    ):
        names = re.findall(r"^\| `([^`]+)` \| \S", lines, re.MULTILINE)
        assert names, folder
        listed += [f"{folder}/{name}" for name in names]
    assert len(listed) == len(set(listed))
    assert set(listed) == files()


def test_every_path_of_the_text_exists() -> None:
    paths = re.findall(r"`([^`\s]+/[^`\s]*)`", PAGE)
    assert len(paths) > 50
    for path in paths:
        assert (ROOT / path).exists(), path


def test_every_name_of_a_step_is_in_a_file_of_that_step() -> None:
    steps = re.findall(r"^\d+\. .*$", PAGE.partition("## Every file")[0], re.MULTILINE)
    assert len(steps) == 17
    for step in steps:
        texts = [(ROOT / p).read_text() for p in re.findall(r"`([^`\s]+/[^`\s]+\.\w+)`", step)]
        for name in re.findall(r"`(\w+)(?:\(\))?`", step):
            assert any(re.search(rf"\b{name}\b", text) for text in texts), f"{name} in {step}"
