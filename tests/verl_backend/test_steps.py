"""Training steps of the megatrain engine as verl calls it, against verl's own FSDP2 engine on the same batches."""

import copy
import logging
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, sft_loss

from megatrain_verl.verl_backend.config import MegaTrainActorConfig, MegaTrainEngineConfig
from megatrain_verl.verl_backend.engine import MegaTrainEngine
from tests.verl_backend.cases import actor_loss, jagged, rl_batch, same, score, sft_batch, train, weights
from tests.verl_backend.conftest import EPS, LR

# ----------------------------------------------------------------------------------------------- equal to verl's FSDP

RL_LOSSES = {
    "plain": {},
    "kl loss": {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "entropy": {"entropy_coeff": 0.05},
    "sequence mean": {"loss_agg_mode": "seq-mean-token-mean"},
    # As in configs/rl/variant.
    "dapo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "loss_agg_mode": "token-mean"},
    "gspo": {
        "policy_loss": {"loss_mode": "gspo"},
        "loss_agg_mode": "seq-mean-token-mean",
        "clip_ratio_low": 0.0003,
        "clip_ratio_high": 0.0004,
    },
}


@pytest.mark.parametrize("options", RL_LOSSES.values(), ids=RL_LOSSES.keys())
@pytest.mark.parametrize("per_row_temperature", [False, True])
def test_first_rl_step_equals_fsdp(
    tiny: HFModelConfig, make: Callable, make_fsdp: Callable, options: dict[str, Any], per_row_temperature: bool
) -> None:
    batch = rl_batch(tiny.hf_config.vocab_size, per_row_temperature=per_row_temperature)
    calculate_entropy = "entropy_coeff" in options
    tu.assign_non_tensor(batch, calculate_entropy=calculate_entropy, micro_batch_size_per_gpu=2)
    expected = train(make_fsdp(tiny), batch, actor_loss(**options))
    found = train(make(tiny), batch, actor_loss(**options))
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-7)
    assert found["metrics"]["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=1e-5)
    own = {name for name in found["metrics"] if name.startswith("megatrain/")}
    assert found["metrics"].keys() - own == expected["metrics"].keys() and own
    for name in set(expected["metrics"]) - {"grad_norm", "kl_coef"}:
        assert found["metrics"][name].aggregate() == pytest.approx(
            expected["metrics"][name].aggregate(), rel=1e-4, abs=1e-6
        )


def assert_same_steps(found: torch.Tensor, expected: torch.Tensor) -> None:
    """A weight moves by up to LR in each step, in a direction that is rounding's where its gradient is nearly 0: a few
    weights may differ by a visible part of a step, on average by no more than a thousandth of one."""
    difference = (found - expected).abs()
    assert difference.max() <= LR / 10
    assert difference.mean() <= LR / 1000


def test_weights_after_three_steps_equal_fsdp(tiny: HFModelConfig, make: Callable, make_fsdp: Callable) -> None:
    """The same AdamW and clipping, too."""
    fsdp, engine = make_fsdp(tiny, LR), make(tiny, optim=EPS)
    for step in range(3):
        batch = rl_batch(tiny.hf_config.vocab_size, seed=step)
        for trained in (fsdp, engine):
            train(trained, batch, actor_loss())
    exported = weights(engine)
    for name, expected in fsdp.get_per_tensor_param()[0]:
        assert_same_steps(exported[name], expected)


def test_first_sft_step_equals_fsdp(tiny_tied: HFModelConfig, make: Callable, make_fsdp: Callable) -> None:
    batch = sft_batch(tiny_tied.hf_config.vocab_size)
    loss = partial(sft_loss, config=None)
    expected, found = train(make_fsdp(tiny_tied), batch, loss), train(make(tiny_tied), batch, loss)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["metrics"]["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("per_row_temperature", [False, True])
def test_scores_equal_fsdp_where_they_are_used(
    tiny: HFModelConfig, make: Callable, make_fsdp: Callable, per_row_temperature: bool
) -> None:
    batch = rl_batch(tiny.hf_config.vocab_size, per_row_temperature=per_row_temperature)
    options = {"calculate_sum_pi_squared": True, "micro_batch_size_per_gpu": 3}
    expected, found = score(make_fsdp(tiny), batch, **options), score(make(tiny), batch, **options)
    assert found.keys() == expected.keys() == {"log_probs", "entropy", "sum_pi_squared"}
    for name in expected:
        used = 0
        for row, mask in enumerate(batch["response_mask"].unbind()):
            where = slice(-1 - len(mask), -1)  # position t scores token t + 1
            left, right = found[name][row][where], expected[name][row][where].detach()
            torch.testing.assert_close(left[mask.bool()], right[mask.bool()], rtol=1e-5, atol=1e-5)
            used += int(mask.sum())
        assert used > 20


def test_sft_validation_loss_equals_training_loss(tiny: HFModelConfig, make: Callable) -> None:
    engine, batch = make(tiny), sft_batch(tiny.hf_config.vocab_size)
    loss = partial(sft_loss, config=None)
    with engine.eval_mode():
        validation = engine.infer_batch(batch.clone(), loss_function=loss)["loss"]
    assert validation == pytest.approx(train(engine, batch, loss)["loss"], rel=1e-6)


# ------------------------------------------------------------------------------------------------------ masked labels


def without_labels(batch: TensorDict, rows: list[int]) -> TensorDict:
    """`batch` with every label of `rows` masked."""
    batch = batch.clone()
    for name in {"loss_mask", "response_mask"} & set(batch.keys()):
        batch[name] = jagged([mask * (row not in rows) for row, mask in enumerate(batch[name].unbind())])
    return batch


RL_MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
LOSSES = {mode: actor_loss(loss_agg_mode=mode, use_kl_loss=True, entropy_coeff=0.1) for mode in RL_MODES}


@pytest.mark.parametrize("loss", [*LOSSES.values(), partial(sft_loss, config=None)], ids=[*RL_MODES, "sft"])
def test_batch_without_labels_gives_no_gradient_and_is_counted(
    tiny: HFModelConfig, make: Callable, caplog: pytest.LogCaptureFixture, loss: partial
) -> None:
    engine, is_rl = make(tiny, optim={"weight_decay": 0.0}), loss.func is not sft_loss
    batch = (rl_batch if is_rl else sft_batch)(tiny.hf_config.vocab_size)
    tu.assign_non_tensor(batch, micro_batch_size_per_gpu=1, calculate_entropy=is_rl)
    before, empty = weights(engine), without_labels(batch, list(range(len(batch))))
    for count in (1, 2):
        with caplog.at_level(logging.WARNING):
            output = train(engine, empty, loss)
        assert output["loss"] == [0.0] * len(batch) and output["metrics"].pop("grad_norm") == 0.0
        warned = [message for message in caplog.messages if "such batches so far" in message]
        assert f"({count} such" in warned[-1] and len(warned) == engine.batches_without_labels == count
        if is_rl:
            for metric in output["metrics"].values():
                assert np.isfinite(metric.aggregate() if isinstance(metric, Metric) else metric).all()
            assert output["metrics"]["actor/batches_without_labels"].aggregate() == count
    assert same(weights(engine), before)
    with engine.eval_mode():
        assert engine.infer_batch(empty.clone(), loss_function=loss)["loss"] == [0.0] * len(batch)
    assert train(engine, batch, loss)["metrics"]["grad_norm"] > 0 and engine.batches_without_labels == 2


@pytest.mark.parametrize("loss", [LOSSES["token-mean"], partial(sft_loss, config=None)], ids=["rl", "sft"])
@pytest.mark.parametrize("rows_per_micro_batch", [1, 3])
def test_row_without_labels_changes_nothing_else(
    tiny: HFModelConfig, make: Callable, loss: partial, rows_per_micro_batch: int
) -> None:
    """Three rows, and the same three with others between and behind them whose labels are masked."""
    make_batch, found = rl_batch if loss.func is not sft_loss else sft_batch, []
    batch = without_labels(make_batch(tiny.hf_config.vocab_size, rows=6), [1, 4, 5])
    for rows in ([0, 2, 3], [0, 1, 2, 3, 4, 5]):
        part = tu.index_select_tensor_dict(batch, rows)
        tu.assign_non_tensor(part, micro_batch_size_per_gpu=rows_per_micro_batch, calculate_entropy=True)
        engine = make(tiny, optim=EPS)
        output = train(engine, part, loss)
        found.append((sum(output["loss"]), output["metrics"]["grad_norm"], weights(engine)))
    assert found[1][:2] == pytest.approx(found[0][:2], rel=1e-6)
    for name, weight in found[0][2].items():
        assert_same_steps(found[1][2][name], weight)


# ------------------------------------------------------------------------------------------------------ micro-batches


def test_gradient_does_not_depend_on_micro_batches(tiny: HFModelConfig, make: Callable) -> None:
    batch = rl_batch(tiny.hf_config.vocab_size)
    splits = [
        {"micro_batch_size_per_gpu": 6},
        {"micro_batch_size_per_gpu": 2},
        {"micro_batch_size_per_gpu": 1},
        {"use_dynamic_bsz": True, "max_token_len_per_gpu": 40},
    ]
    norms, losses = [], []
    for split in splits:
        tu.assign_non_tensor(batch, **split)
        output = train(make(tiny), batch, actor_loss(use_kl_loss=True))
        norms.append(output["metrics"]["grad_norm"])
        losses.append(sum(output["loss"]))
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-5)
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


def test_dynamic_micro_batches_come_back_in_order(tiny: HFModelConfig, make: Callable) -> None:
    engine, batch = make(tiny), rl_batch(tiny.hf_config.vocab_size)
    one = score(engine, batch)
    dynamic = score(engine, batch, use_dynamic_bsz=True, max_token_len_per_gpu=30)
    for name in one:
        torch.testing.assert_close(dynamic[name].values(), one[name].values(), rtol=1e-5, atol=1e-5)


def test_all_micro_batches_share_one_pass(tiny: HFModelConfig, make: Callable) -> None:
    """The weights cross to the device as often for six micro-batches as for one."""
    moved = []
    for size in (6, 1):
        engine, batch = make(tiny), rl_batch(tiny.hf_config.vocab_size)
        tu.assign_non_tensor(batch, micro_batch_size_per_gpu=size)
        train(engine, batch, actor_loss())
        moved.append((engine.streaming.counters.h2d_bytes, engine.streaming.counters.d2h_bytes))
    assert moved[0] == moved[1] and min(moved[0]) > 0


def test_model_output_is_returned_from_training_only_if_asked_for(tiny: HFModelConfig, make: Callable) -> None:
    engine, batch = make(tiny), rl_batch(tiny.hf_config.vocab_size)
    assert train(engine, batch, actor_loss())["model_output"] == {}
    tu.assign_non_tensor(batch, return_model_output=True)
    assert train(engine, batch, actor_loss())["model_output"]["log_probs"].requires_grad is False


# ------------------------------------------------------------------------------------------- optimizer step


def test_step_uses_the_rate_before_the_scheduler_moves(tiny: HFModelConfig, make: Callable) -> None:
    engine = make(tiny, optim={"lr_warmup_steps": 2})
    before = weights(engine)
    assert train(engine, rl_batch(tiny.hf_config.vocab_size), actor_loss())["lr"] == pytest.approx(5e-3)
    assert same(weights(engine), before)  # the first rate of a warm-up is 0
    train(engine, rl_batch(tiny.hf_config.vocab_size), actor_loss())
    assert not same(weights(engine), before)


def test_non_finite_norm_changes_nothing(tiny: HFModelConfig, make: Callable) -> None:
    """The step after it is as if it had not happened, except that the schedule goes on, as verl's does."""
    engine, undisturbed = make(tiny), make(tiny)
    batch = rl_batch(tiny.hf_config.vocab_size)
    broken = batch.clone()
    broken["advantages"].values()[0] = math.nan
    before = weights(engine)
    output = train(engine, broken, actor_loss())
    assert math.isnan(output["metrics"]["grad_norm"])
    assert same(weights(engine), before) and engine.streaming.step_count == 0
    for trained in (engine, undisturbed):
        train(trained, batch, actor_loss())
    assert same(weights(engine), weights(undisturbed)) and not same(weights(engine), before)


# ------------------------------------------------------------------------------------------------------- verl's worker


def test_training_worker_runs_mini_batches(tiny: HFModelConfig) -> None:
    """verl's own worker around the engine: its metrics, its schedule step, no buffers left."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ.update(environment)
    actor = MegaTrainActorConfig(
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
        megatrain=MegaTrainEngineConfig(dtype="float32", optimizer_backend="torch", use_dynamic_bsz=False),
        optim=FSDPOptimizerConfig(lr=1e-3, lr_warmup_steps=2, total_training_steps=4),
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=copy.deepcopy(tiny),
            engine_config=actor.engine,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    batch = rl_batch(tiny.hf_config.vocab_size)
    tu.assign_non_tensor(batch, mini_batch_size=3, epochs=1, seed=1, micro_batch_size_per_gpu=1, global_batch_size=3)
    metrics = tu.get(worker.train_mini_batch(batch), "metrics")
    assert len(metrics["grad_norm"]) == 2 and all(norm > 0 for norm in metrics["grad_norm"])
    assert metrics["lr"] == [pytest.approx(5e-4)]  # once per batch, with the last mini-batch
    assert np.isfinite(metrics["actor/pg_loss"]).all()
    assert worker.engine.streaming.step_count == 2 and worker.engine.streaming._ring is None
    worker.engine.streaming.close()


def test_device_buffers_live_from_the_first_pass_to_exit(tiny: HFModelConfig, make: Callable) -> None:
    engine, batch = make(tiny), rl_batch(tiny.hf_config.vocab_size)

    def holds() -> bool:
        return engine.streaming._ring is not None

    assert not holds()  # the rollout starts next and measures free memory
    with engine.train_mode():
        engine.forward_backward_batch(batch, actor_loss())
        assert holds() and engine.mode == "train"
        with engine.train_mode(disable_auto_offload=True):
            pass
        assert holds()  # an inner context leaves the buffers to the outer one
    assert not holds() and engine.mode is None
    with engine.eval_mode(disable_auto_offload=True):
        assert not holds()
    with engine.eval_mode():
        engine.to("cpu", model=True, optimizer=False, grad=False)
        assert not holds()


def test_gradients_are_dropped_when_training_ends(tiny: HFModelConfig, make: Callable) -> None:
    """Whether a gradient was used or not; within the context those of several calls add up."""
    batch, loss = rl_batch(tiny.hf_config.vocab_size), actor_loss()

    def norm(engine: MegaTrainEngine, calls: int) -> float:
        with engine.train_mode():
            for _ in range(calls):
                engine.forward_backward_batch(batch.clone(), loss)
            return engine.optimizer_step()

    engine = make(tiny, optim={"lr": 0.0})
    with engine.train_mode():
        engine.forward_backward_batch(batch.clone(), loss)
    once = norm(engine, 1)
    assert norm(engine, 1) == pytest.approx(once, rel=1e-6)
    assert norm(engine, 2) == pytest.approx(2 * once, rel=1e-5)


# -------------------------------------------------------------------------------------------------------- the weights


@pytest.mark.parametrize("tied", [False, True])
def test_export_names_every_weight_once(
    tiny: HFModelConfig, tiny_tied: HFModelConfig, make: Callable, tied: bool
) -> None:
    model = tiny_tied if tied else tiny
    engine = make(model, dtype="bfloat16")
    pairs, adapter = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    exported = [(name, weight.clone()) for name, weight in pairs]
    expected = dict(AutoModelForCausalLM.from_pretrained(model.local_path).named_parameters())
    assert adapter is None
    assert sorted(name for name, _ in exported) == sorted(expected)
    assert ("lm_head.weight" in expected) is not tied
    for name, weight in exported:
        assert weight.dtype is torch.bfloat16 and weight.is_contiguous()
        torch.testing.assert_close(weight.float(), expected[name].detach(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("in_file", [False, True])
def test_reference_stays_what_the_model_path_holds(
    tiny: HFModelConfig, make: Callable, tmp_path: Path, in_file: bool
) -> None:
    engine, batch = make(tiny, reference_folder=str(tmp_path) if in_file else None), rl_batch(tiny.hf_config.vocab_size)
    start = score(engine, batch)["log_probs"].values()
    for step in range(2):
        train(engine, rl_batch(tiny.hf_config.vocab_size, seed=step), actor_loss())
    assert (score(engine, batch)["log_probs"].values() - start).abs().max() > 1e-2
    assert torch.equal(score(engine, batch, reference=True)["log_probs"].values(), start)
    assert ("reference" in engine.streaming.host_plan.bytes_by_kind) is not in_file
