"""What a run lacks, one line each, before anything starts: `python preflight.py CONFIG_NAME [hydra overrides]`.

Composes the configuration that the run would have, so overrides count. Exit status 1 if something is missing.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "rl"
PACKAGES = ("torch", "transformers", "verl", "vllm", "ray", "hydra", "megatrain_verl")
KL_TERMS = ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")
GB = 10**9


def missing_packages(names: tuple[str, ...] = PACKAGES) -> Iterator[str]:
    """Packages that cannot be imported."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        yield f"package {', '.join(absent)} is not installed: bash examples/install.sh"


def missing_gpu() -> Iterator[str]:
    """A GPU that PyTorch can use. Asked in another process: this one must not hold a CUDA context."""
    question = "import torch; print(torch.cuda.device_count())"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True)
    if answer.returncode != 0 or int(answer.stdout) < 1:
        yield "no GPU: PyTorch finds no CUDA device (see nvidia-smi and CUDA_VISIBLE_DEVICES)"


def missing_model(folder: Path) -> Iterator[str]:
    """The model's folder with its configuration and weights."""
    remedy = "set MODEL_PATH to the folder of a Hugging Face model"
    if not (folder / "config.json").is_file():
        yield f"no model in {folder} (no config.json): {remedy}"
    elif not list(folder.glob("*.safetensors")):
        yield f"no weights in {folder} (no *.safetensors): {remedy}"


def missing_data(files: dict[str, Any]) -> Iterator[str]:
    """Data files by the variable that names them; verl allows a list of files each."""
    for variable, paths in files.items():
        for path in [paths] if isinstance(paths, str) else paths:
            if not Path(path).is_file():
                remedy = f"python examples/prepare_gsm8k.py data/gsm8k, or set {variable}"
                yield f"no data file {path}: {remedy}"


def missing_memory(folder: Path, engine: dict[str, Any], reference: bool) -> Iterator[str]:
    """Host memory for weights, gradients, Adam state and, if the run needs one, the reference policy.

    Args:
        folder: the model.
        engine: options of the streaming engine by name; others are ignored.
        reference: whether the run has a KL term.
    """
    from transformers import AutoConfig

    from megatrain_verl.config import StreamingConfig
    from megatrain_verl.resources import MARGIN, HostPlan, available_host_memory
    from megatrain_verl.streaming.model_plan import plan_model

    known = {field.name for field in fields(StreamingConfig)}
    config = StreamingConfig(**{name: value for name, value in engine.items() if name in known})
    model = plan_model(AutoConfig.from_pretrained(folder), config.freeze)
    plan = HostPlan.of(model, config, trainable=True, reference=reference)
    limit = config.host_memory_gb
    available = available_host_memory()[0] if limit is None else int(limit * 2**30)
    needed = int(plan.total * MARGIN)
    if needed > available:
        cures = "take a host with more memory"
        if "reference" in plan.bytes_by_kind:
            saved = plan.bytes_by_kind["reference"] * MARGIN
            cures += (
                f", or train without KL, {saved / GB:.0f} GB less: {' '.join(f'{term}=False' for term in KL_TERMS)}"
            )
            cures += ", or set actor_rollout_ref.actor.megatrain.reference_folder to a folder on a disk"
        kept = "parameters and their reference" if "reference" in plan.bytes_by_kind else "parameters"
        text = f"host memory: {plan.parameters / 1e9:.2f} billion {kept} need {needed / GB:.0f} GB"
        yield f"{text}, {available / GB:.0f} GB are available: {cures}"


def problems(config_name: str, overrides: list[str]) -> Iterator[str]:
    """Everything that keeps the run from starting, one line each."""
    absent = list(missing_packages())
    yield from absent
    if absent:
        return
    yield from missing_gpu()
    config = _compose(config_name, overrides)
    actor, folder = config.actor_rollout_ref.actor, Path(config.actor_rollout_ref.model.path)
    no_model = list(missing_model(folder))
    yield from no_model
    yield from missing_data({"TRAIN_FILE": config.data.train_files, "TEST_FILE": config.data.val_files})
    if not no_model:
        reference = bool(actor.use_kl_loss or config.algorithm.use_kl_in_reward)
        yield from missing_memory(folder, dict(actor.megatrain), reference)


def _compose(config_name: str, overrides: list[str]) -> Any:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose(config_name, overrides)


if __name__ == "__main__":
    found = list(problems(sys.argv[1], sys.argv[2:]))
    for problem in found:
        print(f"preflight: {problem}", file=sys.stderr)
    sys.exit(1 if found else 0)
