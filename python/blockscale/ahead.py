"""`quantized_weights`: the weights of a model, quantized once for several forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from blockscale._errors import fail, fail_type
from blockscale._plain import KeptWeight, is_dtensor, is_plain
from blockscale.fsdp import managed_parameters
from blockscale.nn import GroupedLinear, WeightLayer, converted_layers, got_and_need


@contextlib.contextmanager
def quantized_weights(model: torch.nn.Module, backward: bool = True) -> Iterator[None]:
    """Quantize the weights of converted layers once for all forwards and backwards in the context.

        with bs.quantized_weights(model):
            for batch in micro_batches:
                loss(model(batch)).backward()
        optimizer.step()

    The operands belong to the model: all threads that call it within the context use them.
    Otherwise each layer quantizes its weight again in every micro-batch, in every recomputation of
    activation checkpointing, and in every inference batch. Results and gradients are the same bits.
    Layers in high precision, those whose recipe rounds the weight stochastically, and those whose
    weight is computed (a parametrization) work as they do without it. Experts of other libraries
    quantize their weights in the first forward within the context, if they multiply by the
    parameter itself and are not compiled, and check from then on whether it has changed. Leave the
    context before the optimizer's step, which is refused within; a recomputation must run in the
    same context as its forward.

    Args:
        model: a converted model, or a part of one.
        backward: also make the operands that the gradients of inputs need.

    Returns:
        A context manager.

    Raises:
        TypeError, ValueError: `backward` is no bool; nothing in the model is converted; a weight is
            a DTensor, which is cut or gathered elsewhere, or fully_shard has cut it (except experts
            that are divided over ranks and not sharded besides); the call is within another
            `quantized_weights`.
            Within the context: a step of an optimizer of these weights, before it changes anything;
            an uncompiled forward whose layer's weight has changed since. Changes that PyTorch does
            not count go unnoticed: in place by `.data` (as PEFT merges adapters and
            `vector_to_parameters` writes), by a foreach function on a DTensor, or of a weight made
            in inference mode.
    """
    if not isinstance(backward, bool):
        fail_type("quantized_weights", "backward", backward, "a bool")
    layers = converted_layers("quantized_weights", model)
    cut = managed_parameters(model)
    for name, layer in layers.items():
        if layer._kept is not None:
            need = "no other quantized_weights() around it, in any thread"
            fail("quantized_weights", name or "model", "within another one", need)
        for weight in layer.matrices():
            got = ""
            divided = isinstance(layer, GroupedLinear) and is_dtensor(weight)
            # After quantized_all_gather, but not managed by FSDP2.
            whole = is_plain(weight) or isinstance(weight, KeptWeight)
            if id(weight) in cut or not (divided or whole):
                got, need = got_and_need(weight)
            elif isinstance(layer, WeightLayer) and weight.dim() != len(layer.weight_shape):
                got = f"{list(weight.shape)}, flattened, replaced or gone to another rank"
                need = f"the whole of it, {list(layer.weight_shape)}"
            if got:
                remedy = "leave it out: each forward quantizes what it has gathered"
                own = layer.named_parameters(recurse=False)
                parameter = next((n for n, p in own if p is weight), "weight")
                named = f"{name}.{parameter}".lstrip(".")
                fail("quantized_weights", named, got, need, remedy)
    kept: set[int] = set()  # the weights, by identity

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        # Frozen weights, such as those under adapters, have no gradient and stay as they are.
        if any(id(p) in kept and p.grad is not None for p in parameters):
            need = "weights that stay as they are within it"
            remedy = "leave it before the optimizer's step"
            fail("quantized_weights", "optimizer", "a step of its weights", need, remedy)

    steps = register_optimizer_step_pre_hook(refuse)
    try:
        for name, layer in layers.items():
            kept.update(map(id, layer.keep(name, backward)))
        yield
    finally:
        steps.remove()
        for layer in layers.values():
            layer.__dict__.pop("_kept", None)
