"""Loads the compiled library: its operators (``torch.ops.blockscale``) and its facts (JSON)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from blockscale._constant import constant
from blockscale._errors import fail_type

if TYPE_CHECKING:
    from blockscale.recipe import Spec

# The C functions, and the number of texts that each takes.
_FUNCTIONS: Final = {
    "bs_describe": 0,
    "bs_backends": 0,
    "bs_spec": 1,
    "bs_spec_with": 2,
    "bs_explain": 3,
    "bs_matmul_needs": 2,
    "bs_matmul_path": 3,
    "bs_widens": 3,
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
    """The answer of one C function; raises ValueError with its text if it fails."""
    # C would stop at a NUL, and read a different text than was given.
    given = [t.encode(errors="backslashreplace").replace(b"\0", rb"\x00") for t in texts]
    capacity = 4096
    while True:
        out = ctypes.create_string_buffer(capacity)
        length = getattr(_library, name)(*given, out, capacity)
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
    """What this build contains, wherever it runs: `describe` without the backends. Does not
    initialize a GPU."""
    answer: dict[str, Any] = json.loads(_facts())
    return answer


def describe() -> dict[str, Any]:
    """What this build contains, and what of it this machine can run.

    Returns:
        A new dict with the keys:

        - version: text.
        - instruction_sets: those that the CPU backend was built for and this machine has, best
          first, with the names of the Highway library: "AVX3" is AVX-512, with a suffix such as
          "AVX3_SPR" for later extensions; "AVX2", "SSE4", ... mean what they say.
        - instruction_set: the one in use, the first of these.
        - specs: the named specs.
        - elements: dicts of name, bits (of a code) and max (the largest value).
        - scales: the formats of block scales.
        - layouts: dicts of name, applies (to "codes", "scales" or "both"), scale_bytes (the bytes
          of a scale that it takes; 0: any), row_multiple and column_multiple (the multiples that it
          pads a matrix to, in stored rows and columns).
        - group_line: the multiple, in rows of x, of lines that run through all groups (axis -2).
        - hadamard_sizes: the transform sizes that specs may have.
        - backends: dicts of name, available and reason (why it is not available; else empty).
    """
    return {**facts(), "backends": json.loads(_ask("bs_backends"))}


# The facts of every layout, by name.
LAYOUTS: Final[dict[str, dict[str, Any]]] = {fact["name"]: fact for fact in facts()["layouts"]}
GROUP_LINE: Final[int] = facts()["group_line"]


@functools.cache
def spec_facts(text: str) -> dict[str, Any]:
    """Parse and validate a spec text; raises ValueError for a meaningless one."""
    facts: dict[str, Any] = json.loads(_ask("bs_spec", text))
    return facts


@functools.cache
def spec_facts_with(text: str, changes: str) -> dict[str, Any]:
    """The same for `text` with changes in the bracket syntax."""
    facts: dict[str, Any] = json.loads(_ask("bs_spec_with", text, changes))
    return facts


@constant
@functools.cache
def layout_refusal(spec: str, layout: str) -> str:
    """What is wrong with a layout, in itself or for operands of `spec`; "" if nothing is."""
    return _ask("bs_explain", spec, layout, "cpu")


def explain(
    spec: str | Spec,
    layout: str = "linear",
    device: str | torch.device = "cpu",
    operation: str = "",
) -> str:
    """Why `spec` in `layout` cannot run on `device`, or how its operands are multiplied there.

    Never raises for a bad name: the refusal is the answer.

    Args:
        spec: a Spec, or the text of one, such as "nvfp4".
        layout: as for `quantize`.
        device: "cpu", "cuda", or a torch.device; of several GPUs, the current one is meant.
        operation: "" to ask about the operators on one operand; "matmul" or "grouped_matmul" to ask
            how two operands of this spec are multiplied.

    Returns:
        The message of the error, in one line. If there is none: "", or with `operation` a
        description of the kernel or path of the product.

    Raises:
        TypeError: an argument of any other type.
    """
    from blockscale.recipe import Spec
    from blockscale.recipe import spec as parsed

    if not isinstance(spec, str | Spec):
        fail_type("explain", "spec", spec, "a Spec, or a spec's text such as 'nvfp4'")
    texts: dict[str, tuple[object, str]] = {
        "layout": (layout, "a layout's name such as 'linear'"),
        "operation": (operation, "'matmul', 'grouped_matmul' or ''"),
    }
    for name, (value, need) in texts.items():
        if not isinstance(value, str):
            fail_type("explain", name, value, need)
    if not isinstance(device, str | torch.device):
        fail_type("explain", "device", device, "a device's name such as 'cpu', or a torch.device")
    try:
        text = parsed(spec).text
    except ValueError as error:
        return str(error)
    kind = str(device).split(":")[0]
    refusal = _ask("bs_explain", text, layout, kind)
    if refusal or not operation:
        return refusal
    return _ask("bs_matmul_path", operation, text, kind)


def widens(a: Spec, weight: Spec, groups: int, device: torch.device) -> bool:
    """Whether a layer's operands are widened on this device, where its products have operands of
    spec `a` on the left, with rows in `groups` groups (0: none), and of spec `weight` on the
    right."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device) if torch.cuda.is_available() else contextlib.nullcontext():
        # A compiler that does not know the number of groups yet settles it here.
        return _ask("bs_widens", str(a), str(weight), str(int(groups))) == "true"


@functools.cache
def matmul_needs(spec: str, device: str) -> str:
    """What `matmul` lacks for operands of `spec` on a kind of device; "" if it can run."""
    return _ask("bs_matmul_needs", spec, device)
