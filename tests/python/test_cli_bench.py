"""`blockscale bench`: what it writes, that it refuses wrong answers, and what it draws."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blockscale as bs
import pytest
import torch
from blockscale.cli import bench, bench_cases, bench_chart, bench_read, bench_run
from blockscale.cli.bench_clock import CpuClock
from blockscale.cli.main import main
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
H200 = ROOT / "bench" / "results" / "h200.json"
SHAPES = ("300x288", "3x40x72")


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Path]]:
    """Runs the command on the CPU with five calls a case, of the shapes in the first words: exit
    status and folder."""
    monkeypatch.setattr(bench_run, "CpuClock", functools.partial(CpuClock, least=0.0))

    def run(*words: str) -> tuple[int, Path]:
        end = words.index("--only") if "--only" in words else len(words)
        shapes = [word for shape in words[:end] for word in ("--shape", shape)]
        words = (*shapes, *words[end:])
        return main(["bench", "--device", "cpu", "--out", str(tmp_path), *words]), tmp_path

    return run


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_results_picture_and_table(
    measure: Callable[..., tuple[int, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, folder = measure(*SHAPES)
    assert status == 0
    assert is_png(folder / "bench.png")
    found = json.loads((folder / "results.json").read_text())
    where, rows = found["provenance"], found["rows"]
    assert where["device"] == "cpu"
    assert where["torch"] == torch.__version__
    assert where["blockscale"] == bs.__version__
    assert {"date", "commit", "cpu", "threads", "instruction_set", "load_average"} <= set(where)
    cases = [
        {r["case"] for r in rows if r["shape"] == shape} for shape in ([300, 288], [3, 40, 72])
    ]
    quantizers = {
        f"quantize/{spec}/axis:{axis}" for spec in bench_cases.ROWS_AND_COLUMNS for axis in (-1, -2)
    } | {f"quantize_dual/{row}+{col}" for row, col in bench_cases.DUAL}
    assert cases[1] == quantizers | {"torch.neg"}
    assert cases[0] >= cases[1]
    if importlib.util.find_spec("torchao"):  # a peer, where it is: the same codes as ours
        assert {"torchao to_mx mxfp8", "torchao to_mx mxfp4"} < cases[0]
    for row in rows:
        assert row["us"] > 0
        assert row["goal"] is None  # the goals are a GPU's
        assert row["of_copy"] == pytest.approx(row["tb_per_s"] / where["copy_tb_per_s"])
    # 300 x 288 of BF16 in; codes padded to 384 columns and three FP32 scales a line out.
    row = next(r for r in rows if r["case"] == "quantize/fp8_1x128/axis:-1")
    moved = 300 * 288 * 2 + 300 * 384 + 300 * 3 * 4
    assert row["tb_per_s"] * row["us"] * 1e6 == pytest.approx(moved)
    printed = capsys.readouterr().out
    assert all(shape in printed for shape in SHAPES)
    assert "quantize/nvfp4[block=16x16]/axis:-2" in printed


def test_only_some_cases(
    measure: Callable[..., tuple[int, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, folder = measure("64x96", "--only", r"quantize/nvfp4\[.*axis:-1$")
    assert status == 0
    rows = json.loads((folder / "results.json").read_text())["rows"]
    wanted = {name for name in bench_cases.ROWS_AND_COLUMNS if name.startswith("nvfp4[")}
    assert len(wanted) > 1
    assert {row["case"] for row in rows} == {f"quantize/{name}/axis:-1" for name in wanted}
    capsys.readouterr()
    (folder / "results.json").unlink()
    for text in ("of no case", "["):
        assert measure("64x96", "--only", text)[0] == 2
        assert f"--only = {text} (" in capsys.readouterr().err


def test_the_example_of_only_is_one_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    example = re.search("'(.*quantize/.*)'", capsys.readouterr().out)
    assert example is not None
    cases = {row["case"] for row in json.loads(H200.read_text())["rows"]}
    found = {case for case in cases if re.search(example[1], case)}
    assert len(found) > 5
    assert {case.partition("/")[0] for case in found} == {"quantize"}


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_a_wrong_answer_is_not_timed(
    part: str,
    measure: Callable[..., tuple[int, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = bs.quantize

    def wrong(x: Tensor, *args: Any, **options: Any) -> bs.QuantizedTensor:
        q = right(x, *args, **options)
        if len(x) > 128:  # the measured input, not the part that it is compared with
            getattr(q, part).view(torch.uint8)[0, 0].bitwise_xor_(1)  # a single bit
        return q

    monkeypatch.setattr(bs, "quantize", wrong)
    status, folder = measure("300x200")
    assert status == 1
    assert f"{part}: bits differ from the CPU's" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_an_answer_that_decodes_to_something_else_is_refused() -> None:
    x = torch.randn(64, 256)
    q = bs.quantize(x, "mxfp8")
    bench_cases.plausible("right", x, q)
    for y in (-x, bs.dequantize(q, dtype=torch.float32)):  # wrong, and too good to be true
        with pytest.raises(bench_cases.WrongAnswer, match="relative error"):
            bench_cases.plausible("wrong", y, q)


TINY = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (1, 128), (128, 1), (2, 16), (1, 1, 1), (3, 1, 5)]


@pytest.mark.parametrize("shape", TINY, ids=str)
def test_blocks_of_one_or_two_values(shape: tuple[int, ...], random: torch.Generator) -> None:
    """Right answers, some of them exact, are plausible, whatever the values; others are not."""
    options: dict[str, Any] = {"batch_dims": len(shape) - 2, "rng": bs.Rng(7, 1)}
    for spec in bench_cases.ROWS_AND_COLUMNS:
        for axis in (-1, -2):
            x = torch.randn(shape, generator=random).bfloat16()
            q = bs.quantize(x, spec, axis=axis, **options)
            bench_cases.plausible(spec, x, q)
            if not q.spec.hadamard:
                for y in (-x, 4 * x, 0.3 * x):
                    with pytest.raises(bench_cases.WrongAnswer, match="relative error"):
                        bench_cases.plausible(spec, y, q)


def test_few_values_too_good_to_be_true(random: torch.Generator) -> None:
    """As few as ENOUGH beside the largest of each block."""
    for spec in ("mxfp8", "mxfp4", "fp8_1x128"):
        x = torch.randn(3, 1 + bench_cases.ENOUGH // 3 + 1, generator=random)
        q = bs.quantize(x, spec)
        bench_cases.plausible(spec, x, q)
        with pytest.raises(bench_cases.WrongAnswer, match="relative error"):
            bench_cases.plausible(spec, bs.dequantize(q, dtype=torch.float32), q)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("spec", ["fp8_1x128", "fp8_128x128", "mxfp4", "nvfp4[block=16x16]"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 300), (300, 5), (2, 130, 40)], ids=str)
def test_the_largest_of_each_block(
    shape: tuple[int, ...], spec: str, axis: int, random: torch.Generator
) -> None:
    x = torch.randn(shape, generator=random)
    q = bs.quantize(x, spec, axis=axis, batch_dims=len(shape) - 2)
    found = bench_cases.largest_of_blocks(x, q).view(-1, *shape[-2:])
    lines, columns = q.spec.block if axis == -1 else q.spec.block[::-1]
    for matrix, where in zip(x.abs().view(found.shape), found, strict=True):
        for r in range(0, shape[-2], lines):
            for c in range(0, shape[-1], columns):
                part = slice(r, r + lines), slice(c, c + columns)
                assert matrix[part][where[part]].tolist() == [matrix[part].amax().item()]


def test_a_refusal_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    words = ["bench", "--device", "cpu", "--shape", "4x4", "--out", str(out)]
    errors = {
        bench_cases.WrongAnswer("case: bits"): "case: bits; nothing is written",
        torch.OutOfMemoryError("CUDA out of memory."): "--shape (out of memory on cpu); need room "
        "for 3 inputs and what becomes of them; give a smaller --shape",
    }
    for error, line in errors.items():

        def fail(*_: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(bench_run, "run", fail)
        assert main(words) == 1
        assert capsys.readouterr().err == f"blockscale bench: {line}\n"
        assert list(tmp_path.iterdir()) == []


def test_a_peer_with_other_codes_is_left_out(
    measure: Callable[..., tuple[int, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "torchao to_mx mxfp8"

    def zeros(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros(x.shape, dtype=torch.uint8),)

    monkeypatch.setattr(bench_run, "torchao", lambda device: {name: zeros})
    status, folder = measure("128x256")
    assert status == 0
    assert f"note: {name} is left out: WrongAnswer" in capsys.readouterr().out
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert name not in {row["case"] for row in rows}


def test_groups_and_layouts_are_checked() -> None:
    """The cases of a GPU's run, whose answers are compared with the CPU's own here."""
    grouped = bench_cases.Data((300, 160), "cpu", groups=5)
    assert grouped.offsets is not None
    assert grouped.offsets[-1] == 300
    for case in grouped.quantizers():
        case.check()
        assert case.moved > grouped.x[0].nbytes
    pairs = list(bench_cases.Data((300, 160), "cpu").layouts())
    assert len(pairs) == 2 * sum(map(len, bench_cases.LAYOUTS.values()))
    for case, linear in pairs:
        case.check()
        assert case.name.startswith("layout/")
        assert linear.name.startswith("quantize/")


def test_a_wrong_layout_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bench_cases.Data((64, 128), "cpu")
    case, _ = next(data.layouts())
    monkeypatch.setattr(bs, "relayout", lambda q, layout: bs.quantize(data.x[1], "fp8_1x128"))
    with pytest.raises(bench_cases.WrongAnswer, match="bits differ"):
        case.check()


def test_an_earlier_run_is_printed_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_run, "run", None)  # nothing is measured
    assert main(["bench", "--from", str(H200), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    found = bench_read.read(H200)
    for row in found["rows"]:
        assert bench.share(row) in printed
        assert bench.goal(row) in printed
    assert found["provenance"]["gpu"] in printed
    assert [path.name for path in tmp_path.iterdir()] == ["bench.png"]
    assert is_png(tmp_path / "bench.png")


def test_an_earlier_run_is_found_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_run, "run", None)
    assert main(["bench", "--from", str(tmp_path)]) == 2
    assert f"--from = {tmp_path / 'results.json'} (No such file" in capsys.readouterr().err
    shutil.copy(H200, tmp_path / "results.json")
    assert main(["bench", "--from", str(tmp_path)]) == 0
    assert bench_read.read(H200)["provenance"]["gpu"] in capsys.readouterr().out
    assert is_png(tmp_path / "bench.png")


def test_the_picture_shows_every_case_once() -> None:
    found = bench_read.read(H200)["rows"]
    rows = [row for row in found if row.get("shape") == [16384, 8192] and "of_copy" in row]
    lines = bench_chart.arranged({row["case"]: row for row in rows})
    headings = {heading for heading, _, _ in bench_chart.GROUPS}
    assert sorted(line for line in lines if line not in headings) == sorted(r["case"] for r in rows)
    for peer, case in bench_cases.BESIDE.items():
        if peer in lines:
            assert lines.index(case) < lines.index(peer) < lines.index(case) + 3


def test_the_picture_says_what_it_shows(figures: list[Figure]) -> None:
    bench_chart.draw(bench_read.read(H200))
    (figure,), (legend,) = figures, figures[0].legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[0] == "blockscale, 16384x8192"
    assert texts[-1] == "a large copy"
    title, machine = figure.axes[0].get_title().splitlines()
    assert title == "Quantizers: share of a large copy's speed"
    assert machine.startswith("NVIDIA H200, copy 4.")


@pytest.mark.parametrize(
    ("row", "share", "goal", "reached"),
    [
        ({"of_copy": 0.9, "goal": 0.94}, "90% of copy", "≥ 94%", False),
        ({"of_copy": 0.95, "goal": 0.94}, "95% of copy", "≥ 94%", True),
        ({"of_bf16": 0.81, "goal": 0.8}, "0.81x BF16", "≥ 0.80x", True),
        ({"of_linear": 0.96, "goal": 0.97}, "96% of linear", "≥ 97%", False),
        ({"of_empty": 2.1, "goal": 2.0}, "2.1x an empty kernel", "≤ 2x", False),
        ({"of_empty": 1.9, "goal": 2.0}, "1.9x an empty kernel", "≤ 2x", True),
    ],
)
def test_shares_and_goals(row: dict[str, Any], share: str, goal: str, reached: bool) -> None:
    assert (bench.share(row), bench.goal(row), bench.reached(row)) == (share, goal, reached)


def test_one_thread_is_not_several() -> None:
    where: dict[str, Any] = {"cpu": "Cpu", "copy_tb_per_s": 0.01, "commit": ""}
    where |= {"blockscale": "0", "torch": "2", "date": "2026-01-01"}
    said = [bench.origin(where | {"threads": count}).split(", ")[1] for count in (1, 2)]
    assert said == ["1 thread", "2 threads"]


def test_every_case_on_a_gpu(cuda: torch.device, tmp_path: Path) -> None:
    words = ["--device", "cuda", "--shape", "2048x1024", "--shape", "3x130x200"]
    assert main(["bench", "--out", str(tmp_path), *words]) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    launches = {f"launch, 1024x1024, {spec}" for spec in bench_cases.LAUNCH_SPECS}
    assert launches < {row["case"] for row in rows}
    assert is_png(tmp_path / "bench.png")
