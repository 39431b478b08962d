"""Seconds of a GRPO step by phase: verl's trainer and vLLM on random weights, with a reward that means nothing.

    python benchmarks/grpo_step.py --model qwen2.5-7b --prompts 8 --n 2 --prompt-len 512 --response-len 1024 --steps 4

Needs no network: weights follow from the model's config, prompts and rewards from numbers. The run is that of
configs/rl/qwen2_5_7b_grpo_80gb.yaml with the overrides that it prints. `--trainer fsdp` runs verl's own FSDP2 engine.
With `--devices 0,1` there are two ranks, each with a vLLM of its own; `--devices 0` is what to compare them with.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from grpo import report, training
from grpo.gpu_memory import GpuMemorySampler
from grpo.options import TRAINERS, Workload, overrides

CONFIG = "qwen2_5_7b_grpo_80gb"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-7b", help="a name of shapes.py, or a folder with config.json")
    parser.add_argument("--layers", type=int, help="cut the model to that many")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=2, help="responses to each prompt")
    parser.add_argument("--prompt-len", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--response-len", type=int, default=1024, help="tokens of each response")
    parser.add_argument("--steps", type=int, default=4, help="measured steps")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before them, which compile and allocate")
    parser.add_argument("--trainer", choices=TRAINERS, default="megatrain")
    parser.add_argument("--kl-reference", action="store_true", help="with a KL loss, hence reference log-probs")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384, help="at most that many per micro-batch")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5, help="vLLM's share of the device")
    parser.add_argument("--enforce-eager", action="store_true", help="vLLM without CUDA graphs: a shorter start")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None, help="default: cuda if nvidia-smi is there")
    parser.add_argument(
        "--devices",
        type=lambda text: text.split(","),
        help="as in CUDA_VISIBLE_DEVICES: a rank with a vLLM of its own on each (on CPU, as many ranks); default: one",
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/grpo_step"), help="weights, prompts, logs, metrics")
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds after which the run is ended")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("overrides", nargs="*", help="further Hydra overrides of the run")
    return parser.parse_intermixed_args()


def train(
    work: Workload, folder: Path, settings: list[str], devices: list[str] | None, limit: float
) -> tuple[list[tuple[float, int]], float]:
    """Run the steps; returns the samples of device memory and the time of the start."""
    for name in ("metrics.jsonl", "trace.jsonl", "gpu_memory.csv"):
        (folder / name).unlink(missing_ok=True)
    prompts = str(folder / "prompts.parquet")
    environment = {"MODEL_PATH": str(folder / "model"), "TRAIN_FILE": prompts, "TEST_FILE": prompts}
    environment |= {"VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}
    environment |= {} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    arguments = ["--config-dir", str(training.ROOT / "configs/rl"), "--config-name", CONFIG, *settings]
    start = time.time()
    with GpuMemorySampler(folder / "gpu_memory.csv", devices) as sampler:
        training.run("megatrain_verl.main_ppo", arguments, environment, work.hardware, folder / "train.log", limit)
    return sampler.samples(), start


def main() -> None:
    args = parse()
    hardware = training.hardware(args.device)
    if args.devices is not None:
        training.check_devices(args.devices, hardware)
    work = Workload(
        **{name: getattr(args, name) for name in Workload.__dataclass_fields__ if name not in ("hardware", "ranks")},
        hardware=hardware,
        ranks=len(args.devices or [""]),
    )
    folder = args.folder.resolve()
    made = time.perf_counter()
    inputs = [sys.executable, str(training.ROOT / "benchmarks/grpo/inputs.py"), str(folder), "--model", args.model]
    inputs += ["--prompts", str(work.prompts * work.total_steps), "--prompt-len", str(work.prompt_len)]
    inputs += [] if args.layers is None else ["--layers", str(args.layers)]
    subprocess.run(inputs, check=True)
    settings = [*overrides(work, folder), *args.overrides]
    print(f"inputs made in {time.perf_counter() - made:.0f} s; overrides: {shlex.join(settings)}", flush=True)
    samples, start = train(work, folder, settings, args.devices, args.time_limit)
    result = report.summarize(work, folder, samples, start) | {"model": args.model, "overrides": settings}
    print(report.table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
