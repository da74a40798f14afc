"""Why `convert` leaves a module alone, whatever it is told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from blockscale._plain import FLOATS, FLOATS_TEXT, is_for_layer
from blockscale.classes import linear_refusal, name_clash
from blockscale.experts import experts_refusal, is_experts, matrices_of
from blockscale.fsdp import is_sharded
from blockscale.nn import Layer, Linear

NO_LINEAR: Final = " is not nn.Linear"  # after the kind of a module
# PyTorch 2.11 has none: nothing is an instance of ().
_LOSS: Final = getattr(torch.nn, "LinearCrossEntropyLoss", ())


def has_own_parameters(module: torch.nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _has_no_weight(module: torch.nn.Module) -> bool:
    """Whether nothing in it is its weight: no parameter, nor a buffer that it was frozen into, nor
    what a parametrization computes."""
    held = has_own_parameters(module) or "weight" in module._buffers
    return not held and not torch.nn.utils.parametrize.is_parametrized(module)


def read_past(modules: Iterable[torch.nn.Module]) -> dict[torch.nn.Module | None, str]:
    """The modules whose parameters another one of these reads directly, and which."""
    losses = (module for module in modules if isinstance(module, _LOSS))
    said = "is read by nn.LinearCrossEntropyLoss directly, bypassing its forward"
    return {loss._modules.get("linear"): said for loss in losses}


def unfit(module: torch.nn.Module, as_experts: bool) -> str:
    """Why a module cannot be converted; "" if it can. `as_experts`: whether `experts` names it."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):  # whose parameters are no dict, either
        return f"{module.original_name} is compiled by torch.jit: convert before that"
    matrices: list[Any]  # tensors, unless somebody has assigned None
    if isinstance(module, Layer):
        matrices = module.matrices()
    elif isinstance(module, torch.nn.Linear) and _has_no_weight(module):
        held = "FSDP has made its parameters part of a flat one"
        return f"{held}: convert before that, or wrap with use_orig_params=True"
    elif type(module) is torch.nn.Linear:
        if reason := name_clash(Linear, module):
            return reason
        matrices = [module.weight]
    elif isinstance(module, torch.nn.LazyLinear):
        return f"{kind} has no shape yet: convert after it has seen a batch"
    elif isinstance(module, torch.nn.Linear) and is_sharded(module):
        return f"{kind} is sharded by itself: convert before fully_shard"
    elif isinstance(module, torch.nn.Linear) and torch.nn.utils.parametrize.is_parametrized(module):
        return f"{kind} is parametrized: convert it first, then parametrize it"
    elif isinstance(module, torch.nn.Linear):
        if reason := linear_refusal(module):
            return reason
        matrices = [module.weight]
    elif not as_experts:
        weight = module._parameters.get("weight")
        if kind == "Conv1D" and weight is not None and weight.dim() == 2:  # Transformers' GPT-2
            return f"{kind}{NO_LINEAR}: replace it by one with its weight transposed"
        of = [len(matrix) for matrix in matrices_of(module)] if is_experts(module) else []
        experts = of and ("experts" in kind.lower() or (len(of) > 1 and {*of} == {max(of[0], 2)}))
        return f"{kind}{NO_LINEAR}{'; experts= converts what it multiplies' if experts else ''}"
    elif is_sharded(module):
        return f"{kind} is sharded by itself: convert before fully_shard"
    elif reason := experts_refusal(module):
        return reason
    else:
        matrices = [*matrices_of(module)]
    if not isinstance(module, Layer) and "forward" in vars(module):
        return "its forward was replaced by another library: convert before that"
    for matrix in matrices:
        if matrix is None:
            return "its weight is None"
        if not is_for_layer(matrix):
            return f"its weight is a tensor of type {type(matrix).__name__}"
        if matrix.dtype not in FLOATS:
            return f"its weight is {matrix.dtype}, not {FLOATS_TEXT}"
    return ""
