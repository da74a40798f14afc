"""Published checkpoints: what Transformers and compressed-tensors make of codes and scales, bit for
bit; skipped where they are not installed (run with 5.24 and 0.20)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import blockscale as bs
import pytest
import torch
from safetensors.torch import save_file


def repeated(q: bs.QuantizedTensor) -> torch.Tensor:
    """Scales of square blocks, one for each row."""
    return q.scales.repeat_interleave(q.spec.block[0], 0)[: q.shape[0]]


@pytest.mark.parametrize(
    ("recipe", "form", "scheme"),
    [
        ("nvfp4", "nvfp4-pack-quantized", "NVFP4A16"),
        ("mxfp4", "mxfp4-pack-quantized", "MXFP4A16"),
        ("mxfp8", "mxfp8-quantized", "MXFP8A16"),
    ],
)
def test_compressed_tensors_decompresses_to_the_same_bits(
    recipe: str, form: str, scheme: str
) -> None:
    base: Any = pytest.importorskip("compressed_tensors.compressors.base")
    schemes: Any = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    spec = bs.recipe(recipe).fprop_w
    assert spec is not None
    q = bs.quantize(torch.randn(96, 256) * 0.02, spec)
    scales = repeated(q)
    if q.outer is None:
        scales = scales.view(torch.uint8)
    parts = {"weight" if recipe == "mxfp8" else "weight_packed": q.codes, "weight_scale": scales}
    if q.outer is not None:
        parts["weight_global_scale"] = 1 / q.outer[None]
    compressor = base.BaseCompressor.get_value_from_registry(form)
    known = schemes.QuantizationScheme(targets=["Linear"], **schemes.PRESET_SCHEMES[scheme])
    got = compressor.decompress(parts, known)["weight"]
    assert torch.equal(got, q.dequantize(got.dtype))


def test_transformers_loads_a_model_trained_in_fp8(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    bs.convert(model, "fp8_blockwise", skip=["lm_head"])
    state = model.state_dict()
    want = dict(state)
    for name, layer in model.named_modules():
        if isinstance(layer, bs.nn.Linear):
            assert layer.recipe.fprop_w is not None
            q = bs.quantize(layer.weight.detach(), layer.recipe.fprop_w)
            state[f"{name}.weight"], state[f"{name}.weight_scale_inv"] = q.codes, q.scales
            want[f"{name}.weight"] = q.dequantize(torch.float32)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    left = {"modules_to_not_convert": ["lm_head"]}
    blocks = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    written = config.to_dict() | {"quantization_config": {"quant_method": "fp8"} | blocks | left}
    (tmp_path / "config.json").write_text(json.dumps(written))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True, **left),
        dtype=torch.float32,
    )
    found = loaded.state_dict()
    assert found.keys() == want.keys()
    for name, values in found.items():
        assert torch.equal(values, want[name]), name


def test_experts_of_gpt_oss_are_read() -> None:
    theirs: Any = pytest.importorskip("transformers.integrations.mxfp4")
    experts, n, k = 3, 64, 96
    q = bs.quantize(torch.randn(experts, n, k), "mxfp4", batch_dims=1)
    blocks, scales = q.codes.view(experts, n, k // 32, 16), q.scales.view(torch.uint8)
    got = theirs.convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(got.transpose(1, 2), q.dequantize())
