"""Models of which vLLM has to be told something, wherever verl copies MODEL_PATH to."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import Llama4TextConfig
from verl.utils import hdfs_io
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config

from megatrain_verl.verl_backend import llama4_rollout, preflight, quantised_rollout
from tests.verl_backend.run_configs import GROUP, STOCK, check, run_config


@pytest.fixture
def hdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], str]]:
    """Gives a folder the URL from which verl copies it, to a folder of its own in `tempfile.gettempdir()`."""
    command = tmp_path / "hdfs"
    command.write_text('#!/bin/sh\ncp -r "/${3#hdfs://}" "$4"\n')  # hdfs dfs -get URL FOLDER
    command.chmod(0o755)
    monkeypatch.setattr(hdfs_io, "_HDFS_BIN_PATH", str(command))
    with tempfile.TemporaryDirectory() as copies:  # sockets are made there too, whose paths must be short
        monkeypatch.setattr(tempfile, "tempdir", copies)
        yield lambda folder: f"hdfs:/{folder}"


@pytest.fixture
def quantised(tiny: HFModelConfig, tmp_path: Path) -> str:
    """The option that makes MODEL_PATH a folder whose config.json names FP8 weights."""
    folder = shutil.copytree(tiny.path, tmp_path / "model")
    text = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(text | {"quantization_config": quantization}))
    return f"actor_rollout_ref.model.path={folder}"


@pytest.mark.parametrize("rollout", [None, "fp8"])
def test_rollout_of_a_quantised_folder_is_not_quantised(
    tiny: HFModelConfig, data: Path, quantised: str, rollout: str | None
) -> None:
    """What reaches vLLM's command line and verl's model config; a rollout that is to be quantised stays so."""
    rollout_options = ("name=vllm", f"quantization={rollout or 'null'}")
    options = [quantised, "+actor_rollout_ref.rollout.engine_kwargs.vllm.seed=7"]
    config = run_config(tiny, data, GROUP, *options, *(f"actor_rollout_ref.rollout.{o}" for o in rollout_options))
    quantised_rollout.adapt(config)
    OmegaConf.resolve(config)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.model).hf_config.quantization_config is None
    engine_kwargs = omega_conf_to_dataclass(config.actor_rollout_ref.rollout).engine_kwargs
    overrides = [] if rollout else ["--hf_overrides", '{"quantization_config": null}']
    assert build_cli_args_from_config(engine_kwargs["vllm"]) == ["--seed", "7", *overrides]


def test_driver_adapts_the_rollout_of_a_quantised_folder_that_verl_copies(
    tiny: HFModelConfig, data: Path, quantised: str, hdfs: Callable[[Path], str]
) -> None:
    option, _, folder = quantised.partition("=")
    config = run_config(tiny, data, STOCK, f"{option}={hdfs(Path(folder))}")
    check(config)
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.quantization_config is None


def test_llama_4_that_vllm_would_run_otherwise_is_refused(tiny: HFModelConfig, data: Path, tmp_path: Path) -> None:
    """Rows have up to 116 tokens; vLLM reads of the option in generation_config.json only."""
    config = run_config(tiny, data, GROUP, "actor_rollout_ref.rollout.name=vllm")
    rollout, file = config.actor_rollout_ref.rollout, tmp_path / "generation_config.json"
    config.actor_rollout_ref.model.path = str(tmp_path)
    on, off = "is True in training .config.json., and False in vLLM", "is False in training .config.json., and True in"
    cases = [  # trained with it, floor_scale, max_model_len, generation_config.json
        (True, 116, 100, None, on),
        (True, 116, 100, True, None),
        (True, 116, None, None, None),  # the model's own limit, above 32,768
        (True, 117, 100, None, None),  # longer than every row
        (False, 116, None, None, off),
        (False, 116, 100, None, None),
        (False, 116, None, False, None),
    ]
    for trained, floor_scale, rollout.max_model_len, written, refused in cases:
        text = Llama4TextConfig(floor_scale=floor_scale, attn_temperature_tuning=trained)
        file.write_text(json.dumps({} if written is None else {"attn_temperature_tuning": written}))
        with nullcontext() if refused is None else pytest.raises(ValueError, match=refused):
            llama4_rollout.check(config, text, str(tmp_path), preflight.longest_row(config))


def test_llama_4_is_checked_in_the_driver_where_verl_has_copied_it_to(
    tiny: HFModelConfig, data: Path, tmp_path: Path, hdfs: Callable[[Path], str]
) -> None:
    architecture = ["Llama4ForCausalLM"]
    Llama4TextConfig(architectures=architecture, hidden_size=64, floor_scale=64).save_pretrained(tmp_path / "model")
    tiny.tokenizer.save_pretrained(tmp_path / "model")
    path = hdfs(tmp_path / "model")
    options = (f"actor_rollout_ref.model.path={path}", "actor_rollout_ref.rollout.max_model_len=128")
    with pytest.raises(ValueError, match=f"attn_temperature_tuning is True in training.*{tempfile.gettempdir()}"):
        check(run_config(tiny, data, GROUP, *options, "actor_rollout_ref.rollout.name=vllm"))
