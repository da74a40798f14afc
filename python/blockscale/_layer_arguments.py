"""The arguments of a layer's product: what is refused, and in which words."""

from __future__ import annotations

from typing import NoReturn

import torch

from blockscale._errors import fail, fail_type, kind_of, message, proxy_remedy
from blockscale._plain import (
    FLOATS,
    FLOATS_TEXT,
    check_dense,
    check_no_tangent,
    check_plain,
    is_for_layer,
)
from blockscale._recipe_text import OPERANDS
from blockscale.recipe import Recipe, Spec, any_stochastic, spec


def check_arguments(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: str,
    dx: bool,
    dw: bool,
    seed: torch.Tensor | None,
    offset: torch.Tensor | None,
    offsets: torch.Tensor | None,
    label: str = "",
) -> None:
    """Raise if the operator's arguments are wrong, and say how. `label` names the recipe."""
    op = operation_of(offsets)
    for name, tensor in (("x", x), ("w", w), ("bias", bias), ("offsets", offsets)):
        if tensor is None and name in ("bias", "offsets"):
            continue
        if not isinstance(tensor, torch.Tensor):
            remedy = "pass the recipe as recipe=" if isinstance(tensor, str | Recipe) else ""
            fail_type(op, name, tensor, "a tensor", remedy or proxy_remedy(tensor))
        if tensor.dtype not in FLOATS and name != "offsets":
            fail(op, f"{name}.dtype", tensor.dtype, FLOATS_TEXT, "convert it with .to()")
        check_dense(op, name, tensor)
        if not is_for_layer(tensor):
            remedy = "bs.revert the model before weights are replaced" if name == "w" else ""
            fail(op, name, kind_of(tensor), "a plain tensor", remedy)
        if tensor.device != x.device:
            fail(op, f"{name}.device", tensor.device, f"{x.device}, where x is")
    check_shapes(op, x, w, bias, offsets is not None)
    if offsets is not None:
        _check_ends(op, offsets, w)
    specs = specs_of(recipe)
    draws = any_stochastic(specs["fprop_x"], specs["fprop_w"]) or backward_draws(specs, dx, dw)
    if draws and (seed is None or offset is None):
        need = f"a key for random bits: recipe {label or recipe} rounds stochastically"
        fail(op, "rng", "None", need, "pass rng=bs.Rng(seed, offset)")


def check_shapes(
    op: str, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, grouped: bool
) -> None:
    """Refuse operands whose extents do not match."""
    if w.dim() != 2 + grouped:
        fail(op, "w.shape", list(w.shape), "rank 3, [E, N, K]" if grouped else "rank 2, [N, K]")
    if x.dim() < 1 or (grouped and x.dim() != 2) or x.shape[-1] != w.shape[-1]:
        lead = "T" if grouped else "..."
        fail(op, "x.shape", list(x.shape), f"[{lead}, {w.shape[-1]}] for w {list(w.shape)}")
    if bias is not None and tuple(bias.shape) != (w.shape[0],):
        fail(op, "bias.shape", list(bias.shape), f"[{w.shape[0]}] for w {list(w.shape)}")


def _check_ends(operation: str, offsets: torch.Tensor, w: torch.Tensor) -> None:
    """Refuse offsets whose number is not that of w's matrices; compiled code may know the number
    only when it runs, and checks it then."""

    def refusal() -> str:
        need = f"[{w.shape[0]}], the end of a group for each matrix of w {list(w.shape)}"
        led = offsets.shape == (w.shape[0] + 1,)
        remedy = "leave the leading zero out: offsets are the ends of groups" if led else ""
        return message(operation, "offsets.shape", list(offsets.shape), need, remedy)

    one_each = offsets.dim() == 1 and offsets.shape[0] == w.shape[0]
    torch._check_value(one_each, refusal)  # type: ignore[no-untyped-call]


def specs_of(recipe: str) -> dict[str, Spec | None]:
    """The operands' specs, by name, from a recipe's text."""
    specs = (None if text == "none" else spec(text) for text in recipe.split(" "))
    return dict(zip(OPERANDS, specs, strict=True))


def backward_draws(specs: dict[str, Spec | None], dx: bool, dw: bool) -> bool:
    """Whether any of dy's operands that will be made rounds stochastically."""
    return (dx and any_stochastic(specs["dgrad_dy"])) or (dw and any_stochastic(specs["wgrad_dy"]))


def check_one_dtype(x: object, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Refuse what `F.linear` refuses in other words: unlike operands that are quantized, those in
    high precision share a dtype."""
    if not isinstance(x, torch.Tensor):
        return  # F.linear says so, or torch.fx traces it
    for name, tensor in (("w", w), ("bias", bias)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype is x.dtype:
            continue
        if autocast_dtype(x) is None:
            need = f"{x.dtype}, as x is, in a recipe without quantized operands"
            fail("linear", f"{name}.dtype", tensor.dtype, need, "use .to(), or torch.autocast")


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The autocast dtype for x's device, or None where autocast is disabled."""
    kind = "cuda" if x.is_cuda else "cpu"
    on = torch.is_autocast_enabled(kind) and not x.is_meta
    return torch.get_autocast_dtype(kind) if on else None


def operation_of(offsets: torch.Tensor | None) -> str:
    return "linear" if offsets is None else "grouped_linear"


def refuse_cuda(recipe: Recipe, offsets: torch.Tensor | None) -> NoReturn:
    remedy = "run it on the CPU, or use a recipe without FP32 scales, such as mxfp8"
    fail(operation_of(offsets), "recipe", f"{recipe} on cuda", recipe.cuda_needs, remedy)


def refuse_transforms(operation: str) -> NoReturn:
    """Refuse gradients under function transforms, which do not support these autograd.Functions and
    would fail with PyTorch's message."""
    remedy = "use backward() for gradients; instead of vmap, pass the whole batch as x"
    fail(operation, "x", "within torch.func", "torch.no_grad() in it and no vmap", remedy)


def refuse_trace(operation: str) -> NoReturn:
    """Refuse gradients in a trace, which would fail too, or silently omit x's gradient."""
    remedy = "use backward() for gradients, or torch.export"
    fail(operation, "x", "within torch.jit.trace", "torch.no_grad() in it", remedy)


def refuse_script(layer: torch.nn.Module, recipe: Recipe) -> NoReturn:
    """Refuse torch.jit.script, which reads the source of all that a forward calls, and fails."""
    remedy = "script a copy of the model that bs.revert has made plain, or use torch.export"
    need = "layers of PyTorch alone"
    fail("torch.jit.script", "module", f"{kind_of(layer)} in {recipe}", need, remedy)


def refuse_trace_of_weight(operation: str) -> NoReturn:
    """Refuse operands of a weight in a trace: as a list of constants, they are there in its first
    call only."""
    remedy = "leave quantized_weights around it, or use torch.export"
    fail(operation, "quantized_weight", "given within torch.jit.trace", "none in it", remedy)


def refuse_tangents(
    operation: str, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Refuse forward-mode tangents."""
    for name, tensor in (("x", x), ("w", w), ("bias", bias)):
        if tensor is not None:
            check_no_tangent(operation, name, tensor, "use reverse mode")


def check_into(
    into: torch.Tensor, x: torch.Tensor, w: torch.Tensor, dw: bool, offsets: torch.Tensor | None
) -> None:
    op, name = operation_of(offsets), "accumulate_into"
    if not isinstance(into, torch.Tensor):
        fail_type(op, name, into, "a tensor")
    check_plain(op, name, into)
    if into.requires_grad:
        fail(op, name, "a tensor that requires a gradient", "a buffer of sums, which needs none")
    if (into.shape, into.dtype, into.device) != (w.shape, torch.float32, w.device) or (
        not into.is_contiguous()
    ):
        strided = "" if into.is_contiguous() else "strided "
        got = f"{strided}{into.dtype}{list(into.shape)} on {into.device}"
        need = f"contiguous torch.float32{list(w.shape)} on {w.device}, as w is"
        fail(op, name, got, need)
    if torch.is_grad_enabled() and not dw:
        fail(op, name, "given", "none: w needs no gradient", "leave it out")
    if not torch.compiler.is_compiling():
        if into.is_neg():
            fail(op, name, "a view that negates", "memory that holds the sums itself")
        for operand, tensor in (("w", w), ("x", x)):
            if _overlap(into, tensor):
                fail(op, name, f"memory of {operand}", "memory of its own: a backward changes it")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share elements of one storage."""
    if not torch._C._is_alias_of(a, b) or 0 in (a.numel(), b.numel()):  # type: ignore[attr-defined]
        return False

    def bytes_of(t: torch.Tensor) -> tuple[int, int]:
        last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
        first = int(t.storage_offset()) * t.itemsize
        return first, first + (last + 1) * t.itemsize

    (a_first, a_end), (b_first, b_end) = bytes_of(a), bytes_of(b)
    return a_first < b_end and b_first < a_end
