"""Options of an SFT run: the shipped configurations compose, and wrong ones are refused by name."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import wandb
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from transformers import Qwen2Config
from verl.utils.config import omega_conf_to_dataclass

from megatrain_verl.sft import metrics_file, options, process, search_path
from megatrain_verl.sft.dataset import ChatDataset
from megatrain_verl.verl_backend.config import MegaTrainEngineConfig

CONFIGS = Path(__file__).parents[2] / "configs" / "sft"
# Those for published models and GPUs: tests/test_configs.py.
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.yaml") if not path.stem.endswith("gb"))


@pytest.fixture(autouse=True)
def composing() -> Iterator[None]:
    search_path.register()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        yield


def run_config(*overrides: str) -> DictConfig:
    return compose("megatrain_sft", overrides=["model.path=model", "data.dataset=rows", *overrides])


# ------------------------------------------------------------------------------------------------------- composing


def test_defaults_are_verl_with_this_engine() -> None:
    config = run_config("data.dataset='a, b'", "data.val_size=0.1")
    options.prepare(config, "cpu")
    engine = omega_conf_to_dataclass(config.engine)
    assert isinstance(engine, MegaTrainEngineConfig) and not engine.ref_in_actor
    assert config.trainer.device == "cpu"
    assert config.data.custom_cls.path == f"pkg://{ChatDataset.__module__}"
    assert config.data.train_files == {"names": ["a", "b"], "part": "train"}
    assert config.data.val_files == {"names": ["a", "b"], "part": "held_out"}


def test_other_data_to_evaluate_on() -> None:
    config = run_config("data.dataset=[a]", "data.val_dataset=b")
    options.prepare(config, "cpu")
    assert config.data.train_files == {"names": ["a"], "part": "train"}
    assert config.data.val_files == {"names": ["b"], "part": "all"}


def test_parquet_files_of_verl_keep_verls_class() -> None:
    config = run_config("data.dataset=null", "data.train_files=rows.parquet")
    options.prepare(config, "cpu")
    assert config.data.train_files == "rows.parquet" and config.data.custom_cls.path is None
    assert config.data.truncation == "error"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configurations_compose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_PATH", "model")
    first_line = (CONFIGS / f"{name}.yaml").read_text().splitlines()[0]
    assert f"python -m megatrain_verl.sft --config-dir configs/sft --config-name {name}" in first_line
    config = compose(name, overrides=["data.dataset=rows"])
    options.prepare(config, "cpu")
    assert isinstance(omega_conf_to_dataclass(config.engine), MegaTrainEngineConfig)


# --------------------------------------------------------------------------------------------------------- refused

REFUSED = {
    "no data": (["data.dataset=null"], "set data.dataset to names in dataset_info.json"),
    "two kinds of data": (["data.train_files=a"], "set data.train_files and data.val_files to null"),
    "two ways to evaluate": (["data.val_size=2", "data.val_dataset=b"], "val_dataset and data.val_size exclude"),
    "nothing to evaluate on": (["trainer.test_freq=2"], "set data.val_size or data.val_dataset"),
    "nothing per epoch": (["trainer.test_freq=after_each_epoch"], "set data.val_size or data.val_dataset"),
    "negative share": (["data.val_size=-1"], "data.val_size must be a number, at least 0, got -1"),
    "patience without evaluations": (["trainer.early_stop_patience=2"], "set trainer.test_freq to evaluate"),
    "padding": (["data.pad_mode=right"], "data.pad_mode must be no_padding"),
    "packing": (["data.packing=true", "data.use_dynamic_bsz=False"], "data.packing needs data.use_dynamic_bsz=True"),
    "packing of other data": (
        ["data.packing=true", "data.dataset=null", "data.train_files=a"],
        "data.packing packs the rows of data.dataset",
    ),
    "micro-batch": (["data.max_token_len_per_gpu=100"], "max_token_len_per_gpu=100 is less than data.max_length=2048"),
    "fixed micro-batch": (
        ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=5"],
        "must be a multiple of data.micro_batch_size_per_gpu=5",
    ),
    "rows on several GPUs": (["trainer.devices=[0,1,2]"], "train_batch_size=32 must be a multiple of the 3 devices"),
    "schedule": (["optim.lr_scheduler_type=linaer"], "must be one of constant, cosine, linear, .*, got 'linaer'"),
    "several hosts": (["trainer.nnodes=2"], "runs on the GPUs of one host"),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_options_that_cannot_work_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.prepare(run_config(*overrides), "cpu")


def test_rows_longer_than_the_model_takes_are_refused() -> None:
    model = Qwen2Config(max_position_embeddings=1024)
    config = run_config()
    options.prepare(config, "cpu")
    with pytest.raises(ValueError, match="data.max_length=2048 exceeds the model's max_position_embeddings=1024"):
        options.check_model(config, model)
    options.check_model(run_config("data.max_length=1024", "trainer.device=cpu"), model)


@pytest.mark.parametrize(("key", "reason"), [(None, "there is no key"), ("short", "WANDB_API_KEY invalid")])
def test_wandb_without_a_key_is_refused_at_the_start(
    key: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    config = run_config("trainer.logger=[console,wandb]")
    try:
        with pytest.raises(ValueError, match=f"trainer.logger has wandb, but {reason}.*set WANDB_MODE=offline"):
            options.prepare(config, "cpu")
        wandb.teardown()  # it has read the environment
        monkeypatch.setenv("WANDB_MODE", "offline")
        options.prepare(config, "cpu")
    finally:
        wandb.teardown()


def test_machine_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.device() == "cpu"
    monkeypatch.setattr(process, "get_device_name", lambda: "cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="set the environment variable VERL_PLATFORM=cpu"):
        process.device()


# ---------------------------------------------------------------------------------------------------- metrics file


def lines(*steps: int, loss: float = 0.0) -> bytes:
    return b"".join(orjson.dumps({"step": step, "data": {"train/loss": loss}}) + b"\n" for step in steps)


def test_metrics_of_a_resumed_run_follow_those_before_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(1, 2, 3) + b'{"step":4,"da')  # killed while writing
    with metrics_file.continued(path, 2):
        path.write_bytes(lines(3, 4, loss=1.0))
    assert path.read_bytes() == lines(1, 2) + lines(3, 4, loss=1.0)
    assert list(tmp_path.iterdir()) == [path]


KILLED_RUN = """
import os, pathlib
from megatrain_verl.sft import metrics_file
path = pathlib.Path("metrics.jsonl")
with metrics_file.continued(path, 2):
    path.write_bytes(bytes.fromhex("{written}"))
    os._exit(9)
"""


def test_metrics_survive_a_run_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(1, 2, 3))
    script = KILLED_RUN.format(written=lines(3, loss=1.0).hex())
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=300).returncode == 9
    with metrics_file.continued(path, 3):
        path.write_bytes(lines(4, loss=2.0))
    assert path.read_bytes() == lines(1, 2) + lines(3, loss=1.0) + lines(4, loss=2.0)
    assert list(tmp_path.iterdir()) == [path]


def test_metrics_stay_when_the_resumed_run_writes_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(1, 2, 3))
    with metrics_file.continued(path, 2):
        pass
    assert path.read_bytes() == lines(1, 2)


def test_metrics_of_a_new_run_replace_older_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(1, 2, 3))
    with metrics_file.continued(path, 0):
        path.write_bytes(lines(1, loss=1.0))
    assert path.read_bytes() == lines(1, loss=1.0)


def test_devices_are_among_those_that_cuda_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config("trainer.devices=[1,0]")
    options.prepare(config, "cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert options.devices(config) == ["3", "2"]
    config.trainer.devices = [2, 3]
    with pytest.raises(ValueError, match="device 3 is asked for, but 2 are here.*lower the numbers in trainer.devices"):
        options.devices(config)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert options.devices(config) == ["2", "3"]
    config.trainer.devices = None
    assert options.devices(config) == ["0", "1"]
