"""Plots of the comparison with verl's FSDP2 engine.

python -m benchmarks.replay.plot rewards MEGATRAIN/metrics.jsonl FSDP2/metrics.jsonl PNG
python -m benchmarks.replay.plot replay RECORDED/replay_cpu_float32_lr0.0001.json PNG
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from benchmarks.replay.replay import COMPARED, relative_differences  # noqa: E402

ENGINES = ("megatrain", "fsdp2")


def plot_rewards(files: list[Path], png: Path) -> None:
    """Mean reward of the rollouts of each step, one panel per engine."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharex=True, sharey=True, layout="constrained")
    for axes, engine, file in zip(panels, ENGINES, files, strict=True):
        logged = [json.loads(line) for line in file.read_text().splitlines()]
        points = [(line["step"], line["data"]["critic/rewards/mean"]) for line in logged]
        axes.plot(*zip(*points, strict=True), marker=".")
        axes.set(title=engine, xlabel="GRPO step", ylim=(0, 1))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("mean reward of the rollouts")
    figure.savefig(png, dpi=120)


def plot_replay(file: Path, png: Path) -> None:
    """Values of both engines at each optimizer step, and under them their differences."""
    steps = json.loads(file.read_text())["steps"]
    figure, panels = plt.subplots(2, 2, figsize=(9, 5), sharex=True, layout="constrained")
    for column, name in enumerate(COMPARED):
        found, expected = (steps[engine][name] for engine in ENGINES)
        numbers = range(1, len(found) + 1)
        panels[0, column].plot(numbers, expected, label="fsdp2", linewidth=3, alpha=0.5)
        panels[0, column].plot(numbers, found, label="megatrain", linewidth=1, color="black")
        panels[0, column].set(title=name)
        panels[0, column].legend()
        panels[1, column].semilogy(numbers, relative_differences(found, expected), marker=".", linestyle="")
        panels[1, column].set(xlabel="optimizer step")
    panels[1, 0].set_ylabel("difference / max(|value|, mean |value|)")
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    figure.savefig(png, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rewards", "replay"))
    parser.add_argument("files", type=Path, nargs="+", help="the input files, then the PNG")
    arguments = parser.parse_args()
    *inputs, target = arguments.files
    target.parent.mkdir(parents=True, exist_ok=True)
    if arguments.what == "rewards":
        plot_rewards(inputs, target)
    else:
        plot_replay(*inputs, target)
