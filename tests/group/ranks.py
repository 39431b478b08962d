"""Ranks as processes of their own, and the work that they do in the tests of this folder."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatrain_verl.config import AdamWConfig, LoraSettings, StreamingConfig
from megatrain_verl.streaming.batch import TokenOutputs
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.group import group as group_module
from megatrain_verl.streaming.group.group import ALONE, Group, HostGroup
from megatrain_verl.streaming.streams import ThreadQueue
from tests import oracle

# Forked from a process that has imported everything and runs no threads.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])
LIMIT = 120  # seconds for the ranks of one test
STEPS = 5
_began = 0.0  # when this rank began with what its test measures


@dataclass
class Ended:
    """How a rank ended: its result, or its error (class and message), so many seconds after `_begin`."""

    result: object = None
    error: str | None = None
    seconds: float = 0.0
    exit_code: int | None = None


def run(
    work: Callable[..., object],
    size: int,
    *arguments: object,
    victim: int | None = None,
    patience: float = 20.0,
    name: str = "",
) -> list[Ended]:
    """`work(group, *arguments)` in each of `size` ranks; no process is left when this returns.

    `victim` is not waited for.
    """
    name = name or uuid.uuid4().hex
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        CONTEXT.Process(target=_rank, args=(pipes[rank][1], name, rank, size, patience, work, arguments))
        for rank in range(size)
    ]
    ended = [Ended() for _ in ranks]
    try:
        for rank in ranks:
            rank.start()
        for _, sender in pipes:
            sender.close()
        deadline = time.monotonic() + LIMIT
        for rank, (receiver, _) in enumerate(pipes):
            if rank != victim and receiver.poll(max(0.0, deadline - time.monotonic())):
                ended[rank] = receiver.recv()
    finally:
        for rank, process in enumerate(ranks):
            process.join(0 if rank == victim else 5)
            if process.is_alive():
                process.kill()
                process.join()
            ended[rank].exit_code = process.exitcode
    return ended


def _rank(
    sender: multiprocessing.connection.Connection,
    name: str,
    rank: int,
    size: int,
    patience: float,
    work: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    # CUDA has not started in this process. See `process_env.py` for the connections.
    os.environ.update(CUDA_VISIBLE_DEVICES=str(rank), CUDA_DEVICE_MAX_CONNECTIONS="32")
    _begin()
    try:
        group = HostGroup(name, rank, size, timeout=60, patience=patience)
        sender.send(Ended(work(group, *arguments), seconds=time.monotonic() - _began))
    except Exception as error:
        traceback.print_exc()
        sender.send(Ended(error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - _began))


def _begin() -> None:
    """What came before takes no part in `Ended.seconds`: a busy machine is slow to start."""
    global _began
    _began = time.monotonic()


@dataclass
class Task:
    """Training of a tiny model: which rows a step has, and which of them each rank gets in how large micro-batches."""

    family: str = "qwen2"
    tied: bool = False
    dropout: float = 0.0  # of the attention's weights
    # Numbers of the rows of each rank, and rows per micro-batch.
    shares: list[list[int]] = field(default_factory=lambda: [[0, 1, 2], [3, 4, 5]])
    sizes: list[int] = field(default_factory=lambda: [1, 1, 1])
    settings: dict[str, object] = field(default_factory=dict)
    # Settings of single ranks.
    own_settings: dict[int, dict[str, object]] = field(default_factory=dict)
    keep_reference: bool = False
    device: str = "cpu"
    lora: LoraSettings | None = None


LENGTHS = [11, 5, 20, 9, 3, 14]


def engine(task: Task, group: Group = ALONE) -> StreamingEngine:
    """An engine with the weights of the oracle's model."""
    config = oracle.tiny_config(task.family, tied=task.tied, attention_dropout=task.dropout)
    settings = {"dtype": "float32", "optimizer_backend": "torch", "head_chunk_tokens": 7, "cpu_threads": 1}
    settings |= task.settings | task.own_settings.get(group.rank, {})
    made = StreamingEngine(
        config,
        StreamingConfig(**settings),
        # AdamW makes a tiny gradient's rounding a share of its step: 1e-3 does not leave 1e-6 on every CPU.
        AdamWConfig(lr=1e-4),
        device=task.device,
        keep_reference=task.keep_reference,
        group=group,
        lora=task.lora,
    )
    made.load_weights(oracle.plain_model(config).state_dict().items())
    return made


def train_step(made: StreamingEngine, step: int, rows_per_micro_batch: int, share: list[int]) -> tuple[float, float]:
    """(this rank's part of the loss, norm) of the mean over all next tokens of the step."""
    rows = oracle.random_rows(LENGTHS, seed=step)
    tokens = sum(len(row) - 1 for row in rows)
    batches = oracle.split_micro_batches([rows[number] for number in share], rows_per_micro_batch)
    losses: list[float] = []

    def loss_fn(m: int, scores: TokenOutputs) -> Tensor:
        loss = -torch.cat(oracle.engine_log_probs([scores], [batches[m]])).sum() / tokens
        losses.append(loss.item())
        return loss

    made.zero_grad()
    made.forward_backward(batches, loss_fn)
    return sum(losses), made.optimizer_step()


def weights(made: StreamingEngine) -> dict[str, np.ndarray]:
    """All masters, by name."""
    return {name: value.numpy().copy() for name, value in oracle.masters(made).items()}


def train(group: Group, task: Task, steps: int = STEPS) -> dict[str, object]:
    """Losses, norms and the weights at the start, after step 2 and at the end."""
    made = engine(task, group)
    results: list[tuple[float, float]] = []
    kept = [weights(made)]
    share = task.shares[group.rank] if group.size > 1 else sorted(sum(task.shares, []))
    for step in range(steps):
        results.append(train_step(made, step, task.sizes[group.rank], share))
        if step in (1, steps - 1):
            kept.append(weights(made))
    shared = None if group.arenas is None else group.arenas.nbytes
    planned = made.host_plan.bytes_by_kind
    made.close()
    read = made.counters.h2d_bytes
    return {"results": results, "weights": kept, "shared": shared, "planned": planned, "read": read}


def train_until(group: Group, task: Task, what: str, victim: int) -> None:
    """Train; `victim` comes to a bad end in the second step: in `where`, or in its loss."""
    made = engine(task, group)
    train_step(made, 0, 1, task.shares[group.rank])
    _begin()
    what, _, where = what.partition(" in ")
    if where and group.rank == victim:
        owner, name = PLACES[where](made)
        setattr(owner, name, lambda *arguments, **keywords: _end_badly(what))

    def loss_fn(m: int, scores: TokenOutputs) -> Tensor:
        if group.rank == victim and not where:
            _end_badly(what)
        return scores.log_probs.sum()

    rows = oracle.random_rows([5])
    if what == "refused" and group.rank == victim:
        rows[0][0] = oracle.VOCAB
    made.zero_grad()
    made.forward_backward([oracle.pack(rows)], loss_fn)
    made.optimizer_step()
    made.forward([oracle.pack(rows)])


# Where a rank can be made to end badly: an object, and its method that does so.
PLACES: dict[str, Callable[[StreamingEngine], tuple[object, str]]] = {
    "forward": lambda made: (made._functions, "layer"),
    "reading": lambda made: (made.agreement.choice.reads._mailboxes, "put"),
    "exchange": lambda made: (made._gradients._exchange._mailboxes, "put"),
    "AdamW": lambda made: (made._updates._adamw._kernel._kernel, "update"),
}


def _end_badly(what: str) -> None:
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what in ("stopped", "asleep"):
        if what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)  # this thread may run on for a moment
        time.sleep(1000)
    raise ZeroDivisionError("what cannot be computed")


def checkpointed(group: Group, task: Task, folder: str, action: str) -> dict[str, object]:
    """Three steps and a save; or, from that, two more."""
    made = engine(task, group)
    share = task.shares[group.rank] if group.size > 1 else sorted(sum(task.shares, []))
    if action == "resume":
        made.load(Path(folder))
    steps = range(3, STEPS) if action == "resume" else range(3)
    results = [train_step(made, step, 1, share) for step in steps]
    reference = _reference_scores(made)
    if action == "save":
        made.save(Path(folder), {"rank": group.rank})
    kept = weights(made)
    made.close()
    return {"results": results, "weights": kept, "reference": reference, "step_count": made.step_count}


def _reference_scores(made: StreamingEngine) -> list[float]:
    with made.reference_weights():
        (scores,) = made.forward([oracle.pack(oracle.random_rows([9], seed=99))])
    return scores.log_probs.tolist()


def wait_for_updates(group: HostGroup, end: str, message: str, pieces: int, longest: float) -> float:
    """Rank 1 updates its part of one unit in pieces of 0.5 s, while its training thread sleeps, and leaves or hangs.

    Where its updates hang, its training thread does other work.
    Rank 0 waits for that unit and for a second one.

    Returns:
        For how many seconds rank 0 has waited for the first unit.
    """
    group_module.LONGEST_WAIT = longest
    slow = ThreadQueue("slow updates")
    group.follow(slow.finished)
    start = time.monotonic()  # before rank 1 begins
    group.gather([], "the test")
    if group.rank == 1:
        _append(slow, [0.5] * pieces)
        slow.run(group.updated)
        if end == "goes on":
            _append(slow, [0.5] * LIMIT)
            time.sleep(LIMIT)
        while end == "hangs" and time.monotonic() < start + LIMIT:
            pass
        slow.close()
        group.close()
        return 0.0
    group.wait_updated(1, "the first unit")
    waited = time.monotonic() - start
    with pytest.raises(group_module.RankFailed, match=message):
        group.wait_updated(2, "the second unit")
    return waited


def wait_for_device(group: HostGroup, pieces: int, last: float) -> float:
    """Rank 1 waits for its own queue: `pieces` of 0.5 s, and one of `last` seconds. Rank 0 waits for rank 1.

    Returns:
        For how many seconds the rank has waited.
    """
    device = ThreadQueue("device")
    group.follow(device.finished)
    start = time.monotonic()  # before rank 1 begins
    group.gather([], "the test")
    if group.rank == 1:
        _append(device, [0.5] * pieces + [last])
        group.wait_for(device.record(), "outputs computed")
    group.gather([], "the next step")
    return time.monotonic() - start


def work_alone(group: HostGroup) -> None:
    """Rank 1 is stopped while rank 0 works for itself and waits for nobody."""
    if group.rank == 1:
        _end_badly("stopped")
    end = time.monotonic() + 30
    while time.monotonic() < end:
        group.check()
        time.sleep(0.01)


def read_slowly(group: HostGroup, seconds: float) -> float:
    """The first rank's file system stands still for so long; how long this rank has waited for it."""
    start = time.monotonic()
    with group.by_first("the weights") as mine:
        if mine:
            time.sleep(seconds)
    return time.monotonic() - start


def share_cores(group: HostGroup, own: list[set[int]]) -> int:
    """How many of its cores each rank takes, where rank r may run on the cores `own[r]`."""
    os.sched_setaffinity(0, own[group.rank])
    return group.cores()


def lose_device(group: HostGroup) -> None:
    """The work of rank 1's queues cannot be counted any more, as after an error of its device. All wait for all."""

    def finished() -> int:
        raise RuntimeError("an illegal memory access was encountered")

    if group.rank == 1:
        group.follow(finished)
    group.wait(lambda: False, lambda: [], "the test")


def _append(queue: ThreadQueue, seconds: list[float]) -> None:
    for each in seconds:
        queue.run(partial(time.sleep, each))


def exported_names(group: Group, config: PretrainedConfig, folder: str) -> list[str]:
    """Names under which the weights of `folder` are exported."""
    made = StreamingEngine(config, StreamingConfig(), None, device="cpu", group=group)
    made.load_weights(folder)
    names = [name for name, _ in made.named_weights()]
    made.close()
    return names


def load_nothing(group: Group) -> None:
    """Weights without any tensor."""
    made = StreamingEngine(oracle.tiny_config("qwen2"), StreamingConfig(), None, device="cpu", group=group)
    made.load_weights([])
