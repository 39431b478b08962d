"""A picture of a run: its losses and learning rate by step, from the metrics file."""

import os
from pathlib import Path
from typing import Any

import orjson

POINTS_SHOWN = 50  # the smoothed line is a mean over 1/50 of the steps


def write(metrics: Path, picture: Path) -> None:
    """Draw what `metrics` (JSON lines of verl's `file` logger) holds as PNG file `picture`, replacing it at once."""
    from matplotlib.figure import Figure  # half a second that only the end of a run needs

    lines = [orjson.loads(line) for line in metrics.read_bytes().splitlines()]
    figure = Figure(figsize=(8, 5), layout="constrained")
    losses = figure.subplots()
    train, val, rate = (_series(lines, name) for name in ("train/loss", "val/loss", "train/lr"))
    losses.plot(*train, color="tab:blue", alpha=0.35, linewidth=0.8, label="training")
    losses.plot(train[0], _smoothed(train[1]), color="tab:blue", label="training, smoothed")
    if val[0]:
        losses.plot(*val, "o-", color="tab:orange", label="validation")
    losses.set_xlabel("step"), losses.set_ylabel("loss (nats per trained token)")
    losses.grid(alpha=0.3), losses.legend(loc="upper right")
    rates = losses.twinx()
    rates.plot(*rate, ":", color="tab:gray")
    rates.set_ylabel("learning rate (dotted)")
    new = picture.with_name(f"{picture.name}.new")
    figure.savefig(new, format="png", dpi=120)
    os.replace(new, picture)


def _series(lines: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values; what was not finite is null in the file and left out."""
    found = [(line["step"], line["data"][name]) for line in lines if line["data"].get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _smoothed(values: list[float]) -> list[float]:
    """Mean of each value and those before it."""
    window = max(1, len(values) // POINTS_SHOWN)
    starts = (max(0, end - window) for end in range(1, len(values) + 1))
    return [sum(values[start:end]) / (end - start) for end, start in enumerate(starts, start=1)]
