"""From the metrics and the trace of a GRPO run to medians by phase, and their table."""

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo.gpu_memory import peaks
from grpo.options import Workload

PHASES = ("gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
GIB = 1 << 30
DIFFERENCE = "training/rollout_probs_diff_max"


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The JSON lines of `file`; none if it is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def summarize(work: Workload, folder: Path, samples: list[tuple[float, int]], start: float) -> dict[str, Any]:
    """Medians over the measured steps: seconds by verl's phase, tokens per second, the engine's own figures, peaks.

    `samples`: (time, bytes) of device memory; `start`: when the run was started; `start_s` lasts to its first step.
    """
    steps = [line["data"] for line in read_lines(folder / "metrics.jsonl")]
    measured = steps[work.warm_up :]
    if len(measured) != work.steps:
        raise ValueError(f"{folder}/metrics.jsonl has {len(steps)} steps instead of {work.total_steps}")

    def median(name: str) -> float:
        return statistics.median(step[name] for step in measured)

    total = median("timing_s/step")
    seconds = {name: median(f"timing_s/{name}") for name in _seconds(measured[0])}
    seconds |= {"other": statistics.median(_other(step) for step in measured), "step": total}
    engine = {name: median(name) for name in measured[0] if name.startswith("actor/megatrain/")}
    trace = read_lines(folder / "trace.jsonl")
    spans = [(t["phase"], t["start"], t["start"] + t["seconds"]) for t in trace if t["phase"] != "adamw"]
    running = [sample for sample in samples if spans and sample[0] >= spans[0][1]]
    lengths = {step[f"response_length/{edge}"] for step in measured for edge in ("min", "max")}
    return {
        "workload": asdict(work),
        "seconds": seconds,
        "tokens_per_s": work.sequences * work.row_tokens / total,
        "generated_tokens_per_s": work.sequences * work.response_len / seconds["gen"],
        "response_lengths": sorted(lengths),
        # verl compares only where it computes old log-probs itself.
        "rollout_probs_diff_max": max((step[DIFFERENCE] for step in measured if DIFFERENCE in step), default=None),
        "engine": {name.removeprefix("actor/megatrain/"): value for name, value in engine.items()},
        "gpu_peak_bytes": max((used for _, used in samples), default=None),
        "gpu_peak_bytes_by_phase": peaks(running, spans),
        "torch_peak_gb": max(step.get("actor/perf/max_memory_allocated_gb", 0.0) for step in measured),
        "host_used_gb": max(step["actor/perf/cpu_memory_used_gb"] for step in measured),
        "start_s": spans[0][1] - start if spans else None,
        "steps": [_seconds(step) | {"step": step["timing_s/step"]} for step in steps],
    }


def _seconds(step: dict[str, float]) -> dict[str, float]:
    return {name: step[f"timing_s/{name}"] for name in PHASES if f"timing_s/{name}" in step}


def _other(step: dict[str, float]) -> float:
    return step["timing_s/step"] - sum(step.get(f"timing_s/{name}", 0.0) for name in PHASES)


def table(result: dict[str, Any]) -> str:
    """What a reader wants to see of `summarize`'s result."""
    work = result["workload"]
    lines = [
        f"{result['model']}, {work['trainer']} x {work['ranks']}: {work['prompts']} prompts x {work['n']}, "
        f"{work['prompt_len']} + {work['response_len']} tokens, "
        f"median of {work['steps']} steps after {work['warm_up']}",
        "  ".join(f"{name} {value:.2f}" for name, value in result["seconds"].items()) + " s",
        f"{result['tokens_per_s']:,.0f} tokens/s, {result['generated_tokens_per_s']:,.0f} generated tokens/s, "
        f"rollout_probs_diff_max {result['rollout_probs_diff_max']}, lengths {result['response_lengths']}",
        "engine: " + "  ".join(f"{name} {value:.3g}" for name, value in result["engine"].items()),
        "seconds of all steps: " + " ".join(f"{step['step']:.2f}" for step in result["steps"]),
        f"host memory used {result['host_used_gb']:.1f} GiB; "
        f"torch's peak in the update {result['torch_peak_gb']:.1f} GiB",
    ]
    if result["start_s"] is not None:
        lines.append(f"start to first weight transfer: {result['start_s']:.0f} s")
    if result["gpu_peak_bytes"]:
        by_phase = result["gpu_peak_bytes_by_phase"].items()
        lines.append(
            f"device memory in use, peak {result['gpu_peak_bytes'] / GIB:.1f} GiB: "
            + "  ".join(f"{name} {used / GIB:.1f}" for name, used in by_phase)
        )
    return "\n".join(lines)
