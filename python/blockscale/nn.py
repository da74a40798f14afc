"""`Linear`: a drop-in `torch.nn.Linear` whose GEMMs read the operands of a recipe."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from blockscale._errors import fail_type
from blockscale.functional import USUAL, linear_with_key
from blockscale.recipe import Recipe
from blockscale.recipe import recipe as recipe_named
from blockscale.rng import RngState, as_tensor, layer_seed


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` with quantized GEMMs: same parameters, same state_dict.

    `blockscale.convert` turns the linear layers of a model into this class and gives them one
    shared count of forwards. A layer that is built by hand counts its own.

    Args:
        in_features, out_features, bias, device, dtype: as for `torch.nn.Linear`.
        recipe: a Recipe or the name of one.
        seed: of the random bits (docs/rng.md); another for each layer that is built by hand.

    Raises:
        TypeError, ValueError: an unknown recipe, one in the place of bias, or no seed.
    """

    recipe: Recipe
    # Plain attributes, neither parameters nor buffers: checkpoints stay plain.
    _rng_state: RngState
    _seed: torch.Tensor

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
        if isinstance(named, str | Recipe):  # which would count as true
            fail_type("Linear", "bias", bias, "a bool", "pass the recipe as recipe=")
        if isinstance(seed, bool) or not isinstance(seed, int):
            fail_type("Linear", "seed", seed, "an int")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.configure(recipe_named(recipe), RngState(seed), "")
        make_root(self, self._rng_state)

    def configure(self, recipe: Recipe, state: RngState, name: str) -> None:
        """Set the recipe, the shared offset, and the name that the seeds derive from."""
        self.recipe = recipe
        self._rng_state = state
        state.draws |= recipe.stochastic
        with torch.inference_mode(False):  # training saves it
            self._seed = as_tensor(layer_seed(state.seed, name), torch.device("cpu"))
        self._move_rng()

    def _move_rng(self) -> None:
        device = self.weight.device
        if device.type != "meta":
            with torch.inference_mode(False):
                self._rng_state.move(device)
                self._seed = self._seed.to(device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Linear:
        # .to(), .cuda() and to_empty() come through here and know only parameters and buffers.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._move_rng()
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]; see `blockscale.linear`."""
        recipe, weight = self.recipe, self.weight
        key = None
        if recipe.stochastic:
            if self._seed.device != weight.device:  # FSDP2 moves parameters past _apply()
                self._move_rng()
            if type(weight) not in USUAL:
                self._rng_state.breaks = True
            offset = self._rng_state.offset
            if offset.device != self._seed.device:  # of a model that lies on several
                offset = offset.to(self._seed.device)
            key = (self._seed, offset)
        return linear_with_key(input, weight, self.bias, recipe, key)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}"


class Root:
    """The hooks that count a model's forwards, and the state they count in."""

    def __init__(self, module: torch.nn.Module, state: RngState) -> None:
        self.state = state
        self.handles = (
            module.register_forward_pre_hook(state.before_forward),
            module.register_forward_hook(state.after_forward),
        )
        state.root = weakref.ref(self)

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)  # those of a copy, whose state is one
        self.state.root = weakref.ref(self)


def make_root(module: torch.nn.Module, state: RngState) -> None:
    """Let `module`, and no module inside it, count forwards in `state`."""
    for inner in module.modules():
        drop_root(inner)
    module.__dict__["_blockscale_root"] = Root(module, state)


def drop_root(module: torch.nn.Module) -> None:
    """Undo `make_root`."""
    root: Root | None = module.__dict__.pop("_blockscale_root", None)
    for handle in root.handles if root else ():
        handle.remove()


def root_state(module: torch.nn.Module) -> RngState | None:
    """The state that `module` counts forwards in, if it does."""
    root: Root | None = module.__dict__.get("_blockscale_root")
    return root.state if root else None
