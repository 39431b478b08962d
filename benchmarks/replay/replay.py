"""The same recorded batches through the streaming engine and through verl's FSDP2 engine: do they take the same steps?

    VERL_PLATFORM=cpu python -m benchmarks.replay.replay RECORDED --model MODEL
    python -m benchmarks.replay.replay RECORDED --model MODEL --device cuda --dtype bfloat16

Each engine starts from MODEL and trains on every batch with the recorded options. Prints loss and gradient norm of each
optimizer step and their largest differences; writes them to RECORDED/replay_DEVICE_DTYPE.json.
"""

import argparse
import gc
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

Steps = dict[str, list[float]]  # per optimizer step
COMPARED = ("loss", "grad_norm")
SHOWN = (*COMPARED, "actor/pg_loss", "actor/kl_loss", "actor/entropy_loss")


def run_engine(engine: str, recorded: Path, model: Path, dtype: str, limit: int | None) -> Steps:
    """Train on the batches of `recorded`, at most `limit` of them; the metrics of each optimizer step."""
    from verl.utils import tensordict_utils as tu

    from benchmarks.replay import batches, recorder, workers

    options = json.loads((recorded / recorder.OPTIONS_FILE).read_text())
    worker = workers.build(engine, model, dtype, options)
    steps: Steps = {}
    start = time.perf_counter()
    for file in batches.files(recorded)[:limit]:
        metrics = tu.get(worker.train_mini_batch(batches.load(file)), "metrics")
        for name in set(SHOWN) & set(metrics):
            steps.setdefault(name, []).extend(metrics[name])
        done, seconds = len(steps["loss"]), time.perf_counter() - start
        print(
            f"{engine} {file.stem}: {done} optimizer steps, {seconds:.0f} s, loss {steps['loss'][-1]:.8f}", flush=True
        )
    if engine == "megatrain":
        worker.engine.streaming.close()
    return steps


def relative_differences(found: list[float], expected: list[float]) -> tuple[list[float], list[float]]:
    """Per step |found - expected|, divided by |expected| of that step, and by the mean |expected| of all steps.

    The loss of GRPO crosses 0, where the first says nothing; the second has the size of a usual loss as its unit.
    """
    scale = sum(map(abs, expected)) / len(expected)
    differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    return [d / abs(b) for d, b in zip(differences, expected, strict=True)], [d / scale for d in differences]


def report(found: Steps, expected: Steps) -> dict[str, dict[str, float]]:
    """Print a line per step and the largest differences, which are returned."""
    largest = {}
    print(f"{'step':>4} " + " ".join(f"{name + ' ' + who:>22}" for name in COMPARED for who in ("megatrain", "fsdp2")))
    for step, row in enumerate(zip(*(run[name] for name in COMPARED for run in (found, expected)), strict=True), 1):
        print(f"{step:>4} " + " ".join(f"{value:>22.10f}" for value in row))
    for name in COMPARED:
        of_step, of_mean = relative_differences(found[name], expected[name])
        mean = sum(map(abs, expected[name])) / len(expected[name])
        step, worst, scaled = 1 + of_step.index(max(of_step)), max(of_step), max(of_mean)
        largest[name] = {"of the step's value": worst, "of the mean absolute value": scaled, "mean": mean}
        print(
            f"{name}: differs by at most {worst:.2e} of a step's own value (step {step}) and by {scaled:.2e} of "
            f"the mean absolute value, {mean:.5f}"
        )
    return largest


def prepare(device: str) -> None:
    """Choose verl's platform; before anything imports verl."""
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
        # verl registers FSDP for accelerators only; with one process gloo serves it as well.
        os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    import megatrain_verl.verl_backend.plugin  # noqa: F401
    from benchmarks.replay import workers

    workers.single_process()


def main() -> None:
    """Replay, compare and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", type=Path, help="a folder that benchmarks/replay/grpo.sh has filled")
    parser.add_argument("--model", type=Path, required=True, help="the model that the recorded run started from")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batches", type=int, help="only the first N")
    arguments = parser.parse_args()
    prepare(arguments.device)
    import torch
    import transformers

    runs: dict[str, Any] = {}
    for engine in ("fsdp2", "megatrain"):
        runs[engine] = run_engine(engine, arguments.recorded, arguments.model, arguments.dtype, arguments.batches)
        gc.collect()
    result = {
        "largest differences": report(runs["megatrain"], runs["fsdp2"]),
        "made with": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "processor": platform.processor() or platform.machine(),
            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
        },
        "steps": runs,
    }
    output = arguments.recorded / f"replay_{arguments.device}_{arguments.dtype}.json"
    output.write_text(json.dumps(result, indent=1))
    print(f"written to {output}")


if __name__ == "__main__":
    main()
