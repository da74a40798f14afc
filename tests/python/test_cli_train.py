"""`blockscale train`: what a run leaves behind, and that no kill changes a bit of it."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import math
import os
import signal
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import blockscale as bs
import pytest
import torch
from blockscale.cli import train as cli_train
from blockscale.cli.data import Corpus, load_corpus
from blockscale.cli.doctor import processor_name
from blockscale.cli.errors import CliError
from blockscale.cli.files import temporary_of, write_atomically
from blockscale.cli.main import main
from blockscale.cli.model import PRESETS, Experts, LanguageModel
from blockscale.cli.progress import LiveProgress
from blockscale.cli.provenance import ORIGIN
from blockscale.cli.run_folder import Cell, RunFolder, create_run, run_id
from blockscale.cli.trainer import Trainer, learning_rate, reproducible_kernels
from commands import Command, refusal
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file

RECIPES = "bf16,nvfp4"
SMALL = ["--recipes", RECIPES, "--seq-len", "32", "--batch-size", "2", "--steps", "16"]
SMALL += ["--eval-every", "8", "--checkpoint-every", "4"]


def train(*words: str) -> str:
    done = Command("train", *words).end()
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl, without its time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row.pop("seconds") > 0 for row in rows)
    return rows


def sources(folder: Path, files: int, size: int) -> str:
    """That folder, filled with the beginnings of some of the standard library's sources. Losses are
    measured on one in twenty, which with all of them takes longer than a short run."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.glob("*.py"))[5 : 5 + files]:
        (folder / path.name).write_bytes(path.read_bytes()[:size])
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sources(tmp_path_factory.mktemp("text"), 12, 1000)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, text: str) -> tuple[Path, str]:
    """An uninterrupted run: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, train("--out", str(folder), "--data", text, *SMALL)


def test_run_leaves_report_plot_metrics_and_weights(whole: tuple[Path, str]) -> None:
    folder, out = whole
    rows = metrics(folder)
    for recipe in RECIPES.split(","):
        own = [row for row in rows if row["recipe"] == recipe]
        assert [r["step"] for r in own if "train_loss" in r] == list(range(1, 17))
        assert [r["step"] for r in own if "validation_loss" in r] == [8, 16]
        final = own[-1]["validation_loss"]
        assert f"{final:.4f}" in out
        assert (
            f"| {recipe} | {final:.4f} | {final / math.log(2):.4f} |"
            in (folder / "report.md").read_text()
        )
    # The noise of NVFP4's results, with the final weights.
    noise = [{k: v for k, v in row.items() if k.endswith("_db")} for row in rows]
    assert [bool(of) for of in noise] == [row is rows[-1] for row in rows]
    y, dx, dw = noise[-1].values()
    assert all(10 < db < 30 for db in (y, dx, dw))
    assert f"| nvfp4 | {y:.1f} | {dx:.1f} | {dw:.1f} |" in (folder / "report.md").read_text()
    about = bs.describe()["instruction_set"]
    report = (folder / "report.md").read_text()
    assert f"| instruction_set | {processor_name(about)} |" in report
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    kept = sorted((folder / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["bf16-seed0.safetensors", "nvfp4-seed0.safetensors"]
    with safe_open(kept[1], framework="pt") as weights:
        assert weights.metadata() == {"trained_as": "nvfp4-seed0"}


def wait_for(path: Path, running: Command) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert running.process.is_alive(), running.end().stderr
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_sigkill_and_resume_change_no_bit(
    whole: tuple[Path, str], tmp_path: Path, text: str
) -> None:
    """Killed in each training; a torn metrics line and a torn temporary file are left behind."""
    out = tmp_path / "killed"
    running = Command("train", "--out", str(out), "--data", text, *SMALL)
    for awaited in ("bf16-seed0.pt", "nvfp4-seed0.pt"):
        wait_for(out / "checkpoints" / awaited, running)
        running.send(signal.SIGKILL)
        assert running.end().returncode == -signal.SIGKILL
        with open(out / "metrics.jsonl", "a") as file:
            file.write('{"seed": 0, "recipe": "bf16", "st')
        weights = (out / "checkpoints" / awaited).with_suffix(".safetensors")
        if not weights.exists():  # else the kill came too late for it
            temporary_of(weights).write_bytes(b"torn")
        running = Command("train", "--out", str(out), "--resume")
    done = running.end()
    assert done.returncode == 0, done.stderr
    assert metrics(out) == metrics(whole[0])
    names = ["bf16-seed0.safetensors", "nvfp4-seed0.safetensors"]
    for name in names:
        paths = [folder / "checkpoints" / name for folder in (out, whole[0])]
        assert paths[0].read_bytes() == paths[1].read_bytes()
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == names


@pytest.mark.parametrize(
    ("words", "gpu", "noted"),
    [([], True, True), (["--device", "cpu"], True, False), ([], False, False)],
)
def test_a_gpu_that_is_not_used_is_noted(
    words: list[str],
    gpu: bool,
    noted: bool,
    tmp_path: Path,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(Trainer, "run", lambda trainer, progress: None)  # nothing is trained
    monkeypatch.setattr(cli_train, "write_report", lambda *_: None)
    monkeypatch.setattr(cli_train, "print_table", lambda folder, console: None)
    assert main(["train", "--out", str(tmp_path / "run"), "--data", text, *SMALL, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ("note: a GPU is available; --device cuda uses it" in lines) == noted
    refusal(capsys, "train", "--out", str(tmp_path / "run"), "--data", text, *words)  # no note


def test_ctrl_c_tells_how_to_resume(tmp_path: Path, text: str) -> None:
    out = tmp_path / "stopped"
    # Far more steps than it gets to do before the signal, however late that is on a busy machine.
    running = Command("train", "--out", str(out), "--data", text, *SMALL, "--steps", "100000")
    wait_for(out / "checkpoints" / "bf16-seed0.pt", running)
    running.send(signal.SIGINT)
    done = running.end(timeout=60)
    assert done.returncode == 130
    assert f"continue with: blockscale train --out {out} --resume" in done.stdout
    assert "Traceback" not in done.stderr


def test_resuming_a_finished_run_reports_again(whole: tuple[Path, str]) -> None:
    folder, first = whole
    before = metrics(folder)
    again = train("--out", str(folder), "--resume", "--steps", "16")
    table = first[first.index("┏") : first.rindex("┘")]
    assert table in again
    assert metrics(folder) == before


def test_recipes_with_changes(tmp_path: Path, text: str) -> None:
    """Brackets and commas in a recipe's name do not clash with those of the list, of rich's markup
    or of file names."""
    out, changed = tmp_path / "run", "fp8_blockwise[wgrad_x=fp8_128x128,keep_w=False]"
    changed += "[keep_w=False]" * 15  # longer than a file's name may be
    words = ["--out", str(out), "--seq-len", "8", "--batch-size", "1", "--steps", "2"]
    first = train(*words, "--data", text, "--recipes", f"bf16,{changed}")
    assert f"| {changed} |" in (out / "report.md").read_text()
    table = first[first.index("┏") :]
    column = "".join(line.split("│")[1].strip() for line in table.splitlines() if "│" in line)
    assert column == f"bf16{changed}"
    assert {row["recipe"] for row in metrics(out)} == {"bf16", changed}
    before = metrics(out)
    train(*words[:2], "--resume", "--recipes", f"bf16, {changed}")
    assert metrics(out) == before


def test_learns_more_than_byte_frequencies(tmp_path: Path) -> None:
    """The default model, a fifth of the default steps, a quarter of their size."""
    out, text = tmp_path / "learns", tmp_path / "text"
    text.mkdir()
    words = ["--data", sources(text, 150, 6000)]
    train("--out", str(out), *words, "--recipes", "nvfp4", "--steps", "40", "--batch-size", "4",
          "--seq-len", "64", "--eval-every", "40")  # fmt: skip
    baseline = load_corpus(words[1:], 64).unigram_loss()
    (final,) = (r["validation_loss"] for r in metrics(out) if "validation_loss" in r)
    assert final < baseline - 0.1


def test_a_training_is_this_loop(tmp_path: Path, text: str) -> None:
    """Written out, for the second of two seeds."""
    values = {"preset": "tiny-moe", "recipes": ["nvfp4"], "seed": 4, "seeds": 2, "steps": 12}
    values |= {"lr": 0.05, "batch_size": 2, "seq_len": 16, "device": "cpu"}
    folder = create_run(tmp_path / "run", values | {"eval_every": 5, "checkpoint_every": 5})
    cell, corpus = Cell(5, "nvfp4"), load_corpus([text], 16)
    with reproducible_kernels("cpu"):
        Trainer(folder, cell, corpus).run(LiveProgress(Console(file=io.StringIO()), 12, 0))

    model = LanguageModel(PRESETS["tiny-moe"], 16)
    model.initialize(5)
    bs.convert(model, "nvfp4", skip=["lm_head", "router"], seed=5)
    decay = {"matrices": 0.1, "norms": 0.0}
    groups: dict[str, list[torch.Tensor]] = {kind: [] for kind in decay}
    for parameter in model.parameters():
        groups["matrices" if parameter.dim() > 1 else "norms"].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[kind], "weight_decay": decay[kind]} for kind in decay],
        betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    in_bf16 = torch.autocast("cpu", torch.bfloat16)
    for step in range(1, 13):
        bs.set_step(model, step - 1)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, 12, 0.05)
        with in_bf16:
            loss = model(*corpus.batch(5, step, 2, 16))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        row = folder.rows.pop(0)
        assert (row["train_loss"], row["grad_norm"]) == (loss.item(), norm.item())
        if step not in (5, 10, 12):
            continue
        total, count = 0.0, 0
        model.eval()
        with torch.no_grad(), in_bf16:
            for tokens, targets in corpus.validation_batches(2, 16):
                total += model(tokens, targets, "sum").item()
                count += tokens.numel()
        model.train()
        row = folder.rows.pop(0)
        assert (row["step"], row["validation_loss"]) == (step, total / count)
    assert folder.rows == []
    trained = load_file(folder.weights_path(cell))
    for name, value in model.state_dict().items():
        assert torch.equal(trained[name], value), name


def test_noise_is_the_median_of_what_is_finite(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exact product has none, and one of zeros no number."""
    values = {"preset": "tiny", "recipes": ["mxfp8"], "seed": 0, "seeds": 1, "steps": 1, "lr": 0.1}
    values |= {"batch_size": 1, "seq_len": 16, "device": "cpu", "eval_every": 1}
    folder = create_run(tmp_path / "run", values | {"checkpoint_every": 1})
    of = {"y": (10.0, math.inf, 12.0, 30.0, math.inf), "dx": (math.nan, 7.0), "dw": (math.inf,)}
    found = [SimpleNamespace(gemm=gemm, sqnr=value) for gemm in of for value in of[gemm]]
    measured = contextlib.nullcontext(SimpleNamespace(products=found))
    monkeypatch.setattr(bs, "measure", lambda model: measured)
    trainer = Trainer(folder, Cell(0, "mxfp8"), load_corpus([text], 16))
    trainer.run(LiveProgress(Console(file=io.StringIO()), 1, 0))
    noise = {key: value for key, value in folder.rows[-1].items() if key.endswith("_db")}
    assert noise == {"y_db": 12.0, "dx_db": 7.0}


def test_batches_depend_on_seed_and_step_alone() -> None:
    data = torch.arange(10_000).remainder(256).to(torch.uint8)
    corpus = Corpus(data, data[:1000], 2, 1, "", "")
    tokens, targets = corpus.batch(3, 7, 4, 16)
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, corpus.batch(3, 7, 4, 16)[0])
    assert not torch.equal(tokens, corpus.batch(3, 8, 4, 16)[0])
    assert not torch.equal(tokens, corpus.batch(4, 7, 4, 16)[0])
    assert not torch.equal(corpus.batch(1, 11, 4, 16)[0], corpus.batch(11, 1, 4, 16)[0])
    short = Corpus(data[:18], data, 2, 1, "", "")  # where a window may begin in two places
    assert set(short.batch(0, 0, 64, 16)[0][:, 0].tolist()) == {0, 1}


def test_frequencies_are_of_the_training_text() -> None:
    train, validation = (torch.tensor([*text], dtype=torch.uint8) for text in (b"aab", b"abbb"))
    loss = Corpus(train, validation, 2, 1, "", "").unigram_loss()
    a, b = 3 / 259, 2 / 259  # one more of each byte than there is
    assert loss == pytest.approx(-(math.log(a) + 3 * math.log(b)) / 4)


def test_a_long_text_is_not_validated_whole() -> None:
    data = torch.arange(20_000).remainder(256).to(torch.uint8)
    batches = list(Corpus(data, data, 2, 1, "", "").validation_batches(100, 16))
    assert sum(len(tokens) for tokens, _ in batches) == 16384 // 16
    assert batches[-1][1][-1, -1] == data[-1]


@pytest.mark.parametrize("length", [18, 19, 33, 34, 1000])
def test_validation_windows_span_the_text_once(length: int) -> None:
    data = torch.arange(length).remainder(256).to(torch.uint8)
    batches = list(Corpus(data, data, 2, 1, "", "").validation_batches(3, 16))
    tokens = torch.cat([tokens for tokens, _ in batches])
    assert len(tokens) == max(1, (length - 17) // 16)
    assert tokens[0, 0] == 0
    if len(tokens) > 1:
        assert batches[-1][1][-1, -1] == data[-1]


def test_split_is_by_file_and_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    for folder in ("a", "b/c"):
        (tmp_path / folder).mkdir(parents=True)
        for index in range(40):
            (tmp_path / folder / f"{index}.txt").write_text(f"{index:02}" * 50)
    one = load_corpus([str(tmp_path / "a")], 16)
    two = load_corpus([str(tmp_path / "b" / "c")], 16)
    assert one.sha256 == two.sha256
    assert torch.equal(one.validation, two.validation)
    assert 0 < one.validation_files < 10
    assert len(one.train) + len(one.validation) == 40 * 101
    assert replace(one, validation_files=1).split.startswith("40 files, of which 1 is held out")
    assert replace(one, validation_files=2).split.startswith("40 files, of which 2 are held out")
    held_out = {bytes(part)[:2] for part in bytes(one.validation.numpy()).split(b"\0") if part}
    assert all(bytes(one.train.numpy()).find(name * 50) < 0 for name in held_out)


def test_one_file_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("0123456789" * 20)
    text = load_corpus([str(file)], 16)
    assert (len(text.train), len(text.validation)) == (180, 20)
    assert text.split == "1 file, of which the last tenth is held out for validation"
    file.write_text("0123456789" * 19 + "9876543210")
    assert load_corpus([str(file)], 16).sha256 != text.sha256
    assert len(load_corpus([str(file)], 18).validation) == 20
    with pytest.raises(CliError, match="20 bytes of validation text; need at least 21 for"):
        load_corpus([str(file)], 19)


def test_names_of_any_bytes_and_brackets(tmp_path: Path) -> None:
    """A file's name need not be UTF-8, and brackets are not the console's markup."""
    folder = os.fsencode(tmp_path) + b"/text\xe9"
    os.mkdir(folder)
    for index in range(3):
        with open(folder + b"/\xe9%d.txt" % index, "wb") as file:
            file.write(b"a line of text\n" * 20)
    out = tmp_path / "run["
    words = ["--data", os.fsdecode(folder), "--steps", "1", "--recipes", "bf16", "--seq-len", "8"]
    printed = train("--out", str(out / "b]"), "--batch-size", "2", *words)
    assert f" are in {out}/b]" in printed
    assert "tiny, 1 step " in printed
    report = (out / "b]" / "report.md").read_bytes()
    assert b"preset tiny, 1 step, seed 0\n" in report
    assert b"text\xe9" in report


def test_weights_come_from_the_seed_alone() -> None:
    models = [LanguageModel(PRESETS["tiny"], 16) for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        model.initialize(seed)
    first, same, other = (torch.cat([p.flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
def test_model_is_causal(preset: str) -> None:
    model = LanguageModel(PRESETS[preset], 16)
    model.initialize(0)
    tokens = torch.arange(16).view(1, 16)
    changed = tokens.clone()
    changed[0, 12:] += 100
    with torch.no_grad():
        losses = [model(t, tokens, "none") for t in (tokens, changed)]
    # (PyTorch's products of a few rows may depend on how many there are.)
    torch.testing.assert_close(losses[0][:12], losses[1][:12], rtol=1e-5, atol=0)
    assert not torch.equal(losses[0][12:], losses[1][12:])


def test_presets_grow_to_the_shape_of_gpt_124m() -> None:
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in LanguageModel(preset, preset.seq_len).layers.parameters())
            for preset in PRESETS.values()
        ]
        whole = [
            sum(p.numel() for p in LanguageModel(preset, preset.seq_len).parameters())
            for preset in PRESETS.values()
        ]
    about = [preset.about.split(" M")[0] for preset in PRESETS.values()]
    assert about == [f"{size / 1e6:.1f}" for size in whole]
    assert sizes[:3] == sorted(sizes[:3])
    assert sizes[2] == 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768)  # GPT-2 small has 85.1 M


def test_experts_are_what_each_token_asks_for() -> None:
    preset = PRESETS["tiny-moe"]
    model = LanguageModel(preset, 16)
    model.initialize(1)
    layer = model.get_submodule("layers.0.mlp")
    assert isinstance(layer, Experts)
    with torch.no_grad():
        layer.router.weight.mul_(20)  # decided, and uneven
    x = torch.randn(2, 16, preset.dim)
    want = torch.zeros_like(x).flatten(0, 1)
    likely = layer.router(x).flatten(0, 1).softmax(-1)
    for token, row in enumerate(x.flatten(0, 1)):
        best = likely[token].topk(preset.top)
        for weight, expert in zip(best.values / best.values.sum(), best.indices, strict=True):
            gate, up = (layer.gate_up.weight[expert] @ row).chunk(2)
            silu = torch.nn.functional.silu(gate)
            want[token] += weight * (layer.down.weight[expert] @ (silu * up))
    got, balance = layer(x)
    torch.testing.assert_close(got.flatten(0, 1), want)
    counts = torch.bincount(likely.topk(preset.top).indices.flatten(), minlength=preset.experts)
    share = counts / counts.sum()
    torch.testing.assert_close(balance, preset.experts * (share * likely.mean(0)).sum())


def test_uneven_routing_costs_in_training_alone() -> None:
    model = LanguageModel(PRESETS["tiny-moe"], 16)
    model.initialize(0)
    tokens = torch.arange(17)[None]
    balances: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, Experts):
            module.register_forward_hook(lambda *call: balances.append(call[2][1]))
    trained, judged = (model.train(on)(tokens[:, :-1], tokens[:, 1:]) for on in (True, False))
    assert len(balances) == 6
    balance = torch.stack(balances[:3]).sum()
    assert balance >= 3
    torch.testing.assert_close(trained - judged, 0.01 * balance, rtol=1e-3, atol=1e-6)


def test_schedule_warms_up_and_decays_to_a_tenth() -> None:
    rates = [learning_rate(step, 100, 2.0) for step in range(1, 101)]
    assert rates[9] == max(rates) == 2.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.2)
    assert learning_rate(1, 1, 2.0) == 2.0


def test_date_and_commit_are_stated_and_decide_nothing(whole: tuple[Path, str]) -> None:
    folder, _ = whole
    saved = json.loads((folder / "settings.json").read_text())
    before = saved["environment"]
    assert datetime.datetime.fromisoformat(before["date"]).tzinfo == datetime.timezone.utc
    report = (folder / "report.md").read_text()
    assert all(f"| {key} | {before[key]} |" in report for key in ORIGIN if key in before)
    later = before | {"date": "2031-01-01T00:00:00+00:00", "commit": "1234"}
    assert run_id(saved) == run_id(saved | {"environment": later})
    assert run_id(saved) != run_id(saved | {"environment": later | {"threads": 99}})
    assert run_id(saved) == run_id(dict(reversed(saved.items())))
    console = Console(file=io.StringIO(), record=True)
    cli_train.warn_of_changes(before, later, console)
    assert console.export_text() == ""
    cli_train.warn_of_changes(before, later | {"torch": "9"}, console)
    assert f"note: torch {before['torch']} -> 9 since" in console.export_text()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "kept"
    target.write_bytes(b"old")

    def fail(file: Any) -> None:
        file.write(b"half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomically(target, fail)
    assert target.read_bytes() == b"old"
    write_atomically(target, lambda file: file.write(b"new"))
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["kept"]


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("chosen", [(False, False), (True, False), (True, True)])
def test_the_choice_of_kernels_is_restored(chosen: tuple[bool, bool], filled: bool) -> None:
    settings: Any = torch.utils.deterministic

    def now() -> tuple[tuple[bool, bool], bool]:
        only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
        enabled = torch.are_deterministic_algorithms_enabled()
        return (enabled, only_warns), settings.fill_uninitialized_memory

    def choose(chosen: tuple[bool, bool], filled: bool) -> None:
        torch.use_deterministic_algorithms(chosen[0], warn_only=chosen[1])
        settings.fill_uninitialized_memory = filled

    before = now()
    choose(chosen, filled)
    try:
        with reproducible_kernels("cpu"):
            assert now() == ((True, False), False)
        assert now() == (chosen, filled)
    finally:
        choose(*before)


def test_long_names_of_trainings_stay_apart() -> None:
    """As long as no file's name can be, and different at the end only."""
    recipe = "mxfp8" + "[keep_w=False]" * 20
    names = {Cell(0, f"{recipe}[keep_x={keep}]").file_name for keep in (False, True)}
    assert len(names) == 2
    assert all(len(name) < 200 for name in names)


def test_a_run_begins_where_none_has_begun(tmp_path: Path) -> None:
    """What a kill left of one that had no settings yet does not matter; another run that began in
    the meantime does."""
    path, values = tmp_path / "run", {"recipes": ["bf16"], "seeds": 1, "seed": 4}
    path.mkdir()
    temporary_of(path / "settings.json").write_bytes(b"{")
    create_run(path, values)
    with pytest.raises(CliError, match="holds a run"):
        create_run(path, values | {"seed": 5})
    assert json.loads((path / "settings.json").read_text()) == values


def test_settings_alone_are_text(tmp_path: Path) -> None:
    """Folders of runs are left out of the text, but not those of other programs."""
    (tmp_path / "a.txt").write_text("0123456789" * 20)
    other = tmp_path / "other"
    other.mkdir()
    (other / "settings.json").write_text("0123456789" * 20)
    assert load_corpus([str(tmp_path)], 16).files == 2
    (other / "checkpoints").mkdir()
    assert load_corpus([str(tmp_path)], 16).files == 1


def test_metrics_reach_as_far_as_the_checkpoint(tmp_path: Path) -> None:
    """Neither a checkpoint nor the final weights are ahead of the metrics on disk, and the
    checkpoint stays until the weights are there."""
    folder: RunFolder = create_run(tmp_path / "run", {"recipes": ["bf16"], "seeds": 1, "seed": 4})
    cell = Cell(4, "bf16")
    folder.append(cell, 1, train_loss=1.0, seconds=1.0)
    folder.save_checkpoint(cell, {"step": 1})
    want = [{"seed": 4, "recipe": "bf16", "step": 1, "train_loss": 1.0}]
    assert metrics(tmp_path / "run") == want
    folder.append(cell, 2, train_loss=0.5, seconds=1.0)
    folder.weights_path(cell).mkdir()  # a file cannot take its place
    with pytest.raises(IsADirectoryError):
        folder.finish(cell, {})
    assert metrics(tmp_path / "run") == [*want, {**want[0], "step": 2, "train_loss": 0.5}]
    assert folder.checkpoint_path(cell).exists()
    folder.weights_path(cell).rmdir()
    folder.finish(cell, {})
    assert folder.finished(cell)
    assert not folder.checkpoint_path(cell).exists()
