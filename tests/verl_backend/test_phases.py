"""What the engine reports of its phases beside verl's own metrics."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.config import HFModelConfig

from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.optimizer_step import AdamWStep
from megatrain_verl.streaming.streams import Event
from megatrain_verl.verl_backend.phases import GIB
from tests.verl_backend.cases import actor_loss, rl_batch, score, train, weights


def reported(output: dict) -> dict[str, float]:
    """The engine's figures among the metrics of an update."""
    found = {name: metric for name, metric in output["metrics"].items() if name.startswith("megatrain/")}
    assert all(isinstance(metric, Metric) for metric in found.values())
    return {name.removeprefix("megatrain/"): metric.aggregate() for name, metric in found.items()}


def test_an_update_reports_scoring_training_and_the_export_before_it(
    tiny: HFModelConfig, make: Callable, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    engine, batch = make(tiny, trace_file=str(trace)), rl_batch(tiny.hf_config.vocab_size)
    exported = sum(weight.nbytes for weight in weights(engine).values())
    score(engine, batch)
    score(engine, batch, reference=True)
    figures = reported(train(engine, batch, actor_loss()))

    for phase in ("export", "score", "score_reference", "forward_backward", "optimizer_step"):
        assert figures[f"{phase}_s"] > 0
    assert figures["exported_gb"] == pytest.approx(exported / GIB)
    gradients = 4 * sum(unit.numel for unit in engine.streaming.plan.units)
    assert figures["d2h_gb"] == pytest.approx(gradients / GIB)
    assert figures["h2d_gb"] >= 3 * gradients / GIB  # all weights, for two scorings and a forward pass
    assert figures["host_gb"] > 0.1
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [line["phase"] for line in lines if line["phase"] != "adamw"] == [
        "export", "score", "score_reference", "forward_backward", "optimizer_step",
    ]  # fmt: skip
    starts = [line["start"] for line in lines if line["phase"] != "adamw"]
    assert starts == sorted(starts) and abs(starts[-1] - time.time()) < 60


def test_each_update_reports_only_its_own(tiny: HFModelConfig, make: Callable) -> None:
    engine, batch = make(tiny), rl_batch(tiny.hf_config.vocab_size)
    score(engine, batch)
    first = reported(train(engine, batch, actor_loss()))
    second = reported(train(engine, batch, actor_loss()))
    assert first["score_s"] > 0 and second["score_s"] == 0 and second["exported_gb"] == 0
    assert second["d2h_gb"] == pytest.approx(first["d2h_gb"])


def test_adamw_that_the_export_waits_for_is_counted(
    tiny: HFModelConfig, make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each unit's update takes `pause` from the moment at which the export waits for it, however busy the machine."""
    engine, batch = make(tiny), rl_batch(tiny.hf_config.vocab_size)
    update, wait, pause = engine.streaming._updates._adamw.update, engine.streaming.streams._wait, 0.05
    waiting = threading.Semaphore(0)

    def slow(unit: UnitState, step: AdamWStep) -> None:
        assert waiting.acquire(timeout=20), "the export has not waited for this unit"
        time.sleep(pause)
        update(unit, step)

    def told(event: Event, reason: str) -> None:
        if reason.startswith("weights updated"):
            waiting.release()
        wait(event, reason)

    monkeypatch.setattr(engine.streaming._updates._adamw, "update", slow)
    monkeypatch.setattr(engine.streaming.streams, "_wait", told)
    train(engine, batch, actor_loss())
    weights(engine)
    figures = reported(train(engine, batch, actor_loss()))
    waited = 0.99 * pause * len(engine.streaming.plan.units)  # the clocks may differ a little
    assert figures["adamw_s"] > waited and figures["adamw_wait_s"] > waited and figures["export_s"] > waited


def test_waits_for_the_update_on_the_device_are_counted(tiny: HFModelConfig, make: Callable) -> None:
    """On CPU the device's part has ended when it is waited for, so its event takes its time here."""
    engine, batch = make(tiny, device_adamw=True, optimizer_backend="native"), rl_batch(tiny.hf_config.vocab_size)
    train(engine, batch, actor_loss())
    updates, pause = engine.streaming._updates, 0.2
    unit = engine.streaming.state.units[0]
    updates.wait(unit, "test")
    updates._share._pending[unit.plan.name] = [SimpleNamespace(synchronize=lambda: time.sleep(pause))]
    weights(engine)
    updates._share._pending[unit.plan.name] = []
    assert reported(train(engine, batch, actor_loss()))["adamw_wait_s"] >= pause


def last(batch: TensorDict, is_last: bool) -> TensorDict:
    batch = batch.clone()
    tu.assign_non_tensor(batch, update_lr_scheduler=is_last)
    return batch


def test_only_the_last_mini_batch_of_an_rl_update_reports(tiny: HFModelConfig, make: Callable) -> None:
    engine, batch = make(tiny), rl_batch(tiny.hf_config.vocab_size)
    assert reported(train(engine, last(batch, False), actor_loss())) == {}
    assert reported(train(engine, last(batch, True), actor_loss()))["d2h_gb"] > 0
