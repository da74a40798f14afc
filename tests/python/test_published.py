"""Published checkpoints, as examples/python/published_checkpoint.py writes and reads them: what
Transformers and compressed-tensors make of them, bit for bit; skipped where they are not installed
(run with 5.24 and 0.20)."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import blockscale as bs
import pytest
import torch
from safetensors.torch import save_file

EXAMPLE = runpy.run_path(
    str(Path(__file__).resolve().parents[2] / "examples" / "python" / "published_checkpoint.py")
)
NAMES = ("nvfp4", "mxfp4", "mxfp8", "fp8_blockwise")


def llama(transformers: Any) -> Any:
    """In which some layers have no whole blocks of 128."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=320, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).bfloat16()


@pytest.mark.parametrize("recipe", NAMES)
def test_transformers_loads_what_was_trained(recipe: str, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    eight = recipe == "fp8_blockwise"
    if not eight:
        pytest.importorskip("compressed_tensors")
    model = llama(transformers)
    bs.convert(model, recipe, skip=["lm_head"])
    write = EXAMPLE["for_fp8" if eight else "for_compressed_tensors"]
    tensors, config = write(model, model.state_dict())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    written = model.config.to_dict() | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(written))

    want = model.state_dict()
    left = config["modules_to_not_convert" if eight else "ignore"]
    narrow = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert left == [*(narrow if eight else ()), "lm_head"]
    for name, layer in model.named_modules():
        if isinstance(layer, bs.nn.Linear) and name not in left:
            spec = layer.recipe.fprop_w
            assert spec is not None
            want[f"{name}.weight"] = bs.quantize(layer.weight.detach(), spec).dequantize()
    how: Any = (
        transformers.FineGrainedFP8Config(dequantize=True, modules_to_not_convert=left)
        if eight
        else transformers.CompressedTensorsConfig(run_compressed=False)
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=how, dtype=torch.bfloat16
    )
    found = loaded.state_dict()
    for name, values in want.items():
        assert torch.equal(found[name], values), name


def test_experts_of_gpt_oss_are_read() -> None:
    theirs: Any = pytest.importorskip("transformers.integrations.mxfp4")
    experts, n, k = 3, 64, 96
    q = bs.quantize(torch.randn(experts, n, k), "mxfp4", batch_dims=1)
    blocks, scales = q.codes.view(experts, n, k // 32, 16), q.scales.view(torch.uint8)
    got = theirs.convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(got.transpose(1, 2), q.dequantize())
