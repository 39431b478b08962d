"""A rank that dies, stands still or fails: the others name it soon, and nothing is left behind."""

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain_verl.streaming.group import group as group_module
from megatrain_verl.streaming.group.control import ControlPage, Counter
from megatrain_verl.streaming.group.group import ALONE, HostGroup
from megatrain_verl.streaming.group.liveness import Liveness
from tests.group import ranks
from tests.group.ranks import Task

THREE = Task(shares=[[0, 1], [2, 3], [4, 5]])
WHAT = {
    "killed": "its process has ended",
    "stopped": "its process has not run for 3 s",
    "asleep": "it stands still for",
    "error": "ZeroDivisionError: what cannot be computed",
    "error in AdamW": "ZeroDivisionError: what cannot be computed",
    "asleep in AdamW": "it stands still for",
    "asleep in exchange": "it stands still for",
    "asleep in forward": "it stands still for",
    "stopped in AdamW": "its process has not run for 3 s",
    "stopped in exchange": "its process has not run for 3 s",
    "refused": "outside the vocabulary",
}
AT_ONCE = ("killed", "error", "refused")  # noticed without patience


def processes_that_map(name: str) -> list[str]:
    """Numbers of the processes that hold memory of the group `name`."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            found += [maps.parent.name] if name in maps.read_text() else []
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is another user's
            continue
    return found


@pytest.mark.parametrize(
    ("what", "victim"),
    [
        ("killed", 0),
        ("killed", 1),
        ("stopped", 1),
        ("asleep", 0),
        ("error", 1),
        ("refused", 2),
        ("error in AdamW", 1),
        ("asleep in AdamW", 1),
        pytest.param("asleep in AdamW", 0, marks=pytest.mark.slow),
        pytest.param("asleep in exchange", 1, marks=pytest.mark.slow),
        pytest.param("asleep in forward", 1, marks=pytest.mark.slow),
        pytest.param("stopped in AdamW", 1, marks=pytest.mark.slow),
        pytest.param("stopped in exchange", 0, marks=pytest.mark.slow),
    ],
)
def test_a_bad_end_is_named_by_all_others_and_the_next_run_starts_at_once(what: str, victim: int) -> None:
    name = uuid.uuid4().hex
    patience = 60.0 if what.split()[0] in AT_ONCE else 3.0
    ended = ranks.run(ranks.train_until, 3, THREE, what, victim, victim=victim, patience=patience, name=name)
    for rank in {0, 1, 2} - {victim}:
        assert ended[rank].seconds < 30, ended[rank]
        assert ended[rank].error.startswith(f"RankFailed: rank {victim} (process "), ended[rank]
        assert WHAT[what] in ended[rank].error
    assert not processes_that_map(name) and not any(name in entry for entry in os.listdir("/dev/shm"))
    if what == "killed" and victim == 0:  # the same name can be used again
        assert [rank.error for rank in ranks.run(ranks.train, 2, Task(), 1, name=name)] == [None, None]


@pytest.mark.parametrize(
    ("end", "message", "pieces", "longest"),
    [
        ("leaves", "it has ended, and rank 0 waits for", 12, 3600.0),
        ("hangs", r"it stands still for \d+ s, and rank 0 waits for the second", 0, 3600.0),
        ("goes on", r"rank 0 has waited \d+ s for", 0, 5.0),
    ],
)
def test_a_missing_update_is_waited_for_while_its_rank_goes_on(
    end: str, message: str, pieces: int, longest: float
) -> None:
    waiting, _ = ranks.run(ranks.wait_for_updates, 2, end, message, pieces, longest, victim=1, patience=3.0)
    assert waiting.error is None, waiting
    assert waiting.result >= pieces * 0.5  # longer than the patience with a training thread that stands still


def test_a_rank_that_waits_for_its_device_is_waited_for_while_that_goes_on() -> None:
    slow = ranks.run(ranks.wait_for_device, 2, 12, 0.0, patience=3.0)
    assert [rank.error for rank in slow] == [None, None] and min(rank.result for rank in slow) > 5
    hung = ranks.run(ranks.wait_for_device, 2, 0, 100.0, victim=1, patience=3.0)
    assert hung[0].error.startswith("RankFailed: rank 1 (process ") and "it stands still for" in hung[0].error
    assert hung[0].seconds < 30  # the patience is 3 s, the device hangs for 100


def test_a_stopped_rank_is_found_by_one_that_does_not_wait_for_it() -> None:
    ended = ranks.run(ranks.work_alone, 2, victim=1, patience=2.0)
    assert ended[0].error.startswith("RankFailed: rank 1 (process ") and "has not run for 2 s" in ended[0].error


def test_a_rank_that_waits_for_a_file_is_waited_for() -> None:
    waited = ranks.run(ranks.read_slowly, 2, 5.0, patience=2.0)
    assert [rank.error for rank in waited] == [None, None] and min(rank.result for rank in waited) > 4.9


def test_an_error_of_the_device_is_told_by_the_rank_that_has_it() -> None:
    for rank in ranks.run(ranks.lose_device, 2, patience=60.0):
        assert rank.seconds < 30, rank
        assert rank.error.startswith("RankFailed: rank 1 (process "), rank
        assert rank.error.endswith("RuntimeError: an illegal memory access was encountered"), rank


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "exchange", "AdamW"])
def test_a_rank_that_hangs_is_named_within_a_minute(where: str) -> None:
    ended = ranks.run(ranks.train_until, 2, Task(), f"asleep in {where}", 1, victim=1)
    assert "rank 1" in ended[0].error and "stands still" in ended[0].error
    assert ended[0].seconds < 60  # the patience of 20 s, and what of the step a busy machine takes before


def test_a_stopped_process_is_told_from_one_that_stands_still_before_the_patience_is_over() -> None:
    file = os.memfd_create("control")
    page, other = ControlPage(file, 0, 2), ControlPage(file, 1, 2)
    liveness = Liveness(page, {}, patience=2.0, rank=0, size=2)
    try:
        _wait_until(lambda: liveness.unchanged_seconds(Counter.BEATS, 1) > 1.0)
        assert liveness.idle(Counter.ACTIVITY, 1) == "its process has not run for 2 s"
        other.add(Counter.BEATS)
        _wait_until(lambda: liveness.unchanged_seconds(Counter.BEATS, 1) < 1.0)
        assert liveness.idle(Counter.ACTIVITY, 1).startswith("it stands still for ")
    finally:
        liveness.close()
        os.close(file)


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(group_module.RankFailed, match=r"ranks \[1, 2\] of 3 have not come in time"):
        HostGroup(uuid.uuid4().hex, 0, 3, timeout=0.3)
    with pytest.raises(group_module.RankFailed, match="rank 0 of 3 has not come in time"):
        HostGroup(uuid.uuid4().hex, 2, 3, timeout=0.3)


def test_ranks_of_different_models_refuse_each_other() -> None:
    task = Task(own_settings={1: {"dtype": "bfloat16"}})
    ended = ranks.run(ranks.train, 2, task)
    assert all("ValueError: the ranks have different models or options" in rank.error for rank in ended)


def test_too_little_host_memory_is_refused_by_all_ranks() -> None:
    ended = ranks.run(ranks.train, 2, Task(settings={"host_memory_gb": 1e-3}))
    assert all("ValueError" in rank.error and "GiB are available (host_memory_gb)" in rank.error for rank in ended)


def test_weights_that_cannot_be_loaded_end_all_ranks() -> None:
    ended = ranks.run(ranks.load_nothing, 2)
    assert ended[0].error.startswith("ValueError")
    assert ended[1].error.startswith("RankFailed: rank 0") and "ValueError" in ended[1].error


def test_ranks_on_the_same_cores_divide_them() -> None:
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2 or 1
    for own, expected in (([cores, cores], [half, half]), ([cores, cores[:half]], [len(cores), half])):
        taken = ranks.run(ranks.share_cores, 2, [set(mask) for mask in own])
        assert [rank.result for rank in taken] == expected


def test_one_process_alone_waits_for_nobody() -> None:
    assert ALONE.gather([3.0], "nothing") == [[3.0]]
    with ALONE.by_first("nothing") as mine:
        assert mine
