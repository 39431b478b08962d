"""Sums of gradients over ranks: every element once, in rank order, whatever the sizes."""

import time

import numpy as np
import pytest
import torch

from megatrain_verl.streaming.group import mailboxes
from megatrain_verl.streaming.group.exchange import GradientExchange
from megatrain_verl.streaming.group.group import HostGroup, part_of
from megatrain_verl.streaming.streams import InlineQueue
from tests.group import ranks

NUMELS = [128, 5 * 128, 40 * 128, 1000, 7]


def gradients(rank: int) -> list[np.ndarray]:
    """Values of very different size, so that another order of additions gives other bits."""
    generator = np.random.default_rng(rank)
    return [
        (generator.standard_normal(numel) * 10.0 ** generator.integers(-6, 6, numel)).astype(np.float32)
        for numel in NUMELS
    ]


class SlowReader(GradientExchange):
    """Takes its time before it reads what the others have sent."""

    def _add(self, own: torch.Tensor, slot: int) -> None:
        time.sleep(0.01)
        super()._add(own, slot)


def reduce_all(group: HostGroup) -> list[np.ndarray]:
    """This rank's parts of the sums; mailboxes of 256 elements, so that most units take several rounds.

    The last rank reads slowly, and the others may not write over what it has not read.
    """
    mailboxes.MAILBOX_BYTES = 4 * mailboxes.SLOTS * group.size * 256
    kind = SlowReader if group.rank == group.size - 1 else GradientExchange
    exchange = kind(group, InlineQueue(), "cpu")
    parts = [exchange.reduce(torch.from_numpy(gradient)).numpy().copy() for gradient in gradients(group.rank)]
    exchange.close()
    group.close()
    return parts


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_together_are_the_sum_in_rank_order(size: int) -> None:
    check_sums([ended.result for ended in ranks.run(reduce_all, size)])


def check_sums(results: list[list[np.ndarray]]) -> None:
    """Compare the parts of all ranks with the sums, bit for bit."""
    size = len(results)
    for number in range(len(NUMELS)):
        expected = gradients(0)[number]
        for rank in range(1, size):
            expected = expected + gradients(rank)[number]
        assert np.array_equal(np.concatenate([result[number] for result in results]), expected)


@pytest.mark.parametrize("numel", [1, 128, 1000, 128 * 9, 233_000_064])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_parts_cover_a_unit_once(numel: int, size: int) -> None:
    bounds = [part_of(numel, rank, size) for rank in range(size)]
    assert bounds[0][0] == 0 and bounds[-1][1] == numel
    assert all(end == start for (_, end), (start, _) in zip(bounds, bounds[1:], strict=False))
    assert all(start % 128 == 0 or start == numel for start, _ in bounds)
