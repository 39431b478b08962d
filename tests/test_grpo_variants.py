"""The variants of configs/rl/variant on top of a GRPO configuration, and the scripts that name a configuration."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from megatrain_verl.sft import search_path

ROOT = Path(__file__).resolve().parents[1]
ACTOR = "actor_rollout_ref.actor"
EXPECTED = {
    "dapo": {
        "algorithm.filter_groups.enable": True,
        "reward.reward_manager.name": "dapo",
        "reward.reward_kwargs.max_resp_len": 1024,
        f"{ACTOR}.clip_ratio_high": 0.28,
        f"{ACTOR}.use_kl_loss": False,
    },
    "gspo": {
        f"{ACTOR}.policy_loss.loss_mode": "gspo",
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{ACTOR}.use_kl_loss": False,
    },
    "fp8_rollout": {"actor_rollout_ref.rollout.quantization": "fp8", f"{ACTOR}.use_kl_loss": True},
    "rollout_log_probs": {"algorithm.rollout_correction.bypass_mode": True, f"{ACTOR}.use_kl_loss": True},
}


@pytest.mark.parametrize("variant", sorted(path.stem for path in (ROOT / "configs/rl/variant").glob("*.yaml")))
def test_a_variant_changes_what_its_file_says(variant: str) -> None:
    search_path.register()
    with initialize_config_dir(str(ROOT / "configs/rl"), version_base=None):
        config = compose("qwen2_5_3b_grpo_24gb", [f"+variant={variant}"])
    assert {name: OmegaConf.select(config, name) for name in EXPECTED[variant]} == EXPECTED[variant]
    assert config.trainer.v1.sampler.custom_sampler.name == "PromptSampler"


def test_every_run_script_names_a_configuration() -> None:
    scripts = sorted((ROOT / "examples").glob("run_q*_grpo.sh"))
    names = [f"run_{model}_grpo.sh" for model in ("qwen2_5_3b", "qwen2_5_7b", "qwen3_8b")]
    assert set(names) <= {script.name for script in scripts}
    for script in scripts:
        name = script.read_text().rsplit('run_grpo.sh" ', 1)[1].split()[0]
        assert (ROOT / f"configs/rl/{name}.yaml").exists() and f"outputs/{name}" in script.read_text()
