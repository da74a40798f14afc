"""Fake kernels of all operators: shape, dtype and stride of every result, without data. Importing
this module registers them, and registers that no operator has a derivative."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

from blockscale._core import widens
from blockscale._errors import fail
from blockscale._layer_arguments import backward_draws, check_arguments, specs_of
from blockscale.recipe import Spec, spec
from blockscale.tensor import gemm_layout, stored_shapes

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_LIBRARY: Final = torch.library.Library("blockscale", "IMPL")  # type: ignore[no-untyped-call]


def register_fake(name: str, fake: Callable[..., Any]) -> None:
    """Register the fake kernel of an operator.

    PyTorch also calls it if only some arguments are on meta: the result would be uninitialized
    memory.
    """
    signature, stand_ins = inspect.signature(fake), _STAND_INS.get(name)

    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        named = dict(bound.arguments)
        tensors = [
            (key, t)
            for key, value in named.items()
            for t in (value if isinstance(value, list | tuple) else [value])
            if isinstance(t, torch.Tensor)
        ]
        first, like = tensors[0]
        for key, tensor in () if like.is_meta else tensors:
            if tensor.is_meta:
                fail(name, f"{key}.device", "meta", f"{like.device}, where {first} is")
        if stand_ins is not None and not any(map(_is_symbolic, named.values())):
            bound.apply_defaults()
            _let_refuse(name, bound.arguments, stand_ins)
        return fake(*args, **kwargs)

    torch.library.register_fake(f"blockscale::{name}", checked)


# --- refusals -------------------------------------------------------------------------------------


def _is_symbolic(value: Any) -> bool:
    """Whether extents are known only when the operator runs; it then checks them."""
    return any(isinstance(extent, torch.SymInt) for extent in _extents(value))


def _extents(value: Any) -> list[Any]:
    """The extents of a tensor, or of an argument that is itself one or several extents."""
    extents = value.shape if isinstance(value, torch.Tensor) else value
    return list(extents) if isinstance(extents, list | tuple) else [extents]


def _let_refuse(
    name: str, arguments: dict[str, Any], stand_ins: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Call the operator itself on the CPU, so that only one place refuses what it cannot take. The
    stand-in tensors have the same dtypes and ranks, but no elements."""
    with _disable_current_modes():
        small = stand_ins(arguments)
        rest = {key: value for key, value in arguments.items() if key not in small}
        rest = {key: _zeros(t) if isinstance(t, torch.Tensor) else t for key, t in rest.items()}
        try:
            getattr(torch.ops.blockscale, name)(**small, **rest)
        except ValueError as error:
            text = str(error)
            for key, said in (("x", " x.shape = "), ("shape", " shape = ")):
                if key in small:  # with the given extents
                    got, given = _extents(small[key]), _extents(arguments[key])
                    text = text.replace(f"{said}{got};", f"{said}{given};")
            raise ValueError(text) from None


def _zeros(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    extents = tensor.shape if shape is None else shape
    return torch.zeros(extents, dtype=tensor.dtype, device="cpu")


def _emptied(shape: Sequence[int], batch_dims: int) -> list[int]:
    """The shape, with matrices of no rows and columns."""
    return [n if d < batch_dims else min(n, 0) for d, n in enumerate(shape)]


def _small_x(arguments: dict[str, Any]) -> dict[str, Any]:
    x = arguments["x"]
    return {"x": _zeros(x, _emptied(x.shape, arguments["batch_dims"]))}


def _small_w(arguments: dict[str, Any]) -> dict[str, Any]:
    w = arguments["w"]
    return {"w": _zeros(w, _emptied(w.shape, w.dim() - 2))}


def _small_stored(
    arguments: dict[str, Any], prefix: str, s: Spec, axis: int, shape: Sequence[int], layout: str
) -> dict[str, Any]:
    """The tensors of an empty operand of this shape."""
    offsets = arguments["offsets"]
    batch_dims = len(shape) - 2
    groups = 0 if offsets is None or batch_dims else offsets.numel()
    shapes = stored_shapes(s, axis, shape, layout, batch_dims, groups)
    named = {f"{prefix}{name}": extents for name, extents in shapes._asdict().items()}
    return {key: _zeros(arguments[key], n) for key, n in named.items() if key in arguments}


def _small_operand(arguments: dict[str, Any]) -> dict[str, Any]:
    shape, s = arguments["shape"], spec(arguments["spec"])
    layout = arguments.get("layout") or arguments["from_layout"]
    small = {"shape": _emptied(shape, len(shape) - 2)}
    if len(shape) not in (2, 3) or min(shape) < 0:  # refused before the tensors are checked
        return small | {key: _zeros(arguments[key], [0]) for key in ("codes", "scales")}
    return small | _small_stored(arguments, "", s, arguments["axis"], small["shape"], layout)


def _small_pair(arguments: dict[str, Any]) -> dict[str, Any]:
    """A product of no rows with b's rows, over a contraction of 0: a bias must fit b's rows."""
    offsets, axis, rows = arguments["offsets"], arguments["axis"], arguments["b_rows"]
    small: dict[str, Any] = {"a_rows": 0, "k": 0}
    for prefix, lines in (("a_", 0), ("b_", rows)):
        shape = [lines, 0] if axis == -1 else [0, lines]
        if offsets is not None and axis == -1 and prefix == "b_":
            shape = [offsets.numel(), *shape]
        s, layout = spec(arguments[f"{prefix}spec"]), arguments[f"{prefix}layout"]
        small |= _small_stored(arguments, prefix, s, axis, shape, layout)
    return small


_STAND_INS: Final[dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "quantize": _small_x,
    "quantize_dual": _small_x,
    "quantize_piece": _small_x,
    "amax": _small_x,
    "dequantize": _small_operand,
    "relayout": _small_operand,
    "matmul": _small_pair,
    "quantize_weight": _small_w,
}


# --- results --------------------------------------------------------------------------------------


def _fake_stored(
    like: torch.Tensor,
    text: str,
    axis: int,
    shape: Sequence[int],
    layout: str,
    batch_dims: int,
    offsets: torch.Tensor | None,
) -> Triple:
    s = spec(text)
    groups = 0 if offsets is None else offsets.shape[0]
    shapes = stored_shapes(s, axis, shape, layout, batch_dims, groups)
    return (
        like.new_empty(shapes.codes, dtype=s.code_dtype),
        like.new_empty(shapes.scales, dtype=s.scale_dtype),
        like.new_empty(shapes.outer, dtype=torch.float32),
    )


def _fake_quantize(
    x: torch.Tensor,
    spec: str,
    axis: int,
    amax: torch.Tensor | None,
    seed: torch.Tensor | None,
    offset: torch.Tensor | None,
    origin: Sequence[int],
    layout: str,
    batch_dims: int,
    offsets: torch.Tensor | None = None,
) -> Triple:
    return _fake_stored(x, spec, axis, x.shape, layout, batch_dims, offsets)


def _fake_quantize_dual(
    x: torch.Tensor,
    row_spec: str,
    col_spec: str,
    row_amax: torch.Tensor | None,
    col_amax: torch.Tensor | None,
    seed: torch.Tensor | None,
    offset: torch.Tensor | None,
    origin: Sequence[int],
    row_layout: str,
    col_layout: str,
    batch_dims: int,
    offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    return (
        *_fake_stored(x, row_spec, -1, x.shape, row_layout, batch_dims, offsets),
        *_fake_stored(x, col_spec, -2, x.shape, col_layout, batch_dims, offsets),
    )


def _fake_amax(
    x: torch.Tensor,
    spec: str,
    axis: int,
    batch_dims: int,
    offsets: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    shape = x.shape[:batch_dims] if offsets is None else offsets.shape
    return x.new_empty(shape, dtype=torch.float32)


def _fake_quantize_piece(
    x: torch.Tensor, dtype: torch.dtype, spec: str, amax: torch.Tensor | None, batch_dims: int
) -> Triple:
    codes, scales, outer = _fake_stored(x, spec, -1, x.shape, "linear", batch_dims, None)
    *extents, last = scales.shape
    return (
        x.new_empty(codes.shape, dtype=torch.uint8),
        x.new_empty((*extents, last * scales.itemsize), dtype=torch.uint8),
        outer,
    )


def _fake_dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    outer: torch.Tensor,
    spec: str,
    axis: int,
    shape: Sequence[int],
    layout: str,
    dtype: torch.dtype,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    return codes.new_empty(shape, dtype=dtype)


def _fake_relayout(
    codes: torch.Tensor,
    scales: torch.Tensor,
    spec: str,
    axis: int,
    shape: Sequence[int],
    from_layout: str,
    to_layout: str,
    offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_stored(codes, spec, axis, shape, to_layout, len(shape) - 2, offsets)[:2]


def _fake_matmul(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    a_outer: torch.Tensor,
    a_spec: str,
    a_layout: str,
    a_rows: int,
    b_codes: torch.Tensor,
    b_scales: torch.Tensor,
    b_outer: torch.Tensor,
    b_spec: str,
    b_layout: str,
    b_rows: int,
    k: int,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    offsets: torch.Tensor | None = None,
    axis: int = -1,
) -> torch.Tensor:
    batch = offsets.shape if offsets is not None and axis == -2 else ()
    return a_codes.new_empty((*batch, a_rows, b_rows), dtype=out_dtype)


# --- linear and its relatives ---------------------------------------------------------------------


def _fake_kept(
    x: torch.Tensor, operands: list[tuple[torch.Tensor, Spec, int, int]], axis: int, offset: bool
) -> torch.Tensor:
    """The memory of operands, stored as GEMMs read them; each is given as (tensor, spec, groups,
    batch)."""
    size = 0
    behind = torch.int64.itemsize if offset else 0
    for tensor, s, groups, batch_dims in operands:
        shapes = stored_shapes(s, axis, tensor.shape, gemm_layout(s), batch_dims, groups)
        size = -(-size // 128) * 128 + math.prod(shapes.codes)
        behind += math.prod(shapes.outer) * torch.float32.itemsize
        behind += math.prod(shapes.scales) * s.scale_bytes
    return x.new_empty(size + behind, dtype=torch.uint8)


def _fake_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: str,
    dx: bool = False,
    dw: bool = False,
    seed: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    quantized_w: list[torch.Tensor] | None = None,
    quantized_x: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    check_arguments(x, w, bias, recipe, dx, dw, seed, offset, offsets)
    specs = specs_of(recipe)
    made = [x.new_empty((*x.shape[:-1], w.shape[-2]), dtype=dtype or x.dtype)]
    groups = 0 if offsets is None else offsets.shape[0]
    kept = [
        (tensor, s, parts, batch)
        for tensor, s, needed, parts, batch in (
            (x, specs["wgrad_x"], dw and quantized_x is None, groups, 0),
            (w, specs["dgrad_w"], dx and quantized_w is None, 0, w.dim() - 2),
        )
        if needed and s is not None
    ]
    draws = backward_draws(specs, dx, dw)
    return [*made, _fake_kept(x, kept, -2, draws)] if kept or draws else made


def _fake_linear_piece(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, recipe: str, *call: Any
) -> list[torch.Tensor]:
    dx, dw, seed, offset, dtype, *_place = call
    return _fake_linear(x, w, bias, recipe, dx, dw, seed, offset, None, dtype)


def _fake_quantize_weight(
    w: torch.Tensor,
    recipe: str,
    dgrad: bool,
    seed: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    specs = specs_of(recipe)
    batch = w.dim() - 2
    made = []
    for name, partner, axis in (("fprop_w", "fprop_x", -1), ("dgrad_w", "dgrad_dy", -2)):
        s, a = specs[name], specs[partner]
        if s is None or (axis == -2 and not dgrad):
            continue
        if a is not None and widens(a, s, w.shape[0] if batch else 0, w.device):
            made.append(_fake_widened(w, axis))
        else:
            made.append(_fake_kept(w, [(w, s, 0, batch)], axis, False))
    return made


def _fake_quantize_input(
    x: torch.Tensor, recipe: str, dw: bool, offsets: torch.Tensor | None = None
) -> list[torch.Tensor]:
    specs = specs_of(recipe)
    groups = 0 if offsets is None else offsets.shape[0]
    row, w = specs["fprop_x"], specs["fprop_w"]
    if row is not None and w is not None and widens(row, w, groups, x.device):
        row = spec("fp8_1x128", element="e5m2")
    made = ((row, -1), (specs["wgrad_x"] if dw else None, -2))
    return [_fake_kept(x, [(x, s, groups, 0)], axis, False) for s, axis in made if s is not None]


def _fake_widened(w: torch.Tensor, axis: int) -> torch.Tensor:
    """The memory of an MXFP4 weight as the FP8 GEMM reads it, with a scale for each line."""
    widened = spec("fp8_128x128", element="e5m2")
    shapes = stored_shapes(widened, axis, w.shape, gemm_layout(widened), w.dim() - 2, 0)
    lines = math.prod(w.shape[:-2]) * w.shape[-2 if axis == -1 else -1]
    floats = math.prod(shapes.scales) + lines
    return w.new_empty(math.prod(shapes.codes) + 4 * floats, dtype=torch.uint8)


def _fake_linear_backward(
    dy: torch.Tensor,
    saved: list[torch.Tensor],
    recipe: str,
    k: int,
    dx: bool,
    dw: bool,
    db: bool,
    offsets: torch.Tensor | None = None,
    x_dtype: torch.dtype | None = None,
    w_dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
    skip_dx: bool = False,
    skip_dw: bool = False,
    w_transposed: bool = False,
    x_apart: bool = False,
    w_apart: bool = False,
) -> list[torch.Tensor]:
    n = dy.shape[-1]
    gradients = []
    if dx and not skip_dx:
        gradients.append(dy.new_empty((*dy.shape[:-1], k), dtype=x_dtype or dy.dtype))
    if dw and not skip_dw:
        batch = () if offsets is None else offsets.shape
        x_spec = specs_of(recipe)["wgrad_x"]
        if w_transposed and (x_spec is None or x_spec.block[0] == 1):
            made = dy.new_empty((*batch, k, n), dtype=w_dtype or dy.dtype).transpose(-2, -1)
        else:
            made = dy.new_empty((*batch, n, k), dtype=w_dtype or dy.dtype)
        gradients.append(made)
    if db:
        gradients.append(dy.new_empty((n,), dtype=bias_dtype or dy.dtype))
    return gradients


def _fake_linear_piece_backward(
    dy: torch.Tensor, saved: list[torch.Tensor], recipe: str, k: int, *call: Any
) -> list[torch.Tensor]:
    dx, dw, db, *rest, _origin, _amax = call
    return _fake_linear_backward(dy, saved, recipe, k, dx, dw, db, None, *rest)


def _fake_linear_backward_into(
    dy: torch.Tensor,
    saved: list[torch.Tensor],
    recipe: str,
    k: int,
    dx: bool,
    db: bool,
    offsets: torch.Tensor | None,
    into: torch.Tensor,
    x_dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
    skip_dx: bool = False,
    x_apart: bool = False,
    w_apart: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = dx and not skip_dx
    call = (dx, False, db, offsets, x_dtype, None, bias_dtype)
    made = _fake_linear_backward(dy, saved, recipe, k, *call)
    none = dy.new_empty(0, dtype=torch.float32)
    return made[0] if dx else none, made[-1] if db else none.clone()


def _fake_begin_forward(offset: torch.Tensor, upcoming: torch.Tensor, counts: bool) -> torch.Tensor:
    return offset.new_empty(())


_FAKES: Final[dict[str, Callable[..., Any]]] = {
    "quantize": _fake_quantize,
    "quantize_dual": _fake_quantize_dual,
    "quantize_piece": _fake_quantize_piece,
    "amax": _fake_amax,
    "dequantize": _fake_dequantize,
    "relayout": _fake_relayout,
    "matmul": _fake_matmul,
    "linear": _fake_linear,
    "linear_exported": _fake_linear,
    "linear_piece": _fake_linear_piece,
    "linear_piece_backward": _fake_linear_piece_backward,
    "quantize_weight": _fake_quantize_weight,
    "quantize_input": _fake_quantize_input,
    "linear_backward": _fake_linear_backward,
    "linear_backward_into": _fake_linear_backward_into,
    "begin_forward": _fake_begin_forward,
}


# What these take, of which PyTorch would quantize slice after slice with the same random bits.
_WHOLE: Final = {
    "quantize_weight": "w may be [E, N, K]",
    **dict.fromkeys(("quantize", "quantize_dual", "amax"), "x may be [E, R, C] with batch_dims=1"),
}


def _refuse_batched(name: str, key: str) -> Callable[..., NoReturn]:
    """What vmap calls, or the backward of a batch of gradients, in place of the operator."""
    operation = name.removesuffix("_into").removesuffix("_backward").removesuffix("_piece")

    def refuse(*args: Any) -> NoReturn:
        if "backward" in name:
            remedy = "leave is_grads_batched= or vectorize= out"
            fail(operation, "dy", "a batch of gradients", "one at a time", remedy)
        whole = _WHOLE.get(operation, "x may have leading dimensions")
        remedy = f"pass the whole batch: {whole}"
        fail(operation, whole[0], f"batched by {key}", "a plain tensor", remedy)

    return refuse


for _name, _fake in _FAKES.items():
    register_fake(_name, _fake)
    if _name.startswith("linear") or _name in _WHOLE:
        for _key, _word in (("FuncTorchBatched", "vmap"), ("Batched", "is_grads_batched")):
            _LIBRARY.impl(_name, _refuse_batched(_name, _word), _key)  # type: ignore[no-untyped-call]
    # No result requires a gradient, whatever the arguments require: derivatives are those of the
    # autograd.Function in functional.py. By default PyTorch would only warn in the backward.
    if _name != "linear_exported":  # it has a derivative: _exported.py
        _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
