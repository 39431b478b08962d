"""SmolLM2-135M learns sums by GRPO, in runs that go on where the last one ended, beside verl's own FSDP2 engine.

    python benchmarks/grpo_learning.py prepare --model FOLDER      # of examples/quickstart/make_model.py
    python benchmarks/grpo_learning.py train --until 40
    python benchmarks/grpo_learning.py train --until 80            # resumes at 40
    python benchmarks/grpo_learning.py train --until 20 --trainer fsdp
    python benchmarks/grpo_learning.py plot

Data and SFT warm start are the quickstart's. Every 10 steps the 200 held-out sums are answered greedily by vLLM.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
from grpo import options, training
from grpo.report import read_lines

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

ACTOR, ROLLOUT = options.ACTOR, options.ROLLOUT
ACCURACY = "val-core/openai/gsm8k/acc/mean@1"
CONFIGS = ["--config-dir", str(training.ROOT / "configs/rl"), "--config-name", "quickstart"]
PANELS = {
    "critic/rewards/mean": "mean reward of the rollouts",
    ACCURACY: "accuracy on 200 held-out sums",
    "training/rollout_probs_diff_max": "largest difference of a token's\nprobability, rollout and trainer",
    "timing_s/step": "seconds per step",
}


def prepare(folder: Path, model: Path, hardware: str, limit: float) -> None:
    """Write the sums and the model that GRPO starts from."""
    folder.mkdir(parents=True, exist_ok=True)
    make_data = training.ROOT / "examples/quickstart/make_data.py"
    subprocess.run([sys.executable, str(make_data), str(folder / "data")], check=True)
    arguments = ["--config-dir", str(training.ROOT / "configs/sft"), "--config-name", "quickstart"]
    environment = {"QUICKSTART_OUTPUT": str(folder), "QUICKSTART_MODEL": str(model.resolve())}
    training.run("megatrain_verl.sft", arguments, environment, hardware, folder / "sft.log", limit)


def overrides(folder: Path, trainer: str, until: int, hardware: str) -> list[str]:
    """Of configs/rl/quickstart.yaml: larger batches, validation, and checkpoints to resume from."""
    settings = [
        f"hardware={hardware}",
        "data.train_batch_size=32",
        f"{ACTOR}.ppo_mini_batch_size=32",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=256",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=256",
        f"{ROLLOUT}.max_num_seqs=256",
        f"trainer.total_training_steps={until}",
        f"trainer.default_local_dir={folder / trainer}",
        f"trainer.experiment_name=learning_{trainer}",
        f"hydra.run.dir={folder / trainer}",
    ]
    if trainer == "fsdp":
        # verl's FSDP2 cannot build a reference policy on a CPU (it pins memory).
        no_reference = [f"{ACTOR}.use_kl_loss=False"] if hardware == "cpu" else []
        return [*settings, *options.fsdp(hardware), *no_reference, "trainer.save_freq=-1"]
    return [
        *settings,
        f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        f"trainer.val_before_train={not list((folder / trainer).glob('global_step_*'))}",
        "trainer.test_freq=10",
        "trainer.resume_mode=auto",
    ]


def train(folder: Path, trainer: str, until: int, hardware: str, limit: float, more: list[str]) -> None:
    """Go on until step `until` and save there; metrics in a file per run."""
    (model,) = (folder / "sft").glob("global_step_*/huggingface")
    output = folder / trainer
    output.mkdir(exist_ok=True)
    metrics = str(output / f"until_{until:04}.jsonl")
    environment = {"QUICKSTART_OUTPUT": str(folder), "QUICKSTART_SFT_MODEL": str(model)}
    environment["VERL_FILE_LOGGER_PATH"] = metrics
    settings = [*CONFIGS, *overrides(folder, trainer, until, hardware), *more]
    training.run("megatrain_verl.main_ppo", settings, environment, hardware, output / f"until_{until:04}.log", limit)
    print(steps_table(trainer, read_runs(output)))


def read_runs(folder: Path) -> dict[int, dict[str, Any]]:
    """Metrics by step of all runs in `folder`; step 0 has the validation before training."""
    steps: dict[int, dict[str, Any]] = {}
    for file in sorted(folder.glob("until_*.jsonl")):
        for line in read_lines(file):
            steps.setdefault(line["step"], {}).update(line["data"])
    return steps


def steps_table(trainer: str, steps: dict[int, dict[str, Any]]) -> str:
    """A line per step, and the median of the seconds."""
    lines = []
    for step, data in sorted(steps.items()):
        shown = [f"{label.replace(chr(10), ' ')} {data[name]:.4g}" for name, label in PANELS.items() if name in data]
        lines.append(f"{trainer} step {step}: {', '.join(shown)}")
    seconds = [data["timing_s/step"] for step, data in sorted(steps.items()) if "timing_s/step" in data]
    lines.append(f"{trainer}: median of {len(seconds)} steps {statistics.median(seconds):.2f} s")
    return "\n".join(lines)


def plot(folder: Path, png: Path) -> None:
    """The panels of `PANELS` by step, for each trainer that has run."""
    figure, grid = plt.subplots(2, 2, figsize=(10, 6), layout="constrained")
    runs = {trainer: read_runs(folder / trainer) for trainer in options.TRAINERS if (folder / trainer).exists()}
    for axes, (name, label) in zip(grid.flat, PANELS.items(), strict=True):
        for trainer, steps in runs.items():
            points = [(step, data[name]) for step, data in sorted(steps.items()) if name in data]
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", label=trainer)
        axes.set(xlabel="GRPO step", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    for file in sorted((folder / "megatrain").glob("until_*.jsonl"))[:-1]:
        for axes in grid.flat:  # the run ended here, and the next one resumed
            axes.axvline(int(file.stem.removeprefix("until_")) + 0.5, color="gray", linestyle=":")
    grid.flat[-1].legend()
    figure.savefig(png, dpi=110)
    (folder / "steps.json").write_text(json.dumps(runs))
    print("\n".join(steps_table(trainer, steps) for trainer, steps in runs.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("prepare", "train", "plot"))
    parser.add_argument("--folder", type=Path, default=training.ROOT / "outputs/grpo_learning")
    parser.add_argument("--model", type=Path, help="prepare: the folder of the model")
    parser.add_argument("--until", type=int, default=40, help="train: the last step")
    parser.add_argument("--trainer", choices=options.TRAINERS, default="megatrain")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None, help="default: cuda if nvidia-smi is there")
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds after which a run is ended")
    parser.add_argument("--png", type=Path, help="plot: default FOLDER/learning.png")
    parser.add_argument("overrides", nargs="*", help="train: further Hydra overrides")
    args = parser.parse_intermixed_args()
    place, machine = args.folder.resolve(), training.hardware(args.device)
    if args.stage == "prepare":
        prepare(place, args.model, machine, args.time_limit)
    elif args.stage == "train":
        train(place, args.trainer, args.until, machine, args.time_limit, args.overrides)
    else:
        plot(place, args.png or place / "learning.png")
