"""The ranks of a verl run: what they sum, and how their streaming engines meet on one set of host arenas."""

import uuid
from typing import Any

import torch
import torch.distributed as dist

from megatrain_verl.streaming.group.group import ALONE, Group, HostGroup


def meet() -> Group:
    """The group of all ranks of this run. Every rank calls it, once for each engine, in the same order.

    Raises:
        RankFailed: not all came within five minutes, as when they run on several hosts.
    """
    if dist.get_world_size() == 1:
        return ALONE
    return HostGroup(from_first(uuid.uuid4().hex), dist.get_rank(), dist.get_world_size())


def total(count: int) -> int:
    """The sum of `count` over all ranks; on the CPU, hence by gloo."""
    counts = torch.tensor(count)
    dist.all_reduce(counts)
    return int(counts.item())


def from_first(value: Any) -> Any:
    """What the first rank gives, in every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
