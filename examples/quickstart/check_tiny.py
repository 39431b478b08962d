"""Did `run_quickstart.sh --tiny` do what it should? `python check_tiny.py OUTPUT MODEL` names the first wrong thing.

vLLM and the engine compute the probability of each sampled token separately, and must agree at every step. That says
something only if vLLM would be caught with the weights of the step before: so each step's export is compared with the
one before it, and must give other probabilities.
"""

import argparse
import math
import sys
from itertools import pairwise
from pathlib import Path

import torch
from plot import read
from transformers import AutoModelForCausalLM

PROBS_DIFF = "training/rollout_probs_diff_max"
LARGEST_DIFF = 1e-3
SMALLEST_CHANGE = 10 * LARGEST_DIFF  # what one missed weight transfer must change at least


def check_probabilities(output: Path, steps: int) -> list[float]:
    """The largest difference of a probability at each step.

    Raises:
        ValueError: a step is missing, has no rollouts to compare, or differs by more than 1e-3.
    """
    rows = [row for row in read(output / "metrics.jsonl") if PROBS_DIFF in row]
    if [row["step"] for row in rows] != list(range(1, steps + 1)):
        raise ValueError(f"{PROBS_DIFF} is there for steps {[row['step'] for row in rows]}, not for 1..{steps}")
    for row in rows:
        if not row[PROBS_DIFF] <= LARGEST_DIFF:  # also true for NaN
            raise ValueError(f"step {row['step']}: {PROBS_DIFF} = {row[PROBS_DIFF]:.2e}, more than {LARGEST_DIFF:.0e}")
        if not (math.isfinite(row["actor/grad_norm"]) and row["actor/grad_norm"] > 0):
            raise ValueError(f"step {row['step']}: actor/grad_norm = {row['actor/grad_norm']}")
    return [row[PROBS_DIFF] for row in rows]


def check_exports(output: Path, start: Path, steps: int) -> list[float]:
    """How much each step changes the probability of a token, from the Hugging Face exports.

    Raises:
        ValueError: an export is missing, or a step changes so little that the other check would not notice.
    """
    folders = [output / f"global_step_{step}" / "actor" / "huggingface" for step in range(1, steps + 1)]
    for folder in folders:
        if not (folder / "config.json").exists():
            raise ValueError(f"there is no Hugging Face export in {folder}")
    changes = []
    for step, (before, after) in enumerate(pairwise(map(_probabilities, [start, *folders])), start=1):
        changes.append((after - before).abs().max().item())
        if not changes[-1] >= SMALLEST_CHANGE:  # also true for NaN
            raise ValueError(f"step {step} changes no probability by more than {changes[-1]:.1e}")
    return changes


@torch.no_grad()
def _probabilities(folder: Path) -> torch.Tensor:
    """Probabilities of the next token (tokens, vocabulary) in a fixed text that visits every token once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(torch.arange(model.config.vocab_size)[None]).logits[0].softmax(-1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("start", type=Path, help="the model that training started from")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    try:
        differences = check_probabilities(arguments.output, arguments.steps)
        stale = check_exports(arguments.output, arguments.start, arguments.steps)
    except (ValueError, OSError) as error:
        sys.exit(f"quickstart: FAILED: {error}")
    print(f"quickstart: {PROBS_DIFF} per step: {[f'{value:.1e}' for value in differences]} (limit {LARGEST_DIFF:.0e})")
    print(f"quickstart: with the weights of the step before it would be: {[f'{value:.1e}' for value in stale]}")
