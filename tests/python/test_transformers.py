"""Models of Transformers with experts, as they come; skipped where it is not installed (run with
5.24)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import blockscale as bs
import pytest
import torch

transformers: Any = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
# By the prefix of their classes: what they need besides, and how many layers have experts.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Mixtral": ({"num_local_experts": 4}, 2),
    "Qwen3Moe": ({"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}, 2),
    "GptOss": ({"num_local_experts": 4, "head_dim": 16}, 2),
    "DeepseekV3": (DEEPSEEK, 1),
    "Llama": ({}, 0),
}


def model(name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    more, layers = MODELS[name]
    chosen = {"num_experts_per_tok": 2} if layers else {}
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more, **chosen})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)


def tokens(device: torch.device) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(3, 256, (2, 32), generator=g).to(device)


@pytest.mark.parametrize("name", [name for name, (_, layers) in MODELS.items() if layers])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_blockwise"])
def test_trains_saves_and_generates(
    name: str, recipe: str, device: torch.device, tmp_path: Path
) -> None:
    plain = model(name, device)
    made = copy.deepcopy(plain)
    report = bs.convert(made, recipe, skip=["lm_head"], experts=["experts"])
    experts = [n for n, _ in report.converted if n.endswith("mlp.experts")]
    assert len(experts) == MODELS[name][1]
    assert not any("experts" in n for n, _ in report.skipped)
    ids = tokens(device)
    with torch.no_grad():
        want, got = (m(input_ids=ids).logits.float() for m in (plain, made))
    assert 0 < (got - want).norm() / want.norm() < (0.1 if "fp8" in recipe else 0.5)
    optimizer = torch.optim.AdamW(made.parameters(), 1e-3)
    bs.attach(made, optimizer)
    losses = []
    for _ in range(3):
        loss = made(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    assert made.generate(ids[:, :4], max_new_tokens=3, do_sample=False).shape == (2, 7)
    made.save_pretrained(tmp_path)
    loaded = type(made).from_pretrained(tmp_path, dtype=torch.bfloat16).to(device)
    bs.convert(loaded, recipe, skip=["lm_head"], experts=["experts"])
    with torch.no_grad():
        want, got = (m(input_ids=ids).logits for m in (made.eval(), loaded.eval()))
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled(dtype: torch.dtype, device: torch.device) -> None:
    torch._dynamo.reset()
    made = model("Qwen3Moe", device, dtype)
    bs.convert(made, "mxfp8", skip=["lm_head"], experts=["experts"])
    ids = tokens(device)
    want = made(input_ids=ids, labels=ids).loss
    compiled: Any = torch.compile(made, backend="aot_eager")
    loss = compiled(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, want, rtol=1e-3, atol=0)
    loss.backward()
    layer = made.model.layers[0].mlp.experts
    assert layer.gate_up_proj.grad.abs().sum() > 0
    layer.config._experts_implementation = "eager"
    with pytest.warns(UserWarning, match=r"mlp\.experts = a forward without grouped_mm; need"):
        made(input_ids=ids)


def test_activation_checkpointing(device: torch.device) -> None:
    plain, made = (model("Mixtral", device) for _ in range(2))
    for m in (plain, made):
        bs.convert(m, "nvfp4", skip=["lm_head"], experts=["experts"])
    made.gradient_checkpointing_enable()
    ids = tokens(device)
    for m in (plain.train(), made.train()):
        m(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for a, b in zip(plain.parameters(), made.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


class Attach(transformers.TrainerCallback):  # type: ignore[misc]
    """The guide's."""

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        bs.attach(model, optimizer)
        bs.set_step(model, state.global_step)


def test_trainer_counts_steps_and_resumes(device: torch.device, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    batch = [{"input_ids": row, "labels": row} for row in tokens(torch.device("cpu"))]

    def train(folder: str, last: int, resume: bool = False) -> Any:
        # Trainer 5.24 cannot read back the experts that it has saved under other names.
        made = model("Llama", torch.device("cpu"), torch.float32)
        bs.convert(made, "nvfp4", skip=["lm_head"])
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder),
            max_steps=4,
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
        )
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # otherwise Trainer wraps the model in nn.DataParallel
        stop = transformers.TrainerCallback()
        stop.on_step_end = lambda args, state, control, **_: setattr(
            control, "should_training_stop", state.global_step == last
        )
        callbacks = [Attach(), stop]
        trainer = transformers.Trainer(made, arguments, train_dataset=batch, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        assert bs.rng_state(made)["step"] == last
        return made

    whole = train("whole", 4)
    train("parts", 2)
    resumed = train("parts", 4, resume=True)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
