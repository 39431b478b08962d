"""Ranks that read weights together, each its part, compute the same bits as ranks that read all of them."""

import time
import uuid

import numpy as np
import pytest

from megatrain_verl.config import LoraSettings
from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.group import mailboxes, read_choice
from megatrain_verl.streaming.group.group import Group, HostGroup
from megatrain_verl.streaming.pass_plan import PassPlan, PassPlanner
from tests import oracle
from tests.group import ranks
from tests.group.ranks import Task

TASKS = {
    "uneven shares of a tied model": Task(tied=True, shares=[[0, 1, 2, 3, 5], [4]]),
    "different micro-batches": Task(
        family="qwen3", shares=[[0, 2, 4, 5], [1, 3]], sizes=[1, 2], settings={"dtype": "bfloat16"}
    ),
    "three ranks": Task(shares=[[5, 0], [1, 2], [3, 4]], lora=LoraSettings(rank=4), keep_reference=True),
    "two waves": Task(
        shares=[[0, 2], [1, 3, 4, 5]], settings={"wave_tokens": 24, "checkpoint_interval": 2}, sizes=[1, 2]
    ),
    "lean, parts frozen": Task(settings={"resident_layers": 0, "freeze": ["*.mlp.*", "*norm*"]}),
}
DIFFERENT_WAVES = Task(
    shares=[[0, 1, 2, 3], [4, 5]], settings={"wave_tokens": 40}, own_settings={0: {"wave_tokens": 20}}
)


def read_together(size: int, chunk: int = 1024) -> None:
    """From now on, in this process, in chunks of so many elements: of 1024 a layer takes several rounds."""
    read_choice.TOGETHER = True
    mailboxes.MAILBOX_BYTES = 4 * mailboxes.SLOTS * size * chunk


def train_both_ways(group: HostGroup, task: Task, name: str) -> list[dict[str, object]]:
    """What `ranks.train` returns where each rank reads all, and where they read together."""
    full = ranks.train(group, task, steps=3)
    read_together(group.size)
    return [full, ranks.train(HostGroup(name, group.rank, group.size), task, steps=3)]


def same(left: dict[str, object], right: dict[str, object]) -> bool:
    """Whether losses, norms and weights are the same bits."""
    pairs = zip(left["weights"], right["weights"], strict=True)
    weights = all(np.array_equal(one[name], other[name]) for one, other in pairs for name in one)
    return left["results"] == right["results"] and weights


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_the_same_bits_come_from_one_read_of_every_weight(task: Task) -> None:
    ended = ranks.run(train_both_ways, len(task.shares), task, uuid.uuid4().hex)
    assert [rank.error for rank in ended] == [None] * len(ended)
    for rank in ended:
        assert same(*rank.result)
    # Each rank alone has read all that all ranks have read together.
    full, together = ([rank.result[way]["read"] for rank in ended] for way in (0, 1))
    assert sum(together) == full[0] and max(together) < 0.75 * full[0]


def test_ranks_with_different_waves_read_in_full() -> None:
    ended = ranks.run(train_both_ways, 2, DIFFERENT_WAVES, uuid.uuid4().hex)
    for rank in ended:
        full, together = rank.result
        assert same(full, together) and full["read"] == together["read"]


class OwnPlanner(PassPlanner):
    """Has room for as many slots and kept layers as it was told."""

    own: PassPlan

    def plan(self, micro_batches: list[MicroBatch], own_bytes: int) -> PassPlan:
        return self.own


def train_with_plans(group: Group, plans: list[PassPlan]) -> tuple[list[int], list[int], list[tuple[float, float]]]:
    """Layer slots and bytes read in each step, and the results; before each step only the first rank scores a row."""
    if group.size > 1:
        read_together(group.size)
    made = ranks.engine(Task(family="llama"), group)
    made.planner = OwnPlanner(made.plan, made.config, "cpu")
    made.planner.own = plans[group.rank]
    slots, read, results = [], [], []
    for step in range(3):
        if group.rank == 0:
            made.forward([oracle.pack(oracle.random_rows([5]))])
        before = made.counters.h2d_bytes
        results.append(ranks.train_step(made, step, 1, [[0, 1, 2], [3, 4, 5]][group.rank]))
        read.append(made.counters.h2d_bytes - before)
        slots.append(len(made._ring.layer_slots))
    made.close()
    return slots, read, results


def test_ranks_agree_on_the_fewest_slots_and_kept_layers() -> None:
    common = PassPlan((3,), layer_slots=3, kept_layers=1)
    expected = ranks.run(train_with_plans, 2, [common, common])
    plans = [PassPlan((3,), layer_slots=4, kept_layers=1), PassPlan((3,), layer_slots=3, kept_layers=2)]
    ended = ranks.run(train_with_plans, 2, plans)
    assert [rank.error for rank in ended] == [None, None]
    assert [rank.result for rank in ended] == [rank.result for rank in expected]
    assert ended[0].result[0] == [3, 3, 3]


def train_behind_slow_updates(group: HostGroup, task: Task, delay: float) -> list[tuple[float, float]]:
    """Losses and norms of four steps, in which the last rank needs `delay` seconds for the AdamW of each unit.

    A rank reads its part of a unit at once, and waits for the others' parts of no chunk before.
    """
    read_together(group.size, chunk=1 << 14)
    made = ranks.engine(task, group)
    update = made._updates._adamw.update

    def slow(*arguments: object, **keywords: object) -> None:
        time.sleep(delay)
        update(*arguments, **keywords)

    if group.rank == group.size - 1:
        made._updates._adamw.update = slow
    results = [ranks.train_step(made, step, 1, task.shares[group.rank]) for step in range(4)]
    made.close()
    return results


def test_no_part_is_sent_before_all_ranks_have_updated_the_unit() -> None:
    # With frozen parameters a rank reads and sends weights that another rank has updated.
    task = Task(settings={"freeze": ["*.mlp.*", "*norm*"]})
    quick, slow = (ranks.run(train_behind_slow_updates, 2, task, delay) for delay in (0.0, 0.05))
    assert [rank.error for rank in quick + slow] == [None] * 4
    assert [rank.result for rank in slow] == [rank.result for rank in quick]


def train_until(group: HostGroup, task: Task, what: str, victim: int) -> None:
    read_together(group.size)
    ranks.train_until(group, task, f"{what} in reading", victim)


@pytest.mark.parametrize(("what", "message"), [("killed", "its process has ended"), ("asleep", "it stands still for")])
def test_a_rank_that_ends_badly_in_a_shared_read_is_named(what: str, message: str) -> None:
    task = Task(shares=[[0, 1], [2, 3], [4, 5]])
    patience = 60.0 if what == "killed" else 3.0
    ended = ranks.run(train_until, 3, task, what, 1, victim=1, patience=patience)
    for rank in (0, 2):
        assert ended[rank].error.startswith("RankFailed: rank 1 (process ") and message in ended[rank].error
        assert ended[rank].seconds < 30


def lose_count(group: HostGroup) -> None:
    """One rank believes that it has read a unit more."""
    read_together(group.size)
    made = ranks.engine(Task(), group)
    ranks.train_step(made, 0, 1, [0])
    made.agreement.choice.reads.history += group.rank
    ranks.train_step(made, 1, 1, [0])


def test_ranks_that_have_not_read_the_same_units_stop() -> None:
    for rank in ranks.run(lose_count, 2):
        assert "the ranks have not read the same weights together" in rank.error


def measure(group: HostGroup) -> tuple[float, float]:
    """What this rank gets of the measurement; a step with what it has left behind."""
    read_together(group.size)
    read_choice.MEASURED_BYTES, read_choice.REPEATS = 1 << 14, 2
    made = ranks.engine(Task(), group)
    found = read_choice.rates(group, made.streams, made.agreement.choice.reads, made.state.units[0].weight, "cpu")
    ranks.train_step(made, 0, 1, [0])
    made.close()
    return found


def test_all_ranks_get_the_same_rates_to_choose_by() -> None:
    first, second = [rank.result for rank in ranks.run(measure, 2)]
    assert first == second and min(first) > 0
