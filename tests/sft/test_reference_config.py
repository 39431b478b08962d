"""`--config FILE`: configurations of the reference implementation, and what is wrong with them said by name."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
import pytest
import yaml
from omegaconf import DictConfig

from megatrain_verl.sft import known_options, options, reference_config, search_path

LLAMA = """
model:
  name: "meta-llama/Llama-3.1-8B-Instruct"
  dtype: "bfloat16"
  device: 0
  attn_implementation: "flash_attention_2"
  trust_remote_code: false

dataset:
  path: "dataset/Math/train"
  max_seq_len: 1024
  num_workers: 4
  query_field: "query"
  response_field: "answer"

training:
  batch_size: 148
  gradient_accumulation_steps: 1
  num_steps: 1000
  learning_rate: 2.0e-5
  weight_decay: 0.01
  max_grad_norm: 0.5
  seed: 42

optimizer:
  type: "deepspeed_adam"
  beta1: 0.9
  beta2: 0.95
  eps: 1.0e-6

memory:
  checkpoint_interval: 4
  num_grad_slabs: 12

logging:
  log_interval: 1
  enable_timing: true
"""
NEXT = """
model: {name: Qwen/Qwen3-Next-80B-A3B-Instruct, device: 0}
dataset: {name: "alpaca_en_demo, identity", dataset_dir: my data, max_seq_len: 16384, train_on_prompt: true}
training: {batch_size: 16, gradient_accumulation_steps: 4, num_steps: 200, learning_rate: 5e-6}
memory: {checkpoint_interval: 2, num_grad_slabs: 8}
"""
SHORT = """
model: {name: model, dtype: float32}
dataset:
  name: rows
  system_prompt: |
    It's {brief}, "short", [a, b] = ${c} \\
training:
logging: {log_interval: 1}
"""


@pytest.fixture(autouse=True)
def composing() -> Iterator[None]:
    search_path.register()
    with hydra.initialize_config_module("megatrain_verl.sft.conf", version_base=None):
        yield


def run_config(folder: Path, text: str, *overrides: str) -> DictConfig:
    """What a run would get: composed and checked."""
    (folder / "run_1.yaml").write_text(text)
    arguments = reference_config.expand(["--config", str(folder / "run_1.yaml"), *overrides])
    config = hydra.compose("megatrain_sft", arguments)
    options.prepare(config, "cpu")
    return config


def test_file_with_a_path_of_rows(tmp_path: Path) -> None:
    config = run_config(tmp_path, LLAMA)
    columns = {"prompt": "query", "response": "answer"}
    assert config.model.path == "meta-llama/Llama-3.1-8B-Instruct" and config.model.trust_remote_code is False
    assert config.data.train_files.names == [{"file_name": "dataset/Math/train", "columns": columns}]
    assert (config.data.max_length, config.data.truncation, config.data.train_batch_size) == (1024, "right", 148)
    assert (config.trainer.total_training_steps, config.trainer.seed, config.data.seed) == (1000, 42, 42)
    optim = config.optim
    assert (optim.lr, optim.weight_decay, optim.clip_grad, optim.betas) == (2e-5, 0.01, 0.5, [0.9, 0.95])
    assert (optim.lr_scheduler_type, optim.lr_warmup_steps_ratio) == ("constant", 0)
    assert optim.override_optimizer_config == {"eps": 1e-6}
    engine = config.engine
    assert (engine.dtype, engine.attn_implementation) == ("bfloat16", "auto")
    assert (engine.checkpoint_interval, engine.num_grad_slabs) == (4, 12)
    assert config.trainer.default_local_dir == "outputs/sft/run_1"


def test_file_with_accumulated_steps_and_the_references_defaults(tmp_path: Path) -> None:
    config = run_config(tmp_path, NEXT)
    assert config.data.train_files.names == ["alpaca_en_demo", "identity"] and config.data.dataset_dir == "my data"
    assert (config.data.train_batch_size, config.trainer.total_training_steps, config.optim.lr) == (64, 50, 5e-6)
    assert config.data.train_on_prompt and config.data.max_token_len_per_gpu == 16384
    assert (config.trainer.seed, config.optim.clip_grad, config.model.trust_remote_code) == (42, 1.0, False)


def test_text_of_any_kind_arrives_as_it_is(tmp_path: Path) -> None:
    config = run_config(tmp_path, SHORT)
    assert config.data.system_prompt == 'It\'s {brief}, "short", [a, b] = ${c} \\\n'
    assert (config.engine.dtype, config.data.train_batch_size, config.trainer.total_training_steps) == (
        "float32",
        96,
        100,
    )


def test_overrides_on_the_command_line_come_last(tmp_path: Path) -> None:
    assert run_config(tmp_path, LLAMA, "data.train_batch_size=2", "optim.lr=1").data.train_batch_size == 2


WRONG = {
    "section": (LLAMA.replace("optimizer:", "optimiser:"), "'optimiser' is not a section of .*did you mean optimizer"),
    "key": (
        LLAMA.replace("learning_rate", "learing_rate"),
        "'learing_rate' is not a key of section training of .*run_1.yaml; did you mean learning_rate",
    ),
    "number": (LLAMA.replace("148", "many"), "run_1.yaml: training.batch_size must be a whole number, got 'many'"),
    "switch": (NEXT.replace("true}", "1}"), "dataset.train_on_prompt must be true or false, got 1"),
    "rate": (NEXT.replace("5e-6", "[1]"), r"training.learning_rate must be a number, got \[1\]"),
    "type": (LLAMA.replace("bfloat16", "float16"), "model.dtype must be one of bfloat16, float32, got 'float16'"),
    "optimizer": (LLAMA.replace("deepspeed_adam", "sgd"), "optimizer.type must be one of deepspeed_adam, adamw"),
    "no model": (NEXT.replace("name: Qwen", "dtype: bfloat16 #"), "run_1.yaml.*"),
    "no data": ("model: {name: m}", "run_1.yaml: dataset.name or dataset.path is missing"),
    "steps": (NEXT.replace("num_steps: 200", "num_steps: 3"), "gradient_accumulation_steps must be between 1 and"),
    "vision": (LLAMA + "vlm: {freeze_projector: true}", "section vlm is not translated; leave it out .* engine.freeze"),
    "not YAML": ("model: [", "run_1.yaml is not YAML: .*line 1"),
    "list": ("- model", "run_1.yaml must have the sections model, dataset"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG.keys())
def test_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_config(tmp_path, text)


def test_keys_that_hydra_files_invent_are_named() -> None:
    known = hydra.compose("megatrain_sft")
    config = hydra.compose(
        "megatrain_sft", ["+data.max_lenght=5", "+data.apply_chat_template_kwargs.enable_thinking=1"]
    )
    with pytest.raises(ValueError, match="'max_lenght' is not a key of the section data; did you mean max_length"):
        known_options.compare(config, known, [])
    known_options.compare(config, known, ["data.max_lenght"])


def test_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"modle": {"name": "m"}}))
    command = [sys.executable, "-m", "megatrain_verl.sft", "--config=run.yaml"]
    run = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=120)
    assert run.returncode == 1 and run.stderr == ("error: 'modle' is not a section of run.yaml; did you mean model?\n")
