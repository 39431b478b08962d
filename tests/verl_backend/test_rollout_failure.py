"""A rollout that fails ends what waits for it. tests/verl_backend/test_grpo.py kills a real vLLM in a real run."""

import asyncio
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
import zmq
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

import verl_patches
from verl_patches import rollout_failure

verl_patches.apply_all()
CALL = "the reference of the receiving call"


class Server:
    """The part of verl's rollout server that the patch uses, with an engine process that never answers."""

    replica_rank = 3

    def __init__(self, *, errored: bool, answers: bool = False) -> None:
        self.engine, self.answers = SimpleNamespace(errored=errored), answers

    async def wake_up(self, tags: list[str]) -> list[str]:
        if not self.answers:
            await asyncio.Event().wait()
        return tags

    wake_up = rollout_failure._ends_with_engine("wake_up", wake_up)


def test_a_call_to_a_dead_engine_process_raises() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="vLLM engine process of rollout replica 3 died during wake_up"):
        asyncio.run(Server(errored=True).wake_up(tags=["weights"]))
    assert time.monotonic() - start < 10
    assert asyncio.run(Server(errored=True, answers=True).wake_up(tags=["weights"])) == ["weights"]
    with pytest.raises(TimeoutError):  # it may take as long as it likes while the engine process lives
        asyncio.run(asyncio.wait_for(Server(errored=False).wake_up(tags=[]), timeout=2.5))


def test_a_cancelled_call_does_not_go_on() -> None:
    async def cancel() -> set[asyncio.Task]:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Server(errored=False).wake_up(tags=[]), timeout=0.1)
        await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(cancel()) == set()


def send(folder: Path, monkeypatch: pytest.MonkeyPatch, *, answered: int) -> None:
    """Send two buckets to a peer that answers so many messages before its call fails."""
    ended = threading.Event()
    monkeypatch.setattr(rollout_failure, "POLL_SECONDS", 0.5)
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: (calls, []) if ended.is_set() else ([], calls))

    def raise_failure(call: str) -> None:
        assert call == CALL
        raise RuntimeError("the vLLM engine process of rollout replica 0 died during collective_rpc")

    monkeypatch.setattr(ray, "get", raise_failure)
    handle = f"ipc://{folder}/weights"

    def peer() -> None:
        socket = zmq.Context.instance().socket(zmq.REP)
        socket.connect(handle)
        for _ in range(answered):
            socket.recv()
            socket.send(b"")
        socket.close()
        ended.set()

    thread = threading.Thread(target=peer, daemon=True)
    thread.start()
    sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    weights = ((name, torch.zeros(200_000)) for name in ("first", "second"))

    async def run() -> None:
        rollout_failure.receiving_call.set(CALL)
        await sender.async_send_weights(weights)

    try:
        asyncio.run(asyncio.wait_for(run(), timeout=20))
    finally:
        thread.join(timeout=10)


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_the_sender_raises_what_the_receiving_call_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    """Before it has connected, before the first bucket, and before the last."""
    names, create = [], bucketed_weight_transfer.create_shared_memory

    def named(size: int, name: str) -> SharedMemory:
        names.append(name)
        return create(size, name)

    monkeypatch.setattr(bucketed_weight_transfer, "create_shared_memory", named)
    with pytest.raises(RuntimeError, match="rollout replica 0 died"):
        send(tmp_path, monkeypatch, answered=answered)
    if answered:  # without the first answer verl has not noted its segment yet, and the process's end removes it
        assert len(names) == 1 and not Path("/dev/shm", names[0]).exists()


def test_the_sender_finishes_when_all_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(tmp_path, monkeypatch, answered=3)
