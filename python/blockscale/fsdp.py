"""What FSDP2 does not expose: which modules and parameters it has, and what it gathers together."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# The group of parameters that a module's own are gathered with.
_groups: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether fully_shard was called for this module, which changes its class."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nobody has called it if nobody imported it
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def of_fsdp(model: torch.nn.Module) -> set[int]:
    """The parameters that fully_shard has cut, by identity, whatever they are at the moment: those
    of the outermost module stay gathered after a forward without a backward, plain like others."""
    found: set[int] = set()
    for group in _groups_of(filter(is_sharded, model.modules())):
        for parameter in group.fsdp_params:
            at = parameter._module_info
            found.add(id(at.module._parameters[at.param_name]))
    return found


def gathered_with(module: torch.nn.Module) -> list[Any]:
    """FSDP2's parameters of one gather, in its order, those of `module` among them."""
    if module not in _groups:
        from torch.distributed._composable_state import _module_state_mapping

        for group in _groups_of(filter(is_sharded, list(_module_state_mapping))):
            for parameter in group.fsdp_params:
                _groups[parameter._module_info.module] = weakref.ref(group)
    group = _groups[module]() if module in _groups else None
    return [] if group is None else list(group.fsdp_params)


def _groups_of(modules: Iterable[Any]) -> Iterator[Any]:
    for module in modules:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # PyTorch 2.11 has one, or none
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None:
                yield group
