"""The reward of `run_quickstart.sh --tiny`, called by verl with one response each."""

from typing import Any


def digit_share(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Share of digits in the response, in [0, 1]. Random weights never add up right, but they do write digits."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
