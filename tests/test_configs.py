"""The shipped configurations: composed by Hydra as their first lines say, with a model that fits what they state."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from transformers import AutoConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import RolloutConfig

from megatrain_verl.config import LoraSettings
from megatrain_verl.resources import HostPlan
from megatrain_verl.sft import options
from megatrain_verl.streaming.model_plan import ModelPlan, plan_model
from megatrain_verl.verl_backend import preflight
from megatrain_verl.verl_backend.config import MegaTrainActorConfig, MegaTrainEngineConfig
from tests import config_headers
from tests.config_headers import ROOT

SFT, RL = config_headers.config_files("sft"), config_headers.config_files("rl")
# Of which the test of the quickstart and the SFT tests make the model and run them.
RUN_BY_TESTS = ["configs/rl/quickstart.yaml", "configs/sft/quickstart.yaml", "configs/sft/smollm2_135m_cpu.yaml"]
FIGURE = re.compile(r"(?<= )[\d,]+(?= GB)")
KV_CACHE = 4e9  # bytes of GPU memory that vLLM should have beside the weights


# Vision towers and many layers take seconds to build, even on the meta device; others like them are tested every day.
SLOW = ("gemma3_27b", "internvl3_8b", "llava_next_7b", "qwen3_vl_4b", "qwen3_next", "glm4_5_air", "qwen2_5_32b")
SLOW += ("qwen2_5_72b", "yi_1_5_9b", "yi_1_5_34b", "llama3_3_70b", "qwen3_32b")


def parameters(paths: list[Path]) -> list[Any]:
    def marks(path: Path) -> list[pytest.MarkDecorator]:
        return [pytest.mark.slow] if path.stem.startswith(SLOW) else []

    return [pytest.param(path, id=path.stem, marks=marks(path)) for path in paths]


@functools.cache
def plan_of(folder: Path, lora_rank: int) -> ModelPlan:
    lora = LoraSettings(lora_rank) if lora_rank else None
    return plan_model(AutoConfig.from_pretrained(folder), lora=lora)


def check_header(path: Path, config: DictConfig, reference: bool) -> dict:
    """The header is that of `config_headers`, its figures are those of the engine's own plan, and the model fits."""
    result = config_headers.figures(path, config)
    expected = config_headers.header(path, result)
    found = path.read_text().splitlines()[: len(expected)]
    remedy = "run `python -m tests.config_headers`"
    assert [FIGURE.sub("", line) for line in found] == [FIGURE.sub("", line) for line in expected], remedy
    stated, needed = (
        [int(figure.replace(",", "")) for figure in FIGURE.findall(lines[-1])] for lines in (found, expected)
    )
    assert stated == pytest.approx(needed, rel=0.1, abs=1.0), remedy
    assert result["fits"]["gpu"] and result["trained_by_this_version"]
    engine = config.engine if path.parent.name == "sft" else config.actor_rollout_ref.actor.megatrain
    plan = plan_of(config_headers.model_folder(path), config_headers.lora_rank(config))
    checked = HostPlan.of(plan, omega_conf_to_dataclass(engine).streaming_config(), trainable=True, reference=reference)
    assert result["host_bytes"]["total"] == pytest.approx(checked.total, rel=0.01)
    return result


@pytest.mark.parametrize("path", parameters(SFT))
def test_sft_configuration_composes_and_states_what_it_needs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_headers.composed(path)
    check_header(path, config, reference=False)
    assert config.model.path == f"models/{config_headers.model_folder(path).name}"
    assert config.trainer.experiment_name == path.stem
    options.prepare(config, "cpu")
    options.check_model(config, config_headers.model_config(path))
    assert isinstance(omega_conf_to_dataclass(config.engine), MegaTrainEngineConfig)


@pytest.mark.parametrize("path", parameters(RL))
def test_rl_configuration_composes_and_states_what_it_needs(path: Path) -> None:
    config = config_headers.composed(path)
    result = check_header(path, config, reference=config.actor_rollout_ref.actor.use_kl_loss)
    assert config.actor_rollout_ref.model.path == f"models/{config_headers.model_folder(path).name}"
    assert config.trainer.experiment_name == path.stem
    preflight.check_options(config)
    assert isinstance(omega_conf_to_dataclass(config.actor_rollout_ref.actor), MegaTrainActorConfig)
    assert isinstance(omega_conf_to_dataclass(config.actor_rollout_ref.rollout), RolloutConfig)
    assert preflight.longest_row(config) <= config_headers.model_config(path).get_text_config().max_position_embeddings
    awake = config.actor_rollout_ref.rollout.gpu_memory_utilization * config_headers.gpu_gigabytes(path) * 1e9
    assert result["vllm_weight_bytes"] + KV_CACHE <= awake, (
        "vLLM's weights do not fit: raise rollout.gpu_memory_utilization"
    )


@pytest.mark.parametrize("name", ["qwen3_5_27b", "gpt_oss_20b"])
def test_script_states_computed_figures(name: str) -> None:
    """Nobody has run them on a host with so much memory."""
    script = (ROOT / "examples" / f"run_{name}_grpo.sh").read_text()
    path = ROOT / "configs" / "rl" / f"{name}_grpo_80gb.yaml"
    assert f'run_grpo.sh" {path.stem} ' in script and "COMPUTED by megatrain_verl.resources, not measured" in script
    result = config_headers.figures(path, config_headers.composed(path))
    seconds = int(re.search(r"takes (\d+) s or", script)[1])
    assert seconds == pytest.approx(result["seconds_per_step"]["step"], rel=0.1)
    gpu, host = (
        int(figure) for figure in re.search(r"with (\d+) GB of GPU memory and (\d+) GB of host", script).groups()
    )
    assert gpu == pytest.approx(result["gpu_bytes"]["total"] / 1e9, rel=0.1)
    assert host == pytest.approx(config_headers.host_gigabytes(result), rel=0.01)


def test_no_configuration_is_without_a_test() -> None:
    files = {str(path.relative_to(ROOT)) for kind in ("sft", "rl") for path in (ROOT / "configs" / kind).glob("*.yaml")}
    assert files == {str(path.relative_to(ROOT)) for path in (*SFT, *RL)} | set(RUN_BY_TESTS)
