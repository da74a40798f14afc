"""FSDP2's weights as codes: each rank quantizes its piece, and the codes are gathered.

`fully_shard` asks a parameter's type how to gather it. What the parameter is at each stage:

    module.weight                between forwards                  while the layer runs
    before fully_shard           ShardedWeight: values             the same
    after fully_shard            DTensor of a ShardedWeight        GatheredWeight: codes and scales

Blocks of W are square: a piece of whole blocks has the same codes and scales as in the whole
weight, and the backward transposes the gathered operand for x's gradient. An outer scale is made
from the largest value of all pieces. A piece of a GroupedLinear's weight consists of whole
matrices, and their outer scales are gathered with them. So y and the gradients are, to the bit,
those of weights that are gathered first and then quantized.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from blockscale._collectives import largest_of_ranks
from blockscale._errors import fail
from blockscale._names import shown
from blockscale._plain import KeptWeight, WeightOfFsdp, is_dtensor, is_plain, values_of
from blockscale.fsdp import cut_among_fewer, gathered_with, managed_parameters, was_dtensor
from blockscale.nn import Layer, WeightLayer, converted_layers, got_and_need
from blockscale.recipe import Recipe, Spec
from blockscale.weight import QuantizedWeight

_ops = torch.ops.blockscale
_amax = _ops.amax.default._op  # compilers must not see it
_quantize_piece = _ops.quantize_piece.default._op


def quantized_all_gather(model: torch.nn.Module) -> list[str]:
    """Let FSDP2 gather the weights of converted layers as codes instead of values.

        bs.convert(model, "fp8_blockwise")
        bs.quantized_all_gather(model)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

    The results are the same bits, and a gather moves fewer bytes (docs/guide.md). Each rank
    quantizes its piece of a weight instead of the whole. The backward gathers a weight's operand
    again, where otherwise each layer keeps its quantized operand from the forward on. If a recipe
    has an outer scale, ranks exchange the largest values of the weights that are gathered together,
    once per gather.

    Call it between `convert` and `fully_shard`, and before the optimizer is made: parameters are
    replaced by new ones with the same values and gradients, without hooks. Checkpoints stay as they
    are. Weights whose recipe does not quantize W in square blocks, once for both products ("mxfp8"
    does not), are left alone, and so are weights that modules of `model` share. A weight is
    gathered as codes only if its pieces are whole blocks: the rows of each rank a multiple of 128
    in "fp8_blockwise", 32 in "mxfp4", 16 in "nvfp4" and "amdfp4"; for experts, equally many
    matrices on every rank. Other weights are gathered as values, as usual, and so are those that
    `parallelize_module` cuts afterwards.

    After `fully_shard` a layer's spec of W cannot change, as FSDP2 has sized its buffers.
    `fully_shard` must shard along dimension 0, with `reshard_after_forward` True or False, not a
    number.

    Args:
        model: the converted model, before `fully_shard`.

    Returns:
        The names of the weights that are gathered as codes if each rank has whole blocks.

    Raises:
        TypeError, ValueError: nothing in the model is converted, a weight is a DTensor already, or
            fully_shard has cut it, even if it is gathered at the moment. Later, in a forward: a
            weight is cut along a dimension other than the first, or reshard_after_forward is a
            number.
    """
    layers = converted_layers("quantized_all_gather", model)
    cut = managed_parameters(model)
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    chosen: dict[str, WeightLayer] = {}
    for name, layer in layers.items():
        if not isinstance(layer, WeightLayer):
            continue
        weight = layer._parameters.get("weight")  # None where a parametrization computes it
        if weight is None or holders[id(weight)] > 1 or gathered_spec(layer.recipe) is None:
            continue
        named = f"{name}.weight".lstrip(".")
        if id(weight) in cut or not (is_plain(weight) or isinstance(weight, ShardedWeight)):
            got, need = got_and_need(weight)
            remedy = "call it before fully_shard, and not after parallelize_module"
            fail("quantized_all_gather", named, got, need, remedy)
        chosen[named] = layer
    for layer in chosen.values():
        _retype(layer)
        vars(layer)["_retype"] = _retype  # past __setattr__, as in Layer.configure
    return list(chosen)


def _retype(layer: WeightLayer) -> None:
    """Give the weight its type, initially and after a checkpoint has been assigned."""
    if torch.distributed.is_available():
        _tell_dtensors_apart()
    weight: Any = layer._parameters.get("weight")
    if weight is None:  # a parametrization computes it
        return
    if is_dtensor(weight):
        if not isinstance(weight._local_tensor, ShardedWeight):
            weight._local_tensor = ShardedWeight(weight._local_tensor)
    elif not isinstance(weight, ShardedWeight):
        made = torch.nn.Parameter(ShardedWeight(weight.detach()), weight.requires_grad)
        inherit(made, weight)
        # Past the layer's own, which may refuse.
        torch.nn.Module.__setattr__(layer, "weight", made)


def inherit(made: torch.Tensor, weight: torch.Tensor) -> None:
    """Give what takes a weight's place its gradient, and its attributes, such as options for an
    optimizer."""
    made.grad_dtype = weight.grad_dtype
    made.grad = weight.grad
    own = {"local", "_is_param"}  # attributes of its type
    vars(made).update({name: value for name, value in vars(weight).items() if name not in own})


@functools.cache
def _tell_dtensors_apart() -> None:
    """Let DTensor's key for compiled code tell a ShardedWeight inside it from a plain tensor.

    PyTorch looks compiled code up by this key, also on disk, where other runs have put it, and
    leaves out the local tensor's type. Code that takes one tensor out of a DTensor would then be
    given a ShardedWeight, and its kernels read address 0.
    """
    from torch.distributed.tensor import DTensor

    key: Any = getattr(DTensor, "_stable_hash_for_caching", None)
    if key is None:  # in a release without such keys
        return

    @functools.wraps(key)
    def key_of(self: Any) -> str:
        local = self._local_tensor
        inner = local._stable_hash_for_caching() if isinstance(local, ShardedWeight) else ""
        return f"{key(self)}{inner}"

    DTensor._stable_hash_for_caching = key_of  # type: ignore[method-assign]


def gathered_spec(recipe: Recipe) -> Spec | None:
    """The spec of W, if one quantization of its pieces serves both products; else None."""
    s = recipe.fprop_w
    if s is None or s != recipe.dgrad_w or s.block[0] != s.block[1]:
        return None
    return None if s.stochastic or s.hadamard else s


def gathers_codes(layer: Layer) -> bool:
    """Whether FSDP2 manages the layer's weight, and asks its type how to gather it."""
    if not isinstance(layer, WeightLayer) or layer._retype is None:
        return False
    # After fully_shard it is a DTensor or the gathered weight, never the piece itself.
    weight = layer._parameters.get("weight")
    return weight is not None and not isinstance(weight, ShardedWeight)


def check_gathered(name: str, layer: Layer, recipe: Recipe) -> None:
    """Refuse a recipe that changes the spec of W, or introduces one, if FSDP2 has sized its
    buffers."""
    used = gathered_spec(layer.recipe)
    if gathers_codes(layer) and gathered_spec(recipe) != used:
        whose = "values" if used is None else "codes"
        got = f"{recipe} for {shown(name)!r}, whose {whose} FSDP2 gathers"
        need = "one without codes of W to gather" if used is None else f"W in {used} as it is"
        remedy = "convert before fully_shard, or without quantized_all_gather"
        fail("convert", "recipe", got, need, remedy)


_aten = torch.ops.aten
# The results of these operators are weights too.
_STAYS: Final = frozenset((
    _aten._pin_memory.default, _aten._to_copy.default, _aten.as_strided.default,
    _aten.clone.default, _aten.detach.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_zeros.default, _aten.slice.Tensor, _aten.split.Tensor, _aten.view.default,
))  # fmt: skip


# Views of a whole gathered weight; PyTorch views a tensor to find its gradient's node.
_VIEWS: Final = frozenset(
    (_aten.alias.default, _aten.as_strided.default, _aten.detach.default, _aten.view.default)
)
# The position of `linear`'s argument for w's operands made in advance.
_OF_W: Final = [a.name for a in _ops.linear.default._schema.arguments].index("quantized_w")


class ShardedWeight(KeptWeight):
    """A rank's piece of a weight: a tensor like any other, except for how it is gathered.

    Attributes:
        local: the tensor.
    """

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> ShardedWeight:
        # Like its values: in inference mode, views of an ordinary tensor are ordinary ones.
        with torch.inference_mode(values.is_inference()):
            made: ShardedWeight = torch.Tensor._make_wrapper_subclass(
                cls,
                values.shape,
                strides=values.stride(),
                storage_offset=values.storage_offset(),
                dtype=values.dtype,
                device=values.device,
            )
        made.local = values
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["local"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> ShardedWeight:
        return ShardedWeight(inner["local"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled():  # operators made of others come undivided
            made = func.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        plain = pytree.tree_map_only(cls, lambda w: w.local, (args, kwargs or {}))
        made = func(*plain[0], **plain[1])
        if func in _STAYS and not (func is _aten.view.default and made.dim() == 1):
            return pytree.tree_map_only(torch.Tensor, cls, made)
        # An in-place operator returns the weight itself. Anything computed from it is not a weight,
        # nor is a flat view, by which FSDP2 detects whether the memory was replaced.
        return args[0] if args and made is plain[0][0] else made

    def _stable_hash_for_caching(self) -> str:
        # PyTorch's own leaves out the type, and warns.
        known = (self.shape, self.stride(), self.dtype, self.device, self.requires_grad)
        return f"blockscale.ShardedWeight{known}"

    def untyped_storage(self) -> torch.UntypedStorage:
        # FSDP2 uses it to detect whether the memory was replaced; a compiler gives its stand-in
        # one.
        if torch._guards.TracingContext.try_get() is not None:
            return super().untyped_storage()
        return self.local.untyped_storage()

    def data_ptr(self) -> int:
        # Libraries that make an optimizer before fully_shard (Accelerate) find its parameters again
        # by their addresses, and a wrapper has none.
        return self.local.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedWeight:
        # PyTorch's own would copy the storage of whatever has an address.
        if not self.is_leaf:
            super().__deepcopy__(memo)  # type: ignore[no-untyped-call]  # refuses it
        if id(self) not in memo:
            made = ShardedWeight(self.local.clone())
            made.requires_grad_(self.requires_grad)
            inherit(made, self)
            made.grad = copy.deepcopy(self.grad, memo)
            memo[id(self.local)] = made.local
            made.__dict__.update(copy.deepcopy(self.__dict__, memo))
            memo[id(self)] = made
        copied: ShardedWeight = memo[id(self)]
        return copied

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        values = values_of(values)
        if (values.shape, values.dtype, values.device) != (self.shape, self.dtype, self.device):
            got = f"{values.dtype}{list(values.shape)} on {values.device}"
            need = f"{self.dtype}{list(self.shape)} on {self.device}, as the weight is"
            remedy = "use the module's .to() or .float() before quantized_all_gather"
            fail("quantized_all_gather", "weight.data", got, need, remedy)
        self.local.data = values

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.local!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.local  # checkpoints stay plain
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """What a rank sends, and the metadata that it keeps: FSDP2's extension point, called with
        the weight's module."""
        s = None if was_dtensor(module) else _spec_of(module, outer_size)
        piece, dtype = self.local, mp_policy.param_dtype or self.dtype
        n, ranks = outer_size[0], mesh.size()
        if piece.shape[1:] != outer_size[1:]:
            got = f"pieces {list(piece.shape)} of {list(outer_size)}"
            need = "whole rows, or of experts whole matrices"
            remedy = "leave out shard_placement_fn, or parallelize_module"
            fail("quantized_all_gather", "weight", got, need, remedy)
        if cut_among_fewer(module):  # FSDP2 cuts one tensor, and asks no extension afterwards
            need = "True or False: FSDP2 gathers no codes from fewer ranks"
            fail("quantized_all_gather", "reshard_after_forward", "a number", need)
        if piece.shape[0] == n:  # a single rank, from which FSDP2 takes one tensor
            return (piece.to(dtype),), None
        experts = piece.dim() == 3  # whole matrices, each with an outer scale of its own
        if s is None or not _is_whole(s, outer_size, ranks):
            values = piece.to(dtype)
            missing = values.new_zeros(-(-n // ranks) - piece.shape[0], *piece.shape[1:])
            return (torch.cat([values, missing]),), None
        largest = s.outer and not experts
        amax = _largest_of_weight(module, (piece, dtype, s), mesh) if largest else None
        # Bytes, as FSDP2 moves them; the piece is never materialized in `dtype`.
        codes, scales, outer = _quantize_piece(piece, dtype, s.text, amax, int(experts))
        sent = (codes, scales, outer) if s.outer and experts else (codes, scales)
        return sent, (module.recipe, s, outer_size, outer)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The parameter that a layer sees. Its codes and scales are FSDP2's memory, which the next
        gather refills, also for a graph that has saved them; the outer scale is refilled here
        likewise. None of these may be inference tensors, though a layer that stays gathered may
        first have run in inference mode."""
        if metadata is None:
            return None if out is not None else (all_gather_outputs[0], ())
        assert out is None or isinstance(out, GatheredWeight)
        recipe, s, shape, outer = metadata
        codes, scales, *outers = all_gather_outputs
        with torch.inference_mode(False), torch.no_grad():
            if outers:  # the outer scales of experts
                kept = outers[0]
            elif out is not None and not s.outer:
                kept = out.outer  # has no elements
            else:
                kept = torch.empty_like(outer) if out is None else out.outer
                with _unsafe_preserve_version_counter(kept):
                    kept.copy_(outer)
                if outer.is_cuda:  # made on the gather's stream, read on the layer's
                    outer.record_stream(torch.cuda.current_stream(outer.device))
            operand = [codes, scales, kept]
            weight = QuantizedWeight(recipe, shape, True, operand)
            if out is None:
                return GatheredWeight(weight, param_dtype), ()
            out.quantized = weight
            return None


def _spec_of(module: torch.nn.Module, shape: torch.Size) -> Spec | None:
    """The spec for a weight of this shape whose pieces FSDP2 gathers."""
    if not isinstance(module, WeightLayer) or shape != module.weight_shape:
        return None
    return gathered_spec(module.recipe)


def _is_whole(s: Spec, shape: torch.Size, ranks: int) -> bool:
    """Whether each of `ranks` pieces of a weight is whole blocks, or for experts whole matrices."""
    rows = 1 if len(shape) == 3 else s.block[0]
    return shape.numel() > 0 and shape[0] % (ranks * rows) == 0


def _largest_of_weight(
    module: torch.nn.Module, piece: tuple[torch.Tensor, torch.dtype, Spec], mesh: Any
) -> torch.Tensor:
    """The amax of a layer's whole weight. `piece` is this rank's: its values, the dtype that they
    are rounded to, and their spec.

    When FSDP2 asks the first of the weights that it gathers together, ranks exchange the amax of
    all of them and store those of the others until they are asked: each exchange is waited for, and
    a block of a model may have seven weights. Nothing is kept beyond the gather, since there is no
    way to tell whether a weight has changed by the next one.
    """
    own, ranks = vars(module), mesh.size()
    if "_amax" not in own:
        pieces: dict[torch.nn.Module, tuple[torch.Tensor, torch.dtype, Spec]] = {}
        for parameter in gathered_with(module):
            layer, shape = parameter._module_info.module, parameter._orig_size
            local: Any = getattr(parameter.sharded_param, "_local_tensor", None)
            ours = isinstance(local, ShardedWeight) and not parameter.is_dtensor
            s = _spec_of(layer, shape) if ours else None
            if s is not None and s.outer and len(shape) == 2 and _is_whole(s, shape, ranks):
                dtype = parameter.mp_policy.param_dtype or local.dtype
                pieces[layer] = (local.local, dtype, s)
        # FSDP2 copies offloaded pieces to the device one by one, each before it asks.
        if next(iter(pieces), None) is not module or pieces[module][0].device != piece[0].device:
            pieces = {}
        pieces[module] = piece
        here = [_amax(values, s.text, -1, 0, None, dtype) for values, dtype, s in pieces.values()]
        largest = largest_of_ranks(torch.stack(here), mesh.get_group())
        for layer, amax in zip(pieces, largest.unbind(), strict=True):
            vars(layer)["_amax"] = amax
    found: torch.Tensor = own.pop("_amax")
    return found


# FSDP2 inspects the signature in every gather of every weight; cached, it is not rebuilt each time.
_pre_all_gather: Any = ShardedWeight.fsdp_pre_all_gather
_pre_all_gather.__signature__ = inspect.signature(_pre_all_gather)


class GatheredWeight(WeightOfFsdp):
    """A weight without values: holds what the GEMMs of its layer read.

    Attributes:
        quantized: the operand along its rows: codes and scales, bytes in FSDP2's memory, and the
            outer scale.
    """

    quantized: QuantizedWeight

    @staticmethod
    def __new__(cls, quantized: QuantizedWeight, dtype: torch.dtype) -> GatheredWeight:
        with torch.inference_mode(False):  # as in fsdp_post_all_gather, and so are views of it
            made: GatheredWeight = torch.Tensor._make_wrapper_subclass(
                cls, quantized.shape, dtype=dtype, device=quantized.device
            )
        made.quantized = quantized
        return made

    codes = property(lambda self: self.quantized.operands[0])
    scales = property(lambda self: self.quantized.operands[1])
    outer = property(lambda self: self.quantized.operands[2])

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales", "outer"], (self.quantized.recipe, self.shape, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], known: Any, *_: Any) -> GatheredWeight:
        recipe, shape, dtype = known
        operand = [inner["codes"], inner["scales"], inner["outer"]]
        return GatheredWeight(QuantizedWeight(recipe, shape, True, operand), dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({list(self.shape)}, recipe={self.quantized.recipe})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _VIEWS and (len(args) == 1 or torch.Size(args[1]) == args[0].shape):
            return cls(args[0].quantized, args[0].dtype)
        if func is _ops.linear.default and len(args) > _OF_W and args[_OF_W]:
            # With operands made in advance, w's values are not read: any tensor of its shape and
            # dtype will do.
            x, w, *rest = args
            return func(x, w.codes.new_empty((), dtype=w.dtype).expand(w.shape), *rest)
        if func is _aten.zeros_like.default:  # FSDP2's gradient for an unused layer
            return args[0].codes.new_zeros(args[0].shape, dtype=args[0].dtype)
        need = "nothing but its layer: FSDP2 has gathered codes, no values"
        remedy = (
            "call reshard() of the FSDP2 module first: cut, it has values; if the model's forward "
            "reads it directly, bypassing its layer, leave that layer out: skip= of convert"
        )
        return fail("quantized_all_gather", "weight", f"read by {func}", need, remedy)
