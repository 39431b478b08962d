"""LoRA by verl's own options: training, reference, the weights for the rollout, and what a checkpoint holds."""

import os
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.workers.config import HFModelConfig

from megatrain_verl.streaming.adapters import DOWN, UP
from tests.verl_backend.cases import actor_loss, rl_batch, same, score, train, weights


@pytest.fixture
def lora(tiny: HFModelConfig) -> HFModelConfig:
    options = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    return HFModelConfig(path=tiny.path, lora={"merge": True}, **options)


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(9)[None]).logits


def test_reference_and_merged_weights_after_training(lora: HFModelConfig, make: Callable, tmp_path: Path) -> None:
    engine, batch = make(lora, ref_in_actor=False), rl_batch(lora.hf_config.vocab_size)
    start, loaded = score(engine, batch)["log_probs"].values(), weights(engine)
    for _ in range(2):
        train(engine, batch, actor_loss())
    reference = score(engine, batch, reference=True)["log_probs"].values()
    assert torch.equal(reference, start)
    assert (score(engine, batch)["log_probs"].values() - start).abs().max() > 1e-3
    sent, peft_config = engine.get_per_tensor_param(base_sync_done=True)
    changed = [name for name, weight in sent if not torch.equal(weight, loaded[name])]
    ends = ("q_proj.weight", "v_proj.weight", "down_proj.weight")
    assert peft_config is None and len(changed) == 6 and all(name.endswith(ends) for name in changed)
    engine.save_checkpoint(str(tmp_path / "actor"))
    assert "lora_adapter" not in os.listdir(tmp_path / "actor")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "actor" / "huggingface", dtype="auto")
    assert same(dict(model.named_parameters()), weights(engine))


def test_checkpoint_with_the_adapter_alone_loads_in_peft_and_resumes(
    lora: HFModelConfig, make: Callable, tmp_path: Path
) -> None:
    straight, resumed = (make(lora, save_lora_only=True) for _ in range(2))
    batch = rl_batch(lora.hf_config.vocab_size)
    train(straight, batch, actor_loss())
    straight.save_checkpoint(str(tmp_path / "actor"))
    assert not [name for name in os.listdir(tmp_path / "actor" / "huggingface") if "safetensors" in name]
    base = AutoModelForCausalLM.from_pretrained(lora.path, dtype="auto")
    merged = AutoModelForCausalLM.from_pretrained(lora.path, dtype="auto")
    merged.load_state_dict(weights(straight))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "actor" / "lora_adapter")
    assert loaded.peft_config["default"].base_model_name_or_path == lora.path
    expected = logits(merged)  # of sums whose terms are as large as the largest of them
    torch.testing.assert_close(logits(loaded), expected, atol=1e-5 * expected.abs().max().item(), rtol=0)
    resumed.load_checkpoint(str(tmp_path / "actor"), None, False)
    for engine in (straight, resumed):
        train(engine, batch, actor_loss())
    assert same(weights(resumed), weights(straight))
    trained = [span.name for _, span in resumed.streaming.state.parameters() if span.trainable]
    assert len(trained) == 12 and all(name.endswith((DOWN, UP)) for name in trained)
