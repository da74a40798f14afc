"""`measure`: what quantization costs every product of a model, in steps as they run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from blockscale import functional
from blockscale._errors import fail, fail_type
from blockscale.experts import Experts
from blockscale.nn import Layer
from blockscale.noise import Noise
from blockscale.recipe import GEMMS, Recipe


@dataclasses.dataclass(frozen=True)
class Operand:
    """What became of one operand of a product.

    Attributes:
        spec: its text, or "none" in high precision.
        amax: its largest magnitude, after a transform if there is one.
        sqnr: signal to quantization noise, dB: infinite where nothing is lost.
        underflow: the share of its elements other than 0 that become 0.
        saturation: the share of its elements that are cut off at the largest code.
    """

    spec: str
    amax: float
    sqnr: float
    underflow: float
    saturation: float


@dataclasses.dataclass(frozen=True)
class Product:
    """One of the three products of a layer, over all calls that were measured.

    Attributes:
        layer: its name in the model; of converted experts with "#0", "#1", ... for their products.
        gemm: "fprop", "dgrad" or "wgrad".
        recipe: its name.
        sqnr: of the result, dB: the product of the unquantized operands beside what the quantized
            ones make of it. 20 dB are an error of a tenth.
        operands: by name, as those of a `Recipe`.
    """

    layer: str
    gemm: str
    recipe: str
    sqnr: float
    operands: dict[str, Operand]


class _Sums:
    """Over the calls of one product."""

    def __init__(self, gemm: str, recipe: Recipe) -> None:
        self.gemm, self.recipe, self.calls = gemm, recipe, 0
        self.result = Noise()
        self.specs = {name: getattr(recipe, name) for name in GEMMS[gemm]}
        self.operands = {name: Noise() for name in self.specs}

    def add(self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
        """A·Bᵀ, with `dtype` for operands in high precision."""
        values = []
        for (name, spec), t in zip(self.specs.items(), (a, b), strict=True):
            noise = self.operands[name]
            if spec is not None:
                values.append(noise.add(t, spec, index=self.calls))
            else:
                values.append(t.to(dtype).float())
                noise.add_error(t, values[-1])
        self.calls += 1
        self.result.add_error(a.float() @ b.float().t(), values[0] @ values[1].t())

    def of(self, layer: str) -> Product:
        operands = {}
        for name, spec in self.specs.items():
            text, of = "none" if spec is None else spec.text, self.operands[name]
            operands[name] = Operand(text, of.amax, of.sqnr, of.underflow, of.saturation)
        return Product(layer, self.gemm, str(self.recipe), self.result.sqnr, operands)


class Measurement:
    """What `measure` has found. Prints as a table; `products` are its rows, each with `layer`,
    `gemm` ("fprop", "dgrad" or "wgrad"), `recipe`, `sqnr` of the result in dB, and `operands`, by
    their names in a `Recipe`, with `spec`, `amax`, `sqnr`, `underflow` and `saturation`.

    Attributes:
        left_out: names of layers that ran and were not measured: tensor parallelism has cut them,
            or FSDP2 has gathered their codes.
    """

    def __init__(self) -> None:
        self.left_out: list[str] = []
        self._sums: dict[tuple[_Name, str], _Sums] = {}

    @property
    def products(self) -> list[Product]:
        """One for each layer and GEMM that has run, in the model's order: `Product`."""
        gemms = list(GEMMS)
        found = sorted(self._sums.items(), key=lambda item: (item[0][0], gemms.index(item[0][1])))
        return [sums.of(str(name)) for (name, _), sums in found]

    def _add(
        self, name: _Name, recipe: Recipe, gemm: str, a: torch.Tensor, b: torch.Tensor, dtype: Any
    ) -> None:
        if a.numel() == 0 or b.numel() == 0:
            return
        sums = self._sums.setdefault((name, gemm), _Sums(gemm, recipe))
        autocast = torch.autocast(a.device.type, enabled=False)
        with torch.no_grad(), autocast, _disable_current_modes():
            sums.add(a, b, dtype)

    def __str__(self) -> str:
        left = ("layer", "product", "operand", "spec")  # aligned; figures to the right
        head = [*left[:2], "dB", *left[2:], "amax", "dB", "underflow", "saturation"]
        lines, layer = [head], ""
        for product in self.products:
            first = ["" if product.layer == layer else product.layer, product.gemm]
            first, layer = [*first, f"{product.sqnr:.2f}"], product.layer
            for name, of in product.operands.items():
                shares = (f"{of.underflow:.3%}", f"{of.saturation:.3%}")
                lines.append([*first, name, of.spec, f"{of.amax:.3g}", f"{of.sqnr:.2f}", *shares])
                first = ["", "", ""]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = []
        for line in lines:
            cells = zip(head, line, widths, strict=True)
            text.append("  ".join(c.ljust(w) if h in left else c.rjust(w) for h, c, w in cells))
        return "\n".join([*(line.rstrip() for line in text), *_left_out(self.left_out)])


def _left_out(names: list[str]) -> list[str]:
    return [f"not measured, as its tensors are cut or codes: {name}" for name in names]


@dataclasses.dataclass(frozen=True, order=True)
class _Name:
    """Of a product: where its layer stands in the model, and which of its products it is, if it may
    have several."""

    position: int
    index: int
    layer: str = dataclasses.field(compare=False)

    def __str__(self) -> str:
        layer = self.layer or "(root)"
        return layer if self.index < 0 else f"{layer}#{self.index}"


class _Watch:
    """Knows which layer runs, and is told of its products."""

    def __init__(self, layers: dict[str, Layer]) -> None:
        self.made = Measurement()
        self.running: list[_Name] = []
        self.handles: list[Any] = []
        for position, (name, layer) in enumerate(layers.items()):
            self._hook(_Name(position, 0 if isinstance(layer, Experts) else -1, name), layer)

    def _hook(self, name: _Name, layer: Layer) -> None:
        pre = layer.register_forward_pre_hook(lambda *_: self.running.append(name))
        post = layer.register_forward_hook(lambda *_: self._end(), always_call=True)
        self.handles += [pre, post]

    def _end(self) -> None:
        self.running.pop()

    def product(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        recipe: Recipe,
        offsets: torch.Tensor | None,
        y: torch.Tensor,
    ) -> None:
        """y = x·Wᵀ has run."""
        if not self.running:
            return  # not in a layer of the model
        name = self.running[-1]
        if name.index >= 0:
            self.running[-1] = dataclasses.replace(name, index=name.index + 1)
        if not functional.USUAL.issuperset((type(x), type(w))):
            if str(name) not in self.made.left_out:
                self.made.left_out.append(str(name))
            return
        dx, dw, dtype = x.requires_grad, w.requires_grad, y.dtype
        x, w = x.detach().reshape(-1, x.shape[-1]), w.detach()
        ends = None if offsets is None else offsets.tolist()

        def add(gemm: str, a: torch.Tensor, b: torch.Tensor) -> None:
            self.made._add(name, recipe, gemm, a, b, dtype)

        def backward(gradients: Any) -> None:
            if gradients[0] is None:
                return
            dy = gradients[0].detach().reshape(-1, w.shape[-2])
            for rows, matrix in _parts(w, ends):
                if dx:
                    add("dgrad", dy[rows], matrix.t())
                if dw:
                    add("wgrad", dy[rows].t(), x[rows].t())

        # A forward that runs again for a backward has been measured.
        if torch._C._current_graph_task_id() == -1:
            for rows, matrix in _parts(w, ends):
                add("fprop", x[rows], matrix)
        # Before the layer's own backward, and after hooks of y: FSDP2's bring w back.
        if y.grad_fn is not None:
            y.grad_fn.register_prehook(backward)


def _parts(w: torch.Tensor, ends: list[int] | None) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows, and the matrix that they are multiplied by: each group is a layer of its own."""
    if ends is None:
        yield slice(None), w
        return
    for begin, end, matrix in zip([0, *ends], ends, w, strict=False):
        yield slice(begin, end), matrix


@contextlib.contextmanager
def measure(model: torch.nn.Module) -> Iterator[Measurement]:
    """Within it, find what quantization costs each product of a converted model.

    Every forward of a layer with a recipe, and its backward, is computed as before, to the bit, and
    besides: each operand is quantized as the recipe says, and the product of the quantized ones
    compared with that of the unquantized ones in float32, as the layer is given them. So an error
    is the layer's own, not that of those before it, and says where another spec or high precision
    (`convert(rules=, skip=)`) gains most. Random bits of stochastic specs are others than those of
    the layer. Over several steps or batches sums are taken. Groups are measured one by one.

    It takes several times as long as a step without it, keeps the x and dy of each layer meanwhile,
    and waits for the device at every product. Compiled code runs uncompiled.

    Args:
        model: with converted layers, or others of `blockscale.nn`, in it.

    Returns:
        A context that gives a Measurement, to be read after the backward, then or later.

    Raises:
        TypeError, ValueError: model is no module, or has no layer with a quantized operand; within
            another `measure`.
    """
    if not isinstance(model, torch.nn.Module):
        fail_type("measure", "model", model, "a module")
    named = {name.replace("_orig_mod.", ""): module for name, module in model.named_modules()}
    layers = {name: module for name, module in named.items() if isinstance(module, Layer)}
    if all(layer.recipe.high_precision for layer in layers.values()):
        need = "layers with a quantized operand"
        fail("measure", "model", "a module without any", need, "bs.convert it first")
    if functional.product_seen is not None:
        fail("measure", "model", "measured within another measure", "one at a time")
    watch = _Watch(layers)
    functional.product_seen = watch.product
    try:
        with torch.compiler.set_stance("force_eager"):
            yield watch.made
    finally:
        functional.product_seen = None
        for handle in watch.handles:
            handle.remove()
