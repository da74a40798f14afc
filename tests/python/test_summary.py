"""tools/test.py counts what every test runner reports: nothing may be lost or counted twice."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

JUNIT = """<testsuites><testsuite>
  <testcase name="a"/>
  <testcase name="b"><failure message="x"/></testcase>
  <testcase name="c"><skipped message="x"/></testcase>
  <testcase name="d"><error message="x"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def summary() -> ModuleType:
    spec = importlib.util.spec_from_file_location("summary", ROOT / "tools" / "test.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["summary"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_counts_of_pytest(summary: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(JUNIT)
    assert str(summary.count_pytest(report)) == "1 passed, 2 failed, 1 skipped"


def test_counts_of_gtest(summary: ModuleType, tmp_path: Path) -> None:
    tests: list[dict[str, object]] = [
        {"result": "COMPLETED"},
        {"result": "COMPLETED", "failures": [{"failure": "x"}]},
        {"result": "SKIPPED"},
        {"result": "SUPPRESSED"},
    ]
    report = tmp_path / "gtest.json"
    report.write_text(json.dumps({"testsuites": [{"testsuite": tests}]}))
    assert str(summary.count_gtest(report)) == "1 passed, 1 failed, 2 skipped"


@pytest.mark.parametrize(
    ("status", "count", "failed"),
    [
        (0, (3, 0, 1), 0),
        (1, (3, 2, 0), 2),
        (1, (3, 0, 0), 1),  # the runner failed outside its tests
        (-11, None, 1),  # it crashed before it could write
        (0, (0, 0, 0), 1),  # it ran nothing
    ],
)
def test_a_runner_that_contradicts_its_report_has_failed(
    summary: ModuleType, status: int, count: tuple[int, int, int] | None, failed: int
) -> None:
    believed = summary.verdict("runner", status, summary.Count(*count) if count else None)
    assert believed.failed == failed


def gtest_binary(folder: Path, script: str) -> Path:
    """A stand-in for a GoogleTest binary."""
    binary = folder / "binary"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    return binary


def test_a_crash_of_the_gtest_binary_is_one_failure(summary: ModuleType, tmp_path: Path) -> None:
    binary = gtest_binary(tmp_path, "kill -SEGV $$")
    assert str(summary.run_gtest(binary, tmp_path, 1)).startswith("0 passed, 1 ")


@pytest.mark.parametrize("report", ['{"testsuites": [', '{"tests": 3}', ""])
def test_a_report_that_is_cut_off_is_one_failure(
    summary: ModuleType, tmp_path: Path, report: str
) -> None:
    """As by a disk that is full, even if the runner says that all is well."""
    (tmp_path / "cut.json").write_text(report)
    binary = gtest_binary(tmp_path, f'cp {tmp_path}/cut.json "${{2#--gtest_output=json:}}"')
    assert str(summary.run_gtest(binary, tmp_path, 1)) == "0 passed, 1 failed, 0 skipped"


def test_shards_are_counted_together_and_one_that_crashes_is_a_failure(
    summary: ModuleType, tmp_path: Path
) -> None:
    tests = {"testsuites": [{"testsuite": [{"result": "COMPLETED"}]}]}
    (tmp_path / "passed.json").write_text(json.dumps(tests))
    (tmp_path / "empty.json").write_text(json.dumps({"testsuites": []}))
    script = f"""
case $GTEST_SHARD_INDEX in
  0 | 1) cp {tmp_path}/passed.json "${{2#--gtest_output=json:}}" ;;
  2) cp {tmp_path}/empty.json "${{2#--gtest_output=json:}}" ;;
  *) kill -SEGV $$ ;;
esac"""
    binary = gtest_binary(tmp_path, script)
    assert str(summary.run_gtest(binary, tmp_path, 3)) == "2 passed, 0 failed, 0 skipped"
    assert str(summary.run_gtest(binary, tmp_path, 4)) == "2 passed, 1 failed, 0 skipped"


def test_no_test_in_any_shard_is_a_failure(summary: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text(json.dumps({"testsuites": []}))
    binary = gtest_binary(tmp_path, f'cp {tmp_path}/empty.json "${{2#--gtest_output=json:}}"')
    assert str(summary.run_gtest(binary, tmp_path, 2)).startswith("0 passed, 1 ")


def test_a_binary_may_run_under_an_emulator(summary: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(
        json.dumps({"testsuites": [{"testsuite": [{"result": "COMPLETED"}]}]})
    )
    emulator = tmp_path / "emulator"  # what it is given: its own option, the binary, the report
    emulator.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "-x {tmp_path}/binary" ] && '
        f'cp {tmp_path}/report.json "${{4#--gtest_output=json:}}"\n'
    )
    emulator.chmod(0o755)
    binary = gtest_binary(tmp_path, "kill -SEGV $$")
    under = [str(emulator), "-x"]
    count = summary.run_gtest(binary, tmp_path, 1, under)
    assert str(count) == "1 passed, 0 failed, 0 skipped"
