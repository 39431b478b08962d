"""The options of the megatrain engine: what they become, and what is refused by name before work starts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, OptimizerConfig
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

from megatrain_verl.verl_backend.config import MegaTrainActorConfig
from megatrain_verl.verl_backend.engine import MegaTrainEngine
from megatrain_verl.verl_backend.optimizer import LearningRate, adamw_config
from tests.verl_backend.cases import actor_loss, rl_batch, score, train

# ------------------------------------------------------------------------------------------- optimizer and schedule


def rates(steps: int, **options: Any) -> list[float]:
    schedule = LearningRate(FSDPOptimizerConfig(lr=1.0, **options))
    return [schedule.value] + [schedule.step() for _ in range(steps)]


def test_learning_rate_schedules() -> None:
    assert rates(5, lr_warmup_steps=4) == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])
    cosine = {"lr_scheduler_type": "cosine", "total_training_steps": 8, "min_lr_ratio": 0.1}
    expected = [0, 0.5, 1, 0.9397, 0.775, 0.55, 0.325, 0.1603, 0.1]
    assert rates(8, lr_warmup_steps=2, **cosine) == pytest.approx(expected, abs=5e-5)
    assert rates(8, lr_warmup_steps_ratio=0.25, **cosine) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"lr_warmup_steps": 3},
        {"lr_scheduler_type": "cosine", "lr_warmup_steps_ratio": 0.4, "num_cycles": 1.5, "min_lr_ratio": 0.2},
        {"lr_scheduler_type": "cosine", "zero_indexed_step": False, "lr_warmup_steps": 2},
    ],
)
def test_learning_rate_schedules_equal_those_of_fsdp(tiny: HFModelConfig, options: dict[str, Any]) -> None:
    optim = FSDPOptimizerConfig(lr=0.3, total_training_steps=10, **options)
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=optim.lr)
    fsdp = FSDPEngineWithLMHead.__new__(FSDPEngineWithLMHead)
    fsdp.optimizer_config, fsdp.rank = optim, 0
    fsdp.lr_scheduler = fsdp._build_lr_scheduler(optimizer)
    schedule = LearningRate(optim)
    for _ in range(12):
        assert schedule.value == fsdp.lr_scheduler.get_last_lr()[0]
        optimizer.step()
        assert schedule.step() == fsdp.lr_scheduler_step()


def test_optimizer_options() -> None:
    optim = FSDPOptimizerConfig(lr=1e-3, betas=[0.8, 0.95], weight_decay=0.2, clip_grad=0.5)
    adamw = adamw_config(optim)
    assert (adamw.lr, adamw.betas, adamw.weight_decay, adamw.clip_grad) == (1e-3, (0.8, 0.95), 0.2, 0.5)
    overrides = {"eps": 1e-6, "decay_norms_and_biases": False}
    adamw = adamw_config(FSDPOptimizerConfig(override_optimizer_config=overrides))
    assert (adamw.eps, adamw.decay_norms_and_biases) == (1e-6, False)


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        (FSDPOptimizerConfig(optimizer="SGD"), "SGD .* is not supported.*AdamW"),
        (FSDPOptimizerConfig(optimizer="AdamW8bit", optimizer_impl="bitsandbytes.optim"), "AdamW8bit of bitsandbytes"),
        (FSDPOptimizerConfig(override_optimizer_config={"epss": 1}), "unknown option epss .*did you mean eps"),
        (OptimizerConfig(), "optim=fsdp"),
    ],
)
def test_other_optimizers_are_refused(optim: OptimizerConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegaTrainActorConfig(ppo_micro_batch_size_per_gpu=1, rollout_n=1, optim=optim)


# ---------------------------------------------------------------------------------------------------- refused by name


def test_separate_reference_scores_like_the_actors_own(tiny: HFModelConfig, make: Callable) -> None:
    batch = rl_batch(tiny.hf_config.vocab_size)
    reference = make(tiny, forward_only=True, ref_in_actor=False)
    expected = score(make(tiny), batch, reference=True)["log_probs"]
    assert torch.equal(score(reference, batch)["log_probs"].values(), expected.values())


def test_reference_engine_beside_ref_in_actor_names_the_patch(tiny: HFModelConfig, make: Callable) -> None:
    with pytest.raises(RuntimeError, match="verl_patches.ref_in_actor"):
        make(tiny, forward_only=True, ref_in_actor=True)


def test_options_of_another_backend_name_the_patch(process_group: None, tiny: HFModelConfig) -> None:
    with pytest.raises(ValueError, match="FSDPEngineConfig.*verl_patches.config_checks"):
        MegaTrainEngine(tiny, FSDPEngineConfig(), FSDPOptimizerConfig(), CheckpointConfig())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_mode": "right"}, "no_padding"),
        ({"distillation_use_topk": True}, "distillation"),
    ],
)
def test_batches_that_would_be_trained_wrongly_are_refused(
    tiny: HFModelConfig, make: Callable, options: dict[str, Any], message: str
) -> None:
    batch = rl_batch(tiny.hf_config.vocab_size)
    tu.assign_non_tensor(batch, **options)
    with pytest.raises(ValueError, match=message):
        train(make(tiny), batch, actor_loss())
