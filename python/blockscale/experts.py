"""Experts as other libraries write them: modules that hold a matrix for each, and multiply by
`torch.nn.functional.grouped_mm`. Their class stays theirs; its products become ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, get_overridable_functions

from blockscale._errors import fail
from blockscale.functional import linear_with_key
from blockscale.nn import Kept, Layer
from blockscale.rng import as_tensor, layer_seed
from blockscale.weight import QuantizedWeight, quantize_weight

_REMEDY = "choose the implementation that does, in Transformers set_experts_implementation"


def matrices_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The module's own parameters that hold a matrix for each expert."""
    own = (p for p in module._parameters.values() if p is not None)
    return [p for p in own if not is_lazy(p) and p.dim() == 3]


class Experts(Layer):
    """Comes before the class of a module, whose forward it calls: each `grouped_mm` in there, of
    rows in groups and a matrix for each group, is `grouped_linear`.

    The products of a forward are counted from 0, and each has the seed of a layer of its own,
    named as the module with ".0", ".1", ... after it.
    """

    # Within quantized_weights(): what the products so far have read, by their number.
    _kept: dict[int, Kept] | None = None
    _keeps_backward = False

    def matrices(self) -> list[torch.Tensor]:
        return [*matrices_of(self)]

    def keep(self, backward: bool) -> list[torch.Tensor]:
        # Which way round a matrix is multiplied shows in a forward.
        if not self.quantizes_ahead():
            return []
        self._kept, self._keeps_backward = {}, backward
        return self.matrices()

    def _operands(self, index: int, w: torch.Tensor) -> QuantizedWeight | None:
        """Of w, where it is a matrix of this module and nothing computed from it."""
        if self._kept is None or self.recipe.high_precision or torch.compiler.is_compiling():
            return None
        if index not in self._kept:
            owner = next((p for p in matrices_of(self) if _is_view(w, p)), None)
            if owner is None:
                return None
            with torch.inference_mode(False):  # training saves it
                made = quantize_weight(w.detach(), self.recipe, None, self._keeps_backward)
            self._kept[index] = Kept.of(owner, made)
        kept = self._kept[index]
        kept.check(_plain_name(self), kept.weight)
        return kept.operands if _is_view(w, kept.weight) else None

    def _seed_of(self, seed: int, name: str) -> torch.Tensor:
        count = len(matrices_of(self))
        cpu = torch.device("cpu")
        return torch.stack([as_tensor(layer_seed(seed, f"{name}.{i}"), cpu) for i in range(count)])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        products = _Products(self)
        with products:
            result = super().forward(*args, **kwargs)
        # Without gradients a library may multiply otherwise, such as for the few rows of decoding.
        if products.count == 0 and torch.is_grad_enabled():
            got = f"a forward of {_plain_name(self)} without grouped_mm"
            fail("convert", "experts", got, "one that multiplies by it", _REMEDY)
        return result

    def product(
        self, index: int, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """x [T, K] times w [E, N, K]."""
        key = None
        if self.recipe.stochastic:
            seeds, offset = self._key(x)
            if index >= len(seeds):
                got = f"more than the {len(seeds)} products in {_plain_name(self)}"
                fail("convert", "experts", got, "one grouped_mm in a forward for each parameter")
            key = seeds[index], offset
        made = self._operands(index, w)
        return linear_with_key(x, w, None, self.recipe, key, offsets, None, made)

    def __reduce_ex__(self, protocol: Any) -> Any:  # of a class that no module names
        return _empty, (self.plain,), self.__getstate__()


def names_taken(module: torch.nn.Module) -> list[str]:
    """Attributes of another module by which `Experts` would go wrong, or which it would hide."""
    ours = {name for kind in (Experts, Layer) for name in (*vars(kind), *kind.__annotations__)}
    ours -= set(dir(torch.nn.Module))
    return sorted(ours & {*dir(type(module)), *vars(module), *module._parameters, *module._modules})


def _is_view(w: torch.Tensor, of: torch.Tensor) -> bool:
    """Whether w is all of another tensor, or that turned round."""
    if w.dtype != of.dtype or w.data_ptr() != of.data_ptr():
        return False
    return any(w.shape == t.shape and w.stride() == t.stride() for t in (of, of.transpose(-2, -1)))


def _plain_name(module: Experts) -> str:
    return module.plain.__name__ if module.plain else type(module).__name__


def experts_class(plain: type[torch.nn.Module]) -> type[Experts]:
    """The class that `convert` makes of another: one for each."""
    if plain not in _CLASSES:
        _let_modes_see_grouped_mm()
        attributes = {"plain": plain, "__module__": plain.__module__, "__doc__": plain.__doc__}
        _CLASSES[plain] = type(f"Quantized{plain.__name__}", (Experts, plain), attributes)
    return _CLASSES[plain]


_CLASSES: dict[type[torch.nn.Module], type[Experts]] = {}


def _empty(plain: type[torch.nn.Module]) -> Experts:
    kind = experts_class(plain)
    return kind.__new__(kind)


class _Products(TorchFunctionMode):
    """Within it, each product of experts goes to a module."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.count = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if not _is_grouped_mm(func):
            return func(*args, **named)
        x, w, offsets, out_dtype = _operands(*args, **named)
        if offsets is None or x.dim() != 2 or w.dim() != 3:
            return func(*args, **named)
        index = self.count
        self.count += 1
        if self.experts.recipe.high_precision:
            return func(*args, **named)
        y = self.experts.product(index, x, w.transpose(-2, -1), offsets)
        return y if out_dtype is None else y.to(out_dtype)


def _is_grouped_mm(func: Any) -> bool:
    if func is torch._grouped_mm:  # torch.nn.functional.grouped_mm is this
        return True
    # What Transformers calls where PyTorch's own does not compile.
    return isinstance(func, torch._ops.OpOverloadPacket) and (
        func._qualified_op_name == "transformers::grouped_mm_fallback"
    )


def _operands(
    input: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype | None]:
    """What `grouped_mm` is given; nobody gives it a bias, which PyTorch refuses too."""
    if bias is not None:
        fail("convert", "experts", "a grouped_mm with a bias", "none", "add it to the result")
    return input, mat2, offs, out_dtype


def _let_modes_see_grouped_mm() -> None:
    """PyTorch's compiler asks those functions only for modes that are listed as overridable, and
    the list leaves out what begins with an underscore, overridable or not."""
    listed = get_overridable_functions().setdefault(torch, [])
    if torch._grouped_mm not in listed:
        listed.append(torch._grouped_mm)
        compiler = sys.modules.get("torch._dynamo.variables.torch")
        if compiler is not None:  # which has made a set of them
            compiler.get_overridable_functions.cache_clear()
