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
    db = bias is not None and ctx.needs_input_grad[2]
    # Saves what a forward would, for one that has already run.
    call = (lambda *_: output, _recipe_of(rest[0]), tuple(rest), db, None)
    LinearFunction.forward(ctx, x, w, bias, call)
    ctx.of_lists = [None if one is None else [None] * len(one) for one in rest[7:]]


def _backward(ctx: Any, dys: list[torch.Tensor]) -> tuple[Any, ...]:
    _, _, dx, dw, *_ = ctx.call
    needed = ctx.needs_input_grad
    for name, wanted, made in (("x", needed[0], dx), ("w", needed[1], dw)):
        if wanted and not made:
            got = "a tensor that requires a gradient"
            need = "what did so when the program was exported"
            remedy = f"export it in grad mode, with {name} that requires a gradient"
            fail(ctx.operation, name, got, need, remedy)
    gradients = LinearFunction.backward(ctx, dys[0])[:3]
    return (*gradients, *[None] * 7, *ctx.of_lists)


torch.library.register_autograd("blockscale::linear_exported", _backward, setup_context=_keep)
