"""What every test shares."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blockscale as bs
import pytest
import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.distributed.device_mesh import DeviceMesh

# Workers side by side share the processors: with all of them each, they wait for each other. Also
# for the processes that tests start.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
THREADS = max(1, (os.cpu_count() or 1) // WORKERS)
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
torch.set_num_threads(min(THREADS, torch.get_num_threads()))

try:
    from hypothesis import settings
except ModuleNotFoundError:  # a GPU machine may lack it; the tests that need it say so themselves
    pass
else:
    # A failing example prints the line that reproduces it. No deadline: the first call of an
    # operator may compile or start threads.
    settings.register_profile("blockscale", deadline=None, print_blob=True)
    settings.load_profile("blockscale")


@pytest.fixture(scope="session", autouse=True)
def compiled_afresh(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile in a folder of these tests' own, also in the processes that tests start: PyTorch's
    cache on disk does not know what sizes the operators of another commit had."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))


@functools.cache
def why_no_cuda() -> str:
    """Why tests cannot run on a GPU here; empty when they can."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    reasons = {backend["name"]: backend["reason"] for backend in bs.describe()["backends"]}
    reason: str = reasons["cuda"]
    return reason


@pytest.fixture
def cuda() -> torch.device:
    """The GPU of a test that needs one: skipped, with the reason, where there is none."""
    if why_no_cuda():
        pytest.skip(why_no_cuda())
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that a result is defined on."""
    if request.param == "cpu":
        return torch.device("cpu")
    gpu: torch.device = request.getfixturevalue("cuda")
    return gpu


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    meeting = f"file://{tmp_path / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def random() -> torch.Generator:
    """Fresh numbers in every run; a failure shows the seed, which BLOCKSCALE_TEST_SEED=n brings
    back."""
    seed = int(os.environ.get("BLOCKSCALE_TEST_SEED") or secrets.randbits(32))
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that matplotlib saves, to look at once they are drawn."""
    from matplotlib.figure import Figure

    kept: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **options: Any) -> None:
        save(figure, *args, **options)
        kept.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept
