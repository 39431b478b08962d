"""Sums for the quickstart, `97+4=` -> `#### 101`: `python make_data.py FOLDER` writes three parts.

test.parquet    200 held-out prompts, never trained on
sft.json        320 of the other prompts with their answers, alpaca format; dataset_info.json names it
train.parquet   all 610 other prompts for GRPO, without answers to imitate
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pandas as pd

NUM_TEST, NUM_SFT = 200, 320
SEED = 0
# verl scores this data source with its strict GSM8K rule: 1 if the last number after "#### " is right, else 0.
DATA_SOURCE = "openai/gsm8k"


def sums() -> list[tuple[int, int]]:
    """All 810 pairs of 10..99 and 1..9 in a fixed random order. No 0: `a+0` would repeat its own answer."""
    pairs = [(a, b) for a in range(10, 100) for b in range(1, 10)]
    random.Random(SEED).shuffle(pairs)
    return pairs


def prompt(a: int, b: int) -> str:
    """What the user says."""
    return f"{a}+{b}="


def verl_row(a: int, b: int, split: str, index: int) -> dict[str, Any]:
    """One prompt as verl reads it: chat messages, and the right answer for the reward."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": prompt(a, b)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": index},
    }


def sft_row(a: int, b: int) -> dict[str, str]:
    """One example in the alpaca format."""
    return {"instruction": prompt(a, b), "output": f"#### {a + b}"}


def write(folder: Path) -> None:
    """Write the three parts and `dataset_info.json`, the registry that the SFT reads."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = sums()
    test, train = pairs[:NUM_TEST], pairs[NUM_TEST:]
    for split, part in (("test", test), ("train", train)):
        rows = [verl_row(a, b, split, index) for index, (a, b) in enumerate(part)]
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
    (folder / "sft.json").write_text(json.dumps([sft_row(a, b) for a, b in train[:NUM_SFT]], indent=1))
    (folder / "dataset_info.json").write_text(json.dumps({"sums": {"file_name": "sft.json"}}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
