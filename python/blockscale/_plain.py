"""Which tensors are plain, which wrap others, and what is refused of either."""

from __future__ import annotations

import sys
from typing import Final

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from blockscale._errors import fail, kind_of

# The dtypes that can be quantized, and that a result can have.
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
FLOATS_TEXT: Final = "float32, bfloat16 or float16"


def check_dense(operation: str, name: str, tensor: torch.Tensor) -> None:
    """Refuse anything but a single tensor in strided memory."""
    if tensor.is_nested:
        remedy = (
            "torch.nested.to_padded_tensor makes one; a TransformerEncoder makes none if it is "
            "converted as a whole, or made with enable_nested_tensor=False"
        )
        if tensor.layout is torch.jagged and operation == "linear":  # exact, row by row
            remedy = "write torch.nested.nested_tensor_from_jagged(layer(x.values()), x.offsets())"
        fail(operation, name, "a nested tensor", "a tensor of one shape", remedy)
    if tensor.layout is not torch.strided:
        remedy = f"call {name}.to_dense() first"
        fail(operation, f"{name}.layout", tensor.layout, "torch.strided", remedy)


# Only other types can wrap tensors; checks for those, some of which import DTensor (half a second),
# are not made for these.
USUAL: Final = frozenset((torch.Tensor, torch.nn.Parameter))


def _is_wrapper(tensor: object) -> bool:
    return is_traceable_wrapper_subclass(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it wraps no other tensors, as a DTensor or another library's quantized tensor
    does."""
    return type(tensor) in USUAL or not _is_wrapper(tensor) or _is_underway(tensor)


def _is_underway(tensor: torch.Tensor) -> bool:
    """Whether it is an AsyncCollectiveTensor, as DTensor.to_local() may return: a plain tensor that
    a collective may still be writing. PyTorch waits for it when an operator takes it."""
    if not (_is_wrapper(tensor) and torch.distributed.is_available()):
        return False
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return isinstance(tensor, AsyncCollectiveTensor)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. (Importing DTensor takes half a second; code that made one has
    already imported it.)"""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


class WeightOfFsdp(torch.Tensor):
    """A layer's weight under FSDP2, sharded or gathered (sharded.py)."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class KeptWeight(WeightOfFsdp):
    """A weight as FSDP2 keeps it: `local` holds its values, a plain tensor."""

    local: torch.Tensor


def values_of(weight: torch.Tensor) -> torch.Tensor:
    """The plain tensor of a weight as FSDP2 keeps it; any other tensor itself."""
    return weight.local if isinstance(weight, KeptWeight) else weight


def is_for_layer(tensor: torch.Tensor) -> bool:
    """Whether a layer accepts it: plain, or sharded over ranks in a supported way."""
    return is_plain(tensor) or is_dtensor(tensor) or isinstance(tensor, WeightOfFsdp)


def check_no_tangent(operation: str, name: str, tensor: torch.Tensor, remedy: str) -> None:
    """Refuse a tangent of forward mode: PyTorch would treat the operator, which has no derivative
    of its own, as a constant."""
    if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        need = "no tangent: forward-mode derivatives are not implemented"
        fail(operation, name, "a dual tensor", need, remedy)


def check_plain(operation: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Refuse anything but a single tensor in strided memory, wrappers of other tensors included, or
    with a tangent. Returns the tensor, after waiting for any collective that may still be writing
    it."""
    check_dense(operation, name, tensor)
    if forward_ad._current_level >= 0:
        check_no_tangent(operation, name, tensor, f"pass {name}.detach()")
    if type(tensor) in USUAL:
        return tensor
    if not is_plain(tensor):
        local = is_dtensor(tensor)
        remedy = f"pass {name}.to_local() or {name}.full_tensor()" if local else ""
        fail(operation, name, kind_of(tensor), "a plain tensor", remedy)
    return tensor.wait() if _is_underway(tensor) else tensor  # type: ignore[attr-defined]
