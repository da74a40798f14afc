"""`linear` and `grouped_linear`: a differentiable y = x·Wᵀ whose three GEMMs read the operands that
a recipe specifies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from blockscale._errors import as_pytorch_raises, fail, fail_offsets, fail_type, proxy_remedy, typed
from blockscale._layer_arguments import (
    autocast_dtype,
    check_arguments,
    check_into,
    check_one_dtype,
    operation_of,
    refuse_cuda,
    refuse_tangents,
    refuse_trace,
    refuse_trace_of_weight,
    refuse_transforms,
)
from blockscale._plain import USUAL, is_dtensor
from blockscale._tracing import is_compiling_a_transform, is_exporting
from blockscale.recipe import Recipe
from blockscale.recipe import recipe as recipe_named
from blockscale.rng import Key, Rng, layer_key
from blockscale.shared_input import quantized_in_backward, quantized_input
from blockscale.weight import QuantizedWeight, is_gathered

_ops = torch.ops.blockscale
_forward = _ops.linear.default
_forward_now = _forward._op  # what PyTorch's Python calls in the end; compilers cannot trace it
_MAKE_IT = "bs.quantize_weight(w, recipe) makes it"
# The arguments of the operator `linear` after the tensors. (A plain tuple, as is what a forward
# leaves for its backward: to make a NamedTuple takes a hundredth of a small layer's forward.)
Arguments = tuple[
    str,  # recipe: the text of its operands
    bool,  # dx: whether x needs a gradient
    bool,  # dw
    torch.Tensor | None,  # seed
    torch.Tensor | None,  # offset
    torch.Tensor | None,  # offsets, of groups
    torch.dtype | None,  # dtype of y, if not x's
    list[torch.Tensor] | None,  # quantized_w: operands made in advance
    list[torch.Tensor] | None,  # quantized_x
]
# Called with (x, w, recipe, offsets, y) for every product y = x·Wᵀ while measure.py is at work.
product_seen: Callable[..., None] | None = None


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    recipe: str | Recipe = "nvfp4",
    rng: Rng | None = None,
    accumulate_into: torch.Tensor | None = None,
    quantized_weight: QuantizedWeight | None = None,
) -> torch.Tensor:
    """y = x·Wᵀ + bias with the operands of all three GEMMs quantized as `recipe` says.

    The tensors may differ in dtype: each is quantized from its own. The result has x's dtype, or
    autocast's where that is enabled; each gradient has the dtype of its tensor.

    Only these are saved for backward: x's wgrad operand (if w needs a gradient) and w's dgrad
    operand (if x does), both quantized, and the key of dy's random bits. Instead of an operand, x
    or w itself is saved where the recipe has that operand in high precision or does not keep it
    (`keep_x`, `keep_w`), and for w the codes where FSDP2 has gathered them. Consecutive layers that
    read the same large x (1 << 23 elements or more) quantize it once and save one operand; in eager
    code, a change of x between them that PyTorch does not count, such as `x.data.mul_(2)`, goes
    unnoticed (docs/guide.md).

    Recipes without quantized operands call `F.linear` (unless `accumulate_into` is given), and its
    requirements on arguments apply.

    x, w and bias may be DTensors, with w sharded over the ranks of a mesh by rows or columns; the
    result is then a DTensor (blockscale/distributed.py).

    Args:
        x: [..., K] float32, bfloat16 or float16.
        w: [N, K], likewise.
        bias: [N], likewise.
        recipe: a Recipe or the name of one.
        rng: the key of the random bits; needed only if an operand made in this call or its backward
            draws any. In "nvfp4" only dy's operands do, so inference needs no key. Its seed is the
            layer's; each operand derives its own from it (`Rng.role`).
        accumulate_into: a contiguous float32 tensor of w's shape, such as Megatron's `w.main_grad`,
            that needs no gradient and shares no memory with w or x. The backward adds w's gradient
            to it, within the GEMM where the kernels support that, and w itself gets none (hooks on
            w's gradient are called with None). Every backward that is asked for w's gradient adds
            to it; in compiled code, every backward does. It is never reset here, and cannot be used
            with `create_graph`.
        quantized_weight: the result of `quantize_weight` for the current w. The result and all
            gradients, w's included, are the same; w's values are not read.

    Returns:
        [..., N] in the dtype stated above, on x's device.

    Raises:
        TypeError, ValueError: with the argument, what it got and what it needs.
    """
    chosen = recipe_named(recipe)
    if not isinstance(x, torch.Tensor):
        fail_type("linear", "x", x, "a tensor", proxy_remedy(x))
    key = layer_key("linear", rng, chosen.stochastic, x)
    return linear_with_key(x, w, bias, chosen, key, None, accumulate_into, quantized_weight)


def grouped_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    recipe: str | Recipe = "nvfp4",
    rng: Rng | None = None,
    accumulate_into: torch.Tensor | None = None,
    quantized_weight: QuantizedWeight | None = None,
) -> torch.Tensor:
    """The linear layers of several experts in one call, each on its own group of x's rows.

    y[r] = w[g]·x[r] for the rows r of group g. The result and its gradients are computed as
    `linear` would for the group alone: every group has its own outer scales and tiling of blocks
    (docs/groups.md). Random bits are those that `quantize` draws with `offsets` for x and dy, and
    with batch_dims=1 for w.

    Rows past the last end belong to no group: y and x's gradient are 0 there, whatever x and dy
    hold. The matrix of an empty group gets a gradient of 0.

    x, w and dy are each read once for all of their quantized operands. Besides, recipes with outer
    scales read them for their largest values first, and with `keep_x=False` or `keep_w=False` the
    backward reads x or w again. The same is saved as for `linear`, plus the offsets, on which a GPU
    does not synchronize. On a GPU, operands in high precision (all of them with recipe "bf16") are
    multiplied by PyTorch's grouped GEMM, in bfloat16 only.

    Args:
        x: [T, K] float32, bfloat16 or float16, its rows sorted by group.
        w: [E, N, K], likewise.
        offsets: [E] int32 or int64, contiguous, on x's device: where each group ends;
            non-decreasing, at most T. Wrong offsets raise on the CPU; on a GPU they make y and the
            gradients NaN.
        recipe, rng, accumulate_into, quantized_weight: as for `linear`.

    Returns:
        [T, N] in the dtype that `linear` gives, on x's device.

    Raises:
        TypeError, ValueError: with the argument, what it got and what it needs.
    """
    chosen = recipe_named(recipe)
    if not isinstance(x, torch.Tensor):
        fail_type("grouped_linear", "x", x, "a tensor", proxy_remedy(x))
    if not isinstance(offsets, torch.Tensor):
        fail_offsets("grouped_linear", offsets)
    key = layer_key("grouped_linear", rng, chosen.stochastic, x)
    return linear_with_key(x, w, None, chosen, key, offsets, accumulate_into, quantized_weight)


def linear_with_key(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    key: Key | None,
    offsets: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    quantized: QuantizedWeight | None = None,
) -> torch.Tensor:
    """`linear`, or `grouped_linear` with offsets, for a caller that already has the key."""
    if quantized is not None and not isinstance(quantized, QuantizedWeight):
        fail_type(
            operation_of(offsets), "quantized_weight", quantized, "a QuantizedWeight", _MAKE_IT
        )
    if recipe.high_precision and offsets is None and into is None:
        if quantized is not None:
            quantized.operands_of(w, recipe, False, "linear")
        check_one_dtype(x, w, bias)
        return torch.nn.functional.linear(x, w, bias)
    if not USUAL.issuperset((type(x), type(w))) and (is_dtensor(x) or is_dtensor(w)):
        over_mesh = _linear_over_mesh(x, w, bias, recipe, key, offsets, into, quantized)
        if product_seen is not None:
            product_seen(x, w, recipe, offsets, over_mesh)
        return over_mesh
    # In a small layer, checking the arguments costs as much as a kernel. So the operator refuses
    # what it cannot take, and only then are the arguments checked for a precise message.
    try:
        y = _product(x, w, bias, recipe, key, offsets, into, quantized)
    # Not what checkpointing raises to end a recomputation, which is another Exception.
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        failure: Exception = error
    else:
        if product_seen is not None and not _is_watched():
            product_seen(x, w, recipe, offsets, y)
        return y
    try:
        _explain(x, w, bias, recipe, key, offsets)
        if quantized is not None and quantized.device not in (None, x.device):
            got, need = quantized.device, f"{x.device}, where x is"
            fail(operation_of(offsets), "quantized_weight.device", got, need, "use its .to()")
        raise typed(failure)
    finally:
        del failure  # its traceback holds this frame: the cycle would keep x alive


def _is_watched() -> bool:
    """Whether a compiler traces this, or transforms of functions are active."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def _product(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    key: Key | None,
    offsets: torch.Tensor | None,
    into: torch.Tensor | None,
    quantized: QuantizedWeight | None,
) -> torch.Tensor:
    """y of plain tensors, whose arguments have not been checked."""
    dx = dw = db = False
    seed, offset = key or (None, None)
    if recipe.cuda_needs and x.is_cuda:
        refuse_cuda(recipe, offsets)
    if torch.is_grad_enabled():
        dx, dw = x.requires_grad, w.requires_grad
        db = bias is not None and bias.requires_grad
    if into is not None:
        check_into(into, x, w, dw, offsets)
    compiling = torch.compiler.is_compiling()
    traced = not compiling and torch._C._get_tracing_state() is not None  # by torch.jit.trace
    # In compiled code `requires_grad` is False of what such a transform differentiates.
    if compiling and torch.is_grad_enabled() and is_compiling_a_transform():
        refuse_transforms(operation_of(offsets))
    made = None
    if quantized is not None:
        if traced:
            refuse_trace_of_weight(operation_of(offsets))
        made = quantized.operands_of(w, recipe, dx, operation_of(offsets))
    if forward_ad._current_level >= 0:
        refuse_tangents(operation_of(offsets), x, w, bias)
    # (Not in a function: PyTorch compiles one that it could not compile with its caller by itself.)
    watched = compiling or torch._C._are_functorch_transforms_active()
    exporting = watched and is_exporting()
    text = recipe.text if exporting else recipe.forward_text
    made_x = None
    if dw and recipe.quantizes_x and not exporting and (compiling or not watched):
        made_x = quantized_input(x, text, offsets)
    rest = (text, dx, dw, seed, offset, offsets, autocast_dtype(x), made, made_x)
    forward = _forward if watched else _forward_now
    y: torch.Tensor
    if exporting:
        y = _linear_exported(x, w, bias, rest, offsets, into)
    elif not (dx or dw or db):
        y = forward(x, w, bias, *rest)[0]
    else:
        if watched and not compiling:
            refuse_transforms(operation_of(offsets))
        if traced:
            refuse_trace(operation_of(offsets))
        apply: Callable[..., Any] = LinearFunction.apply if compiling else _apply
        y = apply(x, w, bias, (forward, recipe, rest, db, into))
    return y


def _explain(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    key: Key | None,
    offsets: torch.Tensor | None,
) -> None:
    """Refuse the arguments in words, if it is they that the operator has refused."""
    if torch._C._get_tracing_state() is not None:  # in torch.jit.trace sizes are tensors
        return
    grad = torch.is_grad_enabled()
    dx, dw = (grad and getattr(tensor, "requires_grad", False) for tensor in (x, w))
    seed, offset = key or (None, None)
    check_arguments(x, w, bias, recipe.text, dx, dw, seed, offset, offsets, str(recipe))
    mixed = bias is not None and is_dtensor(bias) and not (is_dtensor(x) or is_dtensor(w))
    if mixed:
        fail("linear", "bias", "a DTensor", "a plain tensor, as x and w are", "use .to_local()")


def _linear_over_mesh(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    key: Key | None,
    *others: object,
) -> torch.Tensor:
    """`linear` of DTensors, which accepts none of `others`."""
    from blockscale.distributed import linear_over_mesh

    offsets, into, quantized = others
    if recipe.cuda_needs and x.is_cuda:
        refuse_cuda(recipe, None)
    if offsets is not None:
        name = "x" if is_dtensor(x) else "w"
        need = "a plain tensor: the rows and matrices of this rank's experts"
        fail("grouped_linear", name, "a DTensor", need, f"pass {name}.to_local()")
    for name, value in (("accumulate_into", into), ("quantized_weight", quantized)):
        if value is not None:
            fail("linear", name, "given", "none where w is a DTensor", "leave it out")
    grad = torch.is_grad_enabled()
    if torch.compiler.is_compiling():
        # It cannot trace all of the checks, but checks the pieces when it traces the operator.
        if is_compiling_a_transform():
            refuse_transforms("linear")
    else:
        if torch._C._are_functorch_transforms_active():
            refuse_transforms("linear")
        _explain(x, w, bias, recipe, key, None)
    dtype = autocast_dtype(x) or x.dtype
    y: torch.Tensor = linear_over_mesh(x, w, bias, recipe, key, dtype, grad)
    return y


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that refuses `create_graph`, and reports a lack of memory as PyTorch's backwards
    do. Waiting until its gradients are differentiated again would be too late: when PyTorch's
    engine is asked for some of the inputs only, it skips the node that `once_differentiable`
    inserts to raise, and silently omits a part of the gradient."""

    in_pytorchs_types = as_pytorch_raises(backward)

    @functools.wraps(backward)
    def run(ctx: Any, dy: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            need = "False: second derivatives are not implemented"
            is_layer = ctx.operation.endswith("linear")
            remedy = "use PyTorch's own layer there (skip= of convert)" if is_layer else ""
            fail(ctx.operation, "create_graph", True, need, remedy)
        return (backward if torch.compiler.is_compiling() else in_pytorchs_types)(ctx, dy)

    return run


def asked(ctx: Any, needed: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which of the `needed` gradients of a function's first inputs the running backward is asked
    for: `torch.autograd.grad` and `backward(inputs=...)` may ask for only some, as pipelines that
    defer the weights' gradients do. Compiled code has one backward, which computes all."""
    if torch.compiler.is_compiling():
        return needed

    def is_asked(node: Any) -> bool:
        try:
            return torch._C._will_engine_execute_node(node)
        except RuntimeError:  # PyTorch raises it for a leaf that is itself an input of grad()
            return True

    nodes = ctx.next_functions
    return tuple(need and is_asked(nodes[index][0]) for index, need in enumerate(needed))


class LinearFunction(torch.autograd.Function):
    """x [..., K], w [N, K] -> y [..., N]; with offsets x [T, K], w [E, N, K] -> y [T, N]. `call`
    holds the operator, the recipe, the operator's arguments after the tensors, whether the bias
    gets a gradient, and the buffer for w's gradient, in one tuple because each argument costs
    time.

    `ctx.layer` is what the backward of any layer reads: the recipe's text, K, which of x, w and the
    bias get a gradient, and the dtypes of these. `ctx.own` is what this one reads besides.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        call: tuple[Callable[..., Any], Recipe, Arguments, bool, torch.Tensor | None],
    ) -> torch.Tensor:
        forward, recipe, rest, db, into = call
        y: torch.Tensor
        # The operator returns y and, in one tensor, the operands it has made; operands in high
        # precision are the inputs themselves. (No list is mutated here: PyTorch 2.11's compiler
        # does not trace that.)
        y, *saved = forward(x, w, bias, *rest)
        text, dx, dw, seed, _offset, offsets, _dtype, quantized_w, quantized_x = rest
        lean = text != recipe.text  # the backward quantizes what the recipe does not keep
        x_later = recipe.later_x if lean and dw else ""
        x_apart = quantized_x is not None or x_later != ""
        w_apart = quantized_w is not None or (lean and not recipe.keep_w)
        x_at = len(saved)
        if dw and (x_later or recipe.wgrad_x is None):
            saved = [*saved, _for_later(x, not recipe.keep_x)]
        elif dw and quantized_x is not None:
            saved = [*saved, quantized_x[-1]]
        if dx and quantized_w is not None and recipe.dgrad_w is not None:
            # An operand that FSDP2 has gathered is transposed in the backward.
            saved = [*saved, *(quantized_w if is_gathered(quantized_w) else quantized_w[-1:])]
        elif dx and (w_apart or recipe.dgrad_w is None):
            saved = [*saved, w]
        if (dx and recipe.draws_dx) or (dw and recipe.draws_dw):
            saved = [*saved, seed]
        ctx.save_for_backward(offsets, *saved)
        ctx.operation = operation_of(offsets)
        out = y.dtype  # each gradient has its tensor's dtype; None: dy's
        dtypes = (
            None if x.dtype is out else x.dtype,
            None if w.dtype is out else w.dtype,
            None if bias is None or bias.dtype is out else bias.dtype,
        )
        # For experts that lie in memory as [E, K, N]: makes the gradient in that order, which saves
        # a copy.
        transposed = offsets is not None and w.stride(-2) == 1 and w.stride(-1) != 1
        ctx.layer = (recipe.text, w.shape[-1], dx, dw, db, dtypes)
        ctx.own = (into, transposed, x_later, x_at, x_apart, w_apart)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        offsets, *saved = ctx.saved_tensors
        text, k, dx, dw, db, dtypes = ctx.layer
        into, transposed, x_later, x_at, *apart = ctx.own
        want_x, want_w, want_b = wanted = asked(ctx, (dx, dw, db))
        skip_x, skip_w = dx and not want_x, dw and not want_w
        # If saved-tensor hooks have replaced x by one of another shape, the operator refuses it.
        if x_later and want_w and saved[x_at].shape == (*dy.shape[:-1], k):
            made_x = quantized_in_backward(saved[x_at], x_later, offsets)
            if made_x is not None:
                saved = [*saved[:x_at], made_x, *saved[x_at + 1 :]]
        if into is None or skip_w:
            call = (text, k, dx, dw, want_b, offsets, *dtypes, skip_x, skip_w, transposed, *apart)
            made = iter(_ops.linear_backward.default(dy, saved, *call))
            gradients = [next(made) if want else None for want in wanted]
        else:
            x_dtype, _, bias_dtype = dtypes
            call = (text, k, dx, want_b, offsets, into, x_dtype, bias_dtype, skip_x, *apart)
            grad_x, grad_b = _ops.linear_backward_into.default(dy, saved, *call)
            # The compiler sees for itself that the operator mutates `into`.
            if not torch.compiler.is_compiling():
                torch.autograd.graph.increment_version(into)
            gradients = [grad_x if want_x else None, None, grad_b if want_b else None]
        return (*gradients, None)


def _for_later(x: torch.Tensor, again: bool) -> torch.Tensor:
    """x for the backward. Eager code saves x itself, and refuses it if it has changed by then.

    Compiled code does not detect such a change and would read the changed x. So it saves a copy,
    which PyTorch's compiler removes where x does not change. To make the compiler recompute x
    (`again`) instead of keeping it, the copy is an operator that is not removed, since the compiler
    recomputes x only if nothing but PyTorch's own operators read it in the backward.
    """
    if not torch.compiler.is_compiling():
        return x
    return torch.maximum(x, x) if again else x.clone()


def _linear_exported(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    rest: Arguments,
    offsets: torch.Tensor | None,
    into: torch.Tensor | None,
) -> torch.Tensor:
    """y by an operator with a registered derivative: torch.export keeps no autograd.Function."""
    if into is not None:
        need = "none in a program that is exported"
        fail(operation_of(offsets), "accumulate_into", "given", need, "leave it out")
    y: torch.Tensor = _ops.linear_exported.default(x, w, bias, *rest)[0]
    return y


# `apply` without what torch.autograd.Function does first in Python for functorch and for functions
# with a setup_context, which takes a tenth of a small layer's time.
_apply: Callable[..., Any] = super(torch.autograd.Function, LinearFunction).apply
