"""Classes that `convert` makes: one of ours precedes a module's own class, whose other methods
stay."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from blockscale.nn import Layer, Linear

_CLASS: Final = "_blockscale_class"
# Attributes that a subclass must not define if its nn.Linear forward is to be replaced.
_FORWARD: Final = ("forward", "__call__", "_call_impl", "__getattr__", "weight", "bias")


def class_of(ours: type[Layer], plain: type[torch.nn.Module]) -> type[Layer]:
    """Our class for modules of class `plain`. There is one per `plain`, which keeps it, so that
    both are freed when unused."""
    made: type[Layer] | None = vars(plain).get(_CLASS)
    if made is None:

        def reduce(self: Layer, protocol: Any) -> Any:  # pickle cannot find the class by name
            return _empty, (ours, plain), self.__getstate__()

        own = {"plain": plain, "__module__": plain.__module__, "__doc__": plain.__doc__}
        made = type(f"Quantized{plain.__name__}", (ours, plain), own | {"__reduce_ex__": reduce})
        setattr(plain, _CLASS, made)
    return made


def _empty(ours: type[Layer], plain: type[torch.nn.Module]) -> Layer:
    kind = class_of(ours, plain)
    return kind.__new__(kind)


@functools.cache
def _names(ours: type[Layer]) -> frozenset[str]:
    """The attributes that a class of ours uses."""
    layers = [of for of in ours.__mro__ if issubclass(of, Layer)]
    names = {name for of in layers for name in (*vars(of), *of.__annotations__)}
    # Of the last one ours precedes theirs, and only refuses.
    return frozenset(names - {"weight", "__prepare_scriptable__"})


def name_clash(ours: type[Layer], module: torch.nn.Module) -> str:
    """Which attributes of a module have names that a class of ours uses; "" if none."""
    kind, names = type(module), _names(ours)  # type: ignore[arg-type]  # classes are hashable
    own = (vars(module), module._parameters, module._buffers, module._modules)
    # Most layers are of this class, and listing a class's attributes takes long.
    if kind is torch.nn.Linear and all(map(names.isdisjoint, own)):
        return ""
    theirs = {*dir(kind)}.union(*own)
    if taken := sorted(names & theirs - {*dir(torch.nn.Linear)}):
        return f"{kind.__name__} has attributes of ours: {', '.join(taken)}"
    return ""


def subclass_refusal(ours: type[Layer], module: torch.nn.Module) -> str:
    """Why a class of ours cannot precede a module's class; "" if it can."""
    kind = type(module)
    if reason := name_clash(ours, module):
        return reason
    try:  # now: nothing may fail once convert has begun to change a model
        class_of(ours, kind)
    except Exception as error:  # anything that its metaclass or __init_subclass__ raises
        return f"{kind.__name__} cannot be subclassed: {error}"
    return ""


def linear_refusal(module: torch.nn.Linear) -> str:
    """Why `convert` cannot take a module of a subclass of nn.Linear; "" if it can, as its forward
    is that of nn.Linear."""
    kind = type(module)
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return f"{kind.__name__} is read by nn.MultiheadAttention directly, bypassing its forward"
    for name in _FORWARD:
        if getattr(kind, name, None) is not getattr(torch.nn.Linear, name, None):
            where = f"{kind.__module__}.{kind.__qualname__}"
            return f"{where} is a subclass of nn.Linear with a {name} of its own"
    return subclass_refusal(Linear, module)
