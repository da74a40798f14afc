"""`blockscale inspect` and `blockscale doctor`: figures against a direct computation."""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blockscale as bs
import numpy as np
import pytest
import torch
from blockscale.cli import doctor, inspect
from blockscale.cli.main import main
from blockscale.noise import Noise
from commands import refusal
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPECS = ["fp8_128x128", "mxfp8", "mxfp4", "nvfp4", "amdfp4"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "weight": torch.randn(300, 200, generator=generator).bfloat16(),
        "experts": torch.randn(3, 50, 70, generator=generator) * 0.01,
        "half": torch.randn(129, 33, generator=generator).half(),
        "zeros": torch.zeros(4, 32),
        "bias": torch.zeros(10),
        "ids": torch.zeros(4, 4, dtype=torch.int64),
        "nothing": torch.zeros(0, 8),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    return path


def rows(output: str) -> dict[tuple[str, str], list[str]]:
    """(tensor, spec) -> [amax, SQNR, underflow, saturation] of the printed table."""
    found: dict[tuple[str, str], list[str]] = {}
    tensor = amax = ""
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if len(cells) == 7:
            tensor, amax = cells[0] or tensor, cells[2] or amax
            found[tensor, cells[3]] = [amax, *cells[4:]]
    return found


def largest_share(x: Tensor, y: Tensor, spec: Any) -> Tensor:
    """Where |x| is clipped: above what the block's scale lets the largest code stand for.

    Independent of the codes: the top of the block's range is its scale times the largest value.
    """
    q = bs.quantize(x, spec)
    outer = torch.tensor(1.0) if q.outer is None else q.outer
    top = {"e2m1": 6.0, "e4m3fn": 448.0}[q.spec.element]
    height, width = q.spec.block
    scales = decode_scales(q.scales).repeat_interleave(height, 0).repeat_interleave(width, 1)
    limit = outer * scales[: x.shape[0], : x.shape[1]] * top
    return x.float().abs() > limit * (1 + 2.0**-20)


def decode_scales(scales: Tensor) -> Tensor:
    """uint8 scales are ue5m3: its value is e5m3 with bias 15, subnormals below."""
    if scales.dtype != torch.uint8:
        return scales.float()
    exponent, mantissa = scales.int() >> 3, (scales.int() & 7).float()
    normal = torch.ldexp(1 + mantissa / 8, exponent - 15)
    return torch.where(exponent > 0, normal, mantissa * 2.0**-17)


@pytest.mark.parametrize("chunk", [1 << 22, 4000])  # the whole tensor at once; a few rows
def test_figures_match_a_direct_computation(
    chunk: int, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "CHUNK_ELEMENTS", chunk)
    words = [word for spec in SPECS for word in ("--spec", spec)]
    assert main(["inspect", str(file), *words]) == 0
    output = capsys.readouterr().out
    assert "wrote" not in output  # no picture was asked for
    printed = rows(output)
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in ("weight", "experts", "half")}
    assert len(printed) == len(SPECS) * 4
    for name, tensor in tensors.items():
        x = tensor.reshape(-1, tensor.shape[-1])
        for text in SPECS:
            spec = bs.spec(text)
            y = bs.dequantize(bs.quantize(x, spec), dtype=torch.float32)
            error = x.double() - y.double()
            sqnr = 10 * math.log10(x.double().square().sum() / error.square().sum())
            underflow = ((x != 0) & (y == 0)).sum() / (x != 0).sum()
            saturation = largest_share(x, y, spec).double().mean()
            assert printed[name, text] == [
                f"{x.abs().max().item():.4g}", f"{sqnr:.2f}", f"{underflow:.3%}",
                f"{saturation:.3%}",
            ], (name, text)  # fmt: skip
    assert printed["zeros", "nvfp4"] == ["0", "inf", "0.000%", "0.000%"]


def test_saturation_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MXFP4's scale for a block whose amax is 6.9 is 1, so the 6.9 becomes 6."""
    x = torch.zeros(2, 32)
    x[0, 3], x[1, 5], x[1, 6] = 6.9, -1.0, 0.01
    save_file({"x": x}, tmp_path / "x.safetensors")
    assert main(["inspect", str(tmp_path / "x.safetensors"), "--spec", "mxfp4"]) == 0
    amax, _, underflow, saturation = rows(capsys.readouterr().out)["x", "mxfp4"]
    assert (amax, underflow, saturation) == ("6.9", f"{1 / 3:.3%}", f"{1 / 64:.3%}")


def test_what_becomes_0_is_not_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A block whose scale underflows keeps codes of the largest magnitude."""
    x = torch.zeros(2, 16)
    x[0], x[1, 3] = 1e-9, 1.0
    save_file({"x": x}, tmp_path / "x.safetensors")
    assert main(["inspect", str(tmp_path / "x.safetensors"), "--spec", "nvfp4"]) == 0
    _, _, underflow, saturation = rows(capsys.readouterr().out)["x", "nvfp4"]
    assert (underflow, saturation) == (f"{16 / 17:.3%}", "0.000%")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_has_no_rates(
    value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.ones(4, 32)
    x[1, 1] = value
    save_file({"x": x}, tmp_path / "x.safetensors")
    words = ["inspect", str(tmp_path / "x.safetensors"), "--spec", "nvfp4", "--spec", "mxfp8"]
    assert main(words) == 0
    found = rows(capsys.readouterr().out)
    for spec in ("nvfp4", "mxfp8"):
        assert found["x", spec] == [f"{value:.4g}", "nan", "nan", "nan"]


def test_the_largest_of_numbers_and_nan() -> None:
    for order in itertools.permutations((1.0, math.nan, 2.0)):
        assert math.isnan(inspect.max_of(torch.tensor(value) for value in order))


def test_chunks_are_rounded_by_bits_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half = torch.randn(128, 32, generator=torch.Generator().manual_seed(0))
    save_file({"x": half.repeat(2, 1)}, tmp_path / "x.safetensors")
    monkeypatch.setattr(inspect, "CHUNK_ELEMENTS", half.numel())
    spec, noise = bs.spec("mxfp4[rounding=stochastic,scale_rule=rceil]"), Noise()
    for index in range(2):
        noise.add(half, spec, None, bs.Rng(0, index))
    assert main(["inspect", str(tmp_path / "x.safetensors"), "--spec", spec.text]) == 0
    _, sqnr, underflow, _ = rows(capsys.readouterr().out)["x", spec.text]
    assert (sqnr, underflow) == (f"{noise.sqnr:.2f}", f"{noise.underflow:.3%}")


def test_each_spec_is_drawn_with_its_own_figures(figures: list[Figure]) -> None:
    specs = [bs.spec("mxfp8"), bs.spec("nvfp4")]
    of = {("a", 0): (30.0, 0.1, 0.2), ("a", 1): (20.0, 0.3, 0.4)}
    of |= {("b", 0): (35.0, 0.0, 0.5), ("b", 1): (25.0, 0.6, 0.7)}
    found = [inspect.Result(n, (2, 2), specs[i].text, 1.0, *share) for (n, i), share in of.items()]
    inspect.draw(found, specs)
    quantities = ("SQNR (dB)", "underflow (%", "saturation (%")
    for panel, (axes, factor) in enumerate(zip(figures[0].axes, (1, 100, 100), strict=True)):
        assert axes.get_xlabel().startswith(quantities[panel])
        assert axes.get_ylim() == figures[0].axes[0].get_ylim()  # where the names are
        for index, line in enumerate(axes.lines):
            want = [factor * of[name, index][panel] for name in "ab"]
            x, y = np.asarray(line.get_xydata()).T.tolist()
            assert (x, y) == (pytest.approx(want), [0, 1])


def test_many_specs_are_drawn_apart(figures: list[Figure]) -> None:
    """More than there are colours, whose marks may lie one on another: the later the smaller."""
    rules, names = ("floor", "ceil", "even"), ("mxfp8", "mxfp6", "mxfp4")
    specs = [bs.spec(f"{name}[scale_rule={rule}]") for name in names for rule in rules]
    found = [inspect.Result("x", (2, 2), spec.text, 1.0, 30.0, 0.0, 0.0) for spec in specs]
    inspect.draw(found, specs)
    for axes in figures[0].axes:
        assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 9
        sizes = [line.get_markersize() for line in axes.lines]
        assert sizes == sorted({*sizes}, reverse=True)


def test_what_has_no_place_in_the_plot_is_marked(figures: list[Figure]) -> None:
    nan, inf = math.nan, math.inf
    values = {"a": (30.0, 0.0, 0.0), "b": (nan, nan, nan), "c": (inf, 0, 0), "d": (-inf, 0, 0)}
    found = [inspect.Result(name, (2, 2), "mxfp8", 1.0, *of) for name, of in values.items()]
    inspect.draw(found, [bs.spec("mxfp8")])
    texts: list[list[Any]] = [list(axes.texts) for axes in figures[0].axes]
    marked = [{(text.get_text(), text.xy) for text in panel} for panel in texts]
    nothing = {("NaN", (0, 1))}
    assert marked == [nothing | {("exact", (1, 2)), ("overflows", (0, 3))}, nothing, nothing]
    marks = [line for axes in figures[0].axes for line in axes.lines[1:]]
    places = {tuple(np.asarray(line.get_xydata()).ravel()) for line in marks}
    assert places == {(0, 1), (1, 2), (0, 3)}
    assert not any(line.get_clip_on() for line in marks)  # whole, though half outside


def test_a_name_does_not_reach_the_terminal_as_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a\x1b[2J\nb": torch.ones(4, 4), "c\x07": torch.ones(4)}, tmp_path / "x.safetensors")
    assert main(["inspect", str(tmp_path / "x.safetensors"), "--spec", "mxfp8"]) == 0
    out = capsys.readouterr().out
    assert r"│ a\x1b[2J\nb │" in out
    assert r"skipped c\x07: 1-D" in out
    refused = refusal(capsys, "inspect", f"{tmp_path}/\x1b]0;gone")
    assert refused.startswith(rf"blockscale inspect: file = {tmp_path}/\x1b]0;gone; need")


def test_brackets_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"layers[0]": torch.ones(16, 16)}, tmp_path / "a.safetensors")
    words = ["--spec", "nvfp4", "--spec", "nvfp4[block=16x16]"]
    assert main(["inspect", str(tmp_path / "a.safetensors"), *words]) == 0
    out = capsys.readouterr().out
    assert list(rows(out)) == [("layers[0]", "nvfp4"), ("layers[0]", "nvfp4[block=16x16]")]
    table = [[cell.strip() for cell in line.split("│")[1:4]] for line in out.splitlines()]
    assert [row for row in table if row] == [["layers[0]", "16x16", "1"], ["", "", ""]]


def test_brackets_and_overflows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are not the console's markup; a value that decodes to Inf is noise without bound."""
    tensors = {"a[red]b": torch.ones(16, 32), "c[/d]": torch.zeros(4), "e[/f]": torch.ones(1, 8)}
    tensors["large"] = torch.full((1, 32), 3.4e38)
    (tmp_path / "x[").mkdir()
    save_file(tensors, tmp_path / "x[" / "y].safetensors")
    words = ["inspect", str(tmp_path / "x[/y].safetensors"), "--out", str(tmp_path / "x[/y].png")]
    assert main([*words, "--spec", "nvfp4[block=16x16]", "--spec", "mxfp6"]) == 0
    out = capsys.readouterr().out
    assert f"wrote {tmp_path}/x[/y].png" in out
    assert "skipped c[/d]: 1-D, not a matrix" in out
    printed = rows(out)
    assert printed["a[red]b", "nvfp4[block=16x16]"][1] == "inf"
    assert ("e[/f]", "nvfp4[block=16x16]") in printed
    assert printed["large", "mxfp6"][1] == "-inf"


def test_skipped_tensors_and_plot(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.png"
    assert main(["inspect", str(file), "--spec", "mxfp8", "--out", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "skipped bias: 1-D, not a matrix" in out
    assert "skipped ids: I64, not one of F32, BF16, F16" in out
    assert "skipped nothing: empty" in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "plot.png"]


def test_a_spec_asked_for_twice_is_one(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--spec", "mxfp8", "--spec", "mxfp8[scale_rule=rceil]", "--spec", "mxfp8"]
    plot = tmp_path / "plot.png"
    assert main(["inspect", str(file), *words, "--out", str(plot)]) == 0
    assert capsys.readouterr().out.count("mxfp8") == 4  # a row for each tensor
    assert plot.exists()


def drawn(names: list[str]) -> bytes:
    """The plot of tensors of these names under one spec."""
    found = [inspect.Result(name, (2, 2), "mxfp8", 1.0, 30.0, 0.0, 0.0) for name in names]
    return inspect.draw(found, [bs.spec("mxfp8")])


@pytest.mark.parametrize("count", [3, 400, 700])
def test_names_beside_the_plot_stand_apart(count: int, figures: list[Figure]) -> None:
    names = [f"layers.{index}.weight" for index in range(count)]
    drawn(names)
    axes = figures[0].axes[0]
    texts = axes.get_yticklabels()
    assert [text.get_text() for text in texts] == (names if count < 700 else names[::2])
    boxes = [text.get_window_extent() for text in texts]  # from the top down
    assert all(above.y0 > below.y1 for above, below in itertools.pairwise(boxes))
    line = boxes[0].y0 - boxes[1].y0
    assert axes.bbox.y1 - boxes[0].y1 < line  # no empty band
    assert boxes[-1].y0 - axes.bbox.y0 < line


def test_long_and_odd_names_beside_the_plot(figures: list[Figure]) -> None:
    drawn(["model." + "layers." * 30 + "1.weight", r"a$\frac$"])
    axes = figures[0].axes[0]
    long, odd = (text.get_text() for text in axes.get_yticklabels())
    assert (len(long), odd) == (64, r"a$\frac$")
    assert long.startswith("model.layers.")
    assert "…" in long
    assert long.endswith("layers.1.weight")
    assert axes.bbox.width > figures[0].bbox.width / 5


def test_long_specs_leave_the_panels_their_size(figures: list[Figure]) -> None:
    specs = [
        bs.spec(f"nvfp4[block=16x16,outer=false,scale_rounding=up,rounding={rounding}]")
        for rounding in ("stochastic", "nearest")
    ]
    specs += [bs.spec(spec.text.replace("16x16", "1x16")) for spec in specs]
    found = [inspect.Result("x", (2, 2), spec.text, 1.0, 30.0, 0.0, 0.0) for spec in specs]
    inspect.draw(found, specs)
    whole, legend = figures[0].bbox, figures[0].legends[0].get_window_extent()
    assert whole.x0 < legend.x0 < legend.x1 < whole.x1
    for axes in figures[0].axes:
        assert axes.bbox.width > 0.25 * whole.width
        assert axes.bbox.height > 2.0 * figures[0].dpi


def test_a_checkpoint_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    parts = [f"{i}-of-2.safetensors" for i in (1, 2)]
    save_file({"b": torch.eye(4), "d": torch.eye(8)}, parts[0])
    save_file({"a": torch.eye(16), "c": torch.eye(4), "d": torch.eye(2)}, parts[1])
    for given in (["."], parts, [parts[1], "."], parts[::-1]):
        assert main(["inspect", *given, "--spec", "mxfp8"]) == 0
        found = [name for name, _ in rows(capsys.readouterr().out)]
        assert found == ["a", "b", "c", f"d ({parts[0]})", f"d ({parts[1]})"]


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """A checkpoint in three parts with its index."""
    folder = tmp_path / "indexed"
    folder.mkdir()
    for name in "abc":
        save_file({name: torch.ones(4, 32)}, folder / f"{name}.safetensors")
    files = {name: f"{name}.safetensors" for name in "abc"}
    index = {"metadata": {}, "weight_map": {**files, "another": files["b"]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def tensors_of(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The names in the table of a file or folder."""
    assert main(["inspect", str(path), "--spec", "mxfp8"]) == 0
    return [name for name, _ in rows(capsys.readouterr().out)]


def test_layers_are_in_the_order_of_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"h.{layer}.{part}" for layer in (0, 1, 2, 10, 11, 100) for part in ("10b", "w", "w2")]
    names += ["h.x", "h3"]
    save_file({name: torch.ones(1, 32) for name in sorted(names)}, tmp_path / "x.safetensors")
    assert tensors_of(tmp_path, capsys) == names


def test_a_checkpoint_lacks_parts(indexed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = indexed / "model.safetensors.index.json"
    assert tensors_of(indexed, capsys) == tensors_of(index, capsys) == ["a", "b", "c"]
    (indexed / "b.safetensors").unlink()
    for given in (indexed, index):
        assert refusal(capsys, "inspect", str(given)) == (
            f"blockscale inspect: file = {index} (1 of its 3 files missing, such as "
            "b.safetensors); need all of them; fetch the rest, or name the files to inspect"
        )
    assert tensors_of(indexed / "a.safetensors", capsys) == ["a"]
    other = indexed / "a.safetensors.index.json"  # of a variant that is whole
    other.write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    assert f"file = {index} (1 of its 3" in refusal(capsys, "inspect", str(indexed))


def test_the_index_of_a_variant_that_was_left_out(
    indexed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abc":
        (indexed / f"{name}.safetensors").unlink()
    assert "(a folder without *.safetensors)" in refusal(capsys, "inspect", str(indexed))
    save_file({"all": torch.ones(4, 32)}, indexed / "consolidated.safetensors")
    assert tensors_of(indexed, capsys) == ["all"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 99999, '{"weight_map": []}', '{"weight_map": {"a": 3}}']
)
def test_an_index_that_is_none(
    text: str, indexed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = indexed / "model.safetensors.index.json"
    index.write_text(text)
    for given in (indexed, index):
        assert refusal(capsys, "inspect", str(given)) == (
            f"blockscale inspect: file = {index} (damaged); need the index of a checkpoint in "
            "parts; fetch it again, or name the files to inspect"
        )


def test_an_index_that_cannot_be_read(indexed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = indexed / "model.safetensors.index.json"
    index.unlink()
    index.mkdir()
    assert refusal(capsys, "inspect", str(indexed)) == (
        f"blockscale inspect: file = {index} (Is a directory); need the index of a checkpoint in "
        "parts; fetch it again, or name the files to inspect"
    )


def test_an_index_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = tmp_path / "model.safetensors.index.json"
    assert refusal(capsys, "inspect", str(index)) == (
        f"blockscale inspect: file = {index}; need an existing file; check the path"
    )


@pytest.mark.parametrize(
    ("tensors", "why"),
    [({"bias": torch.zeros(3)}, "all its tensors are skipped"), ({}, "it holds no tensors")],
)
def test_a_file_of_nothing_to_inspect(
    tensors: dict[str, Tensor], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plot = tmp_path / "x.safetensors", tmp_path / "plot.png"
    save_file(tensors, path)
    assert main(["inspect", str(path), "--out", str(plot)]) == 0
    skipped = [f"skipped {name}: 1-D, not a matrix" for name in tensors]
    said = capsys.readouterr().out.splitlines()
    assert said == [*skipped, f"nothing to inspect in {path}: {why}"]
    assert not plot.exists()


def test_rates_are_explained(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], [str(file), "--spec", "mxfp8"]):
        assert main(["inspect", *words]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "other than 0 that become 0" in text
        assert "clipped to the largest code" in text


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (300, 20), (2, 130, 9), (3, 2, 200, 11)])
@pytest.mark.parametrize("budget", [1, 50, 4000, 1 << 22])
def test_chunks_cover_the_rows_in_order(
    shape: tuple[int, ...], budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "CHUNK_ELEMENTS", budget)
    x = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    save_file({"x": x}, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        parts = list(inspect.chunks(file.get_slice("x"), shape))
        read = list(inspect.pieces(file.get_slice("x"), shape))
    assert torch.equal(torch.cat(parts), x.reshape(-1, shape[-1]))
    assert all(len(part) % 128 == 0 for part in parts[:-1])
    assert max(part.numel() for part in read) <= max(budget, shape[-1])


def test_bad_files(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing.safetensors")
    assert refusal(capsys, "inspect", missing) == (
        f"blockscale inspect: file = {missing}; need an existing file; check the path"
    )
    content = file.read_bytes()
    foreign = {"cut": content[:-100], "empty": b"", "header": content[:20], "text": b"hello" * 99}
    for name, data in foreign.items():
        path = tmp_path / name
        path.write_bytes(data)
        line = refusal(capsys, "inspect", str(path))
        assert line.startswith(f"blockscale inspect: file = {path} (")
        assert line.endswith(
            "); need a whole safetensors file; it is truncated, damaged or of another kind"
        )
    within = str(file / "a")
    assert refusal(capsys, "inspect", within) == (
        f"blockscale inspect: file = {within} (Not a directory); need a file that can be read; "
        "check its permissions"
    )
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    said = "(a folder without *.safetensors); need a safetensors file, or a folder of some; check"
    assert said in refusal(capsys, "inspect", str(file), str(nothing))
    assert f"file = {missing}" in refusal(capsys, "inspect", str(file), missing)


def test_a_file_that_may_not_be_read(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any) -> Any:  # as for anyone but root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(inspect, "open", refuse, raising=False)
    assert refusal(capsys, "inspect", str(file)) == (
        f"blockscale inspect: file = {file} (Permission denied); need a file that can be read; "
        "check its permissions"
    )


def test_what_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe that nobody writes to would be waited for without end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (str(pipe), "/dev/zero"):
        assert refusal(capsys, "inspect", path) == (
            f"blockscale inspect: file = {path} (not a regular file); need one; save it to a file "
            "first"
        )
    assert refusal(capsys, "inspect", "") == (
        "blockscale inspect: file = ''; need an existing file; check the path"
    )


@pytest.mark.parametrize("out", [".", "/", "..", "folder", "folder.png"])
def test_a_plot_is_no_folder(
    out: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if out[0] == "f":
        (tmp_path / out).mkdir()
    assert refusal(capsys, "inspect", str(file), "--out", out) == (
        f"blockscale inspect: --out = {out} (a folder); need a .png file; name one"
    )


def test_bad_options(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "inspect", str(file), "--spec", "nvpf4").endswith(
        "; did you mean nvfp4?"
    )
    line = refusal(capsys, "inspect", str(file), "--spec", "nvfp4[hadamard=16]")
    assert line.startswith("blockscale inspect: --spec = nvfp4[hadamard=16]; need a spec without")
    line = refusal(capsys, "inspect", str(file), "--spec", "nvfp4[bogus=1]")
    assert line.startswith("blockscale inspect: --spec = nvfp4[bogus=1]; ")
    assert refusal(capsys, "inspect", str(file), "--out", str(tmp_path / "plot.pdf")) == (
        f"blockscale inspect: --out = {tmp_path / 'plot.pdf'}; need a .png file; name it "
        f"{tmp_path / 'plot.png'}"
    )
    assert refusal(capsys, "inspect", str(file), "--out", str(tmp_path / "gone" / "plot.png")) == (
        f"blockscale inspect: --out = {tmp_path / 'gone' / 'plot.png'}; need a file in an "
        "existing folder; choose another path"
    )


def test_a_plot_in_a_folder_that_takes_nothing(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before the long work; /proc refuses new files to everyone."""
    line = refusal(capsys, "inspect", str(file), "--out", "/proc/self/plot.png")
    assert line.startswith("blockscale inspect: --out = /proc/self/plot.png (")
    assert line.endswith("); need a folder that can be written; choose another")


def test_doctor_speaks_of_avx_512() -> None:
    """describe() has the names of Highway, which counts AVX-512 as a third AVX."""
    about = bs.describe() | {"instruction_sets": ["AVX3_SPR", "AVX3", "AVX2", "SSE4"]}
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(doctor.facts(about))
    assert "AVX-512_SPR (usable here too: AVX-512, AVX2, SSE4)" in console.export_text()


@pytest.mark.parametrize(
    ("cores", "threads", "said"),
    [(1, 1, "1 core, 1 thread in use"), (8, 1, "8 cores, 1 thread in use"),
     (8, 4, "8 cores, 4 threads in use")],
)  # fmt: skip
def test_doctor_counts_threads(
    cores: int, threads: int, said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert main(["doctor"]) == 0
    assert said in capsys.readouterr().out


def test_doctor_names_backends_recipes_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    about = bs.describe()
    assert torch.__version__ in out
    best, *others = map(doctor.processor_name, about["instruction_sets"])
    assert best + (f" (usable here too: {', '.join(others)})" if others else "") in out
    for name in (*bs.recipe_names(), *(b["name"] for b in about["backends"])):
        assert name in out
    line = next(line for line in out.splitlines() if "│ nvfp4" in line)
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells[1] == "yes"
    if not torch.cuda.is_available():
        assert cells[2] not in ("", "yes")
