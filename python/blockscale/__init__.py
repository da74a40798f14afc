"""Block-scaled FP8 and FP4 quantization and matrix multiplication for training.

- A model: `convert`, `revert`; random bits: `attach` or `advance`, `rng_state`, `set_step`.
- A layer: `nn.Linear`, `nn.GroupedLinear`, `linear`, `grouped_linear`, `quantize_weight`,
  `quantized_weights`.
- Over ranks: `quantized_all_gather`, `quantized_all_to_all`.
- Tensors: `quantize`, `quantize_dual`, `amax`, `dequantize`, `relayout`, `matmul`,
  `grouped_matmul`.
- What decides the bits: `spec`, `recipe`, `Rng`.
- Quantization error: `measure`.
- What runs where: `describe`, `explain`, and the command `blockscale doctor`.
"""

from __future__ import annotations

from blockscale import _exported as _exported  # registers a derivative
from blockscale import _fakes as _fakes  # registers the fake kernels
from blockscale import _flops as _flops  # registers FLOP counts
from blockscale import nn
from blockscale._core import describe, explain, facts
from blockscale.ahead import quantized_weights
from blockscale.convert import Report, convert, revert
from blockscale.counting import advance, attach, rng_state, set_step
from blockscale.exchange import quantized_all_to_all
from blockscale.functional import grouped_linear, linear
from blockscale.measure import Measurement, measure
from blockscale.ops import (
    amax,
    dequantize,
    grouped_matmul,
    matmul,
    quantize,
    quantize_dual,
    relayout,
)
from blockscale.recipe import Recipe, Spec, recipe, recipe_names, spec, spec_names
from blockscale.rng import Rng
from blockscale.sharded import quantized_all_gather
from blockscale.tensor import QuantizedTensor
from blockscale.weight import QuantizedWeight, quantize_weight

__version__: str = facts()["version"]
del facts

__all__ = [
    "Measurement",
    "QuantizedTensor",
    "QuantizedWeight",
    "Recipe",
    "Report",
    "Rng",
    "Spec",
    "advance",
    "amax",
    "attach",
    "convert",
    "dequantize",
    "describe",
    "explain",
    "grouped_linear",
    "grouped_matmul",
    "linear",
    "matmul",
    "measure",
    "nn",
    "quantize",
    "quantize_dual",
    "quantize_weight",
    "quantized_all_gather",
    "quantized_all_to_all",
    "quantized_weights",
    "recipe",
    "recipe_names",
    "relayout",
    "revert",
    "rng_state",
    "set_step",
    "spec",
    "spec_names",
]
