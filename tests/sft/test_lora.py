"""LoRA in `python -m megatrain_verl.sft`, by verl's own options."""

from pathlib import Path

import peft
import pytest
from transformers import AutoModelForCausalLM

from tests.sft.runs import RunServer, copy_inputs, make_inputs, metrics

pytestmark = pytest.mark.timeout(900)

LORA = ["model.lora_rank=4", "model.lora_alpha=16", "trainer.test_freq=-1", "data.val_size=0", "optim.lr=2e-2"]


def test_run_learns_and_a_resumed_one_ends_with_the_same_adapter(tmp_path: Path, server: RunServer) -> None:
    options = [*LORA, "+checkpoint.save_lora_only=True"]
    straight, resumed = make_inputs(tmp_path / "straight"), tmp_path / "resumed"
    run = server.train(straight, *options)
    assert run.status == 0, run.printed[-3000:]
    assert run.printed.rstrip().endswith("out/global_step_10/lora_adapter")
    card = (straight / "out/global_step_10/lora_adapter/README.md").read_text()
    assert "| LoRA rank | 4 |" in card and "library_name: peft" in card and "| steps | 10 of 10 |" in card
    losses = metrics(straight, "train/loss")
    assert losses[10] < 0.9 * losses[1]
    (straight / "out" / "samples.jsonl").touch()
    run = server.train(copy_inputs(straight, resumed, step=4), *options)
    assert run.status == 0, run.printed[-3000:]
    files = [folder / "out/global_step_10/lora_adapter/adapter_model.safetensors" for folder in (straight, resumed)]
    assert files[0].read_bytes() == files[1].read_bytes()
    base = AutoModelForCausalLM.from_pretrained(straight / "model")
    model = peft.PeftModel.from_pretrained(base, files[0].parent)
    assert any(parameter.abs().max() > 1e-3 for name, parameter in model.named_parameters() if "lora_B" in name)


def test_adapters_that_are_not_supported_end_the_run_before_the_model_is_loaded(
    tmp_path: Path, server: RunServer
) -> None:
    run = server.train(make_inputs(tmp_path / "run"), *LORA, "model.lora_adapter_path=adapter")
    assert run.status == 1 and "model.lora_adapter_path is not supported by megatrain" in run.printed
