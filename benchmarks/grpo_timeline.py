"""The timeline of one GRPO step from the files of a run: `python benchmarks/grpo_timeline.py FOLDER PNG [--step N]`

FOLDER is that of `grpo_step.py`: trace.jsonl has the engine's phases with their times, metrics.jsonl verl's phases with
their seconds, gpu_memory.csv, on a GPU, the memory in use. verl logs no times: its phases are drawn one after the
other, where those of the engine lie inside of them.
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib
from grpo import gpu_memory
from grpo.report import GIB, PHASES, read_lines

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

ROWS = ("verl's trainer", "engine", "AdamW on the host")
# verl's phase -> what the engine does in it.
INSIDE = {
    "old_log_prob": ("score",),
    "ref": ("score_reference",),
    "update_actor": ("forward_backward", "optimizer_step"),
    "update_weights": ("export",),
}
Span = tuple[str, float, float]  # name, start, end; seconds


def engine_spans(trace: list[dict[str, Any]], step: int) -> tuple[list[Span], list[Span]]:
    """(phases, AdamW per unit) of the engine in a step, up to the weight transfer that ends it.

    Raises:
        ValueError: the trace has no such step.
    """
    spans = [(line["phase"], line["start"], line["start"] + line["seconds"]) for line in trace]
    phases = [span for span in spans if span[0] != "adamw"]
    # The first transfer comes before the first step.
    exports = [index for index, (name, *_) in enumerate(phases) if name == "export"]
    if not 1 <= step < len(exports):
        raise ValueError(f"the trace has steps 1 to {len(exports) - 1}, not {step}")
    inside = phases[exports[step - 1] + 1 : exports[step] + 1]
    first, last = phases[exports[step - 1]][2], inside[-1][2]
    return inside, [span for span in spans if span[0] == "adamw" and first <= span[1] < last]


def verl_spans(seconds: dict[str, float], phases: list[Span]) -> list[Span]:
    """verl's phases of a step by their seconds, placed around the engine's `phases`."""
    spans, end = [], 0.0
    earliest, latest = [], []  # starts of the step with which one of verl's phases holds the engine's
    for name in PHASES:
        if f"timing_s/{name}" not in seconds:
            continue
        start, end = end, end + seconds[f"timing_s/{name}"]
        spans.append((name, start, end))
        held = [phase for phase in phases if phase[0] in INSIDE.get(name, ())]
        if held:
            earliest.append(held[-1][2] - end)
            latest.append(held[0][1] - start)
    zero = (max(earliest) + min(latest)) / 2
    return [(name, zero + start, zero + end) for name, start, end in spans]


def draw(rows: list[list[Span]], memory: list[tuple[float, int]], title: str, png: Path) -> None:
    """A bar for each span in the row of `ROWS` it belongs to, and below them the device's memory if there is any."""
    zero = min(start for row in rows for _, start, _ in row)
    end = max(last for row in rows for _, _, last in row)
    memory = [(moment, used) for moment, used in memory if zero <= moment <= end]
    heights = [3, 1.5] if memory else [3]
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(11, sum(heights)), height_ratios=heights, sharex=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    _draw_rows(axes[0, 0], rows, zero, end - zero)
    axes[0, 0].set_title(title)
    if memory:
        axes[1, 0].plot([moment - zero for moment, _ in memory], [used / GIB for _, used in memory])
        axes[1, 0].set(ylabel="GiB in use\non the device", ylim=(0, None))
        axes[1, 0].grid(alpha=0.3)
    axes[-1, 0].set_xlabel("seconds")
    figure.savefig(png, dpi=110)


def _draw_rows(axes: Axes, rows: list[list[Span]], zero: float, length: float) -> None:
    names = list(dict.fromkeys(name for row in rows for name, *_ in row))
    colors = dict(zip(names, plt.get_cmap("tab20").colors, strict=False))
    for index, row in enumerate(rows):
        for name, start, end in row:
            axes.barh(index, end - start, left=start - zero, color=colors[name], label=name)
            if end - start > 0.06 * length:
                middle = (start + end) / 2 - zero
                axes.text(middle, index, f"{name}\n{end - start:.2f} s", ha="center", va="center", fontsize=7)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)
    axes.set_yticks(range(len(ROWS)), ROWS)
    axes.set_ylim(len(ROWS) - 0.5, -0.5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("png", type=Path)
    parser.add_argument("--step", type=int, help="default: the last one")
    arguments = parser.parse_args()
    metrics = {line["step"]: line["data"] for line in read_lines(arguments.folder / "metrics.jsonl")}
    number = arguments.step or max(metrics)
    engine, adamw = engine_spans(read_lines(arguments.folder / "trace.jsonl"), number)
    csv = arguments.folder / "gpu_memory.csv"
    draw(
        [verl_spans(metrics[number], engine), engine, adamw],
        gpu_memory.parse(csv.read_text()) if csv.exists() else [],
        f"GRPO step {number}: {metrics[number]['timing_s/step']:.2f} s",
        arguments.png,
    )
