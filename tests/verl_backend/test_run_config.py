"""Whole verl configurations: composed by Hydra as the three commands do it, and checked in the driver."""

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from torch import nn
from transformers import T5Config
from transformers.utils import import_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tracking import Tracking
from verl.workers.config import HFModelConfig

import megatrain_verl.verl_backend.conf
from megatrain_verl import main_ppo as command
from megatrain_verl.streaming import linear_attention
from megatrain_verl.verl_backend import preflight
from megatrain_verl.verl_backend.config import MegaTrainActorConfig, MegaTrainEngineConfig
from tests.verl_backend.run_configs import ACTOR, GROUP, STOCK, check, run_config

# ------------------------------------------------------------------------------------------------------- composing


def test_yaml_lists_every_option_with_its_default() -> None:
    folder = Path(megatrain_verl.verl_backend.conf.__file__).parent
    listed = yaml.safe_load((folder / "engine" / "megatrain.yaml").read_text())
    target, defaults = listed.pop("_target_"), MegaTrainEngineConfig()
    assert target.endswith(MegaTrainEngineConfig.__name__)
    set_by_verl = {"use_dynamic_bsz", "use_fused_kernels", "use_remove_padding", "router_replay", "_target_"} | {
        f"{kind}{name}_per_gpu" for kind in ("", "infer_") for name in ("max_token_len", "micro_batch_size")
    }
    assert set(listed) == {field.name for field in fields(MegaTrainEngineConfig)} - set_by_verl
    listed.pop("ref_in_actor")  # True for the RL actor, whose group sets it; an SFT engine needs no reference
    assert {name: getattr(defaults, name) for name in listed} == listed


def test_parts_of_experts_leave_no_layer_on_the_device() -> None:
    streaming = MegaTrainEngineConfig(expert_parts=2).streaming_config()
    assert (streaming.expert_parts, streaming.most_resident_layers) == (2, 0)


@pytest.mark.parametrize(
    "overrides",
    [
        [GROUP, f"{ACTOR}.megatrain.checkpoint_interval=2", f"{ACTOR}.megatrain.dtype=float32"],
        [STOCK, f"+{ACTOR}.megatrain.checkpoint_interval=2", f"+{ACTOR}.megatrain.dtype=float32"],
    ],
    ids=["group", "stock command"],
)
def test_both_commands_reach_the_engine(tiny: HFModelConfig, data: Path, overrides: list[str]) -> None:
    add = "+" if STOCK in overrides else ""
    folder = f"{add}{ACTOR}.megatrain.reference_folder=${{trainer.default_local_dir}}"
    config = run_config(tiny, data, *overrides, folder)
    check(config)
    OmegaConf.resolve(config)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert type(actor) is MegaTrainActorConfig and actor.engine.strategy == actor.strategy == "megatrain"
    assert (actor.engine.checkpoint_interval, actor.engine.dtype, actor.engine.seed) == (2, "float32", 42)
    assert actor.engine.ref_in_actor and not actor.engine.forward_only
    assert actor.engine.reference_folder == config.trainer.default_local_dir
    assert actor.engine.update_weights_bucket_megabytes == 16
    assert actor.engine.gpu_memory_utilization == config.actor_rollout_ref.rollout.gpu_memory_utilization == 0.5
    ref = config.actor_rollout_ref.ref.megatrain
    assert ref.forward_only and ref.dtype == "float32"


@pytest.mark.parametrize("command", [GROUP, STOCK])
def test_reference_weights_are_kept_only_for_a_kl_term(tiny: HFModelConfig, data: Path, command: str) -> None:
    for use_kl in (True, False):
        config = run_config(tiny, data, command)
        check(config, use_kl)
        assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine.ref_in_actor is use_kl


def test_own_command_composes_the_group() -> None:
    with initialize_config_module("megatrain_verl.verl_backend.conf", version_base=None):
        config = compose("megatrain_ppo")
    assert config.actor_rollout_ref.actor.strategy == "megatrain" and "megatrain" in config.actor_rollout_ref.actor


def test_other_strategies_are_not_touched(tiny: HFModelConfig, data: Path) -> None:
    config = run_config(tiny, data, "data.train_files=missing.parquet")
    before = OmegaConf.to_container(config)
    check(config)
    assert OmegaConf.to_container(config) == before


@pytest.mark.parametrize("names", ["console,file", "console,file,tensorboard"])
def test_loggers_of_this_packages_command_write_to_the_output_folder(
    tiny: HFModelConfig, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    """verl's file logger would make a folder `megatrain_verl`, as the project is called, in the working directory."""
    variables = ("VERL_FILE_LOGGER_PATH", "TENSORBOARD_DIR", "WANDB_DIR")
    for variable in (*variables, "VERL_FILE_LOGGER_ROOT"):
        monkeypatch.setenv(variable, "as before")  # at the end
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_DIR", "/elsewhere")
    logged = []

    def log(config: DictConfig) -> None:
        tracking = Tracking("megatrain_verl", "run", list(config.trainer.logger))
        tracking.log({"loss": 1.0}, step=1)
        logged.extend(os.environ[variable] for variable in variables)

    monkeypatch.setattr(command.main_ppo, "main", SimpleNamespace(__wrapped__=log))
    loggers = f"trainer.logger=[{names}]"
    command.main.__wrapped__(run_config(tiny, data, GROUP, loggers, "trainer.default_local_dir=outputs/run"))
    (metrics,) = (tmp_path / "outputs" / "run").glob("metrics-*.jsonl")
    assert json.loads(metrics.read_text()) == {"step": 1, "data": {"loss": 1.0}}
    assert logged == [str(metrics), str(tmp_path / "outputs" / "run" / "tensorboard"), "/elsewhere"]
    assert os.listdir(tmp_path) == ["outputs"] and os.path.exists(logged[1]) == ("tensorboard" in names)


# ------------------------------------------------------------------------------------------- refused in the driver

LORA = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=True"]
REFUSED = {
    "unknown option": ([GROUP, f"+{ACTOR}.megatrain.checkpoint_intervall=2"], "did you mean checkpoint_interval"),
    "unknown option, stock": ([STOCK, f"+{ACTOR}.megatrain.dtypee=1"], "did you mean dtype"),
    "unknown actor option": ([STOCK, f"+{ACTOR}.use_kl_los=True"], "did you mean use_kl_loss"),
    "dtype": ([GROUP, f"{ACTOR}.megatrain.dtype=float16"], "dtype must be one of bfloat16, float32"),
    "attention": ([GROUP, f"{ACTOR}.megatrain.attn_implementation=xformers"], "attn_implementation must be one of"),
    "attention here": ([GROUP, f"{ACTOR}.megatrain.attn_implementation=varlen"], "varlen runs in bfloat16 on CUDA"),
    "optimizer": ([GROUP, f"{ACTOR}.optim.optimizer=Adam"], "Adam of torch.optim is not supported"),
    "host memory": (
        [GROUP, f"{ACTOR}.megatrain.host_memory_gb=0.001"],
        "parameters need .* GiB of host memory.*GiB are available .host_memory_gb.*weight .*exp_avg .*What helps",
    ),
    "host memory of both engines": (
        [
            GROUP,
            f"{ACTOR}.megatrain.host_memory_gb=0.001",
            f"{ACTOR}.megatrain.ref_in_actor=False",
            f"{ACTOR}.use_kl_loss=True",
        ],
        "reference engine",
    ),
    "reference in memory": (
        [GROUP, f"{ACTOR}.megatrain.reference_folder=/dev/shm", f"{ACTOR}.use_kl_loss=True"],
        r"reference_folder=/dev/shm: it is in memory .tmpfs.; name a folder on a fast disk",
    ),
    "reference of another engine": (
        [
            GROUP,
            f"{ACTOR}.megatrain.reference_folder=/absent",
            f"{ACTOR}.megatrain.ref_in_actor=False",
            f"{ACTOR}.use_kl_loss=True",
        ],
        "reference_folder is for the actor's own reference: set ref_in_actor=true",
    ),
    "reference of adapters": (
        [GROUP, *LORA, f"{ACTOR}.megatrain.reference_folder=/absent", f"{ACTOR}.use_kl_loss=True"],
        "reference_folder: with LoRA the reference is the model without adapters",
    ),
    "reference for several GPUs": (
        [
            GROUP,
            f"{ACTOR}.megatrain.reference_folder=/absent",
            "trainer.n_gpus_per_node=2",
            f"{ACTOR}.use_kl_loss=True",
        ],
        "reference_folder works with one GPU, not with 2",
    ),
    "offload": ([GROUP, f"{ACTOR}.megatrain.param_offload=False"], "param_offload=False is not possible"),
    "asynchronous save": ([GROUP, f"{ACTOR}.checkpoint.async_save=True"], "async_save=True is not supported"),
    "contents": ([GROUP, f"{ACTOR}.checkpoint.save_contents=[modell]"], "unknown option modell.*did you mean model"),
    "half a state": ([GROUP, f"{ACTOR}.checkpoint.save_contents=[model]"], "model and optimizer"),
    "several hosts": ([GROUP, "trainer.nnodes=2"], "runs on the GPUs of one host.*set trainer.nnodes=1"),
    "legacy trainer": ([GROUP, "trainer.use_v1=False"], "trainer.use_v1=True"),
    "separate rollout": ([GROUP, "trainer.v1.trainer_mode=separate_async"], "separate_async is not supported"),
    "weight transfer": ([GROUP, "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"], "backend=naive"),
    "LoRA unmerged": ([GROUP, "actor_rollout_ref.model.lora_rank=8"], "actor_rollout_ref.model.lora.merge=True"),
    "no adapter to save": ([GROUP, f"+{ACTOR}.checkpoint.save_lora_only=True"], "needs model.lora_rank above 0"),
    "adapter not saved": (
        [GROUP, *LORA, f"+{ACTOR}.checkpoint.save_lora_only=True", f"{ACTOR}.checkpoint.save_contents=[extra]"],
        "hf_model in checkpoint.save_contents",
    ),
    "LoRA of Megatron": ([GROUP, "actor_rollout_ref.model.lora.rank=8"], "set model.lora_rank"),
    "adapter to go on from": ([GROUP, "actor_rollout_ref.model.lora_adapter_path=x"], "lora_adapter_path is not supp"),
    "LoRA on the output": (
        [GROUP, *LORA, "actor_rollout_ref.model.target_modules=[lm_head]"],
        "output matrix lm_head is not supported",
    ),
    "sequence parallelism": ([STOCK, f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"], "ulysses"),
    "greedy sampling": ([GROUP, "actor_rollout_ref.rollout.temperature=0"], "temperature must be positive"),
    "rows beyond the model": ([GROUP, "data.max_prompt_length=120"], "136 exceeds the model's max_position_embeddings"),
    "rows beyond the limit": ([GROUP, f"{ACTOR}.megatrain.max_seq_len=99"], "116 exceeds .*max_seq_len = 99"),
    "token budget": (
        [GROUP, f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=100"],
        "ppo_max_token_len_per_gpu=100 is less than",
    ),
    "prompt over the limit": ([GROUP, "data.max_prompt_length=60"], "1 of 8 prompts, the first in row 5.*filter_over"),
    "too few prompts": (
        [GROUP, "data.max_prompt_length=60", "data.filter_overlong_prompts=True", "data.train_batch_size=8"],
        "has 7 usable prompts .* at least 8",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_before_anything_starts(tiny: HFModelConfig, data: Path, overrides: list[str], message: str) -> None:
    with pytest.raises((ValueError, InstantiationException), match=f"(?s){message}"):
        check(run_config(tiny, data, *overrides))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty.parquet", "has no rows"),
        ("empty.jsonl", "is empty"),
        ("no_rows.json", "has no rows"),
        ("absent.parquet", "does not exist"),
        ("broken.json", r"row 2 \(line 2, column 13\): not JSON"),
        ("column.parquet", "has no column prompt, but question: set data.prompt_key"),
        ("no_messages.parquet", r"row 7: column prompt .* must be a list of messages .*got '\[\]'"),
        ("images.parquet", r"has images in column images .* verl has no processor"),
        ("text.parquet", r"row 0: column prompt .* must be a list of messages .*got '2 \+ 2\?'"),
    ],
)
def test_prompt_files_are_read_before_anything_starts(tiny: HFModelConfig, data: Path, name: str, message: str) -> None:
    for option in ("train_files", "val_files"):
        with pytest.raises(ValueError, match=f"data.{option}.*{name}.*{message}"):
            check(run_config(tiny, data, GROUP, f"data.{option}={data / name}"))


def test_bad_line_is_named_among_good_files(tiny: HFModelConfig, data: Path) -> None:
    files = f"data.train_files=[{data}/train.parquet,{data}/broken.json]"
    with pytest.raises(ValueError, match=r"data.train_files: .*broken.json, row 2 \(line 2"):
        check(run_config(tiny, data, GROUP, files))


def test_long_prompts_may_be_cut(tiny: HFModelConfig, data: Path, caplog: pytest.LogCaptureFixture) -> None:
    check(run_config(tiny, data, GROUP, "data.max_prompt_length=60", "data.truncation=left"))
    assert "dropped" not in caplog.text


def test_long_prompts_are_dropped_and_counted(
    tiny: HFModelConfig, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(run_config(tiny, data, GROUP, "data.max_prompt_length=60", "data.filter_overlong_prompts=True"))
    assert "train.parquet: dropped 1 of 8 prompts, longer than data.max_prompt_length=60 tokens" in caplog.text


def test_dropping_every_prompt_is_refused(tiny: HFModelConfig, data: Path) -> None:
    for option in ("train_files", "val_files"):
        files = (f"data.{option}={data}/long.parquet", "data.max_prompt_length=60", "data.filter_overlong_prompts=True")
        with pytest.raises(ValueError, match=f"data.{option} = .*long.parquet has 0 usable prompts"):
            check(run_config(tiny, data, GROUP, *files))


def test_encoder_decoder_model_is_refused(tiny: HFModelConfig, data: Path, tmp_path: Path) -> None:
    T5Config(architectures=["T5ForConditionalGeneration"], vocab_size=100, d_model=8).save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="t5 is an encoder-decoder model"):
        check(run_config(tiny, data, GROUP, f"actor_rollout_ref.model.path={tmp_path}"))


def test_kernels_are_checked_in_the_driver(tiny: HFModelConfig, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_attention, "check_kernels", refuse_layers)
    with pytest.raises(ValueError, match="refused: Qwen2DecoderLayer"):
        check(run_config(tiny, data, GROUP))


def test_the_driver_plans_without_importing_kernels(
    tiny: HFModelConfig, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their import takes memory of the GPU (see tests/families/test_linear_attention.py)."""
    available, plan_model = [], preflight.plan_model
    monkeypatch.setattr(import_utils, "is_flash_linear_attention_available", lambda: True)
    monkeypatch.setattr(
        preflight,
        "plan_model",
        lambda *args: available.append(import_utils.is_flash_linear_attention_available()) or plan_model(*args),
    )
    check(run_config(tiny, data, GROUP))
    assert available == [False]


def refuse_layers(layers: list[nn.Module]) -> None:
    """As a GPU with kernels that compute wrong gradients."""
    raise ValueError(f"refused: {type(layers[0]).__name__}")


def test_weight_that_exceeds_the_transfer_buffer_is_refused(
    tiny: HFModelConfig, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "MIB", 1 << 10)
    bucket = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    with pytest.raises(ValueError, match=f"embed_tokens.weight has 33152 bytes.*set {bucket}=33 or more"):
        check(run_config(tiny, data, GROUP))


def test_shared_memory_must_take_the_transfer_buffer(tiny: HFModelConfig, data: Path) -> None:
    bucket = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    with pytest.raises(ValueError, match="/dev/shm"):
        check(run_config(tiny, data, GROUP, f"{bucket}={1 << 30}"))
    fits_once = f"{bucket}={shutil.disk_usage('/dev/shm').free * 2 // 3 >> 20}"
    check(run_config(tiny, data, GROUP, fits_once))
    with pytest.raises(ValueError, match="/dev/shm"):  # each rank has a buffer
        check(run_config(tiny, data, GROUP, fits_once, "trainer.n_gpus_per_node=2"))
