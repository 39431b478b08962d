"""Real GRPO with two data-parallel ranks on the CPU, each with a vLLM of its own or with half of one."""

from pathlib import Path

import pytest

from tests.verl_backend.test_grpo import ACTOR, ROLLOUT, TWO_RANKS, folder, train  # noqa: F401  (the fixture)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_two_ranks_train_and_one_goes_on(folder: Path) -> None:  # noqa: F811
    module, loss = "megatrain_verl.main_ppo", (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.megatrain.dtype=float32")
    metrics, _ = train(folder, module, 2, *TWO_RANKS, *loss)
    assert sorted(metrics) == [1, 2]
    for data in metrics.values():
        # The rollouts of both ranks had the trainer's weights of the step.
        assert data["training/rollout_probs_diff_max"] <= 1e-3
        assert 0 < data["actor/grad_norm"] < float("inf")
    assert metrics[2]["actor/kl_loss"] > metrics[1]["actor/kl_loss"] > 0  # the weights change with every mini-batch
    checkpoint = folder / "checkpoints" / "global_step_2" / "actor"
    assert sorted(path.name for path in checkpoint.iterdir()) == ["engine", "extra_state.json", "huggingface"]
    resumed, _ = train(folder, module, 3, *loss)
    assert sorted(resumed) == [3]
    assert resumed[3]["training/rollout_probs_diff_max"] <= 1e-3
    assert resumed[3]["actor/kl_loss"] > metrics[1]["actor/kl_loss"]  # the reference is still the model of the start


def test_two_ranks_feed_the_halves_of_one_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else each half wants a NUMA node of its own
    options = (f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ACTOR}.megatrain.dtype=float32")
    metrics, printed = train(folder, "megatrain_verl.main_ppo", 2, *TWO_RANKS, *options, "trainer.resume_mode=disable")
    assert "(Worker_TP1 pid=" in printed
    assert sorted(metrics) == [1, 2]
    for data in metrics.values():  # at step 2 those that both ranks have sent
        assert data["training/rollout_probs_diff_max"] <= 1e-3 and data["actor/grad_norm"] > 0
