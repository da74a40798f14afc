"""Write a model's weights as published checkpoints hold them, and read such weights.

Run: python examples/python/published_checkpoint.py

Of a converted model the files hold W as its forwards multiply by it, to the bit: in DeepSeek-V3's
FP8, which Transformers and vLLM call "fp8", or in NVFP4, MXFP4 or MXFP8 of compressed-tensors.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blockscale as bs
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FP8 = bs.spec("fp8_128x128")
# Of compressed-tensors: bits and strategy of each family.
FORMS = {"nvfp4": (4, "tensor_group"), "mxfp4": (4, "group"), "mxfp8": (8, "group")}
State = dict[str, Tensor]


def weights(model: nn.Module, state: State) -> Iterator[tuple[str, Tensor, bs.Spec | None]]:
    """The name of each linear layer, its W and the spec of it; None in high precision."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            spec = layer.recipe.fprop_w if isinstance(layer, bs.nn.Linear) else None
            yield name, state[f"{name}.weight"], spec


def for_fp8(model: nn.Module, state: State) -> tuple[State, dict[str, Any]]:
    """Tensors, and "quantization_config" of config.json. Its readers want whole blocks of 128."""
    tensors, left = dict(state), []
    for name, w, spec in weights(model, state):
        if spec != FP8 or w.shape[0] % 128 or w.shape[1] % 128:
            left.append(name)
            continue
        q = bs.quantize(w, FP8)
        tensors |= {f"{name}.weight": q.codes, f"{name}.weight_scale_inv": q.scales}
    config = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128])
    return tensors, config | {"modules_to_not_convert": left}


def for_compressed_tensors(model: nn.Module, state: State) -> tuple[State, dict[str, Any]]:
    """The same of a model converted to nvfp4, mxfp4 or mxfp8."""
    tensors, left, chosen = dict(state), [], None
    for name, w, spec in weights(model, state):
        if spec is None or spec.family not in FORMS or w.shape[1] % spec.block[1]:
            left.append(name)
            continue
        assert chosen in (None, spec), "one spec for all layers"
        chosen, q = spec, bs.quantize(w, spec)
        scales = q.scales.repeat_interleave(spec.block[0], 0)[: len(w)]  # of each row
        del tensors[f"{name}.weight"]
        tensors[f"{name}.weight" + "_packed" * (FORMS[spec.family][0] == 4)] = q.codes
        tensors[f"{name}.weight_scale"] = scales.view(torch.uint8) if q.outer is None else scales
        if q.outer is not None:
            tensors[f"{name}.weight_global_scale"] = 1 / q.outer[None]
    assert chosen is not None, "no layer to write"
    bits, strategy = FORMS[chosen.family]
    known = {
        "num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy,
        "group_size": chosen.block[1], "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if chosen.outer else "torch.uint8",
    }  # fmt: skip
    form = f"{chosen.family}-{'pack-' * (bits == 4)}quantized"
    config = {
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": left,
        "config_groups": {"all": {"targets": ["Linear"], "format": form, "weights": known}},
        "format": form,
    }  # fmt: skip
    return tensors, config


def from_fp8(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """W [N, K] of codes and FP32 scales, K a multiple of 128."""
    return bs.QuantizedTensor(codes, scale_inv, None, FP8, -1, codes.shape).dequantize(dtype)


if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(256, 384), nn.ReLU(), nn.Linear(384, 100))
    bs.convert(model, "fp8_blockwise")
    tensors, config = for_fp8(model, model.state_dict())
    print(json.dumps(config))  # 100 rows are no whole blocks: the second layer is left as it is
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        stored = load_file(Path(folder, "model.safetensors"))
    w = from_fp8(stored["0.weight"], stored["0.weight_scale_inv"])
    assert torch.equal(w, bs.quantize(model.state_dict()["0.weight"], FP8).dequantize())
    print(", ".join(tensors))
