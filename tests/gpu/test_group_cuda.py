"""Several ranks on several CUDA devices of one host: the streams wait for each other's counts in shared memory."""

import numpy as np
import pytest
import torch

from megatrain_verl.streaming.group import mailboxes
from megatrain_verl.streaming.group.cuda_driver import CudaDriverError
from megatrain_verl.streaming.group.exchange import GradientExchange
from megatrain_verl.streaming.group.group import ALONE, HostGroup
from megatrain_verl.streaming.streams import CudaQueue
from tests.group import ranks, test_speculation
from tests.group.ranks import Task
from tests.group.test_exchange import check_sums, gradients

# As text, so that CUDA does not start where a rank imports this file: each rank sees its own device only.
pytestmark = [pytest.mark.gpu, pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices")]
TASK = Task(shares=[[0, 1, 2, 3, 5], [4]], sizes=[2, 1], device="cuda", settings={"dtype": "float32"})


def _refused(group: HostGroup) -> mailboxes.Mailboxes:
    raise CudaDriverError("no access between the devices")


def reduce_all(group: HostGroup, through: str) -> tuple[str, list[np.ndarray]]:
    """The kind of mailboxes in use, and this rank's parts of the sums."""
    mailboxes.MAILBOX_BYTES = 4 * mailboxes.SLOTS * group.size * 256
    mailboxes.CHECKED = 256
    if through == "host":
        mailboxes.DeviceMailboxes = _refused
    queue = CudaQueue()
    exchange = GradientExchange(group, queue, "cuda")
    parts = []
    for gradient in gradients(group.rank):
        on_device = torch.from_numpy(gradient).cuda()
        torch.cuda.synchronize()
        part = exchange.reduce(on_device)
        group.wait_for(queue.record(), "the sum")
        parts.append(part.cpu().numpy())
    kind = type(exchange._mailboxes).__name__
    exchange.close()
    group.close()
    return kind, parts


@pytest.mark.parametrize("through", ["device", "host"])
def test_sums_are_in_rank_order(through: str) -> None:
    ended = ranks.run(reduce_all, 2, through)
    assert [rank.error for rank in ended] == [None, None]
    print([rank.result[0] for rank in ended])
    check_sums([rank.result[1] for rank in ended])


@pytest.mark.parametrize("device_adamw", [False, None])
def test_two_devices_equal_one(device_adamw: bool | None) -> None:
    backend = {"device_adamw": device_adamw, "optimizer_backend": "native"}
    task = Task(**{**vars(TASK), "settings": TASK.settings | backend})
    alone = ranks.train(ALONE, task)
    ended = ranks.run(ranks.train, 2, task)
    assert [rank.error for rank in ended] == [None, None]
    losses = np.array([[loss for loss, _ in rank.result["results"]] for rank in ended]).sum(0)
    norms = np.array([[norm for _, norm in rank.result["results"]] for rank in ended])
    assert np.allclose(losses, [loss for loss, _ in alone["results"]], rtol=1e-5)
    assert np.allclose(norms, [norm for _, norm in alone["results"]], rtol=1e-5)
    for rank in ended:
        for name, value in rank.result["weights"][2].items():
            assert np.allclose(value, alone["weights"][2][name], rtol=1e-5, atol=1e-5), name


def test_updates_ahead_of_the_norm_change_nothing() -> None:
    """What rank 1 is too slow to update ahead it goes on with when rank 0 has."""
    settings = {"optimizer_backend": "native"}
    ahead, control = (
        ranks.run(test_speculation.train, 2, settings | more, None, [0, 0.2], [2, 1], "cuda")
        for more in (test_speculation.AHEAD, {})
    )
    assert [rank.error for rank in (*ahead, *control)] == [None] * 4
    taken = [f"layers.{index}" for index in reversed(range(test_speculation.LAYERS))]
    for mine, other in zip(ahead, control, strict=True):
        assert mine.result["taken"] == [["head", *taken]] * test_speculation.STEPS
        assert np.allclose(mine.result["norms"], other.result["norms"], rtol=1e-5)
        for name, value in mine.result["weights"].items():
            assert np.allclose(value, other.result["weights"][name], rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize(("what", "message"), [("killed", "its process has ended"), ("asleep", "it stands still for")])
def test_a_bad_end_releases_the_streams_of_the_others(what: str, message: str) -> None:
    ended = ranks.run(ranks.train_until, 2, TASK, what, 1, victim=1, patience=8.0)
    assert ended[0].error.startswith("RankFailed: rank 1") and message in ended[0].error
    assert ended[0].seconds < 30
