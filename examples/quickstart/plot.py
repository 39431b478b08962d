"""What the quickstart did, as a PNG: `python plot.py GRPO_METRICS_JSONL PNG START SFT GRPO`.

Four panels: accuracy on the held-out sums of each stage (files of evaluate.py), and for each GRPO step the mean reward,
the KL divergence from the model that GRPO started from, and the entropy of the policy.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import verdict
from matplotlib.axes import Axes

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

PANELS = {  # verl's metric: what the axis says
    "critic/rewards/mean": "mean reward of the rollouts",
    "actor/kl_loss": "KL from the SFT model, nats per token",
    "actor/entropy": "entropy, nats per token",
}


def read(metrics_file: Path) -> list[dict[str, Any]]:
    """verl's metrics, one dict per logged step, with its number under `step`."""
    lines = map(json.loads, metrics_file.read_text().splitlines())
    return [{"step": line["step"], **line["data"]} for line in lines]


def series(rows: list[dict[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Steps and values of `metric`, at the steps that have it.

    Raises:
        ValueError: none has.
    """
    found = [(row["step"], row[metric]) for row in rows if metric in row]
    if not found:
        raise ValueError(f"no step has the metric {metric}")
    steps, values = zip(*found, strict=True)
    return list(steps), list(values)


def draw_accuracies(axes: Axes, accuracies: list[float], sums: int) -> None:
    """A bar per stage."""
    bars = axes.bar(verdict.STAGES, accuracies, color=["tab:gray", "tab:orange", "tab:blue"])
    axes.bar_label(bars, fmt="%.3f")
    axes.set(ylim=(0, 1.08), ylabel=f"accuracy on {sums} held-out sums")


def plot(rows: list[dict[str, Any]], stages: list[verdict.Scores], png: Path) -> None:
    """Draw the four panels."""
    figure, grid = plt.subplots(2, 2, figsize=(9, 6), layout="constrained")
    first, *others = grid.flat
    draw_accuracies(first, [verdict.accuracy(scores) for scores in stages], len(stages[0]))
    for axes, (metric, label) in zip(others, PANELS.items(), strict=True):
        axes.plot(*series(rows, metric), marker=".")
        axes.set(xlabel="GRPO step", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(png, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics_file", type=Path)
    parser.add_argument("png", type=Path)
    parser.add_argument("answers", type=Path, nargs=3, help="at start, after SFT, after GRPO")
    arguments = parser.parse_args()
    plot(read(arguments.metrics_file), [verdict.read(file) for file in arguments.answers], arguments.png)
