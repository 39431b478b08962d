"""Greedy answers of a model to held-out prompts, scored one by one: `python evaluate.py MODEL TEST_PARQUET OUT_JSONL`.

Plain transformers in float32, neither verl nor vLLM: the three accuracies of the quickstart are measured in one way,
on folders that anyone can load. Each line of OUT_JSONL has prompt, response, answer and score (1.0 or 0.0).
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from verl.utils.reward_score.gsm8k import compute_score

NEW_TOKENS = 8  # as in the rollouts: "#### 101" and the end-of-turn token are 6
BATCH = 50


def respond(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, conversations: list[list[dict[str, str]]]
) -> Iterator[str]:
    """The text of each conversation's next assistant turn, its most probable tokens."""
    tokenizer.padding_side = "left"
    for start in range(0, len(conversations), BATCH):
        batch = conversations[start : start + BATCH]
        inputs = tokenizer.apply_chat_template(
            batch, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
        tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        yield from tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def evaluate(folder: Path, test: pd.DataFrame) -> list[dict[str, str | float]]:
    """One scored answer per row of `test`, in verl's format, in its order."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    conversations = [list(messages) for messages in test["prompt"]]
    answers = [rule["ground_truth"] for rule in test["reward_model"]]
    responses = respond(model, tokenizer, conversations)
    return [
        scored(messages[-1]["content"], response, answer)
        for messages, response, answer in zip(conversations, responses, answers, strict=True)
    ]


def scored(prompt: str, response: str, answer: str) -> dict[str, str | float]:
    """One line of the output; the score is the reward of the rollouts, verl's strict GSM8K rule."""
    return {"prompt": prompt, "response": response, "answer": answer, "score": float(compute_score(response, answer))}


def main(folder: Path, test_file: Path, output: Path) -> None:
    """Write `output` and say the accuracy."""
    start = time.monotonic()
    rows = evaluate(folder, pd.read_parquet(test_file))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    right = sum(row["score"] for row in rows)
    seconds = time.monotonic() - start
    print(f"quickstart: {right:.0f} of {len(rows)} held-out sums are right ({seconds:.0f} s), e.g. {_example(rows[0])}")


def _example(row: dict[str, str | float]) -> str:
    return f"{row['prompt']} -> {row['response']!r}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder that from_pretrained loads")
    parser.add_argument("test_file", type=Path, help="verl's parquet format")
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    main(arguments.model, arguments.test_file, arguments.output)
