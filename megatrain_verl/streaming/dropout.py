"""Dropout masks that recomputation draws again: keyed by step, micro-batch and layer, not by the order of the work."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def dropout_seed(key: tuple[int, int, int], micro_batch: int, layer: int) -> int:
    """Seed of the masks of one layer and micro-batch; `key` is (config seed, step, call within the step)."""
    seed = 0
    for part in (*key, micro_batch, layer):
        seed = (seed * 1_000_003 + part + 1) % (1 << 63)
    return seed


@contextmanager
def seeded(seed: int | None, device: str) -> Iterator[None]:
    """Draw random numbers from `seed` inside, and leave the generators as they were; nothing if `seed` is None."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device == "cuda" else []):
        torch.manual_seed(seed)
        yield
