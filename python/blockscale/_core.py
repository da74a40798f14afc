"""Loads the compiled library: its operators (``torch.ops.blockscale``) and its facts (JSON)."""

from __future__ import annotations

import ctypes
import functools
import json
from pathlib import Path
from typing import Any, Final

import torch

# The C functions, and how many texts each is asked with.
_FUNCTIONS: Final = {
    "bs_describe": 0,
    "bs_backends": 0,
    "bs_spec": 1,
    "bs_spec_with": 2,
    "bs_explain": 3,
    "bs_matmul_needs": 2,
    "bs_matmul_path": 3,
}
_LIBRARY = Path(__file__).parent / "lib" / "libblockscale_torch.so"


def _load() -> ctypes.CDLL:
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < (2, 11):
        raise ImportError(
            f"blockscale: torch.__version__ = {torch.__version__}; need 2.11 or newer; "
            "pip install -U torch"
        )
    if not _LIBRARY.exists():
        raise ImportError(
            f"blockscale: {_LIBRARY.name} = not built; need it in {_LIBRARY.parent}; "
            "run `make setup` in the source tree, or install the wheel"
        )
    torch.ops.load_library(str(_LIBRARY))  # type: ignore[no-untyped-call]
    library = ctypes.CDLL(str(_LIBRARY))
    for name, texts in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = ctypes.c_long
        function.argtypes = [ctypes.c_char_p] * (texts + 1) + [ctypes.c_long]
    return library


_library = _load()


def _ask(name: str, *texts: str) -> str:
    """The answer of one C function; ValueError with its text when it fails."""
    capacity = 4096
    while True:
        out = ctypes.create_string_buffer(capacity)
        length = getattr(_library, name)(*(t.encode() for t in texts), out, capacity)
        if abs(length) < capacity:
            break
        capacity = abs(length) + 1
    answer = out.value.decode()
    if length < 0:
        raise ValueError(answer)
    return answer


@functools.cache
def _facts() -> str:
    return _ask("bs_describe")


def facts() -> dict[str, Any]:
    """What this build holds, wherever it runs: `describe` without the backends. Wakes no GPU."""
    answer: dict[str, Any] = json.loads(_facts())
    return answer


def describe() -> dict[str, Any]:
    """What this build holds, and what of it this machine can run.

    Keys: version, instruction_set, instruction_sets, specs, elements (name, bits, max), scales,
    layouts, hadamard_sizes, backends (name, available, reason).
    """
    return {**facts(), "backends": json.loads(_ask("bs_backends"))}


# Facts of every layout by its name.
LAYOUTS: Final[dict[str, dict[str, Any]]] = {fact["name"]: fact for fact in facts()["layouts"]}


@functools.cache
def spec_facts(text: str) -> dict[str, Any]:
    """Parse and validate a spec text; ValueError for one that means nothing."""
    facts: dict[str, Any] = json.loads(_ask("bs_spec", text))
    return facts


@functools.cache
def spec_facts_with(text: str, changes: str) -> dict[str, Any]:
    """The same for `text` with changes in the bracket syntax."""
    facts: dict[str, Any] = json.loads(_ask("bs_spec_with", text, changes))
    return facts


def explain(
    spec: object,
    layout: str = "linear",
    device: str | torch.device = "cpu",
    operation: str = "",
) -> str:
    """Why `spec` in `layout` cannot run on `device`, as its error would say; "" when it can.

    With `operation`, "matmul" or "grouped_matmul": by which kernel or path operands of this spec
    are multiplied there, or the error of that operator; asked of the current GPU for "cuda".

    Never raises for a bad name: the refusal is the answer.
    """
    kind = str(device).split(":")[0]
    refusal = _ask("bs_explain", str(spec), layout, kind)
    if refusal or not operation:
        return refusal
    return _ask("bs_matmul_path", operation, str(spec), kind)


@functools.cache
def matmul_needs(spec: str, device: str) -> str:
    """What `matmul` still needs for operands of `spec` on a kind of device; "" when it can run."""
    return _ask("bs_matmul_needs", spec, device)
