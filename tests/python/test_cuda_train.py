"""Converted models on a GPU: the compiler, checkpointing, whole-model graphs, the trainer."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import blockscale as bs
import pytest
import torch
from bits import equal
from blockscale.cli.main import main
from models import Block
from torch import nn
from torch._dynamo.testing import CompileCounter

RECIPES = [name for name in bs.recipe_names() if not bs.recipe(name).cuda_needs]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def normal(device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


# --- the compiler ---------------------------------------------------------------------------------


def test_fakes_are_exact(cuda: torch.device) -> None:
    """matmul's result comes from PyTorch's own operators: its strides too are what is promised."""
    for m, n, k in ((5, 9, 70), (1, 9, 16), (5, 1, 1), (0, 3, 16), (3, 0, 16), (2, 3, 0)):
        a, b = (bs.quantize(torch.ones(r, k, device=cuda), "nvfp4") for r in (m, n))
        for out in (torch.float32, torch.bfloat16):
            for bias in (None, torch.ones(n, device=cuda)):
                y = bs.matmul(a, b, bias, out)
                assert (y.dtype, y.shape, y.stride()) == (out, (m, n), (max(n, 1), 1))
                assert y.is_contiguous()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_compiled(recipe: str, backend: str, cuda: torch.device) -> None:
    inputs = [normal(cuda, *shape).requires_grad_() for shape in ((2, 9, 70), (33, 70), (33,))]
    seed = torch.tensor(5, device=cuda)

    def f(*tensors: torch.Tensor) -> torch.Tensor:
        x, w, bias, offset = tensors
        return bs.linear(x, w, bias, recipe, rng=bs.Rng(seed, offset))

    g: Callable[..., torch.Tensor] = torch.compile(f, fullgraph=True, backend=backend)
    for offset in (torch.tensor(1, device=cuda), torch.tensor(2, device=cuda)):
        ys = [f(*inputs, offset), g(*inputs, offset)]
        grads = [torch.autograd.grad(y.square().sum(), inputs) for y in ys]
        pairs = zip((ys[0], *grads[0]), (ys[1], *grads[1]), strict=True)
        for name, (want, got) in zip(("y", "dx", "dw", "db"), pairs, strict=True):
            # Ours are opaque to the compiler; only what it generates itself (the sum over dy for
            # the bias, BF16's whole layer) may differ in its last bits.
            if name == "db" or recipe == "bf16":
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
            else:
                assert torch.equal(got, want), name


def test_dynamic_shapes_compile_once(cuda: torch.device) -> None:
    counter = CompileCounter()

    def f(x: torch.Tensor) -> torch.Tensor:
        q = bs.quantize(x, "nvfp4[block=16x16]", axis=-2, layout="nv_128x4")
        return q.dequantize(torch.float32)

    g: Callable[..., torch.Tensor] = torch.compile(f, backend=counter, dynamic=True, fullgraph=True)
    for rows in (7, 40, 129):
        x = normal(cuda, rows, 70)
        assert torch.equal(g(x), f(x))
    assert counter.frame_count == 1


# --- converted models -----------------------------------------------------------------------------


def model_on(device: torch.device, rerun: bool = False) -> nn.Sequential:
    """Converted before it moves: the keys move with it."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    bs.convert(model, "nvfp4", seed=3)
    for block in model:
        assert isinstance(block, Block)
        block.rerun = rerun
    return model.to(device)


def gradients(model: nn.Module, device: torch.device, steps: int = 2) -> list[torch.Tensor]:
    """Of two micro-batches a step, both forwards before both backwards."""
    grads = []
    for step in range(steps):
        batches = [normal(device, 20, 48, seed=2 * step + i) for i in range(2)]
        losses = [model(batch).square().mean() for batch in batches]
        for loss in losses:
            loss.backward()
        grads += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        bs.advance(model)
    return grads


def test_a_converted_model_moves(cuda: torch.device) -> None:
    """Its state is on the device, draws what it draws on the CPU, and comes back."""
    cpu = torch.device("cpu")
    model, twin = model_on(cuda), model_on(cpu)
    layer = model[0].up
    assert isinstance(layer, bs.nn.Linear)
    tensors = (layer._seed, layer._rng_state.offset, layer._rng_state.upcoming)
    assert {t.device for t in tensors} == {cuda}
    for got, want in zip(gradients(model, cuda), gradients(twin, cpu), strict=True):
        # Sums in another order move a few codes of the next layer's operands.
        error = (got.cpu() - want).norm() / want.norm()
        assert error < 0.05, error
    assert bs.rng_state(model) == bs.rng_state(twin) == {"step": 2, "forward": 0, "seed": 3}
    x = normal(cpu, 20, 48)
    model.cpu()
    assert torch.equal(model(x), twin(x))


def test_a_compiled_evaluation_may_be_the_first_forward(cuda: torch.device) -> None:
    """It moves no random bits: in inference mode these would be tensors unfit for training."""
    grads = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        layer = bs.nn.Linear(64, 32, recipe="nvfp4", seed=3)
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(cuda)
        run = torch.compile(layer, backend="aot_eager") if evaluates else layer
        x = normal(cuda, 16, 64)
        if evaluates:
            with torch.inference_mode():
                run(x)
        run(x).square().sum().backward()
        assert layer._seed.device == cuda
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad)
    assert torch.equal(*grads)


def test_compiled_checkpointing_may_be_the_first_forward(cuda: torch.device) -> None:
    """Of weights that have moved alone, as fully_shard moves them."""
    found = []
    for moves_alone in (False, True):
        model = model_on(torch.device("cpu") if moves_alone else cuda, rerun=True)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(cuda)
        for block in model:
            block.compile(fullgraph=True, backend="aot_eager")
        model(normal(cuda, 20, 48)).square().mean().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None and p.dim() == 2])
    assert equal(*found)


def test_random_bits_follow_a_checkpoint_that_is_assigned(cuda: torch.device) -> None:
    layer = bs.nn.Linear(64, 32, device="meta", recipe="nvfp4")
    layer.load_state_dict(nn.Linear(64, 32, device=cuda).state_dict(), assign=True)
    assert layer._seed.device == layer._rng_state.offset.device == cuda


def test_a_layer_made_on_the_gpu_draws_what_one_on_the_cpu_draws(cuda: torch.device) -> None:
    made, moved = bs.nn.Linear(70, 37, device=cuda, seed=9), bs.nn.Linear(70, 37, seed=9)
    moved.load_state_dict(made.state_dict())
    moved.cuda()
    x = normal(cuda, 20, 70)
    for _ in range(2):
        ys = [layer(x) for layer in (made, moved)]
        grads = [
            torch.autograd.grad(y.square().sum(), layer.weight)[0]
            for y, layer in zip(ys, (made, moved), strict=True)
        ]
        assert torch.equal(*ys)
        assert torch.equal(*grads)


@pytest.mark.parametrize("what", ["checkpoint", "compiled", "compiled checkpoint"])
def test_recomputation_and_compilation_draw_the_same_bits(what: str, cuda: torch.device) -> None:
    want = gradients(model_on(cuda), cuda)
    model = model_on(cuda, rerun="checkpoint" in what)
    if "compiled" in what:
        model.compile(fullgraph=True, backend="aot_eager")
    got = gradients(model, cuda)
    # Bias gradients are PyTorch's sums; everything else is a function of the same operands.
    assert equal([g for g in got if g.dim() == 2], [w for w in want if w.dim() == 2])


def test_a_graph_of_a_whole_step(cuda: torch.device) -> None:
    """Forward, backward and the count of steps in one graph: every replay draws fresh bits."""
    model, twin = model_on(cuda), model_on(cuda)
    x = normal(cuda, 20, 48)

    def step(m: nn.Module) -> None:
        m.zero_grad(set_to_none=False)
        m(x).square().mean().backward()
        bs.advance(m)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(model)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model)
    for _ in range(2):  # what the two runs before the capture did; capturing runs nothing
        step(twin)
    seen = []
    for _ in range(3):
        graph.replay()
        step(twin)
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert equal(seen[-1], [p.grad for p in twin.parameters() if p.grad is not None])
    assert not equal(seen[0], seen[1])
    assert bs.rng_state(model) == bs.rng_state(twin) == {"step": 5, "forward": 0, "seed": 3}


def test_copies_and_state_dicts(cuda: torch.device) -> None:
    model = model_on(cuda)
    gradients(model, cuda, steps=1)
    twin = copy.deepcopy(model)
    assert equal(gradients(twin, cuda), gradients(model, cuda))
    loaded = pickle.loads(pickle.dumps(model))
    layer = loaded[0].up
    assert layer._seed.device == layer._rng_state.offset.device == cuda
    assert equal(gradients(loaded, cuda), gradients(model, cuda))
    assert all(not name.startswith("_") for name in model.state_dict())


# --- commands -------------------------------------------------------------------------------------


def losses(folder: Path, key: str) -> dict[tuple[str, int], float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(row["recipe"], row["step"]): row[key] for row in rows if key in row}


TINY = ("--steps", "4", "--eval-every", "2", "--checkpoint-every", "2", "--batch-size", "2",
        "--seq-len", "64")  # fmt: skip


def train(out: Path, text: Path, *options: str) -> int:
    return main(["train", "--out", str(out), "--data", str(text), *TINY, *options])


def test_train(cuda: torch.device, tmp_path: Path) -> None:
    """Every recipe that runs there, from the CPU's weights and batches, twice the same."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(20):
        (text / f"{i}.txt").write_text(" ".join(str(i * j * j) for j in range(400)))
    assert train(tmp_path / "gpu", text, "--device", "cuda") == 0
    assert train(tmp_path / "again", text, "--device", "cuda") == 0
    assert train(tmp_path / "cpu", text, "--recipes", ",".join(RECIPES)) == 0
    gpu, again, cpu = (losses(tmp_path / n, "train_loss") for n in ("gpu", "again", "cpu"))
    assert gpu == again
    assert gpu.keys() == cpu.keys()
    assert {recipe for recipe, _ in gpu} == set(RECIPES)
    for cell, loss in gpu.items():
        assert abs(loss - cpu[cell]) < 0.02, (cell, loss, cpu[cell])
    settings = json.loads((tmp_path / "gpu" / "settings.json").read_text())
    assert settings["environment"]["gpu"] == torch.cuda.get_device_name()
    for recipe in RECIPES:
        assert list((tmp_path / "gpu").rglob(f"*{recipe}*.safetensors"))


@pytest.mark.usefixtures("cuda")
def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in bs.recipe_names():
        line = next(line for line in lines if f"│ {name} " in line)
        cell = line.split("│")[3].strip()
        assert (cell == "yes") == (name in RECIPES), line
    assert any("backend cuda" in line and "available" in line for line in lines)


def test_importing_wakes_no_gpu(cuda: torch.device) -> None:
    """A process that has looked at a GPU cannot use it in its forked children."""
    code = (
        "import os, torch, blockscale as bs\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    q = bs.quantize(torch.ones(4, 32, device='cuda'), 'nvfp4')\n"
        "    os._exit(0 if q.dequantize().sum() == 128 else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_layers_on_two_gpus_draw_what_they_draw_on_one() -> None:
    class Net(torch.nn.Module):
        def __init__(self, *devices: str) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.devices = devices
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in devices)
            for layer, device in zip(self.layers, devices, strict=True):
                layer.to(device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, device in zip(self.layers, self.devices, strict=True):
                x = layer(x.to(device))
            return x

    made = []
    for devices in (("cuda:0", "cuda:0", "cuda:0"), ("cuda:0", "cuda:1", "cuda:0")):
        model = Net(*devices)
        bs.convert(model, "nvfp4")
        for _ in range(2):
            model(torch.ones(8, 64, device="cuda:0")).square().sum().backward()
            bs.advance(model)
        made.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
        layer = model.layers[0]
        assert isinstance(layer, bs.nn.Linear)
        offset = layer._rng_state.offset
        model.float().load_state_dict(model.state_dict())  # moves nothing
        assert layer._rng_state.offset is offset
    for one, two in zip(*made, strict=True):
        assert torch.equal(one, two)
