"""Several ranks with images: the rank without any takes part in the sums of the vision part."""

import copy
import time
import uuid

import numpy as np
import pytest

from megatrain_verl.config import AdamWConfig, StreamingConfig
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.group.group import ALONE, Group, HostGroup
from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.optimizer_step import AdamWStep
from tests.group import ranks
from tests.vision import cases

COUNTS = [0, 1, 0, 2]  # images per row
SHARES = [[0, 2], [1, 3]]


def make_engine(group: Group, clip: float | None = 1.0, **more: object) -> StreamingEngine:
    config = cases.tiny_config("qwen3_vl")
    streaming = StreamingConfig(**{"dtype": "float32", "optimizer_backend": "torch", "cpu_threads": 1} | more)
    adamw = AdamWConfig(lr=1e-3, clip_grad=clip)
    engine = StreamingEngine(config, streaming, adamw, device="cpu", group=group)
    engine.load_weights(cases.plain_model(copy.deepcopy(config)).state_dict().items())
    return engine


def train(group: Group, steps: int = 2) -> tuple[list[float], dict[str, np.ndarray]]:
    """Norms of the steps of this rank's share of the rows, and all masters at the end."""
    engine = make_engine(group)
    norms = []
    for step in range(steps):
        rows = cases.rows("qwen3_vl", COUNTS, seed=step)
        share = SHARES[group.rank] if group.size > 1 else sorted(sum(SHARES, []))
        engine.zero_grad()
        engine.forward_backward([cases.pack([rows[number]]) for number in share], lambda m, o: -o.log_probs.sum() / 99)
        norms.append(engine.optimizer_step())
    weights = ranks.weights(engine)
    engine.close()
    return norms, weights


def train_behind_slow_update(group: Group, delay: float, **settings: object) -> dict[str, np.ndarray]:
    """All masters after a step with images and two without; the last rank's first AdamW of the encoder takes longer."""
    engine = make_engine(group, None, freeze=["*embed_tokens*"], **settings)
    update = engine._updates._adamw.update

    def slow_update(unit: UnitState, step: AdamWStep, **where: UnitState) -> None:
        if unit.plan.name == "vision_encoder" and step.step == 1 and group.rank == group.size - 1:
            time.sleep(delay)
        update(unit, step, **where)

    engine._updates._adamw.update = slow_update
    for step, images in enumerate((1, 0, 0)):
        batch = cases.pack(cases.rows("qwen3_vl", [images], seed=2 * step + group.rank))
        engine.zero_grad()
        engine.forward_backward([batch], lambda m, o: -o.log_probs.sum() / 99, next_lr=1e-3)
        if step == 0:
            engine.streams.optimizer.record().synchronize()  # every unit that may be updated ahead has been
        engine.optimizer_step()
    for unit in engine.state.units:
        engine._wait_updated(unit, "the end")
    weights = ranks.weights(engine)
    engine.close()
    return weights


def train_both_ways(group: Group, name: str) -> list[dict[str, np.ndarray]]:
    """`train_behind_slow_update` as usual, and ahead of the norm with a slow update."""
    plain = train_behind_slow_update(group, 0.0)
    again = HostGroup(name, group.rank, group.size)
    return [plain, train_behind_slow_update(again, 2.0, speculative_adamw_gb=1.0)]


def test_the_gradient_of_a_step_without_images_waits_for_the_update_of_the_one_before() -> None:
    for ended in ranks.run(train_both_ways, 2, uuid.uuid4().hex):
        assert ended.error is None, ended.error
        plain, slow = ended.result
        assert all(np.array_equal(slow[name], plain[name]) for name in plain)


@pytest.mark.slow
def test_two_ranks_of_which_one_has_no_image_equal_one() -> None:
    norms, weights = train(ALONE)
    for ended in ranks.run(train, 2):
        assert ended.error is None, ended.error
        assert np.allclose(ended.result[0], norms, rtol=1e-5)
        for name, value in ended.result[1].items():
            assert np.allclose(value, weights[name], rtol=1e-5, atol=1e-5), name
