"""The qualified names of the modules of a model, as reports, rules and `skip` spell them."""

from __future__ import annotations

import torch

from blockscale._errors import fail

# Name components that wrappers add. A layer's random bits must not depend on whether it is
# compiled, checkpointed, replicated or sharded.
_WRAPPED = frozenset(
    {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}
)
REPLICATORS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def names_of(model: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
    """Every module with its qualified names, without components that wrappers add. The name that
    `named_modules` gives comes first."""
    names: dict[torch.nn.Module, dict[str, None]] = {}
    _add_names("", model, names, frozenset())
    return {module: list(known) for module, known in names.items()}


# Not a nested function: that would refer to itself, and keep the model alive until garbage
# collection.
def _add_names(
    name: str,
    module: torch.nn.Module,
    names: dict[torch.nn.Module, dict[str, None]],
    above: frozenset[torch.nn.Module],
) -> None:
    if module in above:
        return
    names.setdefault(module, {})[name] = None
    for part, child in module._modules.items():
        if child is not None:
            wrapped = part in _WRAPPED or isinstance(module, REPLICATORS)
            inner = name if wrapped else f"{name}.{part}".lstrip(".")
            _add_names(inner, child, names, above | {module})


def by_first_name(
    operation: str, names: dict[torch.nn.Module, list[str]]
) -> dict[str, torch.nn.Module]:
    """Each module by its first name. A wrapper and what it wraps share a name: it stands for the
    latter. Others with the same name are refused: a layer's random bits come from it."""
    named: dict[str, torch.nn.Module] = {}
    for module, (name, *_) in names.items():
        if name in named and module not in named[name]._modules.values():
            got = f"two modules named {shown(name)!r}"
            need = f"names that differ without {', '.join(sorted(_WRAPPED))}, which wrappers add"
            fail(operation, "model", got, need, "rename one of the two")
        named[name] = module
    return named


def shown(name: str) -> str:
    """A qualified name as messages write it: the model itself has none."""
    return name or "(root)"


def is_part(entry: str, name: str) -> bool:
    """Whether `entry` is a run of whole components of a dotted name."""
    return bool(entry) and f".{entry}." in f".{name}."
