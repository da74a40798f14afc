"""`Linear`: a drop-in `torch.nn.Linear` whose GEMMs read the operands of a recipe; `GroupedLinear`:
the same for experts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from blockscale._errors import any_int, check_int, fail, fail_offsets, fail_type
from blockscale._layer_arguments import refuse_script
from blockscale._plain import FLOATS, FLOATS_TEXT, KeptWeight, is_dtensor, is_plain, values_of
from blockscale._tracing import fake_mode_of, is_fake
from blockscale.forwards import RngState, make_root
from blockscale.functional import linear_with_key
from blockscale.recipe import Recipe, any_stochastic, recipe_names
from blockscale.recipe import recipe as recipe_named
from blockscale.rng import Key, Sent, as_tensor, layer_seed, moved, own_tensors, received
from blockscale.weight import QuantizedWeight, quantize_weight

__all__ = ["GroupedLinear", "Linear"]


class Uncopied:
    """What deep copies and pickles of a layer do not get: None takes its place, also where all
    attributes are copied past `Layer.__getstate__`, as parametrizations do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@dataclasses.dataclass(frozen=True)
class Kept(Uncopied):
    """Operands of a weight that were made in advance, and the weight's state at that time. (A copy
    has another weight, and nothing would remove its operands.)"""

    operands: QuantizedWeight
    name: str
    weight: torch.Tensor
    state: tuple[Any, ...]

    @classmethod
    def of(cls, name: str, weight: torch.Tensor, operands: QuantizedWeight) -> Kept:
        return cls(operands, name, weight, _state_of(weight))

    def check(self, weight: torch.Tensor) -> None:
        """Refuse a weight that has changed or been replaced."""
        if weight is self.weight and _state_of(weight) == self.state:
            return
        got, what = "changed", "steps an optimizer, loads a checkpoint, merges or moves weights"
        if weight is not self.weight:
            got, what = "another tensor", "assigns or offloads weights; and around functional_call"
        need, remedy = "what it was when it began", f"leave it before what {what}"
        fail("quantized_weights", self.name, got, need, remedy)


def version_of(weight: torch.Tensor) -> int:
    """How often it has been changed in place; 0 for inference tensors, which keep no count."""
    if weight.is_inference():
        return 0
    if is_dtensor(weight):  # its local tensor may change alone, as when a checkpoint is loaded
        return weight._version + weight._local_tensor._version  # type: ignore[attr-defined,no-any-return]
    return weight._version


def _state_of(weight: torch.Tensor) -> tuple[Any, ...]:
    """A state that most changes of the weight alter: `.data = `, for one, gives it other memory."""
    here = _piece_of(weight)
    return version_of(weight), here.data_ptr(), here.dtype


def _piece_of(weight: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, as a plain tensor."""
    return values_of(weight._local_tensor if is_dtensor(weight) else weight)  # type: ignore[attr-defined]


def without_type(weight: torch.Tensor) -> torch.Tensor:
    """A weight that FSDP2 is to gather as codes (or any tensor) without its type, for code that
    handles only plain tensors: safetensors, and kernels that ask for pointers."""
    if not is_dtensor(weight):
        return weight.local.detach() if isinstance(weight, KeptWeight) else weight
    piece = weight._local_tensor  # type: ignore[attr-defined]
    if not isinstance(piece, KeptWeight):
        return weight
    whole = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
    at = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
    made: torch.Tensor = type(weight).from_local(piece.local.detach(), *at, **whole)  # type: ignore[attr-defined]
    return made


def got_and_need(weight: torch.Tensor) -> tuple[str, str]:
    """The message's parts for a weight that is not whole and plain, or only seems so
    (`managed_parameters`)."""
    if is_plain(weight):
        return "gathered by FSDP2 for now", "a weight that fully_shard has not cut"
    return f"a {type(weight).__name__}", "a plain tensor"


class Layer(torch.nn.Module):
    """Base of modules with a recipe: holds the recipe, the count of forwards, and the seed.

    Attributes:
        recipe: do not assign it: `convert` changes it, along with what is counted for it.
    """

    # The class that `convert` found and `revert` restores; None for a class only built by hand,
    # which stays what it is.
    plain: type[torch.nn.Module] | None = None

    recipe: Recipe
    # Plain attributes, neither parameters nor buffers: checkpoints stay plain.
    _rng_state: RngState
    _seed: torch.Tensor

    # Within quantized_weights(): the operands made in advance.
    _kept: Any = None

    def matrices(self) -> list[torch.Tensor]:
        """The parameters that the layer multiplies by."""
        raise NotImplementedError

    def keep(self, name: str, backward: bool) -> list[torch.Tensor]:
        """Make the weights' operands in advance, or let the first forward do so; returns those
        weights."""
        raise NotImplementedError

    def quantizes_ahead(self) -> bool:
        """Whether a weight's operands depend on the weight alone."""
        return not any_stochastic(self.recipe.fprop_w, self.recipe.dgrad_w)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "recipe" and "_rng_state" in vars(self):
            need = "that of convert, which counts forwards where one draws random bits"
            remedy = "call bs.convert(model, recipe, rules=...) again: it changes what is different"
            fail_type(type(self).__name__, "recipe", value, need, remedy)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        # Operands kept are `Uncopied`, but copy.copy() shares what is in the state.
        state: dict[str, Any] = dict(super().__getstate__())  # type: ignore[no-untyped-call]
        state.pop("_kept", None)
        return state | {"_seed": Sent(self._seed)} if "_seed" in state else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "_seed" in state:
            vars(self)["_seed"] = received(self._seed)
        self._move_rng()  # a pickle does not say where its numbers were

    def __prepare_scriptable__(self) -> Any:
        refuse_script(self, self.recipe)

    def configure(self, recipe: Recipe, state: RngState, name: str) -> None:
        """Set the recipe, the shared offset, and the name that the seeds derive from."""
        # Bypasses __setattr__: that of another library's module may refuse.
        own = vars(self)
        own["recipe"], own["_rng_state"] = recipe, state
        own.pop("_kept", None)  # made for another recipe, within quantized_weights()
        state.draws |= recipe.stochastic
        state.follows = False
        with own_tensors():  # training saves it
            own["_seed"] = self._seed_of(state.seed, name)
        self._move_rng()

    def _seed_of(self, seed: int, name: str) -> torch.Tensor:
        return as_tensor(layer_seed(seed, name), torch.device("cpu"))

    def count_alone(self, seed: int) -> None:
        """Count its own forwards, as a layer built by hand does."""
        self.configure(self.recipe, RngState(seed), "")
        make_root(self, self._rng_state)

    def _move_rng(self, device: torch.device | None = None) -> None:
        """To the device of the first parameter or buffer if none is given."""
        if "_seed" not in vars(self):  # an instance of a class of ours that convert has not seen
            return
        if getattr(self, "_is_replica", False):
            need = "a module whose random bits are counted in one place"
            got = "a replica that nn.DataParallel made"
            fail(type(self).__name__, "module", got, need, "use DistributedDataParallel")
        if device is None:
            # Weights may have been turned into buffers, which is one way to freeze them. A fake
            # one's device need not be there.
            tensors = map(_piece_of, itertools.chain(self.parameters(), self.buffers()))
            device = next((tensor.device for tensor in tensors if not is_fake(tensor)), None)
        # In a model on several devices the offset stays where captured graphs read it.
        if device is None or device.type == "meta" or device == self._seed.device:
            return
        with torch.inference_mode(False):
            self._rng_state.move(device)
            vars(self)["_seed"] = moved(self._seed, device)

    def _apply(self, fn: Callable[..., Any], *recurse: bool, **named: bool) -> Layer:
        # .to(), .cuda() and to_empty() end up here and move only parameters and buffers.
        super()._apply(fn, *recurse, **named)  # type: ignore[no-untyped-call]
        self._move_rng()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._move_rng()  # with assign=True the parameters may be elsewhere now

    def _key(self, weight: torch.Tensor | None) -> Key:
        """The key of this forward's random bits, for a recipe that draws some."""
        if type(weight) is not torch.nn.Parameter:
            if weight is None:  # which the product refuses
                return self._seed, self._rng_state.offset
            mode = fake_mode_of(_piece_of(weight))
            if mode is not None:
                seed, offset = map(mode.from_tensor, (self._seed, self._rng_state.offset))
                return seed.to(weight.device), offset.to(weight.device)
        # FSDP moves parameters past _apply(), and FSDP1 may leave a layer none.
        if self._seed.device != weight.device:
            if torch.compiler.is_compiling() and not torch.is_grad_enabled():
                # What compiled code made in inference mode, training could neither save nor change.
                return self._seed.to(weight.device), self._rng_state.offset.to(weight.device)
            self._move_rng(weight.device)
        offset = self._rng_state.offset
        if offset.device != self._seed.device:  # a model on several devices
            offset = offset.to(self._seed.device)
        return self._seed, offset


class WeightLayer(Layer):
    """A layer with one weight, whose operands may have been made in advance."""

    weight: torch.Tensor
    _kept: Kept | None = None
    # After quantized_all_gather(): restores the weight's type.
    _retype: Callable[[WeightLayer], None] | None = None

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the whole weight, even where it is sharded."""
        raise NotImplementedError

    def matrices(self) -> list[torch.Tensor]:
        return [self.weight]

    def keep(self, name: str, backward: bool) -> list[torch.Tensor]:
        weight = self.weight
        computed = weight is not self._parameters.get("weight")
        if computed or not self.quantizes_ahead():
            return []
        made = quantize_weight(without_type(self._here(weight)), self.recipe, None, backward)
        # Past __setattr__, as in configure.
        vars(self)["_kept"] = Kept.of(f"{name}.weight".lstrip("."), weight, made)
        return [weight]

    def _here(self, weight: torch.Tensor) -> torch.Tensor:
        """The part of the weight that this rank multiplies by."""
        return weight

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self._retype is not None:  # with assign=True the weight is a new tensor
            self._retype(self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        name = f"{prefix}weight"  # absent where a parametrization computes it
        if self._retype is not None and not keep_vars and name in destination:
            destination[name] = without_type(destination[name])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._retype is not None:  # pickling drops the type
            self._retype(self)

    def _operands(self, weight: torch.Tensor) -> QuantizedWeight | None:
        """The weight's operands, where they were made in advance."""
        if self._kept is not None:
            if not torch.compiler.is_compiling():
                self._kept.check(weight)
            return self._kept.operands
        if type(weight) is torch.nn.Parameter:
            return None
        gathered = getattr(weight, "quantized", None)  # by FSDP2
        if not isinstance(gathered, QuantizedWeight):
            return None
        if gathered.recipe is not self.recipe:
            # Converted while gathered, to a recipe with the same spec of W (check_gathered).
            return dataclasses.replace(gathered, recipe=self.recipe)
        return gathered


class Linear(WeightLayer, torch.nn.Linear):
    """`torch.nn.Linear` with quantized GEMMs: same parameters, same state_dict.

    `blockscale.convert` turns the linear layers of a model into this class and gives them one
    shared count of forwards. A layer built by hand counts its own. One of a subclass of this class
    stays what it is, as a `GroupedLinear` does, if `convert` leaves it alone and in `revert`.

    Args:
        in_features, out_features, bias, device, dtype: as for `torch.nn.Linear`.
        recipe: a Recipe or the name of one.
        seed: of the random bits (docs/rng.md); give each layer built by hand a different one.

    Raises:
        TypeError, ValueError: an unknown recipe, a recipe passed as bias, or a seed that is no int.
    """

    plain = torch.nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe = "nvfp4",
        seed: int = 0,
    ) -> None:
        named: object = bias
        if isinstance(named, str | Recipe):  # a recipe passed as bias would count as true
            fail_type("Linear", "bias", bias, "a bool", "pass the recipe as recipe=")
        _check_no_recipe("Linear", device)
        number = any_int("Linear", "seed", seed)
        chosen = recipe_named(recipe)
        torch.nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        _check_dtype("Linear", self.weight, chosen)
        if "plain" not in vars(type(self)):  # a user's subclass: not to be lost
            vars(self)["plain"] = None
        self.recipe = chosen
        self.count_alone(number)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """[N, K]."""
        return self.out_features, self.in_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]; see `blockscale.linear`."""
        recipe, weight = self.recipe, self.weight
        key = self._key(weight) if recipe.stochastic else None
        if self._kept is None and type(weight) is torch.nn.Parameter:
            return linear_with_key(input, weight, self.bias, recipe, key)
        made = self._operands(weight)
        return linear_with_key(input, weight, self.bias, recipe, key, None, None, made)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"


def _check_no_recipe(kind: str, device: object) -> None:
    named = isinstance(device, str) and device.partition("[")[0] in recipe_names()
    if named or isinstance(device, Recipe):
        fail_type(kind, "device", device, "a device", "pass the recipe as recipe=")


def _check_dtype(kind: str, weight: torch.Tensor, recipe: Recipe) -> None:
    """Refuse a dtype that the recipe does not take; a layer built by hand may have
    torch.get_default_dtype()."""
    if not (weight.dtype in FLOATS or recipe.high_precision):
        fail(kind, "dtype", weight.dtype, FLOATS_TEXT, "give it dtype=torch.float32, or bfloat16")


class GroupedLinear(WeightLayer):
    """The linear layers of several experts, without biases: `grouped_linear` as a module.

    Its weight may be divided over ranks, as a DTensor with Shard(0): each rank then multiplies by
    its own experts, at least one, and its forward receives their rows and ends
    (examples/python/expert_parallel.py). `groups` remains the number of experts over all ranks.

    Like `Linear` it counts its own forwards until `blockscale.convert` is called on the model that
    contains it and gives it a recipe and the model's count. If `skip` or rules leave it alone it
    keeps its recipe, as PyTorch has no such layer to go back to.

    Args:
        groups: number of experts.
        in_features, out_features: of each expert.
        device, dtype: of the weight [groups, out_features, in_features], whose matrices are
            initialized as in `torch.nn.Linear`.
        recipe: a Recipe or the name of one.
        seed: of the random bits (docs/rng.md); give each layer built by hand a different one.

    Raises:
        TypeError, ValueError: no groups, extents that are not ints or are negative, an unknown
            recipe, a recipe passed as device, a dtype that it does not quantize, or a seed that is
            no int.
    """

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe = "nvfp4",
        seed: int = 0,
    ) -> None:
        named = {"groups": groups, "in_features": in_features, "out_features": out_features}
        sizes = [check_int("GroupedLinear", name, value) for name, value in named.items()]
        for name, size in zip(named, sizes, strict=True):
            least = 1 if name == "groups" else 0
            if size < least:
                fail("GroupedLinear", name, size, f"{least} or more")
        _check_no_recipe("GroupedLinear", device)
        number = any_int("GroupedLinear", "seed", seed)
        chosen = recipe_named(recipe)
        super().__init__()
        self.groups, self.in_features, self.out_features = sizes
        self.weight = torch.nn.Parameter(torch.empty(self.weight_shape, device=device, dtype=dtype))
        _check_dtype("GroupedLinear", self.weight, chosen)
        self.reset_parameters()
        self.recipe = chosen
        self.count_alone(number)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """[E, N, K]."""
        return self.groups, self.out_features, self.in_features

    def reset_parameters(self) -> None:
        """Uniform within ±1/√in_features."""
        bound = self.in_features**-0.5 if self.in_features else 0.0
        torch.nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[T, in_features] -> [T, out_features]. The rows are sorted by group, and `offsets` holds
        where each group ends: [groups], or only this rank's; see `blockscale.grouped_linear`."""
        if not isinstance(offsets, torch.Tensor):
            fail_offsets("GroupedLinear", offsets)
        recipe, weight = self.recipe, self.weight
        key = self._key(weight) if recipe.stochastic else None
        made = self._operands(weight)
        weight = self._here(weight)
        return linear_with_key(input, weight, None, recipe, key, offsets, None, made)

    def _here(self, weight: torch.Tensor) -> torch.Tensor:
        if type(weight) is torch.nn.Parameter or not is_dtensor(weight):
            return weight
        from blockscale.distributed import experts_here

        return experts_here(weight)

    def extra_repr(self) -> str:
        extents = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"groups={self.groups}, {extents}, recipe={self.recipe}"


def check_model(operation: str, model: object) -> None:
    """Refuse anything that is not a module."""
    if not isinstance(model, torch.nn.Module):
        fail_type(operation, "model", model, "an nn.Module")


def converted_layers(operation: str, model: torch.nn.Module) -> dict[str, Layer]:
    """The converted layers of a model, by name; refuses a model without any."""
    check_model(operation, model)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Layer)}
    if not layers:
        got = f"{type(model).__name__} without converted layers"
        fail(operation, "model", got, "a converted model", "call bs.convert first")
    return layers
