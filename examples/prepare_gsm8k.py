"""GSM8K as verl's parquet files: `python prepare_gsm8k.py FOLDER [--jsonl DIR]`.

Reads `train.jsonl` and `test.jsonl` of DIR (fields `question`, `answer`), or without --jsonl the hub's openai/gsm8k.
The prompts ask for the form of answer that verl's own GSM8K reward reads: `#### 42`.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

INSTRUCTION = ' Let\'s think step by step and output the final answer after "####".'


def read_jsonl(path: Path) -> list[dict[str, str]]:
    """The problems of one file.

    Raises:
        ValueError: a line that is not JSON or lacks a field; the message names file and line.
    """
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            problem = json.loads(line)
            problems.append({"question": problem["question"], "answer": problem["answer"]})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: no JSON object with question and answer ({error!r})") from error
    return problems


def read_hub(split: str) -> Iterable[dict[str, str]]:
    """The problems of one split, downloaded from the Hugging Face hub."""
    from datasets import load_dataset

    return load_dataset("openai/gsm8k", "main", split=split)


def row(problem: dict[str, str], split: str, index: int) -> dict[str, Any]:
    """One problem as verl reads it.

    Raises:
        ValueError: an answer without `####`.
    """
    reasoning, mark, solution = problem["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"the answer of {split} problem {index} has no ####: {problem['answer'][-80:]!r}")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": problem["question"] + INSTRUCTION}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": reasoning.strip(), "question": problem["question"]},
    }


def main(folder: Path, jsonl: Path | None) -> None:
    """Write `train.parquet` and `test.parquet` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        problems = read_hub(split) if jsonl is None else read_jsonl(jsonl / f"{split}.jsonl")
        rows = [row(problem, split, index) for index, problem in enumerate(problems)]
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
        print(f"{folder / split}.parquet: {len(rows)} problems")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jsonl", type=Path, help="folder with train.jsonl and test.jsonl instead of the hub")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.jsonl)
