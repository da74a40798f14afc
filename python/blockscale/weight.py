"""`quantize_weight`: makes the operands of a weight once for many calls of `linear`."""

from __future__ import annotations

import dataclasses

import torch

from blockscale._errors import any_device, as_pytorch_raises, fail, fail_type
from blockscale._plain import FLOATS, FLOATS_TEXT, check_plain
from blockscale.recipe import Recipe, any_stochastic
from blockscale.recipe import recipe as recipe_named
from blockscale.rng import Rng, layer_key


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight as the GEMMs of `linear` and `grouped_linear` read it. Made by `quantize_weight`.

    Attributes:
        recipe: the recipe that the operands were made for.
        shape: the weight's, [N, K] or [E, N, K].
        backward: whether the operand for x's gradient is included.
        operands: the memory of fprop's operand and of dgrad's, each uint8, if the recipe quantizes
            it; or, where FSDP2 has gathered codes, the codes, scales and outer scale of fprop's.
    """

    recipe: Recipe
    shape: torch.Size
    backward: bool
    operands: list[torch.Tensor] = dataclasses.field(repr=False)

    @property
    def device(self) -> torch.device | None:
        """The device of its operands; None if the recipe quantizes none."""
        return self.operands[0].device if self.operands else None

    def to(self, device: str | torch.device) -> QuantizedWeight:
        """A copy on another device. One in MXFP4 works only on its original kind of device:
        `linear` refuses it where its GEMM reads weights in another form."""
        to = any_device("QuantizedWeight.to", device)
        return dataclasses.replace(self, operands=[t.to(to) for t in self.operands])

    def operands_of(
        self, w: torch.Tensor, recipe: Recipe, dx: bool, operation: str
    ) -> list[torch.Tensor]:
        """The operands for a call with this w and recipe, which needs x's gradient if `dx`.

        Raises:
            ValueError: made with another recipe, from another shape, or without backward.
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
    """Whether they are the codes, scales and outer scale of one operand, as `quantize` returns
    them, instead of the memory of two operands."""
    return operands[0].dim() > 1


# What torch.load may construct: a quantized weight is data.
torch.serialization.add_safe_globals([QuantizedWeight])


@as_pytorch_raises
def quantize_weight(
    w: torch.Tensor,
    recipe: str | Recipe = "nvfp4",
    rng: Rng | None = None,
    backward: bool = True,
) -> QuantizedWeight:
    """Quantize a weight in advance for several calls of `linear` or `grouped_linear`.

    A weight changes once per optimizer step, but each of these calls would quantize it again: in
    every micro-batch, recomputation and inference batch. Passed as `quantized_weight=`, the result
    gives the same bits, and gradients flow to w as before. It is a copy: make a new one when w has
    changed.

    Args:
        w: [N, K], or [E, N, K] for `grouped_linear`, float32, bfloat16 or float16.
        recipe: a Recipe or the name of one; only its operands fprop_w and dgrad_w are used.
        rng: the layer's key; needed if the recipe rounds w stochastically, which no named recipe
            does.
        backward: also make the operand that x's gradient needs.

    Returns:
        A QuantizedWeight on w's device: a byte per element in FP8, half a byte in FP4, plus scales;
        twice that with backward. In MXFP4 on H100 and H200 it is also a byte: FP8 codes, as the
        GEMM reads them.

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
    key = layer_key("quantize_weight", rng, stochastic, w)
    if stochastic and key is None:
        need = f"a key for random bits: recipe {chosen} rounds w stochastically"
        fail("quantize_weight", "rng", None, need, "pass rng=bs.Rng(seed, offset)")
    operands = torch.ops.blockscale.quantize_weight.default(
        w.detach(), chosen.text, backward, *(key or ())
    )
    return QuantizedWeight(chosen, w.shape, backward, operands)
