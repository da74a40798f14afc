"""The derivative of `linear` in programs of torch.export, which keep operators but no
autograd.Function. Importing this module registers it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from blockscale._errors import fail
from blockscale._layer_arguments import specs_of
from blockscale.functional import LinearFunction
from blockscale.recipe import Recipe


@functools.cache
def _recipe_of(text: str) -> Recipe:
    """The recipe with these operands (`Recipe.text`)."""
    return Recipe("exported", **specs_of(text))  # type: ignore[arg-type]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, w, bias, *rest = inputs
    text, *_, quantized_w, quantized_x = rest
    db = bias is not None and ctx.needs_input_grad[2]
    # Saves what a forward would, for one that has already run.
    call = (lambda *_: output, _recipe_of(text), tuple(rest), db, None)
    LinearFunction.forward(ctx, x, w, bias, call)
    lists = (quantized_w, quantized_x)
    ctx.of_lists = [None if one is None else [None] * len(one) for one in lists]


def _backward(ctx: Any, dys: list[torch.Tensor]) -> tuple[Any, ...]:
    _, _, dx, dw, _, _ = ctx.layer
    needed = ctx.needs_input_grad
    for name, wanted, made in (("x", needed[0], dx), ("w", needed[1], dw)):
        if wanted and not made:
            got = "a tensor that requires a gradient"
            need = "what did so when the program was exported"
            remedy = f"export it in grad mode, with {name} that requires a gradient"
            fail(ctx.operation, name, got, need, remedy)
    of_x, of_w, of_bias, _ = LinearFunction.backward(ctx, dys[0])
    others = [None] * (len(needed) - 3 - len(ctx.of_lists))  # which get none
    return (of_x, of_w, of_bias, *others, *ctx.of_lists)


torch.library.register_autograd("blockscale::linear_exported", _backward, setup_context=_keep)
