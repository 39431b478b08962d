"""The same recorded batches through the streaming engine and through verl's FSDP2 engine: do they take the same steps?

    python -m benchmarks.replay.replay RECORDED --model MODEL [--lr 1e-6] [--control]
    python -m benchmarks.replay.replay RECORDED --model MODEL --device cuda --dtype bfloat16 --control

Each engine starts from MODEL and trains on every batch with the recorded options. Prints the largest differences of
loss and gradient norm; RECORDED/replay_DEVICE_DTYPE_lrRATE.json gets them and the values of each optimizer step.
"""

import argparse
import gc
import json
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor
    from verl.workers.engine_workers import TrainingWorker

Steps = dict[str, list[float]]  # per optimizer step
COMPARED = ("loss", "grad_norm")
SHOWN = (*COMPARED, "actor/pg_loss", "actor/kl_loss", "actor/entropy_loss")
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}


def run_engine(engine: str, recorded: Path, model: Path, dtype: str, options: dict[str, Any]) -> Steps:
    """Train on the batches of `recorded`; the metrics of each optimizer step."""
    import torch
    from verl.utils import tensordict_utils as tu

    from benchmarks.replay import batches, workers

    worker = workers.build(engine, model, dtype, options)
    steps: Steps = {}
    start = time.perf_counter()
    for number, file in enumerate(batches.files(recorded), 1):
        batch = batches.load(file)
        # As verl's trainer does in each step: the log-probs before the update are those of the engine that is trained.
        batch["old_log_probs"] = response_log_probs(worker, batch, options["loss"]["ppo_micro_batch_size_per_gpu"])
        metrics = tu.get(worker.train_mini_batch(batch), "metrics")
        for name in set(SHOWN) & set(metrics):
            steps.setdefault(name, []).extend(metrics[name])
        if number % 5 == 0:
            seconds = time.perf_counter() - start
            print(f"{engine}, {dtype}: {len(steps['loss'])} optimizer steps, {seconds:.0f} s", flush=True)
    if engine == "megatrain":
        worker.engine.streaming.close()
    del worker
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return steps


def response_log_probs(worker: "TrainingWorker", batch: "TensorDict", micro_batch: int) -> "Tensor":
    """Log-probs (rows, jagged) of the response tokens of `batch` under the worker's present weights."""
    import torch
    from verl.utils import tensordict_utils as tu

    scored = batch.clone()
    tu.assign_non_tensor(scored, compute_loss=False, calculate_entropy=False, micro_batch_size_per_gpu=micro_batch)
    log_probs = tu.get(worker.infer_batch(scored), "log_probs")
    responses = [
        row[len(prompt) - 1 : len(prompt) - 1 + len(response)]
        for row, prompt, response in zip(
            log_probs.unbind(), batch["prompts"].unbind(), batch["responses"].unbind(), strict=True
        )
    ]
    return torch.nested.as_nested_tensor(responses, layout=torch.jagged)


def relative_differences(found: list[float], expected: list[float]) -> list[float]:
    """Per step |found - expected| / max(|expected|, mean of |expected| over all steps).

    The mean, because the loss of GRPO crosses 0, where a difference relative to it says nothing.
    """
    mean = sum(map(abs, expected)) / len(expected)
    return [abs(a - b) / max(abs(b), mean) for a, b in zip(found, expected, strict=True)]


def recorded_options(recorded: Path, lr: float | None) -> dict[str, Any]:
    """Options of loss and optimizer; `lr` takes the place of the recorded learning rate."""
    from benchmarks.replay import recorder

    options = json.loads((recorded / recorder.OPTIONS_FILE).read_text())
    if lr is not None:
        options["optim"]["lr"] = lr
    return options


def halved_micro_batches(options: dict[str, Any]) -> dict[str, Any]:
    """The same steps, summed in another order.

    Raises:
        ValueError: a micro-batch of one row cannot be halved.
    """
    rows = options["loss"]["ppo_micro_batch_size_per_gpu"]
    if rows < 2:
        raise ValueError("--control halves the recorded micro-batches, which have one row: leave it out")
    return {**options, "loss": {**options["loss"], "ppo_micro_batch_size_per_gpu": rows // 2}}


def report(runs: dict[str, Steps], tolerance: float) -> dict[str, dict[str, float]]:
    """Print the largest differences from the run "fsdp2" over the first N steps, for some N; returns those of all."""
    expected = runs["fsdp2"]
    total = len(expected["loss"])
    counts = sorted({count for count in (1, 10, 20, 30, total) if count <= total})
    largest: dict[str, dict[str, float]] = {}
    print("largest |difference from fsdp2| / max(|fsdp2|, mean |fsdp2| of all steps), over the first N steps")
    print(f"{'':<22}" + "".join(f"{'N = ' + str(count):>10}" for count in counts))
    for run in [run for run in runs if run != "fsdp2"]:
        for name in COMPARED:
            differences = relative_differences(runs[run][name], expected[name])
            print(f"{run:<12}{name:<10}" + "".join(f"{max(differences[:count]):>10.1e}" for count in counts))
            largest.setdefault(run, {})[name] = max(differences)
    print("mean of all steps: " + ", ".join(f"{n} {sum(map(abs, expected[n])) / total:.5f}" for n in COMPARED))
    within = max(largest["megatrain"].values()) <= tolerance
    print(f"megatrain within {tolerance:g} of fsdp2 at each of {total} steps: {'yes' if within else 'NO'}", flush=True)
    return largest


def prepare(device: str) -> None:
    """Choose verl's platform; before anything imports verl.

    Raises:
        ValueError: there is no such device.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here; leave it out to run on the CPU")
    for name in ("VERL_PLATFORM", "VERL_ENGINE_DEVICE"):
        os.environ.pop(name, None)
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
        # verl registers FSDP for accelerators only; with one process gloo serves it as well.
        os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    import megatrain_verl.verl_backend.plugin  # noqa: F401
    from benchmarks.replay import workers

    workers.single_process()


def made_with(device: str) -> dict[str, Any]:
    """Versions and machine, for whoever compares figures later."""
    import torch
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": platform.processor() or platform.machine(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Replay, compare and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", type=Path, help="a folder that benchmarks/replay/grpo.sh has filled")
    parser.add_argument("--model", type=Path, required=True, help="the model that the recorded run started from")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32")
    parser.add_argument("--lr", type=float, help="instead of the recorded learning rate")
    parser.add_argument(
        "--control", action="store_true", help="also FSDP2 in float32 with half the micro-batch: what rounding does"
    )
    arguments = parser.parse_args()
    prepare(arguments.device)
    options = recorded_options(arguments.recorded, arguments.lr)

    def run(engine: str, dtype: str = arguments.dtype, options: dict[str, Any] = options) -> Steps:
        return run_engine(engine, arguments.recorded, arguments.model, dtype, options)

    runs = {"fsdp2": run("fsdp2"), "megatrain": run("megatrain")}
    if arguments.control:
        runs["control"] = run("fsdp2", "float32", halved_micro_batches(options))
    lr = options["optim"]["lr"]
    print(f"{arguments.recorded.name}, {arguments.device}, {arguments.dtype}, learning rate {lr:g}")
    result = {
        "largest differences": report(runs, TOLERANCES[arguments.dtype]),
        "made with": made_with(arguments.device),
        "steps": runs,
    }
    output = arguments.recorded / f"replay_{arguments.device}_{arguments.dtype}_lr{lr:g}.json"
    output.write_text(json.dumps(result, indent=1))
    print(f"written to {output}")


if __name__ == "__main__":
    main()
