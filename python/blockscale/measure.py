"""`measure`: the quantization error of every product of a model, measured in running steps."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _disable_current_modes

from blockscale import functional
from blockscale._errors import fail
from blockscale._names import by_first_name, names_of, shown
from blockscale._plain import USUAL
from blockscale._recipe_text import GEMMS
from blockscale.nn import Layer, WeightLayer, check_model, version_of
from blockscale.noise import Noise, percent, pieces
from blockscale.recipe import Recipe
from blockscale.rng import Rng

_SHOWN: Final = 6  # names in a line of the table
_NOT_RUN: Final = "its forward has not run: not used, or its weight is read directly"


@dataclasses.dataclass(frozen=True)
class Operand:
    """The effect of quantization on one operand of a product.

    Attributes:
        spec: the spec's text, or "none" in high precision.
        amax: the largest magnitude, after the transform if there is one; NaN if any value is NaN.
        sqnr: signal-to-quantization-noise ratio in dB: inf if nothing is lost, -inf if an operand
            of zeros became nonzero or a value overflows, NaN if the operand has a NaN or Inf.
        underflow: the share of nonzero elements that become 0; NaN if the operand has a NaN or Inf.
        saturation: the share of elements that are clipped to the largest code; likewise.
    """

    spec: str
    amax: float
    sqnr: float
    underflow: float
    saturation: float


@dataclasses.dataclass(frozen=True)
class Product:
    """One of the three products of a layer, over all measured calls.

    Attributes:
        layer: the layer's name in the model, as in `convert`; with "#0", "#1", ... for the products
            of a module that multiplies by calling functions, such as converted experts.
        gemm: "fprop", "dgrad" or "wgrad".
        recipe: the recipe's name.
        sqnr: of the result in dB, as of an `Operand`: the product of the quantized operands
            compared with that of the unquantized ones. 20 dB is an error of a tenth.
        operands: by their names in a `Recipe`.
    """

    layer: str
    gemm: str
    recipe: str
    sqnr: float
    operands: dict[str, Operand]

    def __str__(self) -> str:
        of = (f"{name} {operand.sqnr:.1f}" for name, operand in self.operands.items())
        return f"{self.layer} {self.gemm}: {self.sqnr:.1f} dB ({', '.join(of)})"


class Measurement:
    """What `measure` has found. Prints as a table, with a line for each `Product` in `products`;
    `dataclasses.asdict` turns one into plain data.

    Attributes:
        left_out: names of layers that ran but were not measured, or not in every call, with the
            reason. When the context ends, also of layers that have not run at all, though a module
            around them has: the model may read their weight directly, bypassing their forward.
    """

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}
        self._sums: dict[tuple[_Name, str, Recipe], _Sums] = {}

    @property
    def products(self) -> list[Product]:
        """A `Product` for each layer and GEMM that has run, in the model's order."""
        gemms = list(GEMMS)
        found = sorted(self._sums.items(), key=lambda item: (item[0][0], gemms.index(item[0][1])))
        return [sums.of(str(name)) for (name, _, _), sums in found]

    def __str__(self) -> str:
        figures = ["dB", "underflow", "saturation"]
        lines = [["layer", "product", "dB", *("operand", *figures) * 2]]
        for product in self.products:
            line = [product.layer, product.gemm, f"{product.sqnr:.1f}"]
            for name, of in product.operands.items():
                shares = percent(of.underflow, 2), percent(of.saturation, 2)
                line += [name, f"{of.sqnr:.1f}", *shares]
            lines.append(line)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = []
        for line in lines:
            cells = zip(lines[0], line, widths, strict=True)
            named = ("layer", "product", "operand")
            text.append("  ".join(c.ljust(w) if h in named else c.rjust(w) for h, c, w in cells))
        left = self._left_out()
        if len(text) == 1 and not left:
            return "nothing was measured: no layer with a quantized operand has run"
        return "\n".join([*text, *left])

    __repr__ = __str__

    def _left_out(self) -> list[str]:
        """A line for each reason, with the first names: a model may have hundreds of layers."""
        names: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            names.setdefault(reason, []).append(name)
        lines = []
        for reason, of in names.items():
            more = f" and {len(of) - _SHOWN} more" if len(of) > _SHOWN else ""
            lines.append(f"left out: {', '.join(of[:_SHOWN])}{more}: {reason}")
        return lines


@dataclasses.dataclass(frozen=True, order=True)
class _Name:
    """The name of a product: its module's position in the model, and its index among the module's
    products if there may be several."""

    position: int
    index: int
    module: str = dataclasses.field(compare=False)

    def __str__(self) -> str:
        module = shown(self.module)
        return module if self.index < 0 else f"{module}#{self.index}"


class _Sums:
    """Sums over the calls of one product."""

    def __init__(self, gemm: str, recipe: Recipe) -> None:
        self.gemm, self.recipe, self.calls = gemm, recipe, 0
        self.result = Noise()
        self.specs = {name: getattr(recipe, name) for name in GEMMS[gemm]}
        self.operands = {name: Noise() for name in self.specs}

    def add(self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
        """Add A·Bᵀ, with `dtype` for operands in high precision."""
        values = []
        for seed, ((name, spec), t) in enumerate(zip(self.specs.items(), (a, b), strict=True)):
            noise = self.operands[name]
            if spec is not None:
                values.append(noise.add(t, spec, rng=Rng(seed, self.calls)))
            else:
                values.append(t.to(dtype).float())
                noise.add_error(t, values[-1])
        self.calls += 1
        b = b.float()
        for rows in pieces(a.shape[0], b.shape[0]):
            self.result.add_error(a[rows].float() @ b.t(), values[0][rows] @ values[1].t())

    def of(self, layer: str) -> Product:
        operands = {}
        for name, spec in self.specs.items():
            text, of = "none" if spec is None else spec.text, self.operands[name]
            operands[name] = Operand(text, of.amax, of.sqnr, of.underflow, of.saturation)
        return Product(layer, self.gemm, str(self.recipe), self.result.sqnr, operands)


class _Running(threading.local):
    """The modules whose forwards run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.names: list[_Name] = []


class _Watch:
    """Tracks which module of the model is running, and receives its products.

    The hooks are PyTorch's global module hooks, so the model itself is unchanged if it is copied or
    saved meanwhile.
    """

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        self.made = Measurement()
        self.running = _Running()
        self.places = {module: (i, name) for i, (name, module) in enumerate(modules.items())}
        self.begun: set[torch.nn.Module] = set()
        self.complete: set[torch.nn.Module] = set()
        # Layers by their weights, which may be multiplied by past the hooks: `layer.forward(x)`.
        self.layers_of: dict[int, list[torch.nn.Module]] = {}
        for module in self.places:
            if isinstance(module, WeightLayer):
                self.layers_of.setdefault(id(module._parameters.get("weight")), []).append(module)

    def begin(self, module: torch.nn.Module, _: Any) -> None:
        if module in self.places:
            self.begun.add(module)
            position, name = self.places[module]
            index = -1 if isinstance(module, WeightLayer) else 0
            self.running.names.append(_Name(position, index, name))

    def end(self, module: torch.nn.Module, *_: Any) -> None:
        if module in self.places and self.running.names:
            self.running.names.pop()

    def completed(self, module: torch.nn.Module, *_: Any) -> None:
        """Its forward has not raised."""
        if module in self.places:
            self.complete.add(module)

    def name_those_not_run(self) -> None:
        """Add quantized layers that have not run, though a module around them has, to its end.
        Layers elsewhere may be no part of what is measured, and recomputations may end early."""
        around = {inner for module in self.complete for inner in module.modules()}
        for module, (_, name) in self.places.items():
            quantized = isinstance(module, Layer) and not module.recipe.high_precision
            if quantized and module in around and module not in self.begun:
                self.made.left_out[shown(name)] = _NOT_RUN

    def product(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        recipe: Recipe,
        offsets: torch.Tensor | None,
        y: torch.Tensor,
    ) -> None:
        """y = x·Wᵀ has run."""
        names = self.running.names
        if not names or recipe.high_precision:
            return
        self.begun.update(self.layers_of.get(id(w), ()))
        name = names[-1]
        if name.index >= 0:
            names[-1] = dataclasses.replace(name, index=name.index + 1)
        for role, t in (("x", x), ("w", w)):
            if type(t) not in USUAL:
                self.made.left_out[str(name)] = f"{role} is a {type(t).__name__}, no plain tensor"
                return
        if x.numel() == 0 or w.numel() == 0:  # all three products are of nothing, or are nothing
            return
        call = _Call(self.made, name, recipe, x, w, offsets, y.dtype)
        # A forward that is recomputed for a backward has been measured already.
        if torch._C._current_graph_task_id() == -1:
            call.forward()
        # Runs before the layer's own backward, and after hooks of y: FSDP2's gather w again.
        if y.grad_fn is not None:
            y.grad_fn.register_prehook(call.backward)


class _Call:
    """One product of a forward, and what is needed to measure the products of its backward."""

    def __init__(
        self,
        made: Measurement,
        name: _Name,
        recipe: Recipe,
        x: torch.Tensor,
        w: torch.Tensor,
        offsets: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.made, self.name, self.recipe, self.dtype = made, name, recipe, dtype
        self.ends = None if offsets is None else offsets.tolist()
        self.needs = x.requires_grad, w.requires_grad
        self.x: torch.Tensor | None = x.detach()
        self.w = w.detach()
        self.versions = version_of(x), version_of(w)

    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows, and the matrix that multiplies them: each group counts as a layer of its own."""
        if self.ends is None:
            yield slice(None), self.w
            return
        for begin, end, matrix in zip([0, *self.ends], self.ends, self.w, strict=False):
            yield slice(begin, end), matrix

    def forward(self) -> None:
        assert self.x is not None
        x = self.x.reshape(-1, self.x.shape[-1])
        for rows, matrix in self.parts():
            self.add("fprop", x[rows], matrix)

    def backward(self, gradients: Any) -> None:
        """Measure the first backward, then release x, as autograd releases its own tensors."""
        x, self.x = self.x, None
        node = torch._C._current_autograd_node()
        if x is None or node is None or gradients[0] is None:
            return
        # Detached tensors share the version counter of the original.
        for role, t, version in zip("xw", (x, self.w), self.versions, strict=True):
            if version_of(t) != version:
                self.made.left_out[str(self.name)] = f"{role} has changed before the backward"
                return
        dx, dw = functional.asked(node, self.needs)
        x = x.reshape(-1, x.shape[-1])
        dy = gradients[0].detach().reshape(-1, self.w.shape[-2])
        for rows, matrix in self.parts():
            if dx:
                self.add("dgrad", dy[rows], matrix.t())
            if dw:
                self.add("wgrad", dy[rows].t(), x[rows].t())

    def add(self, gemm: str, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.numel() == 0 or b.numel() == 0:
            return
        sums = self.made._sums.setdefault((self.name, gemm, self.recipe), _Sums(gemm, self.recipe))
        autocast = torch.autocast(a.device.type, enabled=False)
        with torch.no_grad(), autocast, _disable_current_modes():
            sums.add(a, b, self.dtype)


@contextlib.contextmanager
def measure(model: torch.nn.Module) -> Iterator[Measurement]:
    """A context that measures the quantization error of each product of a converted model.

    Every forward of a layer with a recipe, and its first backward, is computed as before, to the
    bit (compiled code runs uncompiled). In addition, each operand is quantized as the recipe says,
    and the product of the quantized operands is compared in float32 with that of the unquantized
    ones, as the layer receives them. So an error is the layer's own, not that of layers before it,
    and shows where another spec or high precision (`convert(rules=, skip=)`) gains most. The random
    bits of stochastic specs differ from the layer's. Several steps or batches are summed. Groups
    are measured one by one.

    Such a step takes many times as long (docs/guide.md), as products are in float32. It keeps each
    layer's x until its backward, and synchronizes with the device at every product. What reentrant
    checkpointing recomputes is measured only if its backward runs within the context too; other
    backwards may run later.

    Args:
        model: a model with converted layers, other layers of `blockscale.nn`, or calls of `linear`
            and `grouped_linear` in its modules' forwards.

    Returns:
        A context manager that yields a Measurement, to be read after the backward, within or later.

    Raises:
        TypeError, ValueError: model is not a module; or the call is within another `measure`.
    """
    check_model("measure", model)
    if functional.product_seen is not None:
        fail("measure", "model", "measured within another measure", "one at a time")
    watch = _Watch(by_first_name("measure", names_of(model)))
    handles = [
        module_hooks.register_module_forward_pre_hook(watch.begin),
        module_hooks.register_module_forward_hook(watch.end, always_call=True),
        module_hooks.register_module_forward_hook(watch.completed),
    ]
    functional.product_seen = watch.product
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            # For the wrappers of compiled modules, which have no name of their own here.
            warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
            yield watch.made
        watch.name_those_not_run()
    finally:
        functional.product_seen = None
        for handle in handles:
            handle.remove()
