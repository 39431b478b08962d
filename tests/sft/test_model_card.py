"""What the model card says of the trained parameters and of LoRA."""

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from megatrain_verl.sft import model_card
from megatrain_verl.sft.run_state import RunState


def settings_of(**model: Any) -> DictConfig:
    sections = {"model": {"path": "owner/base", **model}, "trainer": {"experiment_name": "run"}, "checkpoint": {}}
    settings = OmegaConf.create(sections)
    for option in model_card.SETTINGS.values():
        OmegaConf.update(settings, option, 1)
    return settings


@pytest.mark.parametrize("trained, share", [(1_234, "all of them"), (1_000, "1,000 of them")])
def test_the_card_says_how_many_parameters_were_trained(trained: int, share: str) -> None:
    card = model_card.text(settings_of(lora_rank=0, lora_alpha=16), [], 1_234, trained, 10, RunState())
    assert f"Base model owner/base, 1,234 parameters, {share} fine-tuned" in card
    assert "LoRA" not in card and "library_name: transformers" in card


def test_the_card_names_the_settings_of_lora() -> None:
    lora = {"lora_rank": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "exclude_modules": None}
    card = model_card.text(settings_of(**lora), [], 1_234, 100, 10, RunState())
    assert "Base model owner/base with LoRA adapters, 1,234 parameters, 100 of them fine-tuned" in card
    assert "| LoRA rank | 4 |" in card and "| LoRA alpha | 16 |" in card and "modules without LoRA" not in card
    assert "| modules with LoRA | ['q_proj', 'v_proj'] |" in card
