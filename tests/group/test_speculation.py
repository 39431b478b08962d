"""Several ranks with AdamW ahead of the norm: the same bits as without, however far each rank gets ahead."""

import math
import time
import uuid
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from megatrain_verl.config import AdamWConfig, StreamingConfig
from megatrain_verl.streaming.batch import TokenOutputs
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.group.group import Group, HostGroup
from megatrain_verl.streaming.model_plan import plan_model
from megatrain_verl.streaming.speculation import Guess
from tests import oracle
from tests.group import ranks
from tests.group.test_shared_reads import read_together

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
    nan_at: tuple[int, int] | None = None,
    folder: str | None = None,
    read_once: bool = False,
) -> dict[str, object]:
    """Steps in which rank r updates no unit ahead in less than `seconds[r]`, and has `rows_of[r]` rows.

    `nan_at` is a step and the rank in which its loss is not a number. The state goes to `folder` as soon as the last
    step has begun. With `read_once` each rank reads its part of the weights.
    """
    if read_once:
        read_together(group.size)
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
        scale = math.nan if nan_at == (step, group.rank) else -1 / 20
        made.forward_backward(batches, partial(loss, scale), next_lr=LR)
        group.gather([], "every rank's backward pass")
        if seconds[group.rank] == 0:
            made.streams.optimizer.record().synchronize()  # all that was offered has been updated
        norms.append(made.optimizer_step())
    if folder is not None:
        made.save(folder)
    for unit in made.state.units:
        made._wait_updated(unit, "the end")
    weights = ranks.weights(made)
    moments = [unit.exp_avg_sq.numpy().copy() for unit in made.state.units]
    made.close()
    read = made.counters.h2d_bytes
    return {"norms": norms, "read": read, "weights": weights, "moments": moments, "begun": begun, "taken": taken}


def loss(scale: float, m: int, scores: TokenOutputs) -> Tensor:
    return scale * scores.log_probs.sum()


def run(
    size: int, settings: dict[str, object], clip: float | None, seconds: list[float], rows: list[int], *more: object
) -> list[dict[str, object]]:
    """What each rank returns from `train`; `more` are its arguments behind the device."""
    ended = ranks.run(train, size, settings, clip, seconds, rows, "cpu", *more)
    assert all(rank.error is None for rank in ended), ended
    return [rank.result for rank in ended]


def assert_same_bits(left: list[dict[str, object]], right: list[dict[str, object]]) -> None:
    for mine, other in zip(left, right, strict=True):
        assert np.array_equal(mine["norms"], other["norms"], equal_nan=True)
        assert all(np.array_equal(mine["weights"][name], other["weights"][name]) for name in other["weights"])
        assert all(map(np.array_equal, mine["moments"], other["moments"]))


EVERYTHING = ["head", *(f"layers.{index}" for index in reversed(range(LAYERS)))]


def assert_taken(found: list[dict[str, object]], units: list[str], steps: int, seconds: list[float]) -> None:
    """In each of `steps` steps `units` were updated ahead, though who is behind had not begun all of them."""
    for rank, delay in zip(found, seconds, strict=True):
        assert rank["taken"] == [units] * steps
        assert (rank["begun"] == [len(units)] * steps) == (delay == 0)


@pytest.mark.parametrize("read_once", [False, True], ids=["read in full", "read once"])
def test_steps_give_the_same_bits_with_and_without(read_once: bool) -> None:
    seconds, rows = [0.2 * read_once, 0], [2, 1]
    together = run(2, HALVES | AHEAD, None, seconds, rows, None, None, read_once)
    control = run(2, HALVES, None, [0, 0], rows)
    assert_same_bits(together, control)
    assert_taken(together, EVERYTHING, STEPS, seconds)
    assert not control[0]["taken"]
    assert (max(rank["read"] for rank in together) < 0.75 * control[0]["read"]) == read_once


def test_one_rank_without_a_finite_gradient_skips_the_step_in_all() -> None:
    seconds, rows, nan_at = [0, 0.3], [2, 1], (1, 1)
    plan = plan_model(oracle.tiny_config("qwen2", layers=LAYERS))
    room = {"speculative_adamw_gb": 12 * sum(plan.unit_sizes[-3:]) / 2**30}  # for the head and two of the layers
    together, control = run(2, room, None, seconds, rows, nan_at), run(2, {}, None, [0, 0], rows, nan_at)
    assert np.isnan(control[0]["norms"]).tolist() == [False, True, False, False]
    assert_same_bits(together, control)
    assert_taken(together, EVERYTHING[:3], STEPS - 1, seconds)


def test_a_state_saved_while_a_rank_is_behind_is_that_of_the_step(tmp_path: Path) -> None:
    saved = run(2, AHEAD, None, [0, 0.2], [1, 1], None, str(tmp_path / "state"))
    assert_taken(saved, EVERYTHING, STEPS, [0, 0.2])
    config = oracle.tiny_config("qwen2", layers=LAYERS)
    alone = oracle.make_engine(oracle.plain_model(config), config, AdamWConfig(clip_grad=None), **AHEAD)
    alone.load(tmp_path / "state")
    found = [{"norms": saved[0]["norms"], "weights": ranks.weights(alone)}]
    found[0]["moments"] = [unit.exp_avg_sq.numpy().copy() for unit in alone.state.units]
    assert_same_bits(found, saved[:1])
    alone.close()


def end_badly(group: HostGroup, what: str) -> None:
    """The second rank does so: "killed" in its third update ahead, or with an error while the ranks agree."""
    config = oracle.tiny_config("qwen2", layers=LAYERS)
    settings = StreamingConfig(**AHEAD, dtype="float32", optimizer_backend="torch", cpu_threads=1)
    made = StreamingEngine(config, settings, AdamWConfig(lr=LR, clip_grad=None), device="cpu", group=group)
    update = made._updates._adamw.update

    def bad_update(unit: object, step: object, **where: object) -> None:
        if "into" in where and unit.plan.name == EVERYTHING[2]:
            ranks._end_badly(what)
        update(unit, step, **where)

    if group.rank == 1 and what == "killed":
        made._updates._adamw.update = bad_update
    elif group.rank == 1:
        Guess.agree = lambda guess, group: ranks._end_badly(what)
    ranks._begin()
    for step in range(2):
        made.zero_grad()
        batch = [oracle.pack(oracle.random_rows([9], seed=step))]
        made.forward_backward(batch, partial(loss, -1 / 20), next_lr=LR)
        made.optimizer_step()


@pytest.mark.parametrize(
    ("what", "message"), [("killed", "its process has ended"), ("error", "ZeroDivisionError: what cannot be computed")]
)
def test_a_rank_that_ends_badly_ahead_of_the_norm_is_named(what: str, message: str) -> None:
    waiting, _ = ranks.run(end_badly, 2, what, victim=1, patience=60.0)
    assert waiting.error.startswith("RankFailed: rank 1 (process ") and message in waiting.error
    assert waiting.seconds < 30


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
                made.forward_backward(batch, partial(loss, -1 / 20), next_lr=next_lr)
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
