"""Saving, resuming and exporting as verl does it."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.workers.config import HFModelConfig

from megatrain_verl.verl_backend.retention import Retention
from tests.verl_backend.cases import actor_loss, rl_batch, same, save_tiny_model, score, train, weights


def test_resume_is_bit_equal(tiny: HFModelConfig, make: Callable, tmp_path: Path) -> None:
    """Three steps, save, another engine, three steps: weights, moments, rates and random numbers of six straight."""
    optim = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2, "total_training_steps": 6}
    batches = [rl_batch(tiny.hf_config.vocab_size, seed=step) for step in range(6)]
    straight, first, second = (make(tiny, optim=optim) for _ in range(3))
    for engine, steps in ((straight, batches), (first, batches[:3])):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        rates = [train(engine, batch, actor_loss())["lr"] for batch in steps]
        if engine is straight:
            expected, numbers = rates[3:], (random.random(), np.random.rand(), torch.rand(1).item())
    folder = str(tmp_path / "global_step_3" / "actor")
    first.save_checkpoint(folder, None, 3, None)
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    second.load_checkpoint(folder, None, False)
    assert [train(second, batch, actor_loss())["lr"] for batch in batches[3:]] == expected
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == numbers
    assert same(weights(second), weights(straight))
    for left, right in zip(second.streaming.state.units, straight.streaming.state.units, strict=True):
        assert torch.equal(left.exp_avg, right.exp_avg) and torch.equal(left.exp_avg_sq, right.exp_avg_sq)


def test_reference_after_resume_is_the_model_path(tiny: HFModelConfig, make: Callable, tmp_path: Path) -> None:
    straight, batch = make(tiny), rl_batch(tiny.hf_config.vocab_size)
    start = score(straight, batch)["log_probs"].values()
    train(straight, batch, actor_loss())
    straight.save_checkpoint(str(tmp_path / "actor"))
    resumed = make(tiny)
    resumed.load_checkpoint(str(tmp_path / "actor"))
    for engine in (straight, resumed):
        train(engine, batch, actor_loss())
    policy = [score(engine, batch)["log_probs"].values() for engine in (straight, resumed)]
    reference = [score(engine, batch, reference=True)["log_probs"].values() for engine in (straight, resumed)]
    assert torch.equal(policy[0], policy[1]) and (policy[0] - start).abs().max() > 1e-2
    assert torch.equal(reference[0], start) and torch.equal(reference[1], start)


@pytest.mark.parametrize("tied", [False, True])
def test_hugging_face_export_loads(
    tiny: HFModelConfig, tiny_tied: HFModelConfig, make: Callable, tmp_path: Path, tied: bool
) -> None:
    model = tiny_tied if tied else tiny
    engine = make(model)
    train(engine, rl_batch(model.hf_config.vocab_size), actor_loss())
    engine.save_checkpoint(str(tmp_path / "actor"))
    folder = tmp_path / "actor" / "huggingface"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    exported = weights(engine)
    assert loaded.dtype is torch.float32
    assert all(torch.equal(parameter, exported[name]) for name, parameter in loaded.named_parameters())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert AutoTokenizer.from_pretrained(folder).chat_template == model.tokenizer.chat_template


def test_without_hf_model_the_folder_holds_config_and_tokenizer(
    tiny: HFModelConfig, make: Callable, tmp_path: Path
) -> None:
    make(tiny, contents=("model", "optimizer", "extra")).save_checkpoint(str(tmp_path / "actor"))
    files = os.listdir(tmp_path / "actor" / "huggingface")
    assert {"config.json", "tokenizer.json"} <= set(files) and not [name for name in files if "safetensors" in name]


def test_checkpoint_of_another_model_is_refused_and_changes_nothing(
    tiny: HFModelConfig, make: Callable, tmp_path: Path
) -> None:
    other = HFModelConfig(path=str(save_tiny_model(tmp_path / "other", layers=3)))
    make(other).save_checkpoint(str(tmp_path / "actor"))
    engine = make(tiny)
    train(engine, rl_batch(tiny.hf_config.vocab_size), actor_loss())
    before, rate = weights(engine), engine.learning_rate.value
    with pytest.raises(ValueError, match="another model|layers"):
        engine.load_checkpoint(str(tmp_path / "actor"))
    assert same(weights(engine), before) and engine.learning_rate.value == rate and engine.streaming.step_count == 1


@pytest.mark.parametrize("missing", ["everything", "extra_state.json", "engine"])
def test_incomplete_checkpoint_is_refused(tiny: HFModelConfig, make: Callable, tmp_path: Path, missing: str) -> None:
    engine = make(tiny)
    path = tmp_path / "actor"
    engine.save_checkpoint(str(path))
    os.rename(path if missing == "everything" else path / missing, tmp_path / "away")
    before = weights(engine)
    with pytest.raises(ValueError, match="checkpoint"):
        engine.load_checkpoint(str(path))
    assert same(weights(engine), before)


def test_old_checkpoints_go_only_when_the_tracker_names_another(
    tiny: HFModelConfig, make: Callable, tmp_path: Path
) -> None:
    engine = make(tiny, contents=("extra",))
    kept = {}
    for limit in (1, 2):
        root = tmp_path / f"keep{limit}"
        for step in range(1, 5):
            path = root / f"global_step_{step}" / "actor"
            engine.save_checkpoint(str(path), None, step, limit)
            kept[limit, step] = [old for old in range(1, 5) if (root / f"global_step_{old}" / "actor").exists()]
            (root / "latest_checkpointed_iteration.txt").write_text(str(step))  # verl writes it after the save
    assert [kept[1, step] for step in range(1, 5)] == [[1], [1, 2], [2, 3], [3, 4]]
    assert [kept[2, step] for step in range(1, 5)] == [[1], [1, 2], [2, 3], [3, 4]]
    (root / "latest_checkpointed_iteration.txt").write_text("")
    engine.save_checkpoint(str(root / "global_step_5" / "actor"), None, 5, 1)
    assert (root / "global_step_3" / "actor").exists()  # a tracker that names nothing may have named it


@pytest.mark.parametrize("name", ["global_step_1/actor", "global_step_1"])
def test_killed_deletion_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A checkpoint whose deletion was killed is neither taken for a whole one nor left to fill the disk."""

    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    first, second, third = (tmp_path / name.replace("1", str(step)) for step in (1, 2, 3))
    for path in (first, second, third):
        path.mkdir(parents=True)
        (path / "weights").touch()
    retention = Retention()
    retention.register(first, 1)
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        retention.register(second, 1)
    assert not first.exists() and list(tmp_path.rglob("*.removed"))
    monkeypatch.undo()
    Retention().register(third, 1)
    assert not list(tmp_path.rglob("*.removed")) and (third / "weights").exists()


def test_extra_state_is_plain_json(tiny: HFModelConfig, make: Callable, tmp_path: Path) -> None:
    make(tiny, contents=("extra",)).save_checkpoint(str(tmp_path / "actor"))
    state = json.loads((tmp_path / "actor" / "extra_state.json").read_text())
    assert state["learning_rate"]["last_epoch"] == 0 and len(state["numpy"]["state"]["key"]) == 624
