"""Train and test sets of one-digit sums in verl's parquet format: `python make_data.py FOLDER`."""

import argparse
import random
from pathlib import Path
from typing import Any

import pandas as pd

NUM_TEST = 25
SEED = 0


def sums() -> list[tuple[int, int]]:
    """All 81 pairs of digits 1..9 in a fixed random order. No 0: `a + 0` would repeat its own answer."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(SEED).shuffle(pairs)
    return pairs


def row(a: int, b: int, split: str, index: int) -> dict[str, Any]:
    """One prompt as verl reads it: chat messages, and the right answer for the reward function."""
    return {
        "data_source": "one_digit_sums",
        "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": index},
    }


def write(folder: Path) -> None:
    """Write `train.parquet` (56 prompts) and `test.parquet` (25 others)."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = sums()
    for split, part in (("test", pairs[:NUM_TEST]), ("train", pairs[NUM_TEST:])):
        rows = [row(a, b, split, index) for index, (a, b) in enumerate(part)]
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
