"""Several ranks on several CUDA devices of one host: the streams wait for each other's counts in shared memory."""

import numpy as np
import pytest
import torch

from megatrain_verl.streaming.group import mailboxes, read_choice
from megatrain_verl.streaming.group.cuda_driver import CudaDriverError
from megatrain_verl.streaming.group.exchange import GradientExchange
from megatrain_verl.streaming.group.group import ALONE, HostGroup
from megatrain_verl.streaming.host_memory import HostBuffer
from megatrain_verl.streaming.streams import CudaQueue, DeviceStreams
from tests.group import ranks, test_speculation
from tests.group.ranks import Task
from tests.group.test_exchange import check_sums, gradients

# As text, so that CUDA does not start where a rank imports this file: each rank sees its own device only.
pytestmark = [pytest.mark.gpu, pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices")]
TASK = Task(shares=[[0, 1, 2, 3, 5], [4]], sizes=[2, 1], device="cuda", settings={"dtype": "float32"})


def _refused(group: HostGroup, dtype: torch.dtype) -> mailboxes.Mailboxes:
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


def train_reading(group: HostGroup, together: bool) -> dict[str, object]:
    """`ranks.train`, where each weight is read once or by every rank; a layer takes several rounds."""
    read_choice.TOGETHER = together
    mailboxes.MAILBOX_BYTES, mailboxes.CHECKED = 4 * mailboxes.SLOTS * group.size * 1024, 256
    return ranks.train(group, TASK)


def test_weights_read_once_give_the_same_bits() -> None:
    full, together = (ranks.run(train_reading, 2, way) for way in (False, True))
    assert [rank.error for rank in full + together] == [None] * 4
    for left, right in zip(full, together, strict=True):
        assert left.result["results"] == right.result["results"]
        for name, value in left.result["weights"][2].items():
            assert np.array_equal(value, right.result["weights"][2][name]), name
    read = [rank.result["read"] for rank in together]
    print(f"bytes read from the host: {[rank.result['read'] for rank in full]} in full, {read} together")
    assert sum(read) == full[0].result["read"]


def read_units(group: HostGroup, mib: int) -> tuple[tuple[float, float], list[bool]]:
    """The measured bytes/s for a unit of this size, and whether each of six units read together has arrived whole."""
    buffer = HostBuffer(mib << 20, "the unit", register=True)
    source = buffer.view(torch.bfloat16)
    streams = DeviceStreams("cuda", group.wait_for)
    read_choice.TOGETHER = True
    reads = read_choice.choose_reads(group, streams, source, "cuda").reads
    rates = read_choice.rates(group, streams, reads, source, "cuda")
    arrived = []
    for seed in range(6):
        numel = source.numel() - 1000 * seed
        source[:numel].view(torch.int16).random_(generator=torch.Generator().manual_seed(seed))
        target = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        group.wait_for(reads.read("unit", target, source[:numel]), "the unit")
        arrived.append(torch.equal(target.cpu().view(torch.int16), source[:numel].view(torch.int16)))
    reads.close()
    streams.close()
    group.close()
    buffer.close()
    return rates, arrived


def test_units_read_together_arrive_whole() -> None:
    ended = ranks.run(read_units, 2, 256)
    assert [rank.error for rank in ended] == [None, None]
    full, together = (rate / 1e9 for rate in ended[0].result[0])
    print(f"each GPU gets {together:.1f} GB/s of weights read once, {full:.1f} where every rank reads all")
    assert ended[0].result[0] == ended[1].result[0]
    assert all(whole for rank in ended for whole in rank.result[1])


def train_until_reading(group: HostGroup, what: str) -> None:
    read_choice.TOGETHER = True
    ranks.train_until(group, TASK, f"{what} in reading", 1)


@pytest.mark.parametrize(("what", "message"), [("killed", "its process has ended"), ("asleep", "it stands still for")])
def test_a_bad_end_in_a_shared_read_releases_the_others(what: str, message: str) -> None:
    ended = ranks.run(train_until_reading, 2, what, victim=1, patience=8.0)
    assert ended[0].error.startswith("RankFailed: rank 1") and message in ended[0].error
    assert ended[0].seconds < 30


@pytest.mark.parametrize(("what", "message"), [("killed", "its process has ended"), ("asleep", "it stands still for")])
def test_a_bad_end_releases_the_streams_of_the_others(what: str, message: str) -> None:
    ended = ranks.run(ranks.train_until, 2, TASK, what, 1, victim=1, patience=8.0)
    assert ended[0].error.startswith("RankFailed: rank 1") and message in ended[0].error
    assert ended[0].seconds < 30
