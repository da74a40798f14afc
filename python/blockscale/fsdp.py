"""What FSDP2 does not expose: which modules and parameters it manages, and which it gathers
together."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# The parameter group with which a module's own parameters are gathered.
_groups: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether fully_shard, which changes a module's class, was called on this one."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not called if never imported
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def managed_parameters(model: torch.nn.Module) -> set[int]:
    """The parameters that fully_shard has cut, by identity, whatever their current state: those of
    the outermost module stay gathered after a forward without a backward, and then look plain."""
    found: set[int] = set()
    for group in _groups_of(filter(is_sharded, model.modules())):
        for parameter in group.fsdp_params:
            at = parameter._module_info
            found.add(id(at.module._parameters[at.param_name]))
    return found


def _group_of(module: torch.nn.Module) -> Any:
    """FSDP2's parameter group with the module's own parameters, or None."""
    if module not in _groups:
        from torch.distributed._composable_state import _module_state_mapping

        for group in _groups_of(filter(is_sharded, list(_module_state_mapping))):
            for parameter in group.fsdp_params:
                _groups[parameter._module_info.module] = weakref.ref(group)
    return _groups[module]() if module in _groups else None


def gathered_with(module: torch.nn.Module) -> list[Any]:
    """FSDP2's parameters that are gathered together with those of `module`, in its order."""
    group = _group_of(module)
    return [] if group is None else list(group.fsdp_params)


def cut_among_fewer(module: torch.nn.Module) -> bool:
    """Whether fewer ranks share the gathered weight after a forward than before it: what a number
    for reshard_after_forward does."""
    group = _group_of(module)
    return group is not None and group._use_post_forward_mesh


def was_dtensor(module: torch.nn.Module) -> bool:
    """Whether the module's weight was a DTensor already when fully_shard cut it, such as one of
    tensor parallelism, even over a single rank: FSDP2 then makes the gathered weight one too."""
    found = (p for p in gathered_with(module) if p._module_info.module is module)
    return any(p.is_dtensor for p in found if p._module_info.param_name == "weight")


def _groups_of(modules: Iterable[Any]) -> Iterator[Any]:
    for module in modules:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # PyTorch 2.11 has one group, or none
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None:
                yield group
