"""Did the quickstart learn? `python verdict.py START SFT GRPO --seconds T`, files of evaluate.py; exit status 1: no.

Each stage must answer more held-out sums rightly than the one before it, and not by chance: of the sums that only one
of the two answers rightly, as many or more would fall to the later stage with probability p < 0.05 if each of them fell
to either with probability 1/2 (exact McNemar test, one-sided).
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from scipy.stats import binomtest

STAGES = ("start", "after SFT", "after GRPO")
SIGNIFICANCE = 0.05

Scores = dict[str, bool]


def read(file: Path) -> Scores:
    """Prompt -> whether its answer is right.

    Raises:
        ValueError: no answers, or two to one prompt.
    """
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    scores = {row["prompt"]: row["score"] == 1.0 for row in rows}
    if not rows or len(scores) != len(rows):
        raise ValueError(f"{file} has {len(rows)} answers to {len(scores)} prompts")
    return scores


def accuracy(scores: Scores) -> float:
    """The share of right answers."""
    return sum(scores.values()) / len(scores)


def p_value(before: Scores, after: Scores) -> tuple[int, int, float]:
    """Sums that only `after` answers rightly, those that only `before` does, and the p-value of `after` being better.

    Raises:
        ValueError: the two did not answer the same prompts.
    """
    if before.keys() != after.keys():
        raise ValueError(f"{len(before.keys() ^ after.keys())} prompts were answered in one stage only")
    gained = sum(after[prompt] and not before[prompt] for prompt in before)
    lost = sum(before[prompt] and not after[prompt] for prompt in before)
    if gained + lost == 0:
        return 0, 0, 1.0
    return gained, lost, binomtest(gained, gained + lost, 0.5, alternative="greater").pvalue


def judge(stages: list[Scores]) -> Iterator[tuple[str, bool]]:
    """For each stage but the first, what became of the accuracy, and whether it rose significantly."""
    for (before, after), name in zip(pairwise(stages), STAGES[1:], strict=True):
        gained, lost, p = p_value(before, after)
        text = f"{name}: {gained} sums gained, {lost} lost, one-sided p = {p:.2g}"
        yield text, gained > lost and p < SIGNIFICANCE


def summary(stages: list[Scores], seconds: int) -> str:
    """The quickstart's last line."""
    accuracies = " -> ".join(f"{accuracy(scores):.3f}" for scores in stages)
    return (
        f"quickstart: accuracy {accuracies} (start, after SFT, after GRPO; {len(stages[0])} held-out sums), {seconds} s"
    )


def main(files: list[Path], seconds: int, claim: bool) -> bool:
    """Print the comparison and the summary; False if a stage did not learn although `claim` says that it does."""
    stages = [read(file) for file in files]
    learned = True
    for text, rose in judge(stages):
        print(f"quickstart: {text}")
        if claim and not rose:
            learned = False
            print(f"quickstart: FAILED: no significant gain (p < {SIGNIFICANCE} is wanted) {text}", file=sys.stderr)
    print(summary(stages, seconds), flush=True)
    return learned


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs=3, metavar="JSONL", help="answers at start, after SFT, after GRPO")
    parser.add_argument("--seconds", type=int, required=True, help="how long the whole run took, for the summary")
    parser.add_argument("--no-claim", action="store_true", help="report only: exit status 0 whatever was learned")
    arguments = parser.parse_args()
    sys.exit(0 if main(arguments.files, arguments.seconds, not arguments.no_claim) else 1)
