"""The wheel and the C++ package, as somebody who has only them would use them.

The wheel is built once, looked into, and imported in an environment that holds torch, what torch
itself needs, and nothing else. The C++ package is installed to a prefix, and examples/cpp is
configured, built and run against it.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from blockscale import _core
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
BINDING = "blockscale/lib/libblockscale_torch.so"
MACHINE = platform.machine()

# Everything that the binding may need at load time: PyTorch by name, and the C++ run time.
ALLOWED_NEEDED = {
    "libtorch.so",
    "libtorch_cpu.so",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libc.so.6",
    "ld-linux-x86-64.so.2" if MACHINE == "x86_64" else f"ld-linux-{MACHINE}.so.1",
}

# Run in the fresh environment: no file of the work tree is in sight, nor any other package.
USE_THE_WHEEL = """
import importlib.util
import torch
import blockscale as bs

assert importlib.util.find_spec("numpy") is None, "the environment is not bare"
assert importlib.util.find_spec("pytest") is None, "the environment is not bare"
torch.manual_seed(0)
x = torch.randn(33, 100)
q = bs.quantize(x, "nvfp4")
assert q.codes.shape == (33, 56) and q.codes.dtype == torch.uint8
error = bs.dequantize(q, dtype=torch.float32) - x
sqnr = 10 * torch.log10(x.square().sum() / error.square().sum())
assert 18 < sqnr < 23, sqnr
print(bs.__file__)
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Standard output of a command that must succeed; its whole output when it does not."""
    done = subprocess.run(
        command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # In the build of the tests: the same sources and settings, compiled once.
    shared = "--config-settings=build-dir=build"
    pip_wheel = ["-m", "pip", "wheel", "--no-build-isolation", "--no-deps", shared, "--wheel-dir"]
    run(sys.executable, *pip_wheel, folder, ROOT)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="session")
def binding(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(BINDING, wheel.parent / "unpacked"))


def torch_and_its_dependencies() -> list[importlib.metadata.Distribution]:
    """The installed distributions that `pip install torch` would have brought."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = ["torch"]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        requirements = [Requirement(text) for text in found[name].requires or []]
        todo += [r.name for r in requirements if not r.marker or r.marker.evaluate({"extra": ""})]
    return list(found.values())


def link_distribution(distribution: importlib.metadata.Distribution, target: Path) -> None:
    """Links the top-level files and folders of an installed distribution into `target`."""
    for top in {file.parts[0] for file in distribution.files or []}:
        if top != ".." and top != "__pycache__" and not (target / top).exists():
            (target / top).symlink_to(str(distribution.locate_file(top)))


@pytest.fixture(scope="session")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with torch, what torch needs, and the wheel."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    for distribution in torch_and_its_dependencies():
        link_distribution(distribution, site_packages)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--no-deps", "--no-index", wheel)
    return python


def test_one_wheel_for_every_python(wheel: Path) -> None:
    assert re.fullmatch(rf"blockscale-[0-9.]+-py3-none-linux_{MACHINE}\.whl", wheel.name)


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].removesuffix(".dist-info") for name in names} == {
        "blockscale",
        "-".join(wheel.name.split("-")[:2]),
    }
    assert [name for name in names if name.endswith(".so")] == [BINDING]
    assert "blockscale/py.typed" in names
    sources = {
        path.relative_to(ROOT / "python").as_posix()
        for path in (ROOT / "python" / "blockscale").rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == sources


def test_binding_uses_no_python_symbol(binding: Path) -> None:
    symbols = [line.split()[-1] for line in run("nm", "-D", binding).splitlines()]
    assert any(symbol.startswith("aoti_torch_") for symbol in symbols), "nm shows nothing"
    assert [symbol for symbol in symbols if re.match(r"_?Py[A-Z_]", symbol)] == []


def test_binding_uses_only_the_stable_abi(binding: Path) -> None:
    symbols = run("nm", "-D", "-C", "--undefined-only", binding)
    assert [line for line in symbols.splitlines() if re.search(r"\b(c10|at|torch)::", line)] == []


def test_binding_loads_without_cuda(binding: Path) -> None:
    """PyTorch's builds for CPUs lack this function: "w" may stay undefined, "U" may not."""
    symbols = [line.split() for line in run("nm", "-D", "--undefined-only", binding).splitlines()]
    assert ["w", "aoti_torch_get_current_cuda_stream"] in symbols
    library = run("nm", "-D", "--defined-only", Path(torch.__path__[0]) / "lib" / "libtorch_cpu.so")
    defined = {line.split()[-1].split("@")[0] for line in library.splitlines()}
    needed = {name for kind, name in symbols if kind == "U" and name.startswith("aoti_torch_")}
    assert needed <= defined


def test_binding_exports_its_c_functions_alone(binding: Path) -> None:
    lines = run("nm", "-D", "--defined-only", binding).splitlines()
    functions = {line.split()[-1] for line in lines if line.split()[-2] == "T"}
    assert functions == set(_core._FUNCTIONS)


def test_binding_needs_torch_by_name_and_holds_no_path(binding: Path) -> None:
    dynamic = run("readelf", "-d", "-W", binding)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert {"libtorch_cpu.so"} <= needed <= ALLOWED_NEEDED
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def test_wheel_works_beside_nothing_but_torch(bare_python: Path, tmp_path: Path) -> None:
    output = run(bare_python, "-I", "-c", USE_THE_WHEEL, cwd=tmp_path)
    assert str(bare_python.parents[1]) in output.splitlines()[-1]


@pytest.fixture(scope="session")
def cpp_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/cpp, built against an install prefix by find_package(blockscale)."""
    assert (BUILD / "build.ninja").exists(), "no build folder; run `make setup` first"
    folder = tmp_path_factory.mktemp("example")
    prefix, build = folder / "prefix", folder / "build"
    run("cmake", "--install", BUILD, "--component", "cpp", "--prefix", prefix)
    configure = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_PREFIX_PATH={prefix}"]
    run("cmake", "-S", ROOT / "examples" / "cpp", "-B", build, *configure)
    run("cmake", "--build", build)
    return build / "blockscale_example"


@pytest.mark.parametrize(
    ("spec", "bits", "lowest", "highest"),
    [("nvfp4", 4.54, 20.0, 21.5), ("mxfp8", 8.45, 30.0, 33.0)],
)
def test_cpp_users_can_find_link_and_run(
    cpp_example: Path, spec: str, bits: float, lowest: float, highest: float
) -> None:
    match = re.fullmatch(rf"{spec}: (\S+) bits per value, SQNR (\S+) dB\n", run(cpp_example, spec))
    assert match
    assert float(match[1]) == pytest.approx(bits, abs=0.005)
    assert lowest < float(match[2]) < highest


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nvfp5", ("nvfp5", "nvfp4")),
        ("nvfp4[hadamard=16]", ("spec = nvfp4[hadamard=16]; need", "; drop hadamard=")),
    ],
)
def test_cpp_errors_reach_the_user(cpp_example: Path, spec: str, words: tuple[str, ...]) -> None:
    done = subprocess.run([cpp_example, spec], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert all(word in done.stderr for word in words)
