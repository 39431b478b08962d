"""The reward of `grpo_step.py`, called by verl with one response each."""

import zlib
from typing import Any


def hashed(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """A number in [0, 1) that follows from the response, so that advantages differ."""
    return zlib.crc32(solution_str.encode()) / 2**32
