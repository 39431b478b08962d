"""The variants of configs/rl/variant in real GRPO on the CPU, two steps each."""

from pathlib import Path

import pytest

from tests.verl_backend.test_grpo import ACTOR, ROOT, _make_inputs, train

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]
OPTIONS = {
    "dapo": ["reward.reward_kwargs.overlong_buffer_cfg.len=4"],  # of 16 tokens
    "gspo": [],
    "rollout_log_probs": [],
}


@pytest.mark.parametrize("variant", sorted(OPTIONS))
def test_a_variant_trains(tmp_path: Path, variant: str) -> None:
    where = f"hydra.searchpath=[pkg://verl.trainer.config,file://{ROOT}/configs/rl]"
    options = [where, f"+variant={variant}", f"{ACTOR}.megatrain.dtype=float32", *OPTIONS[variant]]
    metrics, _ = train(_make_inputs(tmp_path), "megatrain_verl.main_ppo", 2, *options)
    assert sorted(metrics) == [1, 2]
    for data in metrics.values():
        assert 0 < data["actor/grad_norm"] < float("inf")
        if variant != "rollout_log_probs":  # there verl does not compare the two
            assert data["training/rollout_probs_diff_max"] <= 1e-3
