"""Shared reads of several ranks on simulated streams: whoever runs ahead, every rank gets the weights it asked for."""

import random
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from megatrain_verl.streaming.device_ring import DeviceRing, TransferCounters
from megatrain_verl.streaming.group.group import Group
from megatrain_verl.streaming.group.mailboxes import SLOTS
from megatrain_verl.streaming.group.shared_reads import SharedReads
from megatrain_verl.streaming.model_plan import ModelPlan, plan_model
from megatrain_verl.streaming.model_units import UnitPlan
from megatrain_verl.streaming.simulated_streams import SimulatedQueue, SimulatedStreams
from megatrain_verl.streaming.streams import Streams
from tests import oracle

CHUNK = 1024  # elements
ORDERS = 25
WAITS = {
    *(f"layer slot {slot} {what}" for slot in (0, 1) for what in ("free", "ready")),
    "edge slot free",
    "edge slot ready",
    "own part of the weights on the device",
    "the others' parts of the weights",
}


class Member(Group):
    """One of several ranks in this process."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Boxes:
    """Mailboxes of all ranks as one rank sees them: (receiver, slot, sender, `CHUNK`)."""

    def __init__(self, memory: Tensor, rank: int) -> None:
        self._memory, self._rank = memory, rank

    def put(self, receiver: int, slot: int, part: Tensor) -> None:
        self._memory[receiver, slot, self._rank, : part.numel()] = part

    def get(self, sender: int, slot: int, numel: int) -> Tensor:
        return self._memory[self._rank, slot, sender, :numel]

    def close(self) -> None:
        """Nothing to release."""


class Reached:
    """A mark that is reached when another rank's count is."""

    def __init__(self, counts: list[int], rank: int, rounds: int) -> None:
        self._counts, self._rank, self._rounds = counts, rank, rounds

    @property
    def done(self) -> bool:
        return self._counts[self._rank] >= self._rounds

    def query(self) -> bool:
        return self.done


class QueueCounts:
    """Counts that a simulated queue writes and waits for, as a CUDA stream does."""

    def __init__(self, counts: list[int], rank: int, queue: SimulatedQueue) -> None:
        self._counts, self._rank, self._queue = counts, rank, queue

    def write_and_wait(self, rounds: int) -> None:
        self._queue.run(partial(self._counts.__setitem__, self._rank, rounds))
        for other in range(len(self._counts)):
            self._queue.wait(Reached(self._counts, other, rounds), "the others' parts of the weights")


class Ranks(SimulatedStreams):
    """The streams of several ranks in one random order."""

    def __init__(self, size: int, seed: int, drop: str | None = None) -> None:
        super().__init__(seed, drop)
        self.of_rank = [Streams() for _ in range(size)]
        self._priority = []
        for streams in self.of_rank:
            for name in ("weight", "peers", "compute"):
                setattr(streams, name, SimulatedQueue(self))
                self._priority.append(getattr(streams, name))
        random.Random(seed).shuffle(self._priority)


def visit(ring: DeviceRing, streams: Streams, units: list[UnitPlan], arenas: dict[str, Tensor]) -> list[Tensor]:
    """Read `units` one after the other, the next one ahead, as a pass does; what computation finds in their slots."""
    found: list[Tensor] = []
    ring.load(units[0], arenas[units[0].name])
    for unit, following in zip(units, [*units[1:], None], strict=True):
        early = following is not None and ring.disjoint(unit, following)
        if early:
            ring.load(following, arenas[following.name])
        ring.use(unit)
        where = ring.slot(unit).buffer[: unit.numel]
        for _ in range(3):  # micro-batches
            streams.compute.run(lambda where=where: found.append(where.clone()))
        ring.done(unit)
        if following is not None and not early:
            ring.load(following, arenas[following.name])
    return found


def goes_wrong(plan: ModelPlan, arenas: dict[str, Tensor], all_streams: Ranks) -> bool:
    """Whether a rank finds other weights than those it asked for."""
    layers, size = plan.layers, len(all_streams.of_rank)
    units = [plan.embedding, *layers, plan.head, *reversed(layers), plan.embedding, *layers]
    memory, counts, found = torch.zeros(size, SLOTS, size, CHUNK), [0] * size, []
    for rank, streams in enumerate(all_streams.of_rank):
        ring = DeviceRing(plan, streams, TransferCounters(), "cpu", torch.float32, num_layer_slots=2)
        sent = QueueCounts(counts, rank, streams.peers)
        ring.reads = SharedReads(Member(rank, size), streams, Boxes(memory, rank), sent, CHUNK)
        found.append(visit(ring, streams, units, arenas))
    for streams in all_streams.of_rank:
        all_streams.host_wait(streams.compute.record(), "end")
    expected = [arenas[unit.name] for unit in units for _ in range(3)]
    return not all(torch.equal(*pair) for rank in found for pair in zip(rank, expected, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_every_order_is_right_and_every_wait_is_needed(size: int) -> None:
    """With two layers nothing else keeps the head out of the embedding's slot."""
    plans = [plan_model(oracle.tiny_config("qwen2", layers=layers)) for layers in (2, 4)]
    arenas = {unit.name: torch.randn(unit.numel) for plan in plans for unit in plan.units}
    waits = set()
    for seed, plan in product(range(ORDERS), plans):
        streams = Ranks(size, seed)
        assert not goes_wrong(plan, arenas, streams), f"order {seed}"
        waits |= streams.waits
    assert waits - {"end"} == WAITS
    for reason in sorted(WAITS):
        orders = product(range(ORDERS), plans)
        found = any(goes_wrong(plan, arenas, Ranks(size, seed, drop=reason)) for seed, plan in orders)
        assert found, f"nothing goes wrong without this wait: {reason}"
