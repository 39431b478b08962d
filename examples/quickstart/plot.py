"""Reward per step and held-out accuracy as a PNG: `python plot.py METRICS_JSONL PNG`."""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

REWARD = "critic/rewards/mean"
ACCURACY_PREFIX = "val-core/"


def read(metrics_file: Path) -> list[dict[str, Any]]:
    """verl's metrics, one dict per logged step, with its number under `step`."""
    lines = map(json.loads, metrics_file.read_text().splitlines())
    return [{"step": line["step"], **line["data"]} for line in lines]


def series(rows: list[dict[str, Any]], prefix: str) -> tuple[list[int], list[float]]:
    """Steps and values of the first metric whose name starts with `prefix`, at the steps that have one."""
    steps, values = [], []
    for row in rows:
        for name in sorted(row):
            if name.startswith(prefix):
                steps.append(row["step"])
                values.append(row[name])
                break
    return steps, values


def plot(rows: list[dict[str, Any]], png: Path) -> None:
    """Draw the mean reward of each step's rollouts and, where there was a validation, the accuracy."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*series(rows, REWARD), marker=".", label="mean reward of the rollouts")
    steps, accuracy = series(rows, ACCURACY_PREFIX)
    if steps:
        axes.plot(steps, accuracy, marker="o", label="accuracy on held-out sums (greedy)")
    axes.set(xlabel="GRPO step", ylabel="reward, accuracy", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(png, dpi=150)


def summary(rows: list[dict[str, Any]]) -> str:
    """One line: the reward at the first and last step, and the accuracy if it was measured."""
    _, rewards = series(rows, REWARD)
    text = f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f} in {len(rewards)} steps"
    _, accuracy = series(rows, ACCURACY_PREFIX)
    return text + (f", held-out accuracy {accuracy[0]:.3f} -> {accuracy[-1]:.3f}" if accuracy else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics_file", type=Path)
    parser.add_argument("png", type=Path)
    arguments = parser.parse_args()
    logged = read(arguments.metrics_file)
    plot(logged, arguments.png)
    print(f"quickstart: {summary(logged)}")
