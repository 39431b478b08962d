"""The comments that open each file of configs/: `python -m tests.config_headers` writes them anew.

The figures are those of `megatrain_verl.resources` for the file's batch, with the config.json of its model in
tests/data/configs.
"""

import re
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from transformers import AutoConfig, PretrainedConfig

from megatrain_verl.resources import MARGIN
from megatrain_verl.resources_report import command_line, report
from megatrain_verl.sft import search_path

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "tests" / "data" / "configs"
COMMANDS = {
    "sft": "python -m megatrain_verl.sft --config-dir configs/sft --config-name {name} data.dataset_dir=DIR "
    "data.dataset=NAME",
    "rl": "python -m megatrain_verl.main_ppo --config-dir configs/rl --config-name {name}",
}
# Trained as their Llama twins, see megatrain_verl.llama_twins; their own code is in their repositories.
TWINS = ("internlm/internlm2_5-7b-chat", "baichuan-inc/Baichuan2-7B-Chat")
DATA = {"sft": "", "rl": "; data: python examples/prepare_gsm8k.py data/gsm8k"}


def config_files(kind: str) -> list[Path]:
    """The configurations of configs/sft or configs/rl that name a published model and the memory of a GPU."""
    return sorted(path for path in (ROOT / "configs" / kind).glob("*.yaml") if path.stem.endswith("gb"))


def gpu_gigabytes(path: Path) -> int:
    """Device memory in GB, from the end of the file's name."""
    return int(re.search(r"_(\d+)gb$", path.stem)[1])


def composed(path: Path) -> DictConfig:
    """What Hydra makes of a file."""
    search_path.register()
    overrides = ["data.dataset=rows"] if path.parent.name == "sft" else []
    with initialize_config_dir(str(path.parent), version_base=None):
        return compose(path.stem, overrides=overrides)


def hub_name(path: Path) -> str:
    """The model's name on the Hugging Face hub, from the file's header."""
    return re.search(r"^# Model: (?:hf download )?(\S+/\S+?)( |$)", path.read_text(), re.MULTILINE)[1]


def model_folder(path: Path) -> Path:
    """The folder with the config.json of the file's model."""
    return MODELS / local_name(hub_name(path))


def local_name(hub: str) -> str:
    """The name of the folder from which a model of the hub is trained."""
    return hub.split("/")[1] + ("-llama" if hub in TWINS else "")


def twin(hub: str) -> list[str]:
    """The header's line about the Llama twin that is trained in place of a model of the hub."""
    if hub not in TWINS:
        return []
    return [
        "# Its Llama twin, see docs/weights.md: python -m megatrain_verl.llama_twins to_llama "
        f"models/{hub.split('/')[1]} models/{local_name(hub)}"
    ]


def model_config(path: Path) -> PretrainedConfig:
    """The Hugging Face config of the file's model."""
    return AutoConfig.from_pretrained(model_folder(path))


def figures(path: Path, config: DictConfig) -> dict:
    """The report of `megatrain_verl.resources` for the composed `config` of a file."""
    arguments = ["--model", str(model_folder(path)), "--gpu-memory", f"{gpu_gigabytes(path)}GB"]
    if path.parent.name == "sft":
        tokens, engine, data = config.data.max_token_len_per_gpu, config.engine, config.data
        step = data.train_batch_size * (tokens if data.packing else data.max_length)
        length = data.max_length
    else:
        actor, data = config.actor_rollout_ref.actor, config.data
        tokens, engine = actor.ppo_max_token_len_per_gpu, actor.megatrain
        length = data.max_prompt_length + data.max_response_length
        step = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n * length
        arguments += ["--rollout", "vllm", *(["--reference"] if actor.use_kl_loss else [])]
    arguments += ["--micro-batch-tokens", str(tokens), "--tokens-per-step", str(step), "--seq-len", str(length)]
    arguments += ["--lora-rank", str(lora_rank(config))]
    arguments += ["--dtype", engine.dtype, "--checkpoint-interval", str(engine.checkpoint_interval)]
    return report(command_line().parse_args(arguments))


def lora_rank(config: DictConfig) -> int:
    """Of the adapters that a composed file trains; 0: all parameters are trained."""
    return (config.model if "model" in config else config.actor_rollout_ref.model).lora_rank


def host_gigabytes(result: dict) -> float:
    """Host memory in GB with 5% for the process, layer inputs that the GPU has no room for included."""
    return (result["host_bytes"]["with_margin"] + MARGIN * result["batch"]["spilled_bytes"]) / 1e9


def header(path: Path, result: dict) -> list[str]:
    """The comment lines that a file must open with, of `result`, its `figures`."""
    kind, hub = path.parent.name, hub_name(path)
    return [
        "# " + COMMANDS[kind].format(name=path.stem),
        f"# Model: hf download {hub} --local-dir models/{hub.split('/')[1]} (or set MODEL_PATH){DATA[kind]}",
        *twin(hub),
        f"# One GPU with {gpu_gigabytes(path)} GB, of which {result['gpu_bytes']['total'] / 1e9:.0f} GB must be free, "
        f"and {host_gigabytes(result):,.0f} GB of free host memory (computed by megatrain_verl.resources).",
    ]


def main() -> None:
    """Replace the header of every configuration."""
    for path in [*config_files("sft"), *config_files("rl")]:
        lines = path.read_text().splitlines()
        body = lines[next(index for index, line in enumerate(lines) if not line.startswith("#")) :]
        new = header(path, figures(path, composed(path)))
        path.write_text("\n".join([*new, *body]) + "\n")


if __name__ == "__main__":
    main()
