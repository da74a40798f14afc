"""Experts of other libraries: modules that hold a matrix for each expert, and multiply by
`torch.nn.functional.grouped_mm`. `convert` puts a class before theirs that replaces these
products."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode, get_overridable_functions
from torch.utils._pytree import tree_leaves

from blockscale._constant import constant
from blockscale._errors import fail, message
from blockscale._layer_arguments import autocast_dtype
from blockscale._plain import is_dtensor
from blockscale.classes import subclass_refusal
from blockscale.functional import linear_with_key
from blockscale.nn import Kept, Layer, Uncopied
from blockscale.regions import checkpointed_region
from blockscale.rng import as_tensor, layer_seed
from blockscale.weight import QuantizedWeight, quantize_weight

_MOST_PRODUCTS: Final = 16  # per forward: seeds exist in advance, compiled code cannot hash names


def matrices_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The module's own parameters that hold a matrix for each expert."""
    own = (p for p in module._parameters.values() if p is not None)
    return [p for p in own if not is_lazy(p) and p.dim() == 3]


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module could be experts: PyTorch's own modules with such a parameter, such as
    convolutions and parameter containers, are something else."""
    kind = type(module)
    if is_parametrized(module):  # PyTorch has then derived its class from another
        kind = kind.__bases__[0]
    theirs = kind.__module__.startswith("torch.nn.")
    return isinstance(module, Experts) or (not theirs and len(matrices_of(module)) > 0)


def experts_refusal(module: torch.nn.Module) -> str:
    """Why `convert` cannot take a module that holds matrices for experts; "" if it can."""
    kind = type(module)
    if is_parametrized(module) and not isinstance(module, Experts):
        return f"{kind.__name__} is parametrized: convert it first, then parametrize it"
    if any(is_experts(inner) for inner in module.modules() if inner is not module):
        return f"{kind.__name__} has experts inside, which multiply by themselves"
    if kind.forward is torch.nn.Module.forward:
        return f"{kind.__name__} has no forward: whoever reads its parameters multiplies"
    _let_modes_see_grouped_mm()
    return subclass_refusal(Experts, module)


@dataclasses.dataclass(frozen=True)
class _Ahead(Uncopied):
    """Within quantized_weights(): the operands that products have read so far, with w's strides."""

    backward: bool
    of: dict[int, tuple[Kept, tuple[int, ...]]] = dataclasses.field(default_factory=dict)


class Experts(Layer):
    """Precedes a module's own class among the bases and calls its forward, in which each
    `grouped_mm` of rows in groups with a matrix for each group becomes `grouped_linear`.

    The products of a forward are counted from 0, and each has the seed of a separate layer, named
    as the module followed by "#0", "#1", ...
    """

    _kept: _Ahead | None = None
    _name: str

    def matrices(self) -> list[torch.Tensor]:
        return [*matrices_of(self)]

    def keep(self, name: str, backward: bool) -> list[torch.Tensor]:
        # Only a forward shows whether a matrix is multiplied as it is or transposed.
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
        if not self.recipe.high_precision:
            self._check_whole()
        products = _Products(self)
        with products:
            result = super().forward(*args, **kwargs)
        # Without gradients a library may multiply in other ways, such as for the few rows of
        # decoding. No error: a module whose experts are divided over ranks may leave out its
        # products where no rows go to them, and if that rank failed, the others would wait for it.
        multiplies = products.count > 0 or self.recipe.high_precision or _has_no_rows(args, kwargs)
        if not multiplies and self._needs_gradients(args, kwargs):
            which = "that does (Transformers: set_experts_implementation)"
            remedy = f"choose the implementation {which}, or name it in skip="
            need = "grouped_mm where experts have rows"
            _warn(message(*self._named(), "a forward without grouped_mm", need, remedy))
        return result

    def _check_whole(self) -> None:
        """Refuse matrices that are cut: a piece would have scales and random bits of its own,
        which depend on the number of ranks. (The module passes on pieces as plain tensors.)"""
        for matrix in self._parameters.values():
            if matrix is None or not is_dtensor(matrix) or matrix.dim() != 3:
                continue
            mesh, placements = matrix.device_mesh, matrix.placements  # type: ignore[attr-defined]
            # Along dimension 0 there are two kinds, Shard and FSDP2's _StridedShard. (size(i), as
            # compiled code of PyTorch 2.11 cannot iterate over a mesh's shape.)
            whole = (
                mesh.size(i) == 1 or p.is_replicate() or getattr(p, "dim", None) == 0
                for i, p in enumerate(placements)
            )
            if not all(whole):
                got = f"matrices placed by {placements}"
                need = "Shard(0) or Replicate(): whole matrices on every rank"
                self._refuse(got, need, "divide the experts over these ranks, or name it in skip=")

    def _needs_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a forward with these arguments may need gradients; its result may be of any
        type."""
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
        with torch.autocast(x.device.type, enabled=False):  # grouped_mm ignores autocast
            return linear_with_key(*call)

    def _operands(self, index: int, w: torch.Tensor) -> QuantizedWeight | None:
        """The operands of w made in advance, if w is a matrix of this module, not computed from
        one."""
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

    def _named(self) -> tuple[str, str]:
        """What messages call it."""
        name = vars(self).get("_name") or "experts"
        return self.plain.__name__ if self.plain else "experts", name

    def _refuse(self, got: str, need: str, remedy: str) -> NoReturn:
        fail(*self._named(), got, need, remedy)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"recipe={self.recipe}")))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _let_modes_see_grouped_mm()  # also in a process that unpickles it


@constant
def _warn(text: str) -> None:
    """A warning, which Python shows once; in compiled code given as it is compiled."""
    warnings.warn(text, stacklevel=3)


def _is_view(w: torch.Tensor, of: torch.Tensor) -> bool:
    """Whether w is a view of another whole tensor, or of its transpose."""
    if w.dtype != of.dtype or w.data_ptr() != of.data_ptr():
        return False
    return any(w.shape == t.shape and w.stride() == t.stride() for t in (of, of.transpose(-2, -1)))


def _has_no_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = (*args, *kwargs.values())
    return any(isinstance(value, torch.Tensor) and value.numel() == 0 for value in given)


class _Products(TorchFunctionMode):
    """A mode that passes each product of experts to a module."""

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
        # Checkpointing inside the module would recompute the product outside this mode; the
        # reentrant kind is detected by gradients being off.
        remedy = "checkpoint the whole module from outside"
        if self.grad and not torch.is_grad_enabled():
            got = "a product without gradients in a forward with them"
            remedy += ", or put no_grad around all of it"
            self.experts._refuse(got, "grouped_mm with them", remedy)
        region = _region()  # also None inside other saved-tensor hooks
        if region is not None and region is not self.region:
            got = "a product in a checkpointed part of a forward"
            self.experts._refuse(got, "grouped_mm outside of one", remedy)
        y = self.experts.product(index, x, w.transpose(-2, -1), offsets)
        return y if out_dtype is None else y.to(out_dtype)


def _region() -> Any:
    """The torch.utils.checkpoint region that is running; None in compiled code."""
    return None if torch.compiler.is_compiling() else checkpointed_region()


def _is_grouped_mm(func: Any) -> bool:
    if func is torch._grouped_mm:  # torch.nn.functional.grouped_mm is this
        return True
    if isinstance(func, torch._ops.OpOverload):
        func = func.overloadpacket
    # Transformers calls the second where PyTorch's own does not compile.
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
    """The arguments of `grouped_mm`, except the bias, which is refused as PyTorch does."""
    if bias is not None:
        fail("grouped_mm", "bias", "given", "none", "add it to the result")
    return input, mat2, offs, out_dtype


def _let_modes_see_grouped_mm() -> None:
    """Add torch._grouped_mm to the overridable functions: PyTorch's compiler applies modes only to
    functions in that list, which omits names with a leading underscore, overridable or not."""
    listed = get_overridable_functions().setdefault(torch, [])
    if torch._grouped_mm not in listed:
        compiler = sys.modules.get("torch._dynamo.variables.torch")
        if compiler is not None:  # it has cached them as a set
            compiler.get_overridable_functions.cache_clear()
        listed.append(torch._grouped_mm)
