"""verl's whole configuration for the tiny model, and what verl's driver makes of it."""

from pathlib import Path

from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from verl.utils.config import validate_config
from verl.workers.config import HFModelConfig

GROUP, STOCK = "model_engine=megatrain", "actor_rollout_ref.actor.strategy=megatrain"
ACTOR = "actor_rollout_ref.actor"


def run_config(tiny: HFModelConfig, data: Path, *overrides: str) -> DictConfig:
    """verl's main configuration with small numbers, the tiny model and `overrides`."""
    small = [
        f"actor_rollout_ref.model.path={tiny.path}",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/test.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=100",
        "data.max_response_length=16",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*small, *overrides])


def check(config: DictConfig, use_kl: bool = True) -> None:
    """What verl does in the driver."""
    validate_config(config, use_reference_policy=use_kl, use_critic=False)
