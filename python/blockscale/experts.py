"""Experts as other libraries write them: modules that hold a matrix for each, and multiply by
`torch.nn.functional.grouped_mm`. Their class stays theirs; its products become ours."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode, get_overridable_functions
from torch.utils._pytree import tree_leaves

from blockscale._errors import fail
from blockscale.classes import why_none
from blockscale.functional import autocast_dtype, linear_with_key
from blockscale.nn import Kept, Layer
from blockscale.rng import as_tensor, checkpointed_region, layer_seed
from blockscale.weight import QuantizedWeight, quantize_weight

_MOST_PRODUCTS: Final = 16  # in a forward: seeds are made ahead, as compiled code cannot hash names


def matrices_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The module's own parameters that hold a matrix for each expert."""
    own = (p for p in module._parameters.values() if p is not None)
    return [p for p in own if not is_lazy(p) and p.dim() == 3]


def is_experts(module: torch.nn.Module) -> bool:
    """Whether it could be: a module of PyTorch's own that holds such a parameter is something
    else, as convolutions and containers of parameters are."""
    kind = type(module)
    if is_parametrized(module):  # whose class is one that PyTorch has made of another
        kind = kind.__bases__[0]
    theirs = kind.__module__.startswith("torch.nn.")
    return isinstance(module, Experts) or (not theirs and len(matrices_of(module)) > 0)


def why_not(module: torch.nn.Module) -> str:
    """Why `convert` cannot take a module that holds matrices for experts; "" when it can."""
    kind = type(module)
    if is_parametrized(module) and not isinstance(module, Experts):
        return f"{kind.__name__} is parametrized: convert it first, then parametrize it"
    if any(is_experts(inner) for inner in module.modules() if inner is not module):
        return f"{kind.__name__} has experts inside, which multiply by themselves"
    if kind.forward is torch.nn.Module.forward:
        return f"{kind.__name__} has no forward: whoever reads its parameters multiplies"
    _let_modes_see_grouped_mm()
    return why_none(Experts, module)


@dataclasses.dataclass(frozen=True)
class _Ahead:
    """Within quantized_weights(): what the products so far have read, and which way round."""

    backward: bool
    of: dict[int, tuple[Kept, tuple[int, ...]]] = dataclasses.field(default_factory=dict)


class Experts(Layer):
    """Comes before the class of a module, whose forward it calls: each `grouped_mm` in there, of
    rows in groups and a matrix for each group, is `grouped_linear`.

    The products of a forward are counted from 0, and each has the seed of a layer of its own,
    named as the module with "#0", "#1", ... after it.
    """

    _kept: _Ahead | None = None
    _name: str

    def matrices(self) -> list[torch.Tensor]:
        return [*matrices_of(self)]

    def keep(self, name: str, backward: bool) -> list[torch.Tensor]:
        # Which way round a matrix is multiplied shows in a forward.
        if not self.quantizes_ahead():
            return []
        vars(self)["_kept"] = _Ahead(backward)
        return self.matrices()

    def _seed_of(self, seed: int, name: str) -> torch.Tensor:
        vars(self)["_name"] = name
        seeds = (layer_seed(seed, f"{name}#{i}") for i in range(_MOST_PRODUCTS))
        return torch.stack([as_tensor(value, torch.device("cpu")) for value in seeds])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if "recipe" not in vars(self):
            got = "an instance that convert has not seen"
            self._refuse(got, "a converted one", "call bs.convert")
        products = _Products(self)
        with products:
            result = super().forward(*args, **kwargs)
        # Without gradients a library may multiply otherwise, such as for the few rows of decoding.
        multiplies = products.count > 0 or self.recipe.high_precision or _has_no_rows(args, kwargs)
        if not multiplies and self._needs_gradients(args, kwargs):
            which = "that does (Transformers: set_experts_implementation)"
            remedy = f"choose the implementation {which}, or name it in skip="
            self._refuse("a forward without grouped_mm", "grouped_mm", remedy)
        return result

    def _needs_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a forward of these, whose result may be of any type, is one of training."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        tensors = (*self.parameters(), *given)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    def product(
        self, index: int, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """x [T, K] times w [E, N, K], in x's dtype."""
        key = None
        if self.recipe.stochastic:
            if index >= _MOST_PRODUCTS:
                need = f"{_MOST_PRODUCTS} at most, as many as have seeds"
                self._refuse(f"more than {_MOST_PRODUCTS} products in a forward", need, "")
            seeds, offset = self._key(x)
            key = seeds[index], offset
        made = self._operands(index, w)
        call = (x, w, None, self.recipe, key, offsets, None, made)
        if autocast_dtype(x) is None:
            return linear_with_key(*call)
        with torch.autocast(x.device.type, enabled=False):  # which grouped_mm knows nothing of
            return linear_with_key(*call)

    def _operands(self, index: int, w: torch.Tensor) -> QuantizedWeight | None:
        """Of w, where it is a matrix of this module and nothing computed from it."""
        if self._kept is None or torch.compiler.is_compiling():
            return None
        if index not in self._kept.of:
            owner = next((p for p in matrices_of(self) if _is_view(w, p)), None)
            if owner is None:
                return None
            with torch.inference_mode(False):  # training saves it
                made = quantize_weight(w.detach(), self.recipe, None, self._kept.backward)
            self._kept.of[index] = Kept.of(self._name or "experts", owner, made), w.stride()
        kept, strides = self._kept.of[index]
        if w.stride() != strides or not _is_view(w, kept.weight):
            return None
        kept.check(kept.weight)
        return kept.operands

    def _refuse(self, got: str, need: str, remedy: str) -> NoReturn:
        name = vars(self).get("_name") or "experts"
        fail(self.plain.__name__ if self.plain else "experts", name, got, need, remedy)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"recipe={self.recipe}")))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _let_modes_see_grouped_mm()  # in a process that loads it


def _is_view(w: torch.Tensor, of: torch.Tensor) -> bool:
    """Whether w is all of another tensor, or that turned round."""
    if w.dtype != of.dtype or w.data_ptr() != of.data_ptr():
        return False
    return any(w.shape == t.shape and w.stride() == t.stride() for t in (of, of.transpose(-2, -1)))


def _has_no_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = (*args, *kwargs.values())
    return any(isinstance(value, torch.Tensor) and value.numel() == 0 for value in given)


class _Products(TorchFunctionMode):
    """Within it, each product of experts goes to a module."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.grad = torch.is_grad_enabled()
        self.region = _region()
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
        x, w, offsets, out_dtype = _arguments(*args, **named)
        if offsets is None or x.dim() != 2 or w.dim() != 3:
            return func(*args, **named)
        index = self.count
        self.count += 1
        if self.experts.recipe.high_precision:
            return func(*args, **named)
        # Checkpointing inside would recompute it outside of this mode; the reentrant kind shows
        # itself by having no gradients.
        remedy = "checkpoint the whole module from outside"
        if self.grad and not torch.is_grad_enabled():
            got = "a product without gradients in a forward with them"
            remedy += ", or put no_grad around all of it"
            self.experts._refuse(got, "grouped_mm with them", remedy)
        region = _region()  # none within other hooks for saved tensors, either
        if region is not None and region is not self.region:
            got = "a product in a checkpointed part of a forward"
            self.experts._refuse(got, "grouped_mm outside of one", remedy)
        y = self.experts.product(index, x, w.transpose(-2, -1), offsets)
        return y if out_dtype is None else y.to(out_dtype)


def _region() -> Any:
    """The region of torch.utils.checkpoint that runs, which compiled code does not ask for."""
    return None if torch.compiler.is_compiling() else checkpointed_region()


def _is_grouped_mm(func: Any) -> bool:
    if func is torch._grouped_mm:  # torch.nn.functional.grouped_mm is this
        return True
    if isinstance(func, torch._ops.OpOverload):
        func = func.overloadpacket
    # The second is what Transformers calls where PyTorch's own does not compile.
    return isinstance(func, torch._ops.OpOverloadPacket) and (
        func._qualified_op_name in ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
    )


def _arguments(
    input: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype | None]:
    """Of `grouped_mm`; nobody gives it a bias, which PyTorch refuses too."""
    if bias is not None:
        fail("grouped_mm", "bias", "given", "none", "add it to the result")
    return input, mat2, offs, out_dtype


def _let_modes_see_grouped_mm() -> None:
    """PyTorch's compiler asks those functions only for modes that are listed as overridable, and
    the list leaves out what begins with an underscore, overridable or not."""
    listed = get_overridable_functions().setdefault(torch, [])
    if torch._grouped_mm not in listed:
        compiler = sys.modules.get("torch._dynamo.variables.torch")
        if compiler is not None:  # which has made a set of them
            compiler.get_overridable_functions.cache_clear()
        listed.append(torch._grouped_mm)
