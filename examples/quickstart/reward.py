"""Rule rewards for the quickstart, called by verl with one response each."""

import re
from typing import Any

NUMBER = re.compile(r"\d+(?:\.\d+)?")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """1.0 if the right number stands anywhere in the response as a whole number, else 0.0: 1 is not found in 12.

    Lenient on purpose: an untuned small model writes a sentence around its answer, and so has a signal to learn from.
    """
    return float(ground_truth in NUMBER.findall(solution_str))


def digit_share(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Share of digits in the response, in [0, 1]. Random weights never add up right, but they do write digits."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
