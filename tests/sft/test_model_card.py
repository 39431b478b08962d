"""The sentence of the model card that says what was trained."""

import pytest
from omegaconf import OmegaConf

from megatrain_verl.sft import model_card
from megatrain_verl.sft.run_state import RunState


@pytest.mark.parametrize("trained, share", [(1_234, "all of them"), (1_000, "1,000 of them")])
def test_the_card_says_how_many_parameters_were_trained(trained: int, share: str) -> None:
    settings = OmegaConf.create({"model": {"path": "owner/base"}, "trainer": {"experiment_name": "run"}})
    for option in model_card.SETTINGS.values():
        OmegaConf.update(settings, option, 1)
    card = model_card.text(settings, [], 1_234, trained, 10, RunState())
    assert f"Base model owner/base, 1,234 parameters, {share} fine-tuned" in card
