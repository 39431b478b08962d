"""Several ranks with AdamW ahead of the norm: the same bits as without, however far each rank gets ahead."""

import time
import uuid

import numpy as np
import pytest

from megatrain_verl.config import AdamWConfig, StreamingConfig
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.group.group import Group, HostGroup
from megatrain_verl.streaming.speculation import Guess
from tests import oracle
from tests.group import ranks

STEPS, LR, LAYERS = 4, 1e-3, 4
AHEAD = {"speculative_adamw_gb": 1.0}
HALVES = {"dtype": "bfloat16", "optimizer_backend": "native"}
WAVES = {"wave_tokens": 12}  # the first rank's row of each step is one wave, the others' two rows are two


def train(
    group: Group,
    settings: dict[str, object],
    clip: float | None,
    seconds: list[float],
    rows_of: list[int],
    device: str = "cpu",
) -> dict[str, object]:
    """Steps in which rank r updates no unit ahead in less than `seconds[r]`, and has `rows_of[r]` rows."""
    config = oracle.tiny_config("qwen2", layers=LAYERS)
    streaming = StreamingConfig(
        **{"dtype": "float32", "optimizer_backend": "torch", "cpu_threads": 1, "head_chunk_tokens": 7} | settings
    )
    made = StreamingEngine(config, streaming, AdamWConfig(lr=LR, clip_grad=clip), device=device, group=group)
    made.load_weights(oracle.plain_model(config).state_dict().items())
    update, begun, taken = made._updates._adamw.update, [], []

    def slow_update(unit: object, step: object, **where: object) -> None:
        if "into" in where:
            time.sleep(seconds[group.rank])
        update(unit, step, **where)

    made._updates._adamw.update = slow_update
    agree = Guess.agree

    def watched_agree(guess: Guess, group: Group) -> list[object]:
        begun.append(guess._begun)
        units = agree(guess, group)
        taken.append([unit.plan.name for unit in units])
        return units

    Guess.agree = watched_agree
    norms = []
    for step in range(STEPS):
        batches = oracle.split_micro_batches(oracle.random_rows([9] * rows_of[group.rank], seed=step), 1)
        made.zero_grad()
        made.forward_backward(batches, lambda m, scores: -scores.log_probs.sum() / 20, next_lr=LR)
        group.gather([], "every rank's backward pass")
        if seconds[group.rank] == 0:
            made.streams.optimizer.record().synchronize()  # all that was offered has been updated
        norms.append(made.optimizer_step())
    weights = ranks.weights(made)
    moments = [unit.exp_avg_sq.numpy().copy() for unit in made.state.units]
    made.close()
    return {"norms": norms, "weights": weights, "moments": moments, "begun": begun, "taken": taken}


def run(
    size: int, settings: dict[str, object], clip: float | None, seconds: list[float], rows: list[int]
) -> list[dict[str, object]]:
    """What each rank returns."""
    ended = ranks.run(train, size, settings, clip, seconds, rows)
    assert all(rank.error is None for rank in ended), ended
    return [rank.result for rank in ended]


def assert_same_bits(left: list[dict[str, object]], right: list[dict[str, object]]) -> None:
    for mine, other in zip(left, right, strict=True):
        assert mine["norms"] == other["norms"]
        assert all(np.array_equal(mine["weights"][name], other["weights"][name]) for name in other["weights"])
        assert all(map(np.array_equal, mine["moments"], other["moments"]))


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [(HALVES, [0, 0]), ({}, [0, 0.2]), (HALVES, [0.2, 0])],
    ids=["together", "second behind", "first behind"],
)
def test_steps_give_the_same_bits_with_and_without(settings: dict[str, object], seconds: list[float]) -> None:
    rows = [2, 1]
    together, control = run(2, settings | AHEAD, None, seconds, rows), run(2, settings, None, [0, 0], rows)
    assert_same_bits(together, control)
    everything = [f"layers.{index}" for index in reversed(range(LAYERS))]
    for rank, delay in zip(together, seconds, strict=True):
        assert rank["taken"] == [["head", *everything]] * STEPS and not control[0]["taken"]
        assert (rank["begun"] == [LAYERS + 1] * STEPS) == (delay == 0)  # who is behind goes on ahead


def disagree(group: HostGroup, name: str) -> list[str]:
    """The errors of this rank where the last rank has another `next_lr`, and where it has another `lr`."""
    settings = StreamingConfig(**AHEAD, dtype="float32", optimizer_backend="torch", cpu_threads=1)
    errors = []
    for where, own in ((group, (2 * LR, LR)), (HostGroup(name, group.rank, group.size), (LR, 2 * LR))):
        config = oracle.tiny_config("qwen2", layers=LAYERS)
        made = StreamingEngine(config, settings, AdamWConfig(clip_grad=None), device="cpu", group=where)
        next_lr, lr = own if group.rank == group.size - 1 else (LR, LR)
        batch = [oracle.pack(oracle.random_rows([9], seed=group.rank))]
        with pytest.raises((ValueError, RuntimeError)) as error:  # `RankFailed` where another rank has told it first
            for _ in range(2):
                made.zero_grad()
                made.forward_backward(batch, lambda m, scores: -scores.log_probs.sum() / 20, next_lr=next_lr)
                made.optimizer_step(lr)
        errors.append(str(error.value))
    return errors


def test_ranks_with_different_learning_rates_stop_at_once() -> None:
    for rank in ranks.run(disagree, 2, uuid.uuid4().hex):
        assert rank.error is None, rank
        assert f"different next_lr ({LR}, {2 * LR})" in rank.result[0]
        assert "(rank 0 for how many units are updated ahead, rank 1 for the start of a step)" in rank.result[1]


def test_clipped_steps_drop_what_every_rank_did_ahead() -> None:
    together, control = (run(3, each, 0.5, [0, 0.1, 0], [1, 1, 2]) for each in (HALVES | AHEAD, HALVES))
    assert_same_bits(together, control)
    assert max(control[0]["norms"]) > 0.5 and not any(rank["taken"] for rank in together)


def test_gradients_that_other_ranks_still_add_to_are_not_used_ahead() -> None:
    together, control = (run(2, each, None, [0, 0], [1, 2]) for each in (WAVES | AHEAD, WAVES))
    assert_same_bits(together, control)
    assert not any(rank["taken"] for rank in together)
