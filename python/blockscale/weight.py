"""`quantize_weight`: the operands of a weight, made once for many calls of `linear`."""

from __future__ import annotations

import dataclasses

import torch

from blockscale._errors import any_device, as_pytorch_raises, fail, fail_type
from blockscale.recipe import Recipe, any_stochastic
from blockscale.recipe import recipe as recipe_named
from blockscale.rng import Rng, layer_key
from blockscale.tensor import FLOATS, FLOATS_TEXT, check_plain


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight as the GEMMs of `linear` and `grouped_linear` read it. Made by `quantize_weight`.

    Attributes:
        recipe: whose operands these are.
        shape: of the weight, [N, K] or [E, N, K].
        backward: whether the operand of x's gradient is there.
        operands: the memory of fprop's and of dgrad's, uint8 each, of those that the recipe
            quantizes; or, where FSDP2 has gathered codes, those of fprop's with its scales and
            outer scale.
    """

    recipe: Recipe
    shape: torch.Size
    backward: bool
    operands: list[torch.Tensor] = dataclasses.field(repr=False)

    @property
    def device(self) -> torch.device | None:
        """Where its operands lie; None where the recipe quantizes none."""
        return self.operands[0].device if self.operands else None

    def to(self, device: str | torch.device) -> QuantizedWeight:
        """A copy on another device. One in MXFP4 serves its own kind of device alone: `linear`
        refuses it where its GEMM reads a weight in another form."""
        to = any_device("QuantizedWeight.to", device)
        return dataclasses.replace(self, operands=[t.to(to) for t in self.operands])

    def operands_of(
        self, w: torch.Tensor, recipe: Recipe, dx: bool, operation: str
    ) -> list[torch.Tensor]:
        """The operands, for a call with this w and recipe that may ask for x's gradient.

        Raises:
            ValueError: made by another recipe, of another shape, or without backward.
        """
        name = "quantized_weight"
        if self.recipe is not recipe and self.recipe.text != recipe.text:
            fail(operation, name, f"of recipe {self.recipe}", f"recipe {recipe}, as in this call")
        if self.shape != w.shape:
            got = f"of a weight {list(self.shape)}"
            fail(operation, name, got, f"that of w {list(w.shape)}")
        if dx and not self.backward:
            need = "the operand of x's gradient"
            remedy = "make it, or begin quantized_weights, with backward=True"
            fail(operation, name, "without backward", need, remedy)
        return self.operands


def is_gathered(operands: list[torch.Tensor]) -> bool:
    """Whether they are codes, scales and outer scale of one operand, each as `quantize` returns it,
    instead of the memory of two."""
    return operands[0].dim() > 1


# What torch.load may make: a quantized weight is data.
torch.serialization.add_safe_globals([QuantizedWeight])


@as_pytorch_raises
def quantize_weight(
    w: torch.Tensor,
    recipe: str | Recipe = "nvfp4",
    rng: Rng | None = None,
    backward: bool = True,
) -> QuantizedWeight:
    """Quantize a weight ahead of the calls of `linear` or `grouped_linear` that it serves.

    A weight changes once a step of the optimizer, and each of these calls would quantize it again:
    every micro-batch, every recomputation, every batch of an inference. Passed as
    `quantized_weight=`, this gives the same bits, and gradients flow to w as before. It is a copy:
    make a new one when w has changed.

    Args:
        w: [N, K], or [E, N, K] for `grouped_linear`, float32, bfloat16 or float16.
        recipe: a Recipe or the name of one; of its operands fprop_w and dgrad_w count.
        rng: the layer's key; needed where the recipe rounds w stochastically, as none of the named
            ones does.
        backward: also make what x's gradient reads.

    Returns:
        A QuantizedWeight on w's device: a byte an element in FP8, half of one in FP4, and scales;
        twice that with backward. In MXFP4 on H100 and H200 a byte too: codes of FP8, in which the
        GEMM reads it.

    Raises:
        TypeError, ValueError: with the argument, what it got and what it needs.
    """
    if not isinstance(w, torch.Tensor):
        fail_type("quantize_weight", "w", w, "a tensor")
    if w.dtype not in FLOATS:
        fail("quantize_weight", "w.dtype", w.dtype, FLOATS_TEXT)
    check_plain("quantize_weight", "w", w)
    if not isinstance(backward, bool):
        fail_type("quantize_weight", "backward", backward, "a bool")
    chosen = recipe_named(recipe)
    stochastic = any_stochastic(chosen.fprop_w, chosen.dgrad_w)
    key = layer_key("quantize_weight", rng, stochastic, w.device)
    if stochastic and key is None:
        need = f"a key for random bits: recipe {chosen} rounds w stochastically"
        fail("quantize_weight", "rng", None, need, "pass rng=bs.Rng(seed, offset)")
    operands = torch.ops.blockscale.quantize_weight.default(
        w.detach(), chosen.text, backward, *(key or ())
    )
    return QuantizedWeight(chosen, w.shape, backward, operands)
