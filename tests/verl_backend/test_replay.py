"""`benchmarks/replay`: recorded batches are what was sent, and both engines take the same steps on them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig

from benchmarks.replay import batches, recorder
from benchmarks.replay.replay import halved_micro_batches, recorded_options, relative_differences, report, run_engine
from benchmarks.replay.workers import actor_config, single_process
from megatrain_verl.verl_backend.config import MegaTrainActorConfig
from tests.verl_backend.cases import rl_batch


@pytest.fixture
def recorded(tiny: HFModelConfig, tmp_path: Path) -> Path:
    """Three batches of two mini-batches, and the options of an actor."""
    for step in range(3):
        batch = rl_batch(tiny.hf_config.vocab_size, seed=step)
        tu.assign_non_tensor(batch, micro_batch_size_per_gpu=1)
        tu.assign_non_tensor(
            batch, mini_batch_size=3, global_batch_size=3, epochs=1, seed=1, dataloader_kwargs={"shuffle": True}
        )
        batches.save(batch, tmp_path / f"batch_{step:04}.safetensors")
    optim = FSDPOptimizerConfig(lr=1e-3, total_training_steps=10)
    loss = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    actor = MegaTrainActorConfig(ppo_micro_batch_size_per_gpu=1, rollout_n=1, optim=optim, **loss)
    (tmp_path / recorder.OPTIONS_FILE).write_text(json.dumps(recorder.options(actor)))
    return tmp_path


def test_recorded_batch_is_the_one_sent(tiny: HFModelConfig, tmp_path: Path) -> None:
    sent = rl_batch(tiny.hf_config.vocab_size, per_row_temperature=True)
    sent["again"] = sent["input_ids"]  # as verl's loss_mask and response_mask, two names of one tensor
    tu.assign_non_tensor(sent, dataloader_kwargs={"shuffle": False}, seed=None)
    batches.save(sent, tmp_path / "batch_0001.safetensors")
    loaded = batches.load(batches.files(tmp_path)[0])
    assert loaded.batch_size == sent.batch_size
    assert set(sent.keys()) - set(loaded.keys()) == {"global_token_num"}  # a list, which verl's worker makes anew
    for name in loaded.keys():
        left, right = tu.get(loaded, name), tu.get(sent, name)
        if isinstance(right, torch.Tensor) and right.is_nested:
            assert torch.equal(left.offsets(), right.offsets())
            left, right = left.values(), right.values()
        assert torch.equal(left, right) if isinstance(right, torch.Tensor) else left == right


def test_no_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="record a run there first"):
        batches.files(tmp_path)


def test_micro_batch_of_one_row_has_no_control(recorded: Path) -> None:
    with pytest.raises(ValueError, match="--control halves"):
        halved_micro_batches(recorded_options(recorded, lr=None))


def test_options_survive_recording(recorded: Path) -> None:
    options = json.loads((recorded / recorder.OPTIONS_FILE).read_text())
    for engine in ("megatrain", "fsdp2"):
        actor = actor_config(engine, "float32", options)
        assert (actor.use_kl_loss, actor.kl_loss_coef, actor.optim.lr) == (True, 0.1, 1e-3)


def test_engines_take_the_same_steps(
    process_group: None, tiny: HFModelConfig, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    single_process()

    def run(engine: str, options: dict[str, Any]) -> dict[str, list[float]]:
        return run_engine(engine, recorded, Path(tiny.local_path), "float32", options)

    options = recorded_options(recorded, lr=None)
    expected, found = run("fsdp2", options), run("megatrain", options)
    assert len(expected["loss"]) == len(found["loss"]) == 6
    for name in ("loss", "grad_norm"):
        assert max(relative_differences(found[name], expected[name])) < 1e-5
    # A rate that is one per cent off shows.
    off = run("megatrain", recorded_options(recorded, lr=1.01e-3))
    assert max(relative_differences(off["grad_norm"], expected["grad_norm"])) > 1e-4
    assert report({"fsdp2": expected, "megatrain": off}, tolerance=1e-5)["megatrain"]["grad_norm"] > 1e-4
